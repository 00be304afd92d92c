//! What an earlier pack of the same directory stored, so that the next one reads only what changed.
//!
//! ```text
//! "DSECPRV1"  blobs u32  files u32                                   little-endian throughout
//! blobs x     id [32]    blocks u32
//! files x     inode u64  size u64  mtime, ctime (i64, u32)  hash [32]
//!             blob u32  start u32  blocks u32  bits u8  chunks u32  chunks x offset u32
//! ```
//! A file with holes has a chunk map and no hash (zeros). The highest of the bits says that it has no attributes.

use std::collections::HashMap;

use crate::erofs::{BLOCK_SIZE, BlobRef, CHUNK_BITS_MAX, ChunkMap, FileData, NULL_ADDR, Timestamp};
use crate::layer::{BlobId, Digest};

const MAGIC: &[u8; 8] = b"DSECPRV1";
/// In the bits of a file: it has no attributes. A chunk map's own are fewer.
const PLAIN: u8 = 0x80;
const _: () = assert!(CHUNK_BITS_MAX < PLAIN);
/// File times are those of the kernel's last timer tick, at most 10 ms old: a file that changed so shortly before the
/// last change of all can have changed again, after it was read, without its times telling. Twice that, to be sure.
const TICK_NS: i128 = 20_000_000;

/// Why bytes are not such a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the table of an earlier pack: {0}")]
pub struct PreviousError(pub &'static str);

/// What tells that a file has not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) size: u64,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
}

/// A file as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) stamp: Stamp,
    pub(crate) hash: Option<Digest>,
    /// Where it is; the device is one more than the number of the blob.
    pub(crate) data: FileData,
    /// It has no extended attribute that a layer keeps. Setting one changes its change time.
    pub(crate) is_plain: bool,
}

/// The files of an earlier pack, by inode number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Previous {
    blobs: Vec<BlobRef>,
    files: HashMap<u64, Kept>,
}

impl Previous {
    /// A table of `files` of a tree with these blobs, of which some that changed last are left out.
    pub(crate) fn new(blobs: Vec<BlobRef>, mut files: HashMap<u64, Kept>, last_change: Timestamp) -> Self {
        let ns = |time: Timestamp| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
        files.retain(|_, kept| ns(kept.stamp.ctime) + TICK_NS <= ns(last_change));
        Self { blobs, files }
    }

    /// The content of the file with this inode number, if it has not changed.
    pub(crate) fn find(&self, inode: u64, stamp: &Stamp) -> Option<(BlobRef, &Kept)> {
        let kept = self.files.get(&inode).filter(|kept| kept.stamp == *stamp)?;
        let blob = usize::from(kept.data.device).checked_sub(1)?;
        Some((*self.blobs.get(blob)?, kept))
    }

    /// Without the files in blobs that `kept` says no to: what the layer of that pack does not keep may be gone.
    #[must_use]
    pub fn within(mut self, kept: impl Fn(&BlobRef) -> bool) -> Self {
        let kept: Vec<bool> = self.blobs.iter().map(kept).collect();
        self.files.retain(|_, file| kept.get(usize::from(file.data.device) - 1) == Some(&true));
        self
    }

    /// How many files it knows.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether it knows none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        put(&(self.blobs.len() as u32).to_le_bytes());
        put(&(self.files.len() as u32).to_le_bytes());
        for blob in &self.blobs {
            put(blob.id.0.as_bytes());
            put(&blob.blocks.to_le_bytes());
        }
        let mut files: Vec<_> = self.files.iter().collect();
        files.sort_unstable_by_key(|(inode, _)| **inode);
        for (inode, Kept { stamp, hash, data, is_plain }) in files {
            put(&inode.to_le_bytes());
            put(&stamp.size.to_le_bytes());
            for time in [stamp.mtime, stamp.ctime] {
                put(&time.seconds.to_le_bytes());
                put(&time.nanoseconds.to_le_bytes());
            }
            put(&hash.map_or([0; 32], |hash| *hash.as_bytes()));
            for number in [u32::from(data.device) - 1, data.start, data.blocks] {
                put(&number.to_le_bytes());
            }
            let (bits, offsets) =
                data.chunks.as_ref().map_or((0, [].as_slice()), |map| (map.bits, &map.offsets));
            put(&[bits | if *is_plain { PLAIN } else { 0 }]);
            put(&(offsets.len() as u32).to_le_bytes());
            offsets.iter().for_each(|offset| put(&offset.to_le_bytes()));
        }
        out
    }

    /// Reads a table, and checks that every file lies in its blob.
    ///
    /// # Errors
    /// It is none, is cut, goes on after its end, or contradicts itself.
    pub fn decode(bytes: &[u8]) -> Result<Self, PreviousError> {
        let mut rest = bytes.strip_prefix(MAGIC).ok_or(PreviousError("it does not begin as one"))?;
        let table = read(&mut rest).ok_or(PreviousError("it is cut or contradicts itself"))?;
        if rest.is_empty() { Ok(table) } else { Err(PreviousError("it goes on after its end")) }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*bytes)
}

fn u32_of(rest: &mut &[u8]) -> Option<u32> {
    take(rest).map(u32::from_le_bytes)
}

fn u64_of(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}

fn time_of(rest: &mut &[u8]) -> Option<Timestamp> {
    let (seconds, nanoseconds) = (u64_of(rest)? as i64, u32_of(rest)?);
    (nanoseconds < 1_000_000_000).then_some(Timestamp { seconds, nanoseconds })
}

fn read(rest: &mut &[u8]) -> Option<Previous> {
    let (blob_count, file_count) = (u32_of(rest)?, u32_of(rest)?);
    let mut table = Previous::default();
    for _ in 0..blob_count {
        table.blobs.push(BlobRef { id: BlobId(Digest::from_bytes(take(rest)?)), blocks: u32_of(rest)? });
    }
    for _ in 0..file_count {
        let inode = u64_of(rest)?;
        let stamp = Stamp { size: u64_of(rest)?, mtime: time_of(rest)?, ctime: time_of(rest)? };
        let hash: [u8; 32] = take(rest)?;
        let (blob, start, blocks) = (u32_of(rest)?, u32_of(rest)?, u32_of(rest)?);
        let [bits] = take(rest)?;
        let (bits, is_plain) = (bits & !PLAIN, bits & PLAIN != 0);
        let chunks = read_chunks(rest, stamp.size, bits, blocks)?;
        let dense_blocks = stamp.size.div_ceil(BLOCK_SIZE);
        let end = u64::from(start) + u64::from(blocks);
        if end > u64::from(table.blobs.get(blob as usize)?.blocks)
            || (chunks.is_none() && dense_blocks != u64::from(blocks))
        {
            return None;
        }
        let hash = (hash != [0; 32]).then(|| Digest::from_bytes(hash));
        let device = u16::try_from(blob + 1).ok()?;
        let data = FileData { size: stamp.size, start, blocks, device, chunks };
        table.files.insert(inode, Kept { stamp, hash, data, is_plain });
    }
    Some(table)
}

/// A chunk map whose chunks lie one after the other, as all do.
fn read_chunks(rest: &mut &[u8], size: u64, bits: u8, blocks: u32) -> Option<Option<Box<ChunkMap>>> {
    let count = u32_of(rest)?;
    if count == 0 {
        return Some(None);
    }
    let chunk = BLOCK_SIZE << Some(bits).filter(|bits| *bits <= CHUNK_BITS_MAX)?;
    let (mut offsets, mut next) = (Vec::new(), 0u64);
    for at in 0..u64::from(count) {
        let offset = u32_of(rest)?;
        if offset != NULL_ADDR {
            (u64::from(offset) == next).then_some(())?;
            next += size.checked_sub(at * chunk)?.min(chunk).div_ceil(BLOCK_SIZE);
        }
        offsets.push(offset);
    }
    let whole = u64::from(count) == size.div_ceil(chunk) && next == u64::from(blocks);
    whole.then(|| Some(Box::new(ChunkMap { bits, offsets })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        let (seconds, rest) = (milliseconds.div_euclid(1000), milliseconds.rem_euclid(1000));
        Timestamp { seconds, nanoseconds: rest as u32 * 1_000_000 }
    }

    fn table() -> Previous {
        let blobs = vec![BlobRef { id: BlobId(Digest::of(b"one")), blocks: 10 }];
        let stamp = |size, ctime| Stamp { size, mtime: at(-1500), ctime: at(ctime) };
        let hash = Some(Digest::of(b"x"));
        let chunks = Some(Box::new(ChunkMap { bits: 1, offsets: vec![NULL_ADDR, 0, NULL_ADDR, 2] }));
        let sparse = FileData { size: 25_000, start: 4, blocks: 3, device: 1, chunks };
        let files = [
            (7, Kept { stamp: stamp(5000, 1000), hash, data: FileData::dense(5000, 2, 1), is_plain: true }),
            (8, Kept { stamp: stamp(25_000, 1000), hash: None, data: sparse, is_plain: true }),
            (9, Kept { stamp: stamp(1, 1990), hash, data: FileData::dense(1, 9, 1), is_plain: false }),
        ];
        Previous::new(blobs, files.into(), at(2000))
    }

    #[test]
    fn a_file_is_found_while_nothing_of_it_changed() {
        let table = Previous::decode(&table().encode()).unwrap();
        assert_eq!(table, self::table());
        let stamp = table.files[&7].stamp;
        assert!(table.find(7, &stamp).is_some());
        assert!(table.find(8, &stamp).is_none());
        for changed in [
            Stamp { size: 5001, ..stamp },
            Stamp { mtime: at(0), ..stamp },
            Stamp { ctime: at(1001), ..stamp },
        ] {
            assert!(table.find(7, &changed).is_none());
        }
    }

    #[test]
    fn a_file_that_changed_with_the_last_of_all_is_not_trusted() {
        assert!(!table().files.contains_key(&9));
        assert_eq!(table().len(), 2);
    }

    #[test]
    fn files_in_blobs_that_are_gone_are_forgotten() {
        let table = table();
        assert_eq!(table.clone().within(|blob| blob.blocks == 10), table);
        assert!(table.within(|_| false).is_empty());
    }

    #[test]
    fn a_cut_a_longer_and_a_lying_table_are_refused() {
        let good = table().encode();
        for end in 0..good.len() {
            assert!(Previous::decode(&good[..end]).is_err(), "cut at {end}");
        }
        assert!(Previous::decode(&[good.as_slice(), b"x"].concat()).is_err());
        let first = 16 + 36;
        let (blob, start) = (first + 8 + 8 + 24 + 32, first + 8 + 8 + 24 + 36);
        for at in [blob, start] {
            let mut bad = good.clone();
            bad[at] = 9;
            assert!(Previous::decode(&bad).is_err(), "{at}");
        }
    }
}
