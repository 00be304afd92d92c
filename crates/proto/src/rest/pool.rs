//! Pools of nodes, and what is brought to them ahead of time.

use dsec_model::PoolName;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// Days of accesses that are kept.
pub const ACCESSES_KEPT_DAYS: u64 = 30;
/// Days of accesses that count when nothing is said: what ran in the last week.
pub const ACCESSES_SINCE_DAYS: u64 = 7;

/// A pool of nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Its name, `pool` of its nodes' `edge.toml`.
    #[schema(value_type = String)]
    pub name: PoolName,
    /// Its nodes, in order.
    pub nodes: Vec<String>,
    /// Of these, those that answer.
    pub answering: u64,
    /// Memory in use on those that take sandboxes, MiB, with what was sent there a moment ago.
    pub memory_used_mib: u64,
    /// Memory that these have, MiB.
    pub memory_mib: u64,
    /// Sandboxes there.
    pub sandboxes: u64,
    /// Most sandboxes that they take.
    pub sandboxes_max: u64,
    /// The greater of the shares of memory and of sandboxes that are in use, 0 to 1.
    pub utilisation: f64,
    /// Of the pool that takes over when the others are full: when and how much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<PoolBurst>,
    /// What a sync brought to its nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synced: Option<PoolContent>,
}

/// When a pool takes over from the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolBurst {
    /// The utilisation of all others above which it does.
    pub above: f64,
    /// The share of the creates that it could take which it then takes.
    pub share: f64,
    /// The utilisation of all others now.
    pub home_utilisation: f64,
}

/// What was brought to a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolContent {
    /// Layers, by kind and name.
    pub layers: u64,
    /// Bytes of their content, each once, uncompressed: what each node has on its disk.
    pub bytes: u64,
    /// Bytes that they may have.
    pub budget_bytes: u64,
    /// When the last sync ended, Unix ms; none: none has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synced_ms: Option<u64>,
    /// Creates of the last 7 days.
    pub accesses: u64,
    /// Of these, those that the pool could have taken with what it has now.
    pub covered: u64,
}

/// Pools, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolList {
    /// The pools.
    pub pools: Vec<Pool>,
}

/// Chooses what a pool has ahead of time, and brings it there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolSyncRequest {
    /// Bytes that the content may have, uncompressed: on each node of the pool, and less than its cache has room for.
    pub budget_bytes: u64,
    /// Creates of so many days count, today's with them: 1 to 30. Default: 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_days: Option<u64>,
    /// Only says what would be chosen.
    #[serde(default)]
    pub dry_run: bool,
}

/// A layer that was chosen for a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolLayerChosen {
    /// Its kind and name, such as `base/debian`.
    pub layer: String,
    /// The layer's id.
    pub digest: String,
    /// Bytes of its content, uncompressed. What it shares with others counts in each.
    pub bytes: u64,
    /// Creates that need it.
    pub accesses: u64,
}

/// How a sync of a pool ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolSynced {
    /// The pool.
    #[schema(value_type = String)]
    pub pool: PoolName,
    /// Nothing was done.
    pub dry_run: bool,
    /// Bytes that the content may have.
    pub budget_bytes: u64,
    /// Bytes of the content that the pool has now, or would have, each once.
    pub bytes: u64,
    /// Creates that counted.
    pub accesses: u64,
    /// Of these, creates of layers that are not there any more.
    pub gone: u64,
    /// Creates that the pool could have taken before.
    pub covered_before: u64,
    /// Creates that it could take now, or would.
    pub covered: u64,
    /// The layers that it has, or would have, in the order in which they were chosen: what serves most creates a byte first.
    pub layers: Vec<PoolLayerChosen>,
    /// Layers that it had before and has not any more, or would not have.
    pub dropped: Vec<String>,
    /// Layers that were chosen and are not whole on all nodes, with why.
    pub failed: Vec<PoolLayerFailed>,
    /// Nodes of the pool that do not answer: they have what they had.
    pub away: Vec<String>,
}

/// A layer that is not whole on all nodes of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolLayerFailed {
    /// Its kind and name.
    pub layer: String,
    /// Why.
    pub problem: String,
}

/// One line of a sync's answer (`application/x-ndjson`); the last is `done` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum PoolSyncEvent {
    /// How far it is.
    Progress {
        /// The layer that is brought to the nodes now.
        layer: String,
        /// Layers that were chosen.
        layers: u64,
        /// Of these, those that are done with.
        layers_done: u64,
        /// Bytes of all that were chosen, as they count against the budget.
        bytes: u64,
        /// Bytes of those that are done with.
        bytes_done: u64,
    },
    /// It is over.
    Done {
        /// How it ended.
        synced: Box<PoolSynced>,
    },
    /// It broke off; what came stays, and counts as far as it is whole.
    Error {
        /// Why.
        error: ErrorBody,
    },
}
