//! Traces of layers as people see them, and bringing content to this node because somebody says so.

use std::sync::Arc;
use std::time::Duration;

use dsec_fill::protocol::Fetched;
use dsec_fill::trace::Trace;
use dsec_image::layer::{BlobRef, LayerKind};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, BlobTrace, GROUP_BYTES, LayerOnNode, LayerTrace, PrefetchWhat};
use futures_util::{StreamExt as _, TryStreamExt as _};
use serde_json::json;

use super::Layers;
use super::ready::content_failed;
use crate::error::store_failed;

/// How often it is told how far a prefetch is.
const TELL_EVERY: Duration = Duration::from_millis(250);
/// Blobs that are brought in side by side; how much of each at once is the fill worker's.
const BLOBS_AT_ONCE: usize = 4;

impl Layers {
    /// What first runs read of a layer.
    ///
    /// # Errors
    /// There is no such layer; the store cannot be read.
    pub async fn trace(&self, kind: LayerKind, name: &str) -> Result<LayerTrace, ApiError> {
        let id = self.named(kind, name).await?;
        let manifest = self.manifest(&id).await?;
        let mut blobs = Vec::with_capacity(manifest.blobs.len());
        for blob in &manifest.blobs {
            let trace = self.known_trace(&blob.id).await;
            let recorded_ms = match &trace {
                Some(_) => self.store()?.trace_written_ms(&blob.id).await.map_err(|e| store_failed(&e))?,
                None => None,
            };
            blobs.push(shown(blob, &trace.unwrap_or_default(), recorded_ms));
        }
        Ok(LayerTrace { digest: id.to_string(), blobs })
    }

    /// Brings content of a layer to this node and tells now and then how many bytes are wanted and how many of them left;
    /// `tell` says whether to go on.
    ///
    /// # Errors
    /// There is no such layer, or not all of it came: the store does not answer, the cache has no room.
    pub async fn prefetch(
        self: &Arc<Self>,
        kind: LayerKind,
        name: &str,
        what: PrefetchWhat,
        mut tell: impl FnMut(u64, u64) -> bool + Send,
    ) -> Result<LayerOnNode, ApiError> {
        let id = self.named(kind, name).await?;
        let _pin = self.pin(id);
        let ready = self.ready(id).await?;
        let mut wanted = Vec::with_capacity(ready.manifest.blobs.len());
        for blob in &ready.manifest.blobs {
            match what {
                PrefetchWhat::All => wanted.push((blob.id, None)),
                PrefetchWhat::Trace => {
                    wanted.extend(self.known_trace(&blob.id).await.map(|trace| (blob.id, Some(trace))));
                }
            }
        }
        loop {
            let calls: Vec<_> = wanted
                .iter()
                .map(|(blob, trace)| self.content.fetch(*blob, trace.as_ref(), TELL_EVERY))
                .collect();
            let round = futures_util::stream::iter(calls).buffered(BLOBS_AT_ONCE).try_collect::<Vec<_>>();
            let round = round.await.map_err(|e| content_failed(&e))?;
            let (all, left) = (total(&round, |one| one.wanted_bytes), total(&round, |one| one.left_bytes));
            let goes_on = tell(all, left);
            if left == 0 {
                break;
            }
            if let Some(problem) = round.iter().find_map(|one| one.problem.as_deref()) {
                let message = format!("{left} of {all} bytes of {name} did not come: {problem}");
                return Err(ApiError::new(ErrorKind::Unavailable, message)
                    .detail(json!({ "layer": name, "wanted_bytes": all, "left_bytes": left }))
                    .hint("what came stays; see that the store answers and that the cache has room, and try again"));
            }
            if !goes_on {
                return Err(ApiError::new(ErrorKind::Unavailable, "nobody waits for the prefetch any more"));
            }
        }
        // Whatever starts from now on may have it without the device.
        self.ready_as_of(id, Duration::ZERO).await?;
        Ok(self.held_with_content(&id).await.here)
    }
}

fn total(round: &[Fetched], of: impl Fn(&Fetched) -> u64) -> u64 {
    round.iter().map(of).sum()
}

fn shown(blob: &BlobRef, trace: &Trace, recorded_ms: Option<u64>) -> BlobTrace {
    let groups: Vec<u32> =
        trace.order().into_iter().filter(|group| u64::from(*group) * GROUP_BYTES < blob.size).collect();
    let bytes = |group: &u32| (blob.size - u64::from(*group) * GROUP_BYTES).min(GROUP_BYTES);
    BlobTrace {
        id: blob.id.to_string(),
        size_bytes: blob.size,
        runs: trace.runs(),
        recorded_ms,
        traced_bytes: groups.iter().map(bytes).sum(),
        groups,
    }
}
