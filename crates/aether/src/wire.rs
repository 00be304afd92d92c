//! Frames and descriptors on Unix sockets.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_proto::guest::{FileReply, GuestError, encode};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// `SCM_MAX_FD`: what one `recvmsg` can deliver at most.
const KERNEL_FDS_MAX: usize = 253;

/// Sends what the socket takes, with descriptors attached to the first byte.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Sends a few bytes and a descriptor, waiting for room.
pub(crate) fn send_descriptor(socket: BorrowedFd<'_>, bytes: &[u8], fd: BorrowedFd<'_>) -> Result<(), Errno> {
    send(socket, bytes, &[fd], SendFlags::empty()).map(drop)
}

/// Sends all of it, waiting for room.
pub(crate) fn send_all(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut fds = fds;
    while !bytes.is_empty() {
        let n = send(socket, bytes, fds, SendFlags::empty())?;
        bytes = &bytes[n..];
        fds = &[];
    }
    Ok(())
}

/// A file child's answer.
pub(crate) fn reply(
    socket: BorrowedFd<'_>,
    mut message: FileReply,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    message.fds = fds.len() as u32;
    let mut bytes = Vec::new();
    encode(&message, &mut bytes);
    send_all(socket, &bytes, fds)
}

/// A file child's last word. Nobody listening is no matter.
pub(crate) fn reply_error(socket: BorrowedFd<'_>, error: GuestError) {
    let _ = reply(socket, FileReply { error: Some(error), last: true, ..FileReply::default() }, &[]);
}

/// Receives into `into` (its spare room) and `fds`. `Ok(0)`: the other side has closed.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut Vec<u8>,
    fds: &mut VecDeque<OwnedFd>,
) -> Result<usize, Errno> {
    /// What one call takes: on the stack, so idle memory does not hold it.
    const CHUNK: usize = 8192;
    let mut chunk = [0; CHUNK];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    into.extend_from_slice(&chunk[..got.bytes]);
    Ok(got.bytes)
}

/// A borrowed list of descriptors for [`send`].
pub(crate) fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
