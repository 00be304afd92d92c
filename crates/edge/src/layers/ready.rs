//! From a layer's id to what can be mounted: its metadata in a file here, its blobs behind paths; and back.
//!
//! ```text
//! wanted ──► prepare ──► ready ──► wanted again: device gone, or blobs complete by now? renew
//!              ▲           │
//!              └─ forget ◄─┴─ nobody uses it
//! ```
//!
//! All of it goes on under the lock of the layer's slot, so that it cannot be taken away from under whoever wants it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dsec_backend::container::Layer;
use dsec_fill::trace::Trace;
use dsec_image::layer::{BlobId, LayerId, Manifest};
use dsec_proto::rest::ApiError;

use super::Layers;
use super::meta::Note;
use crate::error::{internal, store_failed};

/// When the first reads of a layer are taken for its trace: a run's start is over, its work is not yet.
const TRACE_AFTER: Duration = Duration::from_secs(20);
/// How often a layer that reads through the device is looked at whether it still has to.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A layer that can be mounted.
pub(super) struct Ready {
    pub(super) manifest: Arc<Manifest>,
    pub(super) layer: Layer,
    /// Blobs that are read through the device, since they were not complete.
    partial: Vec<BlobId>,
    /// The device.
    generation: u64,
    looked: Instant,
}

impl Ready {
    /// Whether some of its content is mounted without the device.
    pub(super) fn has_direct_content(&self) -> bool {
        self.partial.len() < self.manifest.blobs.len()
    }

    /// Whether what was found out about it still holds.
    fn holds(&self, generation: u64, age: Duration) -> bool {
        self.partial.is_empty() || (self.generation == generation && self.looked.elapsed() < age)
    }
}

impl Layers {
    /// A layer that can be mounted. Whoever calls this uses it already, or it may be taken away again at any moment.
    ///
    /// # Errors
    /// It cannot be had from the store, or its content not be served.
    pub(super) async fn ready(self: &Arc<Self>, id: LayerId) -> Result<Arc<Ready>, ApiError> {
        self.ready_as_of(id, LOOK_EVERY).await
    }

    /// The same, as it was found to be at most so long ago.
    pub(super) async fn ready_as_of(
        self: &Arc<Self>,
        id: LayerId,
        age: Duration,
    ) -> Result<Arc<Ready>, ApiError> {
        let slot = self.slot(&id);
        let mut here = slot.lock().await;
        self.tell_used(&id).await;
        let ready = match &*here {
            Some(ready) if ready.holds(self.content.generation(), age) => return Ok(Arc::clone(ready)),
            Some(ready) => self.renew(id, ready).await?,
            None => self.prepare(id).await?,
        };
        Ok(Arc::clone(here.insert(Arc::new(ready))))
    }

    /// Holds the layer in the store, brings its metadata here and opens its blobs.
    async fn prepare(self: &Arc<Self>, id: LayerId) -> Result<Ready, ApiError> {
        let lease = self.lease()?;
        let manifest = lease.use_layer(&id).await.map_err(|e| store_failed(&e))?;
        if self.meta.noted(&id).is_none() {
            self.note(id, &manifest, true).await?;
        }
        let image = self.meta.image(&id);
        if !image.exists() {
            let bytes = self.store()?.metadata(&manifest.metadata).await.map_err(|e| store_failed(&e))?;
            let (layers, named) = (Arc::clone(self), manifest.clone());
            on_disk(move || {
                // The host's kernel reads it as root.
                named.check_metadata(&bytes).map_err(std::io::Error::other)?;
                layers.meta.keep(&id, &bytes)
            })
            .await?;
        }
        let ready = self.open_blobs(id, Arc::new(manifest)).await?;
        self.note(id, &ready.manifest, !ready.partial.is_empty()).await?;
        // Before anybody relies on it.
        lease.look_again().await.map_err(|e| store_failed(&e))?;
        self.warm_soon(&ready);
        Ok(ready)
    }

    /// Looks again where the layer's blobs are to be read. What is mounted already stays as it is for those who have it.
    async fn renew(self: &Arc<Self>, id: LayerId, old: &Ready) -> Result<Ready, ApiError> {
        let ready = self.open_blobs(id, Arc::clone(&old.manifest)).await?;
        if ready.generation != old.generation || ready.layer != old.layer {
            self.backend.forget_layer(&ready.layer.image);
            self.note(id, &ready.manifest, !ready.partial.is_empty()).await?;
        }
        if ready.generation != old.generation {
            self.warm_soon(&ready);
        }
        Ok(ready)
    }

    async fn open_blobs(&self, id: LayerId, manifest: Arc<Manifest>) -> Result<Ready, ApiError> {
        // Before the blobs: should the device go meanwhile, it is noticed the next time.
        let generation = self.content.generation();
        let mut devices = Vec::with_capacity(manifest.blobs.len());
        let mut partial = Vec::new();
        for blob in &manifest.blobs {
            let opened = self.blobs.open(blob.id, id).await.map_err(|e| content_failed(&e))?;
            if !opened.direct {
                partial.push(blob.id);
            }
            devices.push(opened.path);
        }
        let layer = Layer { image: self.meta.image(&id), devices };
        Ok(Ready { manifest, layer, partial, generation, looked: Instant::now() })
    }

    async fn note(
        self: &Arc<Self>,
        id: LayerId,
        manifest: &Manifest,
        is_partial: bool,
    ) -> Result<(), ApiError> {
        let (layers, note) = (Arc::clone(self), Note { manifest: manifest.clone(), is_partial });
        on_disk(move || layers.meta.note(&id, &note)).await
    }

    fn warm_soon(self: &Arc<Self>, ready: &Ready) {
        if !ready.partial.is_empty() {
            let (layers, blobs) = (Arc::clone(self), ready.partial.clone());
            tokio::spawn(async move { layers.warm(blobs).await });
        }
    }

    /// Prefetches along what earlier runs read first, then takes what this one reads into it.
    async fn warm(&self, blobs: Vec<BlobId>) {
        for blob in &blobs {
            if let Some(trace) = self.known_trace(blob).await
                && let Err(error) = self.content.prefetch(*blob, Some(&trace)).await
            {
                tracing::warn!(%blob, error = &error as &dyn std::error::Error, "a blob is not prefetched");
            }
        }
        tokio::time::sleep(TRACE_AFTER).await;
        for blob in &blobs {
            if let Err(error) = self.learn(blob).await {
                tracing::warn!(%blob, error = error.0.message, "a blob's trace is not kept");
            }
        }
    }

    pub(super) async fn known_trace(&self, blob: &BlobId) -> Option<Trace> {
        let Ok(store) = self.store() else { return None };
        match store.trace(blob).await {
            Ok(bytes) => bytes.and_then(|bytes| Trace::decode(&bytes).ok()),
            Err(error) => {
                tracing::warn!(%blob, error = &error as &dyn std::error::Error, "a blob's trace cannot be had");
                None
            }
        }
    }

    async fn learn(&self, blob: &BlobId) -> Result<(), ApiError> {
        let seen = self.content.trace(*blob).await.map_err(|e| content_failed(&e))?;
        if seen.order().is_empty() {
            return Ok(());
        }
        let mut all = self.known_trace(blob).await.unwrap_or_default();
        all.merge(&seen);
        self.store()?.put_trace(blob, all.encode().into()).await.map_err(|e| store_failed(&e))
    }

    /// Lets go of a layer unless somebody uses it, here or in an edge before: of its mount, its content, its files and its
    /// hold in the store. Whoever wants it meanwhile waits and finds nothing of it.
    pub(super) async fn let_go(&self, id: &LayerId) {
        // While the store is away it could not be told.
        let Ok(lease) = self.lease() else { return };
        let slot = self.slot(id);
        let mut here = slot.lock().await;
        if self.is_unused(id) {
            *here = None;
            self.forget(id).await;
            if let Err(error) = lease.release_layer(id).await {
                tracing::warn!(layer = %id, error = &error as &dyn std::error::Error, "a layer stays held");
            }
        }
        drop(here);
        self.drop_slot(id, &slot);
    }

    /// Takes away what is on this node of a layer that nobody uses.
    pub(super) async fn forget(&self, id: &LayerId) {
        self.backend.forget_layer(&self.meta.image(id));
        for blob in self.meta.noted(id).into_iter().flat_map(|note| note.manifest.blobs) {
            self.blobs.close(blob.id, *id).await;
        }
        self.meta.remove(id);
    }
}

async fn on_disk(work: impl FnOnce() -> std::io::Result<()> + Send + 'static) -> Result<(), ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| internal("writing a layer's metadata broke off", &e))?
        .map_err(|e| internal("a layer's metadata cannot be kept", &e))
}

/// What the fill worker refuses, as a caller is told.
pub(super) fn content_failed(error: &dsec_fill::client::ClientError) -> ApiError {
    internal("the content of a layer cannot be had", error)
}
