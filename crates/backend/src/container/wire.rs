//! What the edge and its launcher say to each other: JSON in messages of a socket that keeps
//! boundaries, with descriptors beside them. Both are the same binary of the same moment, so there are no versions.

use serde::{Deserialize, Serialize};

/// Largest message, bytes. Paths and names only; the rest travels as descriptors.
pub(super) const MESSAGE_MAX: usize = 16 * 1024;

/// Edge to launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToLauncher {
    /// These id ranges are in use by containers of an earlier edge.
    Reserve(Vec<u32>),
    /// This id range is free again.
    Release(u32),
    /// Launch; the descriptors are those of [`LaunchFds`], in its order.
    Launch(Launch),
}

/// The plain part of a launch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Launch {
    /// Host name inside.
    pub hostname: String,
    /// Bytes for `/tmp` and `/dev/shm` together.
    pub tmpfs_bytes: u64,
    /// How many layers follow the fixed descriptors, the lowest first.
    pub layers: usize,
    /// Whether a cgroup directory follows them.
    pub cgroup: bool,
    /// How many `tasks` files follow it.
    pub task_files: usize,
}

/// Number of fixed descriptors of a launch: channel, writable layer, spool, agent socket, agent
/// configuration.
pub(super) const FIXED_FDS: usize = 5;

/// Launcher, and then the child it made, to the edge, on the launch's own channel. The end of the
/// channel without a `Failed` before it means that the agent has been executed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromLaunch {
    /// By the launcher; the pidfd comes with it.
    Forked {
        /// Host process id.
        pid: i32,
        /// First host id of the range it was given.
        id_base: u32,
        /// Microseconds it took to have namespaces at hand and to fork.
        us: [u64; 2],
    },
    /// By the child, just before it executes the agent.
    Phases(Vec<(String, u64)>),
    /// By either: what failed and why. Nothing of it goes on.
    Failed {
        /// What was being done.
        what: String,
        /// Why.
        error: String,
        /// `errno` where the kernel refused.
        errno: Option<i32>,
    },
}
