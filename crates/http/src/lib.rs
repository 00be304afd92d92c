//! What every HTTP hop of the platform does alike, so that two of them cannot differ.
//!
//! - [`Drained`]: a server's request body that is read on after its request was refused, so that
//!   the caller gets the answer and not a reset connection.
//! - [`HearsOut`]: a client's connection on which an answer is still read when the other side has
//!   stopped taking the request.
//! - [`strip_hop_by_hop`]: headers that belong to one connection.

mod drained;
mod hears_out;
mod hop;

pub use drained::{Awaited, DRAIN_BYTES_MAX, DRAIN_TIME_MAX, Drained, drained};
pub use hears_out::HearsOut;
pub use hop::{connection_options, strip_hop_by_hop};
