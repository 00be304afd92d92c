//! What every test stands on: a sandbox with an agent in it, and an edge's side of the protocol.

mod client;
mod launch;
mod namespaces;

pub(crate) use client::{Client, FileSocket, Run, exec, shell};
pub(crate) use launch::{Options, Sandbox};

/// Waits until something is so, and says what was not after ten seconds.
pub(crate) fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !so() {
        assert!(std::time::Instant::now() < until, "in vain: {what}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
