//! One program: started with a pipe on which it says that it is ready, its output kept.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};

use super::identity::Identity;
use super::state::StateDir;
use crate::failure::Failure;
use crate::render::{self, Tone, paint};

/// Variable with the token that a node joins by: a process's arguments are anybody's to read.
pub(super) const JOIN_TOKEN: &str = "DSEC_JOIN_TOKEN";
/// How long a program may take until it is ready.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Lines shown of a program that died.
const TAIL_LINES: usize = 15;
/// Bytes of a log that are looked at for them.
const TAIL_BYTES: u64 = 16 * 1024;
/// Longest line that is relayed as one.
const LINE_MAX: u64 = 16 * 1024;

/// A program and how it is called.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// Short name: of its log and in messages.
    pub(super) name: &'static str,
    /// The file.
    pub(super) exe: PathBuf,
    /// Its arguments but for `--ready-fd`.
    pub(super) args: Vec<OsString>,
}

/// Where its output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logs {
    /// To `log/NAME.log`.
    File,
    /// To our standard error, each line with the program's name.
    Relay,
}

/// A program that runs.
#[derive(Debug)]
pub(super) struct Running {
    /// The process.
    pub(super) child: Child,
    /// Who it is.
    pub(super) identity: Option<Identity>,
    name: &'static str,
    ready: Receiver,
    tail: Tail,
}

#[derive(Debug, Clone)]
enum Tail {
    File { path: PathBuf, from: u64 },
    Kept(Arc<Mutex<VecDeque<String>>>),
}

/// Starts a program in a process group of its own: a Ctrl-C at the terminal is for us alone, and we
/// take the programs down in their order.
pub(super) fn start(program: &Program, state: &StateDir, logs: Logs) -> Result<Running, Failure> {
    let failed =
        |error: std::io::Error| Failure::io(format!("cannot start {}", program.exe.display()), &error);
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
    let mut command = Command::new(&program.exe);
    command.args(&program.args).arg("--ready-fd").arg(write.as_raw_fd().to_string());
    command.stdin(Stdio::null()).current_dir("/").process_group(0);
    // The token is for the one that joins.
    command.env_remove(JOIN_TOKEN);
    let file_tail = match logs {
        Logs::File => {
            let file = state.open_log(program.name)?;
            let from = file.metadata().map(|meta| meta.len()).unwrap_or_default();
            command.stdout(file.try_clone().map_err(failed)?).stderr(file);
            Some(Tail::File { path: state.log(program.name), from })
        }
        Logs::Relay => {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            None
        }
    };
    let mut child = spawn_with(&mut command, &write).map_err(failed)?;
    drop(write);
    let tail = file_tail.unwrap_or_else(|| relay(program.name, &mut child));
    let identity = child.id().and_then(Identity::of);
    let ready = Receiver::from_owned_fd(read).map_err(failed)?;
    Ok(Running { child, identity, name: program.name, ready, tail })
}

/// Spawns with one descriptor left open in the child. No other child can be started meanwhile: this
/// process has one thread that starts any.
fn spawn_with(command: &mut Command, fd: &OwnedFd) -> std::io::Result<Child> {
    rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    let child = command.spawn();
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    child
}

impl Running {
    /// Waits until the program says that it is ready.
    ///
    /// # Errors
    /// It died first, or took too long; the message has its last words.
    pub(super) async fn ready(&mut self) -> Result<(), Failure> {
        let mut byte = [0u8; 64];
        let said = async {
            match self.ready.read(&mut byte).await {
                Ok(n) if n > 0 => {}
                // Closed without a word: it is about to die, and that says more.
                _ => std::future::pending().await,
            }
        };
        let died = tokio::select! {
            () = said => return Ok(()),
            status = self.child.wait() => Some(status),
            () = tokio::time::sleep(READY_TIMEOUT) => None,
        };
        let what = match died {
            Some(Ok(status)) => format!("{} ended at its start: {}", self.name, describe(status)),
            Some(Err(error)) => format!("{} cannot be watched: {error}", self.name),
            None => format!("{} was not ready after {} s", self.name, READY_TIMEOUT.as_secs()),
        };
        let tail = self.tail.lines().await;
        let shown = if tail.is_empty() { String::new() } else { format!(":\n  {}", tail.join("\n  ")) };
        Err(Failure::new(format!("{what}{shown}")).hint("`dsec doctor` shows what this machine lacks"))
    }

    /// SIGTERM, then SIGKILL after `patience`; waits for its end.
    pub(super) async fn terminate(mut self, patience: Duration) {
        if let Some(identity) = self.identity {
            identity.signal(rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(patience, self.child.wait()).await.is_err() {
            // A failure means that it is gone already.
            let _ = self.child.kill().await;
        }
    }
}

/// How a process ended, in words.
pub(super) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

impl Tail {
    async fn lines(&self) -> Vec<String> {
        match self {
            Self::File { path, from } => last_lines(path, *from).unwrap_or_default(),
            Self::Kept(lines) => {
                // What it wrote last may still be on its way from the pipe to us.
                tokio::time::sleep(Duration::from_millis(50)).await;
                lines.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
            }
        }
    }
}

/// The last lines of a file, none from before `from`.
pub(super) fn last_lines(path: &std::path::Path, from: u64) -> std::io::Result<Vec<String>> {
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(from.max(length.saturating_sub(TAIL_BYTES)).min(length)))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].iter().map(|line| (*line).to_owned()).collect())
}

/// Passes both outputs on to our standard error and keeps the last lines.
fn relay(name: &'static str, child: &mut Child) -> Tail {
    let kept = Arc::new(Mutex::new(VecDeque::new()));
    if let Some(out) = child.stdout.take() {
        tokio::spawn(relay_lines(name, out, Arc::clone(&kept)));
    }
    if let Some(err) = child.stderr.take() {
        tokio::spawn(relay_lines(name, err, Arc::clone(&kept)));
    }
    Tail::Kept(kept)
}

async fn relay_lines(name: &'static str, from: impl AsyncRead + Unpin, kept: Arc<Mutex<VecDeque<String>>>) {
    let prefix = paint(&format!("{name:>7} |"), Tone::Dim, render::colours(&std::io::stderr()));
    let mut reader = BufReader::new(from);
    loop {
        let mut bytes = Vec::new();
        match (&mut reader).take(LINE_MAX).read_until(b'\n', &mut bytes).await {
            Ok(n) if n > 0 => {}
            _ => return,
        }
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        render::note(&format!("{prefix} {line}"));
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == TAIL_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_starts_where_this_run_did() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        let old = "old\n".repeat(10);
        let new: String = (0..TAIL_LINES + 3).map(|n| format!("line {n}\n")).collect();
        std::fs::write(&path, format!("{old}{new}")).unwrap();
        let lines = last_lines(&path, old.len() as u64).unwrap();
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!((lines[0].as_str(), lines[TAIL_LINES - 1].as_str()), ("line 3", "line 17"));
        assert!(last_lines(&path, u64::MAX).unwrap().is_empty());
    }
}
