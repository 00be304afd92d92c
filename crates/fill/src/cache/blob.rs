//! One blob in the cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::SystemTime;

use dsec_image::layer::{BlobId, BlobIndex, Digest, GROUP_SIZE};
use rustix::fs::FallocateFlags;

use super::bits::Bits;
use super::map::{Loaded, MapFile, seconds};
use super::{BootId, hold, read_hold, write_hold};

/// Why a blob is kept, on top of being used. A mark is a file, so it outlives the process; the first two end
/// with the boot, as mounts do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Somebody may read it through the device: its index stays.
    Open,
    /// Its file is mounted without us: nothing of it may go.
    Direct,
    /// Somebody asked that nothing of it goes.
    Pinned,
}

impl Mark {
    pub(super) const ALL: [Self; 3] = [Self::Open, Self::Direct, Self::Pinned];

    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Direct => "direct",
            Self::Pinned => "pinned",
        }
    }
}

/// Extension of a file that is being taken over.
pub(super) const TAKEN: &str = "taken";
/// Extension, after its own, of a file that is being written and then gets its name.
pub(super) const NEW: &str = "new";

#[derive(Debug)]
struct Content {
    file: File,
    /// How often some of it was taken out or another put in its place.
    changes: u64,
}

/// One blob in the cache: its index, its file, and which groups are in it.
#[derive(Debug)]
pub struct CachedBlob {
    id: BlobId,
    index: BlobIndex,
    path: PathBuf,
    map: Mutex<MapFile>,
    filled: Bits,
    doubted: Bits,
    /// When each group was last asked for, in seconds since 1970.
    used_s: Vec<AtomicU32>,
    marks: [AtomicBool; 3],
    /// Its file. Readers and writers of content share it; who punches holes or puts another in its place has it alone.
    content: RwLock<Content>,
    /// Taken out of the cache: nothing is written to it any more.
    gone: AtomicBool,
}

impl CachedBlob {
    pub(super) fn load(dir: &Path, id: BlobId, index: BlobIndex, boot: &BootId) -> io::Result<Self> {
        let path = dir.join(id.to_string());
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        if file.metadata()?.len() != index.size() {
            file.set_len(index.size())?;
        }
        let groups = index.groups().len() as u64;
        let Loaded { map, filled, doubted, written_s } =
            MapFile::load(&path.with_extension("map"), groups, boot)?;
        let marks = Mark::ALL.map(|mark| AtomicBool::new(path.with_extension(mark.extension()).exists()));
        Ok(Self {
            id,
            index,
            map: Mutex::new(map),
            filled,
            doubted,
            used_s: (0..groups).map(|_| AtomicU32::new(written_s)).collect(),
            marks,
            content: RwLock::new(Content { file, changes: 0 }),
            gone: AtomicBool::new(false),
            path,
        })
    }

    /// Which it is.
    pub fn id(&self) -> BlobId {
        self.id
    }

    /// What it consists of.
    pub fn index(&self) -> &BlobIndex {
        &self.index
    }

    /// Its file: sparse while it is not complete.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The groups that `range`, which must not be empty and lie in the blob, touches.
    pub fn groups_of(&self, range: &Range<u64>) -> RangeInclusive<u64> {
        range.start / GROUP_SIZE..=(range.end - 1) / GROUP_SIZE
    }

    /// Where a group lies in the blob.
    pub fn range_of(&self, group: u64) -> Range<u64> {
        let start = group * GROUP_SIZE;
        start..start + self.index.plain_len(group)
    }

    /// Whether a group is here and checked.
    pub fn has(&self, group: u64) -> bool {
        self.filled.get(group)
    }

    /// Whether a group was here before the machine started, and has not been looked at since.
    pub fn doubts(&self, group: u64) -> bool {
        self.doubted.get(group)
    }

    /// Groups that are here and checked.
    pub fn groups_here(&self) -> u64 {
        self.filled.count()
    }

    /// Bytes of the groups that are here and checked.
    pub fn here_bytes(&self) -> u64 {
        let groups = self.index.groups().len() as u64;
        let last = groups.checked_sub(1).filter(|last| self.has(*last));
        let short = last.map_or(0, |last| GROUP_SIZE - self.index.plain_len(last));
        self.groups_here() * GROUP_SIZE - short
    }

    /// Whether every group is here and checked.
    pub fn is_complete(&self) -> bool {
        self.groups_here() == self.index.groups().len() as u64
    }

    /// Whether it has this mark.
    pub fn has_mark(&self, mark: Mark) -> bool {
        self.marks[mark as usize].load(Ordering::Acquire)
    }

    /// Gives it a mark or takes it away; nothing happens when it is so already.
    ///
    /// # Errors
    /// The mark's file cannot be made or removed.
    pub fn set_mark(&self, mark: Mark, on: bool) -> io::Result<()> {
        let _alone = write_hold(&self.content);
        let file = self.path.with_extension(mark.extension());
        if self.is_gone() {
            // The files may be those of one that was taken in again.
            let gone = || io::Error::new(io::ErrorKind::NotFound, "the blob was just taken out of the cache");
            return if on { Err(gone()) } else { Ok(()) };
        }
        if on {
            File::create(file)?;
        } else {
            remove(&file)?;
        }
        self.marks[mark as usize].store(on, Ordering::Release);
        Ok(())
    }

    /// Fills `out` with content from `start` on; `false` when some of it is not here, and `out` is then not to be used.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, start: u64, out: &mut [u8]) -> io::Result<bool> {
        let range = start..start + out.len() as u64;
        if range.is_empty() {
            return Ok(true);
        }
        let content = read_hold(&self.content);
        let now_s = seconds(SystemTime::now());
        for group in self.groups_of(&range) {
            if !self.has(group) {
                return Ok(false);
            }
            self.used_s[group as usize].store(now_s, Ordering::Relaxed);
        }
        content.file.read_exact_at(out, start)?;
        Ok(true)
    }

    /// Writes a group that was checked, and then says that it is here. Whether it was not before.
    pub(super) fn write(&self, group: u64, plain: &[u8]) -> io::Result<bool> {
        let content = read_hold(&self.content);
        if self.is_gone() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the blob was taken out of the cache"));
        }
        let start = self.range_of(group).start;
        if let Err(e) = content.file.write_all_at(plain, start) {
            // Half a group takes room that nobody counts.
            self.punch(&content.file, group).ok();
            return Err(e);
        }
        self.admit(group)
    }

    fn admit(&self, group: u64) -> io::Result<bool> {
        self.used_s[group as usize].store(seconds(SystemTime::now()), Ordering::Relaxed);
        let map = hold(&self.map);
        let new = self.filled.set(group);
        map.write_filled(&self.filled, group)?;
        if self.doubted.clear(group) {
            map.write_doubted(&self.doubted, group)?;
        }
        Ok(new)
    }

    /// Holds a doubted group against its digest: its bytes when they are right and the group is here from now on.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn prove(&self, group: u64) -> io::Result<Option<Vec<u8>>> {
        let content = read_hold(&self.content);
        if !self.doubted.get(group) {
            return Ok(None);
        }
        let range = self.range_of(group);
        let mut plain = vec![0; (range.end - range.start) as usize];
        let read = content.file.read_exact_at(&mut plain, range.start);
        if read.is_ok() && Digest::of(&plain) == self.index.groups()[group as usize].hash {
            self.admit(group)?;
            return Ok(Some(plain));
        }
        let map = hold(&self.map);
        self.doubted.clear(group);
        map.write_doubted(&self.doubted, group)?;
        Ok(None)
    }

    /// Bytes that are not here, not even doubted.
    pub(super) fn missing_bytes(&self) -> u64 {
        let missing = |group: &u64| !self.filled.get(*group) && !self.doubted.get(*group);
        let groups = 0..self.index.groups().len() as u64;
        groups.filter(missing).map(|group| self.index.plain_len(group)).sum()
    }

    /// Puts a file with the whole content in the place of its own; what was read of the old one stays true. Bytes that
    /// came here with it. The file keeps its name beside the new one, so that this can be repeated wherever it was cut short.
    ///
    /// # Errors
    /// `EXDEV`: it is on another file system.
    pub(super) fn adopt(&self, from: &Path) -> io::Result<u64> {
        let mut content = write_hold(&self.content);
        if self.is_gone() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the blob was taken out of the cache"));
        }
        let file = OpenOptions::new().read(true).write(true).open(from)?;
        let new = self.path.with_extension(TAKEN);
        remove(&new)?;
        std::fs::hard_link(from, &new)?;
        std::fs::rename(&new, &self.path)?;
        // Renaming does nothing when both are one file already.
        remove(&new)?;
        *content = Content { file, changes: content.changes + 1 };
        let came = self.missing_bytes();
        let (map, now_s) = (hold(&self.map), seconds(SystemTime::now()));
        for group in 0..self.index.groups().len() as u64 {
            self.used_s[group as usize].store(now_s, Ordering::Relaxed);
            self.filled.set(group);
            self.doubted.clear(group);
        }
        for group in (0..self.index.groups().len() as u64).step_by(u64::BITS as usize) {
            map.write_filled(&self.filled, group)?;
            map.write_doubted(&self.doubted, group)?;
        }
        Ok(came)
    }

    /// Brings a complete blob to the disk for good: it is believed after a power cut.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn seal(&self) -> io::Result<()> {
        let (file, changes) = {
            let content = read_hold(&self.content);
            if hold(&self.map).sealed() || !self.is_complete() {
                return Ok(());
            }
            (content.file.try_clone()?, content.changes)
        };
        // Without the lock: who wants to open the blob does not wait for the disk.
        file.sync_data()?;
        let content = read_hold(&self.content);
        if content.changes == changes && self.is_complete() {
            hold(&self.map).set_sealed(true)?;
        }
        Ok(())
    }

    /// [`Self::seal`] with nobody waiting for it: a power cut before it costs a check, not bytes. Needs a tokio runtime.
    pub(crate) fn seal_soon(self: &Arc<Self>) {
        if !self.is_complete() {
            return;
        }
        let blob = self.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = blob.seal() {
                tracing::warn!(blob = %blob.id, %error, "a complete blob cannot be brought to the disk");
            }
        });
    }

    /// Takes groups out: bytes that were freed. None go while the blob is mounted directly or pinned.
    pub(super) fn evict(&self, groups: impl IntoIterator<Item = u64>) -> io::Result<u64> {
        let mut content = write_hold(&self.content);
        if self.is_kept() {
            return Ok(0);
        }
        content.changes += 1;
        let mut freed = 0;
        let mut map = hold(&self.map);
        map.set_sealed(false)?;
        for group in groups {
            let (filled, doubted) = (self.filled.clear(group), self.doubted.clear(group));
            if filled {
                map.write_filled(&self.filled, group)?;
            }
            if doubted {
                map.write_doubted(&self.doubted, group)?;
            }
            if filled || doubted {
                self.punch(&content.file, group)?;
                freed += self.index.plain_len(group);
            }
        }
        Ok(freed)
    }

    /// Says of a group whose bytes cannot be read that it is not here, so that it is fetched again. Whether it was.
    pub(super) fn disown(&self, group: u64) -> io::Result<bool> {
        let mut content = write_hold(&self.content);
        content.changes += 1;
        let mut map = hold(&self.map);
        map.set_sealed(false)?;
        let was = self.filled.clear(group);
        map.write_filled(&self.filled, group)?;
        Ok(was)
    }

    fn punch(&self, file: &File, group: u64) -> io::Result<()> {
        let range = self.range_of(group);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(file, flags, range.start, range.end - range.start)?)
    }

    /// Whether nothing of it may go.
    pub(super) fn is_kept(&self) -> bool {
        self.has_mark(Mark::Direct) || self.has_mark(Mark::Pinned)
    }

    /// Groups that take room, with when they were last asked for.
    pub(super) fn ages(&self) -> impl Iterator<Item = (u32, u64)> {
        let taken = |group: &u64| self.filled.get(*group) || self.doubted.get(*group);
        (0..self.index.groups().len() as u64)
            .filter(taken)
            .map(|group| (self.used_s[group as usize].load(Ordering::Relaxed), group))
    }

    /// Whether it was taken out of the cache.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Whether nothing of it is here and nobody has marked it.
    pub(super) fn is_unused(&self) -> bool {
        !Mark::ALL.into_iter().any(|mark| self.has_mark(mark)) && self.ages().next().is_none()
    }

    /// Removes its files when it is empty and nobody has marked it. Whether it is out of the cache now, and was not before.
    pub(super) fn remove_if_unused(&self) -> bool {
        let _alone = write_hold(&self.content);
        if self.is_gone() || !self.is_unused() {
            return false;
        }
        self.gone.store(true, Ordering::Release);
        // The index last, which the others are found by.
        for file in [self.path.with_extension("map"), self.path.clone(), self.path.with_extension("index")] {
            if let Err(error) = remove(&file) {
                tracing::warn!(file = %file.display(), %error, "a file of an empty blob stays until the next start");
                break;
            }
        }
        true
    }
}

/// One that is not there is removed already.
pub(super) fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
