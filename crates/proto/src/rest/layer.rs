//! What is done with layers: measures of their content on a node, traces, prefetching, and the care of the store.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// Bytes of a group, in which content is fetched and traced; the last of a blob may be shorter.
pub const GROUP_BYTES: u64 = 256 << 10;

/// What was done for content on a node since its fill worker began. Content that is complete is read by the kernel itself, which
/// is not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContentCounts {
    /// Bytes that the kernel asked for.
    pub asked_bytes: u64,
    /// Of these, bytes that were in the node's cache.
    pub cached_bytes: u64,
    /// Bytes that came from the store, as they are compressed there.
    pub fetched_bytes: u64,
    /// Fetches from the store, failed ones included.
    pub fetches: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// How long readers waited for content that was not there, milliseconds, added up over all of them.
    pub waited_ms: u64,
}

/// The content of a layer on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerContent {
    /// Bytes of its blobs, uncompressed.
    pub size_bytes: u64,
    /// Of these, bytes that are on the node.
    pub here_bytes: u64,
    /// What was done for it. A blob of several layers counts in each.
    #[serde(flatten)]
    pub counts: ContentCounts,
    /// Each of its blobs.
    pub blobs: Vec<BlobContent>,
}

/// One blob of a layer on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlobContent {
    /// Its id.
    pub id: String,
    /// Its bytes, uncompressed.
    pub size_bytes: u64,
    /// Of these, bytes that are on the node.
    pub here_bytes: u64,
    /// What was done for it.
    #[serde(flatten)]
    pub counts: ContentCounts,
}

/// A layer on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerOnNode {
    /// The node.
    pub node: String,
    /// Whether it is mounted there, once for all sandboxes that use it.
    pub mounted: bool,
    /// Its content there. Lists leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<LayerContent>,
}

/// A layer that a node has at hand, as it tells control alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLayer {
    /// The layer's id.
    pub id: String,
    /// Ids of the node's sandboxes that use it now.
    pub used_by: Vec<String>,
    /// The rest.
    #[serde(flatten)]
    pub here: LayerOnNode,
}

/// What first runs read of a layer, by blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerTrace {
    /// The layer's id.
    pub digest: String,
    /// Each of its blobs.
    pub blobs: Vec<BlobTrace>,
}

/// What first runs read of a blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlobTrace {
    /// The blob's id.
    pub id: String,
    /// Its bytes, uncompressed.
    pub size_bytes: u64,
    /// Runs that were recorded.
    pub runs: u32,
    /// When the last was, Unix ms. Missing without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_ms: Option<u64>,
    /// Bytes that are brought in when a run begins, uncompressed.
    pub traced_bytes: u64,
    /// The groups of 256 KiB that they are, in the order in which they are wanted.
    pub groups: Vec<u32>,
}

/// Which content is to be brought to nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchWhat {
    /// All of it. Whatever starts afterwards reads without the fill worker in between.
    #[default]
    All,
    /// What traces say that runs begin with.
    Trace,
}

/// Brings content of a layer to nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PrefetchRequest {
    /// Which.
    pub what: PrefetchWhat,
}

/// One line of a prefetch's answer (`application/x-ndjson`); the last is `done` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum PrefetchEvent {
    /// How far it is, all nodes together.
    Progress {
        /// Bytes that are wanted, uncompressed.
        wanted_bytes: u64,
        /// Of these, bytes that are not there yet.
        left_bytes: u64,
    },
    /// All that was wanted is there.
    Done {
        /// What is there now, on each of the nodes.
        nodes: Vec<LayerOnNode>,
    },
    /// Some of it did not come; what came stays. `detail.nodes` says of each node that has it not why.
    Error {
        /// Why.
        error: ErrorBody,
    },
}

/// What a collection removed from the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Collected {
    /// Layers.
    pub layers: u64,
    /// Indexes and metadata of theirs.
    pub indexes: u64,
    /// Packs of content.
    pub packs: u64,
    /// Bytes of the packs.
    pub pack_bytes: u64,
    /// Leases, lists, traces and halves of files that stood for nothing any more.
    pub leftovers: u64,
}

/// One line of a collection's answer (`application/x-ndjson`); the last is `done` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CollectEvent {
    /// It goes on.
    Progress {
        /// Since it began, milliseconds.
        elapsed_ms: u64,
    },
    /// It is over.
    Done {
        /// What it removed.
        collected: Collected,
    },
    /// It broke off; nothing that anybody refers to is gone.
    Error {
        /// Why.
        error: ErrorBody,
    },
}

/// One thing that is wrong in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// What, such as `pack 12ab...`.
    pub object: String,
    /// What is wrong with it.
    pub problem: String,
}

/// One line of a verification's answer (`application/x-ndjson`); the last is `done` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum VerifyEvent {
    /// How far it is.
    Progress {
        /// Layers looked at.
        layers: u64,
        /// Packs read.
        packs: u64,
        /// Bytes of them.
        pack_bytes: u64,
    },
    /// All was read.
    Done {
        /// Layers looked at.
        layers: u64,
        /// Packs read.
        packs: u64,
        /// Bytes of them.
        pack_bytes: u64,
        /// What is wrong; empty when all is well.
        findings: Vec<Finding>,
    },
    /// The store does not answer.
    Error {
        /// Why.
        error: ErrorBody,
    },
}
