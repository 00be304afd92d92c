//! Where a new sandbox goes: k nodes drawn at random, the least loaded of them. Pure: the caller
//! brings the state and the randomness, so every rule is tested by calling it.
//!
//! Best effort by design. Control instances do not talk to each other; what one does not see, the
//! node's own admission refuses (429), and the caller of [`choose`] tries the next.

/// Nodes drawn per decision. Two already give nearly all of the balance of looking at every node
/// ("the power of two choices"); the third forgives one stale report.
pub const CHOICES: usize = 3;

/// What is known of a node for one decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// It answered when it was last asked. A node that did not is tried last, not never: the
    /// report may be old.
    pub healthy: bool,
    /// It refused, or could not be reached, in this placement.
    pub refused: bool,
    /// Sandboxes on it as last reported, and the creates sent since.
    pub load: u64,
}

/// The index of the node to try next, or `None` when every node has refused. `draw(n)` gives a
/// number below `n`.
pub fn choose(nodes: &[Candidate], mut draw: impl FnMut(usize) -> usize) -> Option<usize> {
    let left = |healthy: bool| -> Vec<usize> {
        (0..nodes.len()).filter(|&i| !nodes[i].refused && nodes[i].healthy == healthy).collect()
    };
    let mut pool = left(true);
    if pool.is_empty() {
        pool = left(false);
    }
    // A partial Fisher-Yates shuffle: the first CHOICES places become a sample without repeats.
    let sample = CHOICES.min(pool.len());
    for i in 0..sample {
        let j = i + draw(pool.len() - i).min(pool.len() - i - 1);
        pool.swap(i, j);
    }
    pool[..sample].iter().copied().min_by_key(|&i| nodes[i].load)
}

/// The order in which nodes are tried for a create with an idempotency key: by rendezvous hashing,
/// so that a repeat meets the node that has the first answer, and so that adding a node moves few
/// keys. Health and load are left out on purpose: they change between the tries.
pub fn keyed_order(names: &[&str], key: &[u8]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse((weight(names[i], key), i)));
    order
}

/// 64-bit FNV-1a over name, a zero byte and key, then an avalanche step: FNV's own high bits
/// differ too little between names of one letter's difference.
fn weight(name: &str, key: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in name.bytes().chain([0]).chain(key.iter().copied()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn node(healthy: bool, refused: bool, load: u64) -> Candidate {
        Candidate { healthy, refused, load }
    }

    #[test]
    fn the_least_loaded_of_the_drawn_is_taken() {
        let nodes = [node(true, false, 9), node(true, false, 3), node(true, false, 5)];
        assert_eq!(choose(&nodes, |_| 0), Some(1));
    }

    #[test]
    fn only_the_drawn_are_compared() {
        let mut nodes = [node(true, false, 10); 8];
        nodes[7].load = 0;
        // Drawing always the first left gives nodes 0, 1 and 2: node 7 is not looked at.
        assert_eq!(choose(&nodes, |_| 0), Some(0));
        // Drawing always the last left does look at it.
        assert_eq!(choose(&nodes, |n| n - 1), Some(7));
    }

    #[test]
    fn refused_node_is_not_retried_within_one_placement() {
        let nodes = [node(true, true, 0), node(true, false, 9)];
        assert_eq!(choose(&nodes, |_| 0), Some(1));
        assert_eq!(choose(&[node(true, true, 0)], |_| 0), None);
        assert_eq!(choose(&[], |_| 0), None);
    }

    #[test]
    fn unhealthy_nodes_come_last_and_not_never() {
        let nodes = [node(false, false, 0), node(true, false, 9)];
        assert_eq!(choose(&nodes, |_| 0), Some(1));
        assert_eq!(choose(&[node(false, false, 0), node(true, true, 9)], |_| 0), Some(0));
    }

    #[test]
    fn a_key_keeps_its_first_node_when_another_is_added() {
        let (two, three) = (["n1", "n2"], ["n1", "n2", "n3"]);
        let mut moved = 0;
        for i in 0..300 {
            let key = format!("project/key-{i}");
            let before = keyed_order(&two, key.as_bytes());
            assert_eq!(before, keyed_order(&two, key.as_bytes()));
            let after = keyed_order(&three, key.as_bytes());
            if after[0] == 2 {
                moved += 1;
            } else {
                assert_eq!(after[0], before[0]);
            }
        }
        assert!((60..140).contains(&moved), "{moved} of 300 moved to the third node");
    }
}
