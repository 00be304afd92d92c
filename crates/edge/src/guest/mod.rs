//! The way into a sandbox: frames to its agent, the commands it runs, its files.

pub mod codec;
pub mod connection;
pub mod exec;
pub mod execs;
pub mod files;
pub mod pipe;
pub mod read;
pub mod stdin;

use std::time::Duration;

use dsec_proto::guest::GuestError;

pub use connection::Connection;
pub use execs::ExecTable;

/// Longest wait for an agent's answer. Every request is answered when it was begun, not when it has
/// ended, so even on a busy node this is ages.
pub const REPLY_MAX: Duration = Duration::from_secs(30);
/// Requests that may wait for one agent's answers: far above any honest use, and it bounds memory.
pub const IN_FLIGHT_MAX: usize = 1024;

/// Why a request to an agent has no answer of use.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The agent refused.
    #[error("the agent refused: {}", .0.message)]
    Guest(GuestError),
    /// The channel is closed.
    #[error("the agent's channel is closed: {0}")]
    Closed(String),
    /// No answer in [`REPLY_MAX`].
    #[error("the agent did not answer in time")]
    TimedOut,
    /// [`IN_FLIGHT_MAX`] requests wait already.
    #[error("too many requests wait for the agent")]
    Busy,
    /// An answer of the wrong kind.
    #[error("the agent's answer does not fit the request")]
    Unexpected,
}
