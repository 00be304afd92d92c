//! Writes the content of a layer into a blob, unless it is stored already.
//!
//! ```text
//! content ──► plain file (at its place) ──► hash known? ── yes ──► taken back, pointed at where it is
//!                                                └─ no ──► settled ──► groups, packs (see `pack`)
//! ```

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use blake3::Hasher;

use crate::erofs::{
    AppendError, Area, BLOBS_MAX, BLOCK_SIZE, BlobRef, ContentStore, Extent, FileData, NULL_ADDR, Passing,
    Segment, device,
};
use crate::layer::{BlobId, BlobIndex, Digest};

use super::files::{Donors, FileIndex};
use super::pack::{PackSink, Packer};

/// The number by which a tree under construction points into its own new blob, which has no id yet.
const OWN: u16 = 1;

/// A blob that has been written.
#[derive(Debug, Clone)]
pub struct BuiltBlob {
    /// Its id.
    pub id: BlobId,
    /// What it consists of.
    pub index: BlobIndex,
    /// Its plain bytes, not synced.
    pub path: PathBuf,
}

/// What a [`BlobWriter`] leaves.
pub(crate) struct Written {
    /// The new blob, if there was anything new.
    pub(crate) blob: Option<BuiltBlob>,
    /// The blobs that files point into, as their numbers in the tree say: first the new one.
    pub(crate) blobs: Vec<BlobRef>,
    /// All files without holes.
    pub(crate) files: FileIndex,
}

/// A blob while content is appended to it: cut into groups, compressed and handed over as packs on the way. The order of
/// content is the order of appending, and the same content gives the same bytes.
///
/// Of a failed one nothing is left but the plain file, which is the caller's, and packs that no index names.
pub struct BlobWriter<'s> {
    area: Area,
    path: PathBuf,
    packer: Packer<'s>,
    donors: Donors,
    /// Blobs of donors that files point into; the first stands for the new one.
    blobs: Vec<BlobRef>,
    /// Where content of this layer lies.
    known: HashMap<(Digest, u64), (u16, u32)>,
}

impl<'s> BlobWriter<'s> {
    /// Creates the plain file, which must not be there yet.
    ///
    /// # Errors
    /// Creating the file or threads failed.
    pub fn create(path: &Path, donors: Donors, sink: &'s mut dyn PackSink) -> io::Result<Self> {
        let area = Area::create(path)?;
        let packer = Packer::new(area.file().try_clone()?, sink)?;
        let own = BlobRef { id: BlobId(Digest::of(b"")), blocks: 0 };
        Ok(Self { area, path: path.to_owned(), packer, donors, blobs: vec![own], known: HashMap::new() })
    }

    /// The plain file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether appending must not wait for anything but the source and the plain file.
    pub(crate) fn hurry(&mut self, is_hurried: bool) {
        self.packer.hurry(is_hurried);
    }

    /// Points a file at content whose place and hash are known from before, without reading it. None if there are too
    /// many blobs.
    pub(crate) fn reuse(&mut self, blob: BlobRef, data: &FileData, hash: Option<Digest>) -> Option<FileData> {
        let device = device(&mut self.blobs, blob)?;
        if let Some(hash) = hash {
            self.known.entry((hash, data.size)).or_insert((device, data.start));
        }
        Some(FileData { device, ..data.clone() })
    }

    /// Writes what is left.
    pub(crate) fn finish(self) -> Result<Written, AppendError> {
        let Self { area, path, packer, mut blobs, known, .. } = self;
        let (file, size) = area.into_file().map_err(AppendError::Write)?;
        // It may end in a hole.
        file.set_len(size).map_err(AppendError::Write)?;
        let index = packer.finish(size).map_err(AppendError::Pack)?;
        let id = index.id();
        blobs[0] = BlobRef { id, blocks: (size / BLOCK_SIZE) as u32 };
        let blob = (size > 0).then_some(BuiltBlob { id, index, path });
        let place = |((hash, size), (device, start))| (hash, size, u32::from(device) - 1, start);
        let files = FileIndex::new(blobs.clone(), known.into_iter().map(place));
        Ok(Written { blob, blobs, files })
    }

    /// Where content with this hash is, in this layer or a donor.
    fn find(&mut self, hash: Digest, size: u64) -> Option<(u16, u32)> {
        if let Some(known) = self.known.get(&(hash, size)) {
            return Some(*known);
        }
        let place = self.donors.find(&hash, size)?;
        let found = (device(&mut self.blobs, place.blob)?, place.start);
        self.known.insert((hash, size), found);
        Some(found)
    }

    fn settle(&mut self) -> Result<(), AppendError> {
        self.packer.settled(self.area.flushed()).map_err(AppendError::Pack)
    }

    /// What was appended from `mark` on, of which nothing stays if its source could not be read.
    fn or_taken_back<T>(&mut self, mark: u64, appended: Result<T, AppendError>) -> Result<T, AppendError> {
        if let Err(AppendError::Read(_)) = &appended {
            self.area.roll_back(mark).map_err(AppendError::Write)?;
        }
        appended
    }

    /// Appends like [`ContentStore::append`] and tells the content's hash too.
    pub(crate) fn append_hashed(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<(FileData, Digest), AppendError> {
        let mark = self.area.position();
        let mut hasher = Hasher::new();
        let mut seen = |bytes: &[u8]| {
            hasher.update(bytes);
        };
        let appended = self.area.append(source, size, &mut Passing { seen: &mut seen, tick });
        let extent = self.or_taken_back(mark, appended)?;
        let hash = Digest::from_bytes(*hasher.finalize().as_bytes());
        if size == 0 {
            return Ok((FileData::empty(), hash));
        }
        if let Some((device, start)) = self.find(hash, size) {
            self.area.roll_back(mark).map_err(AppendError::Write)?;
            return Ok((FileData::dense(size, start, device), hash));
        }
        self.known.insert((hash, size), (OWN, extent.start));
        self.settle()?;
        Ok((FileData::dense(size, extent.start, OWN), hash))
    }
}

impl ContentStore for BlobWriter<'_> {
    fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        self.append_hashed(source, size, tick).map(|(data, _)| data)
    }

    fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let mark = self.area.position();
        let mut passing = Passing { seen: &mut |_| {}, tick };
        let appended = self.area.append_sparse(source, size, segments, room, &mut passing);
        let (Extent { start, blocks }, chunks) = self.or_taken_back(mark, appended)?;
        self.settle()?;
        // Without a hole the chunks lie side by side; with nothing else the file lies nowhere.
        if chunks.offsets.iter().all(|offset| *offset != NULL_ADDR) {
            return Ok(FileData::dense(size, start, OWN));
        }
        let (device, start) = if blocks > 0 { (OWN, start) } else { (0, 0) };
        Ok(FileData { size, start, blocks, device, chunks: Some(Box::new(chunks)) })
    }
}

const _: () = assert!(BLOBS_MAX < u16::MAX as usize);
