//! Every shape that crosses a process boundary.
//!
//! - [`rest`]: the public API's JSON types, which the node's internal API shares: control
//!   authenticates, places and forwards, and a node answers with these same types.
//! - [`frames`]: binary frames of the WebSockets (output streams and terminals).
//! - [`guest`]: the protobuf frames between a node's edge and the agent in a sandbox.
//!
//! All of them are append-only: a field is never renamed, renumbered or given another meaning, and
//! every reader takes a message without the newest fields. A new edge with an old agent is the
//! normal case, since sandboxes outlive deploys.

#[cfg(feature = "rest")]
pub mod frames;
pub mod guest;
#[cfg(feature = "rest")]
pub mod rest;
