//! Signals to this process, as a command reacts to them.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// A signal that a person or a supervisor sent us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Ctrl-C.
    Interrupt,
    /// Somebody wants us to end.
    Terminate,
    /// Our terminal is gone.
    HangUp,
}

impl Asked {
    /// Name for the API.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
        }
    }

    /// Exit code of a process that such a signal ended.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => crate::failure::EXIT_INTERRUPTED,
            Self::Terminate => 128 + 15,
            Self::HangUp => 128 + 1,
        }
    }
}

/// The signals from now on: none of them ends this process by itself any more.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Takes the signals over.
    pub(crate) fn new() -> Result<Self, Failure> {
        let take = |kind| signal(kind).map_err(|error| Failure::io("cannot listen for signals", &error));
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hang_up: take(SignalKind::hangup())?,
        })
    }

    /// The next one. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.interrupt.recv() => Asked::Interrupt,
            _ = self.terminate.recv() => Asked::Terminate,
            _ = self.hang_up.recv() => Asked::HangUp,
        }
    }
}
