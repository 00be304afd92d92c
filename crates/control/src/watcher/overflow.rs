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
