//! Content of blobs on demand: the node's cache of what was read, the engine that fills it from a store, and the device
//! that shows every blob as a file before any of it is here.
//!
//! ```text
//! edge ── client ──socket──► control ┐                      ┌► source (the store)
//!                                    ├► engine ─► cache     │   groups, checked
//! EROFS ── read ──/dev/fuse─► fuse ──┘     └────────────────┘
//!                    ▲ held by the holder, served by the worker
//! ```
//!
//! The decision is in `docs/adr/008-layers.md`.

pub mod cache;
pub mod client;
pub mod config;
pub mod control;
pub mod engine;
pub mod fuse;
pub mod holder;
pub mod protocol;
pub mod source;
pub mod trace;
pub mod worker;
