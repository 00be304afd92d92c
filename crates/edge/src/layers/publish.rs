//! What the making of a layer needs and ends in, whatever it is made of: a session at the store for its packs, a manifest, a name,
//! and content that stays on this node.
//!
//! ```text
//! begin ──► with_packs: the maker hands packs over ──► draft: metadata, manifest ──► finish / name ──► keep_content ──► end
//!   lease, work directory                              blobs built now or known
//! ```

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dsec_image::build::{BuiltBlob, FileIndex, PackSink};
use dsec_image::erofs::{BlobRef as Pointed, LayerTree};
use dsec_image::layer::{
    BlobId, BlobIndex, BlobRef, Digest, Facts, Label, LayerId, LayerKind, LayerRef, MANIFEST_FORMAT,
    Manifest, MetadataId, MetadataRef, PackId, Parent, Select, Source,
};
use dsec_proto::rest::ApiError;
use dsec_store::{Lease, PackSender, Publish, Store, StoreError};
use tokio::runtime::Handle;

use super::Layers;
use crate::error::{internal, store_failed};

/// What says of a layer that it was made here.
const BUILDER: &str = concat!("dsec ", env!("CARGO_PKG_VERSION"));
/// How long a publisher that died keeps what it began.
const LEASE_TTL: Duration = Duration::from_secs(300);
/// Digits of a layer's id that are its version when none is given.
const VERSION_DIGITS: usize = 16;

/// Hands packs to the store, from a thread that may block.
pub(super) struct Sink<'a>(&'a PackSender);

impl PackSink for Sink<'_> {
    fn pack(&mut self, id: PackId, bytes: Vec<u8>) -> io::Result<()> {
        // The sending's own end says why it failed.
        if self.0.send(id, bytes.into()) {
            Ok(())
        } else {
            Err(io::Error::other("the store does not take packs"))
        }
    }
}

/// What is said of a layer besides what is in it.
pub(super) struct About {
    pub(super) kind: LayerKind,
    pub(super) parents: Vec<Parent>,
    pub(super) source: Source,
    pub(super) diff_ids: Vec<String>,
    /// Sum of the sizes of its files in bytes.
    pub(super) content_bytes: u64,
}

/// A layer that is ready to be published.
pub(super) struct Draft {
    pub(super) metadata: Vec<u8>,
    pub(super) manifest: Manifest,
}

/// One making of layers. Blocks; on a thread of a runtime that may.
pub(super) struct Session<'a> {
    layers: &'a Layers,
    lease: Arc<Lease>,
    publish: Publish,
    runtime: Handle,
    work: tempfile::TempDir,
    /// Blobs that were built now.
    built: Vec<BuiltBlob>,
    /// Of those, how many have their index in the store.
    indexes_sent: usize,
    /// Blobs that layers may point into, as manifests name them, with their bytes in the store.
    blobs: HashMap<BlobId, (BlobRef, u64)>,
}

impl<'a> Session<'a> {
    /// A session for `holder`, with a lease of its own: what a publisher holds goes with it, what the node uses stays.
    ///
    /// # Errors
    /// The store cannot be reached, or the work directory not be made.
    pub(super) fn begin(layers: &'a Layers, holder: &str) -> Result<Self, ApiError> {
        let runtime = Handle::current();
        let work = tempfile::tempdir_in(layers.dir.join("work"))
            .map_err(|e| internal("a directory for the layer cannot be made", &e))?;
        let lease = runtime
            .block_on(Lease::begin(layers.store()?, holder, LEASE_TTL))
            .map(Arc::new)
            .map_err(|e| store_failed(&e))?;
        let publish = runtime.block_on(Publish::begin(Arc::clone(&lease))).map_err(|e| store_failed(&e))?;
        Ok(Self {
            layers,
            lease,
            publish,
            runtime,
            work,
            built: Vec::new(),
            indexes_sent: 0,
            blobs: HashMap::new(),
        })
    }

    /// Gives the lease back; one that cannot be given back runs out.
    pub(super) fn end(self) {
        let Self { lease, publish, runtime, .. } = self;
        drop(publish);
        if let Some(Err(error)) = Arc::into_inner(lease).map(|lease| runtime.block_on(lease.release())) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "a publisher's lease was not given back"
            );
        }
    }

    /// What the session holds its layers by.
    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The store it is at.
    pub(super) fn store(&self) -> &Store {
        self.lease.store()
    }

    /// A directory that goes with the session.
    pub(super) fn work(&self) -> &Path {
        self.work.path()
    }

    /// Waits for what the store answers.
    pub(super) fn wait<T>(&self, asked: impl Future<Output = T>) -> T {
        self.runtime.block_on(asked)
    }

    /// Has layers made; on return all their packs are in the store.
    ///
    /// # Errors
    /// The store's, which are why the making failed if it did, else the making's.
    pub(super) fn with_packs<T>(
        &mut self,
        make: impl FnOnce(&mut Self, &mut Sink<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let (sender, sending) = self.publish.sender();
        let sending = self.runtime.spawn(sending);
        let made = make(self, &mut Sink(&sender));
        drop(sender);
        let sent = self.runtime.block_on(sending).map_err(|e| internal("sending packs broke off", &e))?;
        sent.map_err(|e| store_failed(&e))?;
        made
    }

    /// Takes over a blob that was built now.
    pub(super) fn add(&mut self, blob: BuiltBlob) {
        let index_size = blob.index.encode().len() as u64;
        let named = BlobRef { id: blob.id, index_size, size: blob.index.size() };
        self.blobs.insert(blob.id, (named, packed_bytes(&blob.index)));
        self.built.push(blob);
    }

    /// Learns of the blobs of a layer that is there, as far as they are `wanted`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn know(
        &mut self,
        manifest: &Manifest,
        wanted: impl Fn(&BlobId) -> bool,
    ) -> Result<(), StoreError> {
        for blob in manifest.blobs.iter().filter(|blob| wanted(&blob.id)) {
            if !self.blobs.contains_key(&blob.id) {
                let index = self.runtime.block_on(self.store().blob_index(&blob.id))?;
                self.blobs.insert(blob.id, (*blob, packed_bytes(&index)));
            }
        }
        Ok(())
    }

    /// Bytes in the store of the blobs that were built now.
    pub(super) fn built_bytes(&self) -> u64 {
        self.built.iter().filter_map(|blob| self.blobs.get(&blob.id)).map(|(_, packed)| packed).sum()
    }

    /// The metadata image of a tree, and its manifest.
    ///
    /// # Errors
    /// The tree points into a blob that is neither built nor known, or cannot be written.
    pub(super) fn draft(&self, layer: &LayerTree, about: About) -> Result<Draft, ApiError> {
        let (metadata, pointed) =
            layer.encode().map_err(|e| internal("the layer's metadata cannot be written", &e))?;
        let blobs = pointed.iter().map(|blob| self.blob(blob)).collect::<Result<Vec<_>, _>>()?;
        let newest = layer.tree.iter().map(|(_, inode)| inode.attributes.mtime.seconds).max();
        let manifest = Manifest {
            format: MANIFEST_FORMAT,
            kind: about.kind,
            metadata: MetadataRef { id: MetadataId(Digest::of(&metadata)), size: metadata.len() as u64 },
            blobs: blobs.iter().map(|(blob, _)| *blob).collect(),
            parents: about.parents,
            config: None,
            facts: Facts {
                // Of the content and not of its making, so that the same content is the same layer.
                created_unix_ms: newest.map_or(0, |seconds| u64::try_from(seconds).unwrap_or(0) * 1000),
                builder: BUILDER.to_owned(),
                source: about.source,
                diff_ids: about.diff_ids,
                files: layer.tree.iter().count() as u64,
                content_bytes: about.content_bytes,
                stored_bytes: metadata.len() as u64 + blobs.iter().map(|(_, packed)| packed).sum::<u64>(),
            },
        };
        Ok(Draft { metadata, manifest })
    }

    fn blob(&self, pointed: &Pointed) -> Result<(BlobRef, u64), ApiError> {
        let missing = || {
            internal(
                "the layer's metadata cannot be written",
                &io::Error::other("it points into an unknown blob"),
            )
        };
        self.blobs.get(&pointed.id).copied().ok_or_else(missing)
    }

    /// Publishes a layer without a name.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn finish(&mut self, draft: Draft, files: &FileIndex) -> Result<LayerId, StoreError> {
        let Draft { metadata, manifest } = draft;
        self.put_indexes()?;
        let id = self.runtime.block_on(self.publish.finish(&[], metadata.into(), &manifest, None))?;
        self.put_files(&id, files);
        Ok(id)
    }

    /// Publishes a layer and gives it its name: a version, of the layer's id unless one is asked for, and the tag on it.
    ///
    /// # Errors
    /// The store's; the version is another layer.
    pub(super) fn name(
        &mut self,
        draft: Draft,
        files: &FileIndex,
        name: &LayerRef,
    ) -> Result<LayerId, ApiError> {
        let Draft { metadata, manifest } = draft;
        let id = manifest.id().map_err(|e| internal("the layer's manifest cannot be written", &e))?;
        let (version, tag) = version_and_tag(&id, name)?;
        self.put_indexes().map_err(|e| store_failed(&e))?;
        let named = self.runtime.block_on(async {
            self.publish.finish(&[], metadata.into(), &manifest, Some((&name.name, &version))).await?;
            self.store().tag(manifest.kind, &name.name, &tag, &version).await
        });
        named.map_err(|e| store_failed(&e))?;
        self.layers.names.forget(manifest.kind, &name.name);
        self.put_files(&id, files);
        Ok(id)
    }

    fn put_indexes(&mut self) -> Result<(), StoreError> {
        for built in &self.built[self.indexes_sent..] {
            self.runtime.block_on(self.publish.blob(&built.index))?;
        }
        self.indexes_sent = self.built.len();
        Ok(())
    }

    /// Says where the files of a layer lie. Without it, what is made over it later only stores more.
    fn put_files(&self, id: &LayerId, files: &FileIndex) {
        if let Err(error) = self.runtime.block_on(self.publish.files(id, files)) {
            tracing::warn!(layer = %id, error = &error as &dyn std::error::Error, "a layer gives nothing to later ones");
        }
    }

    /// Gives the content that was just made to the cache, so that nothing of it is fetched here.
    pub(super) fn keep_content(&self) {
        for built in &self.built {
            let kept = self.runtime.block_on(self.layers.content.hand_over(built.id, &built.path));
            if let Err(error) = kept {
                tracing::warn!(blob = %built.id, error = &error as &dyn std::error::Error, "new content is not cached");
            }
        }
    }
}

/// The version that a name gives a layer, of the layer's id unless the name says one, and the tag that is put on it.
///
/// # Errors
/// None that could be the caller's.
pub(super) fn version_and_tag(id: &LayerId, name: &LayerRef) -> Result<(Label, Label), ApiError> {
    match &name.select {
        Select::Version(version) => Ok((version.clone(), Label::latest())),
        Select::Tag(tag) => {
            let digits: String = id.to_string().chars().take(VERSION_DIGITS).collect();
            let version = digits.parse().map_err(|e| internal("a version cannot be made", &e))?;
            Ok((version, tag.clone()))
        }
    }
}

fn packed_bytes(index: &BlobIndex) -> u64 {
    index.packs().iter().map(|pack| u64::from(pack.size)).sum()
}
