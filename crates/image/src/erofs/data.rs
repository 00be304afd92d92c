//! The data area: file content, written to its final place while it streams in.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use flate2::Crc;

use super::BLOCK_SIZE;
use super::format::{BLOCK_BITS, NULL_ADDR};
use super::tree::{Content, InodeId, Tree};

/// Content is gathered into writes of this size: large enough that a call's cost vanishes, small
/// enough to stay in the CPU's cache.
const BUFFER: usize = 1 << 20;
/// Gaps up to this size inside a stored chunk are written as zeros, larger ones are skipped over.
const ZERO_FILL_MAX: u64 = 64 << 10;
/// A chunk map has at most this many entries (16 MiB of them); bigger files get bigger chunks.
const CHUNKS_MAX: u64 = 4 << 20;
/// `EROFS_CHUNK_FORMAT_BLKBITS_MASK`.
const CHUNK_BITS_MAX: u8 = 31;

/// Where a regular file's content lies in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileData {
    /// Length of the file in bytes.
    pub(crate) size: u64,
    /// First block of the content.
    pub(crate) start: u32,
    /// Blocks the content takes.
    pub(crate) blocks: u32,
    /// CRC-32 of the stored bytes: the content's part in the image's UUID.
    pub(crate) checksum: u32,
    /// Set for files with holes.
    pub(crate) chunks: Option<Box<ChunkMap>>,
}

/// The chunks of a file with holes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkMap {
    /// log2 of the blocks in a chunk.
    pub(crate) bits: u8,
    /// Per chunk its first block, counted from the file's start; [`NULL_ADDR`] for a hole.
    pub(crate) offsets: Vec<u32>,
}

impl FileData {
    /// Length of the file in bytes, holes included.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes the file takes in the data area.
    pub fn stored_bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_SIZE
    }
}

/// A stretch of a sparse file that has content; the rest of the file is holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where in the file it begins.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: u64,
}

/// Why content could not be appended.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The content's source failed.
    #[error("the content cannot be read")]
    Read(#[source] io::Error),
    /// The content's source ended early.
    #[error("the content ends {missing} bytes early")]
    Short {
        /// How many bytes are missing.
        missing: u64,
    },
    /// The image file cannot be written.
    #[error("the image file cannot be written")]
    Write(#[source] io::Error),
    /// The image would have more than 2^32 blocks (16 TiB).
    #[error("the image would be larger than 16 TiB")]
    TooLarge,
    /// A sparse file would take more bytes than there is room for.
    #[error("the file takes more than the {room} bytes there is room for")]
    NoRoom {
        /// Bytes there is room for.
        room: u64,
    },
    /// Segments overlap, are out of order or reach past the file's end.
    #[error("the sparse map is not in order")]
    BadSegments,
}

/// The image file while content is appended to it. Block 0 stays free for the superblock.
#[derive(Debug)]
pub struct DataArea {
    file: File,
    /// Where the buffer will be written; the file's own position.
    flushed: u64,
    buffer: Vec<u8>,
    used: usize,
}

impl DataArea {
    /// Creates the image file, which must not be there yet.
    ///
    /// # Errors
    /// Whatever creating a file can meet.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.seek(SeekFrom::Start(BLOCK_SIZE))?;
        Ok(Self { file, flushed: BLOCK_SIZE, buffer: vec![0; BUFFER], used: 0 })
    }

    /// Bytes of the image so far, block 0 included.
    pub fn position(&self) -> u64 {
        self.flushed + self.used as u64
    }

    /// Appends a file of `size` bytes from `source`. `tick` is called after every piece with its
    /// length.
    ///
    /// # Errors
    /// [`AppendError`]; what was written is then garbage at the end of the area.
    pub fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let start = self.block()?;
        let mut crc = Crc::new();
        self.copy(source, size, &mut crc, tick)?;
        self.align().map_err(AppendError::Write)?;
        let blocks = self.block()? - start;
        Ok(FileData { size, start, blocks, checksum: crc.sum(), chunks: None })
    }

    /// Appends a file of `size` bytes of which only `segments` have content, which `source` gives
    /// one after the other. The chunk size is the one for which map and stored chunks together
    /// are smallest. At most `room` bytes are stored.
    ///
    /// # Errors
    /// [`AppendError`]; [`AppendError::NoRoom`] before anything of the file is written.
    pub fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        check_segments(size, segments)?;
        let plan = ChunkPlan::best(size, segments).ok_or(AppendError::TooLarge)?;
        if plan.stored.saturating_add(plan.chunks * 4) > room {
            return Err(AppendError::NoRoom { room });
        }
        let start = self.block()?;
        let base = self.position();
        let mut offsets = vec![NULL_ADDR; plan.chunks as usize];
        let mut crc = Crc::new();
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
                self.copy(source, piece, &mut crc, tick)?;
                at += piece;
            }
        }
        self.zero_until(base + (next_offset << BLOCK_BITS)).map_err(AppendError::Write)?;
        let blocks = self.block()? - start;
        let chunks = Some(Box::new(ChunkMap { bits: plan.shift - BLOCK_BITS, offsets }));
        Ok(FileData { size, start, blocks, checksum: crc.sum(), chunks })
    }

    /// Copies what `tree` still uses into the new file `path`, in the same order, and points the
    /// tree there. The old area is dropped; deleting its file is the caller's part.
    ///
    /// # Errors
    /// Reading or writing failed; the tree is then of no use.
    pub fn compacted(mut self, tree: &mut Tree, path: &Path) -> io::Result<Self> {
        self.flush()?;
        let mut live: Vec<(u32, u32, InodeId)> = tree
            .iter()
            .filter_map(|(id, inode)| match &inode.content {
                Content::File(data) if data.blocks > 0 => Some((data.start, data.blocks, id)),
                _ => None,
            })
            .collect();
        live.sort_unstable();
        let mut new = Self::create(path)?;
        let mut rest = live.as_slice();
        while let Some((first, ..)) = rest.first() {
            let mut end = *first;
            let run = rest.iter().take_while(|(start, blocks, _)| {
                let joined = *start == end;
                if joined {
                    end += blocks;
                }
                joined
            });
            let count = run.count();
            for (start, _, id) in &rest[..count] {
                if let Some(data) = tree.file_data_mut(*id) {
                    data.start = (new.flushed >> BLOCK_BITS) as u32 + (start - first);
                }
            }
            let bytes = u64::from(end - first) << BLOCK_BITS;
            self.file.seek(SeekFrom::Start(u64::from(*first) << BLOCK_BITS))?;
            // Between two files this is `copy_file_range`.
            let copied = io::copy(&mut Read::by_ref(&mut self.file).take(bytes), &mut new.file)?;
            // The last chunk may end in a hole that the file has not been extended over.
            new.flushed += copied;
            new.skip_to(new.flushed + (bytes - copied))?;
            rest = &rest[count..];
        }
        Ok(new)
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
        crc: &mut Crc,
        tick: &mut dyn FnMut(u64),
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
                    crc.update(&target[..got]);
                    self.used += got;
                    left -= got as u64;
                    tick(got as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(AppendError::Read(e)),
            }
        }
        Ok(())
    }

    fn align(&mut self) -> io::Result<()> {
        self.zero_until(self.position().next_multiple_of(BLOCK_SIZE))
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
}

fn check_segments(size: u64, segments: &[Segment]) -> Result<(), AppendError> {
    let mut end = 0;
    for segment in segments {
        let next = segment.offset.checked_add(segment.len).filter(|next| *next <= size);
        match next {
            Some(next) if segment.offset >= end => end = next,
            _ => return Err(AppendError::BadSegments),
        }
    }
    Ok(())
}

/// How a file with holes is cut.
struct ChunkPlan {
    /// log2 of the chunk size in bytes.
    shift: u8,
    /// Entries in the map.
    chunks: u64,
    /// Bytes in the data area.
    stored: u64,
}

impl ChunkPlan {
    /// The cheapest cut, unless none is possible.
    fn best(size: u64, segments: &[Segment]) -> Option<Self> {
        (BLOCK_BITS..=BLOCK_BITS + CHUNK_BITS_MAX)
            .map(|shift| Self::with(size, segments, shift))
            .filter(|plan| plan.chunks <= CHUNKS_MAX)
            .min_by_key(|plan| plan.stored.saturating_add(plan.chunks * 4))
    }

    fn with(size: u64, segments: &[Segment], shift: u8) -> Self {
        let mut plan = Self { shift, chunks: size.div_ceil(1 << shift), stored: 0 };
        let mut next = 0;
        for segment in segments.iter().filter(|segment| segment.len > 0) {
            let first = (segment.offset >> shift).max(next);
            let last = (segment.offset + segment.len - 1) >> shift;
            if first > last {
                continue;
            }
            let stored = (last - first) * (1 << shift) + plan.stored_chunk(size, last);
            plan.stored = plan.stored.saturating_add(stored);
            next = last + 1;
        }
        plan
    }

    /// Bytes stored for a chunk: all of it, or up to the block in which the file ends.
    fn stored_chunk(&self, size: u64, chunk: u64) -> u64 {
        let start = chunk << self.shift;
        (size - start).min(1 << self.shift).next_multiple_of(BLOCK_SIZE)
    }
}

#[cfg(test)]
#[path = "data/tests.rs"]
mod tests;
