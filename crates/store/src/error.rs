//! What can go wrong with a store.

use std::path::PathBuf;

use dsec_image::layer::ManifestError;

/// Why an operation on the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store answers and does not have it.
    #[error("the store has no {what}")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// It is there and is not what its name says. Trying again does not help: publish it again, or remove what refers to it.
    #[error("{what} is damaged: {problem}")]
    Damaged {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The store did not answer, or with a fault of its own. Trying again may help.
    #[error("the store at {store} cannot be reached for {what}")]
    Unavailable {
        /// The store's address, as it was given.
        store: String,
        /// What was asked for.
        what: String,
        /// What came instead.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store refuses: the keys are wrong or may not do it.
    #[error("the store at {store} refuses {what}: check its keys and permissions")]
    Denied {
        /// The store's address, as it was given.
        store: String,
        /// What was asked for.
        what: String,
        /// Its answer.
        #[source]
        source: object_store::Error,
    },
    /// The name is taken by another layer, or somebody else moved the tag at the same time.
    #[error("{what}: {problem}")]
    Conflict {
        /// What was asked for.
        what: String,
        /// What is there.
        problem: String,
    },
    /// It cannot be removed yet.
    #[error("{what} is in use by {by}")]
    InUse {
        /// What was to be removed.
        what: String,
        /// Who refers to it.
        by: String,
    },
    /// The lease was not renewed in time, so what it held may be gone. Begin again with a new one: what is still there is
    /// not sent again.
    #[error("lease {lease} has run out: begin again with a new one")]
    LeaseLost {
        /// Which.
        lease: String,
    },
    /// An export cannot be written.
    #[error("the image cannot be written to {}", path.display())]
    Export {
        /// Where to.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// What was given to publish breaks a rule.
    #[error("it cannot be published")]
    Manifest(#[from] ManifestError),
    /// The settings name no store.
    #[error("{given:?} is not a store: {problem}")]
    Settings {
        /// As given.
        given: String,
        /// What is wrong.
        problem: String,
    },
}

impl StoreError {
    /// Whether trying again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// Whether it is that the store does not have it.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    pub(crate) fn damaged(what: impl ToString, problem: impl ToString) -> Self {
        Self::Damaged { what: what.to_string(), problem: problem.to_string() }
    }

    pub(crate) fn from_backend(store: &str, what: &str, error: object_store::Error) -> Self {
        use object_store::Error;
        let (store, what) = (store.to_owned(), what.to_owned());
        match error {
            Error::NotFound { .. } => Self::NotFound { what },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                Self::Denied { store, what, source: error }
            }
            other => Self::Unavailable { store, what, source: Box::new(other) },
        }
    }
}
