//! A command's output on its way to our standard output and error, in the order it came.

use std::io::Write;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use crate::failure::Failure;

/// Pieces that wait to be written, at most 256 KiB each.
const WAITING_MAX: usize = 4;

/// Which of our two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Writes from a thread that nobody waits for at the end: a pager that takes nothing must not keep us from a Ctrl-C.
pub(crate) struct Output {
    sender: Option<mpsc::Sender<(Stream, Bytes)>>,
    written: oneshot::Receiver<std::io::Result<()>>,
}

/// Room for one piece.
pub(crate) struct Room<'a>(mpsc::Permit<'a, (Stream, Bytes)>);

impl Room<'_> {
    /// Hands the piece over.
    pub(crate) fn send(self, piece: Option<(Stream, Bytes)>) {
        if let Some(piece) = piece {
            self.0.send(piece);
        }
    }
}

impl Output {
    /// An output; nothing is written yet.
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let (done, written) = oneshot::channel();
        std::thread::spawn(move || {
            // Whoever waited may have been told to end.
            let _ = done.send(write_all(receiver));
        });
        Self { sender: Some(sender), written }
    }

    /// Waits for room. `None`: nobody reads any more. Cancel-safe.
    pub(crate) async fn room(&self) -> Option<Room<'_>> {
        match &self.sender {
            Some(sender) => sender.reserve().await.ok().map(Room),
            None => None,
        }
    }

    /// Waits until all of it is written.
    ///
    /// # Errors
    /// It cannot be written; when nobody reads it, the failure says so.
    pub(crate) async fn finish(&mut self) -> Result<(), Failure> {
        self.sender = None;
        match (&mut self.written).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Failure::io("cannot write the command's output", &error)),
            Err(_) => Err(Failure::new("the thread that writes the output ended")),
        }
    }
}

fn write_all(mut pieces: mpsc::Receiver<(Stream, Bytes)>) -> std::io::Result<()> {
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    while let Some((stream, bytes)) = pieces.blocking_recv() {
        // Flushed piece by piece: what came first on either stream is seen first.
        match stream {
            Stream::Out => write_one(&mut out, &bytes)?,
            Stream::Err => write_one(&mut err, &bytes)?,
        }
    }
    Ok(())
}

fn write_one(to: &mut impl Write, bytes: &[u8]) -> std::io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}
