//! A file operation: one short-lived child of the agent on a socket of its own. File content goes
//! through the descriptor that the child hands over and never through the agent.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::guest::{FileCall, FileInfo, FileReply, Request};
use dsec_proto::rest::ApiError;
use rustix::fs::{FileType, fstat};
use tokio::io::unix::AsyncFd;

use super::Connection;
use super::codec::{Incoming, watched};
use super::pipe::{Pipe, STALL_MAX};
use crate::error::{chain, from_guest, internal};

/// Longest wait for an answer that a caller waits for: a move may copy a large tree first.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// What the edge sends to make a write count.
const COMMIT: &[u8] = &[1];

/// The edge's end of one file operation. Dropping it ends the operation; a write that was not
/// committed changes nothing.
#[derive(Debug)]
pub struct FileChild {
    socket: AsyncFd<OwnedFd>,
    incoming: Incoming,
}

impl FileChild {
    /// Starts an operation.
    ///
    /// # Errors
    /// The agent cannot start it.
    pub async fn start(connection: &Connection, call: FileCall) -> Result<Self, ApiError> {
        let failed = |e: std::io::Error| internal("a socket for a file operation cannot be made", &e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let socket = watched(OwnedFd::from(ours)).map_err(failed)?;
        let fds = [Some(theirs.into()), connection.file_cgroup()?].into_iter().flatten().collect();
        connection.done(Request::File(call), fds).await?;
        Ok(Self { socket, incoming: Incoming::default() })
    }

    /// The next answer; an error of the child as an error. Cancel-safe.
    ///
    /// # Errors
    /// The child failed or vanished.
    pub async fn next(&mut self) -> Result<(FileReply, Vec<OwnedFd>), ApiError> {
        match self.incoming.next::<FileReply>(&self.socket).await {
            Ok(Some((mut reply, fds))) => match reply.error.take() {
                Some(error) => Err(from_guest(error)),
                None => Ok((reply, fds)),
            },
            Ok(None) => Err(vanished("it closed its socket")),
            Err(error) => Err(vanished(&chain(&error))),
        }
    }

    /// The next answer, which must not take long: root in the sandbox can stop the child for ever.
    ///
    /// # Errors
    /// As [`Self::next`], or it does.
    pub async fn next_soon(&mut self) -> Result<(FileReply, Vec<OwnedFd>), ApiError> {
        tokio::time::timeout(ANSWER_MAX, self.next())
            .await
            .unwrap_or_else(|_| Err(vanished("it did not answer in time")))
    }

    /// The next answer and its one descriptor, with what that is. The child runs with the rights of the
    /// sandbox's user: it is not believed that it opened what it should.
    async fn opened(&mut self) -> Result<(FileReply, OwnedFd, FileType), ApiError> {
        let (reply, mut fds) = self.next_soon().await?;
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
            return Err(vanished("it did not open one thing"));
        };
        let kind = fstat(&fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let kind =
            kind.map_err(|e| internal("a descriptor cannot be looked at", &std::io::Error::from(e)))?;
        Ok((reply, fd, kind))
    }

    /// The next answer, which must carry a regular file.
    ///
    /// # Errors
    /// As [`Self::next_soon`], or it carries anything else.
    pub async fn regular(&mut self) -> Result<(FileReply, OwnedFd), ApiError> {
        match self.opened().await? {
            (reply, fd, FileType::RegularFile) => Ok((reply, fd)),
            (_, _, kind) => Err(wrong_kind(kind)),
        }
    }

    /// The next answer, which must carry a pipe to read from.
    ///
    /// # Errors
    /// As [`Self::next_soon`], or it carries anything else.
    pub async fn readable(&mut self) -> Result<Pipe, ApiError> {
        match self.opened().await? {
            (_, fd, FileType::Fifo) => Pipe::reader(&fd, STALL_MAX).map_err(|e| unusable(&e)),
            (_, _, kind) => Err(wrong_kind(kind)),
        }
    }

    /// The next answer, which must carry a pipe to write to.
    ///
    /// # Errors
    /// As [`Self::next_soon`], or it carries anything else.
    pub async fn writable(&mut self) -> Result<Pipe, ApiError> {
        match self.sink().await? {
            Sink::Pipe(pipe) => Ok(pipe),
            Sink::File(_) => Err(wrong_kind(FileType::RegularFile)),
        }
    }

    /// The next answer, which must carry a file or a pipe to write to.
    ///
    /// # Errors
    /// As [`Self::next_soon`], or it carries anything else.
    pub async fn sink(&mut self) -> Result<Sink, ApiError> {
        let (_, fd, kind) = self.opened().await?;
        match kind {
            FileType::RegularFile => Ok(Sink::File(fd)),
            FileType::Fifo => Ok(Sink::Pipe(Pipe::writer(&fd, STALL_MAX).map_err(|e| unusable(&e))?)),
            kind => Err(wrong_kind(kind)),
        }
    }

    /// The next answer, which must be about one file.
    ///
    /// # Errors
    /// As [`Self::next`], or it is not.
    pub async fn info(&mut self) -> Result<FileInfo, ApiError> {
        let (mut reply, _) = self.next_soon().await?;
        reply.files.pop().ok_or_else(|| vanished("it told nothing of the file"))
    }

    /// Makes a write count.
    ///
    /// # Errors
    /// The child failed; nothing was changed.
    pub async fn commit(&mut self) -> Result<FileInfo, ApiError> {
        super::codec::send(self.socket.get_ref().as_fd(), COMMIT, &[])
            .map_err(|e| vanished(&e.to_string()))?;
        self.info().await
    }
}

/// Where an upload goes.
#[derive(Debug)]
pub enum Sink {
    /// A file that the edge writes itself.
    File(OwnedFd),
    /// A pipe from which the child writes: what is kept in memory is then the sandbox's to pay for.
    Pipe(Pipe),
}

fn wrong_kind(kind: FileType) -> ApiError {
    vanished(&format!("it opened something of the wrong kind ({kind:?})"))
}

fn unusable(error: &std::io::Error) -> ApiError {
    internal("a pipe to a file operation cannot be used", error)
}

fn vanished(why: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, format!("the file operation broke off: {why}"))
        .hint("the sandbox may be out of memory or processes, or be ending")
}
