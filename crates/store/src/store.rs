//! An open store, and the few operations everything else is made of.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions};
use serde::{Deserialize, Serialize};

use crate::connect::{self, Backend, StoreSettings};
use crate::error::StoreError;
use crate::key;

/// The form of stores written here, and the only one opened.
const STORE_FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Marker {
    format: u32,
}

/// An open store. Cheap to clone; every operation may be dropped at any point and leaves nothing half visible.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    backend: Backend,
    url: String,
}

/// Longest record: names, tags, hints, leases, the marker. All have less than a KiB of text from outside.
pub(crate) const RECORD_MAX: u64 = 16 << 10;

/// An object and when it was written, by the store's clock.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) key: String,
    pub(crate) size: u64,
    pub(crate) modified_ms: i64,
    pub(crate) e_tag: Option<String>,
}

impl From<ObjectMeta> for Found {
    fn from(meta: ObjectMeta) -> Self {
        Self {
            key: meta.location.to_string(),
            size: meta.size,
            modified_ms: meta.last_modified.timestamp_millis(),
            e_tag: meta.e_tag,
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.0.url).finish()
    }
}

impl Store {
    /// Opens the store, which [`Self::create`] made once.
    ///
    /// # Errors
    /// The settings name none, it cannot be reached, or the place has no store in it.
    pub async fn open(settings: &StoreSettings) -> Result<Self, StoreError> {
        let backend = connect::open(settings, false)?;
        let store = Self(Arc::new(Inner { backend, url: settings.url.clone() }));
        store.check_marker().await?;
        Ok(store)
    }

    /// Opens the store, and makes it where the place has none if it is a bucket, or a directory and the settings say so.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_or_create(settings: &StoreSettings) -> Result<Self, StoreError> {
        if settings.create || settings.url.starts_with("s3://") {
            return Self::create(settings).await;
        }
        Self::open(settings).await
    }

    /// Opens the store and makes it if the place has none; a bucket itself must be there.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn create(settings: &StoreSettings) -> Result<Self, StoreError> {
        let backend = connect::open(settings, true)?;
        let store = Self(Arc::new(Inner { backend, url: settings.url.clone() }));
        store.put_new(key::MARKER, json(&Marker { format: STORE_FORMAT })).await?;
        store.check_marker().await?;
        Ok(store)
    }

    /// Where it is, as given.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// What tells this store from every other: programs that read the same have the same layers. Made when it is first
    /// asked for; of several that do so at once, one makes it.
    ///
    /// # Errors
    /// The store does not answer, or what is there is no id.
    pub async fn id(&self) -> Result<String, StoreError> {
        let what = "the store's id";
        self.put_new(key::ID, self.random()?.into()).await?;
        let bytes = self.get(key::ID, what, RECORD_MAX).await?;
        match std::str::from_utf8(&bytes) {
            Ok(id) if id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) => Ok(id.to_owned()),
            _ => Err(StoreError::damaged(what, "it is not 16 hexadecimal digits")),
        }
    }

    pub(crate) fn directory(&self) -> Option<&PathBuf> {
        self.0.backend.directory.as_ref()
    }

    /// Whether the store answers.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn check(&self) -> Result<(), StoreError> {
        self.check_marker().await
    }

    /// Whether this is a store at all: a directory whose mount is gone must not pass for an empty one.
    pub(crate) async fn check_marker(&self) -> Result<(), StoreError> {
        let what = format!("the store's {}", key::MARKER);
        let bytes =
            self.get_unchecked(key::MARKER, &what, RECORD_MAX).await.map_err(|error| match error {
                StoreError::NotFound { .. } => self.unavailable(
                    what,
                    "there is no store: see whether it is mounted; create = true in [store] makes a new one there",
                ),
                other => other,
            })?;
        match serde_json::from_slice::<Marker>(&bytes) {
            Ok(Marker { format: STORE_FORMAT }) => Ok(()),
            Ok(Marker { format }) => Err(StoreError::Settings {
                given: self.0.url.clone(),
                problem: format!("it has format {format} and this program knows {STORE_FORMAT}"),
            }),
            Err(error) => Err(StoreError::damaged(format!("the store's {}", key::MARKER), error)),
        }
    }

    /// The bytes of an object, at most `max`. What says what it is in errors.
    ///
    /// # Errors
    /// `NotFound` only if the store itself is there; `Damaged` if it is longer, which is not read then.
    pub(crate) async fn get(&self, key: &str, what: &str, max: u64) -> Result<Bytes, StoreError> {
        match self.get_unchecked(key, what, max).await {
            Err(error @ StoreError::NotFound { .. }) => {
                self.check_marker().await?;
                Err(error)
            }
            other => other,
        }
    }

    async fn get_unchecked(&self, key: &str, what: &str, max: u64) -> Result<Bytes, StoreError> {
        let unreadable = |error| self.failed(what, error);
        let found = self.0.backend.objects.get_opts(&Path::from(key), connect::up_to(max)).await;
        let found = found.map_err(unreadable)?;
        if found.meta.size > max {
            let problem = format!("it has {} bytes and may have {max} at most", found.meta.size);
            return Err(StoreError::damaged(what, problem));
        }
        found.bytes().await.map_err(unreadable)
    }

    /// Part of an object; it may be less than asked for where the object ends.
    pub(crate) async fn get_range(
        &self,
        key: &str,
        range: std::ops::Range<u64>,
        what: &str,
    ) -> Result<Bytes, StoreError> {
        let max = range.end.saturating_sub(range.start);
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..connect::up_to(max) };
        let read = async { self.0.backend.objects.get_opts(&Path::from(key), options).await?.bytes().await };
        match read.await.map_err(|error| self.failed(what, error)) {
            Err(error @ StoreError::NotFound { .. }) => {
                self.check_marker().await?;
                Err(error)
            }
            // A range that begins past the end is a fault of the request to both kinds of store.
            Err(error @ StoreError::Unavailable { .. }) => match self.head(key).await? {
                Some(found) if found.size <= range.start => Ok(Bytes::new()),
                _ => Err(error),
            },
            other => other,
        }
    }

    /// Writes an object that is not there yet. False: it is there, and was left as it is.
    pub(crate) async fn put_new(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        self.put(&self.0.backend.objects, key, bytes, PutMode::Create).await
    }

    /// Writes an object in place of any that is there.
    pub(crate) async fn replace(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.put(&self.0.backend.objects, key, bytes, PutMode::Overwrite).await.map(drop)
    }

    /// As [`Self::put_new`] and [`Self::replace`], for what need not outlive a crash of the store's host.
    pub(crate) async fn put_brief(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<(), StoreError> {
        self.put(&self.0.backend.brief, key, bytes, mode).await.map(drop)
    }

    pub(crate) async fn head(&self, key: &str) -> Result<Option<Found>, StoreError> {
        match self.0.backend.objects.head(&Path::from(key)).await {
            Ok(meta) => Ok(Some(meta.into())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(key, error)),
        }
    }

    /// Removes an object; one that is not there is removed already.
    pub(crate) async fn delete(&self, key: &str) -> Result<(), StoreError> {
        match self.0.backend.objects.delete(&Path::from(key)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(key, error)),
        }
    }

    /// As [`Self::delete`], in one request: of one that is sent again the first may arrive last, after somebody put the
    /// object again.
    pub(crate) async fn delete_once(&self, key: &str) -> Result<(), StoreError> {
        match self.0.backend.once.delete(&Path::from(key)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(key, error)),
        }
    }

    /// How long a removal is waited for; one that was sent may arrive as much later again, and no later.
    pub(crate) fn removal_max(&self) -> Duration {
        self.0.backend.removal_max
    }

    #[cfg(test)]
    pub(crate) fn of(backend: connect::Backend) -> Self {
        Self(Arc::new(Inner { backend, url: "a test's".to_owned() }))
    }

    /// Every object below a prefix that comes after a key, in the order of keys.
    pub(crate) async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Vec<Found>, StoreError> {
        let path = Path::from(prefix);
        let mut stream = match after {
            Some(after) => self.0.backend.objects.list_with_offset(Some(&path), &Path::from(after)),
            None => self.0.backend.objects.list(Some(&path)),
        };
        let mut found: Vec<Found> = Vec::new();
        while let Some(meta) = stream.next().await {
            found.push(meta.map_err(|error| self.failed(prefix, error))?.into());
        }
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// The time by the clock that dates the store's objects.
    pub(crate) async fn now_ms(&self) -> Result<i64, StoreError> {
        let key = format!("{}/{}", key::CLOCK, self.random()?);
        self.put_brief(&key, Bytes::from_static(b"x"), PutMode::Overwrite).await?;
        let found = self.head(&key).await?;
        self.delete(&key).await?;
        found.map(|found| found.modified_ms).ok_or_else(|| self.unavailable(key, "it vanished"))
    }

    /// Sixteen hexadecimal digits nobody else has.
    pub(crate) fn random(&self) -> Result<String, StoreError> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| self.unavailable("random bytes", error))?;
        Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
    }

    async fn put(
        &self,
        objects: &Arc<dyn ObjectStore>,
        key: &str,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<bool, StoreError> {
        let options = PutOptions { mode, ..PutOptions::default() };
        match objects.put_opts(&Path::from(key), bytes.into(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                Ok(false)
            }
            Err(error) => Err(self.failed(key, error)),
        }
    }

    /// What is told of something that this store did not do.
    pub(crate) fn unavailable(
        &self,
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> StoreError {
        StoreError::Unavailable { store: self.0.url.clone(), what: what.into(), source: source.into() }
    }

    fn failed(&self, what: &str, error: object_store::Error) -> StoreError {
        StoreError::from_backend(&self.0.url, what, error)
    }
}

/// A small document as bytes.
pub(crate) fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}
