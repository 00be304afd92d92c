//! Where a cluster's authority, its tokens and its nodes are kept: in files of one server, or in the database of several.

mod database;
mod file;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use dsec_iam::IamError;
use dsec_pki::{AuthorityPem, PkiError};
use futures_util::future::BoxFuture;

pub use database::DatabaseStore;
pub use file::FileStore;

use super::known::Known;

/// Why what is kept cannot be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// A file.
    #[error("what the cluster knows cannot be read or written")]
    File(#[source] Arc<PkiError>),
    /// The lock.
    #[error("{path} cannot be locked")]
    Lock {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Arc<io::Error>,
    },
    /// The database.
    #[error("what the cluster knows cannot be read or written")]
    Database(#[source] Arc<IamError>),
    /// It is not what was written.
    #[error("{place} is not what control writes there")]
    Parse {
        /// Which file, or which text of the database.
        place: String,
        /// Where and why.
        #[source]
        source: Arc<serde_json::Error>,
    },
    /// The work on it broke off.
    #[error("work on what the cluster knows broke off")]
    BrokenOff,
}

impl From<PkiError> for StoreError {
    fn from(error: PkiError) -> Self {
        Self::File(Arc::new(error))
    }
}

impl From<IamError> for StoreError {
    fn from(error: IamError) -> Self {
        Self::Database(Arc::new(error))
    }
}

/// What comes of asking a store.
pub type Storing<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// What is done to what is known.
pub type Change = Box<dyn FnOnce(&mut Known) + Send>;

/// Keeps what a cluster knows. Several servers may share one.
pub trait ClusterStore: Send + Sync + 'static {
    /// The authority, once it is made.
    ///
    /// # Errors
    /// It cannot be read.
    fn authority(&self) -> Storing<'_, Option<AuthorityPem>>;

    /// Keeps an authority, unless there is one. True: it is this one now.
    ///
    /// # Errors
    /// It cannot be written.
    fn found(&self, made: AuthorityPem) -> Storing<'_, bool>;

    /// What is known.
    ///
    /// # Errors
    /// It cannot be read.
    fn read(&self) -> Storing<'_, Known>;

    /// Changes what is known: no two changes at a time, and it is kept when this returns. What the change leaves as it was is not written.
    ///
    /// # Errors
    /// It cannot be read or written; then nothing has changed.
    fn change(&self, change: Change) -> Storing<'_, Known>;

    /// What differs after every change.
    ///
    /// # Errors
    /// It cannot be told.
    fn version(&self) -> Storing<'_, String>;
}
