//! Which content is in which blob: how a file that is already stored is found again.
//!
//! ```text
//! "DSECFIL1"  blobs u32  files u32                  little-endian throughout
//! blobs x     id [32]    blocks u32
//! files x     hash [32]  size u64  blob u32  start u32     sorted by hash
//! ```

use std::collections::HashMap;
use std::sync::Arc;

use crate::erofs::{BLOCK_SIZE, BlobRef};
use crate::layer::{BlobId, Digest};

const MAGIC: &[u8; 8] = b"DSECFIL1";
const HEAD: usize = 16;
const BLOB_RECORD: usize = 36;
const FILE_RECORD: usize = 48;

/// Why bytes are not a file index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a file index: {0}")]
pub struct FileIndexError(pub &'static str);

/// Where a file's content lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePlace {
    /// In which blob.
    pub blob: BlobRef,
    /// From which block on.
    pub start: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    hash: Digest,
    size: u64,
    blob: u32,
    start: u32,
}

/// The files of a layer by the BLAKE3 of their content. Files with holes are not in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileIndex {
    blobs: Vec<BlobRef>,
    files: Vec<Entry>,
}

impl FileIndex {
    /// An index of `files`: hash, length in bytes, number of the blob in `blobs`, first block. Of several places of
    /// one content, one is kept.
    pub(crate) fn new(blobs: Vec<BlobRef>, files: impl IntoIterator<Item = (Digest, u64, u32, u32)>) -> Self {
        let entry = |(hash, size, blob, start)| Entry { hash, size, blob, start };
        let mut files: Vec<_> = files.into_iter().map(entry).collect();
        files.sort_unstable();
        files.dedup_by_key(|entry| (entry.hash, entry.size));
        Self { blobs, files }
    }

    /// One index of several. Of several places of one content, one of the first index that has it is kept.
    pub fn joined<'a>(indexes: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut joined = Self::default();
        let mut numbers: HashMap<BlobId, u32> = HashMap::new();
        for index in indexes {
            let own: Vec<u32> = index
                .blobs
                .iter()
                .map(|blob| {
                    *numbers.entry(blob.id).or_insert_with(|| {
                        joined.blobs.push(*blob);
                        joined.blobs.len() as u32 - 1
                    })
                })
                .collect();
            joined
                .files
                .extend(index.files.iter().map(|entry| Entry { blob: own[entry.blob as usize], ..*entry }));
        }
        // Stable, so that the first index stays first.
        joined.files.sort_by_key(|entry| (entry.hash, entry.size));
        joined.files.dedup_by_key(|entry| (entry.hash, entry.size));
        joined
    }

    /// Where content with this hash and length lies.
    pub fn find(&self, hash: &Digest, size: u64) -> Option<FilePlace> {
        let at = self.files.binary_search_by(|entry| (&entry.hash, entry.size).cmp(&(hash, size))).ok()?;
        let entry = self.files[at];
        Some(FilePlace { blob: self.blobs[entry.blob as usize], start: entry.start })
    }

    /// Without the files in blobs that `kept` says no to.
    #[must_use]
    pub fn within(mut self, kept: impl Fn(&BlobRef) -> bool) -> Self {
        let kept: Vec<bool> = self.blobs.iter().map(kept).collect();
        self.files.retain(|entry| kept[entry.blob as usize]);
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
        let mut out =
            Vec::with_capacity(HEAD + self.blobs.len() * BLOB_RECORD + self.files.len() * FILE_RECORD);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(self.blobs.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.files.len() as u32).to_le_bytes());
        for blob in &self.blobs {
            out.extend_from_slice(blob.id.0.as_bytes());
            out.extend_from_slice(&blob.blocks.to_le_bytes());
        }
        for entry in &self.files {
            out.extend_from_slice(entry.hash.as_bytes());
            out.extend_from_slice(&entry.size.to_le_bytes());
            out.extend_from_slice(&entry.blob.to_le_bytes());
            out.extend_from_slice(&entry.start.to_le_bytes());
        }
        out
    }

    /// Reads an index, and checks that it is in order and every file lies in its blob.
    ///
    /// # Errors
    /// It is none, is cut, goes on after its end, or contradicts itself.
    pub fn decode(bytes: &[u8]) -> Result<Self, FileIndexError> {
        let cut = FileIndexError("its length does not fit its counts");
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or(cut)?;
        if &head[..8] != MAGIC {
            return Err(FileIndexError("it does not begin as one"));
        }
        let (blobs, files) = (number(head, 8) as usize, number(head, 12) as usize);
        let (blobs, rest) = rest.split_at_checked(blobs * BLOB_RECORD).ok_or(cut)?;
        if rest.len() != files * FILE_RECORD {
            return Err(cut);
        }
        let blobs: Vec<_> = blobs
            .chunks_exact(BLOB_RECORD)
            .map(|raw| BlobRef { id: BlobId(digest(raw)), blocks: number(raw, 32) })
            .collect();
        let entry = |raw: &[u8]| Entry {
            hash: digest(raw),
            size: u64::from(number(raw, 32)) | (u64::from(number(raw, 36)) << 32),
            blob: number(raw, 40),
            start: number(raw, 44),
        };
        let files: Vec<_> = rest.chunks_exact(FILE_RECORD).map(entry).collect();
        if !files.is_sorted_by(|a, b| (a.hash, a.size) < (b.hash, b.size)) {
            return Err(FileIndexError("it is not in order"));
        }
        let lies_in_blob = |entry: &Entry| {
            let end = u64::from(entry.start) + entry.size.div_ceil(BLOCK_SIZE);
            blobs.get(entry.blob as usize).is_some_and(|blob| end <= u64::from(blob.blocks))
        };
        if !files.iter().all(lies_in_blob) {
            return Err(FileIndexError("a file is not in its blob"));
        }
        Ok(Self { blobs, files })
    }
}

/// Layers whose content need not be stored again.
#[derive(Debug, Clone, Default)]
pub struct Donors(Vec<Arc<FileIndex>>);

impl Donors {
    /// The indexes of these layers. The first that has a file is the one it is taken from.
    pub fn new(indexes: Vec<Arc<FileIndex>>) -> Self {
        Self(indexes)
    }

    /// Where content with this hash and length lies.
    pub fn find(&self, hash: &Digest, size: u64) -> Option<FilePlace> {
        self.0.iter().find_map(|index| index.find(hash, size))
    }
}

pub(super) fn number(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

pub(super) fn digest(raw: &[u8]) -> Digest {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(&raw[..32]);
    Digest::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> FileIndex {
        let blob = |name: &[u8]| BlobRef { id: BlobId(Digest::of(name)), blocks: 10 };
        let file = |name: &[u8], size, blob, start| (Digest::of(name), size, blob, start);
        FileIndex::new(
            vec![blob(b"one"), blob(b"two")],
            [file(b"a", 1, 0, 9), file(b"b", 40_960, 1, 0), file(b"a", 1, 1, 3), file(b"c", 4097, 0, 2)],
        )
    }

    #[test]
    fn content_is_found_by_hash_and_length() {
        let index = FileIndex::decode(&index().encode()).unwrap();
        assert_eq!(index, self::index());
        assert_eq!(index.len(), 3);
        let found = index.find(&Digest::of(b"b"), 40_960).unwrap();
        assert_eq!((found.blob.id, found.start), (BlobId(Digest::of(b"two")), 0));
        assert_eq!(index.find(&Digest::of(b"b"), 40_961), None);
        assert_eq!(index.find(&Digest::of(b"d"), 1), None);
    }

    #[test]
    fn a_joined_index_has_the_files_of_all_and_of_one_content_the_first_place() {
        let blob = |name: &[u8]| BlobRef { id: BlobId(Digest::of(name)), blocks: 10 };
        let other = FileIndex::new(
            vec![blob(b"two"), blob(b"three")],
            [(Digest::of(b"a"), 1, 0, 5), (Digest::of(b"d"), 9, 1, 7)],
        );
        let joined = FileIndex::joined([&index(), &other]);
        assert_eq!(FileIndex::decode(&joined.encode()).unwrap(), joined);
        assert_eq!((joined.len(), joined.blobs.len()), (4, 3));
        let place = |name: &[u8], size| joined.find(&Digest::of(name), size).unwrap();
        assert_eq!(place(b"a", 1), index().find(&Digest::of(b"a"), 1).unwrap());
        assert_eq!((place(b"d", 9).blob.id, place(b"d", 9).start), (blob(b"three").id, 7));
    }

    #[test]
    fn files_in_blobs_that_are_not_kept_are_left_out() {
        let two = BlobId(Digest::of(b"two"));
        let index = index().within(|blob| blob.id == two);
        assert_eq!(index.len(), 1);
        assert_eq!(index.find(&Digest::of(b"b"), 40_960).unwrap().blob.id, two);
    }

    #[test]
    fn a_cut_a_longer_and_a_lying_index_are_refused() {
        let good = index().encode();
        for end in 0..good.len() {
            assert!(FileIndex::decode(&good[..end]).is_err(), "cut at {end}");
        }
        assert!(FileIndex::decode(&[good.as_slice(), b"x"].concat()).is_err());
        // The first file's blob, its start, and its hash, which puts it out of order.
        let first = HEAD + 2 * BLOB_RECORD;
        for (at, byte) in [(first + 40, 2), (first + 44, 10), (first, 255)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(FileIndex::decode(&bad).is_err(), "{at}");
        }
    }
}
