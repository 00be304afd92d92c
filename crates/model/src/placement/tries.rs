//! The way of one create over the nodes: each is tried at most once, a few of them at most.

use std::collections::BTreeMap;
use std::fmt;

use super::node::{Node, Unfit, Wanted};

/// Nodes that are asked for one sandbox. When so many of those that looked best refuse, the cluster is full, and asking all the
/// others would only keep them busy.
pub const TRIES_MAX: usize = 8;

/// What became of one create so far.
#[derive(Debug, Clone, Default)]
pub struct Tries {
    tried: Vec<usize>,
    /// How many of these were tried in other pools before.
    elsewhere: usize,
}

impl Tries {
    /// Whether this node could still take it. None of a pool could after [`TRIES_MAX`].
    pub(super) fn could(&self, nodes: &[Node], at: usize, wanted: &Wanted<'_>) -> bool {
        self.tried.len() - self.elsewhere < TRIES_MAX
            && !self.tried.contains(&at)
            && nodes[at].unfit(wanted).is_none()
    }

    /// From now on another pool's nodes are asked, as many of them as of the one before.
    pub fn in_another_pool(&mut self) {
        self.elsewhere = self.tried.len();
    }

    /// This one is asked now, and not again; or it is not to be asked at all.
    pub fn tried(&mut self, node: usize) {
        self.tried.push(node);
    }
}

/// Why nodes did not take a sandbox, counted: the one error in the end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals {
    counts: BTreeMap<String, usize>,
}

impl Refusals {
    /// A node that was asked said no, or did not answer.
    pub fn add(&mut self, reason: impl Into<String>) {
        *self.counts.entry(reason.into()).or_default() += 1;
    }

    /// Adds the nodes that were not asked since they could not take it. Returns whether none of them will, as they are.
    pub fn add_unfit(&mut self, nodes: &[Node], wanted: &Wanted<'_>, tries: &Tries) -> bool {
        let not_asked = nodes.iter().enumerate().filter(|(at, _)| !tries.tried.contains(at));
        let unfit: Vec<Unfit> = not_asked.filter_map(|(_, node)| node.unfit(wanted)).collect();
        for unfit in &unfit {
            self.add(unfit.to_string());
        }
        unfit.iter().all(|unfit| unfit.is_lasting())
    }

    /// Each reason with how many nodes gave it.
    pub fn counts(&self) -> &BTreeMap<String, usize> {
        &self.counts
    }
}

impl fmt::Display for Refusals {
    /// `2 full, 1 draining`, the commonest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: Vec<_> = self.counts.iter().collect();
        counts.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        for (at, (reason, count)) in counts.into_iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {reason}")?;
        }
        Ok(())
    }
}
