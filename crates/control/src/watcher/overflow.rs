//! How full pools are, as this server last heard it, with what it sent there since.

use std::collections::BTreeMap;

use dsec_model::PoolName;
use dsec_model::placement::{self, Burst, Expected, Filled, Health, Pools};

use super::Watched;

/// How old the sums over the home pools may be, ms: what is placed meanwhile is added to them, so only reports come late. All nodes are
/// looked at ten times a second and not at every create.
const FRESH_MS: u64 = 100;

/// Sums over the nodes of all pools but the one that takes over.
#[derive(Debug, Default)]
pub(super) struct Home(Option<Summed>);

#[derive(Debug)]
struct Summed {
    overflow: PoolName,
    at_ms: u64,
    filled: Filled,
}

impl Home {
    fn utilisation(&mut self, nodes: &[placement::Node], overflow: &PoolName, now_ms: u64) -> f64 {
        let is_fresh =
            |summed: &&Summed| summed.overflow == *overflow && now_ms.saturating_sub(summed.at_ms) < FRESH_MS;
        if let Some(summed) = self.0.as_ref().filter(is_fresh) {
            return summed.filled.utilisation();
        }
        let filled = Filled::of(nodes.iter().filter(|node| node.report().pool != *overflow));
        self.0 = Some(Summed { overflow: overflow.clone(), at_ms: now_ms, filled });
        filled.utilisation()
    }

    /// A create was sent to a node.
    pub(super) fn placed(&mut self, node: &placement::Node, expected: Expected) {
        if let Some(summed) = self.0.as_mut().filter(|summed| node.report().pool != summed.overflow) {
            summed.filled.placed(expected);
        }
    }
}

/// A pool, as its nodes last said.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolView {
    /// Its name.
    pub name: PoolName,
    /// Places of its nodes.
    pub nodes: Vec<usize>,
    /// Of these, those that answer.
    pub answering: Vec<usize>,
    /// How much of those that take sandboxes is in use.
    pub filled: Filled,
}

impl Watched {
    /// Whether a create that could run in the pool which takes over is to go there now.
    pub fn diverts(&self, burst: &Burst) -> bool {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let super::Known { nodes, chance, home, .. } = &mut *known;
        burst.diverts(home.utilisation(nodes, &burst.pool, now_ms), || chance.f64())
    }

    /// How full some pools are together.
    pub fn filled(&self, pools: Pools<'_>) -> Filled {
        Filled::of(self.known().nodes.iter().filter(|node| pools.has(&node.report().pool)))
    }

    /// All pools of which a node has said that it is, in order.
    pub fn pools(&self) -> Vec<PoolView> {
        let known = self.known();
        let mut by_name: BTreeMap<PoolName, Vec<usize>> = BTreeMap::new();
        for (at, node) in known.nodes.iter().enumerate() {
            // One that was never heard of has not said of which it is.
            if !known.more[at].is_gone && !node.report().backends.is_empty() {
                by_name.entry(node.report().pool.clone()).or_default().push(at);
            }
        }
        let view = |(name, nodes): (PoolName, Vec<usize>)| PoolView {
            name,
            answering: nodes.iter().copied().filter(|at| known.nodes[*at].health() == Health::Well).collect(),
            filled: Filled::of(nodes.iter().map(|at| &known.nodes[*at])),
            nodes,
        };
        by_name.into_iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use dsec_model::placement::{Tries, Wanted};
    use serde_json::json;

    use super::super::Nodes;
    use super::super::tests::Hand;
    use super::*;

    fn said(node: &str, pool: &str, running: u64) -> Option<Nodes> {
        let status = json!({ "nodes": [{
            "node": node, "pool": pool, "version": "0", "pid": 1, "started_ms": 0, "backends": ["container"],
            "sandboxes_max": 10, "capacity": { "memory_mib": 100_000, "cpu_millis": 1000, "disk_mib": 1 },
            "usage": { "creating": 0, "running": running, "stopping": 0, "memory_promised_mib": 0,
                       "memory_available_mib": 99_000, "disk_free_mib": 1 },
        }] });
        Some(serde_json::from_value(status).unwrap())
    }

    #[test]
    fn what_is_sent_home_counts_at_once_and_reports_soon() {
        let clock = Hand::default();
        let names = ["n1", "n2"].into_iter().filter_map(|name| name.parse().ok());
        let watched = Watched::driven(names, Box::new(clock.clone()), 1);
        let cloud: PoolName = "cloud".parse().unwrap();
        let burst = Burst { pool: cloud.clone(), above: 0.8, share: 1.0 };
        clock.0.store(1000, Ordering::Relaxed);
        watched.note(0, 1000, said("n1", "onprem", 7));
        watched.note(1, 1000, said("n2", "cloud", 0));
        let place = |pools: Pools<'_>| {
            let wanted = Wanted { backend: "container", pools, ..Wanted::default() };
            watched.place(&wanted, &mut Tries::default()).unwrap().0
        };
        assert!(!watched.diverts(&burst));
        for _ in 0..9 {
            assert_eq!(place(Pools::Only(&cloud)), 1);
        }
        assert!(!watched.diverts(&burst), "what is in the pool that takes over is not at home");
        assert_eq!((place(Pools::AllBut(&cloud)), watched.diverts(&burst)), (0, false), "that is 8 of 10");
        assert_eq!(
            (place(Pools::AllBut(&cloud)), watched.diverts(&burst)),
            (0, true),
            "within one millisecond"
        );
        clock.0.store(2000, Ordering::Relaxed);
        watched.note(0, 1999, said("n1", "onprem", 3));
        clock.0.store(2000 + FRESH_MS, Ordering::Relaxed);
        assert!(!watched.diverts(&burst), "the node has said that there is room");
        let views = watched.pools();
        let seen: Vec<_> = views.iter().map(|view| (view.name.as_str(), view.nodes.clone())).collect();
        assert_eq!(seen, [("cloud", vec![1]), ("onprem", vec![0])]);
        watched.is_gone(1);
        assert_eq!(watched.pools().len(), 1);
    }

    #[test]
    fn a_node_that_does_not_say_is_of_the_usual_pool() {
        let names = ["n1"].into_iter().filter_map(|name| name.parse().ok());
        let watched = Watched::driven(names, Box::new(Hand::default()), 1);
        assert!(watched.pools().is_empty(), "nothing was heard of it");
        let mut earlier = serde_json::to_value(said("n1", "x", 0).unwrap().nodes).unwrap();
        earlier[0].as_object_mut().unwrap().remove("pool");
        watched.note(0, 0, serde_json::from_value(json!({ "nodes": earlier })).ok());
        assert_eq!(watched.pools()[0].name, PoolName::default());
    }
}
