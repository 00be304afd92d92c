//! What one sandbox may use. Checked once, at the edge of the system; past that point a [`Limits`]
//! holds only values that can be enforced.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::admission::Capacity;

/// Least memory a sandbox can be given, MiB: below it not even a shell with a child runs.
pub const MEMORY_MIB_MIN: u64 = 4;
/// Most memory, MiB (16 TiB): above it a number is a mistake on any host of today.
pub const MEMORY_MIB_MAX: u64 = 16 << 20;
/// Least CPU quota, thousandths of a core: the kernel's smallest quota is 1 ms in 100 ms.
pub const CPU_MILLIS_MIN: u64 = 10;
/// Most CPU quota, thousandths of a core.
pub const CPU_MILLIS_MAX: u64 = 4_096_000;
/// CPU weight bounds, as cgroup v2 has them.
pub const CPU_WEIGHT_RANGE: (u64, u64) = (1, 10_000);
/// Bounds of processes and threads in a sandbox.
pub const PIDS_RANGE: (u64, u64) = (4, 4_194_304);
/// Bounds of open files a process.
pub const NOFILE_RANGE: (u64, u64) = (16, 1_048_576);
/// Bounds of the writable layer, MiB.
pub const DISK_MIB_RANGE: (u64, u64) = (4, 16 << 20);
/// Bounds of files and directories in the writable layer.
pub const FILES_RANGE: (u64, u64) = (16, 1 << 32);
/// Longest lifetime, seconds (30 days).
pub const LIFETIME_S_MAX: u64 = 30 * 86_400;

/// How a sandbox's processes stand to those of others while a node's processors are all wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuClass {
    /// They get their share at once.
    #[default]
    LatencySensitive,
    /// They get what the others leave.
    BestEffort,
}

impl CpuClass {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::LatencySensitive, Self::BestEffort];

    /// The wire's word for the class.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LatencySensitive => "latency_sensitive",
            Self::BestEffort => "best_effort",
        }
    }
}

impl fmt::Display for CpuClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for CpuClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|class| class.as_str() == text);
        named.ok_or_else(|| format!("{text:?} is no CPU class; there are latency_sensitive and best_effort"))
    }
}

/// What a sandbox may use, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory of all its processes and its tmpfs, MiB.
    pub memory_mib: u64,
    /// CPU quota, thousandths of a core.
    pub cpu_millis: u64,
    /// CPU time that it saves up while it uses less than its quota, and may use later, ms: at most what the quota gives in 100 ms.
    #[serde(default)]
    pub cpu_burst_ms: u64,
    /// Share of CPU among those of its class under contention, 1 to 10,000; 100 is the usual one.
    pub cpu_weight: u64,
    /// How it stands to the others under contention.
    #[serde(default)]
    pub cpu_class: CpuClass,
    /// Processes and threads.
    pub pids: u64,
    /// Open files a process.
    pub nofile: u64,
    /// Writable layer, MiB.
    pub disk_mib: u64,
    /// Files and directories in the writable layer.
    pub disk_files: u64,
    /// Seconds from running until the sandbox is stopped, whatever it does. Time paused does not count.
    pub max_lifetime_s: u64,
    /// Seconds without a request or an attached session until it is stopped. 0: never.
    pub ttl_running_stop_s: u64,
    /// Seconds paused until the sandbox is stopped. 0: never.
    #[serde(default)]
    pub ttl_paused_stop_s: u64,
    /// Pause it when `ttl_running_stop_s` is over, instead of stopping it.
    #[serde(default)]
    pub auto_pause: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_mib: 2048,
            cpu_millis: 2000,
            cpu_burst_ms: 200,
            cpu_weight: 100,
            cpu_class: CpuClass::default(),
            pids: 1024,
            nofile: 65_536,
            disk_mib: 10_240,
            disk_files: 1_000_000,
            max_lifetime_s: 86_400,
            ttl_running_stop_s: 1800,
            ttl_paused_stop_s: 0,
            auto_pause: false,
        }
    }
}

/// Most CPU time, ms, that can be saved up with a quota: what it gives in one period of 100 ms.
pub fn burst_ms_max(cpu_millis: u64) -> u64 {
    cpu_millis / 10
}

/// Cores as thousandths; `None` for what is no number of cores.
pub fn cores_to_millis(cores: f64) -> Option<u64> {
    const MOST: f64 = 1e9;
    (cores.is_finite() && (0.0..MOST).contains(&cores)).then(|| (cores * 1000.0).round() as u64)
}

/// A limit that cannot be granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {given}; it must be between {min} and {max}{because}")]
pub struct LimitsError {
    /// The field as callers write it.
    pub field: &'static str,
    /// What was asked.
    pub given: u64,
    /// Least value that is granted.
    pub min: u64,
    /// Greatest value that is granted.
    pub max: u64,
    /// Where the bound comes from, when it is this node's.
    pub because: &'static str,
}

impl Limits {
    /// Checks every field against the platform's bounds and against what `node` has in all.
    /// A CPU quota above the node's cores is refused, not clipped: the caller asked for speed
    /// that the node cannot give.
    ///
    /// # Errors
    /// The first field out of its range.
    pub fn check(&self, node: &Capacity) -> Result<(), LimitsError> {
        let range = |field, given: u64, (min, max): (u64, u64)| {
            if (min..=max).contains(&given) {
                Ok(())
            } else {
                Err(LimitsError { field, given, min, max, because: "" })
            }
        };
        range("memory_limit_mb", self.memory_mib, (MEMORY_MIB_MIN, MEMORY_MIB_MAX))?;
        range("cpu_limit_millis", self.cpu_millis, (CPU_MILLIS_MIN, CPU_MILLIS_MAX))?;
        range("cpu_burst_ms", self.cpu_burst_ms, (0, burst_ms_max(self.cpu_millis)))?;
        range("cpu_weight", self.cpu_weight, CPU_WEIGHT_RANGE)?;
        range("pids_limit", self.pids, PIDS_RANGE)?;
        range("open_files_limit", self.nofile, NOFILE_RANGE)?;
        range("disk_limit_mb", self.disk_mib, DISK_MIB_RANGE)?;
        range("disk_files_limit", self.disk_files, FILES_RANGE)?;
        range("max_lifetime", self.max_lifetime_s, (1, LIFETIME_S_MAX))?;
        range("ttl_running_stop", self.ttl_running_stop_s, (0, LIFETIME_S_MAX))?;
        range("ttl_paused_stop", self.ttl_paused_stop_s, (0, LIFETIME_S_MAX))?;
        let fits = |field, given, min, max| {
            if given <= max {
                Ok(())
            } else {
                Err(LimitsError { field, given, min, max, because: " (all that this node has)" })
            }
        };
        fits("memory_limit_mb", self.memory_mib, MEMORY_MIB_MIN, node.memory_mib)?;
        fits("cpu_limit_millis", self.cpu_millis, CPU_MILLIS_MIN, node.cpu_millis)?;
        fits("disk_limit_mb", self.disk_mib, DISK_MIB_RANGE.0, node.disk_mib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Capacity = Capacity { memory_mib: 24_000, cpu_millis: 2000, disk_mib: 80_000, processes: 0 };

    #[test]
    fn the_defaults_fit_a_small_node() {
        Limits::default().check(&NODE).unwrap();
    }

    #[test]
    fn zero_absurd_and_beyond_the_node_name_the_field() {
        let field = |limits: Limits| limits.check(&NODE).unwrap_err().field;
        let base = Limits::default();
        assert_eq!(field(Limits { memory_mib: 0, ..base.clone() }), "memory_limit_mb");
        assert_eq!(field(Limits { memory_mib: u64::MAX, ..base.clone() }), "memory_limit_mb");
        assert_eq!(field(Limits { memory_mib: 24_001, ..base.clone() }), "memory_limit_mb");
        assert_eq!(field(Limits { cpu_millis: 0, ..base.clone() }), "cpu_limit_millis");
        assert_eq!(field(Limits { cpu_millis: 2001, ..base.clone() }), "cpu_limit_millis");
        assert_eq!(field(Limits { cpu_weight: 0, ..base.clone() }), "cpu_weight");
        assert_eq!(field(Limits { pids: 0, ..base.clone() }), "pids_limit");
        assert_eq!(field(Limits { nofile: 3, ..base.clone() }), "open_files_limit");
        assert_eq!(field(Limits { disk_mib: 1, ..base.clone() }), "disk_limit_mb");
        assert_eq!(field(Limits { disk_files: 0, ..base.clone() }), "disk_files_limit");
        assert_eq!(field(Limits { max_lifetime_s: 0, ..base }), "max_lifetime");
    }

    #[test]
    fn a_bound_of_the_node_says_so() {
        let error = Limits { memory_mib: 25_000, ..Limits::default() }.check(&NODE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "memory_limit_mb is 25000; it must be between 4 and 24000 (all that this node has)"
        );
    }
}
