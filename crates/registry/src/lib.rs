//! Images out of OCI registries.
//!
//! ```text
//! Reference ──► Client ──► index ──choose(Platform)──► manifest ──► configuration ──► Image: diff ids, layers
//!                 │                                                                          │
//!                 │ every connection: Places admits the address                              └─► Client::blob, a file each
//!                 │ 401: Challenge ──► password or token     307: elsewhere, without either       resumed, checked, then given
//! ```
//!
//! Nothing that comes is used before its digest is known to be right; nothing a server writes gets into an error.
//!
//! Source: the OCI distribution specification 1.1, "Pull".

mod auth;
mod blob;
mod client;
mod connect;
mod digest;
mod documents;
mod error;
mod image;
mod limits;
mod places;
mod reference;

pub use auth::Credentials;
pub use client::{Client, Settings};
pub use digest::{Digest, DigestError};
pub use documents::{Platform, PlatformError};
pub use error::PullError;
pub use image::{Image, Layer};
pub use limits::Limits;
pub use places::{Allowed, Pattern, PatternError, Refused};
pub use reference::{Reference, ReferenceError, SCHEME, Select};
