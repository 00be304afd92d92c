//! Final admission on a node: is there room for one more sandbox now?
//!
//! What decides is what the node has left at this moment, less a reserve of its own; what sandboxes may use at most counts only
//! against absurd sums. Nine of ten use a twentieth of what they ask for, so that a node which counted limits would stand idle.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a sandbox needs at once, MiB: its agent, a shell and its kernel objects, with room.
pub const FIRST_NEED_MIB: u64 = 16;

/// All that a node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
    /// Disk for writable layers, MiB.
    pub disk_mib: u64,
    /// Processes and threads that its kernel takes. 0 from an edge that does not say.
    #[serde(default)]
    pub processes: u64,
}

/// What a node keeps for itself, and how far it promises more than it has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Most sandboxes.
    pub sandboxes_max: u64,
    /// Promised memory over real memory.
    pub memory_overcommit: u64,
    /// Memory that is kept free, MiB.
    pub memory_reserve_mib: u64,
    /// Share of the last ten seconds in which every process waited for memory, 0 to 1, from which on no more are taken: what
    /// is free is then being fought over.
    pub memory_pressure_max: f64,
    /// Promised cores over real ones.
    pub cpu_overcommit: u64,
    /// Share of the last ten seconds in which some process waited for a processor, 0 to 1, above which no more are taken.
    pub cpu_pressure_max: f64,
    /// Disk that is kept free, MiB.
    pub disk_reserve_mib: u64,
    /// Files that the state's file system keeps room for.
    pub files_reserve: u64,
    /// Processes and threads that the kernel keeps room for.
    pub processes_reserve: u64,
}

impl Default for Policy {
    /// The count is above the 3,200 that the field has seen stable. A node of 24 GiB takes 3,000 sandboxes with the usual limit of 2 GiB: an idle one holds some hundred KiB. CPU time is shared as it
    /// comes: a burst on a lone node is better slow than refused, and among several placement looks at pressure already.
    fn default() -> Self {
        Self {
            sandboxes_max: 4000,
            memory_overcommit: 1024,
            memory_reserve_mib: 512,
            memory_pressure_max: 0.2,
            cpu_overcommit: 4096,
            cpu_pressure_max: 1.0,
            disk_reserve_mib: 256,
            files_reserve: 10_000,
            processes_reserve: 1024,
        }
    }
}

/// What is promised to those that are alive or being created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Promised {
    /// How many they are.
    pub sandboxes: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
}

impl Promised {
    /// With one more.
    pub fn plus(self, demand: Demand) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(1),
            memory_mib: self.memory_mib.saturating_add(demand.memory_mib),
            cpu_millis: self.cpu_millis.saturating_add(demand.cpu_millis),
        }
    }

    /// With one less.
    pub fn minus(self, demand: Demand) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_sub(1),
            memory_mib: self.memory_mib.saturating_sub(demand.memory_mib),
            cpu_millis: self.cpu_millis.saturating_sub(demand.cpu_millis),
        }
    }
}

/// What one sandbox may use at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
}

/// What a node has left at one moment. What it cannot tell is as good as plenty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// Memory available (`MemAvailable`), MiB.
    pub memory_available_mib: u64,
    /// Share of the last ten seconds in which every process waited for memory, 0 to 1.
    pub memory_pressure: f64,
    /// Share of the last ten seconds in which some process waited for a processor, 0 to 1.
    pub cpu_pressure: f64,
    /// Disk free for writable layers, MiB.
    pub disk_free_mib: u64,
    /// Files that can still be made where the node keeps its state.
    pub files_free: u64,
    /// Processes and threads there are.
    pub processes: u64,
}

/// Why a node takes no sandbox, or not this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shortage {
    /// An operator keeps new sandboxes away.
    Cordoned,
    /// It waits for its sandboxes to end.
    Draining,
    /// It has as many sandboxes as it takes.
    Sandboxes,
    /// Little memory is free.
    Memory,
    /// Too much memory is promised.
    MemoryPromised,
    /// Processes wait for memory.
    MemoryPressure,
    /// Too many cores are promised.
    CpuPromised,
    /// Processes wait for processors.
    CpuPressure,
    /// Little disk is free.
    Disk,
    /// Few more files can be made.
    Files,
    /// Few more processes can be made.
    Processes,
}

impl fmt::Display for Shortage {
    /// What a node is that is short of it, as in "2 nodes without memory".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Sandboxes => "with as many sandboxes as they take",
            Self::Memory => "without free memory",
            Self::MemoryPromised => "with too much memory promised",
            Self::MemoryPressure => "under memory pressure",
            Self::CpuPromised => "with too many cores promised",
            Self::CpuPressure => "under processor pressure",
            Self::Disk => "without free disk",
            Self::Files => "without free inodes",
            Self::Processes => "without free process ids",
        })
    }
}

/// What is short, and what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found}")]
pub struct Short {
    /// Which.
    pub of: Shortage,
    /// What was found, as a sentence for the caller.
    pub found: String,
}

/// The node's state for one decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Admission {
    /// What it keeps and promises.
    pub policy: Policy,
    /// All it has.
    pub capacity: Capacity,
    /// What it has left.
    pub observed: Observed,
    /// What it has promised.
    pub promised: Promised,
}

impl Admission {
    /// `Ok` when `demand` fits now.
    ///
    /// # Errors
    /// The first thing that is short.
    pub fn decide(&self, demand: Demand) -> Result<(), Short> {
        let Self { policy, capacity, observed, promised } = self;
        let with = promised.plus(demand);
        let memory_most = capacity.memory_mib.saturating_mul(policy.memory_overcommit);
        let cpu_most = capacity.cpu_millis.saturating_mul(policy.cpu_overcommit);
        let processes_left = capacity.processes.saturating_sub(observed.processes);
        let percent = |share: f64| (share * 100.0).round();
        let checks: [(Shortage, bool, &dyn Fn() -> String); 9] = [
            (Shortage::Sandboxes, promised.sandboxes >= policy.sandboxes_max, &|| {
                format!("the node runs {} sandboxes, the most it takes", promised.sandboxes)
            }),
            (
                Shortage::Memory,
                observed.memory_available_mib < policy.memory_reserve_mib.saturating_add(FIRST_NEED_MIB),
                &|| kept("MiB of memory", observed.memory_available_mib, policy.memory_reserve_mib),
            ),
            (Shortage::MemoryPromised, with.memory_mib > memory_most, &|| {
                format!(
                    "{} MiB of memory would be promised, and {memory_most} MiB is the most",
                    with.memory_mib
                )
            }),
            (Shortage::MemoryPressure, observed.memory_pressure > policy.memory_pressure_max, &|| {
                format!(
                    "all processes waited for memory in {} % of the last 10 s",
                    percent(observed.memory_pressure)
                )
            }),
            (Shortage::CpuPromised, with.cpu_millis > cpu_most, &|| {
                format!(
                    "{} cores would be promised, and {} is the most",
                    with.cpu_millis / 1000,
                    cpu_most / 1000
                )
            }),
            (Shortage::CpuPressure, observed.cpu_pressure > policy.cpu_pressure_max, &|| {
                format!(
                    "processes waited for a processor in {} % of the last 10 s",
                    percent(observed.cpu_pressure)
                )
            }),
            (Shortage::Disk, observed.disk_free_mib < policy.disk_reserve_mib, &|| {
                kept("MiB of disk", observed.disk_free_mib, policy.disk_reserve_mib)
            }),
            (Shortage::Files, observed.files_free < policy.files_reserve, &|| {
                kept("files", observed.files_free, policy.files_reserve)
            }),
            (
                Shortage::Processes,
                capacity.processes > 0 && processes_left < policy.processes_reserve,
                &|| kept("processes", processes_left, policy.processes_reserve),
            ),
        ];
        match checks.into_iter().find(|(_, is_short, _)| *is_short) {
            Some((of, _, found)) => Err(Short { of, found: found() }),
            None => Ok(()),
        }
    }
}

fn kept(what: &str, free: u64, reserve: u64) -> String {
    format!("{free} {what} are free, of which {reserve} are kept for the node")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand { memory_mib: 4096, cpu_millis: 2000 };

    fn roomy() -> Admission {
        Admission {
            policy: Policy::default(),
            capacity: Capacity { memory_mib: 24_000, cpu_millis: 2000, disk_mib: 80_000, processes: 32_768 },
            observed: Observed {
                memory_available_mib: 20_000,
                memory_pressure: 0.0,
                cpu_pressure: 1.0,
                disk_free_mib: 50_000,
                files_free: 1_000_000,
                processes: 300,
            },
            promised: Promised { sandboxes: 10, memory_mib: 10 * 2048, cpu_millis: 20_000 },
        }
    }

    #[test]
    fn a_roomy_node_takes_one_more() {
        roomy().decide(DEMAND).unwrap();
    }

    #[test]
    fn each_shortage_alone_refuses_and_names_itself() {
        type Shorten = fn(&mut Admission);
        let cases: [(Shortage, &str, Shorten); 9] = [
            (Shortage::Sandboxes, "4000 sandboxes", |node| node.promised.sandboxes = 4000),
            (Shortage::Memory, "500 MiB of memory are free", |node| node.observed.memory_available_mib = 500),
            (Shortage::MemoryPromised, "MiB of memory would be promised", |node| {
                node.promised.memory_mib = 24_000 * 1024;
            }),
            (Shortage::MemoryPressure, "memory in 21 %", |node| node.observed.memory_pressure = 0.21),
            (Shortage::CpuPromised, "8193 cores would be promised, and 8192", |node| {
                node.promised.cpu_millis = 2000 * 4096 - 1000;
            }),
            (Shortage::CpuPressure, "processor in 96 %", |node| {
                (node.policy.cpu_pressure_max, node.observed.cpu_pressure) = (0.95, 0.96);
            }),
            (Shortage::Disk, "10 MiB of disk are free", |node| node.observed.disk_free_mib = 10),
            (Shortage::Files, "9999 files are free", |node| node.observed.files_free = 9_999),
            (Shortage::Processes, "1023 processes are free", |node| node.observed.processes = 32_768 - 1023),
        ];
        for (of, found, make_short) in cases {
            let mut node = roomy();
            make_short(&mut node);
            let short = node.decide(DEMAND).unwrap_err();
            assert_eq!(short.of, of);
            assert!(short.found.contains(found), "{short}");
        }
    }

    #[test]
    fn what_a_node_cannot_tell_refuses_nothing() {
        let mut node = roomy();
        node.capacity.processes = 0;
        node.observed.processes = 1_000_000;
        node.observed.files_free = u64::MAX;
        node.decide(DEMAND).unwrap();
    }

    #[test]
    fn what_is_given_back_is_what_was_taken() {
        let promised = roomy().promised;
        assert_eq!(promised.plus(DEMAND).minus(DEMAND), promised);
    }
}
