//! Containers that stand still: for a moment, while what they wrote is read, or for as long as they are paused, with their memory
//! given back meanwhile.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use dsec_sys::advise::{Advice, Range, advise};
use dsec_sys::{process, procfs, swap};

use super::instance::Container;
use crate::{BackendError, GoOn, PauseError, Paused};

/// How long a container's processes may take to stand still: those in a slow system call come first out of it.
const FREEZE_MAX: Duration = Duration::from_secs(2);
/// Memory that one call pages out or brings back, bytes: some milliseconds' work, after which it is looked whether to go on.
const PART: u64 = 4 << 20;
/// Parts of which it is remembered what they were, of one paused container: 64 GiB in 16,384.
const PARTS_MAX: usize = 16_384;
/// Memory that is brought back ahead of its use, bytes. What is beyond comes back as it is touched.
const PREFETCH_MAX: u64 = 1 << 30;

/// Who wants a container's processes to stand still.
#[derive(Debug, Default)]
pub(super) struct Stillness {
    paused: bool,
    /// How many read what it wrote.
    readers: u32,
}

/// A part of a process's memory, and how much of it was in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pid: i32,
    range: Range,
    /// Thousandths of it that were read or written lately.
    heat: u64,
}

/// Lets a container's processes go on when dropped, unless somebody else wants them to stand still.
pub(super) struct Still<'a>(&'a Container);

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.0.go_on(|who| who.readers -= 1);
    }
}

/// Why processes do not stand still.
pub(super) enum NotStill {
    /// The host has no cgroup version 2.
    Unsupported,
    /// Not within this time.
    Restless(Duration),
}

impl Container {
    fn stillness(&self) -> MutexGuard<'_, Stillness> {
        self.still.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand_still(&self, asks: impl FnOnce(&mut Stillness), go_on: GoOn<'_>) -> Result<(), NotStill> {
        if !self.group.can_freeze() {
            return Err(NotStill::Unsupported);
        }
        let mut who = self.stillness();
        if !self.group.freeze(FREEZE_MAX, go_on) {
            return Err(NotStill::Restless(FREEZE_MAX));
        }
        asks(&mut who);
        Ok(())
    }

    fn go_on(&self, goes: impl FnOnce(&mut Stillness)) {
        let mut who = self.stillness();
        goes(&mut who);
        if !who.paused && who.readers == 0 {
            self.group.thaw();
        }
    }

    /// Has its processes stand still while what it wrote is read.
    pub(super) fn still_for_reading(&self) -> Result<Still<'_>, NotStill> {
        self.stand_still(|who| who.readers += 1, &|| true)?;
        Ok(Still(self))
    }

    /// Takes over a container that was paused by the edge before.
    pub(super) fn stay_paused(&self) {
        self.stillness().paused = true;
        self.group.freeze_soon();
    }

    pub(super) fn pause_now(&self, go_on: GoOn<'_>) -> Result<Paused, PauseError> {
        self.stand_still(|who| who.paused = true, go_on).map_err(|why| match why {
            NotStill::Unsupported => PauseError::Unsupported,
            NotStill::Restless(limit) => PauseError::Restless { limit },
        })?;
        let before = self.group.memory().0;
        if swap::size().map_or(0, |(_, free)| free) > 0 {
            let given = self.give_back(go_on);
            given.map_err(|e| BackendError::new(format!("give back memory of {}", self.name), e))?;
        }
        Ok(Paused { resident_bytes: before, returned_bytes: before.saturating_sub(self.group.memory().0) })
    }

    /// Sends the memory of processes that stand still to swap: that which is theirs alone in parts, so that it can be broken off, and
    /// the rest (shared, of files, of `/tmp`) as the kernel can.
    fn give_back(&self, go_on: GoOn<'_>) -> std::io::Result<()> {
        let mut parts = Vec::new();
        for pid in self.group.exec_pids()? {
            for memory in procfs::own_memory(pid)? {
                parts.extend(parts_of(pid, &memory));
            }
        }
        parts.sort_by_key(|part| std::cmp::Reverse(part.heat));
        parts.truncate(PARTS_MAX);
        self.swapped().clone_from(&parts);
        self.group.allow_swap(true);
        // The hottest last: what there is no room for in swap stays.
        tell(parts.into_iter().rev(), Advice::PageOut, go_on);
        if go_on() {
            self.group.reclaim(go_on);
        }
        Ok(())
    }

    fn swapped(&self) -> MutexGuard<'_, Vec<Part>> {
        self.swapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn thaw_now(&self) {
        self.group.allow_swap(false);
        self.go_on(|who| who.paused = false);
    }

    pub(super) fn prefetch_now(&self, go_on: GoOn<'_>) {
        let mut parts = std::mem::take(&mut *self.swapped());
        if parts.is_empty() {
            // Nobody remembers, as after a restart of the edge: the kernel does, in no order.
            let pids = self.group.exec_pids().unwrap_or_default();
            let swapped = |pid| {
                procfs::own_memory(pid)
                    .unwrap_or_default()
                    .into_iter()
                    .filter(|it| it.swap_kib > 0)
                    .map(move |it| (pid, it))
            };
            parts.extend(pids.into_iter().flat_map(swapped).flat_map(|(pid, memory)| parts_of(pid, &memory)));
        }
        let mut left = PREFETCH_MAX;
        let within = parts.into_iter().take_while(|part| {
            let fits = left >= part.range.bytes;
            left = left.saturating_sub(part.range.bytes);
            fits
        });
        tell(within, Advice::WillNeed, go_on);
    }
}

fn parts_of(pid: i32, memory: &procfs::OwnMemory) -> impl Iterator<Item = Part> + use<> {
    let Range { start, bytes } = memory.range;
    let heat = memory.referenced_kib * 1000 / (bytes >> 10).max(1);
    let starts = (start..start + bytes).step_by(PART as usize);
    starts.map(move |at| Part { pid, range: Range { start: at, bytes: PART.min(start + bytes - at) }, heat })
}

/// Tells the kernel of one part after the other for as long as it is to go on. One that it refuses stays as it is.
fn tell(parts: impl Iterator<Item = Part>, advice: Advice, go_on: GoOn<'_>) {
    let mut handles = BTreeMap::new();
    for part in parts {
        if !go_on() {
            return;
        }
        let handle = handles.entry(part.pid).or_insert_with(|| process::open_pidfd(part.pid).ok());
        if let Some(handle) = handle {
            let _refused = advise(handle.as_fd(), part.range, advice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_taken_in_parts_that_cover_it() {
        let memory = procfs::OwnMemory {
            range: Range { start: 0x1000, bytes: 2 * PART + 4096 },
            rss_kib: 8192,
            referenced_kib: 4098,
            swap_kib: 0,
        };
        let parts: Vec<_> = parts_of(7, &memory).collect();
        let bytes: Vec<u64> = parts.iter().map(|part| part.range.bytes).collect();
        assert_eq!(bytes, [PART, PART, 4096]);
        assert!(parts.windows(2).all(|two| two[0].range.start + two[0].range.bytes == two[1].range.start));
        assert_eq!(parts[0].heat, 500);
    }
}
