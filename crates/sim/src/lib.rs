//! Simulated nodes, and control's own code against them: a cluster of any size on one machine, to find out what placement does
//! and what control takes. Nothing here runs a sandbox.
//!
//! ```text
//!                  ┌ [`cluster`]: a virtual clock; placement and the watcher's bookkeeping, called; faults of a seed
//! [`node::Node`] ──┤
//!                  └ [`edges`]: the edge's HTTP surface, a Unix socket a node ◄── dsec-control, the program ◄── [`caller`]
//! ```
//!
//! [`workload`] says what arrives: lifetimes, bursts, how many share an image. [`place`] is what `dsec bench place` measures.

mod caller;
pub mod clock;
pub mod cluster;
mod control;
pub mod edges;
pub mod node;
pub mod place;
pub mod workload;
