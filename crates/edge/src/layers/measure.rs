//! What was done for the content of layers, and what of it is here.

use std::collections::HashMap;
use std::time::Duration;

use dsec_fill::engine::Counts;
use dsec_fill::protocol::BlobStats;
use dsec_image::layer::{BlobId, LayerId, Manifest};
use dsec_proto::rest::{BlobContent, ContentCounts, HeldLayer, LayerContent, LayerOnNode};

use super::Layers;

/// How long a look waits for a worker that is being replaced: what is asked for beside it is wanted at once.
const LOOK_MAX: Duration = Duration::from_secs(1);

impl Layers {
    /// The content of these layers, as far as the fill worker answers.
    pub async fn contents(&self, ids: &[LayerId]) -> HashMap<LayerId, LayerContent> {
        let mut manifests = Vec::with_capacity(ids.len());
        for id in ids {
            if let Ok(manifest) = self.manifest(id).await {
                manifests.push((*id, manifest));
            }
        }
        let mut blobs: Vec<BlobId> =
            manifests.iter().flat_map(|(_, manifest)| manifest.blobs.iter().map(|blob| blob.id)).collect();
        blobs.sort_unstable();
        blobs.dedup();
        let Ok(Ok(known)) = tokio::time::timeout(LOOK_MAX, self.content.look(&blobs)).await else {
            return HashMap::new();
        };
        let known: HashMap<BlobId, BlobStats> = known.into_iter().map(|known| (known.blob, known)).collect();
        manifests.into_iter().map(|(id, manifest)| (id, content(&manifest, &known))).collect()
    }

    /// The layers that this node has at hand.
    pub fn held_layers(&self) -> Vec<HeldLayer> {
        let ids: Vec<LayerId> = self.entries().keys().copied().collect();
        ids.iter().map(|id| self.held_layer(id, None)).collect()
    }

    /// One layer on this node, at hand or not, and its content.
    pub async fn held_with_content(&self, id: &LayerId) -> HeldLayer {
        let content = self.contents(&[*id]).await.remove(id);
        self.held_layer(id, content)
    }

    fn held_layer(&self, id: &LayerId, content: Option<LayerContent>) -> HeldLayer {
        let used_by = self.users(id).iter().map(ToString::to_string).collect();
        HeldLayer { id: id.to_string(), used_by, here: self.here(id, content) }
    }

    /// A layer as it is on this node.
    pub(super) fn here(&self, id: &LayerId, content: Option<LayerContent>) -> LayerOnNode {
        let mounted = self.backend.has_layer(&self.meta.image(id));
        LayerOnNode { node: self.node.clone(), mounted, content }
    }

    /// What was done for all content of this node, and the bytes of it that are here.
    pub async fn content_of_node(&self) -> Option<(u64, ContentCounts)> {
        let stats = tokio::time::timeout(LOOK_MAX, self.content.stats()).await.ok()?.ok()?;
        Some((stats.used_bytes, counts(&stats.counts)))
    }
}

fn content(manifest: &Manifest, known: &HashMap<BlobId, BlobStats>) -> LayerContent {
    let mut content = LayerContent::default();
    for blob in &manifest.blobs {
        let known = known.get(&blob.id);
        let one = BlobContent {
            id: blob.id.to_string(),
            size_bytes: blob.size,
            here_bytes: known.map_or(0, |known| known.here_bytes),
            counts: known.map(|known| counts(&known.counts)).unwrap_or_default(),
        };
        content.size_bytes += one.size_bytes;
        content.here_bytes += one.here_bytes;
        add(&mut content.counts, &one.counts);
        content.blobs.push(one);
    }
    content
}

fn counts(counts: &Counts) -> ContentCounts {
    ContentCounts {
        asked_bytes: counts.asked_bytes,
        cached_bytes: counts.cached_bytes,
        fetched_bytes: counts.fetched_bytes,
        fetches: counts.fetches,
        failed_reads: counts.failed_reads,
        waited_ms: counts.waited_us / 1000,
    }
}

fn add(all: &mut ContentCounts, one: &ContentCounts) {
    all.asked_bytes += one.asked_bytes;
    all.cached_bytes += one.cached_bytes;
    all.fetched_bytes += one.fetched_bytes;
    all.fetches += one.fetches;
    all.failed_reads += one.failed_reads;
    all.waited_ms += one.waited_ms;
}
