//! From a tree to an image: first every inode gets its place, then directory blocks, inodes and
//! superblock are written in that order. With the content in the same image ([`finish`]) or in
//! blobs ([`super::LayerTree::encode`]).

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};

use super::BLOCK_SIZE;
use super::data::{ChunkMap, DataArea, FileData};
use super::format::{
    BLOCK_BITS, CHUNK_INDEXES, DataLayout, FileType, INODE_SIZE, InodeRecord, NULL_ADDR, SLOT, Superblock,
    encode_device, pack_directory, packed_directory_size,
};
use super::sparse::CHUNK_BITS_MAX;
use super::tree::{Content, Inode, InodeId, Tree};

mod metadata;

pub use metadata::EncodeError;

/// The root inode's place in the metadata area. Not 0: programs take inode number 0 for a deleted
/// entry. `root_nid` has 16 bits, which is why the root comes first.
const ROOT_OFFSET: u64 = 128;
/// A tail up to this size moves to the next block when its own is too full; a longer one gets a
/// block in the data area instead, which wastes less.
const INLINE_MOVE_MAX: u64 = BLOCK_SIZE / 2;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSummary {
    /// Length of the image in bytes.
    pub size_bytes: u64,
    /// Inodes in it: files, directories and so on, hard links counted once.
    pub inodes: u64,
    /// Its UUID, drawn from metadata and content.
    pub uuid: [u8; 16],
}

/// Why the image could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The image file cannot be written.
    #[error("the image file cannot be written")]
    Write(#[source] io::Error),
    /// The image would have more than 2^32 blocks (16 TiB).
    #[error("the image would be larger than 16 TiB")]
    TooLarge,
}

/// Writes everything but the content behind the content, then the superblock. The file is left
/// open and not synced: when it must be on disk is the caller's decision.
///
/// # Errors
/// [`WriteError`]; the file is then not an image.
pub fn finish(tree: &Tree, data: DataArea) -> Result<(File, ImageSummary), WriteError> {
    let (file, data_end) = data.into_file().map_err(WriteError::Write)?;
    let plan = Plan::new(tree, data_end >> BLOCK_BITS, None).ok_or(WriteError::TooLarge)?;
    let blocks = plan.meta_block + plan.meta_size.div_ceil(BLOCK_SIZE);
    let blocks = u32::try_from(blocks).map_err(|_| WriteError::TooLarge)?;
    let mut out = Writer::at_end(file, data_end).map_err(WriteError::Write)?;
    plan.write_outside(tree, &mut out).map_err(WriteError::Write)?;
    plan.write_inodes(tree, &mut out).map_err(WriteError::Write)?;
    let (out, uuid) = out.finish();
    let file = out.into_inner().map_err(|e| WriteError::Write(e.into_error()))?;
    let superblock = Superblock {
        root_nid: (ROOT_OFFSET / SLOT) as u16,
        inodes: plan.order.len() as u64,
        blocks,
        meta_block: plan.meta_block as u32,
        uuid,
        chunked: plan.chunked,
        devices: &[],
    };
    file.write_all_at(&superblock.encode(), 0).map_err(WriteError::Write)?;
    let size_bytes = u64::from(blocks) << BLOCK_BITS;
    Ok((file, ImageSummary { size_bytes, inodes: superblock.inodes, uuid }))
}

/// Where one inode goes.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Bytes from the start of the metadata area; 0 for an inode not in the image.
    offset: u64,
    /// Length of a directory's content.
    size: u64,
    /// First block outside the metadata area.
    block: u32,
    inline: bool,
    subdirectories: u32,
}

struct Plan {
    /// Breadth first, names in order: a directory's inodes lie side by side, as `ls -l` wants.
    order: Vec<(InodeId, InodeId)>,
    places: Vec<Place>,
    meta_block: u64,
    meta_size: u64,
    chunked: bool,
    /// Set when content lies in blobs: for each device number of the tree that of the image.
    devices: Option<Vec<u16>>,
}

impl Plan {
    fn new(tree: &Tree, first_block: u64, devices: Option<Vec<u16>>) -> Option<Self> {
        let mut plan = Self {
            order: vec![(tree.root(), tree.root())],
            places: vec![Place::default(); tree.id_bound()],
            meta_block: first_block,
            meta_size: ROOT_OFFSET,
            chunked: false,
            devices,
        };
        let mut at = 0;
        while let Some((id, _)) = plan.order.get(at).copied() {
            at += 1;
            if let Some(inode) = tree.get(id) {
                let place = plan.place(inode)?;
                plan.places[id.0 as usize] = place;
                if let Content::Directory(entries) = &inode.content {
                    for entry in entries.values() {
                        plan.enqueue(tree, id, entry.inode);
                    }
                }
            }
        }
        Some(plan)
    }

    fn enqueue(&mut self, tree: &Tree, parent: InodeId, id: InodeId) {
        // An inode with several names is met several times and placed once. A mark stands for
        // "in the queue", until the place replaces it.
        let place = &mut self.places[id.0 as usize];
        if place.offset == 0 {
            place.offset = u64::MAX;
            self.order.push((id, parent));
        }
        if tree.get(id).is_some_and(|inode| matches!(inode.content, Content::Directory(_))) {
            self.places[parent.0 as usize].subdirectories += 1;
        }
    }

    fn place(&mut self, inode: &Inode) -> Option<Place> {
        let head = INODE_SIZE + xattr_size(inode);
        let mut place = Place::default();
        let mut body = 0;
        match &inode.content {
            Content::Directory(entries) => {
                // Where the dots sort decides which names share a block, and so the size.
                let names = with_dots(entries.keys().map(|name| name.as_ref()));
                place.size = packed_directory_size(names.map(<[u8]>::len));
                body = self.place_tail(&mut place, head)?;
            }
            Content::Symlink(target) => {
                place.size = target.len() as u64;
                body = self.place_tail(&mut place, head)?;
            }
            Content::File(data) => {
                body = self.map_size(data, head);
                self.chunked |= body > 0;
            }
            _ => {}
        }
        // The inode itself never crosses a block, nor does an inline tail. Attributes and chunk
        // maps may: the kernel reads them piece by piece.
        let together = if place.inline { head + body } else { INODE_SIZE };
        let mut offset = self.meta_size.next_multiple_of(SLOT);
        if offset % BLOCK_SIZE + together > BLOCK_SIZE {
            offset = offset.next_multiple_of(BLOCK_SIZE);
        }
        place.offset = offset;
        self.meta_size = offset + head + body;
        Some(place)
    }

    /// Bytes of a file's chunk map, and before it.
    fn map_size(&self, data: &FileData, head: u64) -> u64 {
        match (&self.devices, &data.chunks) {
            (None, None) => 0,
            (None, Some(chunks)) => chunks.offsets.len() as u64 * 4,
            (Some(_), _) if data.size == 0 => 0,
            (Some(_), None) => head.next_multiple_of(8) - head + data.size.div_ceil(one_chunk(data).1) * 8,
            (Some(_), Some(chunks)) => head.next_multiple_of(8) - head + chunks.offsets.len() as u64 * 8,
        }
    }

    /// Decides whether the last part of a directory or symlink sits behind its inode, and gives
    /// the rest blocks. Returns the bytes behind the inode.
    fn place_tail(&mut self, place: &mut Place, head: u64) -> Option<u64> {
        let tail = place.size % BLOCK_SIZE;
        let whole = head + tail;
        let here = self.meta_size.next_multiple_of(SLOT) % BLOCK_SIZE + whole <= BLOCK_SIZE;
        place.inline = tail > 0 && (here || whole <= INLINE_MOVE_MAX);
        let blocks = if place.inline { place.size / BLOCK_SIZE } else { place.size.div_ceil(BLOCK_SIZE) };
        place.block = u32::try_from(self.meta_block).ok()?;
        self.meta_block += blocks;
        u32::try_from(self.meta_block).ok()?;
        Some(if place.inline { tail } else { 0 })
    }

    /// Directory blocks and long symlink targets.
    fn write_outside<W: Write>(&self, tree: &Tree, out: &mut Writer<W>) -> io::Result<()> {
        for (id, parent) in &self.order {
            let Some(inode) = tree.get(*id) else { continue };
            let place = &self.places[id.0 as usize];
            if place.size == 0 || (place.inline && place.size < BLOCK_SIZE) {
                continue;
            }
            let mut bytes = self.outside_bytes(tree, *id, *parent, inode);
            if place.inline {
                bytes.truncate((place.size / BLOCK_SIZE * BLOCK_SIZE) as usize);
            }
            out.write(&bytes)?;
            out.pad_to(out.position.next_multiple_of(BLOCK_SIZE))?;
        }
        Ok(())
    }

    fn outside_bytes(&self, tree: &Tree, id: InodeId, parent: InodeId, inode: &Inode) -> Vec<u8> {
        match &inode.content {
            Content::Directory(entries) => {
                let dots = [(b".".as_slice(), id), (b"..".as_slice(), parent)];
                let mut all: Vec<_> = entries
                    .iter()
                    .map(|(name, entry)| (name.as_ref(), entry.inode))
                    .chain(dots)
                    .map(|(name, id)| (name, self.nid(id), file_type(tree, id)))
                    .collect();
                all.sort_unstable_by_key(|(name, ..)| *name);
                pack_directory(&all)
            }
            Content::Symlink(target) => target.to_vec(),
            _ => Vec::new(),
        }
    }

    fn write_inodes<W: Write>(&self, tree: &Tree, out: &mut Writer<W>) -> io::Result<()> {
        let base = self.meta_block << BLOCK_BITS;
        let mut tail = Vec::new();
        for (number, (id, parent)) in self.order.iter().enumerate() {
            let Some(inode) = tree.get(*id) else { continue };
            let place = &self.places[id.0 as usize];
            out.pad_to(base + place.offset)?;
            out.write(&self.record(place, inode, number as u32 + 1).encode())?;
            tail.clear();
            if let Some(xattrs) = &inode.attributes.xattrs {
                xattrs.encode(&mut tail);
            }
            match &inode.content {
                Content::File(data) => {
                    self.encode_chunks(data, &mut tail);
                    out.fingerprint(data.checksum);
                }
                _ if place.inline => {
                    let bytes = self.outside_bytes(tree, *id, *parent, inode);
                    tail.extend_from_slice(&bytes[(place.size / BLOCK_SIZE * BLOCK_SIZE) as usize..]);
                }
                _ => {}
            }
            out.write(&tail)?;
        }
        out.pad_to(out.position.next_multiple_of(BLOCK_SIZE))
    }

    fn record(&self, place: &Place, inode: &Inode, ino: u32) -> InodeRecord {
        let plain = if place.inline { DataLayout::FlatInline } else { DataLayout::FlatPlain };
        let (layout, size, union) = match &inode.content {
            Content::Directory(_) | Content::Symlink(_) => (plain, place.size, place.block),
            Content::File(data) => match (&self.devices, &data.chunks) {
                (Some(_), _) if data.size == 0 => (plain, 0, 0),
                (None, Some(chunks)) => (DataLayout::ChunkBased, data.size, u32::from(chunks.bits)),
                (None, None) => (plain, data.size, data.start),
                (Some(_), chunks) => {
                    let bits = chunks.as_ref().map_or_else(|| one_chunk(data).0, |chunks| chunks.bits);
                    (DataLayout::ChunkBased, data.size, u32::from(bits) | CHUNK_INDEXES)
                }
            },
            Content::CharDevice(major, minor) | Content::BlockDevice(major, minor) => {
                (plain, 0, encode_device(*major, *minor))
            }
            Content::Fifo | Content::Socket => (plain, 0, 0),
        };
        let nlink = match &inode.content {
            Content::Directory(_) => 2 + place.subdirectories,
            _ => inode.names,
        };
        let attributes = &inode.attributes;
        InodeRecord {
            layout,
            xattr_count: attributes.xattrs.as_ref().map_or(0, |xattrs| xattrs.count()),
            mode: inode.content.file_type().mode_bits() | (attributes.mode & 0o7777),
            size,
            union,
            ino,
            uid: attributes.uid,
            gid: attributes.gid,
            mtime_secs: attributes.mtime.seconds,
            mtime_nanos: attributes.mtime.nanoseconds,
            nlink,
        }
    }

    fn encode_chunks(&self, data: &FileData, out: &mut Vec<u8>) {
        let Some(devices) = &self.devices else {
            let Some(chunks) = &data.chunks else { return };
            for offset in &chunks.offsets {
                let block = if *offset == NULL_ADDR { NULL_ADDR } else { data.start + offset };
                out.extend_from_slice(&block.to_le_bytes());
            }
            return;
        };
        if data.size == 0 {
            return;
        }
        // The inode is aligned to 32, so this aligns the map to 8 where it will be.
        out.resize(out.len().next_multiple_of(8), 0);
        let device = devices[usize::from(data.device)];
        let whole;
        let chunks = match &data.chunks {
            Some(chunks) => chunks,
            None => {
                let (bits, bytes) = one_chunk(data);
                let offsets = (0..data.size.div_ceil(bytes)).map(|at| (at << bits) as u32).collect();
                whole = ChunkMap { bits, offsets };
                &whole
            }
        };
        for offset in &chunks.offsets {
            // Two bytes for the high bits of an address, which 16 TiB a blob do without.
            let (device, block) =
                if *offset == NULL_ADDR { (0, NULL_ADDR) } else { (device, data.start + offset) };
            out.extend_from_slice(&(u64::from(device) << 16 | u64::from(block) << 32).to_le_bytes());
        }
    }

    fn nid(&self, id: InodeId) -> u64 {
        self.places[id.0 as usize].offset / SLOT
    }
}

/// How content without holes is one chunk, or as few as can be: log2 of the blocks in it, and its bytes.
fn one_chunk(data: &FileData) -> (u8, u64) {
    let bits =
        data.size.div_ceil(BLOCK_SIZE).next_power_of_two().trailing_zeros().min(u32::from(CHUNK_BITS_MAX));
    (bits as u8, BLOCK_SIZE << bits)
}

fn xattr_size(inode: &Inode) -> u64 {
    inode.attributes.xattrs.as_ref().map_or(0, |xattrs| xattrs.encoded_size() as u64)
}

fn file_type(tree: &Tree, id: InodeId) -> FileType {
    tree.get(id).map_or(FileType::Regular, |inode| inode.content.file_type())
}

/// Puts `.` and `..` at their places among sorted names.
fn with_dots<'a>(names: impl Iterator<Item = &'a [u8]>) -> impl Iterator<Item = &'a [u8]> {
    let mut dots = [b".".as_slice(), b"..".as_slice()].into_iter().peekable();
    let mut names = names.peekable();
    std::iter::from_fn(move || match (dots.peek(), names.peek()) {
        (Some(dot), Some(name)) if name < dot => names.next(),
        (Some(_), _) => dots.next(),
        (None, _) => names.next(),
    })
}

/// Buffered writing that knows where it is and draws the UUID from what passes.
struct Writer<W> {
    out: W,
    position: u64,
    hash: Sha256,
}

impl Writer<BufWriter<File>> {
    fn at_end(mut file: File, position: u64) -> io::Result<Self> {
        file.seek(SeekFrom::Start(position))?;
        Ok(Self { out: BufWriter::with_capacity(1 << 20, file), position, hash: Sha256::new() })
    }
}

impl<W: Write> Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.hash.update(bytes);
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, target: u64) -> io::Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.position < target {
            let piece = (target - self.position).min(ZEROS.len() as u64) as usize;
            self.write(&ZEROS[..piece])?;
        }
        Ok(())
    }

    fn fingerprint(&mut self, checksum: u32) {
        self.hash.update(checksum.to_le_bytes());
    }

    fn finish(self) -> (W, [u8; 16]) {
        let digest = self.hash.finalize();
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&digest[..16]);
        // Version 8 of RFC 9562: the bits are the maker's own.
        uuid[6] = (uuid[6] & 0x0f) | 0x80;
        uuid[8] = (uuid[8] & 0x3f) | 0x80;
        (self.out, uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::erofs::Attributes;
    use proptest::prelude::*;

    proptest! {
        // Names on both sides of `.` and `..`, long enough that it matters which block they are in.
        #[test]
        fn a_directory_is_as_long_as_was_planned(
            names in proptest::collection::btree_set("[!-./a]{1,3}[!a]{60,250}", 0..150)
        ) {
            let mut tree = Tree::new();
            let root = tree.root();
            for name in names.iter().filter(|name| !name.contains('/')) {
                tree.insert(root, name.as_bytes(), 0, Attributes::default(), Content::Fifo);
            }
            let plan = Plan::new(&tree, 1, None).unwrap();
            let inode = tree.get(root).unwrap();
            let packed = plan.outside_bytes(&tree, root, root, inode);
            prop_assert_eq!(plan.places[0].size, packed.len() as u64);
        }
    }

    #[test]
    fn the_root_inode_is_where_the_superblock_says_whatever_its_size() {
        for entries in [0usize, 100, 1000] {
            let mut tree = Tree::new();
            let root = tree.root();
            for number in 0..entries {
                let name = format!("{number:0200}");
                tree.insert(root, name.as_bytes(), 0, Attributes::default(), Content::Fifo);
            }
            assert_eq!(Plan::new(&tree, 1, None).unwrap().places[0].offset, ROOT_OFFSET);
        }
    }
}
