//! Frames and descriptors on a non-blocking Unix stream.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, BytesMut};
use dsec_proto::guest::{self, FRAME_FDS_MAX, FileReply, FrameError, FromGuest};
use prost::Message;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::unix::AsyncFd;

/// Bytes read at once. On the stack, since thousands of connections are idle.
const READ_CHUNK: usize = 32 * 1024;
/// A buffer above this is given back once it is empty.
const KEPT_BUFFER_MAX: usize = 64 * 1024;

/// Descriptors that may wait for the rest of their frame: those of a few frames that came together.
const FDS_WAITING_MAX: usize = 4 * FRAME_FDS_MAX;

/// Has the runtime watch a descriptor.
///
/// # Errors
/// It is of a kind that cannot be waited for.
#[expect(
    deprecated,
    reason = "`register` is unsafe for types that change their descriptor; `OwnedFd` cannot"
)]
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// Why a stream of frames cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The socket failed.
    #[error("the socket failed")]
    Io(#[from] io::Error),
    /// The bytes are no frame.
    #[error("the peer sent something that is no frame")]
    Frame(#[from] FrameError),
    /// A frame announced descriptors that did not come with it.
    #[error("a frame lacks its descriptors")]
    LostDescriptors,
    /// The peer closed in the middle of a frame.
    #[error("the peer closed in the middle of a frame")]
    Truncated,
}

/// A message that says how many descriptors are its own.
pub trait Carries {
    /// How many.
    fn carried(&self) -> u32;
}

impl Carries for FromGuest {
    fn carried(&self) -> u32 {
        self.fds
    }
}

impl Carries for FileReply {
    fn carried(&self) -> u32 {
        self.fds
    }
}

/// What was received and not yet taken.
#[derive(Debug, Default)]
pub struct Incoming {
    buffer: BytesMut,
    fds: VecDeque<OwnedFd>,
}

impl Incoming {
    /// One `recvmsg`. 0: the peer closed.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` among them.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut chunk = [0u8; READ_CHUNK];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.fds.extend(rights);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors than a frame may have"));
        }
        if self.fds.len() > FDS_WAITING_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "more descriptors than frames that own them",
            ));
        }
        self.buffer.extend_from_slice(&chunk[..got.bytes]);
        Ok(got.bytes)
    }

    /// The next whole frame and its descriptors.
    ///
    /// # Errors
    /// The bytes are no frame, or descriptors are missing.
    pub fn take<M: Message + Default + Carries>(&mut self) -> Result<Option<(M, Vec<OwnedFd>)>, CodecError> {
        let Some((message, used)) = guest::decode::<M>(&self.buffer)? else { return Ok(None) };
        self.buffer.advance(used);
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BUFFER_MAX {
            self.buffer = BytesMut::new();
        }
        let count = message.carried() as usize;
        if count > self.fds.len() {
            return Err(CodecError::LostDescriptors);
        }
        Ok(Some((message, self.fds.drain(..count).collect())))
    }

    /// Waits for the next frame; `None` when the peer has closed between frames. Cancel-safe.
    ///
    /// # Errors
    /// The socket failed or what came is no frame.
    pub async fn next<M: Message + Default + Carries>(
        &mut self,
        socket: &AsyncFd<OwnedFd>,
    ) -> Result<Option<(M, Vec<OwnedFd>)>, CodecError> {
        loop {
            if let Some(frame) = self.take()? {
                return Ok(Some(frame));
            }
            let mut ready = socket.readable().await?;
            match ready.try_io(|fd| self.receive(fd.get_ref().as_fd())) {
                Ok(Ok(0)) if self.buffer.is_empty() => return Ok(None),
                Ok(Ok(0)) => return Err(CodecError::Truncated),
                Ok(Ok(_)) | Err(_) => {}
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error.into()),
            }
        }
    }
}

/// One `sendmsg` of what fits; descriptors go with the first byte.
///
/// # Errors
/// The kernel's, `WouldBlock` among them.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more descriptors than a frame may have"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use dsec_proto::guest::{Empty, Reply};

    use super::*;

    fn frame(id: u64, fds: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        guest::encode(&FromGuest { reply_to: id, fds, reply: Some(Reply::Done(Empty {})) }, &mut bytes);
        bytes
    }

    #[test]
    fn descriptors_go_to_the_frames_that_own_them_however_the_bytes_are_cut() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let (one, two) = (frame(1, 1), frame(2, 2));
        send(theirs.as_fd(), &one, &[file.as_fd()]).unwrap();
        send(theirs.as_fd(), &two[..3], &[file.as_fd(), file.as_fd()]).unwrap();
        send(theirs.as_fd(), &two[3..], &[]).unwrap();
        drop(theirs);
        let mut incoming = Incoming::default();
        while incoming.receive(ours.as_fd()).unwrap() > 0 {}
        let (first, fds) = incoming.take::<FromGuest>().unwrap().unwrap();
        assert_eq!((first.reply_to, fds.len()), (1, 1));
        let (second, fds) = incoming.take::<FromGuest>().unwrap().unwrap();
        assert_eq!((second.reply_to, fds.len()), (2, 2));
        assert!(incoming.take::<FromGuest>().unwrap().is_none());
    }

    #[test]
    fn descriptors_that_no_frame_owns_do_not_pile_up() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut incoming = Incoming::default();
        let mut received = 0;
        let refused = (0..1000).find_map(|_| {
            send(theirs.as_fd(), &[0], &[file.as_fd(); FRAME_FDS_MAX]).unwrap();
            received += FRAME_FDS_MAX;
            incoming.receive(ours.as_fd()).err()
        });
        assert_eq!(refused.map(|e| e.kind()), Some(io::ErrorKind::InvalidData));
        assert!(received <= FDS_WAITING_MAX + FRAME_FDS_MAX, "{received} were kept");
    }

    #[test]
    fn a_frame_that_announces_descriptors_it_lacks_ends_the_stream() {
        let mut incoming = Incoming::default();
        incoming.buffer.extend_from_slice(&frame(1, 1));
        assert!(matches!(incoming.take::<FromGuest>(), Err(CodecError::LostDescriptors)));
    }
}
