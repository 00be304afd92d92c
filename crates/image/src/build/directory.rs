//! Takes in a directory of the host, or the upper directory of an overlay.
//!
//! ```text
//! root ──► names, sorted ──► statx ── unchanged since the last pack? ── yes ──► pointed at where it is
//!            ▲   directory: goes down        └─ no ──► opened without following links ──► blob
//!            └── fd-relative; deep ones come back up by `..`
//! ```
//!
//! What rules leave out is counted, by name and size, and never opened.
//!
//! Nothing is found by a path: every name is looked up in the directory that is open, and no link is followed, so what
//! the directory holds cannot lead out of it. Other file systems mounted in it are not gone into. The directory must
//! stand still; what changes meanwhile fails the pack or is read as it was when its turn came.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom as Whence, StatxFlags};

use crate::ImportLimits;
use crate::erofs::{
    AppendError, Attributes, Content, ContentStore, FileData, InodeId, Segment, Timestamp, Tree, Xattrs,
};
use crate::error::{EntryProblem, printable};

use super::attributes::{Source, xattrs};
use super::blob::BlobWriter;
use super::previous::{Kept, Previous, Stamp};
use super::rules::{Effect, Here, Kind, LeftOut, Rules, Tally};

/// Directories held open on the way down; those above are opened again by `..`. Far below the usual limit of files.
const OPEN_MAX: usize = 128;
/// Files shorter than this are not asked for holes: the asking costs more than the zeros.
const HOLES_FROM: u64 = 64 << 10;
/// Pieces a file with holes may have; what comes after them counts as one.
const SEGMENTS_MAX: usize = 1 << 20;

/// Names or pieces between two looks at the clock.
const LOOK_EVERY: usize = 1024;

const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// A pipe that took a file's place must not be waited for.
const OPEN_FILE: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// What is wrong, and with which entry.
pub(super) struct Failed {
    pub(super) entry: String,
    pub(super) problem: EntryProblem,
}

/// What was taken in.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) tree: Tree,
    /// The newest change time met.
    pub(super) last_change: Timestamp,
    /// What rules left out.
    pub(super) left_out: Vec<LeftOut>,
}

/// A directory on the way.
struct Frame {
    id: InodeId,
    fd: Option<OwnedFd>,
    /// Device and inode, by which it is known again.
    identity: (u64, u64),
    names: std::vec::IntoIter<CString>,
    /// Its name, for errors.
    name: CString,
    /// Where rules have come to in it.
    here: Here,
    /// The rule by which it is left out with all in it.
    left_out: Option<usize>,
}

/// Where content goes, and the files that have gone there, whose blobs have the tree's numbers.
pub(super) type Contents<'a, 's> = (&'a mut BlobWriter<'s>, &'a mut HashMap<u64, Kept>);

pub(super) struct Intake<'a, 's> {
    pub(super) source: Source,
    pub(super) limits: ImportLimits,
    /// None: only names and rules are looked at.
    pub(super) content: Option<Contents<'a, 's>>,
    pub(super) previous: &'a Previous,
    /// What is left out or must not be there.
    pub(super) rules: &'a Rules,
    /// By when all must be read.
    pub(super) until: Option<Instant>,
    /// Told after every piece of content and every entry: entries so far.
    pub(super) tick: &'a mut dyn FnMut(u64),
    pub(super) files: u64,
    pub(super) bytes: u64,
    pub(super) metadata_bytes: u64,
}

impl Intake<'_, '_> {
    pub(super) fn take(mut self, root: OwnedFd) -> Result<Taken, Failed> {
        let mut walk = Walk {
            taken: Taken::default(),
            links: HashMap::new(),
            frames: Vec::new(),
            tally: Tally::default(),
        };
        let result = self.walk(&mut walk, root);
        result.map_err(|(name, problem)| Failed { entry: walk.path(&name), problem })?;
        walk.taken.left_out = walk.tally.finish();
        Ok(walk.taken)
    }

    fn walk(&mut self, walk: &mut Walk, root: OwnedFd) -> Result<(), (CString, EntryProblem)> {
        let here = |problem| (c".".to_owned(), problem);
        let stat = rustix::fs::fstat(&root).map_err(unreadable).map_err(here)?;
        let found = Found::of_stat(&root, c"").map_err(here)?;
        let attributes = self.attributes(&root, c".", &found).map_err(here)?;
        let id = walk.taken.tree.root();
        walk.taken.tree.set_attributes(id, attributes);
        walk.seen(&found);
        let names = names(&root, self.until).map_err(here)?;
        let identity = (stat.st_dev, stat.st_ino);
        let (name, here) = (c"".to_owned(), self.rules.start());
        walk.frames.push(Frame { id, fd: Some(root), identity, names, name, here, left_out: None });
        while let Some(top) = walk.frames.last_mut() {
            let Some(name) = top.names.next() else {
                walk.up().map_err(|problem| (c"..".to_owned(), problem))?;
                continue;
            };
            self.entry(walk, &name).map_err(|problem| (name, problem))?;
        }
        Ok(())
    }

    fn entry(&mut self, walk: &mut Walk, name: &CStr) -> Result<(), EntryProblem> {
        self.files += 1;
        if self.files > self.limits.max_files {
            return Err(EntryProblem::TooManyFiles { max: self.limits.max_files });
        }
        (self.tick)(self.files);
        if is_over(self.until) {
            return Err(EntryProblem::Late);
        }
        let Some(Frame { id: parent, fd: Some(dir), identity, here, left_out, .. }) = walk.frames.last()
        else {
            return Err(EntryProblem::Changed);
        };
        let (parent, device) = (*parent, identity.0);
        let found = Found::of(dir, name)?;
        let (here, rule) = match left_out {
            Some(rule) => (Here::default(), Some(*rule)),
            None => self.rules.look(here, name.to_bytes(), found.kind(self.source)),
        };
        if let Some(rule) = rule {
            let matched = left_out.is_none();
            return self.leave_out(walk, name, &found, rule, matched);
        }
        let attributes = self.attributes(dir, name, &found)?;
        let is_plain = attributes.xattrs.is_none();
        self.spend(name.to_bytes().len())?;
        let linked = walk.links.get(&found.ino).copied().filter(|_| found.links > 1);
        if let Some(linked) = linked.filter(|_| found.kind != FileType::Directory) {
            walk.taken.tree.hard_link(parent, name.to_bytes(), linked);
            return Ok(());
        }
        let content = match found.kind {
            FileType::Directory => Content::directory(),
            FileType::RegularFile => Content::File(self.file(dir, name, &found, is_plain)?),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new()).map_err(unreadable)?;
                self.spend(target.as_bytes().len())?;
                Content::Symlink(target.into_bytes().into())
            }
            FileType::CharacterDevice if found.rdev == (0, 0) && self.source == Source::Plain => {
                return Ok(());
            }
            FileType::CharacterDevice => Content::CharDevice(found.rdev.0, found.rdev.1),
            FileType::BlockDevice => Content::BlockDevice(found.rdev.0, found.rdev.1),
            FileType::Fifo => Content::Fifo,
            FileType::Socket => Content::Socket,
            FileType::Unknown => return Err(EntryProblem::Changed),
        };
        let fd = match found.kind {
            FileType::Directory if found.device == device => Some(open_directory(dir, name)?),
            _ => None,
        };
        walk.seen(&found);
        let id = walk.taken.tree.insert(parent, name.to_bytes(), attributes, content);
        match fd {
            Some(fd) => walk.down(id, (fd, self.until), name, &found, (here, None))?,
            None if found.links > 1 => drop(walk.links.insert(found.ino, id)),
            None => {}
        }
        Ok(())
    }

    /// Does what a rule says to an entry that it has `matched`, or that is in a directory it took.
    fn leave_out(
        &mut self,
        walk: &mut Walk,
        name: &CStr,
        found: &Found,
        rule: usize,
        matched: bool,
    ) -> Result<(), EntryProblem> {
        if self.rules.effect(rule) == Effect::Deny {
            return Err(EntryProblem::Denied { rule: self.rules.name(rule).to_owned() });
        }
        let bytes = if found.kind == FileType::RegularFile { found.stamp.size } else { 0 };
        let Walk { tally, frames, .. } = walk;
        let path = || format!("/{}", path(frames, name));
        let path: Option<&dyn Fn() -> String> = if matched { Some(&path) } else { None };
        tally.count(self.rules, rule, path, (1, bytes));
        let Some(Frame { fd: Some(dir), identity, .. }) = walk.frames.last() else {
            return Err(EntryProblem::Changed);
        };
        if found.kind == FileType::Directory && found.device == identity.0 {
            let fd = open_directory(dir, name)?;
            walk.down(walk.taken.tree.root(), (fd, self.until), name, found, (Here::default(), Some(rule)))?;
        }
        Ok(())
    }

    fn attributes(&mut self, dir: &OwnedFd, name: &CStr, found: &Found) -> Result<Attributes, EntryProblem> {
        if self.content.is_none() {
            return Ok(Attributes::default());
        }
        let known = self.previous.find(found.ino, &found.stamp);
        let xattrs = match known {
            Some((_, kept)) if kept.is_plain && found.kind == FileType::RegularFile => Xattrs::default(),
            _ => xattrs(dir, name, self.source)?,
        };
        let size: usize = xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.spend(size)?;
        Ok(Attributes {
            mode: found.mode,
            uid: found.uid,
            gid: found.gid,
            mtime: found.stamp.mtime,
            xattrs: (!xattrs.is_empty()).then(|| Box::new(xattrs)),
        })
    }

    fn file(
        &mut self,
        dir: &OwnedFd,
        name: &CStr,
        found: &Found,
        is_plain: bool,
    ) -> Result<FileData, EntryProblem> {
        let size = found.stamp.size;
        let Some((writer, read)) = self.content.as_mut().filter(|_| size > 0) else {
            return Ok(FileData::empty());
        };
        // Of an upper directory alone: it is of one file system, in which an inode number names one file.
        let known = read.get(&found.ino).filter(|_| self.source == Source::Upper);
        if let Some(known) = known.filter(|known| known.stamp == found.stamp) {
            return Ok(known.data.clone());
        }
        if let Some((blob, old)) = self.previous.find(found.ino, &found.stamp)
            && let Some(data) = writer.reuse(blob, &old.data, old.hash)
        {
            read.insert(found.ino, Kept { data: data.clone(), ..old.clone() });
            return Ok(data);
        }
        let fd = rustix::fs::openat(dir, name, OPEN_FILE, Mode::empty()).map_err(unreadable)?;
        let mut file = File::from(fd);
        let now = file.metadata().map_err(EntryProblem::Unreadable)?;
        if !now.is_file() || now.ino() != found.ino || now.len() != size {
            return Err(EntryProblem::Changed);
        }
        let holes = size >= HOLES_FROM && now.blocks().saturating_mul(512) < size;
        let segments = if holes { segments(&file, size, self.until).map_err(not_read)? } else { Vec::new() };
        let is_dense = !holes || segments.iter().any(|segment| segment.len == size);
        let stored = if is_dense { size } else { segments.iter().map(|segment| segment.len).sum() };
        self.bytes = self.bytes.saturating_add(stored);
        let over = EntryProblem::TooManyBytes { max: self.limits.max_bytes };
        let Some(room) = self.limits.max_bytes.checked_sub(self.bytes) else { return Err(over) };
        let files = self.files;
        let mut tick = |_| (self.tick)(files);
        let until = self.until;
        let appended = if is_dense {
            file.seek(SeekFrom::Start(0)).map_err(EntryProblem::Unreadable)?;
            let mut file = InTime { source: file, until };
            writer.append_hashed(&mut file, size, &mut tick).map(|(data, hash)| (data, Some(hash)))
        } else {
            let pieces = Pieces { file: &file, segments: segments.iter(), left: 0 };
            let mut pieces = InTime { source: pieces, until };
            writer
                .append_sparse(&mut pieces, size, &segments, room + stored, &mut tick)
                .map(|data| (data, None))
        };
        let (data, hash) = appended.map_err(|error| match error {
            AppendError::Read(e) => not_read(e),
            AppendError::Short { .. } | AppendError::BadSegments => EntryProblem::Changed,
            AppendError::Write(e) => EntryProblem::write(writer.path(), e),
            AppendError::TooLarge => EntryProblem::ImageTooLarge,
            AppendError::NoRoom { .. } => over,
            AppendError::Pack(source) => EntryProblem::Pack { source },
        })?;
        if data.device > 0 {
            read.insert(found.ino, Kept { stamp: found.stamp, hash, data: data.clone(), is_plain });
        }
        Ok(data)
    }

    fn spend(&mut self, bytes: usize) -> Result<(), EntryProblem> {
        self.metadata_bytes += bytes as u64;
        if self.metadata_bytes > self.limits.max_metadata_bytes {
            return Err(EntryProblem::TooMuchMetadata { max: self.limits.max_metadata_bytes });
        }
        Ok(())
    }
}

struct Walk {
    taken: Taken,
    /// Inodes with several names.
    links: HashMap<u64, InodeId>,
    frames: Vec<Frame>,
    tally: Tally,
}

impl Walk {
    fn seen(&mut self, found: &Found) {
        self.taken.last_change = self.taken.last_change.max(found.stamp.ctime);
    }

    /// An entry's path from the root, for people.
    fn path(&self, name: &CStr) -> String {
        path(&self.frames, name)
    }

    fn down(
        &mut self,
        id: InodeId,
        (fd, until): (OwnedFd, Option<Instant>),
        name: &CStr,
        found: &Found,
        (here, left_out): (Here, Option<usize>),
    ) -> Result<(), EntryProblem> {
        let stat = rustix::fs::fstat(&fd).map_err(unreadable)?;
        if stat.st_ino != found.ino {
            return Err(EntryProblem::Changed);
        }
        let names = names(&fd, until)?;
        if let Some(far) = self.frames.len().checked_sub(OPEN_MAX) {
            self.frames[far].fd = None;
        }
        let identity = (stat.st_dev, stat.st_ino);
        let name = name.to_owned();
        self.frames.push(Frame { id, fd: Some(fd), identity, names, name, here, left_out });
        Ok(())
    }

    fn up(&mut self) -> Result<(), EntryProblem> {
        let Some(done) = self.frames.pop() else { return Ok(()) };
        let Some(parent) = self.frames.last_mut().filter(|parent| parent.fd.is_none()) else { return Ok(()) };
        let from = done.fd.ok_or(EntryProblem::Changed)?;
        let fd = rustix::fs::openat(&from, c"..", OPEN_DIRECTORY, Mode::empty()).map_err(unreadable)?;
        let stat = rustix::fs::fstat(&fd).map_err(unreadable)?;
        if (stat.st_dev, stat.st_ino) != parent.identity {
            return Err(EntryProblem::Changed);
        }
        parent.fd = Some(fd);
        Ok(())
    }
}

/// The path of an entry of the last directory on the way.
fn path(frames: &[Frame], name: &CStr) -> String {
    let above = frames.iter().skip(1).map(|frame| frame.name.as_bytes());
    let all: Vec<_> = above.chain([name.to_bytes()]).collect();
    printable(&all.join(b"/".as_slice()))
}

fn open_directory(dir: &OwnedFd, name: &CStr) -> Result<OwnedFd, EntryProblem> {
    rustix::fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty()).map_err(unreadable)
}

/// What statx(2) tells.
struct Found {
    kind: FileType,
    mode: u16,
    uid: u32,
    gid: u32,
    ino: u64,
    device: u64,
    links: u32,
    rdev: (u32, u32),
    stamp: Stamp,
}

impl Found {
    fn of(dir: &OwnedFd, name: &CStr) -> Result<Self, EntryProblem> {
        Self::with(dir, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    fn of_stat(fd: &OwnedFd, name: &CStr) -> Result<Self, EntryProblem> {
        Self::with(fd, name, AtFlags::EMPTY_PATH)
    }

    /// What rules distinguish.
    fn kind(&self, source: Source) -> Kind {
        match self.kind {
            FileType::Directory => Kind::Directory,
            FileType::CharacterDevice if self.rdev == (0, 0) && source == Source::Upper => Kind::Whiteout,
            _ => Kind::Other,
        }
    }

    fn with(dir: &OwnedFd, name: &CStr, flags: AtFlags) -> Result<Self, EntryProblem> {
        let found = rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS).map_err(unreadable)?;
        let time =
            |time: rustix::fs::StatxTimestamp| Timestamp { seconds: time.tv_sec, nanoseconds: time.tv_nsec };
        Ok(Self {
            kind: FileType::from_raw_mode(u32::from(found.stx_mode)),
            mode: found.stx_mode & 0o7777,
            uid: found.stx_uid,
            gid: found.stx_gid,
            ino: found.stx_ino,
            device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            links: found.stx_nlink,
            rdev: (found.stx_rdev_major, found.stx_rdev_minor),
            stamp: Stamp { size: found.stx_size, mtime: time(found.stx_mtime), ctime: time(found.stx_ctime) },
        })
    }
}

/// The names in a directory, in byte order.
fn names(dir: &OwnedFd, until: Option<Instant>) -> Result<std::vec::IntoIter<CString>, EntryProblem> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir).map_err(unreadable)? {
        if names.len() % LOOK_EVERY == LOOK_EVERY - 1 && is_over(until) {
            return Err(EntryProblem::Late);
        }
        let entry = entry.map_err(unreadable)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable();
    Ok(names.into_iter())
}

/// Where a file has content.
fn segments(file: &File, size: u64, until: Option<Instant>) -> io::Result<Vec<Segment>> {
    let (mut segments, mut at) = (Vec::new(), 0);
    while at < size {
        if segments.len() % LOOK_EVERY == LOOK_EVERY - 1 && is_over(until) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let start = match rustix::fs::seek(file, Whence::Data(at)) {
            Ok(start) => start.min(size),
            // No more content.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = match segments.len() + 1 {
            SEGMENTS_MAX.. => size,
            _ => rustix::fs::seek(file, Whence::Hole(start))?.min(size),
        };
        if end > start {
            segments.push(Segment { offset: start, len: end - start });
        }
        at = end.max(start + 1);
    }
    Ok(segments)
}

/// Reads the pieces of a file one after the other.
struct Pieces<'a> {
    file: &'a File,
    segments: std::slice::Iter<'a, Segment>,
    left: u64,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            let Some(next) = self.segments.next() else { return Ok(0) };
            self.file.seek(SeekFrom::Start(next.offset))?;
            self.left = next.len;
        }
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.file.read(&mut buffer[..most])?;
        self.left -= got as u64;
        Ok(got)
    }
}

/// Reads until it is time to stop.
struct InTime<R> {
    source: R,
    until: Option<Instant>,
}

impl<R: Read> Read for InTime<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if is_over(self.until) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.source.read(buffer)
    }
}

fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

fn not_read(error: io::Error) -> EntryProblem {
    if error.kind() == io::ErrorKind::TimedOut { EntryProblem::Late } else { EntryProblem::Unreadable(error) }
}

fn unreadable(errno: rustix::io::Errno) -> EntryProblem {
    EntryProblem::Unreadable(errno.into())
}

/// The place of `name` in the open directory `dir`, for calls that have no fd-relative form. The name itself is not
/// followed by those that begin with `l`.
pub(super) fn proc_path(dir: &OwnedFd, name: &CStr) -> CString {
    let path = [format!("/proc/self/fd/{}/", dir.as_fd().as_raw_fd()).as_bytes(), name.to_bytes()].concat();
    // A name of the directory has no NUL in it.
    CString::new(path).unwrap_or_default()
}
