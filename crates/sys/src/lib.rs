//! The kernel, as dsec's host side needs it: namespaces, mounts, cgroups of both versions, seccomp,
//! loop devices, btrfs subvolumes and descriptor passing. All `unsafe` of the host side is here, in
//! functions that are safe to call.
//!
//! Functions return [`rustix::io::Errno`] or [`std::io::Error`] as the kernel gave it; callers add
//! what they were doing.
#![allow(unsafe_code, reason = "this crate is where system calls without a safe wrapper live")]

pub mod advise;
pub mod btrfs;
pub mod cgroup;
pub mod fdpass;
pub mod fuse;
pub mod idmap;
pub mod loopdev;
pub mod memfd;
pub mod mount;
pub mod process;
pub mod procfs;
pub mod seccomp;
pub mod swap;
