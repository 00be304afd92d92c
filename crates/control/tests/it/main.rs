//! The server with real sockets: callers over TCP, and nodes played by [`edge::FakeEdge`].

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "in tests a panic is the report")]
mod auth;
mod edge;
mod errors;
mod forwarding;
mod harness;
mod layers;
mod lists;
mod lost;
mod overhead;
mod placement;
mod pools;
mod process;
mod refused;
mod tls;
mod upstream;
