//! Into a command: its standard input, its terminal's size, signals.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::guest::{self, Request};
use dsec_proto::rest::{ApiError, PtySize};
use tokio::io::unix::AsyncFd;

use super::codec::watched;
use super::exec::Exec;
use super::{CallError, Connection};
use crate::error::{internal, invalid_field};

/// What a terminal takes as end of input: Ctrl-D.
const END_OF_INPUT: &[u8] = b"\x04";

/// Signals by number, 1 to 31. Source: signal(7), x86-64 and arm64.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// Greatest signal number: the last real-time one.
const SIGNAL_MAX: i32 = 64;

/// `SIGKILL` of 9; of a real-time signal its number.
pub fn signal_name(number: i32) -> String {
    let named = usize::try_from(number - 1).ok().and_then(|i| SIGNALS.get(i));
    named.map_or_else(|| number.to_string(), |name| format!("SIG{name}"))
}

/// The number of `SIGINT`, `INT`, `int` or `2`.
///
/// # Errors
/// It is none of these.
pub fn signal_number(text: &str) -> Result<i32, ApiError> {
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let by_name = SIGNALS.iter().position(|known| *known == name).map(|i| i as i32 + 1);
    by_name.or_else(|| name.parse().ok().filter(|n| (1..=SIGNAL_MAX).contains(n))).ok_or_else(|| {
        invalid_field("signal", format!("{text:?} is no signal; give a name such as SIGINT or 1 to 64"))
    })
}

/// The write end of a command's stdin, or its terminal.
#[derive(Debug)]
pub struct StdinPipe {
    fd: AsyncFd<OwnedFd>,
    /// One writer at a time, so that pieces of two callers do not mix within a piece.
    turn: tokio::sync::Mutex<()>,
}

impl StdinPipe {
    /// Takes a descriptor from the agent.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn new(fd: OwnedFd) -> std::io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self { fd: watched(fd)?, turn: tokio::sync::Mutex::new(()) })
    }

    /// Writes all of it. Not cancel-safe: a dropped call may have written a part.
    ///
    /// # Errors
    /// `BrokenPipe` when nobody reads any more.
    pub async fn write_all(&self, mut bytes: &[u8]) -> std::io::Result<()> {
        let _turn = self.turn.lock().await;
        while !bytes.is_empty() {
            // First try without asking: a pipe with room is the usual case.
            match rustix::io::write(&self.fd, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let mut ready = self.fd.writable().await?;
                    match ready.try_io(|fd| Ok(rustix::io::write(fd, bytes)?)) {
                        Ok(Ok(written)) => bytes = &bytes[written..],
                        Ok(Err(error)) => return Err(error),
                        Err(_) => {}
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

/// Checks that a command takes input at all.
///
/// # Errors
/// It has ended, or its stdin is not streamed.
pub fn check_open(exec: &Exec) -> Result<(), ApiError> {
    let facts = exec.facts();
    if !facts.ended && (facts.stdin_open || facts.pty) {
        return Ok(());
    }
    let what = if facts.ended { "it has ended" } else { "its stdin is not streamed, or is closed" };
    Err(ApiError::new(ErrorKind::Conflict, format!("command {} takes no input: {what}", exec.id))
        .hint("start it with stdin_mode \"stream\" or a pty"))
}

/// Our end of a streamed stdin; asked for again after a restart of the edge.
async fn pipe(connection: &Connection, exec: &Exec) -> Result<Arc<StdinPipe>, ApiError> {
    check_open(exec)?;
    let held = exec.facts().stdin.clone();
    if let Some(pipe) = held {
        return Ok(pipe);
    }
    let request = Request::StdinOpen(guest::ExecRef { exec: exec.id.to_string() });
    let fd = connection.done(request, Vec::new()).await?.pop().ok_or(CallError::Unexpected)?;
    let pipe = Arc::new(StdinPipe::new(fd).map_err(|e| internal("a command's stdin cannot be used", &e))?);
    let mut facts = exec.facts();
    Ok(Arc::clone(facts.stdin.get_or_insert(pipe)))
}

/// Writes to a streamed stdin or a terminal.
///
/// # Errors
/// It takes no input, or has closed it.
pub async fn write(connection: &Connection, exec: &Exec, bytes: &[u8]) -> Result<(), ApiError> {
    pipe(connection, exec).await?.write_all(bytes).await.map_err(|_| {
        ApiError::new(ErrorKind::Conflict, format!("command {} has closed its standard input", exec.id))
    })
}

/// Ends a streamed stdin; on a terminal types Ctrl-D. Ending it twice is no error.
///
/// # Errors
/// The agent cannot be reached.
pub async fn close(connection: &Connection, exec: &Exec) -> Result<(), ApiError> {
    let (pty, open) = {
        let facts = exec.facts();
        (facts.pty, facts.stdin_open && !facts.ended)
    };
    if pty {
        return write(connection, exec, END_OF_INPUT).await;
    }
    if !open {
        return Ok(());
    }
    exec.change(|facts| {
        facts.stdin = None;
        facts.stdin_open = false;
    });
    let request = Request::StdinClose(guest::ExecRef { exec: exec.id.to_string() });
    connection.done(request, Vec::new()).await?;
    Ok(())
}

/// Feeds given stdin that is too large for the start's frame, then ends it. A command that does not
/// read all of it is none the worse.
pub async fn feed(connection: Arc<Connection>, exec: Arc<Exec>, given: Bytes) {
    let pipe = exec.facts().stdin.clone();
    if let Some(pipe) = pipe {
        let _ = pipe.write_all(&given).await;
    }
    let _ = close(&connection, &exec).await;
}

/// Gives a terminal another size.
///
/// # Errors
/// It has no terminal.
pub async fn resize(connection: &Connection, exec: &Exec, size: PtySize) -> Result<(), ApiError> {
    if !exec.facts().pty {
        return Err(ApiError::new(ErrorKind::Conflict, format!("command {} has no terminal", exec.id))
            .hint("start it with pty"));
    }
    let pipe = pipe(connection, exec).await?;
    let size = rustix::termios::Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(pipe.fd.get_ref().as_fd(), size)
        .map_err(|errno| internal("a terminal's size cannot be set", &std::io::Error::from(errno)))
}

/// Sends a signal. One to an ended command is a conflict.
///
/// # Errors
/// It has ended, or the agent refuses.
pub async fn signal(connection: &Connection, exec: &Exec, number: i32, tree: bool) -> Result<(), ApiError> {
    if exec.facts().ended && !tree {
        return Err(ApiError::new(ErrorKind::Conflict, format!("command {} has ended", exec.id))
            .hint("with \"tree\": true the signal goes to what it left behind"));
    }
    let request = Request::ExecSignal(guest::ExecSignal { exec: exec.id.to_string(), signal: number, tree });
    connection.done(request, Vec::new()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_known_by_name_and_number() {
        for (text, number) in [("SIGINT", 2), ("int", 2), ("9", 9), ("SIGSYS", 31), ("34", 34)] {
            assert_eq!(signal_number(text).unwrap(), number);
        }
        for bad in ["", "0", "65", "SIGFOO", "-1"] {
            assert!(signal_number(bad).is_err(), "{bad:?} was taken");
        }
        assert_eq!(signal_name(15), "SIGTERM");
        assert_eq!(signal_name(34), "34");
    }
}
