//! The public API server: authenticates, places, forwards. It keeps nothing: a sandbox's id
//! carries its node, so any instance serves any request.
//!
//! ```text
//! caller ── HTTP ──► server ► access (id, log, metrics, panics) ► api (routes, OpenAPI)
//!                                                                  │ keys     who asks
//!                                                                  │ watcher  what nodes say, and where a create goes
//!                                                                  ▼
//!                                         forward ► upstream (pool, bodies, tunnels) ── HTTP ──► edge
//! ```
//!
//! Edges speak the same REST surface on their socket, so requests and answers pass untouched.

pub mod access;
pub mod api;
pub mod app;
pub mod config;
pub mod failure;
pub mod forward;
pub mod keys;
pub mod metrics;
pub mod nodes;
pub mod openapi;
pub mod server;
pub mod upstream;
pub mod watcher;
