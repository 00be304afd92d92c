//! Where the content of layers can be read on this node: the fill worker, behind a trait.

use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use dsec_fill::client::{ClientError, Opened};
use dsec_fill::protocol::{BlobStats, Fetched, Room, Stats};
use dsec_fill::trace::Trace;
use dsec_image::layer::BlobId;

/// A call under way.
pub type Calling<'a, T> = Pin<Box<dyn Future<Output = Result<T, ClientError>> + Send + 'a>>;

/// The content of blobs on this node.
pub trait Content: Send + Sync + 'static {
    /// How many devices there were before this one, beginning with the one that an earlier edge left: what is mounted from
    /// an earlier device reads errors.
    fn generation(&self) -> u64;
    /// Makes a blob readable and says where.
    fn open(&self, blob: BlobId) -> Calling<'_, Opened>;
    /// The blob is not mounted any more.
    fn close(&self, blob: BlobId) -> Calling<'_, ()>;
    /// Takes over the file of a blob that was made here just now.
    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool>;
    /// Brings content in ahead of demand.
    fn prefetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>) -> Calling<'a, ()>;
    /// Brings content in, along a trace or all of it, and tells within the limit how far it is.
    fn fetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>, limit: Duration) -> Calling<'a, Fetched>;
    /// What was wanted of the blob, in order.
    fn trace(&self, blob: BlobId) -> Calling<'_, Trace>;
    /// What was done and what is here, over all blobs.
    fn stats(&self) -> Calling<'_, Stats>;
    /// What was done for these blobs, and what of them is here.
    fn look<'a>(&'a self, blobs: &'a [BlobId]) -> Calling<'a, Vec<BlobStats>>;
    /// What the cache has room for.
    fn room(&self) -> Calling<'_, Room>;
    /// Takes a blob's content out, unless it may not go: bytes that became free.
    fn evict(&self, blob: BlobId) -> Calling<'_, u64>;
    /// Ends it; no layer is mounted.
    fn shut_down(&self) -> Calling<'_, ()>;
}
