//! Reading a command's output. Each reader has its own offset and waits for nobody.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use dsec_model::ErrorKind;
use dsec_proto::rest::ApiError;
use rustix::io::{Errno, ReadWriteFlags};
use tokio::sync::watch;

use super::exec::{Exec, Reading, Which};
use crate::error::{agent_gone, internal};

/// Bytes read at once: large enough for the disk, small enough for a thousand readers.
pub const CHUNK: usize = 256 * 1024;

/// What one look gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Bytes were appended.
    Data,
    /// Bytes from the old offset up to this one were not kept; the reader stands behind the gap.
    Gap {
        /// First byte that is there again.
        to: u64,
    },
    /// All that there is was read, and more may come.
    Wait,
    /// All was read and the command has ended.
    End,
}

enum Source {
    Memory,
    File,
    Nothing { ended: bool },
}

/// One reader of one stream.
#[derive(Debug)]
pub struct StreamReader {
    exec: Arc<Exec>,
    which: Which,
    offset: u64,
    file: Option<Arc<File>>,
    changed: watch::Receiver<()>,
    _keeps: Reading,
}

impl StreamReader {
    /// Reads a stream from `offset` on.
    pub fn new(exec: &Arc<Exec>, which: Which, offset: u64) -> Self {
        Self {
            exec: Arc::clone(exec),
            which,
            offset,
            file: None,
            changed: exec.watch(),
            _keeps: exec.reading(),
        }
    }

    /// Where it stands.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Waits until something about the command has changed since the last look. Cancel-safe.
    pub async fn changed(&mut self) {
        // The sender lives in `self.exec`, so this cannot fail.
        let _ = self.changed.changed().await;
    }

    /// Appends up to `max` bytes that are there now. Does not wait for more. Not cancel-safe: a
    /// dropped call may have read bytes that nobody gets.
    ///
    /// # Errors
    /// The agent is gone, or the spool file cannot be read.
    pub async fn step(&mut self, max: usize, out: &mut Vec<u8>) -> Result<Step, ApiError> {
        self.changed.mark_unchanged();
        let (source, max) = {
            let facts = self.exec.facts();
            let stream = facts.stream(self.which);
            if self.offset < stream.start {
                self.offset = stream.start;
                return Ok(Step::Gap { to: stream.start });
            }
            let there = stream.end().saturating_sub(self.offset);
            let max = usize::try_from(there).unwrap_or(usize::MAX).min(max);
            let source = if there == 0 {
                if let Some(why) = &facts.lost {
                    return Err(agent_gone(why));
                }
                Source::Nothing { ended: facts.ended }
            } else if stream.spooled {
                Source::File
            } else {
                let from = usize::try_from(self.offset).unwrap_or(usize::MAX);
                out.extend_from_slice(stream.head.get(from..from.saturating_add(max)).unwrap_or_default());
                Source::Memory
            };
            (source, max)
        };
        match source {
            Source::Nothing { ended: true } => Ok(Step::End),
            Source::Nothing { ended: false } => Ok(Step::Wait),
            Source::Memory => {
                self.offset += max as u64;
                Ok(Step::Data)
            }
            Source::File => self.read_file(max, out).await,
        }
    }

    async fn read_file(&mut self, max: usize, out: &mut Vec<u8>) -> Result<Step, ApiError> {
        let file = self.open()?;
        let before = out.len();
        let failed = |e: Errno| internal("a command's output cannot be read", &std::io::Error::from(e));
        match read_cached(&file, max, self.offset, out) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                let (offset, mut taken) = (self.offset, std::mem::take(out));
                let read = tokio::task::spawn_blocking(move || {
                    taken.reserve(max);
                    let mut part = Vec::with_capacity(max);
                    let read = rustix::io::pread(&*file, rustix::buffer::spare_capacity(&mut part), offset);
                    taken.extend_from_slice(&part);
                    (read, taken)
                });
                let (read, taken) = read.await.map_err(|e| internal("a read was given up", &e))?;
                *out = taken;
                read.map_err(failed)?;
            }
            Err(errno) => return Err(failed(errno)),
        }
        let got = (out.len() - before) as u64;
        if got == 0 {
            return Err(ApiError::new(
                ErrorKind::Internal,
                "a command's output file is shorter than its record",
            ));
        }
        // A terminal's oldest output may have gone while it was read; then what was read is holes.
        let start = self.exec.facts().stream(self.which).start;
        if start > self.offset {
            out.truncate(before);
            self.offset = start;
            return Ok(Step::Gap { to: start });
        }
        self.offset += got;
        Ok(Step::Data)
    }

    fn open(&mut self) -> Result<Arc<File>, ApiError> {
        if let Some(file) = &self.file {
            return Ok(Arc::clone(file));
        }
        let path = self.exec.spool_file(self.which);
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
        let file = File::options().read(true).custom_flags(flags.bits() as i32).open(&path);
        let file = Arc::new(file.map_err(|e| internal("a command's output file cannot be opened", &e))?);
        self.file = Some(Arc::clone(&file));
        Ok(file)
    }
}

/// Reads what lies in the page cache; `AGAIN` when the disk would have to be waited for.
fn read_cached(file: &File, max: usize, offset: u64, out: &mut Vec<u8>) -> Result<(), Errno> {
    let before = out.len();
    out.resize(before + max, 0);
    let read =
        rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut out[before..])], offset, ReadWriteFlags::NOWAIT);
    out.truncate(before + read.unwrap_or(0));
    read.map(|_| ())
}

/// The first `limit` bytes of a stream that are kept now.
///
/// # Errors
/// As [`StreamReader::step`].
pub async fn first_bytes(exec: &Arc<Exec>, which: Which, limit: u64) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::new();
    if exec.facts().stream(which).kept == 0 {
        return Ok(out);
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut reader = StreamReader::new(exec, which, 0);
    while out.len() < limit {
        match reader.step((limit - out.len()).min(CHUNK), &mut out).await? {
            Step::Data | Step::Gap { .. } => {}
            Step::Wait | Step::End => break,
        }
    }
    Ok(out)
}
