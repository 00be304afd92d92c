//! Content of blobs on demand: the node's cache of what was read, and the engine that fills it from a store.
//!
//! ```text
//! read(blob, range) ─► engine ─► cache: what is here
//!                        └─────► source, the store: what is not; checked, then kept
//! ```
//!
//! The decision is in `docs/adr/008-layers.md`.

pub mod cache;
pub mod engine;
pub mod source;
pub mod trace;
