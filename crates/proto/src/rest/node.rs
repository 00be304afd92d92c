//! A node: what it is, what it can do, what it does now.

use std::collections::BTreeMap;

use dsec_model::Capacity;
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

/// What a node uses now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeUsage {
    /// Sandboxes by state: creating, running, stopping.
    pub creating: u64,
    /// Running ones.
    pub running: u64,
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
    /// Content of layers on the node's disk, bytes.
    #[serde(default)]
    pub content_cache_bytes: u64,
    /// What was done for content.
    #[serde(default)]
    pub content: super::ContentCounts,
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
    /// What its operator says of it, in `[labels]` of `edge.toml`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Kernel features that shape what it can do.
    #[serde(default)]
    pub features: Vec<Feature>,
}
