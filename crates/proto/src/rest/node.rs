//! A node: what it is, what it can do, what it does now.

use std::collections::BTreeMap;

use dsec_model::{Capacity, PoolName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether a feature works here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeatureState {
    /// Tried, and works.
    Works,
    /// Absent; something slower or weaker stands in.
    Degraded,
    /// Absent, and what needs it cannot be had here.
    Missing,
}

/// One kernel feature or tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub purpose: String,
    /// Whether it works here.
    pub state: FeatureState,
    /// What was tried and seen.
    pub found: String,
    /// How to get it; empty where it works.
    #[serde(default)]
    pub remedy: String,
}

/// Whether a node takes new sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulingState {
    /// It does.
    #[default]
    Open,
    /// It does not; those it has stay.
    Cordoned,
    /// It does not, and waits for those it has to end.
    Draining,
}

/// What its operator said about new sandboxes on a node. It outlives restarts of the edge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeScheduling {
    /// What holds.
    pub state: SchedulingState,
    /// Why, in the operator's words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Since when, Unix ms; none of a node that was always open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// When the sandboxes that are left on a draining node are stopped, Unix ms. None: they end when they end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_at_ms: Option<u64>,
}

/// Keeps new sandboxes away from a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CordonRequest {
    /// Why, for those who wonder later: at most 256 bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Keeps new sandboxes away from a node and waits for the others to end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Why, for those who wonder later: at most 256 bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Seconds after which those that are left are stopped, with 10 s from SIGTERM to SIGKILL. Left out: they end when they end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<u64>,
}

/// What a node uses now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeUsage {
    /// Sandboxes by state: creating, running, stopping.
    pub creating: u64,
    /// Running ones.
    pub running: u64,
    /// Paused ones, and those on the way there or back.
    #[serde(default)]
    pub paused: u64,
    /// Stopping ones.
    pub stopping: u64,
    /// Memory promised to them, MiB.
    pub memory_promised_mib: u64,
    /// Memory available on the node now, MiB.
    pub memory_available_mib: u64,
    /// Disk free for writable layers, MiB.
    pub disk_free_mib: u64,
    /// Share of the last ten seconds in which some process of the node waited for a processor, 0 to 1.
    #[serde(default)]
    pub cpu_pressure: f64,
    /// Share of the last ten seconds in which all processes of the node waited for memory, 0 to 1.
    #[serde(default)]
    pub memory_pressure: f64,
    /// Cores promised to them, in thousandths.
    #[serde(default)]
    pub cpu_promised_millis: u64,
    /// Files that can still be made where the node keeps its state; none where its file system sets no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files_free: Option<u64>,
    /// Processes and threads of the node.
    #[serde(default)]
    pub processes: u64,
    /// Content of layers on the node's disk, bytes.
    #[serde(default)]
    pub content_cache_bytes: u64,
    /// What was done for content.
    #[serde(default)]
    pub content: super::ContentCounts,
}

impl NodeUsage {
    /// Sandboxes that have not ended: a draining node is drained when it has none.
    pub fn sandboxes(&self) -> u64 {
        self.creating + self.running + self.paused + self.stopping
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// Version of its edge.
    pub version: String,
    /// Process id of its edge.
    pub pid: u32,
    /// When its edge started, Unix ms.
    pub started_ms: u64,
    /// All it has.
    #[schema(value_type = Object)]
    pub capacity: Capacity,
    /// What it uses now.
    pub usage: NodeUsage,
    /// Backends it offers.
    pub backends: Vec<String>,
    /// Its layer store: nodes that say the same share their layers.
    #[serde(default)]
    pub store: String,
    /// Its processors' architecture, such as `x86_64`.
    #[serde(default)]
    pub architecture: String,
    /// Most sandboxes it takes.
    #[serde(default)]
    pub sandboxes_max: u64,
    /// The pool that it is of, `pool` of `edge.toml`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub pool: PoolName,
    /// What its operator says of it, in `[labels]` of `edge.toml`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Kernel features that shape what it can do.
    #[serde(default)]
    pub features: Vec<Feature>,
    /// Whether it takes new sandboxes.
    #[serde(default)]
    pub scheduling: NodeScheduling,
    /// What its sandboxes may use, by project, backend and replica of control.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub charged: Vec<super::Charged>,
    /// Creates that have arrived within some seconds and are in `charged`, whether they are answered or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrived: Vec<super::Arrived>,
    /// Limits of a sandbox that does not say which it wants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<super::SandboxLimits>,
    /// With `layers=true`: what its sandboxes of the last hour called their layers, the latest first, at most 512. Their content is
    /// at hand there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
}
