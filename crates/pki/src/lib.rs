//! Who is who between the machines of a cluster: its certificate authority, certificates with roles, the tokens that
//! machines join by, and TLS between our own processes.
//!
//! ```text
//! Authority ── issues, from a Request ──► certificate of a Role (a node's name, or control)
//!     ▲                                        │ with its Key
//!     └─ Fingerprint, in every JoinToken       ▼
//!                                       tls::Identity ──► tls::{public_server, cluster_server, cluster_client}
//! ```
//!
//! A certificate says who its owner is by one DNS name: `control.dsec.internal`, or `NAME.node.dsec.internal`. Both ends
//! of a connection check the chain, the time and that name.

mod authority;
mod certificate;
mod error;
pub mod files;
mod request;
mod role;
pub mod tls;
mod token;

pub use authority::{Authority, AuthorityPem, Issued, PUBLIC_LIFETIME, Validity, self_made};
pub use certificate::{Certificate, Fingerprint};
pub use error::PkiError;
pub use request::{Key, Request};
pub use role::Role;
pub use token::JoinToken;
