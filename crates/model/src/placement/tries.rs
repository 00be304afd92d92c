//! The way of one create over the nodes: each is tried at most once, a few of them at most.

use std::collections::BTreeMap;
use std::fmt;

use super::node::{Health, Node, Unfit, Wanted};

/// Nodes that are asked for one sandbox. When so many of those that looked best refuse, the cluster is full, and asking all the
/// others would only keep them busy.
pub const TRIES_MAX: usize = 8;

/// What became of one create so far.
#[derive(Debug, Clone, Default)]
pub struct Tries {
    tried: Vec<usize>,
}

impl Tries {
    /// Which nodes could still take it: those that are well, and when none of them is left the suspect ones. None after
    /// [`TRIES_MAX`].
    pub(super) fn fit(&self, nodes: &[Node], wanted: &Wanted<'_>) -> Vec<usize> {
        if self.tried.len() >= TRIES_MAX {
            return Vec::new();
        }
        let fit = |health: Health| -> Vec<usize> {
            let is_fit = |at: &usize| {
                let node = &nodes[*at];
                node.health() == health && !self.tried.contains(at) && node.unfit(wanted).is_none()
            };
            (0..nodes.len()).filter(is_fit).collect()
        };
        let well = fit(Health::Well);
        if well.is_empty() { fit(Health::Suspect) } else { well }
    }

    /// This one is asked now, and not again.
    pub(super) fn tried(&mut self, node: usize) {
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

    /// Adds the nodes that could not be asked at all.
    pub fn add_unfit(&mut self, nodes: &[Node], wanted: &Wanted<'_>) {
        for unfit in nodes.iter().filter_map(|node| node.unfit(wanted)) {
            self.add(Unfit::to_string(&unfit));
        }
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
