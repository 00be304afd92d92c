//! The public API server: authenticates, places, forwards. It keeps nothing of sandboxes that it
//! could not gather anew: an id carries its node, so any instance serves any request. Identities are in a database.
//!
//! ```text
//! caller ── HTTP ──► server ► access (id, log, metrics, panics) ► api (routes, OpenAPI)
//!                                                                  │ keys     who asks
//!                                                                  │ rules    what a call needs; behalf: whether they may
//!                                                                  │ quota    what may be let in still
//!                                                                  │ create   the way of a create over the nodes
//!                                                                  │ pools    which of them take over from others, with what
//!                                                                  │ watcher  what nodes say, and what was sent there
//!                                                                  │ records  what they say of their sandboxes
//!                                                                  ▼
//!                                         forward ► upstream (pool, bodies, tunnels) ── HTTP ──► edge
//! ```
//!
//! Edges speak the same REST surface on their socket, so requests and answers pass untouched.

pub mod access;
pub mod api;
pub mod app;
pub mod behalf;
pub mod cluster;
pub mod config;
pub mod create;
pub mod failure;
pub mod forward;
pub mod keys;
pub mod metrics;
pub mod nodes;
pub mod openapi;
pub mod pools;
pub mod quota;
pub mod records;
pub mod rules;
pub mod server;
pub mod tls;
pub mod upstream;
pub mod watcher;
