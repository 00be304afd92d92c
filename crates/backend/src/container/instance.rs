//! A running container as the edge sees it.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dsec_model::Limits;
use dsec_sys::cgroup::Group;
use dsec_sys::idmap::IdRange;
use dsec_sys::{process, procfs};
use rustix::fs::{Dir, FileType, Mode, OFlags, open, openat};

use super::launch::cpu_limits;
use super::shared::Shared;
use super::still::{NotStill, Part, Still, Stillness};
use crate::{
    Anchor, BackendError, ExecCgroup, GoOn, InPlace, Instance, OomReport, PauseError, Paused, Quiesce,
    RawUsage, Snapshot, SnapshotError,
};

/// How long the last process of a killed container may take to go.
const END_WAIT: Duration = Duration::from_secs(10);
/// Open files and mappings of one container that are looked at before a snapshot of it is refused: some tenths of a second's work.
const OPEN_FILES_MAX: u64 = 100_000;
/// Mappings of one container that are looked at before a snapshot is taken without a further look: some hundredths of a second's.
const MAPPINGS_MAX: u64 = 20_000;
/// Open files that a refused snapshot names.
const WRITERS_NAMED_MAX: usize = 10;
/// Least metadata and data that a file costs on btrfs, bytes: below this many for each allowed file nobody need count.
const FILE_BYTES_MIN: u64 = 256;
/// What a layer may still grow by when it has too many files: room to remove some, which needs metadata.
const OVER_LIMIT_SLACK: u64 = 1 << 20;

/// A container.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) anchor: Anchor,
    pub(super) range: IdRange,
    pub(super) pidfd: OwnedFd,
    pub(super) group: Group,
    pub(super) subvolume: u64,
    pub(super) limits: Limits,
    pub(super) shared: Arc<Shared>,
    pub(super) spool: PathBuf,
    pub(super) runs: Mutex<Runs>,
    pub(super) files: FileCount,
    pub(super) gone: AtomicBool,
    /// How many were taken.
    pub(super) snapshots: AtomicU64,
    pub(super) still: Mutex<Stillness>,
    /// What the last pause sent to swap, the hottest first.
    pub(super) swapped: Mutex<Vec<Part>>,
}

/// The cgroups of a container's execs. When an exec has ended its group is made anew at once, so that the next one
/// finds it ready. The same group is never used twice: once `cgroup.kill` was written, the kernel (seen on Linux
/// 6.18) also kills whatever is cloned into it later.
#[derive(Debug, Default)]
pub(super) struct Runs {
    next: u32,
    idle: Vec<ExecCgroup>,
    /// An exec has them.
    used: BTreeSet<u32>,
    /// Execs run without one: this host has none to give.
    is_blind: bool,
    /// Their exec has ended and processes of it go on.
    occupied: Vec<u32>,
}

/// What is known of the number of files in the writable layer.
#[derive(Debug, Default)]
pub(super) struct FileCount {
    bytes_at_last_count: AtomicU64,
    over: AtomicBool,
}

impl Runs {
    /// After a restart every group that is there may have processes.
    pub(super) fn adopted(group: &Group) -> Self {
        let occupied = group.run_numbers();
        let next = occupied.iter().max().map_or(0, |n| n + 1);
        Self { next, occupied, is_blind: !group.can_freeze(), ..Self::default() }
    }

    /// A number that no group has: that of one whose processes have gone meanwhile, or a new one.
    fn next_number(&mut self, is_gone: impl Fn(u32) -> bool) -> u32 {
        if let Some(at) = self.occupied.iter().position(|number| is_gone(*number)) {
            return self.occupied.swap_remove(at);
        }
        self.next += 1;
        self.next - 1
    }

    /// An exec has ended that had it, in the time of this edge or of the one before.
    fn has_back(&mut self, number: u32) {
        self.used.remove(&number);
        self.occupied.retain(|occupied| *occupied != number);
    }

    fn has_given(&mut self, group: Option<&ExecCgroup>) {
        match group {
            Some(group) => drop(self.used.insert(group.number)),
            None => self.is_blind = true,
        }
    }
}

/// Levels of directories that are counted; a tree that is deeper counts as too many files.
const DEPTH_MAX: usize = 256;
/// A directory itself, never what a link leads to.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Counts entries, by descriptors and never through a link: the tree is the sandbox's, which changes it meanwhile.
fn count_below(dir: &OwnedFd, count: &mut u64, most: u64, levels: usize) {
    let Ok(entries) = Dir::read_from(dir) else { return };
    for entry in entries.flatten().filter(|e| !matches!(e.file_name().to_bytes(), b"." | b"..")) {
        *count += 1;
        if *count > most {
            return;
        }
        if entry.file_type() != FileType::Directory {
            continue;
        }
        match openat(dir, entry.file_name(), DIRECTORY, Mode::empty()) {
            Ok(_) if levels == 0 => *count = most + 1,
            Ok(below) => count_below(&below, count, most, levels - 1),
            // Removed or replaced since it was listed.
            Err(_) => {}
        }
    }
}

impl Container {
    fn runs(&self) -> std::sync::MutexGuard<'_, Runs> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_run(&self, number: u32) -> Result<Option<ExecCgroup>, BackendError> {
        let made = self
            .group
            .create_run(number, self.range.keeper())
            .map_err(|e| BackendError::new(format!("make a cgroup for a command in {}", self.name), e))?;
        Ok(made.map(|(dir, kill)| ExecCgroup { number, dir, kill }))
    }

    /// Whether anything but its agent may run in it. Costs next to nothing while no exec is there and all that were left nothing behind.
    fn may_run_something(&self) -> bool {
        let mut runs = self.runs();
        runs.occupied.retain(|number| self.group.remove_run(*number).is_err());
        runs.is_blind || !runs.used.is_empty() || !runs.occupied.is_empty()
    }

    fn count_files(&self, most: u64) -> u64 {
        let mut count = 0;
        if let Ok(top) = open(self.shared.storage.upper(&self.name), DIRECTORY, Mode::empty()) {
            count_below(&top, &mut count, most, DEPTH_MAX);
        }
        count
    }

    fn set_disk_limit(&self, bytes: u64) {
        if let Err(error) = self.shared.storage.limit(self.subvolume, bytes) {
            tracing::warn!(name = self.name, %error, "cannot change the limit of a writable layer");
        }
    }
}

impl Container {
    fn no_snapshot(&self, error: io::Error) -> SnapshotError {
        SnapshotError::Failed(BackendError::new(format!("take a snapshot of {}", self.name), error))
    }

    fn still_for_snapshot(&self) -> Result<Still<'_>, SnapshotError> {
        self.still_for_reading().map_err(|why| match why {
            NotStill::Unsupported => SnapshotError::Unsupported,
            NotStill::Restless(limit) => SnapshotError::Restless { limit },
        })
    }

    /// Host ids of the agent and of all processes that it started.
    fn pids(&self) -> io::Result<Vec<i32>> {
        let mut pids = self.group.exec_pids()?;
        pids.push(self.anchor.pid);
        Ok(pids)
    }

    /// Whether its files, while its processes stand still, are those that a snapshot would have, and dated so that the next pack
    /// knows them again.
    fn can_be_read_in_place(&self) -> bool {
        let mut budget = MAPPINGS_MAX;
        let mut is_harmless = |pid| procfs::maps_for_writing(pid, &mut budget).is_ok_and(|maps| !maps);
        self.pids().is_ok_and(|pids| pids.into_iter().all(&mut is_harmless))
    }

    /// Files of the container's root that its processes, which stand still, can write to.
    fn written_files(&self) -> Result<Vec<(String, PathBuf)>, SnapshotError> {
        let failed = |e| self.no_snapshot(e);
        let root = procfs::root_mount(self.anchor.pid).map_err(failed)?;
        let mut budget = OPEN_FILES_MAX;
        let mut found = Vec::new();
        for pid in self.pids().map_err(failed)? {
            let files = procfs::written_files(pid, root, &mut budget).map_err(failed)?;
            for file in files.into_iter().map(|file| (file.command, file.path)) {
                if !found.contains(&file) {
                    found.push(file);
                }
            }
            if found.len() >= WRITERS_NAMED_MAX {
                found.truncate(WRITERS_NAMED_MAX);
                break;
            }
        }
        Ok(found)
    }
}

impl Instance for Container {
    fn anchor(&self) -> &Anchor {
        &self.anchor
    }

    fn connect(&self) -> Result<UnixStream, BackendError> {
        let path = format!("/proc/self/fd/{}/{}", self.shared.sockets.as_raw_fd(), self.name);
        UnixStream::connect(path)
            .map_err(|e| BackendError::new(format!("connect to the agent of {}", self.name), e))
    }

    fn exit_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn spool_dir(&self) -> &Path {
        &self.spool
    }

    fn exec_cgroup(&self) -> Result<Option<ExecCgroup>, BackendError> {
        let mut runs = self.runs();
        let made = match runs.idle.pop() {
            Some(idle) => Some(idle),
            None => {
                let number = runs.next_number(|number| self.group.remove_run(number).is_ok());
                self.make_run(number)?
            }
        };
        runs.has_given(made.as_ref());
        Ok(made)
    }

    fn release_exec_cgroup(&self, number: u32) {
        let mut runs = self.runs();
        runs.has_back(number);
        if self.group.remove_run(number).is_err() {
            runs.occupied.push(number);
        } else if let Ok(Some(group)) = self.make_run(number) {
            runs.idle.push(group);
        }
    }

    fn exec_pids(&self, number: u32) -> Vec<i32> {
        self.group.run_pids(number)
    }

    fn usage(&self) -> RawUsage {
        let (memory_bytes, memory_peak_bytes) = self.group.memory();
        RawUsage {
            cpu: self.group.cpu_time(),
            memory_bytes,
            memory_peak_bytes,
            disk_bytes: self.shared.storage.used(self.subvolume),
            pids: self.group.pids(),
            oom_kills: self.group.oom_kills(),
        }
    }

    fn set_cpu(&self, limits: &Limits) -> Result<(), BackendError> {
        self.group
            .set_cpu(&cpu_limits(limits))
            .map_err(|e| BackendError::new(format!("set the CPU limits of {}", self.name), e))
    }

    fn socket_bytes(&self) -> u64 {
        // The agent lets nothing wait in such sockets.
        if self.may_run_something() { procfs::socket_bytes(self.anchor.pid) } else { 0 }
    }

    fn oom_kills(&self) -> u64 {
        self.group.oom_kills()
    }

    fn take_oom_reports(&self) -> Vec<OomReport> {
        self.shared.oom.take(self.range)
    }

    fn snapshot(&self, quiesce: Quiesce, in_place: InPlace<'_>) -> Result<Option<Snapshot>, SnapshotError> {
        let number = self.snapshots.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}.snapshot-{number}", self.name);
        let still = if quiesce == Quiesce::GoOn { None } else { Some(self.still_for_snapshot()?) };
        if quiesce == Quiesce::WriteNothing {
            let files = self.written_files()?;
            if !files.is_empty() {
                return Err(SnapshotError::Writing { files });
            }
        }
        if still.is_some() && self.can_be_read_in_place() && in_place(&self.shared.storage.upper(&self.name))
        {
            return Ok(None);
        }
        let made = self.shared.storage.snapshot(&self.name, &name);
        made.map_err(|e| self.no_snapshot(e))?;
        let (upper, shared) = (self.shared.storage.upper(&name), Arc::clone(&self.shared));
        Ok(Some(Snapshot::new(upper, move || {
            if let Err(error) = shared.storage.destroy(&name) {
                tracing::warn!(name, %error, "a snapshot stays until the next sweep");
            }
        })))
    }

    fn pause(&self, go_on: GoOn<'_>) -> Result<Paused, PauseError> {
        self.pause_now(go_on)
    }

    fn thaw(&self) {
        self.thaw_now();
    }

    fn prefetch(&self, go_on: GoOn<'_>) {
        self.prefetch_now(go_on);
    }

    fn kill(&self) {
        // The end of pid 1 of a pid namespace is the end of all in it.
        process::kill(self.pidfd.as_fd());
        self.group.kill();
    }

    fn enforce_file_count(&self) -> bool {
        let used = self.shared.storage.used(self.subvolume);
        let most = self.limits.disk_files;
        let was_over = self.files.over.load(Ordering::Relaxed);
        let counted_at = self.files.bytes_at_last_count.swap(used, Ordering::Relaxed);
        if !was_over && (used == counted_at || used / FILE_BYTES_MIN < most) {
            return false;
        }
        let over = self.count_files(most) > most;
        if over != was_over {
            self.files.over.store(over, Ordering::Relaxed);
            let full = self.limits.disk_mib << 20;
            self.set_disk_limit(if over { used.saturating_add(OVER_LIMIT_SLACK).min(full) } else { full });
        }
        over
    }

    fn clean_up(&self) -> Result<(), BackendError> {
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        let failed = |what: &str, e: io::Error| BackendError::new(format!("{what} of {}", self.name), e);
        if !process::wait_for_end(self.pidfd.as_fd(), END_WAIT).map_err(|e| failed("wait for the end", e))? {
            return Err(failed("wait for the end", io::ErrorKind::TimedOut.into()));
        }
        self.runs().idle.clear();
        self.shared.remove(&self.name)?;
        self.shared.release(self.anchor.id_base);
        self.gone.store(true, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_an_exec_of_before_is_not_taken_for_occupied_when_it_is_given_back() {
        let mut runs = Runs { next: 4, occupied: vec![2, 3], ..Runs::default() };
        runs.has_back(3);
        assert_eq!(runs.occupied, [2]);
        assert_eq!(runs.next_number(|_| false), 4);
        assert_eq!(runs.next_number(|number| number == 2), 2);
        assert!(runs.occupied.is_empty());
    }
}
