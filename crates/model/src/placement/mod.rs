//! Where a new sandbox goes: of the nodes that could take it, a few are drawn at random, and the least loaded of those is
//! tried. Pure: the caller brings reports, time and randomness.
//!
//! ```text
//! report ──► Node ◄── placed, refused (in-flight overlay)
//!             │
//! Wanted ──► fit? ──► draw a few ──► least load, content at hand among equals ──► the node decides ──► taken
//!             ▲                                                                     │ refused: Tries says who is left
//!             └─────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Best effort by design. Replicas do not talk to each other; what one does not know, the node's own admission refuses.

mod load;
mod node;
mod tries;

pub use load::{Expected, Load};
pub use node::{Health, Node, Report, Unfit, Wanted};
pub use tries::{Refusals, TRIES_MAX, Tries};

/// Nodes drawn per decision. Two already give nearly all of the balance of looking at every node ("the power of two
/// choices"); the third forgives one stale report.
pub const CHOICES: usize = 3;

/// A load that is greater than the least by this part of it, or by so little, is equal to it: then content at hand decides. A job
/// of thousands on one image still spreads, at most this far from even.
const EQUAL_PART: f64 = 0.05;
const EQUAL_LOAD: f64 = 0.002;

/// The index of the node to try next, or `None` when none is left that could take it. `draw(n)` gives a number below `n`.
///
/// Besides the drawn ones, one of those that hold most of the content is looked at: with hundreds of nodes, chance alone
/// would hardly ever meet it. It is taken if it is not more loaded than the others.
pub fn choose(
    nodes: &[Node],
    wanted: &Wanted<'_>,
    tries: &mut Tries,
    mut draw: impl FnMut(usize) -> usize,
) -> Option<usize> {
    let mut pool = tries.fit(nodes, wanted);
    let mut drawn = CHOICES.min(pool.len());
    for at in 0..drawn {
        let other = at + draw(pool.len() - at).min(pool.len() - at - 1);
        pool.swap(at, other);
    }
    if let Some(holder) = holder(nodes, wanted, &pool[drawn..], &mut draw) {
        pool.swap(drawn, drawn + holder);
        drawn += 1;
    }
    let loads: Vec<(usize, f64)> = pool[..drawn].iter().map(|&at| (at, nodes[at].load().0)).collect();
    let least = loads.iter().map(|(_, load)| *load).fold(f64::INFINITY, f64::min);
    let chosen = loads
        .into_iter()
        .filter(|(_, load)| *load <= least * (1.0 + EQUAL_PART) + EQUAL_LOAD)
        .min_by(|(a, load_a), (b, load_b)| {
            let held = |at: usize| nodes[at].holds(wanted.layers);
            held(*b).cmp(&held(*a)).then(load_a.total_cmp(load_b))
        })
        .map(|(at, _)| at)?;
    tries.tried(chosen);
    Some(chosen)
}

/// The place in `pool` of one of those that hold most of what is wanted, if any holds some of it.
fn holder(
    nodes: &[Node],
    wanted: &Wanted<'_>,
    pool: &[usize],
    draw: &mut impl FnMut(usize) -> usize,
) -> Option<usize> {
    if wanted.layers.is_empty() {
        return None;
    }
    let mut most = 0;
    let mut holders = Vec::new();
    for (place, &at) in pool.iter().enumerate() {
        let held = nodes[at].holds(wanted.layers);
        if held > most {
            most = held;
            holders.clear();
        }
        if held == most && held > 0 {
            holders.push(place);
        }
    }
    (!holders.is_empty()).then(|| holders[draw(holders.len()).min(holders.len() - 1)])
}

/// The order in which nodes are tried for a create with an idempotency key: by rendezvous hashing, so that a repeat meets
/// the node that has the first answer, at any replica, and so that adding a node moves few keys. Health and load are left
/// out on purpose: they change between the tries.
pub fn keyed_order<'a>(names: impl IntoIterator<Item = &'a str>, key: &[u8]) -> Vec<usize> {
    let mut weighed: Vec<(u64, usize)> =
        names.into_iter().enumerate().map(|(at, name)| (weight(name, key), at)).collect();
    weighed.sort_unstable_by(|a, b| b.cmp(a));
    weighed.into_iter().map(|(_, at)| at).collect()
}

/// 64-bit FNV-1a over name, a zero byte and key, then an avalanche step: FNV's own high bits differ too little between
/// names of one letter's difference.
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
mod tests;
