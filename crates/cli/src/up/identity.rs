//! Processes of others, named so that a number that was given away again is not mistaken for one.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::state::{StateDir, write_private};
use crate::failure::Failure;

/// A process: its number, and when it began, in clock ticks since the machine did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// Its number.
    pub(super) pid: u32,
    /// Field 22 of its `/proc/PID/stat`.
    pub(super) start_ticks: u64,
}

impl Identity {
    /// The process that has this number now.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, start_ticks: start_ticks(&stat)? })
    }

    /// This process.
    pub(super) fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// Whether it is still there.
    pub(super) fn alive(self) -> bool {
        self.handle().is_some()
    }

    /// A handle that means this process and no later one.
    fn handle(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Looked at after the handle is open: if it is the same one now, the handle is its.
        let same = Self::of(self.pid) == Some(self);
        let ended = ended(&handle, Duration::ZERO);
        (same && !ended).then_some(handle)
    }

    /// Sends a signal. False: it is not there any more.
    pub(super) fn signal(self, signal: Signal) -> bool {
        self.handle().is_some_and(|handle| pidfd_send_signal(&handle, signal).is_ok())
    }

    /// Waits for its end, at most so long. True: it has ended.
    pub(super) async fn ended_within(self, limit: Duration) -> bool {
        let Some(handle) = self.handle() else { return true };
        // A thread that waits in poll: the runtime's own way of it needs `unsafe`.
        tokio::task::spawn_blocking(move || ended(&handle, limit)).await.unwrap_or(false)
    }

    /// SIGTERM, then SIGKILL after `patience`. True: it has ended.
    pub(super) async fn terminate(self, patience: Duration) -> bool {
        if !self.signal(Signal::TERM) || self.ended_within(patience).await {
            return true;
        }
        self.signal(Signal::KILL);
        self.ended_within(patience).await
    }
}

fn ended(handle: &OwnedFd, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut polled = [PollFd::new(handle, PollFlags::IN)];
        match poll(&mut polled, Timespec::try_from(left).ok().as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.is_ok_and(|n| n > 0),
        }
    }
}

/// The start time out of `/proc/PID/stat`, whose second field is a name that may hold anything.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    // Field 3 is the first one after the name.
    after_name.split_whitespace().nth(22 - 3)?.parse().ok()
}

/// The lock of a state directory, held while this lives.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

/// What a try to take the lock found.
#[derive(Debug)]
pub(super) enum Locked {
    /// It is ours now.
    Ours(Lock),
    /// Somebody has it; who, where the file says it.
    Theirs(Option<Identity>),
}

impl Lock {
    /// Tries to take the lock; `None` where there is no lock file, which `make` prevents.
    pub(super) fn take(state: &StateDir, make: bool) -> Result<Option<Locked>, Failure> {
        let path = state.lock();
        let failed = |error| Failure::io(format!("cannot lock {}", path.display()), &error);
        let mut file = match File::options().read(true).write(true).create(make).truncate(false).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !make => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Locked::Ours(Self { _file: file }))),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.read_to_string(&mut text).map_err(failed)?;
                Ok(Some(Locked::Theirs(serde_json::from_str(&text).ok())))
            }
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Writes into the lock who holds it, and the pid alone beside it.
    pub(super) fn sign(&mut self, state: &StateDir) -> Result<(), Failure> {
        let failed = |error| Failure::io(format!("cannot write {}", state.lock().display()), &error);
        let me = Identity::own().ok_or_else(|| Failure::new("/proc is not mounted"))?;
        let text = serde_json::to_string(&me).map_err(|error| failed(error.into()))?;
        self._file.set_len(0).map_err(failed)?;
        self._file.rewind().map_err(failed)?;
        self._file.write_all(text.as_bytes()).map_err(failed)?;
        write_private(&state.pid_file(), format!("{}\n", me.pid).as_bytes())
    }
}

/// The two processes that were started last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Processes {
    /// The edge.
    #[serde(default)]
    pub(super) edge: Option<Identity>,
    /// The control plane.
    #[serde(default)]
    pub(super) control: Option<Identity>,
}

impl Processes {
    /// What a supervisor left written. `None`: it ended in order, or never ran.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let text = std::fs::read(path).ok()?;
        // A file that cannot be read is still the trace of a supervisor.
        Some(serde_json::from_slice(&text).unwrap_or_default())
    }

    /// Writes it for whoever comes after us.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string(self).map_err(|error| Failure::new(error.to_string()))?;
        write_private(path, text.as_bytes())
    }

    /// Those that live.
    pub(super) fn alive(&self) -> Vec<(&'static str, Identity)> {
        let both = [("control", self.control), ("edge", self.edge)];
        both.into_iter().filter_map(|(name, id)| Some((name, id?))).filter(|(_, id)| id.alive()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let fields = (3..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(start_ticks(&format!("7 (a) b) 1 (c) {fields}")), Some(22));
        assert_eq!(start_ticks("7 (x"), None);
    }

    #[test]
    fn a_number_with_another_start_is_another_process() {
        let me = Identity::own().unwrap();
        assert!(me.alive());
        let other = Identity { start_ticks: me.start_ticks + 1, ..me };
        assert!(!other.alive());
        assert!(!other.signal(Signal::KILL), "this test would not be here to say it");
    }

    #[tokio::test]
    async fn a_process_is_ended_and_that_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = Identity::of(child.id()).unwrap();
        assert!(!id.ended_within(Duration::from_millis(1)).await);
        assert!(id.terminate(Duration::from_secs(10)).await);
        // Still a zombie of ours, and dead nevertheless.
        assert!(!id.alive());
        child.wait().unwrap();
    }

    #[test]
    fn one_lock_has_one_holder_and_says_who() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(dir.path()).unwrap();
        assert!(Lock::take(&state, false).unwrap().is_none());
        state.make().unwrap();
        let Some(Locked::Ours(mut lock)) = Lock::take(&state, true).unwrap() else { panic!("not ours") };
        lock.sign(&state).unwrap();
        let found = Lock::take(&state, false).unwrap();
        assert!(
            matches!(found, Some(Locked::Theirs(Some(id))) if id == Identity::own().unwrap()),
            "{found:?}"
        );
        drop(lock);
        assert!(matches!(Lock::take(&state, false).unwrap(), Some(Locked::Ours(_))));
    }
}
