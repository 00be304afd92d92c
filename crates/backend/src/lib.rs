//! What runs sandboxes. Each backend has its own argument type and says what it can do; what they
//! share is only what the edge needs from any of them: an [`Instance`] with an agent channel, an end
//! that can be waited for, numbers, and a clean-up that leaves nothing.
//!
//! Everything here blocks (a launch takes 2-4 ms) and is called from threads that may.

mod chain;
pub mod container;
pub mod shelf;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_model::Limits;
use serde::{Deserialize, Serialize};

/// One phase of a launch and how long it took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// Its name, as `docs/performance.md` explains it.
    pub name: String,
    /// How long it took.
    pub took: Duration,
}

/// What identifies a running sandbox across a restart of the edge: enough to find it again, or to
/// find out that it is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// Host process id of its agent.
    pub pid: i32,
    /// Start time of that process in clock ticks since boot (`/proc/PID/stat`, field 22): a reused pid has another.
    pub start_ticks: u64,
    /// Boot id of the machine it was started under.
    pub boot_id: String,
    /// First host id of its range.
    pub id_base: u32,
}

/// Numbers of a sandbox, read now. A number that this host cannot tell is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawUsage {
    /// CPU time so far.
    pub cpu: Duration,
    /// Memory now, bytes.
    pub memory_bytes: u64,
    /// Most memory so far, bytes.
    pub memory_peak_bytes: u64,
    /// Writable layer, bytes.
    pub disk_bytes: u64,
    /// Processes and threads.
    pub pids: u64,
    /// Kills by the kernel because memory was full.
    pub oom_kills: u64,
}

/// A cgroup for one exec or session, to start its process in and to kill its whole tree with.
#[derive(Debug)]
pub struct ExecCgroup {
    /// Number within its sandbox.
    pub number: u32,
    /// The directory.
    pub dir: OwnedFd,
    /// `cgroup.kill` of it, open for writing.
    pub kill: OwnedFd,
}

/// A failed operation of a backend: what was being done, to what, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct BackendError {
    /// What was being done, with the path or id.
    pub what: String,
    /// Why.
    #[source]
    pub source: std::io::Error,
}

impl BackendError {
    /// Names what was being done.
    pub fn new(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self { what: what.into(), source: source.into() }
    }
}

/// A sandbox that runs.
pub trait Instance: Send + Sync + fmt::Debug {
    /// What to write down to find it again.
    fn anchor(&self) -> &Anchor;
    /// Connects to its agent. Any number of times; the agent talks to the newest.
    ///
    /// # Errors
    /// The agent is gone.
    fn connect(&self) -> Result<UnixStream, BackendError>;
    /// Becomes readable when its last process is gone.
    fn exit_fd(&self) -> BorrowedFd<'_>;
    /// Directory with the spool files of its execs' output.
    fn spool_dir(&self) -> &Path;
    /// A cgroup for an exec, never used before. `None`: this host has no cgroup v2.
    ///
    /// # Errors
    /// The kernel refused.
    fn exec_cgroup(&self) -> Result<Option<ExecCgroup>, BackendError>;
    /// Gives an exec's cgroup back. One that still has processes stays theirs until they are gone.
    fn release_exec_cgroup(&self, number: u32);
    /// Host process ids in an exec's cgroup.
    fn exec_pids(&self, number: u32) -> Vec<i32>;
    /// Its numbers.
    fn usage(&self) -> RawUsage;
    /// Gives it other limits of CPU time: quota, burst, weight and class. What runs goes on with them.
    ///
    /// # Errors
    /// The kernel refused; some of them may hold already.
    fn set_cpu(&self, limits: &Limits) -> Result<(), BackendError>;
    /// Bytes that wait in its sockets and that the kernel counts in nobody's memory. Cheap while it has few sockets.
    fn socket_bytes(&self) -> u64;
    /// Kills so far by the kernel because memory was full: cheap enough for every exec's end.
    fn oom_kills(&self) -> u64;
    /// Reports of those kills that were seen since the last call: process name, host pid, resident bytes.
    fn take_oom_reports(&self) -> Vec<OomReport>;
    /// What it has written until now, as it is at one moment: read where it lies by `in_place` if that is possible and enough,
    /// then there is no snapshot.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing is left of it then, and the sandbox goes on.
    fn snapshot(&self, quiesce: Quiesce, in_place: InPlace<'_>) -> Result<Option<Snapshot>, SnapshotError>;
    /// Stops all its processes, its agent's too, until [`Self::thaw`], and gives their memory back as far as the host can. Blocks for
    /// as long as that takes; `go_on` is asked now and then.
    ///
    /// # Errors
    /// [`PauseError`]. Its processes may stand still all the same; [`Self::thaw`] lets them go on.
    fn pause(&self, go_on: GoOn<'_>) -> Result<Paused, PauseError>;
    /// Lets its processes go on, unless they stand still for a snapshot too: then when that is taken. Idempotent.
    fn thaw(&self);
    /// Brings back what the last pause gave back, what was most in use first. Blocks until all of it was asked for, or `go_on` says no.
    fn prefetch(&self, go_on: GoOn<'_>);
    /// SIGKILL to every process of it, also where they stand still. Does not wait; see [`Self::exit_fd`].
    fn kill(&self);
    /// Holds the file-count limit, which some file systems cannot: looks, and stops further writes
    /// when there are too many. Called every few seconds. True: it is over.
    fn enforce_file_count(&self) -> bool;
    /// Removes everything of it from the host: cgroups, mounts, directories, devices. Its processes
    /// must be gone (waits up to 10 s for the last of them). Idempotent.
    ///
    /// # Errors
    /// What could not be removed; the rest is removed all the same.
    fn clean_up(&self) -> Result<(), BackendError>;
}

/// Reads the upper directory of a sandbox's overlay, in which nothing changes before it returns. True: it has read all it wants. Its
/// processes stand still meanwhile, so it is to be quick.
pub type InPlace<'a> = Box<dyn FnOnce(&Path) -> bool + 'a>;

/// Whether something long is still wanted.
pub type GoOn<'a> = &'a dyn Fn() -> bool;

/// A sandbox that stands still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paused {
    /// Memory that it had, bytes.
    pub resident_bytes: u64,
    /// Of that, what the node has back.
    pub returned_bytes: u64,
}

/// Why a sandbox is not paused.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// This host cannot make a sandbox stand still.
    #[error("this host cannot make a sandbox's processes stand still: it has no cgroup version 2")]
    Unsupported,
    /// They did not stand still in time.
    #[error("the sandbox's processes did not stand still within {} s", limit.as_secs())]
    Restless {
        /// The time they had.
        limit: Duration,
    },
    /// The host failed.
    #[error("the sandbox cannot be paused")]
    Failed(#[from] BackendError),
}

/// What a sandbox's processes do while a snapshot of it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiesce {
    /// They go on. The snapshot is of one moment, in which any of them may be between two writes that belong together.
    GoOn,
    /// They stand still while it is read in place or a snapshot is taken, and go on afterwards.
    StandStill,
    /// As `StandStill`, and no snapshot is taken while one of them has a file open for writing.
    WriteNothing,
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// This host cannot make a sandbox stand still.
    #[error("this host cannot make a sandbox's processes stand still: it has no cgroup version 2")]
    Unsupported,
    /// They did not stand still in time.
    #[error("the sandbox's processes did not stand still within {} s", limit.as_secs())]
    Restless {
        /// The time they had.
        limit: Duration,
    },
    /// Files are open for writing.
    #[error("{} files of the sandbox are open for writing", files.len())]
    Writing {
        /// Which, and by what: a name of at most 15 bytes. Some of them, if they are many.
        files: Vec<(String, PathBuf)>,
    },
    /// The host failed.
    #[error("a snapshot cannot be taken")]
    Failed(#[source] BackendError),
}

/// What a sandbox had written at one moment. Gone when dropped.
pub struct Snapshot {
    upper: PathBuf,
    remove: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Snapshot {
    /// One whose files are below `upper`, with what removes it.
    pub fn new(upper: PathBuf, remove: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { upper, remove: Some(Box::new(remove)) }
    }

    /// The upper directory of its overlay. Nothing in it changes; its ids are those inside.
    pub fn upper(&self) -> &Path {
        &self.upper
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Some(remove) = self.remove.take() {
            remove();
        }
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("upper", &self.upper).finish_non_exhaustive()
    }
}

/// A kill by the kernel because memory was full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OomReport {
    /// Command name, at most 15 bytes.
    pub process: String,
    /// Resident memory, bytes; 0 when unknown.
    pub rss_bytes: u64,
}

/// Where a backend keeps its things on the node.
#[derive(Debug, Clone)]
pub struct NodePaths {
    /// Root of the edge's state.
    pub state_dir: PathBuf,
    /// The agent's binary.
    pub aether: PathBuf,
}
