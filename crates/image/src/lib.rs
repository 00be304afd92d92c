//! Images and layers: intake of archives and directories, EROFS metadata, and content in blobs.
//!
//! ```text
//! source ──► intake ───────► erofs::Tree (names, attributes) ──► metadata image ─┐
//!            tar, OCI,       build::BlobWriter (content) ──────► blob, packs     ├─► layer::Manifest
//!            docker save,                                        build::merge ───┘
//!            directory
//! ```
//!
//! Nothing of a source is ever unpacked to the host's file system: entries become nodes of a tree
//! in memory and content becomes blocks of one file, so no path in an archive can reach the host.
//!
//! Everything here is synchronous and runs on the caller's thread (decompression and compression on
//! others); async callers use a blocking thread.

pub mod build;
mod config;
pub mod erofs;
mod error;
mod intake;
pub mod layer;
mod limits;
mod overlay;

pub use config::ImageConfig;
pub use error::{EntryProblem, ImportError};
pub use intake::OciConfig;
pub use limits::{ImportLimits, ImportPhase, ImportProgress};
