//! What goes wrong with a node, and comes right again.

use fastrand::Rng;

use super::{Cluster, Event};

/// How a node is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// It answers.
    Up,
    /// It answers so much later, ms.
    Slow {
        /// How much.
        by_ms: u64,
    },
    /// Nothing gets there or comes back, and nobody says so.
    Cut,
    /// Its edge does not run: connections are refused. Its sandboxes go on.
    Down,
    /// It is gone, with its sandboxes.
    Dead,
}

impl Link {
    /// Whether answers come from there.
    pub fn answers(self) -> bool {
        matches!(self, Self::Up | Self::Slow { .. })
    }
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A node dies, for good.
    Dies {
        /// Which.
        node: usize,
    },
    /// A node is cut off.
    CutOff {
        /// Which.
        node: usize,
        /// For how long, ms.
        for_ms: u64,
    },
    /// A node answers late.
    Slow {
        /// Which.
        node: usize,
        /// How much, ms.
        by_ms: u64,
        /// For how long, ms.
        for_ms: u64,
    },
    /// A node takes nothing, although its report shows room.
    Refuses {
        /// Which.
        node: usize,
        /// For how long, ms.
        for_ms: u64,
    },
    /// A node's edge starts again.
    Restarts {
        /// Which.
        node: usize,
        /// For how long nobody answers, ms.
        for_ms: u64,
    },
}

/// Longest time that a drawn fault lasts, ms. A node that is cut off counts as lost after a minute: 15 questions, each waited
/// for 3 s, and the pauses.
const LASTS_MAX_MS: u64 = 90_000;
/// Most that a slow node is late, ms: some of them later than a report is waited for.
const LATE_MAX_MS: u64 = 4_000;
/// A node that refuses connections counts as lost within this, ms: 15 questions and the pauses between them.
const NOTICED_WITHIN_MS: u64 = 20_000;
/// An edge that starts again is back within this, ms.
const RESTART_MAX_MS: u64 = 3_000;

impl Fault {
    /// One of any kind, with any of so many nodes.
    pub fn draw(nodes: usize, chance: &mut Rng) -> Self {
        let node = chance.usize(..nodes);
        let for_ms = chance.u64(1..=LASTS_MAX_MS);
        match chance.u8(..5) {
            0 => Self::Dies { node },
            1 => Self::CutOff { node, for_ms },
            2 => Self::Slow { node, by_ms: chance.u64(1..=LATE_MAX_MS), for_ms },
            3 => Self::Refuses { node, for_ms },
            _ => Self::Restarts { node, for_ms: for_ms.min(RESTART_MAX_MS) },
        }
    }

    /// How long it lasts, ms; of one that is for good, until every replica counts the node as lost.
    pub(super) fn lasts_ms(self) -> u64 {
        match self {
            Self::Dies { .. } => NOTICED_WITHIN_MS,
            Self::CutOff { for_ms, .. }
            | Self::Slow { for_ms, .. }
            | Self::Refuses { for_ms, .. }
            | Self::Restarts { for_ms, .. } => for_ms,
        }
    }

    /// The node it happens to.
    pub fn node(self) -> usize {
        match self {
            Self::Dies { node }
            | Self::CutOff { node, .. }
            | Self::Slow { node, .. }
            | Self::Refuses { node, .. }
            | Self::Restarts { node, .. } => node,
        }
    }
}

impl Cluster {
    /// Something goes wrong now; with a node that is not well already nothing more does, but that it dies.
    pub(super) fn breaks(&mut self, fault: Fault) {
        let node = fault.node();
        let is_well = self.links[node] == Link::Up && self.heals_ms[node] <= self.now_ms;
        match fault {
            Fault::Dies { .. } if self.links[node] == Link::Dead => {}
            Fault::Dies { .. } => {
                self.links[node] = Link::Dead;
                self.count("nodes died");
            }
            _ if !is_well => {}
            Fault::CutOff { for_ms, .. } => self.becomes(node, Link::Cut, for_ms, "nodes cut off"),
            Fault::Slow { by_ms, for_ms, .. } => {
                self.becomes(node, Link::Slow { by_ms }, for_ms, "nodes slow");
            }
            Fault::Refuses { for_ms, .. } => {
                self.nodes[node].set_refusing(true);
                self.becomes(node, Link::Up, for_ms, "nodes refusing");
            }
            Fault::Restarts { for_ms, .. } => {
                self.nodes[node].restart(self.plan.mechanisms.records);
                self.becomes(node, Link::Down, for_ms, "edges started again");
            }
        }
    }

    fn becomes(&mut self, node: usize, link: Link, for_ms: u64, what: &'static str) {
        self.links[node] = link;
        self.count(what);
        self.heals_ms[node] = self.now_ms + for_ms;
        self.plan_after(for_ms, Event::Heals { node });
    }

    /// All is well again with a node, unless it died.
    pub(super) fn heals(&mut self, node: usize) {
        self.note([4, node as u64, 0]);
        self.nodes[node].set_refusing(false);
        if self.links[node] != Link::Dead {
            self.links[node] = Link::Up;
        }
    }
}
