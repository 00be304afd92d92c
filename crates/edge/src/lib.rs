//! The node agent. One process a node, root, that owns the node's sandboxes: it admits and launches
//! them, talks to the agent inside each, serves their part of the HTTP API on a Unix socket, to control on other
//! machines over TLS, and finds them again after a restart.
//!
//! ```text
//! control ──HTTP──► server ► api ─┬─► registry ► sandbox::Handle ──mailbox──► sandbox::actor ► launch (backend)
//!                                 │                 │ Live                      (lifecycle, timers, record, end)
//!                                 │                 └─► guest::Connection ──frames──► aether
//!                                 └─► layers ► dsec-image, dsec-store, dsec-fill
//! ```
//!
//! - A sandbox's life is decided by `dsec_model::lifecycle::step` alone; [`sandbox::actor`] executes.
//! - Commands and files do not pass the actor: they go straight down the sandbox's connection, which
//!   bounds what is in flight. Nothing that a caller holds open can delay a stop.
//! - The kernel is behind [`launch::Launch`], so everything here runs in tests without it.

pub mod admit;
pub mod adopt;
pub mod api;
pub mod charges;
pub mod clock;
pub mod config;
pub mod doctor;
pub mod ended;
pub mod error;
pub mod guest;
pub mod idempotency;
pub mod ids;
pub mod launch;
pub mod layers;
pub mod lock;
pub mod maintenance;
pub mod member;
pub mod node;
pub mod pending;
pub mod registry;
pub mod release;
pub mod remote;
pub mod sandbox;
pub mod scheduling;
pub mod server;
pub mod shutdown;
pub mod sockets;
pub mod swap;
pub mod traffic;

/// Threads that may block at once: launches, clean-ups and file content. More would not make a node's
/// few cores faster, fewer would let slow disks starve launches.
pub const BLOCKING_THREADS: usize = 256;
