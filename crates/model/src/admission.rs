//! Final admission on a node: is there room for one more sandbox now?
//!
//! CPU is overcommitted on purpose (about 90 % of sandboxes use 5 % of what they ask for), so a
//! CPU quota does not count here. Memory counts twice. What is free now must cover
//! [`MEMORY_RESERVE_MIB`] besides the sandbox's first needs: that is the limit that is met. What is
//! promised may exceed what the node has by [`MEMORY_OVERCOMMIT`], which only stops absurd sums.

use serde::{Deserialize, Serialize};

/// Promised memory over real memory. An idle sandbox holds a few MiB of the gigabytes it may use, so a node of
/// 24 GiB takes 3,000 with the default limit of 2 GiB; what they really use is watched, not what they might.
pub const MEMORY_OVERCOMMIT: u64 = 256;
/// Memory the node keeps free for itself, MiB.
pub const MEMORY_RESERVE_MIB: u64 = 512;
/// Disk the node keeps free for itself, MiB.
pub const DISK_RESERVE_MIB: u64 = 256;
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
}

/// What one sandbox asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Limit asked for, MiB.
    pub memory_mib: u64,
}

/// The node's state for one decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Memory available now (`MemAvailable`), MiB.
    pub memory_available_mib: u64,
    /// Disk free now for writable layers, MiB.
    pub disk_free_mib: u64,
    /// Sandboxes alive or being created.
    pub live: u64,
    /// Most sandboxes this node takes.
    pub live_max: u64,
    /// Memory promised to those alive, MiB.
    pub memory_promised_mib: u64,
    /// All the node has.
    pub capacity: Capacity,
}

impl Admission {
    /// `Ok` when `demand` fits now; else what is short, as a sentence for the caller.
    ///
    /// # Errors
    /// The first resource that is short, with what was found.
    pub fn decide(&self, demand: Demand) -> Result<(), String> {
        if self.live >= self.live_max {
            return Err(format!("the node runs {} sandboxes, the most it takes", self.live));
        }
        if self.memory_available_mib < MEMORY_RESERVE_MIB + FIRST_NEED_MIB {
            return Err(format!(
                "{} MiB of memory are free and {MEMORY_RESERVE_MIB} MiB of them are kept for the node",
                self.memory_available_mib
            ));
        }
        let promised = self.memory_promised_mib.saturating_add(demand.memory_mib);
        let most = self.capacity.memory_mib.saturating_mul(MEMORY_OVERCOMMIT);
        if promised > most {
            return Err(format!("{promised} MiB of memory would be promised, and {most} MiB is the most"));
        }
        if self.disk_free_mib < DISK_RESERVE_MIB {
            return Err(format!(
                "{} MiB of disk are free and {DISK_RESERVE_MIB} MiB are kept for the node",
                self.disk_free_mib
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: Admission = Admission {
        memory_available_mib: 20_000,
        disk_free_mib: 50_000,
        live: 10,
        live_max: 3200,
        memory_promised_mib: 10 * 2048,
        capacity: Capacity { memory_mib: 24_000, cpu_millis: 2000, disk_mib: 80_000 },
    };

    #[test]
    fn a_roomy_node_takes_one_more() {
        ROOMY.decide(Demand { memory_mib: 4096 }).unwrap();
    }

    #[test]
    fn each_shortage_alone_refuses_and_names_itself() {
        let why = |state: Admission| state.decide(Demand { memory_mib: 4096 }).unwrap_err();
        assert!(why(Admission { live: 3200, ..ROOMY }).contains("3200 sandboxes"));
        assert!(why(Admission { memory_available_mib: 500, ..ROOMY }).contains("memory are free"));
        assert!(
            why(Admission { memory_promised_mib: 24_000 * MEMORY_OVERCOMMIT, ..ROOMY }).contains("promised")
        );
        assert!(why(Admission { disk_free_mib: 10, ..ROOMY }).contains("disk"));
    }
}
