//! The vocabulary of dsec, without I/O: ids, resource limits, the sandbox lifecycle,
//! admission and placement, who may do what, and the kinds of error a caller can meet.
//!
//! Nothing here knows of a clock, a random source, a socket or a file, so every rule in it can be
//! tested by calling it.

pub mod admission;
pub mod error;
pub mod iam;
pub mod id;
pub mod journal;
pub mod lifecycle;
pub mod limits;
pub mod placement;

pub use admission::{Admission, Capacity, Demand, Observed, Policy, Promised, Short, Shortage};
pub use error::ErrorKind;
pub use id::{ExecId, IdError, NodeId, PoolName, SandboxId, SessionId, TaskId};
pub use journal::{Journal, Page};
pub use lifecycle::{Action, EndReason, Event, State};
pub use limits::{CpuClass, Limits, LimitsError};
