//! A file operation: one short-lived child of the agent on a socket of its own. File content goes
//! through the descriptor that the child hands over and never through the agent.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::guest::{FileCall, FileInfo, FileReply, Request};
use dsec_proto::rest::ApiError;
use tokio::io::unix::AsyncFd;

use super::Connection;
use super::codec::{Incoming, watched};
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
        connection.done(Request::File(call), vec![theirs.into()]).await?;
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
    async fn next_soon(&mut self) -> Result<(FileReply, Vec<OwnedFd>), ApiError> {
        tokio::time::timeout(ANSWER_MAX, self.next())
            .await
            .unwrap_or_else(|_| Err(vanished("it did not answer in time")))
    }

    /// The next answer, which must carry a descriptor.
    ///
    /// # Errors
    /// As [`Self::next`], or it carries none.
    pub async fn opened(&mut self) -> Result<(FileReply, OwnedFd), ApiError> {
        let (reply, mut fds) = self.next_soon().await?;
        match fds.pop() {
            Some(fd) => Ok((reply, fd)),
            None => Err(vanished("it opened nothing")),
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

fn vanished(why: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, format!("the file operation broke off: {why}"))
        .hint("the sandbox may be out of memory or processes, or be ending")
}
