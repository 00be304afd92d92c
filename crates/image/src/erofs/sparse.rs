//! How files with holes are cut into chunks.

use super::BLOCK_SIZE;
use super::data::{AppendError, Segment};
use super::format::BLOCK_BITS;

/// A chunk map has at most this many entries (16 MiB of them); bigger files get bigger chunks.
pub(super) const CHUNKS_MAX: u64 = 4 << 20;
/// `EROFS_CHUNK_FORMAT_BLKBITS_MASK`.
pub(crate) const CHUNK_BITS_MAX: u8 = 31;

pub(super) fn check_segments(size: u64, segments: &[Segment]) -> Result<(), AppendError> {
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
pub(super) struct ChunkPlan {
    /// log2 of the chunk size in bytes.
    pub(super) shift: u8,
    /// Entries in the map.
    pub(super) chunks: u64,
    /// Bytes in the data area.
    pub(super) stored: u64,
}

impl ChunkPlan {
    /// The cheapest cut, unless none is possible.
    pub(super) fn best(size: u64, segments: &[Segment]) -> Option<Self> {
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
    pub(super) fn stored_chunk(&self, size: u64, chunk: u64) -> u64 {
        let start = chunk << self.shift;
        (size - start).min(1 << self.shift).next_multiple_of(BLOCK_SIZE)
    }
}
