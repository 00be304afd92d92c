//! Publishing a layer: packs, then indexes and metadata, then the manifest, then the name. Killed anywhere it leaves objects that
//! nothing refers to, which the next attempt finds and the collection removes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dsec_image::build::FileIndex;
use dsec_image::layer::{
    BlobId, BlobIndex, BlobRef, Digest, Label, LayerId, LayerName, Manifest, MetadataId, PACK_SIZE_MAX,
    PackId, PackRef,
};
use futures_util::future::try_join_all;
use tokio::sync::{Semaphore, mpsc};

use crate::error::StoreError;
use crate::key;
use crate::lease::Lease;
use crate::read;
use crate::store::Store;

/// Packs being sent at once, each of up to 32 MiB in memory.
const UPLOADS_MAX: usize = 4;
/// Looks at what a layer refers to under way at once: over a network each takes a round trip.
const LOOKS_MAX: usize = 16;
/// Packs waiting between a writer on a blocking thread and the uploads: one, so that the writer goes on while all are busy.
const PACKS_WAITING_MAX: usize = 1;

/// One publisher's session. Cheap to clone: clones share the lease and the limit of uploads.
#[derive(Debug, Clone)]
pub struct Publish {
    lease: Arc<Lease>,
    uploads: Arc<Semaphore>,
    /// Blobs whose indexes this session put, with their sizes: their content needs no second look.
    blobs: Arc<Mutex<HashMap<BlobId, u64>>>,
}

impl Publish {
    /// A session under a lease, which the caller keeps until what it publishes has a name or a child.
    ///
    /// # Errors
    /// `LeaseLost`, or there is no store where one was.
    pub async fn begin(lease: Arc<Lease>) -> Result<Self, StoreError> {
        lease.check()?;
        lease.store().check_marker().await?;
        Ok(Self { lease, uploads: Arc::new(Semaphore::new(UPLOADS_MAX)), blobs: Arc::default() })
    }

    fn store(&self) -> &Store {
        self.lease.store()
    }

    /// Sends a pack, unless the store has it. At most [`UPLOADS_MAX`] at once; the others wait. Its id is the digest of its bytes, as
    /// who made it knows: it is not worked out again.
    ///
    /// # Errors
    /// [`StoreError`]; sending it again is harmless.
    pub async fn pack(&self, id: PackId, bytes: Bytes) -> Result<(), StoreError> {
        if bytes.is_empty() || bytes.len() > PACK_SIZE_MAX as usize {
            return Err(StoreError::damaged("a pack to publish", format!("it has {} bytes", bytes.len())));
        }
        // The semaphore is never closed.
        let _slot = self.uploads.acquire().await.ok();
        self.ensure(&key::pack(&id), bytes).await
    }

    /// Sends a blob's index. Its packs are there already.
    ///
    /// # Errors
    /// `NotFound` or `Damaged` names a pack that is not there, or not in its length.
    pub async fn blob(&self, index: &BlobIndex) -> Result<BlobId, StoreError> {
        for packs in index.packs().chunks(LOOKS_MAX) {
            let look = |pack: &PackRef| {
                let (key, what) = (key::pack(&pack.id), format!("pack {}", pack.id));
                let size = u64::from(pack.size);
                async move { self.require(&key, size, &what).await }
            };
            try_join_all(packs.iter().map(look)).await?;
        }
        let bytes = index.encode();
        if bytes.len() as u64 > read::INDEX_SIZE_MAX {
            let problem =
                format!("it has {} bytes and may have {} at most", bytes.len(), read::INDEX_SIZE_MAX);
            return Err(StoreError::damaged("the index of a blob to publish", problem));
        }
        let id = BlobId(Digest::of(&bytes));
        self.ensure(&key::blob(&id), bytes.into()).await?;
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner).insert(id, index.size());
        Ok(id)
    }

    /// Sends a metadata image.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn metadata(&self, bytes: Bytes) -> Result<MetadataId, StoreError> {
        let id = MetadataId(Digest::of(&bytes));
        self.ensure(&key::metadata(&id), bytes).await?;
        Ok(id)
    }

    /// Makes the layer be there, after a look at all it refers to: nothing is published that could not be used.
    ///
    /// # Errors
    /// `NotFound` or `Damaged` names what it refers to and is not there or of another size than it says.
    pub async fn manifest(&self, manifest: &Manifest) -> Result<LayerId, StoreError> {
        let bytes = manifest.encode()?;
        let id = LayerId(Digest::of(&bytes));
        let metadata = &manifest.metadata;
        self.require(&key::metadata(&metadata.id), metadata.size, &format!("metadata {}", metadata.id))
            .await?;
        for blobs in manifest.blobs.chunks(LOOKS_MAX) {
            try_join_all(blobs.iter().map(|blob| self.look_at(blob))).await?;
        }
        for parents in manifest.parents.chunks(LOOKS_MAX) {
            try_join_all(parents.iter().map(|parent| self.lease.use_layer(&parent.layer))).await?;
        }
        self.lease.look_again().await?;
        self.ensure(&key::layer(&id), bytes.into()).await?;
        Ok(id)
    }

    /// Looks at a blob that a manifest names, and at its packs unless this session put it.
    async fn look_at(&self, blob: &BlobRef) -> Result<(), StoreError> {
        let what = format!("the index of blob {}", blob.id);
        self.require(&key::blob(&blob.id), blob.index_size, &what).await?;
        if self.blobs.lock().unwrap_or_else(PoisonError::into_inner).get(&blob.id) == Some(&blob.size) {
            return Ok(());
        }
        let index = self.store().blob_index(&blob.id).await?;
        if index.size() != blob.size {
            let problem = format!("the manifest gives it {} bytes, its index {}", blob.size, index.size());
            return Err(StoreError::damaged(format!("blob {}", blob.id), problem));
        }
        self.blob(&index).await.map(drop)
    }

    /// Says where the content of a layer's files lies, so that layers made later need not store it again. The layer is
    /// there already. Of one with too many files nothing is said.
    ///
    /// # Errors
    /// `NotFound` if it is not.
    pub async fn files(&self, layer: &LayerId, files: &FileIndex) -> Result<(), StoreError> {
        self.lease.use_layer(layer).await?;
        let bytes = read::seal(&files.encode());
        if bytes.len() as u64 > read::FILES_SIZE_MAX {
            tracing::warn!(%layer, size = bytes.len(), "too many files to say where they lie");
            return Ok(());
        }
        self.ensure(&key::files(layer), bytes).await
    }

    /// Gives the layer a version of a name, the last step.
    ///
    /// # Errors
    /// `Conflict` if the version is another layer; `LeaseLost` if what the layer refers to may be gone: begin again.
    pub async fn name(
        &self,
        manifest: &Manifest,
        name: &LayerName,
        version: &Label,
    ) -> Result<LayerId, StoreError> {
        let id = self.manifest(manifest).await?;
        self.lease.check()?;
        self.store().put_version(manifest.kind, name, version, id).await?;
        // Had the lease run out on the way, the name could stand for what is gone: then the publisher is told, and tries again.
        self.lease.check()?;
        self.lease.look_again().await?;
        Ok(id)
    }

    /// All that follows the packs, in order.
    ///
    /// # Errors
    /// As the steps.
    pub async fn finish(
        &self,
        indexes: &[BlobIndex],
        metadata: Bytes,
        manifest: &Manifest,
        name: Option<(&LayerName, &Label)>,
    ) -> Result<LayerId, StoreError> {
        for index in indexes {
            self.blob(index).await?;
        }
        self.metadata(metadata).await?;
        match name {
            Some((name, version)) => self.name(manifest, name, version).await,
            None => self.manifest(manifest).await,
        }
    }

    /// A way in for a writer on a blocking thread: at most [`PACKS_WAITING_MAX`] + [`UPLOADS_MAX`] packs are in memory. The
    /// future sends what comes until the sender is dropped, and must be polled; it ends with the first failure.
    pub fn sender(&self) -> (PackSender, impl Future<Output = Result<(), StoreError>> + Send + 'static) {
        let (sender, mut packs) = mpsc::channel::<(PackId, Bytes)>(PACKS_WAITING_MAX);
        let session = self.clone();
        let sending = async move {
            let mut under_way = tokio::task::JoinSet::new();
            loop {
                let next = tokio::select! {
                    Some(done) = under_way.join_next() => { session.joined(done)?; continue }
                    next = packs.recv(), if under_way.len() < UPLOADS_MAX => next,
                };
                let Some((id, pack)) = next else { break };
                let session = session.clone();
                under_way.spawn(async move { session.pack(id, pack).await });
            }
            while let Some(done) = under_way.join_next().await {
                session.joined(done)?;
            }
            Ok(())
        };
        (PackSender(sender), sending)
    }

    fn joined<T>(
        &self,
        done: Result<Result<T, StoreError>, tokio::task::JoinError>,
    ) -> Result<T, StoreError> {
        done.unwrap_or_else(|error| Err(self.store().unavailable("a pack's upload", error)))
    }

    /// An object that must be there in this size, held.
    async fn require(&self, key: &str, size: u64, what: &str) -> Result<(), StoreError> {
        self.lease.settle(key).await?;
        match self.store().head(key).await? {
            None => Err(StoreError::NotFound { what: what.to_owned() }),
            Some(found) if found.size != size => {
                Err(StoreError::damaged(what, format!("it has {} bytes and should have {size}", found.size)))
            }
            Some(_) => Ok(()),
        }
    }

    /// Puts an object that must be there in the end, held. One of another length is a damaged one, and is mended.
    async fn ensure(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.lease.settle(key).await?;
        let size = bytes.len() as u64;
        match self.store().head(key).await? {
            Some(found) if found.size == size => return Ok(()),
            Some(found) => {
                tracing::warn!(object = key, size = found.size, wanted = size, "damaged object replaced");
                return self.store().replace(key, bytes).await;
            }
            None => {}
        }
        self.lease.check()?;
        self.store().put_new(key, bytes).await.map(drop)
    }
}

/// Hands packs from a blocking thread to a session.
#[derive(Debug)]
pub struct PackSender(mpsc::Sender<(PackId, Bytes)>);

impl PackSender {
    /// Waits for room and hands a pack over. False: the sending has failed, its future says why.
    pub fn send(&self, id: PackId, pack: Bytes) -> bool {
        self.0.blocking_send((id, pack)).is_ok()
    }
}
