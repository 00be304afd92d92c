//! Images: intake of archives, the EROFS writer and the node's image store.
//!
//! ```text
//! source file ──► intake ──────► erofs::Tree (metadata) ──► erofs::finish ──► store
//!                 tar, OCI,      erofs::DataArea (content,     inodes and       blobs/<sha256>.erofs
//!                 docker save    written once, in place)       superblock       images/<name>.json
//! ```
//!
//! Nothing of a source is ever unpacked to the host's file system: entries become nodes of a tree
//! in memory and content becomes blocks of one file, so no path in an archive can reach the host.
//!
//! Everything here is synchronous and runs on the caller's thread (decompression on one more);
//! async callers use a blocking thread.
//!
//! [`build`] makes layers instead: metadata without content, and content in blobs that are fetched
//! when they are read. It shares the intake.

pub mod build;
pub mod erofs;
mod error;
mod intake;
pub mod layer;
mod limits;
mod name;
mod overlay;
mod record;
mod store;

pub use error::{EntryProblem, ImportError, StoreError};
pub use limits::{ImportLimits, ImportPhase, ImportProgress};
pub use name::{ImageName, ImageNameError};
pub use record::{ImageConfig, ImageRecord, Removed};
pub use store::ImageStore;
