//! Why something of this crate cannot be used.

use std::path::PathBuf;

/// Why a key, a certificate or a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error("cannot {what} {path}")]
    File {
        /// `read` or `write`.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A text is not the PEM that it should be.
    #[error("this is no {what} in PEM: {why}")]
    Pem {
        /// What it should be.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A certificate cannot be understood.
    #[error("the certificate cannot be read: {0}")]
    Certificate(String),
    /// A certificate request cannot be taken.
    #[error("the certificate request cannot be taken: {0}")]
    Request(String),
    /// A key or certificate could not be made.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    /// Certificate and key do not belong together, or are of a kind that TLS does not take.
    #[error("certificate and key cannot be used for TLS")]
    Tls(#[from] rustls::Error),
    /// The kernel gave no random bytes.
    #[error("no random bytes")]
    Random(#[from] getrandom::Error),
    /// A text is no join token.
    #[error("this is no join token: {0}")]
    Token(&'static str),
}
