//! The real agent, started as the launcher starts it, in miniature: user namespaces, chroot, pid
//! namespace, descriptors; and spoken to over its socket. Needs root.
//!
//! `DSEC_AETHER_BIN` names another build of it (the static one).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod archive;
mod execs;
mod files;
mod hostile;
mod measure;
mod output;
mod reconnect;
mod sessions;
mod support;
mod terminal;
