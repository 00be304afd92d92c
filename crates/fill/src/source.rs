//! Where packs and blob indexes come from. The engine knows nothing else of the store.

use std::ops::Range;
use std::pin::Pin;

use bytes::Bytes;
use dsec_image::layer::{BlobId, PackId};
use dsec_store::{Store, StoreError, StoreSettings};
use tokio::sync::OnceCell;

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

/// The layer store, opened when it is first needed: what is in the cache can be read while the store is away.
#[derive(Debug)]
pub struct LayerStore {
    settings: StoreSettings,
    open: OnceCell<Store>,
}

impl LayerStore {
    /// The store of these settings.
    pub fn new(settings: StoreSettings) -> Self {
        Self { settings, open: OnceCell::new() }
    }

    async fn store(&self) -> Result<&Store, FetchError> {
        Ok(self.open.get_or_try_init(|| Store::open(&self.settings)).await?)
    }
}

impl PackSource for LayerStore {
    fn fetch(&self, pack: &PackId, range: Range<u32>) -> Fetching<'_> {
        let pack = *pack;
        Box::pin(async move { Ok(self.store().await?.fetch(&pack, range).await?) })
    }

    fn index(&self, blob: &BlobId) -> Fetching<'_> {
        let blob = *blob;
        Box::pin(async move { Ok(self.store().await?.blob_index(&blob).await?.encode().into()) })
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
