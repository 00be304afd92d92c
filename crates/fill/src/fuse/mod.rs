//! The device: a FUSE file system with one directory and one file a blob, served from `/dev/fuse` without a library.
//!
//! Why our own: a worker must take over a live session, which means no `FUSE_INIT`, no memory of what the one before told
//! the kernel, and `FUSE_NOTIFY_RESEND` for what it left unanswered. `fuser` cannot adopt a session at all.
//! `fuse-backend-rs` can, but its value is the many operations of a writable file system, and the dozen needed here are this
//! module. What it leaves to its user is the difficult part: which process holds which descriptor, and until when.
//!
//! Rules that the kernel sets, and what follows:
//! - A closed device descriptor fails the requests that were read through it. So the holder has every descriptor, clones
//!   included; a worker's copies can go at any time.
//! - An answer must be written through the descriptor that its request came from.
//! - A process that is killed while the kernel copies from or to its memory fails the request if a page is not there. So
//!   buffers are written to before the kernel sees them, and file content is answered from memory, never from a mapping.
//! - A read through the page cache that meets an error half-way returns what it has, and the EROFS of some kernels fills
//!   the rest with zeros. So files are read past it (`FOPEN_DIRECT_IO`): a read is one request, which is answered whole or
//!   fails, and content is in memory once, in the pages of EROFS.
//! - Everything the kernel remembers of us (node numbers, no file handles) means the same to every worker: see
//!   [`crate::cache::number_of`].
//!
//! Needs Linux 6.9.

mod device;
mod protocol;
mod session;

pub use device::{Device, Shared};
pub use session::{NegotiateError, negotiate};

use std::io;
use std::os::fd::OwnedFd;

/// Largest answer to a READ: 256 pages.
const READ_MAX: usize = 1 << 20;

/// Asks the kernel to send again what an earlier worker read and did not answer. To be done once, before serving.
///
/// # Errors
/// `EINVAL`: the kernel is older than 6.9.
pub fn resend(device: &OwnedFd) -> io::Result<()> {
    rustix::io::write(device, &protocol::notify_resend())?;
    Ok(())
}
