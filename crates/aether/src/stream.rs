//! One output stream of a command: drained at full speed whoever reads, kept within its limit.
//!
//! The first [`HEAD_MAX`] bytes stay in memory. A stream that grows past them goes to its spool file
//! whole; from then on the bytes move from the pipe to the file inside the kernel (`splice`). Past
//! its limit bytes are counted and dropped. A terminal's file is a window that moves: what lies
//! behind it is punched out of the file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_proto::guest::{self, HEAD_MAX, PTY_WINDOW};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;

use crate::child::Host;

/// Bytes moved for one descriptor in one turn of the loop: one of a hundred busy streams waits for
/// the others' budgets only.
pub(crate) const TURN_BUDGET: usize = 1 << 20;
/// A stream this long is worth a larger pipe.
const HEAVY: u64 = 256 << 10;
/// The pipe it gets: the kernel's default maximum for those without privilege.
const HEAVY_PIPE: usize = 1 << 20;
/// How much of a terminal's window is given back at a time.
const PUNCH: u64 = 1 << 20;

/// What [`Stream::pump`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pumped {
    /// Nothing more for now.
    Empty,
    /// The budget is used up; there may be more.
    More,
    /// Nobody can write any more.
    End,
}

#[derive(Debug)]
enum Spool {
    None,
    Open(OwnedFd),
    /// No room, or no file: what comes is counted only.
    Failed,
    /// The stream is at its end and the file complete.
    Done,
}

/// A stream's bytes and how many of them were told to the edge.
#[derive(Debug)]
pub(crate) struct Stream {
    total: u64,
    kept: u64,
    start: u64,
    head: Vec<u8>,
    spool: Spool,
    /// The bytes are in the file, not in the head.
    spooled: bool,
    limit: u64,
    window: bool,
    heavy: bool,
    told: usize,
    /// It has grown since it was last told.
    pub(crate) grown: bool,
}

impl Stream {
    /// A pipe's stream that keeps `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            total: 0,
            kept: 0,
            start: 0,
            head: Vec::new(),
            spool: Spool::None,
            spooled: false,
            limit,
            window: false,
            heavy: false,
            told: 0,
            grown: false,
        }
    }

    /// A terminal's stream.
    pub(crate) fn window() -> Self {
        Self { window: true, ..Self::new(u64::MAX) }
    }

    /// Moves up to `budget` bytes out of `fd`.
    pub(crate) fn pump(&mut self, fd: BorrowedFd<'_>, host: &Host, file: &str, budget: usize) -> Pumped {
        let mut left = budget;
        while left > 0 {
            let moved = match &self.spool {
                Spool::Open(spool) if !self.window && self.kept < self.limit => {
                    let most = (self.limit - self.kept).min(left as u64) as usize;
                    let mut at = self.kept;
                    match rustix::pipe::splice(fd, None, spool, Some(&mut at), most, splice_flags()) {
                        Ok(n) => {
                            self.kept += n as u64;
                            Ok(n)
                        }
                        Err(e @ (Errno::AGAIN | Errno::INTR)) => Err(e),
                        Err(_) => {
                            self.spool = Spool::Failed;
                            continue;
                        }
                    }
                }
                Spool::Open(_) | Spool::Failed | Spool::Done if !self.window => {
                    discard(fd, host.null.as_fd(), left)
                }
                Spool::None if self.head.len() as u64 >= self.limit => discard(fd, host.null.as_fd(), left),
                _ => self.copy(fd, host, file, left),
            };
            match moved {
                Ok(0) => return Pumped::End,
                Ok(n) => {
                    self.total += n as u64;
                    self.grown = true;
                    left = left.saturating_sub(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Pumped::Empty,
                // A terminal nobody holds open on the user's side says EIO.
                Err(_) => return Pumped::End,
            }
            if !self.heavy && self.total > HEAVY && !self.window {
                self.heavy = true;
                let _ = rustix::pipe::fcntl_setpipe_size(fd, HEAVY_PIPE);
            }
        }
        Pumped::More
    }

    fn copy(&mut self, fd: BorrowedFd<'_>, host: &Host, file: &str, most: usize) -> Result<usize, Errno> {
        let mut chunk = [0; 2 * HEAD_MAX];
        let most = most.min(chunk.len());
        let n = rustix::io::read(fd, &mut chunk[..most])?;
        self.keep(&chunk[..n], host, file);
        Ok(n)
    }

    /// Takes bytes that were read elsewhere. `total` is the caller's to count.
    fn keep(&mut self, bytes: &[u8], host: &Host, file: &str) {
        if matches!(self.spool, Spool::None) {
            let room = (self.limit.min(HEAD_MAX as u64) as usize).saturating_sub(self.head.len());
            let fits = bytes.len().min(room);
            // Past a limit that is smaller than the head nothing is spooled.
            let spool = fits < bytes.len() && self.limit > HEAD_MAX as u64;
            if !spool || !self.open_spool(host, file) {
                self.head.extend_from_slice(&bytes[..fits]);
                self.kept += fits as u64;
                return;
            }
        }
        let Spool::Open(spool) = &self.spool else { return };
        if self.window {
            if write_at(spool, bytes, self.total) != bytes.len() {
                // The part that is lost, and all before it, is no longer kept; the terminal goes on.
                self.start = self.total + bytes.len() as u64;
            }
            self.slide(self.total + bytes.len() as u64);
            return;
        }
        let most = bytes.len().min((self.limit - self.kept).min(usize::MAX as u64) as usize);
        let written = write_at(spool, &bytes[..most], self.kept);
        self.kept += written as u64;
        if written < most {
            self.spool = Spool::Failed;
        }
    }

    /// Adds bytes that were held back elsewhere.
    pub(crate) fn push(&mut self, bytes: &[u8], host: &Host, file: &str) {
        if bytes.is_empty() {
            return;
        }
        self.keep(bytes, host, file);
        self.total += bytes.len() as u64;
        self.grown = true;
    }

    /// False: what fits the head is all that is kept.
    fn open_spool(&mut self, host: &Host, file: &str) -> bool {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let opened = rustix::fs::openat(&host.spool, file, flags, mode)
            .ok()
            .filter(|spool| write_at(spool, &self.head, 0) == self.head.len());
        self.spooled = opened.is_some();
        self.spool = opened.map_or(Spool::Failed, Spool::Open);
        if self.spooled {
            self.head = Vec::new();
            self.told = 0;
        }
        self.spooled
    }

    /// Moves the window's start up and gives back what lies before it.
    fn slide(&mut self, end: u64) {
        let Spool::Open(spool) = &self.spool else { return };
        while end - self.start >= PTY_WINDOW + PUNCH {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(spool, flags, self.start, PUNCH);
            self.start += PUNCH;
        }
    }

    fn state(&self, from: usize) -> guest::Stream {
        let kept = if self.window { self.window_kept() } else { self.kept };
        guest::Stream {
            total: self.total,
            kept,
            start: self.start,
            spooled: self.spooled,
            head: self.head[from.min(self.head.len())..].to_vec(),
            head_offset: from.min(self.head.len()) as u64,
        }
    }

    fn window_kept(&self) -> u64 {
        match self.spool {
            Spool::Open(_) | Spool::Done => self.total - self.start,
            Spool::None | Spool::Failed => self.head.len() as u64,
        }
    }

    /// What an event says: only the bytes that were not told yet.
    pub(crate) fn news(&mut self) -> guest::Stream {
        let state = self.state(self.told);
        self.mark_told();
        state
    }

    /// Everything, for somebody who knows nothing.
    pub(crate) fn all(&self) -> guest::Stream {
        self.state(0)
    }

    /// All but the head, for a message that has no room; the head is told later.
    pub(crate) fn without_head(&mut self) -> guest::Stream {
        self.told = 0;
        self.grown = true;
        guest::Stream { head: Vec::new(), head_offset: 0, ..self.state(self.head.len()) }
    }

    /// The edge knows all of it.
    pub(crate) fn mark_told(&mut self) {
        self.told = self.head.len();
        self.grown = false;
    }

    /// Bytes of it in memory.
    pub(crate) fn head_len(&self) -> usize {
        self.head.len()
    }

    /// Its descriptors are no longer needed for writing: nothing more will come.
    pub(crate) fn close(&mut self) {
        if let Spool::Open(_) = self.spool {
            self.spool = Spool::Done;
        }
        self.head.shrink_to_fit();
    }

    /// Removes its file.
    pub(crate) fn forget(&self, host: &Host, file: &str) {
        if self.spooled {
            let _ = rustix::fs::unlinkat(&host.spool, file, AtFlags::empty());
        }
    }
}

/// Throws away up to `most` bytes of a pipe (or, where that cannot be spliced, of anything).
pub(crate) fn discard(fd: BorrowedFd<'_>, null: BorrowedFd<'_>, most: usize) -> Result<usize, Errno> {
    match rustix::pipe::splice(fd, None, null, None, most, splice_flags()) {
        Err(Errno::INVAL) => {
            let mut chunk = [0; 2 * HEAD_MAX];
            rustix::io::read(fd, &mut chunk)
        }
        other => other,
    }
}

fn splice_flags() -> SpliceFlags {
    SpliceFlags::NONBLOCK | SpliceFlags::MOVE
}

/// Writes as much as there is room for.
fn write_at(file: &OwnedFd, bytes: &[u8], at: u64) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], at + done as u64) {
            Ok(n @ 1..) => done += n,
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    done
}
