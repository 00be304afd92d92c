//! Export: a layer with all below it as an image in an OCI layout, for other tools.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use dsec_image::ImageConfig;
use dsec_image::build::{BlobReader, OciLayout};
use dsec_image::erofs::{BlobRef, LayerTree};
use dsec_image::layer::{BlobId, BlobIndex, GROUP_SIZE, LayerId, Manifest, ParentRole};
use tokio::runtime::Handle;

use crate::error::StoreError;
use crate::read::plain;
use crate::store::Store;

/// Groups fetched in one request: content is mostly read in the order it lies in.
const GROUPS_AHEAD: u64 = 16;
/// Groups kept, of 256 KiB.
const GROUPS_KEPT_MAX: usize = 64;

impl Store {
    /// Writes a layer, with those below it, as an image in an OCI layout at `directory`, which must not be there yet: each as
    /// one layer, lowest first. Layers that were merged into one are that one. The caller holds the layer. Gives the
    /// digest of the image's manifest.
    ///
    /// # Errors
    /// [`StoreError`]; `Export` if the directory cannot be written. What is there then has no index and is no image.
    pub async fn export(&self, layer: &LayerId, directory: &Path) -> Result<String, StoreError> {
        let layers = self.with_below(*layer).await?;
        let (directory, mut reader) = (directory.to_owned(), Reader::new(self));
        let writing = move || {
            let failed = |source: io::Error| match source.downcast::<StoreError>() {
                Ok(error) => error,
                Err(source) => StoreError::Export { path: directory.clone(), source },
            };
            let mut layout = OciLayout::create(&directory).map_err(failed)?;
            for (id, manifest) in &layers {
                let image = reader.runtime.block_on(reader.store.metadata(&manifest.metadata))?;
                let tree = LayerTree::decode(&image)
                    .map_err(|error| StoreError::damaged(format!("the metadata of layer {id}"), error))?;
                layout.layer(&tree, &mut reader).map_err(failed)?;
            }
            let config = layers.iter().rev().find_map(|(_, manifest)| manifest.config.clone());
            layout.finish(&config.unwrap_or_else(ImageConfig::of_this_host)).map_err(failed)
        };
        tokio::task::spawn_blocking(writing).await.map_err(|error| self.unavailable("an export", error))?
    }

    /// The layer and all below it, lowest first, each once.
    async fn with_below(&self, layer: LayerId) -> Result<Vec<(LayerId, Manifest)>, StoreError> {
        let (mut layers, mut seen) = (Vec::new(), HashSet::new());
        // A layer comes back with its manifest when all below it has been put down.
        let mut todo = vec![(layer, None)];
        while let Some((id, manifest)) = todo.pop() {
            if let Some(manifest) = manifest {
                layers.push((id, manifest));
                continue;
            }
            if !seen.insert(id) {
                continue;
            }
            let manifest = self.manifest(&id).await?;
            let below = manifest.parents.iter().filter(|parent| parent.role == ParentRole::Below);
            let below: Vec<LayerId> = below.map(|parent| parent.layer).collect();
            todo.push((id, Some(manifest)));
            todo.extend(below.into_iter().rev().map(|parent| (parent, None)));
        }
        Ok(layers)
    }
}

/// Reads blobs group by group on a blocking thread.
struct Reader {
    store: Store,
    runtime: Handle,
    indexes: HashMap<BlobId, Arc<BlobIndex>>,
    groups: HashMap<(BlobId, u64), Bytes>,
    /// The keys of `groups`, the oldest first.
    order: VecDeque<(BlobId, u64)>,
}

impl Reader {
    fn new(store: &Store) -> Self {
        Self {
            store: store.clone(),
            runtime: Handle::current(),
            indexes: HashMap::new(),
            groups: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    fn group(&mut self, blob: &BlobId, number: u64) -> Result<Bytes, StoreError> {
        if let Some(group) = self.groups.get(&(*blob, number)) {
            return Ok(group.clone());
        }
        let index = match self.indexes.get(blob) {
            Some(index) => Arc::clone(index),
            None => {
                let index = Arc::new(self.runtime.block_on(self.store.blob_index(blob))?);
                self.indexes.insert(*blob, Arc::clone(&index));
                index
            }
        };
        let wanted = usize::try_from(number).ok().and_then(|at| index.groups().get(at));
        let pack = wanted.map(|group| group.pack).ok_or_else(|| {
            StoreError::damaged(format!("blob {blob}"), format!("metadata points at its group {number}"))
        })?;
        let ahead = index.groups().iter().skip(number as usize).take(GROUPS_AHEAD as usize);
        let ahead: Vec<_> = ahead.take_while(|group| group.pack == pack).collect();
        let ranges: Vec<_> = ahead.iter().map(|group| group.offset..group.offset + group.stored).collect();
        let pack = index.packs()[pack as usize].id;
        let stored = self.runtime.block_on(self.store.fetch_all(&pack, &ranges))?;
        for ((group, stored), number) in ahead.iter().zip(&stored).zip(number..) {
            let bytes = plain(stored, index.plain_len(number) as usize, &group.hash)
                .map_err(|problem| StoreError::damaged(format!("group {number} in pack {pack}"), problem))?;
            if self.groups.insert((*blob, number), bytes).is_none() {
                self.order.push_back((*blob, number));
            }
        }
        let found = self.groups[&(*blob, number)].clone();
        while self.order.len() > GROUPS_KEPT_MAX {
            self.order.pop_front().and_then(|oldest| self.groups.remove(&oldest));
        }
        Ok(found)
    }
}

impl BlobReader for Reader {
    fn read(&mut self, blob: &BlobRef, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let group = self.group(&blob.id, offset / GROUP_SIZE).map_err(io::Error::other)?;
            let from = (offset % GROUP_SIZE) as usize;
            let Some(bytes) = group.get(from..).filter(|bytes| !bytes.is_empty()) else {
                let what = format!("blob {}", blob.id);
                return Err(io::Error::other(StoreError::damaged(what, "metadata points past its end")));
            };
            let len = bytes.len().min(into.len());
            into[..len].copy_from_slice(&bytes[..len]);
            offset += len as u64;
            into = &mut into[len..];
        }
        Ok(())
    }
}
