//! Why an image cannot be had. Every error says what was found and what to do. What a server wrote is never passed on:
//! whoever names a host would read from there whatever the node can reach.

use std::error::Error;
use std::io;

use dsec_image::ImportError;
use dsec_model::ErrorKind;

use crate::connect::ConnectError;
use crate::digest::{Digest, DigestError};
use crate::places::Refused;

/// Why an image, or a part of it, cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The node does not connect there.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// There is no connection, or it broke off and trying again did not help.
    #[error("{host} cannot be reached; see whether the registry runs and its name and port are right")]
    Unreachable {
        /// Host and port.
        host: String,
        /// Why not.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// There is no TLS with the host, or none to be trusted.
    #[error(
        "there is no trusted TLS connection with {host}; give the certificate that signs its own, or say that it \
         speaks plain HTTP"
    )]
    Tls {
        /// Host and port.
        host: String,
        /// Why not.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A reference from a registry with TLS to something without.
    #[error("{host} is referred to without TLS, which is not followed")]
    Downgraded {
        /// Host and port.
        host: String,
    },
    /// Certificates that were given cannot be used.
    #[error("certificates to trust: {why}")]
    BadCertificates {
        /// Why not.
        why: String,
    },
    /// The registry wants credentials, or other ones.
    #[error("{host} does not let {} pull {repository}{}", who(*.with_credentials), hint(*.with_credentials))]
    Unauthorized {
        /// Host and port of who refused: the registry, or its token service.
        host: String,
        /// The repository.
        repository: String,
        /// Whether credentials were given.
        with_credentials: bool,
    },
    /// There is no such image.
    #[error("there is no {what} at {host}; see the repository's name and its tags")]
    NotFound {
        /// Host and port.
        host: String,
        /// What was asked for.
        what: String,
    },
    /// Answers that say nothing else than that it did not work.
    #[error("{host} answered {status} when asked for {what}")]
    Status {
        /// Host and port.
        host: String,
        /// What was asked for.
        what: String,
        /// The HTTP status.
        status: u16,
        /// Seconds after which it wants to be asked again.
        after_s: Option<u64>,
    },
    /// Something that is no registry, or one that is broken.
    #[error("{host} does not answer as a registry does: {why}")]
    Strange {
        /// Host and port.
        host: String,
        /// What is wrong.
        why: String,
    },
    /// Not enough came in too long a time, and trying again did not help.
    #[error("{host} sent less than {least} bytes of {what} in {limit_s} s; try again")]
    Stalled {
        /// Host and port.
        host: String,
        /// What was asked for.
        what: String,
        /// Bytes that would have counted as progress.
        least: u64,
        /// Seconds waited.
        limit_s: u64,
    },
    /// It ended before all of it was there, and trying again did not help.
    #[error("{host} sent {received} of {size} bytes of {what}; try again")]
    CutOff {
        /// Host and port.
        host: String,
        /// What was asked for.
        what: String,
        /// Bytes received.
        received: u64,
        /// Bytes there should be.
        size: u64,
    },
    /// Something is not what its digest says.
    #[error("{what} has the digest {found}; the registry's copy is damaged, push the image again")]
    DigestMismatch {
        /// The digest it should have.
        what: Digest,
        /// The digest it has.
        found: Digest,
    },
    /// A digest of a kind that is not verified.
    #[error("a document of the image has a digest that cannot be used")]
    BadDigest(#[from] DigestError),
    /// Beyond a limit.
    #[error("{what} has {found} {unit} and {max} is the most")]
    TooLarge {
        /// What.
        what: String,
        /// How much it has.
        found: u64,
        /// The limit.
        max: u64,
        /// Of what.
        unit: &'static str,
    },
    /// Another image than the one that is wanted: not for this platform.
    #[error("{reference} has nothing for {wanted}; it has: {}", list(.found))]
    NoPlatform {
        /// The reference.
        reference: String,
        /// What was looked for.
        wanted: String,
        /// The platforms there are.
        found: Vec<String>,
    },
    /// A document that is valid and no image, or of a kind that cannot be taken in.
    #[error("{what} cannot be used: {why}")]
    Unsupported {
        /// The document or layer.
        what: String,
        /// Why, and what to do.
        why: String,
    },
    /// A document that cannot be understood.
    #[error("{what} is not valid; push the image again")]
    BadDocument {
        /// The document.
        what: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The image's configuration cannot be understood.
    #[error("the image's configuration cannot be used")]
    Config(#[from] ImportError),
    /// What was received cannot be kept.
    #[error("what was downloaded cannot be kept on the node's disk")]
    Disk(#[source] io::Error),
}

fn who(with_credentials: bool) -> &'static str {
    if with_credentials { "these credentials" } else { "anybody without credentials" }
}

fn hint(with_credentials: bool) -> &'static str {
    if with_credentials {
        "; see user, password and the rights there"
    } else {
        "; give some, or there is no such repository"
    }
}

fn list(items: &[String]) -> String {
    if items.is_empty() { "nothing".to_owned() } else { items.join(", ") }
}

impl PullError {
    /// The kind a caller of the API is told.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(_) | Self::Unauthorized { .. } => ErrorKind::PermissionDenied,
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::CutOff { .. } => ErrorKind::Unavailable,
            Self::Status { status, .. } if is_transient_status(*status) => ErrorKind::Unavailable,
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::NoPlatform { .. } => ErrorKind::Unsupported,
            Self::Config(source) => source.kind(),
            Self::Disk(error) => match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::ResourceExhausted,
                _ => ErrorKind::Internal,
            },
            Self::Tls { .. }
            | Self::Downgraded { .. }
            | Self::BadCertificates { .. }
            | Self::Status { .. }
            | Self::Strange { .. }
            | Self::DigestMismatch { .. }
            | Self::BadDigest(_)
            | Self::Unsupported { .. }
            | Self::BadDocument { .. } => ErrorKind::InvalidArgument,
        }
    }

    /// Whether the same request may do better later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::CutOff { .. } => true,
            Self::Status { status, .. } => is_transient_status(*status),
            _ => false,
        }
    }

    /// What a failed exchange with `host` means.
    pub(crate) fn exchange(host: String, error: Box<dyn Error + Send + Sync>) -> Self {
        if let Some(ConnectError::Refused(refused)) = find(&*error) {
            return Self::Refused(refused.clone());
        }
        match find::<rustls::Error>(&*error) {
            Some(_) => Self::Tls { host, source: error },
            None => Self::Unreachable { host, source: error },
        }
    }
}

fn is_transient_status(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

/// The first error of a type among an error and its causes.
fn find<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // What an I/O error holds is not its source: that is the held one's.
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(held) => Some(held),
            None => error.source(),
        };
    }
    None
}
