//! File content on its way to its final place: a file that is appended to, block by block.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::BLOCK_SIZE;
use super::data::{AppendError, ChunkMap, Segment};
use super::format::{BLOCK_BITS, NULL_ADDR};
use super::sparse::{ChunkPlan, check_segments};

/// Content is gathered into writes of this size: large enough that a call's cost vanishes, small
/// enough to stay in the CPU's cache.
const BUFFER: usize = 1 << 20;
/// Gaps up to this size inside a stored chunk are written as zeros, larger ones are skipped over.
const ZERO_FILL_MAX: u64 = 64 << 10;

/// Where one file's content went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// First block.
    pub(crate) start: u32,
    /// How many.
    pub(crate) blocks: u32,
}

/// What is told of content while it passes.
pub(crate) struct Passing<'a> {
    /// Sees every byte, in order.
    pub(crate) seen: &'a mut dyn FnMut(&[u8]),
    /// Called after every piece with its length.
    pub(crate) tick: &'a mut dyn FnMut(u64),
}

/// A file that content is appended to, each file's beginning on a block.
#[derive(Debug)]
pub(crate) struct Area {
    file: File,
    /// Where the buffer will be written; the file's own position.
    flushed: u64,
    buffer: Vec<u8>,
    used: usize,
}

impl Area {
    /// Creates the file, which must not be there yet.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        Ok(Self { file, flushed: 0, buffer: vec![0; BUFFER], used: 0 })
    }

    /// Length so far.
    pub(crate) fn position(&self) -> u64 {
        self.flushed + self.used as u64
    }

    /// Length of what has reached the file.
    pub(crate) fn flushed(&self) -> u64 {
        self.flushed
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Appends a file of `size` bytes.
    pub(crate) fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        passing: &mut Passing<'_>,
    ) -> Result<Extent, AppendError> {
        let start = self.block()?;
        self.copy(source, size, passing)?;
        self.zero_until(self.position().next_multiple_of(BLOCK_SIZE)).map_err(AppendError::Write)?;
        Ok(Extent { start, blocks: self.block()? - start })
    }

    /// Appends a file of which only `segments` have content. The chunk size is the one for which map and stored
    /// chunks together are smallest. At most `room` bytes are stored.
    pub(crate) fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        passing: &mut Passing<'_>,
    ) -> Result<(Extent, ChunkMap), AppendError> {
        check_segments(size, segments)?;
        let plan = ChunkPlan::best(size, segments).ok_or(AppendError::TooLarge)?;
        if plan.stored.saturating_add(plan.chunks * 4) > room {
            return Err(AppendError::NoRoom { room });
        }
        let start = self.block()?;
        let base = self.position();
        let mut offsets = vec![NULL_ADDR; plan.chunks as usize];
        let mut next_offset = 0u64;
        for segment in segments.iter().filter(|segment| segment.len > 0) {
            let (mut at, end) = (segment.offset, segment.offset + segment.len);
            while at < end {
                let chunk = (at >> plan.shift) as usize;
                if offsets[chunk] == NULL_ADDR {
                    offsets[chunk] = u32::try_from(next_offset).map_err(|_| AppendError::TooLarge)?;
                    next_offset += plan.stored_chunk(size, chunk as u64).div_ceil(BLOCK_SIZE);
                }
                let piece = (end - at).min(((chunk as u64 + 1) << plan.shift) - at);
                let inside = at - ((chunk as u64) << plan.shift);
                let target = base + (u64::from(offsets[chunk]) << BLOCK_BITS) + inside;
                self.zero_until(target).map_err(AppendError::Write)?;
                self.copy(source, piece, passing)?;
                at += piece;
            }
        }
        self.zero_until(base + (next_offset << BLOCK_BITS)).map_err(AppendError::Write)?;
        let extent = Extent { start, blocks: self.block()? - start };
        Ok((extent, ChunkMap { bits: plan.shift - BLOCK_BITS, offsets }))
    }

    /// Takes back everything from the byte `mark` on, which must be an earlier [`Self::position`].
    pub(crate) fn roll_back(&mut self, mark: u64) -> io::Result<()> {
        if let Some(kept) = mark.checked_sub(self.flushed) {
            self.used = kept as usize;
            return Ok(());
        }
        self.used = 0;
        self.file.set_len(mark)?;
        self.skip_to(mark)
    }

    /// Passes over bytes, which stay a hole.
    fn skip_to(&mut self, target: u64) -> io::Result<()> {
        self.flushed = target;
        self.file.seek(SeekFrom::Start(target)).map(drop)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer[..self.used])?;
        self.flushed += self.used as u64;
        self.used = 0;
        Ok(())
    }

    /// Flushes and hands over the file, with its length in bytes (a whole number of blocks).
    pub(crate) fn into_file(mut self) -> io::Result<(File, u64)> {
        self.flush()?;
        Ok((self.file, self.flushed))
    }

    fn block(&self) -> Result<u32, AppendError> {
        // The last address is the format's null.
        u32::try_from(self.position() >> BLOCK_BITS)
            .ok()
            .filter(|block| *block != NULL_ADDR)
            .ok_or(AppendError::TooLarge)
    }

    fn copy(
        &mut self,
        source: &mut dyn Read,
        len: u64,
        passing: &mut Passing<'_>,
    ) -> Result<(), AppendError> {
        let mut left = len;
        while left > 0 {
            if self.used == BUFFER {
                self.flush().map_err(AppendError::Write)?;
            }
            let most = (BUFFER - self.used).min(usize::try_from(left).unwrap_or(BUFFER));
            let target = &mut self.buffer[self.used..self.used + most];
            match source.read(target) {
                Ok(0) => return Err(AppendError::Short { missing: left }),
                Ok(got) => {
                    (passing.seen)(&target[..got]);
                    self.used += got;
                    left -= got as u64;
                    (passing.tick)(got as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(AppendError::Read(e)),
            }
        }
        Ok(())
    }

    fn zero_until(&mut self, target: u64) -> io::Result<()> {
        let gap = target - self.position();
        if gap > ZERO_FILL_MAX {
            self.flush()?;
            return self.skip_to(target);
        }
        let mut gap = gap as usize;
        while gap > 0 {
            if self.used == BUFFER {
                self.flush()?;
            }
            let piece = gap.min(BUFFER - self.used);
            self.buffer[self.used..self.used + piece].fill(0);
            self.used += piece;
            gap -= piece;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "area/tests.rs"]
mod tests;
