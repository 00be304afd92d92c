//! Our standard input on its way to a command.

use std::io::Read;

use bytes::Bytes;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::failure::Failure;
use crate::terminal::{Escape, RawMode};

/// Bytes read at once.
const READ_SIZE: usize = 64 * 1024;
/// Reads that wait to be sent.
const WAITING_MAX: usize = 4;

/// What came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Typed {
    /// Bytes.
    Bytes(Bytes),
    /// End of input.
    End,
    /// Our terminal has a new size.
    Resized,
    /// The way out was typed.
    Leave,
}

/// Where a command's input comes from.
pub(crate) enum Input {
    /// Nowhere.
    None,
    /// Standard input as it is.
    Plain(mpsc::Receiver<Typed>),
    /// A terminal in raw mode.
    Terminal {
        /// Its keys.
        keys: mpsc::Receiver<Typed>,
        /// Its changes of size.
        resized: Signal,
        /// Restores it when dropped.
        _raw: RawMode,
    },
}

impl Input {
    /// Standard input as it is, to its end.
    pub(crate) fn plain() -> Self {
        Self::Plain(read_in_thread(None))
    }

    /// Standard input in raw mode. With `escape`, `~.` at the start of a line leaves.
    ///
    /// # Errors
    /// It is no terminal.
    pub(crate) fn terminal(escape: bool) -> Result<Self, Failure> {
        let resized = signal(SignalKind::window_change())
            .map_err(|error| Failure::io("cannot listen for the terminal's size", &error))?;
        let raw = RawMode::enter()?;
        Ok(Self::Terminal { keys: read_in_thread(escape.then(Escape::new)), resized, _raw: raw })
    }

    /// Takes plain standard input out, which is fed apart from the output's connection.
    pub(crate) fn take_plain(&mut self) -> Option<mpsc::Receiver<Typed>> {
        match std::mem::replace(self, Self::None) {
            Self::Plain(bytes) => Some(bytes),
            other => {
                *self = other;
                None
            }
        }
    }

    /// True for a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The next that came in; never, once it is over. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Typed {
        let typed = match self {
            // Plain input is a feed's.
            Self::None | Self::Plain(_) => None,
            Self::Terminal { keys, resized, .. } => tokio::select! {
                typed = keys.recv() => typed,
                _ = resized.recv() => Some(Typed::Resized),
            },
        };
        match typed {
            Some(typed) => typed,
            None => std::future::pending().await,
        }
    }
}

/// Reads standard input from a thread that nobody waits for: a read from a terminal cannot be taken
/// back, and the process ends without it.
fn read_in_thread(mut escape: Option<Escape>) -> mpsc::Receiver<Typed> {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; READ_SIZE];
        loop {
            let n = match stdin.read(&mut buffer) {
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            if n == 0 {
                let _ = sender.blocking_send(Typed::End);
                return;
            }
            let (bytes, leave) = match &mut escape {
                Some(escape) => escape.filter(&buffer[..n]),
                None => (buffer[..n].to_vec(), false),
            };
            if !bytes.is_empty() && sender.blocking_send(Typed::Bytes(bytes.into())).is_err() {
                return;
            }
            if leave {
                let _ = sender.blocking_send(Typed::Leave);
                return;
            }
        }
    });
    receiver
}
