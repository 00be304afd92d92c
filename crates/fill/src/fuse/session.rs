//! The beginning of a session, which happens once and is the holder's.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::READ_MAX;
use super::protocol::*;

/// Reads and pages that the kernel may have under way at once beyond those that a process waits for. The kernel's own 12
/// would let the readahead of one cold file hold up all others.
const MAX_BACKGROUND: u16 = 512;

/// Why no session began.
#[derive(Debug, thiserror::Error)]
pub enum NegotiateError {
    /// The device.
    #[error("the FUSE device cannot be used")]
    Device(#[source] io::Error),
    /// The first request was another.
    #[error("the FUSE device did not begin with FUSE_INIT, so it is not a new session")]
    NotNew,
    /// Workers could not be replaced.
    #[error(
        "the kernel speaks FUSE {major}.{minor} without FUSE_NOTIFY_RESEND; Linux 6.9 or newer is needed"
    )]
    TooOld {
        /// Its version.
        major: u32,
        /// Its version.
        minor: u32,
    },
}

/// Answers the `FUSE_INIT` of a session that was just mounted.
///
/// # Errors
/// The kernel is too old; the device is not new.
pub fn negotiate(device: &OwnedFd) -> Result<(), NegotiateError> {
    let mut buffer = vec![1; FUSE_MIN_READ_BUFFER];
    let length = loop {
        match rustix::io::read(device, &mut buffer) {
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            other => break other.map_err(|e| NegotiateError::Device(e.into()))?,
        }
    };
    let request = Request::parse(&buffer[..length]).filter(|request| request.opcode == FUSE_INIT);
    let request = request.ok_or(NegotiateError::NotNew)?;
    let kernel = request.init_in().ok_or(NegotiateError::NotNew)?;
    let needed = FUSE_INIT_EXT | FUSE_HAS_RESEND | FUSE_MAX_PAGES;
    if kernel.major != FUSE_KERNEL_VERSION
        || kernel.minor < FUSE_KERNEL_MINOR_VERSION
        || kernel.flags & needed != needed
    {
        return Err(NegotiateError::TooOld { major: kernel.major, minor: kernel.minor });
    }
    let wanted = needed | FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS | FUSE_EXPLICIT_INVAL_DATA;
    let out = InitOut {
        max_readahead: kernel.max_readahead,
        flags: wanted & kernel.flags,
        max_background: MAX_BACKGROUND,
        max_write: 4096,
        max_pages: (READ_MAX / 4096) as u16,
    }
    .encode();
    let header = out_header(request.unique, 0, out.len());
    rustix::io::write(device, &[header.as_slice(), &out].concat())
        .map_err(|e| NegotiateError::Device(e.into()))?;
    Ok(())
}
