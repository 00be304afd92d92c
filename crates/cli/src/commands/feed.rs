//! Plain standard input on its way to a command. Each piece is a request of its own that is answered
//! when the command's pipe has taken it: what went in is known exactly, and the output's WebSocket
//! never holds bytes that nobody reads (the close of a socket with unread bytes resets it, and what was
//! on its way to us would be lost).

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use dsec_model::{ErrorKind, ExecId, SandboxId};
use dsec_proto::rest::ExecState;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::input::Typed;
use crate::client::{Client, ClientError};

/// Bytes of one request at most, so that a fast writer here needs few of them.
const PIECE_MAX: usize = 256 << 10;
/// How long a piece that certainly did not arrive is sent again: an edge that starts again takes seconds.
const RETRY_FOR: Duration = Duration::from_secs(30);
/// Pause before that.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// How long a command whose input broke is given to be over.
const END_WAIT: Duration = Duration::from_secs(2);

/// Feeds from a task of its own: a command that takes no input must not keep us from its output.
pub(super) struct Feed {
    task: JoinHandle<Result<(), ClientError>>,
    over: bool,
}

impl Feed {
    /// Starts to pass on what `typed` gives.
    pub(super) fn start(
        client: &Client,
        sandbox: &SandboxId,
        exec: &ExecId,
        typed: mpsc::Receiver<Typed>,
    ) -> Self {
        let (client, sandbox, exec) = (client.clone(), sandbox.clone(), exec.clone());
        Self { task: tokio::spawn(async move { feed(&client, &sandbox, &exec, typed).await }), over: false }
    }

    /// Waits until it is known that input did not arrive; for ever when all of it does. Cancel-safe.
    pub(super) async fn failed(&mut self) -> ClientError {
        if !self.over
            && let Ok(fed) = (&mut self.task).await
        {
            self.over = true;
            if let Err(error) = fed {
                return error;
            }
        }
        std::future::pending().await
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn feed(
    client: &Client,
    sandbox: &SandboxId,
    exec: &ExecId,
    mut typed: mpsc::Receiver<Typed>,
) -> Result<(), ClientError> {
    loop {
        let (piece, end) = gather(&mut typed).await;
        let mut broken_since = None;
        loop {
            match client.stdin(sandbox, exec, piece.clone(), end).await {
                Ok(()) => break,
                // It has ended or has closed its input: what is left is nobody's, as with a pipe.
                Err(error) if matches!(error.kind(), Some(ErrorKind::Conflict | ErrorKind::NotFound)) => {
                    return Ok(());
                }
                Err(error) => {
                    // An end alone may arrive twice; bytes may not.
                    let harmless = matches!(error, ClientError::Unreachable { .. }) || piece.is_empty();
                    let since = *broken_since.get_or_insert_with(Instant::now);
                    // The answer that a command has ended may be lost with a connection whose bytes nobody read.
                    let look = client.exec_wait(sandbox, exec, END_WAIT, 0).await;
                    if look.is_ok_and(|record| record.state == ExecState::Exited) {
                        return Ok(());
                    }
                    if !harmless || !error.passes() || since.elapsed() > RETRY_FOR {
                        return Err(error);
                    }
                }
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        if end {
            return Ok(());
        }
    }
}

/// What waits, up to one request's worth, and whether the input ends after it.
async fn gather(typed: &mut mpsc::Receiver<Typed>) -> (Bytes, bool) {
    let mut piece = match typed.recv().await {
        Some(Typed::Bytes(bytes)) => BytesMut::from(bytes),
        _ => return (Bytes::new(), true),
    };
    while piece.len() < PIECE_MAX {
        match typed.try_recv() {
            Ok(Typed::Bytes(bytes)) => piece.extend_from_slice(&bytes),
            Ok(_) => return (piece.freeze(), true),
            Err(_) => break,
        }
    }
    (piece.freeze(), false)
}
