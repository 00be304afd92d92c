//! Verification: every digest of a layer, down to every pack and group.

use std::collections::HashSet;
use std::fmt;

use dsec_image::layer::{BlobId, BlobIndex, Digest, LayerId, Manifest, PackId};

use crate::error::StoreError;
use crate::key;
use crate::read::plain;
use crate::store::Store;

/// What is wrong with an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// It is not there.
    Missing,
    /// It has fewer bytes than it should.
    Truncated {
        /// Bytes it has.
        found: u64,
        /// Bytes it should have.
        wanted: u64,
    },
    /// Its bytes are others than its name says.
    Swapped {
        /// What shows it.
        how: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("missing"),
            Self::Truncated { found, wanted } => write!(f, "truncated: {found} bytes of {wanted}"),
            Self::Swapped { how } => write!(f, "its content is another: {how}"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The object, such as `pack 12ab...`.
    pub object: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What a verification saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// Layers looked at.
    pub layers: u64,
    /// Packs read.
    pub packs: u64,
    /// Bytes of them.
    pub pack_bytes: u64,
    /// What is wrong; empty if all is well.
    pub findings: Vec<Finding>,
}

/// Told what was seen after each pack; says whether to go on.
pub type Tell<'a> = &'a mut (dyn FnMut(&Verified) -> bool + Send);

/// A verification under way: what several layers share is read once.
struct Verification<'a> {
    store: &'a Store,
    verified: Verified,
    seen: HashSet<String>,
    tell: Tell<'a>,
    is_stopped: bool,
}

impl Store {
    /// Reads all of a layer and of its parents, and checks every digest.
    ///
    /// # Errors
    /// [`StoreError`] only if the store does not answer; what is wrong with its content is a finding.
    pub async fn verify(&self, layer: &LayerId) -> Result<Verified, StoreError> {
        self.verify_while(Some(layer), &mut |_| true).await
    }

    /// As [`Self::verify`], for every layer of the store.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub async fn verify_all(&self) -> Result<Verified, StoreError> {
        self.verify_while(None, &mut |_| true).await
    }

    /// Verifies a layer or all of them, and tells how far it is. Stopped by `tell`, it gives what it saw until then.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub async fn verify_while(
        &self,
        layer: Option<&LayerId>,
        tell: Tell<'_>,
    ) -> Result<Verified, StoreError> {
        let mut open: Vec<LayerId> = match layer {
            Some(layer) => vec![*layer],
            None => {
                let found = self.list(key::LAYERS, None).await?;
                found.iter().filter_map(|object| key::id_of(&object.key)).collect()
            }
        };
        let (verified, seen) = (Verified::default(), HashSet::new());
        let mut run = Verification { store: self, verified, seen, tell, is_stopped: false };
        while let Some(layer) = open.pop().filter(|_| !run.is_stopped) {
            if !run.seen.insert(key::layer(&layer)) {
                continue;
            }
            run.verified.layers += 1;
            let read = self.manifest(&layer).await;
            if let Some(manifest) = run.take(format!("layer {layer}"), read)? {
                run.layer(&layer, &manifest).await?;
                open.extend(manifest.parents.iter().map(|parent| parent.layer));
            }
        }
        Ok(run.verified)
    }
}

impl Verification<'_> {
    fn add(&mut self, object: String, problem: Problem) {
        self.verified.findings.push(Finding { object, problem });
    }

    /// What was read, or a finding instead.
    fn take<T>(&mut self, object: String, read: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
        match read {
            Ok(value) => return Ok(Some(value)),
            Err(StoreError::NotFound { .. }) => self.add(object, Problem::Missing),
            Err(StoreError::Damaged { problem, .. }) => self.add(object, Problem::Swapped { how: problem }),
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Whether the object has this length. One that has not is a finding.
    async fn has_size(&mut self, key: &str, object: &str, wanted: u64) -> Result<bool, StoreError> {
        match self.store.head(key).await? {
            None => self.add(object.to_owned(), Problem::Missing),
            Some(found) if found.size < wanted => {
                self.add(object.to_owned(), Problem::Truncated { found: found.size, wanted });
            }
            Some(found) if found.size > wanted => {
                let how = format!("{} bytes instead of {wanted}", found.size);
                self.add(object.to_owned(), Problem::Swapped { how });
            }
            Some(_) => return Ok(true),
        }
        Ok(false)
    }

    async fn layer(&mut self, layer: &LayerId, manifest: &Manifest) -> Result<(), StoreError> {
        let metadata = &manifest.metadata;
        let (key, object) = (key::metadata(&metadata.id), format!("metadata {}", metadata.id));
        if self.seen.insert(key.clone()) && self.has_size(&key, &object, metadata.size).await? {
            let read = self.store.metadata(metadata).await;
            self.take(object, read)?;
        }
        let files = self.store.files(layer, manifest).await;
        self.take(format!("the files of layer {layer}"), files)?;
        for blob in &manifest.blobs {
            let (key, object) = (key::blob(&blob.id), format!("the index of blob {}", blob.id));
            if !self.seen.insert(key.clone()) || !self.has_size(&key, &object, blob.index_size).await? {
                continue;
            }
            let read = self.store.blob_index(&blob.id).await;
            let Some(index) = self.take(object.clone(), read)? else { continue };
            if index.size() != blob.size {
                let how =
                    format!("the manifest gives the blob {} bytes, the index {}", blob.size, index.size());
                self.add(object, Problem::Swapped { how });
            }
            self.blob(&blob.id, &index).await?;
        }
        Ok(())
    }

    async fn blob(&mut self, blob: &BlobId, index: &BlobIndex) -> Result<(), StoreError> {
        for (at, pack) in index.packs().iter().enumerate() {
            if self.is_stopped {
                return Ok(());
            }
            let (key, object) = (key::pack(&pack.id), format!("pack {}", pack.id));
            if !self.has_size(&key, &object, pack.size.into()).await? {
                continue;
            }
            let bytes = match self.store.fetch(&pack.id, 0..pack.size).await {
                Err(error) => {
                    self.take::<()>(object, Err(error))?;
                    continue;
                }
                Ok(bytes) => bytes,
            };
            self.verified.packs += 1;
            self.verified.pack_bytes += u64::from(pack.size);
            self.is_stopped = !(self.tell)(&self.verified);
            let found = PackId(Digest::of(&bytes));
            if found != pack.id {
                self.add(object, Problem::Swapped { how: format!("its digest is {found}") });
                continue;
            }
            for (number, group) in index.groups().iter().enumerate().filter(|(_, g)| g.pack as usize == at) {
                let stored = bytes.slice(group.offset as usize..(group.offset + group.stored) as usize);
                if let Err(how) = plain(&stored, index.plain_len(number as u64) as usize, &group.hash) {
                    self.add(format!("group {number} of blob {blob}"), Problem::Swapped { how });
                }
            }
        }
        Ok(())
    }
}
