//! Messages with descriptors over Unix sockets that keep message boundaries (`SOCK_SEQPACKET`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Most descriptors in one message here: a launch with all the layers it may have. The kernel takes 253.
pub const FDS_MAX: usize = 160;

/// A connected pair of message sockets.
///
/// # Errors
/// The kernel's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends one message with descriptors.
///
/// # Errors
/// `EPIPE` when the peer is gone; no signal is raised.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Receives one message into `buffer`: how many bytes, and its descriptors (close-on-exec). 0 bytes: the peer is gone.
///
/// # Errors
/// The kernel's; `EMSGSIZE` as `InvalidData` when the message did not fit.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(rustix::net::ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message longer than its buffer"));
    }
    Ok((got.bytes, fds))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn bytes_and_descriptors_arrive_together_and_apart_from_the_next() {
        let (a, b) = pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        send(a.as_fd(), b"one", &[write.as_fd()]).unwrap();
        send(a.as_fd(), b"two", &[]).unwrap();
        drop((a, write));
        let mut buffer = [0; 16];
        let (n, fds) = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"one"[..], 1));
        rustix::io::write(&fds[0], b"through").unwrap();
        drop(fds);
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        assert_eq!(receive(b.as_fd(), &mut buffer).unwrap().0, 3);
        assert_eq!(receive(b.as_fd(), &mut buffer).unwrap().0, 0);
    }
}
