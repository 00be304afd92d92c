//! What can be wrong with a change.

use dsec_model::iam::{Permissions, ProjectPath};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum IamError {
    /// The caller does not hold what it takes, or what it gives.
    #[error("{} is not held in {project}", names(*.missing))]
    Denied {
        /// Where.
        project: ProjectPath,
        /// What is missing.
        missing: Permissions,
    },
    /// There is none, or none that the caller sees.
    #[error("no {what} {name}")]
    NotFound {
        /// What kind of thing.
        what: &'static str,
        /// As it was asked for.
        name: String,
    },
    /// It is there already.
    #[error("{0} is there already")]
    AlreadyExists(String),
    /// It is in the way of something.
    #[error("{0}")]
    Conflict(String),
    /// Something given cannot be used.
    #[error("{message}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The database does not answer as it should.
    #[error("the database of identities: {0}")]
    Database(#[from] sqlx::Error),
    /// A row has something in it that this version does not know.
    #[error("the database of identities has a row that cannot be read: {0}")]
    Row(String),
    /// The host gives no random numbers.
    #[error("no random numbers: {0}")]
    Random(#[from] getrandom::Error),
    /// Nothing was heard of the database for so long that what is known of it is not believed any more.
    #[error("nothing was heard of the database of identities for {0} s")]
    Stale(u64),
    /// The database cannot be opened.
    #[error("cannot open the database {url}: {message}")]
    Open {
        /// Its address, without a password.
        url: String,
        /// Why.
        message: String,
    },
}

fn names(permissions: Permissions) -> String {
    permissions.iter().map(|permission| permission.as_str()).collect::<Vec<_>>().join(", ")
}
