//! The data area of a self-contained image: file content, written to its final place while it streams in.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::Crc;

use super::BLOCK_SIZE;
use super::area::{Area, Extent, Passing};
use super::format::BLOCK_BITS;
use super::tree::{Content, InodeId, Tree};

/// Where a regular file's content lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileData {
    /// Length of the file in bytes.
    pub(crate) size: u64,
    /// First block of the content.
    pub(crate) start: u32,
    /// Blocks the content takes.
    pub(crate) blocks: u32,
    /// CRC-32 of the stored bytes: the content's part in a self-contained image's UUID. Zero for content in a blob.
    pub(crate) checksum: u32,
    /// 0: in the image itself; n: in the n-th blob of the layer, counted from 1. As in the format.
    pub(crate) device: u16,
    /// Set for files with holes.
    pub(crate) chunks: Option<Box<ChunkMap>>,
}

/// The chunks of a file with holes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkMap {
    /// log2 of the blocks in a chunk.
    pub(crate) bits: u8,
    /// Per chunk its first block, counted from the file's start; [`super::format::NULL_ADDR`] for a hole.
    pub(crate) offsets: Vec<u32>,
}

impl FileData {
    /// A file without content.
    pub(crate) fn empty() -> Self {
        Self { size: 0, start: 0, blocks: 0, checksum: 0, device: 0, chunks: None }
    }

    /// Content in a blob, without holes.
    pub(crate) fn dense(size: u64, start: u32, device: u16) -> Self {
        let blocks = size.div_ceil(BLOCK_SIZE) as u32;
        Self { size, start, blocks, checksum: 0, device, chunks: None }
    }

    /// Length of the file in bytes, holes included.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes the file takes where its content is.
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
    /// The file that holds content cannot be written.
    #[error("the file that holds it cannot be written")]
    Write(#[source] io::Error),
    /// There would be more than 2^32 blocks (16 TiB).
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
    /// A finished pack could not be handed over.
    #[error("a finished pack cannot be stored")]
    Pack(#[source] io::Error),
}

/// What takes file content in: an image's own data area or a blob.
pub trait ContentStore {
    /// Appends a file of `size` bytes from `source`. `tick` is called after every piece with its
    /// length.
    ///
    /// # Errors
    /// [`AppendError`]; what was written is then garbage at the end.
    fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError>;

    /// Appends a file of `size` bytes of which only `segments` have content, which `source` gives
    /// one after the other. At most `room` bytes are stored.
    ///
    /// # Errors
    /// [`AppendError`]; [`AppendError::NoRoom`] before anything of the file is written.
    fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError>;
}

/// The image file while content is appended to it. Block 0 stays free for the superblock.
#[derive(Debug)]
pub struct DataArea(Area);

impl ContentStore for DataArea {
    fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let mut crc = Crc::new();
        let mut passing = Passing { seen: &mut |bytes| crc.update(bytes), tick };
        let Extent { start, blocks } = self.0.append(source, size, &mut passing)?;
        Ok(FileData { size, start, blocks, checksum: crc.sum(), device: 0, chunks: None })
    }

    fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let mut crc = Crc::new();
        let mut passing = Passing { seen: &mut |bytes| crc.update(bytes), tick };
        let (Extent { start, blocks }, chunks) =
            self.0.append_sparse(source, size, segments, room, &mut passing)?;
        let chunks = Some(Box::new(chunks));
        Ok(FileData { size, start, blocks, checksum: crc.sum(), device: 0, chunks })
    }
}

impl DataArea {
    /// Creates the image file, which must not be there yet.
    ///
    /// # Errors
    /// Whatever creating a file can meet.
    pub fn create(path: &Path) -> io::Result<Self> {
        Area::create(path, BLOCK_SIZE).map(Self)
    }

    /// Bytes of the image so far, block 0 included.
    pub fn position(&self) -> u64 {
        self.0.position()
    }

    /// Copies what `tree` still uses into the new file `path`, in the same order, and points the
    /// tree there. The old area is dropped; deleting its file is the caller's part.
    ///
    /// # Errors
    /// Reading or writing failed; the tree is then of no use.
    pub fn compacted(mut self, tree: &mut Tree, path: &Path) -> io::Result<Self> {
        self.0.flush()?;
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
                    data.start = (new.position() >> BLOCK_BITS) as u32 + (start - first);
                }
            }
            let mut file = self.0.file();
            file.seek(SeekFrom::Start(u64::from(*first) << BLOCK_BITS))?;
            new.0.copy_file(file, u64::from(end - first) << BLOCK_BITS)?;
            rest = &rest[count..];
        }
        Ok(new)
    }

    /// Flushes and hands over the file, with its length in bytes (a whole number of blocks).
    pub(crate) fn into_file(self) -> io::Result<(File, u64)> {
        self.0.into_file()
    }
}

#[cfg(test)]
#[path = "data/tests.rs"]
mod tests;
