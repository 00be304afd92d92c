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

pub mod cover;
mod load;
mod node;
mod pool;
mod tries;

pub use load::{Expected, Load};
pub use node::{Health, Layers, Node, Report, Unfit, Wanted, layer_number};
pub use pool::{Burst, Filled, Pools};
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
    // Those that are well, and when none of them is left the suspect ones.
    let candidates = [Health::Well, Health::Suspect]
        .into_iter()
        .map(|health| candidates(nodes, wanted, tries, health, &mut draw))
        .find(|candidates| !candidates.is_empty())?;
    let loads: Vec<(usize, f64)> = candidates.into_iter().map(|at| (at, nodes[at].load().0)).collect();
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

/// Nodes of this health to compare: some that are drawn, and one that holds most of the content. Whether a node could take it is
/// looked at when it is drawn and not of all, which would be most of the work.
fn candidates(
    nodes: &[Node],
    wanted: &Wanted<'_>,
    tries: &Tries,
    health: Health,
    draw: &mut impl FnMut(usize) -> usize,
) -> Vec<usize> {
    let could = |at: usize| nodes[at].health() == health && tries.could(nodes, at, wanted);
    let mut pool: Vec<usize> = (0..nodes.len()).collect();
    let mut candidates = Vec::with_capacity(CHOICES + 1);
    let mut looked_at = 0;
    while candidates.len() < CHOICES && looked_at < pool.len() {
        let left = pool.len() - looked_at;
        pool.swap(looked_at, looked_at + draw(left).min(left - 1));
        if could(pool[looked_at]) {
            candidates.push(pool[looked_at]);
        }
        looked_at += 1;
    }
    candidates.extend(holder(nodes, wanted, &pool[looked_at..], could, draw));
    candidates
}

/// One of those in `pool` that hold most of what is wanted, if any that could take it holds some of it.
fn holder(
    nodes: &[Node],
    wanted: &Wanted<'_>,
    pool: &[usize],
    could: impl Fn(usize) -> bool,
    draw: &mut impl FnMut(usize) -> usize,
) -> Option<usize> {
    if wanted.layers.is_empty() {
        return None;
    }
    let mut most = 1;
    let mut holders = Vec::new();
    for &at in pool {
        let held = nodes[at].holds(wanted.layers);
        if held < most || !could(at) {
            continue;
        }
        if held > most {
            most = held;
            holders.clear();
        }
        holders.push(at);
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
