//! What a group may use of the processors, and how it stands to the others. All of it can be changed while processes run.

use std::io;
use std::path::Path;

use super::{Group, write};

/// What quotas are counted by, ms.
const PERIOD_MS: u64 = 100;
/// Weights of version 2 and of version 1 that stand for the same share.
const WEIGHT_USUAL: (u64, u64) = (100, 1024);
/// Least weight of version 2 and of version 1.
const WEIGHT_MIN: (u64, u64) = (1, 2);

/// Limits of one group's CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuLimits {
    /// Quota, thousandths of a core.
    pub millis: u64,
    /// CPU time that is saved up while the quota is not used, ms: at most what the quota gives in 100 ms.
    pub burst_ms: u64,
    /// Weight as version 2 counts it (100 is the usual one). It says nothing while the group is idle.
    pub weight: u64,
    /// Its processes run only when no others of the node want to, whatever policy and niceness they give themselves.
    pub idle: bool,
}

impl Group {
    /// Whether it can be made idle on this host (Linux 5.15).
    pub fn can_be_idle(&self) -> bool {
        self.shared().join("cpu.idle").exists()
    }

    /// The directory whose siblings are the other sandboxes.
    fn shared(&self) -> &Path {
        self.whole.as_ref().filter(|_| self.v2).unwrap_or(&self.cpu)
    }

    /// Sets what it may use of the processors. The kernel keeps the old values of what it refuses.
    ///
    /// # Errors
    /// The kernel's, with the path and value.
    pub fn set_cpu(&self, limits: &CpuLimits) -> io::Result<()> {
        let quota_us = limits.millis * PERIOD_MS;
        let burst_us = (limits.burst_ms * 1000).min(quota_us);
        if self.v2 {
            let quota = format!("{quota_us} {}", PERIOD_MS * 1000);
            set_quota(&self.cpu.join("cpu.max"), &quota, &self.cpu.join("cpu.max.burst"), burst_us)?;
            set_share(self.shared(), "cpu.weight", limits.weight, WEIGHT_MIN.0, limits.idle)
        } else {
            let (quota, burst) = (self.cpu.join("cpu.cfs_quota_us"), self.cpu.join("cpu.cfs_burst_us"));
            set_quota(&quota, &quota_us.to_string(), &burst, burst_us)?;
            let shares = limits.weight * WEIGHT_USUAL.1 / WEIGHT_USUAL.0;
            set_share(self.shared(), "cpu.shares", shares, WEIGHT_MIN.1, limits.idle)
        }
    }
}

/// A kernel before 5.14 has no file of bursts. One that has it refuses a quota below the burst of before.
fn set_quota(file: &Path, quota: &str, burst_file: &Path, burst_us: u64) -> io::Result<()> {
    if !burst_file.exists() {
        return write(file, quota);
    }
    if write(file, quota).is_err() {
        write(burst_file, "0")?;
        write(file, quota)?;
    }
    write(burst_file, &burst_us.to_string())
}

/// Where groups cannot be idle, the least weight is what comes closest. An idle group takes no weight, and one that is no longer idle has
/// the usual one: its own is set afterwards.
fn set_share(group: &Path, file: &str, weight: u64, least: u64, idle: bool) -> io::Result<()> {
    let switch = group.join("cpu.idle");
    if idle && switch.exists() {
        return write(&switch, "1");
    }
    let (file, weight) = (group.join(file), if idle { least } else { weight.max(least) }.to_string());
    write(&file, &weight).or_else(|error| {
        if !switch.exists() {
            return Err(error);
        }
        write(&switch, "0")?;
        write(&file, &weight)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{GroupLimits, Tree};
    use super::*;

    #[test]
    fn classes_quotas_and_bursts_change_both_ways_and_are_in_the_kernel() {
        let tree = Tree::set_up(&format!("cputest{}", std::process::id())).unwrap();
        let group = tree.group("one");
        let cpu = CpuLimits { millis: 1500, burst_ms: 150, weight: 50, idle: false };
        group.create(&GroupLimits { memory_bytes: 64 << 20, cpu, pids: 33 }).unwrap();
        assert!(group.can_be_idle());
        let (burst, weight, usual) = if group.v2 {
            ("cpu.max.burst", "cpu.weight", 50)
        } else {
            ("cpu.cfs_burst_us", "cpu.shares", 512)
        };
        let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).unwrap().trim().to_owned();
        let seen = || {
            (
                read(&group.cpu, burst).parse::<u64>().unwrap(),
                read(group.shared(), "cpu.idle").parse::<u64>().unwrap(),
                read(group.shared(), weight).parse::<u64>().unwrap(),
            )
        };
        assert_eq!(seen(), (150_000, 0, usual));
        group.set_cpu(&CpuLimits { idle: true, ..cpu }).unwrap();
        assert_eq!(seen().1, 1);
        // Less than the burst of before, and no more burst than the quota.
        group.set_cpu(&CpuLimits { millis: 100, burst_ms: 150, ..cpu }).unwrap();
        assert_eq!(seen(), (10_000, 0, usual));
        group.remove().unwrap();
        tree.remove().unwrap();
    }
}
