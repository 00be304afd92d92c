//! Which content a pool is given ahead of time: that of the sandboxes that are asked for most, within a budget of bytes.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Sandboxes of the same content: how often they were asked for, and what they need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// How often.
    pub accesses: u64,
    /// Places of all that they need in the list of sizes. One that is needed twice costs once.
    pub parts: Vec<usize>,
}

/// What was chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cover {
    /// Places of the demands that have all they need, in the order in which they came to it.
    pub demands: Vec<usize>,
    /// Bytes of their parts, each once.
    pub bytes: u64,
    /// Accesses of theirs.
    pub accesses: u64,
}

/// What is chosen first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    /// Most accesses a byte that is not chosen yet.
    Densest,
    /// Most accesses.
    Largest,
}

/// Chooses demands so that the accesses of those that have all they need are many, and their parts not larger than `budget`.
///
/// Greedy: what serves most accesses a byte comes next, where parts that are chosen already cost nothing. That alone may fill the budget
/// with trifles before one large thing that outweighs them, so the same is done by accesses alone and the better result taken: where
/// demands share nothing it is at least half of the best there is. The same input gives the same choice.
pub fn cover(sizes: &[u64], demands: &[Demand], budget: u64) -> Cover {
    let [dense, large] = [First::Densest, First::Largest].map(|first| greedy(sizes, demands, budget, first));
    let is_better = (large.accesses, dense.bytes) > (dense.accesses, large.bytes);
    if is_better { large } else { dense }
}

/// A demand, as it stood when it was put in line.
#[derive(Debug, PartialEq, Eq)]
struct Waiting {
    first: First,
    at: usize,
    accesses: u64,
    /// Bytes that it needs beyond what is chosen.
    missing: u64,
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        let dense = match self.first {
            First::Densest => {
                let (mine, theirs) = (
                    u128::from(self.accesses) * u128::from(other.missing),
                    u128::from(other.accesses) * u128::from(self.missing),
                );
                mine.cmp(&theirs)
            }
            First::Largest => Ordering::Equal,
        };
        dense
            .then(self.accesses.cmp(&other.accesses))
            .then(other.missing.cmp(&self.missing))
            .then(other.at.cmp(&self.at))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn greedy(sizes: &[u64], demands: &[Demand], budget: u64, first: First) -> Cover {
    let mut needed_by: Vec<Vec<usize>> = vec![Vec::new(); sizes.len()];
    let mut parts: Vec<Vec<usize>> = Vec::with_capacity(demands.len());
    for (at, demand) in demands.iter().enumerate() {
        let mut own = demand.parts.clone();
        own.sort_unstable();
        own.dedup();
        own.iter().for_each(|part| needed_by[*part].push(at));
        parts.push(own);
    }
    let mut missing: Vec<u64> = parts
        .iter()
        .map(|own| own.iter().fold(0, |sum: u64, part| sum.saturating_add(sizes[*part])))
        .collect();
    let waiting = |at: usize, missing: u64| Waiting { first, at, accesses: demands[at].accesses, missing };
    let mut line: BinaryHeap<Waiting> = (0..demands.len())
        .filter(|at| demands[*at].accesses > 0)
        .map(|at| waiting(at, missing[at]))
        .collect();
    let (mut is_chosen, mut is_covered) = (vec![false; sizes.len()], vec![false; demands.len()]);
    let mut cover = Cover::default();
    while let Some(next) = line.pop() {
        // One that stands in line again with less to bring, or does not fit: it does when others bring enough of it.
        if is_covered[next.at] || next.missing != missing[next.at] || next.missing > budget - cover.bytes {
            continue;
        }
        is_covered[next.at] = true;
        cover.demands.push(next.at);
        cover.bytes += next.missing;
        cover.accesses = cover.accesses.saturating_add(next.accesses);
        for part in &parts[next.at] {
            if std::mem::replace(&mut is_chosen[*part], true) || sizes[*part] == 0 {
                continue;
            }
            for &at in &needed_by[*part] {
                missing[at] -= sizes[*part];
                if !is_covered[at] && demands[at].accesses > 0 {
                    line.push(waiting(at, missing[at]));
                }
            }
        }
    }
    cover
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn demand(accesses: u64, parts: &[usize]) -> Demand {
        Demand { accesses, parts: parts.to_vec() }
    }

    fn bytes_of(sizes: &[u64], demands: &[Demand], chosen: &[usize]) -> u64 {
        let mut parts: Vec<usize> = chosen.iter().flat_map(|at| demands[*at].parts.clone()).collect();
        parts.sort_unstable();
        parts.dedup();
        parts.iter().map(|part| sizes[*part]).sum()
    }

    /// The most accesses that any choice covers.
    fn best(sizes: &[u64], demands: &[Demand], budget: u64) -> u64 {
        let choices = (0_u32..1 << demands.len()).map(|bits| {
            let chosen: Vec<usize> = (0..demands.len()).filter(|at| (bits >> at) & 1 == 1).collect();
            let fits = bytes_of(sizes, demands, &chosen) <= budget;
            if fits { chosen.iter().map(|at| demands[*at].accesses).sum() } else { 0 }
        });
        choices.max().unwrap_or(0)
    }

    #[test]
    fn what_is_shared_costs_once() {
        // Two images over one base: together they fit, as three images of their own would not.
        let sizes = [100, 10, 10, 100];
        let demands = [demand(5, &[0, 1]), demand(4, &[0, 2]), demand(4, &[3])];
        let found = cover(&sizes, &demands, 120);
        assert_eq!((found.demands, found.bytes, found.accesses), (vec![0, 1], 120, 9));
    }

    #[test]
    fn one_large_thing_is_not_shut_out_by_trifles() {
        let found = cover(&[1, 100], &[demand(1, &[0]), demand(90, &[1])], 100);
        assert_eq!((found.demands, found.accesses), (vec![1], 90));
    }

    #[test]
    fn of_two_that_do_not_both_fit_the_one_with_more_accesses_is_taken() {
        let (sizes, budget) = ([50, 50], 99);
        for (one, other, taken) in [(3, 2, 0), (2, 3, 1), (3, 3, 0)] {
            let demands = [demand(one, &[0]), demand(other, &[1])];
            assert_eq!(cover(&sizes, &demands, budget).demands, [taken]);
        }
    }

    #[test]
    fn what_nobody_asked_for_and_what_is_too_large_is_left() {
        let found = cover(&[10, 1000], &[demand(0, &[0]), demand(9, &[1])], 500);
        assert_eq!(found, Cover::default());
        assert_eq!(cover(&[], &[], 0), Cover::default());
        assert_eq!(cover(&[0], &[demand(2, &[0, 0])], 0).accesses, 2, "nothing is free");
    }

    prop_compose! {
        fn scene()(sizes in proptest::collection::vec(0_u64..50, 1..8))
            (demands in proptest::collection::vec(
                (0_u64..20, proptest::collection::vec(0..sizes.len(), 1..4)), 0..9),
             sizes in Just(sizes), budget in 0_u64..150)
            -> (Vec<u64>, Vec<Demand>, u64) {
            let demands = demands.into_iter().map(|(accesses, parts)| Demand { accesses, parts }).collect();
            (sizes, demands, budget)
        }
    }

    proptest! {
        #[test]
        fn it_adds_up_keeps_to_the_budget_and_leaves_nothing_that_fits((sizes, demands, budget) in scene()) {
            let found = cover(&sizes, &demands, budget);
            prop_assert_eq!(&found, &cover(&sizes, &demands, budget));
            prop_assert_eq!(found.bytes, bytes_of(&sizes, &demands, &found.demands));
            prop_assert!(found.bytes <= budget);
            let accesses: u64 = found.demands.iter().map(|at| demands[*at].accesses).sum();
            prop_assert_eq!(found.accesses, accesses);
            for (at, left) in demands.iter().enumerate() {
                if found.demands.contains(&at) || left.accesses == 0 {
                    continue;
                }
                let with = [found.demands.clone(), vec![at]].concat();
                prop_assert!(bytes_of(&sizes, &demands, &with) > budget, "{} would fit", at);
            }
            prop_assert!(found.accesses <= best(&sizes, &demands, budget));
        }

        #[test]
        fn without_shared_parts_it_is_at_least_half_of_the_best(
            each in proptest::collection::vec((1_u64..60, 1_u64..60), 0..11), budget in 0_u64..150,
        ) {
            let sizes: Vec<u64> = each.iter().map(|(size, _)| *size).collect();
            let demands: Vec<Demand> =
                each.iter().enumerate().map(|(at, (_, accesses))| demand(*accesses, &[at])).collect();
            prop_assert!(2 * cover(&sizes, &demands, budget).accesses >= best(&sizes, &demands, budget));
        }
    }
}
