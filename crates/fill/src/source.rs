//! Where packs and blob indexes come from. The engine knows nothing else of the store.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use dsec_image::layer::{BlobId, PackId};
use dsec_store::{Store, StoreError, StoreSettings};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::JoinSet;

/// Why something could not be fetched.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FetchError {
    /// The store answers and does not have it.
    #[error("the store has no {what}")]
    Missing {
        /// What was asked for.
        what: String,
    },
    /// The store answers with what cannot be it.
    #[error("{why}")]
    Damaged {
        /// What was asked for, and what came.
        why: String,
    },
    /// The store did not answer, or not with what was asked for; it may the next time.
    #[error("{why}")]
    Unreachable {
        /// What was asked for, and what came instead.
        why: String,
    },
}

impl From<StoreError> for FetchError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { what } => Self::Missing { what },
            StoreError::Damaged { .. } => Self::Damaged { why: with_causes(&error) },
            // Keys may be given, settings be mended, while a reader waits.
            _ => Self::Unreachable { why: with_causes(&error) },
        }
    }
}

/// A fetch under way.
pub type Fetching<'a> = Pin<Box<dyn Future<Output = Result<Bytes, FetchError>> + Send + 'a>>;

/// A store, as the engine sees it. Nothing it gives is trusted: the engine checks every byte. One call is one
/// try; the engine repeats, and may drop a call that takes too long.
pub trait PackSource: Send + Sync + 'static {
    /// These bytes of a pack, all of them.
    fn fetch(&self, pack: &PackId, range: Range<u32>) -> Fetching<'_>;

    /// A blob's encoded index.
    fn index(&self, blob: &BlobId) -> Fetching<'_>;
}

/// Requests to the store at once, those included that nobody waits for any more and that still hold a thread.
pub const REQUESTS_MAX: usize = 64;

/// The layer store, opened when it is first needed: what is in the cache can be read while the store is away.
///
/// It has a runtime of its own. A directory whose server is gone keeps every thread that reads it, for as long as it likes, and
/// nothing takes a thread back: so those threads are others than the ones that the cache is read with, and are counted.
#[derive(Debug)]
pub struct LayerStore {
    settings: Arc<StoreSettings>,
    open: Arc<OnceCell<Store>>,
    runtime: Handle,
    requests: Arc<Semaphore>,
}

impl LayerStore {
    /// The store of these settings, asked on a runtime that may have [`REQUESTS_MAX`] blocking threads.
    pub fn new(settings: StoreSettings, runtime: Handle) -> Self {
        Self {
            settings: Arc::new(settings),
            open: Arc::default(),
            runtime,
            requests: Arc::new(Semaphore::new(REQUESTS_MAX)),
        }
    }

    fn ask<F>(&self, request: impl FnOnce(Store) -> F + Send + 'static) -> Fetching<'_>
    where
        F: Future<Output = Result<Bytes, StoreError>> + Send,
    {
        Box::pin(async move {
            let stopped = || FetchError::Unreachable { why: "the store's runtime has stopped".to_owned() };
            let place = self.requests.clone().acquire_owned().await.map_err(|_| stopped())?;
            let (settings, open) = (self.settings.clone(), self.open.clone());
            let asking = async move {
                let _place = place;
                let store = open.get_or_try_init(|| Store::open(&settings)).await?.clone();
                Ok(request(store).await?)
            };
            if self.settings.is_directory() {
                // Given up, it goes on and keeps its place until its thread is back.
                return self.runtime.spawn(asking).await.unwrap_or_else(|_| Err(stopped()));
            }
            let mut one = JoinSet::new();
            one.spawn_on(asking, &self.runtime);
            one.join_next().await.and_then(Result::ok).unwrap_or_else(|| Err(stopped()))
        })
    }
}

impl PackSource for LayerStore {
    fn fetch(&self, pack: &PackId, range: Range<u32>) -> Fetching<'_> {
        let pack = *pack;
        self.ask(move |store| async move { store.fetch(&pack, range).await })
    }

    fn index(&self, blob: &BlobId) -> Fetching<'_> {
        let blob = *blob;
        self.ask(move |store| async move { Ok(store.blob_index(&blob).await?.encode().into()) })
    }
}

/// An error and what caused it, in one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
