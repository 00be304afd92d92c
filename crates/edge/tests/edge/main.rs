//! The edge's whole HTTP surface on a fake backend: no kernel feature is needed.
#![allow(unreachable_pub, reason = "one test binary; its modules see each other")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod cluster;
mod execs;
mod files;
mod filler;
mod images;
mod layers;
mod ports;
mod records;
mod refused;
mod releases;
mod restart;
mod sandboxes;
mod support;
