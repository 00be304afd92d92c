//! How many sandboxes there are, as a server knows them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::StateCounts;

/// Tasks, and projects, that an answer counts on their own: those that have most.
pub const COUNTED_MAX: usize = 1000;

/// Whether a node answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeHealth {
    /// It does, or missed one report.
    Well,
    /// It missed some reports in a row. Its sandboxes count as they were when it was last heard of.
    Suspect,
    /// It missed so many that nothing is sent there. Those of its sandboxes that had not ended count as lost.
    Lost,
}

impl NodeHealth {
    /// The wire's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::Suspect => "suspect",
            Self::Lost => "lost",
        }
    }
}

/// What is known of a node's sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeKnown {
    /// All of them, as of some second ago while the node is well.
    Counted,
    /// Nothing yet: it has not said since this server started.
    Gathering,
    /// Nothing: its edge is of a version that does not say.
    Untold,
}

/// The sandboxes of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeCounts {
    /// Whether it answers.
    pub health: NodeHealth,
    /// What is known of its sandboxes.
    pub known: NodeKnown,
    /// When it was last heard of, Unix ms; none: not since this server started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    /// Those that the caller sees, by state.
    pub sandboxes: StateCounts,
}

/// How many sandboxes there are, of those that the caller sees. Those that ended are counted for an hour.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Counts {
    /// Some node has not said yet what it has, since this server started, and may still: the counts are too low. What is asked a second
    /// later is complete as a rule.
    pub gathering: bool,
    /// Nodes whose sandboxes are in no count, in the order of their names: those that have not said, for whatever reason.
    #[serde(default)]
    pub uncounted: Vec<String>,
    /// All of them, by state.
    pub sandboxes: StateCounts,
    /// By backend.
    #[serde(default)]
    pub backends: BTreeMap<String, StateCounts>,
    /// By node.
    #[serde(default)]
    pub nodes: BTreeMap<String, NodeCounts>,
    /// By project, each without those that are in it: the 1,000 that have most.
    #[serde(default)]
    pub projects: BTreeMap<String, StateCounts>,
    /// By task: the 1,000 that have most. Those without a task are in none.
    #[serde(default)]
    pub tasks: BTreeMap<String, StateCounts>,
    /// Projects and tasks that are left out.
    #[serde(default)]
    pub left_out: u64,
}
