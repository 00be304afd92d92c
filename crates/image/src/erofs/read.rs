//! Reads a metadata image back into a tree.
//!
//! ```text
//! superblock, device table ──► blobs
//! root inode ──► queue of inodes, each read once ──► entries of directories ──► more inodes
//! ```
//!
//! Only what [`LayerTree::encode`] makes is read, and anything else refused: the image may come from a store that others
//! write to. So every place is checked before it is read, every directory has one name, entries are in order, and no more
//! is read than the image is long; whatever the bytes are, reading takes memory and time in proportion to them.

use std::collections::{BTreeMap, HashMap};

use super::BLOCK_SIZE;
use super::data::{ChunkMap, FileData};
use super::devices::{BLOBS_MAX, BlobRef, LayerTree};
use super::format::{
    BLOCK, BLOCK_BITS, CHUNK_BITS_MASK, CHUNK_INDEXES, COMPAT, DEVICE_SLOT, DEVICE_TABLE, DIRENT_SIZE,
    DataLayout, FileType, INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE, INODE_SIZE, InodeRecord, MAGIC,
    NULL_ADDR, SLOT, SUPER_OFFSET, XATTR_HEADER_SIZE, decode_device, superblock_checksum,
};
use super::sparse::CHUNKS_MAX;
use super::tree::{Attributes, Content, Inode, InodeId, Timestamp, Tree};
use super::xattr::Xattrs;

/// Longest symlink target.
const TARGET_MAX: u64 = 4095;
/// Longest name.
const NAME_MAX: usize = 255;

/// Why bytes are not a layer's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the metadata of a layer: {what} (at byte {at}); it is damaged or another program made it")]
pub struct ReadError {
    /// What is wrong.
    pub what: &'static str,
    /// Where.
    pub at: u64,
}

impl LayerTree {
    /// Reads a metadata image.
    ///
    /// # Errors
    /// [`ReadError`]: it is none, or not one that [`Self::encode`] makes.
    pub fn decode(image: &[u8]) -> Result<Self, ReadError> {
        let head = Head::read(image)?;
        let mut reader = Reader {
            image,
            meta: u64::from(head.meta_block) << BLOCK_BITS,
            blobs: &head.blobs,
            seen: HashMap::new(),
            inodes: Vec::new(),
            queue: Vec::new(),
            unread: image.len() as u64,
        };
        reader.all(u64::from(head.root))?;
        if reader.inodes.len() as u64 != head.inodes {
            return Err(ReadError { what: "the number of inodes is wrong", at: SUPER_OFFSET as u64 });
        }
        Ok(Self { tree: Tree::from_inodes(reader.inodes), blobs: head.blobs })
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

struct Head {
    root: u16,
    inodes: u64,
    meta_block: u32,
    blobs: Vec<BlobRef>,
}

impl Head {
    fn read(image: &[u8]) -> Result<Self, ReadError> {
        let bad = |what| ReadError { what, at: SUPER_OFFSET as u64 };
        if image.len() < BLOCK || !image.len().is_multiple_of(BLOCK) {
            return Err(bad("its length is not a whole number of blocks"));
        }
        let sb = &image[SUPER_OFFSET..BLOCK];
        if number(sb, 0) != MAGIC {
            return Err(bad("it does not begin as an EROFS image"));
        }
        if number(sb, 4) != superblock_checksum(image) {
            return Err(bad("the superblock's checksum is wrong"));
        }
        let incompat = number(sb, 80);
        let devices = usize::from(u16::from_le_bytes([sb[86], sb[87]]));
        let table = usize::from(u16::from_le_bytes([sb[88], sb[89]]));
        let form = number(sb, 8) == COMPAT
            && u32::from(sb[12]) == u32::from(BLOCK_BITS)
            && incompat & !(INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE) == 0
            && (incompat & INCOMPAT_DEVICE_TABLE != 0) == (devices > 0)
            && table == if devices > 0 { DEVICE_TABLE / DEVICE_SLOT } else { 0 }
            && devices <= BLOBS_MAX;
        if !form {
            return Err(bad("the superblock has a form that this program does not make"));
        }
        if u64::from(number(sb, 36)) << BLOCK_BITS != image.len() as u64 {
            return Err(bad("its length is not the one it says"));
        }
        let inodes = u64::from(number(sb, 16)) | (u64::from(number(sb, 20)) << 32);
        let root = u16::from_le_bytes([sb[14], sb[15]]);
        let slots = image.get(DEVICE_TABLE..DEVICE_TABLE + devices * DEVICE_SLOT);
        let slots = slots.ok_or_else(|| bad("the device table is cut"))?;
        let blob = |slot: &[u8]| {
            let id = std::str::from_utf8(&slot[..64]).ok()?.parse().ok()?;
            let rest_is_zero = slot[68..].iter().all(|byte| *byte == 0);
            rest_is_zero.then(|| BlobRef { id, blocks: number(slot, 64) })
        };
        let blobs: Option<Vec<_>> = slots.chunks_exact(DEVICE_SLOT).map(blob).collect();
        let blobs = blobs.ok_or_else(|| bad("a device is not a blob"))?;
        Ok(Self { root, inodes, meta_block: number(sb, 40), blobs })
    }
}

struct Reader<'a> {
    image: &'a [u8],
    /// Where the metadata area begins.
    meta: u64,
    blobs: &'a [BlobRef],
    /// Inodes by their number in the image.
    seen: HashMap<u64, InodeId>,
    inodes: Vec<(Inode, u32)>,
    /// Directories whose entries are still to be read: their inode number, their parent's, where they are.
    queue: Vec<Pending>,
    /// Bytes that may still be read: no two inodes of an honest image share any.
    unread: u64,
}

#[derive(Clone, Copy)]
struct Pending {
    id: InodeId,
    nid: u64,
    parent: u64,
    place: Place,
}

/// Where an inode's data lies: whole blocks, then a tail behind the inode.
#[derive(Clone, Copy)]
struct Place {
    size: u64,
    block: u64,
    /// Where the tail is, if there is one.
    tail: Option<u64>,
}

impl<'a> Reader<'a> {
    fn all(&mut self, root: u64) -> Result<(), ReadError> {
        let (_, kind) = self.inode(root, root)?;
        if kind != FileType::Directory {
            return Err(ReadError { what: "its root is no directory", at: self.meta });
        }
        let mut at = 0;
        while at < self.queue.len() {
            self.directory(at)?;
            at += 1;
        }
        for (inode, links) in &self.inodes {
            let expected = match &inode.content {
                Content::Directory(entries) => {
                    let below =
                        |id: &&InodeId| matches!(self.inodes[id.0 as usize].0.content, Content::Directory(_));
                    2 + entries.values().filter(below).count() as u32
                }
                _ => inode.names,
            };
            if *links != expected {
                return Err(ReadError { what: "a number of links is wrong", at: self.meta });
            }
        }
        Ok(())
    }

    fn bytes(&mut self, at: u64, len: u64) -> Result<&'a [u8], ReadError> {
        let twice = ReadError { what: "parts of it lie over each other", at };
        self.unread = self.unread.checked_sub(len).ok_or(twice)?;
        let range = usize::try_from(at).ok().zip(usize::try_from(len).ok());
        range
            .and_then(|(at, len)| self.image.get(at..at.checked_add(len)?))
            .ok_or(ReadError { what: "it reaches past its end", at })
    }

    /// Reads the inode with the number `nid`, unless it has been.
    fn inode(&mut self, nid: u64, parent: u64) -> Result<(InodeId, FileType), ReadError> {
        if let Some(id) = self.seen.get(&nid) {
            let inode = &mut self.inodes[id.0 as usize].0;
            inode.names += 1;
            return Ok((*id, inode.content.file_type()));
        }
        let at = nid.checked_mul(SLOT).and_then(|offset| offset.checked_add(self.meta));
        let at = at.ok_or(ReadError { what: "an inode is nowhere", at: self.meta })?;
        let bad = |what| ReadError { what, at };
        let raw = self.bytes(at, INODE_SIZE)?.first_chunk().ok_or_else(|| bad("an inode is cut"))?;
        let record = InodeRecord::decode(raw).ok_or_else(|| bad("an inode has an unknown form"))?;
        let kind = FileType::from_mode(record.mode).ok_or_else(|| bad("an inode has an unknown type"))?;
        if record.mtime_nanos >= 1_000_000_000 {
            return Err(bad("a time is impossible"));
        }
        let xattr_len = match record.xattr_count {
            0 => 0,
            count => XATTR_HEADER_SIZE as u64 + 4 * (u64::from(count) - 1),
        };
        let xattrs = match xattr_len {
            0 => None,
            len => {
                let raw = self.bytes(at + INODE_SIZE, len)?;
                Some(Box::new(Xattrs::decode(raw).ok_or_else(|| bad("extended attributes are damaged"))?))
            }
        };
        let behind = at + INODE_SIZE + xattr_len;
        let content = self.content(&record, kind, behind)?;
        let id = InodeId(u32::try_from(self.inodes.len()).map_err(|_| bad("it has too many inodes"))?);
        if matches!(content, Content::Directory(_)) {
            let place = self.place(&record, behind)?;
            self.queue.push(Pending { id, nid, parent, place });
        }
        let attributes = Attributes {
            mode: record.mode & 0o7777,
            uid: record.uid,
            gid: record.gid,
            mtime: Timestamp { seconds: record.mtime_secs, nanoseconds: record.mtime_nanos },
            xattrs,
        };
        self.inodes.push((Inode { attributes, content, names: 1 }, record.nlink));
        self.seen.insert(nid, id);
        Ok((id, kind))
    }

    fn content(&mut self, record: &InodeRecord, kind: FileType, behind: u64) -> Result<Content, ReadError> {
        let bad = |what| ReadError { what, at: behind };
        let simple = record.layout == DataLayout::FlatPlain && record.size == 0;
        Ok(match kind {
            FileType::Directory => Content::directory(),
            FileType::Symlink => {
                if !(1..=TARGET_MAX).contains(&record.size) {
                    return Err(bad("a link target has an impossible length"));
                }
                let target = self.data(&self.place(record, behind)?)?;
                if target.contains(&0) {
                    return Err(bad("a link target contains a zero byte"));
                }
                Content::Symlink(target.into())
            }
            FileType::Regular if record.layout == DataLayout::ChunkBased => {
                Content::File(self.chunks(record, behind)?)
            }
            FileType::Regular if simple && record.union == 0 => Content::File(FileData::empty()),
            FileType::Regular => return Err(bad("a file's content is not in a blob")),
            _ if !simple => return Err(bad("a special file has content")),
            FileType::CharDevice => {
                let (major, minor) = decode_device(record.union);
                Content::CharDevice(major, minor)
            }
            FileType::BlockDevice => {
                let (major, minor) = decode_device(record.union);
                Content::BlockDevice(major, minor)
            }
            FileType::Fifo => Content::Fifo,
            FileType::Socket => Content::Socket,
        })
    }

    /// A file's chunk map: all chunks in one blob, one after the other.
    fn chunks(&mut self, record: &InodeRecord, behind: u64) -> Result<FileData, ReadError> {
        let bad = |what| ReadError { what, at: behind };
        if record.union & !CHUNK_BITS_MASK != CHUNK_INDEXES
            || record.size == 0
            || record.size > i64::MAX as u64
        {
            return Err(bad("a chunk map has an unknown form"));
        }
        let bits = (record.union & CHUNK_BITS_MASK) as u8;
        let chunk = BLOCK_SIZE << bits;
        let count = record.size.div_ceil(chunk);
        if count > CHUNKS_MAX {
            return Err(bad("a chunk map is too long"));
        }
        let raw = self.bytes(behind.next_multiple_of(8), count * 8)?;
        let (mut device, mut start, mut next) = (0u16, 0u32, 0u64);
        let mut offsets = Vec::with_capacity(count as usize);
        for (at, index) in raw.as_chunks::<8>().0.iter().enumerate() {
            let (high, block) = (u16::from_le_bytes([index[0], index[1]]), number(index, 4));
            let named = u16::from_le_bytes([index[2], index[3]]);
            if block == NULL_ADDR && named == 0 && high == 0 {
                offsets.push(NULL_ADDR);
                continue;
            }
            if device == 0 {
                (device, start) = (named, block);
            }
            let offset = block.checked_sub(start).filter(|offset| u64::from(*offset) == next);
            let (true, Some(offset)) = (high == 0 && named == device, offset) else {
                return Err(bad("a file's chunks do not lie one after the other in one blob"));
            };
            offsets.push(offset);
            next += (record.size - at as u64 * chunk).min(chunk).div_ceil(BLOCK_SIZE);
        }
        if next > 0 {
            let blob = usize::from(device).checked_sub(1).and_then(|at| self.blobs.get(at));
            let blob = blob.ok_or_else(|| bad("a file points into a blob that is not listed"))?;
            if u64::from(start) + next > u64::from(blob.blocks) {
                return Err(bad("a file reaches past its blob"));
            }
        }
        let (blocks, size) = (next as u32, record.size);
        if next == size.div_ceil(BLOCK_SIZE) {
            return Ok(FileData { size, start, blocks, device, chunks: None });
        }
        let chunks = Some(Box::new(ChunkMap { bits, offsets }));
        Ok(FileData { size, start, blocks, device, chunks })
    }

    fn place(&self, record: &InodeRecord, behind: u64) -> Result<Place, ReadError> {
        let bad = |what| ReadError { what, at: behind };
        let inline = match record.layout {
            DataLayout::FlatPlain => false,
            DataLayout::FlatInline => true,
            DataLayout::ChunkBased => return Err(bad("a directory or link has a chunk map")),
        };
        let tail = record.size % BLOCK_SIZE;
        if inline && (tail == 0 || behind % BLOCK_SIZE + tail > BLOCK_SIZE) {
            return Err(bad("a tail crosses a block"));
        }
        Ok(Place { size: record.size, block: u64::from(record.union), tail: inline.then_some(behind) })
    }

    fn data(&mut self, place: &Place) -> Result<Vec<u8>, ReadError> {
        let outside = if place.tail.is_some() { place.size / BLOCK_SIZE * BLOCK_SIZE } else { place.size };
        let mut data =
            if outside == 0 { Vec::new() } else { self.bytes(place.block << BLOCK_BITS, outside)?.to_vec() };
        if let Some(tail) = place.tail {
            data.extend_from_slice(self.bytes(tail, place.size - outside)?);
        }
        Ok(data)
    }

    /// Reads the entries of the directory at `at` in the queue.
    fn directory(&mut self, at: usize) -> Result<(), ReadError> {
        let Pending { id, nid, parent, place } = self.queue[at];
        let where_ = self.meta + nid * SLOT;
        let bad = |what| ReadError { what, at: where_ };
        let data = self.data(&place)?;
        let mut entries: BTreeMap<Box<[u8]>, InodeId> = BTreeMap::new();
        let mut last: Option<&[u8]> = None;
        let mut dots = 0;
        for block in data.chunks(BLOCK) {
            for (name, target, kind) in
                Names::new(block).ok_or_else(|| bad("a directory block is damaged"))?
            {
                let name = name.ok_or_else(|| bad("a name is damaged"))?;
                if last.is_some_and(|last| last >= name) {
                    return Err(bad("names are out of order"));
                }
                last = Some(name);
                if matches!(name, b"." | b"..") {
                    let expected = if name == b"." { nid } else { parent };
                    if target != expected || kind != FileType::Directory as u8 {
                        return Err(bad("`.` or `..` leads elsewhere"));
                    }
                    dots += 1;
                    continue;
                }
                let known = self.inodes.len();
                let (inode, found) = self.inode(target, nid)?;
                if found as u8 != kind {
                    return Err(bad("an entry has another type than what it names"));
                }
                if found == FileType::Directory && (inode.0 as usize) < known {
                    return Err(bad("a directory has two names"));
                }
                entries.insert(name.into(), inode);
            }
        }
        if dots != 2 {
            return Err(bad("a directory has no `.` or `..`"));
        }
        self.inodes[id.0 as usize].0.content = Content::Directory(entries);
        Ok(())
    }
}

/// The names of one directory block.
struct Names<'a> {
    block: &'a [u8],
    count: usize,
    at: usize,
}

impl<'a> Names<'a> {
    fn new(block: &'a [u8]) -> Option<Self> {
        let first = usize::from(u16::from_le_bytes([*block.get(8)?, *block.get(9)?]));
        let count = first / DIRENT_SIZE;
        let fits = count > 0 && first.is_multiple_of(DIRENT_SIZE) && first < block.len();
        fits.then_some(Self { block, count, at: 0 })
    }

    fn offset(&self, at: usize) -> usize {
        let at = at * DIRENT_SIZE + 8;
        usize::from(u16::from_le_bytes([self.block[at], self.block[at + 1]]))
    }

    /// The name of the entry at `at`. The last one of a full block ends at its first zero.
    fn name(&self, at: usize) -> Option<&'a [u8]> {
        let start = self.offset(at);
        let end = if at + 1 < self.count { self.offset(at + 1) } else { self.block.len() };
        let mut name = self.block.get(start..end)?;
        if at + 1 == self.count {
            name = name.split(|byte| *byte == 0).next()?;
        }
        let valid = (1..=NAME_MAX).contains(&name.len()) && !name.contains(&0) && !name.contains(&b'/');
        valid.then_some(name)
    }
}

impl<'a> Iterator for Names<'a> {
    type Item = (Option<&'a [u8]>, u64, u8);

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.count {
            return None;
        }
        let entry = &self.block[self.at * DIRENT_SIZE..][..DIRENT_SIZE];
        let nid = u64::from(number(entry, 0)) | (u64::from(number(entry, 4)) << 32);
        let name = self.name(self.at);
        self.at += 1;
        Some((name, nid, entry[10]))
    }
}

#[cfg(test)]
#[path = "read/tests.rs"]
mod tests;
