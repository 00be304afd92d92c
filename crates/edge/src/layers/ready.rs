//! From a layer's id to what can be mounted: its metadata in a file here, its blobs behind paths.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsec_backend::container::Layer;
use dsec_fill::trace::Trace;
use dsec_image::layer::{BlobId, LayerId, Manifest};
use dsec_proto::rest::ApiError;

use super::Layers;
use crate::error::{internal, store_failed};

/// When the first reads of a layer are taken for its trace: a run's start is over, its work is not yet.
const TRACE_AFTER: Duration = Duration::from_secs(20);

/// A layer that can be mounted.
pub(super) struct Ready {
    pub(super) manifest: Manifest,
    pub(super) layer: Layer,
}

impl Layers {
    fn metadata_path(&self, id: &LayerId) -> PathBuf {
        self.dir.join("meta").join(format!("{id}.erofs"))
    }

    /// Holds the layer in the store, brings its metadata here and opens its blobs.
    pub(super) async fn prepare(self: &Arc<Self>, id: LayerId) -> Result<Arc<Ready>, ApiError> {
        let manifest = self.lease.use_layer(&id).await.map_err(|e| store_failed(&e))?;
        let image = self.metadata_path(&id);
        if !image.exists() {
            let bytes = self.store.metadata(&manifest.metadata.id).await.map_err(|e| store_failed(&e))?;
            let target = image.clone();
            tokio::task::spawn_blocking(move || write_whole(&target, &bytes))
                .await
                .map_err(|e| internal("writing a layer's metadata broke off", &e))?
                .map_err(|e| internal("a layer's metadata cannot be kept", &e))?;
        }
        let mut devices = Vec::with_capacity(manifest.blobs.len());
        let mut partial = Vec::new();
        for blob in &manifest.blobs {
            let opened = self.content.open(blob.id).await.map_err(|e| content_failed(&e))?;
            if !opened.direct {
                partial.push(blob.id);
            }
            devices.push(opened.path);
        }
        if !partial.is_empty() {
            let layers = Arc::clone(self);
            tokio::spawn(async move { layers.warm(partial).await });
        }
        Ok(Arc::new(Ready { manifest, layer: Layer { image, devices } }))
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

    async fn known_trace(&self, blob: &BlobId) -> Option<Trace> {
        match self.store.trace(blob).await {
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
        self.store.put_trace(blob, all.encode().into()).await.map_err(|e| store_failed(&e))
    }

    /// Takes back what [`Self::prepare`] did, here or in an edge before. Nobody uses the layer.
    pub(super) async fn forget(&self, id: &LayerId, ready: Option<Arc<Ready>>) {
        let image = self.metadata_path(id);
        self.backend.forget_layer(&image);
        if let Some(ready) = ready {
            self.close_blobs(&ready).await;
        }
        let _ = std::fs::remove_file(&image);
        if let Err(error) = self.lease.release_layer(id).await {
            tracing::warn!(layer = %id, error = &error as &dyn std::error::Error, "a layer stays held");
        }
    }

    async fn close_blobs(&self, ready: &Ready) {
        let still_used: Vec<BlobId> = {
            let entries = self.entries();
            let others = entries.values().filter_map(|entry| entry.slot.get());
            others.flat_map(|other| other.manifest.blobs.iter().map(|blob| blob.id)).collect()
        };
        for blob in ready.manifest.blobs.iter().filter(|blob| !still_used.contains(&blob.id)) {
            if let Err(error) = self.content.close(blob.id).await {
                tracing::warn!(blob = %blob.id, error = &error as &dyn std::error::Error, "a blob stays open");
            }
        }
    }
}

/// Beside it first, so that a file under its name is whole.
fn write_whole(target: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = target.parent().unwrap_or(target);
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    std::io::Write::write_all(&mut draft, bytes)?;
    draft.as_file().sync_data()?;
    draft.persist(target)?;
    Ok(())
}

/// What the fill worker refuses, as a caller is told.
pub(super) fn content_failed(error: &dsec_fill::client::ClientError) -> ApiError {
    internal("the content of a layer cannot be had", error)
}
