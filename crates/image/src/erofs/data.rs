//! Where the content of files lies, and what takes it in.

use std::io::{self, Read};

use super::BLOCK_SIZE;

/// Where a regular file's content lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileData {
    /// Length of the file in bytes.
    pub(crate) size: u64,
    /// First block of the content.
    pub(crate) start: u32,
    /// Blocks the content takes.
    pub(crate) blocks: u32,
    /// In which blob of the layer, counted from 1; 0 for a file without content. As in the format.
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
        Self { size: 0, start: 0, blocks: 0, device: 0, chunks: None }
    }

    /// Content in a blob, without holes.
    pub(crate) fn dense(size: u64, start: u32, device: u16) -> Self {
        let blocks = size.div_ceil(BLOCK_SIZE) as u32;
        Self { size, start, blocks, device, chunks: None }
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
pub(crate) struct Segment {
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

/// What takes file content in.
pub(crate) trait ContentStore {
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
