//! Pools of nodes, and when one of them takes over from the others.

use super::load::Expected;
use super::node::{Health, Node};
use crate::PoolName;

/// The pools that a sandbox may run in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pools<'a> {
    /// Any.
    #[default]
    All,
    /// This one.
    Only(&'a PoolName),
    /// Any other.
    AllBut(&'a PoolName),
}

impl Pools<'_> {
    /// Whether a pool is one of them.
    pub fn has(self, pool: &PoolName) -> bool {
        match self {
            Self::All => true,
            Self::Only(one) => one == pool,
            Self::AllBut(one) => one != pool,
        }
    }
}

/// How much of some nodes is in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
    /// Memory in use, MiB.
    pub memory_used_mib: u64,
    /// Memory there is, MiB.
    pub memory_mib: u64,
    /// Sandboxes, whatever their state.
    pub sandboxes: u64,
    /// Most sandboxes that the nodes take.
    pub sandboxes_max: u64,
}

impl Filled {
    /// Of those of the nodes that take sandboxes, with what was sent there since they reported. What a node has that is lost, cordoned
    /// or draining is no room.
    pub fn of<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        let mut all = Self::default();
        for node in nodes {
            let report = node.report();
            if node.health() == Health::Lost || report.cordoned || report.draining {
                continue;
            }
            all.memory_used_mib += node.memory_used_mib();
            all.memory_mib += report.memory_mib;
            all.sandboxes += node.sandboxes();
            all.sandboxes_max += report.sandboxes_max;
        }
        all
    }

    /// One more was sent to one of them.
    pub fn placed(&mut self, expected: Expected) {
        self.memory_used_mib += expected.memory_mib;
        self.sandboxes += 1;
    }

    /// The greater of the shares of memory and of counts that are in use, 0 to 1; 1 where there is nothing to use. Either that runs out
    /// ends what can be placed. Pressure on processors is no such share: of many cores some process waits long before half of them are
    /// busy, and a second of many starts would look like a full pool. A pool whose nodes refuse for it is full by their word.
    pub fn utilisation(&self) -> f64 {
        let share = |used: u64, all: u64| if all == 0 { 1.0 } else { (used as f64 / all as f64).min(1.0) };
        share(self.memory_used_mib, self.memory_mib).max(share(self.sandboxes, self.sandboxes_max))
    }
}

/// When a pool takes over from all others, its homes.
#[derive(Debug, Clone, PartialEq)]
pub struct Burst {
    /// The pool that does.
    pub pool: PoolName,
    /// The utilisation of the others above which it does, 0 to 1.
    pub above: f64,
    /// The share of the creates that could run there which then go there, above 0 and up to 1.
    pub share: f64,
}

impl Burst {
    /// Utilisation above which the pool takes over, when nothing is said: as in the original system.
    pub const ABOVE: f64 = 0.8;
    /// What share it then takes, when nothing is said: what the pool of the original system takes of the overflow. The homes still have
    /// a fifth of their room, which costs nothing more; what they refuse comes on top.
    pub const SHARE: f64 = 0.3;

    /// Whether a create that could run in the pool goes there at this utilisation of the others. `chance` gives a number of at least 0
    /// and below 1, and is asked above the threshold only.
    pub fn diverts(&self, utilisation: f64, chance: impl FnOnce() -> f64) -> bool {
        utilisation > self.above && chance() < self.share
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Report, Tries, Wanted, choose};
    use super::*;

    fn node(number: usize, pool: &str, used_mib: u64, sandboxes: u64) -> Node {
        let mut node = Node::new(format!("n{number}").parse().unwrap());
        let report = Report {
            pool: pool.parse().unwrap(),
            backends: ["container".to_owned()].into(),
            memory_mib: 1000,
            memory_available_mib: 1000 - used_mib,
            sandboxes,
            sandboxes_max: 10,
            ..Report::default()
        };
        node.reported(report, 0);
        node
    }

    #[test]
    fn what_is_asked_for_keeps_sandboxes_out_of_other_pools() {
        let nodes = [node(1, "onprem", 900, 9), node(2, "cloud", 0, 0), node(3, "edge", 800, 8)];
        let cloud: PoolName = "cloud".parse().unwrap();
        let chosen = |pools: Pools<'_>| {
            let wanted = Wanted { backend: "container", pools, ..Wanted::default() };
            choose(&nodes, &wanted, &mut Tries::default(), |_| 0)
        };
        assert_eq!(chosen(Pools::All), Some(1));
        assert_eq!(chosen(Pools::Only(&cloud)), Some(1));
        assert_eq!(chosen(Pools::AllBut(&cloud)), Some(2));
        let none: PoolName = "none".parse().unwrap();
        assert_eq!(chosen(Pools::Only(&none)), None);
    }

    #[test]
    fn the_scarcer_of_memory_and_counts_is_what_is_used() {
        let utilisation = |nodes: &[Node]| Filled::of(nodes).utilisation();
        assert_eq!(utilisation(&[node(1, "a", 900, 1), node(2, "a", 100, 1)]), 0.5);
        assert_eq!(utilisation(&[node(1, "a", 900, 7), node(2, "a", 100, 9)]), 0.8);
        let mut cordoned = node(2, "a", 0, 0);
        cordoned.reported(Report { cordoned: true, ..cordoned.report().clone() }, 0);
        assert_eq!(utilisation(&[node(1, "a", 900, 1), cordoned.clone()]), 0.9, "its room is none");
        assert_eq!(utilisation(&[cordoned]), 1.0);
        let mut sent = node(1, "a", 0, 0);
        sent.placed(1, Expected { memory_mib: 40, cpu_millis: 0 });
        assert_eq!(utilisation(&[sent]), 0.1, "what was sent counts");
    }

    #[test]
    fn tries_in_one_pool_leave_those_of_the_next() {
        let full: Vec<Node> =
            (0..20).map(|number| node(number, if number < 10 { "a" } else { "b" }, 0, 0)).collect();
        let (a, b): (PoolName, PoolName) = ("a".parse().unwrap(), "b".parse().unwrap());
        let mut tries = Tries::default();
        let asked = |pool: &PoolName, tries: &mut Tries| {
            let wanted = Wanted { backend: "container", pools: Pools::Only(pool), ..Wanted::default() };
            std::iter::from_fn(|| choose(&full, &wanted, tries, |_| 0)).count()
        };
        assert_eq!(asked(&a, &mut tries), super::super::TRIES_MAX);
        assert_eq!(asked(&b, &mut tries), 0, "that is the most");
        tries.in_another_pool();
        assert_eq!(asked(&b, &mut tries), super::super::TRIES_MAX);
    }

    proptest! {
        #[test]
        fn what_is_placed_only_adds_to_what_is_used(
            used in proptest::collection::vec((0_u64..=1000, 0_u64..=10), 1..20),
            more in 0_usize..30,
        ) {
            let nodes: Vec<Node> =
                used.iter().enumerate().map(|(at, (memory, count))| node(at, "a", *memory, *count)).collect();
            let mut filled = Filled::of(&nodes);
            for _ in 0..more {
                let before = filled.utilisation();
                filled.placed(Expected::START);
                prop_assert!((before..=1.0).contains(&filled.utilisation()));
            }
        }

        #[test]
        fn the_share_and_no_more_is_diverted_and_nothing_below_the_threshold(
            above in 0.0_f64..1.0, share in 0.01_f64..=1.0, utilisation in 0.0_f64..=1.0,
        ) {
            const DRAWS: u32 = 10_000;
            let burst = Burst { pool: PoolName::default(), above, share };
            let diverted = (0..DRAWS)
                .filter(|draw| burst.diverts(utilisation, || f64::from(*draw) / f64::from(DRAWS)))
                .count();
            let expected = if utilisation > above { share } else { 0.0 };
            prop_assert!((diverted as f64 / f64::from(DRAWS) - expected).abs() < 0.001);
        }
    }
}
