//! What every test stands on: a sandbox with an agent in it, and an edge's side of the protocol.

mod client;
mod launch;
mod namespaces;

pub(crate) use client::{Client, FileSocket, Run, exec, shell};
pub(crate) use launch::{Options, Sandbox};
