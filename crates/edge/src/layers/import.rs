//! From an archive to a published layer whose content is on this node already.
//!
//! ```text
//! archive ──► part 0 ── known by its diff id? take it from the store ─┐
//!             part 1 ── else build it: blob, packs ──► store          ├─► merge ──► metadata, manifest, name
//!             ...                             └─► plain file ──► cache ┘
//! ```

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dsec_image::build::{ArchiveSource, BuiltBlob, BuiltLayer, Donors, Hidden, PackSink, Workshop, merge};
use dsec_image::erofs::{BlobRef as Pointed, LayerTree};
use dsec_image::layer::{
    BlobId, BlobIndex, BlobRef, Digest, Facts, Label, LayerId, LayerKind, LayerRef, MANIFEST_FORMAT,
    Manifest, MetadataRef, PackId, Parent, ParentRole, Select, Source,
};
use dsec_image::{ImageConfig, ImportError, ImportLimits, ImportPhase, ImportProgress};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, Image};
use dsec_store::{Lease, PackSender, Publish, StoreError};
use tokio::runtime::Handle;

use super::{Layers, names};
use crate::error::{import_failed, internal, store_failed};

/// What says of a layer that it was made here.
const BUILDER: &str = concat!("dsec ", env!("CARGO_PKG_VERSION"));
/// How long a publisher that died keeps what it began.
const LEASE_TTL: Duration = Duration::from_secs(300);
/// Digits of a layer's id that are its version when none is given.
const VERSION_DIGITS: usize = 16;

/// An import that is asked for.
pub struct Import<'a> {
    /// What the layer is for.
    pub kind: LayerKind,
    /// Its name, with a tag to put on it or a version to give it.
    pub name: LayerRef,
    /// The archive.
    pub archive: &'a Path,
    /// Digest of the archive.
    pub digest: String,
    /// What the caller says it is made from.
    pub source: String,
}

/// Hands packs to the store, from a thread that may block.
struct Sink<'a>(&'a PackSender);

impl PackSink for Sink<'_> {
    fn pack(&mut self, _: PackId, bytes: Vec<u8>) -> io::Result<()> {
        // The sending's own end says why it failed.
        if self.0.send(bytes.into()) {
            Ok(())
        } else {
            Err(io::Error::other("the store does not take packs"))
        }
    }
}

/// One archive of an image, as a layer of its own.
struct Part {
    tree: LayerTree,
    /// The published layer, of those that were known.
    known: Option<LayerId>,
    diff_id: Option<String>,
    content_bytes: u64,
}

/// An import at work.
struct Job<'a> {
    layers: &'a Layers,
    asked: &'a Import<'a>,
    lease: Arc<Lease>,
    publish: Publish,
    runtime: Handle,
    work: tempfile::TempDir,
    /// Blobs that were built now.
    built: Vec<BuiltBlob>,
    /// Blobs of known parts, as manifests name them.
    blobs: HashMap<BlobId, (BlobRef, u64)>,
}

impl Layers {
    /// Imports an archive and publishes it. Blocks, for minutes with a large one; on a thread of a runtime that may.
    ///
    /// # Errors
    /// The archive cannot be imported or the store cannot take it; no name has changed then.
    pub fn import(
        &self,
        asked: &Import<'_>,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<Image, ApiError> {
        let runtime = Handle::current();
        let work = tempfile::tempdir_in(self.dir.join("work"))
            .map_err(|e| internal("a directory for the import cannot be made", &e))?;
        // A lease of its own: what a publisher holds goes with it, what the node uses stays.
        let lease = runtime
            .block_on(Lease::begin(&self.store, "import", LEASE_TTL))
            .map(Arc::new)
            .map_err(|e| store_failed(&e))?;
        let publish = runtime.block_on(Publish::begin(Arc::clone(&lease))).map_err(|e| store_failed(&e))?;
        let (built, blobs) = (Vec::new(), HashMap::new());
        let mut job = Job { layers: self, asked, lease, publish, runtime, work, built, blobs };
        let imported = job.run(progress);
        job.end();
        imported
    }
}

impl Job<'_> {
    fn run(&mut self, progress: &mut dyn FnMut(ImportProgress)) -> Result<Image, ApiError> {
        let (parts, config) = self.parts(progress)?;
        let (id, manifest) = self.publish(parts, config)?;
        self.keep_content();
        self.layers.names.forget(self.asked.kind, &self.asked.name.name);
        Ok(self.layers.show(names::shown(&self.asked.name), &id, &manifest))
    }

    /// Gives the lease back; one that cannot be given back runs out.
    fn end(self) {
        let Self { lease, publish, runtime, .. } = self;
        drop(publish);
        if let Some(Err(error)) = Arc::into_inner(lease).map(|lease| runtime.block_on(lease.release())) {
            tracing::warn!(error = &error as &dyn std::error::Error, "an import's lease was not given back");
        }
    }

    /// Makes or finds every part; on return all packs are in the store.
    fn parts(
        &mut self,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(Vec<Part>, ImageConfig), ApiError> {
        let (sender, sending) = self.publish.sender();
        let sending = self.runtime.spawn(sending);
        let made = self.make_parts(&sender, progress);
        drop(sender);
        progress(ImportProgress {
            phase: ImportPhase::Sealing,
            source_bytes: 0,
            source_bytes_total: 0,
            files: 0,
        });
        let sent = self.runtime.block_on(sending).map_err(|e| internal("sending packs broke off", &e))?;
        // A store that refuses is why the making failed, if it did.
        sent.map_err(|e| store_failed(&e))?;
        made
    }

    fn make_parts(
        &mut self,
        sender: &PackSender,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(Vec<Part>, ImageConfig), ApiError> {
        let limits = ImportLimits::default();
        let refused = |e: ImportError| import_failed(&e, self.asked.archive, &self.asked.source);
        let mut source =
            ArchiveSource::open(self.asked.archive, self.work.path(), &limits).map_err(refused)?;
        let mut parts = Vec::new();
        for (number, diff_id) in source.diff_ids().into_iter().enumerate() {
            if let Some(known) = diff_id.as_deref().and_then(|diff_id| self.known(diff_id)) {
                parts.push(known);
                continue;
            }
            let blob_path = self.work.path().join(format!("blob-{number}"));
            let workshop = Workshop {
                blob_path: &blob_path,
                donors: Donors::default(),
                sink: &mut Sink(sender),
                progress,
            };
            let built = source.build(number, workshop).map_err(refused)?;
            let BuiltLayer { layer, blob, diff_id, content_bytes, .. } = built;
            self.built.extend(blob);
            let diff_id = diff_id.map(|digest| format!("sha256:{digest}"));
            parts.push(Part { tree: layer, known: None, diff_id, content_bytes });
        }
        Ok((parts, source.config().clone()))
    }

    /// A part that was converted before and is still there. Whatever is wrong with it, it is made again.
    fn known(&mut self, diff_id: &str) -> Option<Part> {
        let diff_id = if diff_id.contains(':') { diff_id.to_owned() } else { format!("sha256:{diff_id}") };
        let (layers, lease) = (self.layers, &self.lease);
        let found = self.runtime.block_on(async {
            let Some(id) = layers.store.converted(&diff_id).await? else { return Ok(None) };
            let manifest = lease.use_layer(&id).await?;
            let metadata = layers.store.metadata(&manifest.metadata.id).await?;
            let mut sizes = Vec::new();
            for blob in &manifest.blobs {
                sizes.push(packed_bytes(&layers.store.blob_index(&blob.id).await?));
            }
            Ok::<_, StoreError>(Some((id, manifest, metadata, sizes)))
        });
        let (id, manifest, metadata, sizes) = match found {
            Ok(found) => found?,
            Err(error) => {
                tracing::info!(
                    diff_id,
                    error = &error as &dyn std::error::Error,
                    "a layer is converted again"
                );
                return None;
            }
        };
        let tree = LayerTree::decode(&metadata).ok()?;
        self.blobs.extend(manifest.blobs.iter().zip(sizes).map(|(blob, size)| (blob.id, (*blob, size))));
        let content_bytes = manifest.facts.content_bytes;
        Some(Part { tree, known: Some(id), diff_id: Some(diff_id), content_bytes })
    }

    fn publish(&mut self, parts: Vec<Part>, config: ImageConfig) -> Result<(LayerId, Manifest), ApiError> {
        for built in &self.built {
            self.runtime.block_on(self.publish.blob(&built.index)).map_err(|e| store_failed(&e))?;
            let index_size = built.index.encode().len() as u64;
            let blob = BlobRef { id: built.id, index_size, size: built.index.size() };
            self.blobs.insert(built.id, (blob, packed_bytes(&built.index)));
        }
        let is_image = parts.iter().any(|part| part.diff_id.is_some());
        let mut parents = Vec::new();
        if is_image {
            for part in &parts {
                let layer = self.publish_part(part)?;
                parents.push(Parent { layer, role: ParentRole::Merged });
            }
        }
        let trees: Vec<&LayerTree> = parts.iter().map(|part| &part.tree).collect();
        let merged = merge(&trees, Hidden::Drop, ImportLimits::default().max_files).map_err(|e| {
            ApiError::new(ErrorKind::InvalidArgument, format!("the image's layers do not fit: {e}"))
        })?;
        let content_bytes = parts.iter().map(|part| part.content_bytes).sum();
        let (metadata, mut manifest) = self.manifest(&merged, content_bytes)?;
        manifest.kind = self.asked.kind;
        manifest.parents = parents;
        manifest.config = (self.asked.kind == LayerKind::Base).then_some(config);
        manifest.facts.diff_ids = parts.iter().filter_map(|part| part.diff_id.clone()).collect();
        let id = self.name(metadata, &manifest)?;
        Ok((id, manifest))
    }

    /// Publishes a part for the next image that has it.
    fn publish_part(&self, part: &Part) -> Result<LayerId, ApiError> {
        if let Some(known) = part.known {
            return Ok(known);
        }
        let (metadata, mut manifest) = self.manifest(&part.tree, part.content_bytes)?;
        manifest.facts.diff_ids = part.diff_id.iter().cloned().collect();
        let published = self.runtime.block_on(async {
            let id = self.publish.finish(&[], metadata.into(), &manifest, None).await?;
            if let Some(diff_id) = &part.diff_id {
                self.layers.store.put_converted(diff_id, id).await?;
            }
            Ok(id)
        });
        published.map_err(|e: StoreError| store_failed(&e))
    }

    /// The metadata image of a tree, and a manifest of a base without a parent.
    fn manifest(&self, layer: &LayerTree, content_bytes: u64) -> Result<(Vec<u8>, Manifest), ApiError> {
        let (metadata, pointed) =
            layer.encode().map_err(|e| internal("the layer's metadata cannot be written", &e))?;
        let blobs = pointed.iter().map(|blob| self.blob(blob)).collect::<Result<Vec<_>, _>>()?;
        let files = layer.tree.iter().count() as u64;
        let newest = layer.tree.iter().map(|(_, inode)| inode.attributes.mtime.seconds).max();
        let manifest = Manifest {
            format: MANIFEST_FORMAT,
            kind: LayerKind::Base,
            metadata: MetadataRef {
                id: dsec_image::layer::MetadataId(Digest::of(&metadata)),
                size: metadata.len() as u64,
            },
            blobs: blobs.iter().map(|(blob, _)| *blob).collect(),
            parents: Vec::new(),
            config: None,
            facts: Facts {
                // Of the content and not of the import, so that the same archive is the same layer.
                created_unix_ms: newest.map_or(0, |seconds| u64::try_from(seconds).unwrap_or(0) * 1000),
                builder: BUILDER.to_owned(),
                source: Source::Archive {
                    name: self.asked.source.clone(),
                    digest: self.asked.digest.clone(),
                },
                diff_ids: Vec::new(),
                files,
                content_bytes,
                stored_bytes: metadata.len() as u64 + blobs.iter().map(|(_, packed)| packed).sum::<u64>(),
            },
        };
        Ok((metadata, manifest))
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

    /// Publishes the layer under its name.
    fn name(&self, metadata: Vec<u8>, manifest: &Manifest) -> Result<LayerId, ApiError> {
        let Import { kind, name, .. } = self.asked;
        let id = manifest.id().map_err(|e| internal("the layer's manifest cannot be written", &e))?;
        let (version, tag) = match &name.select {
            Select::Version(version) => (version.clone(), Label::latest()),
            Select::Tag(tag) => {
                let digits: String = id.to_string().chars().take(VERSION_DIGITS).collect();
                let version = digits.parse().map_err(|e| internal("a version cannot be made", &e))?;
                (version, tag.clone())
            }
        };
        let named = self.runtime.block_on(async {
            self.publish.finish(&[], metadata.into(), manifest, Some((&name.name, &version))).await?;
            self.layers.store.tag(*kind, &name.name, &tag, &version).await
        });
        named.map_err(|e| store_failed(&e))?;
        Ok(id)
    }

    /// Gives the content that was just made to the cache, so that nothing of it is fetched here.
    fn keep_content(&self) {
        for built in &self.built {
            let kept = self.runtime.block_on(self.layers.content.hand_over(built.id, &built.path));
            if let Err(error) = kept {
                tracing::warn!(blob = %built.id, error = &error as &dyn std::error::Error, "new content is not cached");
            }
        }
    }
}

fn packed_bytes(index: &BlobIndex) -> u64 {
    index.packs().iter().map(|pack| u64::from(pack.size)).sum()
}
