//! From a layer's tree to its metadata image: first every inode gets its place, then directory blocks, inodes and
//! superblock are written in that order.

use sha2::{Digest, Sha256};

use super::BLOCK_SIZE;
use super::data::{ChunkMap, FileData};
use super::devices::{BlobRef, LayerTree};
use super::format::{
    BLOCK_BITS, CHUNK_INDEXES, DataLayout, DeviceSlot, FileType, INODE_SIZE, InodeRecord, NULL_ADDR, SLOT,
    Superblock, encode_device, head_blocks, pack_directory, packed_directory_size,
};
use super::sparse::CHUNK_BITS_MAX;
use super::tree::{Content, Inode, InodeId, Tree};

/// The root inode's place in the metadata area. Not 0: programs take inode number 0 for a deleted
/// entry. `root_nid` has 16 bits, which is why the root comes first.
const ROOT_OFFSET: u64 = 128;
/// A tail up to this size moves to the next block when its own is too full; a longer one gets a
/// block in front of the inodes instead, which wastes less.
const INLINE_MOVE_MAX: u64 = BLOCK_SIZE / 2;

/// Why a layer's metadata could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The image would have more than 2^32 blocks (16 TiB).
    #[error("the metadata would be larger than 16 TiB")]
    TooLarge,
    /// A file has content, but in no blob of the layer.
    #[error("the tree's blobs are not those its files point into")]
    NoBlob,
}

impl LayerTree {
    /// The metadata image: everything but content, which stays in the blobs. Gives the blobs that
    /// are its devices, in their order, too: those that a file points into.
    ///
    /// # Errors
    /// [`EncodeError`]
    pub fn encode(&self) -> Result<(Vec<u8>, Vec<BlobRef>), EncodeError> {
        let (numbers, used) = self.used_blobs()?;
        let head = head_blocks(used.len());
        let plan = Plan::new(&self.tree, head, numbers).ok_or(EncodeError::TooLarge)?;
        let blocks = plan.meta_block + plan.meta_size.div_ceil(BLOCK_SIZE);
        let blocks = u32::try_from(blocks).map_err(|_| EncodeError::TooLarge)?;
        let devices: Vec<_> = used.iter().map(BlobRef::slot).collect();
        let start = (head << BLOCK_BITS) as usize;
        let mut out = Vec::with_capacity((u64::from(blocks) << BLOCK_BITS) as usize);
        out.resize(start, 0);
        plan.write_outside(&self.tree, &mut out);
        plan.write_inodes(&self.tree, &mut out);
        let superblock = Superblock {
            root_nid: (ROOT_OFFSET / SLOT) as u16,
            inodes: plan.order.len() as u64,
            blocks,
            meta_block: plan.meta_block as u32,
            uuid: uuid(&devices, &out[start..]),
            chunked: plan.chunked,
            devices: &devices,
        };
        out[..start].copy_from_slice(&superblock.encode());
        Ok((out, used))
    }

    /// The blobs that files point into, and for each number in the tree the one in the image.
    fn used_blobs(&self) -> Result<(Vec<u16>, Vec<BlobRef>), EncodeError> {
        let mut numbers = vec![0; self.blobs.len() + 1];
        for (_, inode) in self.tree.iter() {
            if let Content::File(data) = &inode.content
                && (data.blocks > 0 || data.device > 0)
            {
                let end = u64::from(data.start) + u64::from(data.blocks);
                let blob = usize::from(data.device).checked_sub(1).and_then(|at| self.blobs.get(at));
                if blob.is_none_or(|blob| end > u64::from(blob.blocks)) {
                    return Err(EncodeError::NoBlob);
                }
                numbers[usize::from(data.device)] = 1;
            }
        }
        let mut used = Vec::new();
        for (number, blob) in numbers.iter_mut().skip(1).zip(&self.blobs) {
            if *number == 1 {
                used.push(*blob);
                *number = used.len() as u16;
            }
        }
        Ok((numbers, used))
    }
}

impl BlobRef {
    fn slot(&self) -> DeviceSlot {
        let mut tag = [0; 64];
        tag.copy_from_slice(self.id.to_string().as_bytes());
        DeviceSlot { tag, blocks: self.blocks }
    }
}

/// The UUID of an image, drawn from its blobs and its metadata.
fn uuid(devices: &[DeviceSlot], metadata: &[u8]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for device in devices {
        hash.update(device.tag);
    }
    hash.update(metadata);
    let digest = hash.finalize();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    // Version 8 of RFC 9562: the bits are the maker's own.
    uuid[6] = (uuid[6] & 0x0f) | 0x80;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    uuid
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
    /// For each device number of the tree that of the image.
    devices: Vec<u16>,
}

impl Plan {
    fn new(tree: &Tree, first_block: u64, devices: Vec<u16>) -> Option<Self> {
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
                    for below in entries.values() {
                        plan.enqueue(tree, id, *below);
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
                body = map_size(data, head);
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
    fn write_outside(&self, tree: &Tree, out: &mut Vec<u8>) {
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
            out.extend_from_slice(&bytes);
            out.resize(out.len().next_multiple_of(BLOCK_SIZE as usize), 0);
        }
    }

    fn outside_bytes(&self, tree: &Tree, id: InodeId, parent: InodeId, inode: &Inode) -> Vec<u8> {
        match &inode.content {
            Content::Directory(entries) => {
                let dots = [(b".".as_slice(), id), (b"..".as_slice(), parent)];
                let mut all: Vec<_> = entries
                    .iter()
                    .map(|(name, id)| (name.as_ref(), *id))
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

    fn write_inodes(&self, tree: &Tree, out: &mut Vec<u8>) {
        let base = (self.meta_block << BLOCK_BITS) as usize;
        for (number, (id, parent)) in self.order.iter().enumerate() {
            let Some(inode) = tree.get(*id) else { continue };
            let place = &self.places[id.0 as usize];
            out.resize(base + place.offset as usize, 0);
            out.extend_from_slice(&self.record(place, inode, number as u32 + 1).encode());
            if let Some(xattrs) = &inode.attributes.xattrs {
                xattrs.encode(out);
            }
            match &inode.content {
                Content::File(data) => self.encode_chunks(data, out),
                _ if place.inline => {
                    let bytes = self.outside_bytes(tree, *id, *parent, inode);
                    out.extend_from_slice(&bytes[(place.size / BLOCK_SIZE * BLOCK_SIZE) as usize..]);
                }
                _ => {}
            }
        }
        out.resize(out.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    }

    fn record(&self, place: &Place, inode: &Inode, ino: u32) -> InodeRecord {
        let plain = if place.inline { DataLayout::FlatInline } else { DataLayout::FlatPlain };
        let (layout, size, union) = match &inode.content {
            Content::Directory(_) | Content::Symlink(_) => (plain, place.size, place.block),
            Content::File(data) if data.size == 0 => (plain, 0, 0),
            Content::File(data) => {
                let bits = data.chunks.as_ref().map_or_else(|| one_chunk(data).0, |chunks| chunks.bits);
                (DataLayout::ChunkBased, data.size, u32::from(bits) | CHUNK_INDEXES)
            }
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
        if data.size == 0 {
            return;
        }
        // The inode is aligned to 32, so this aligns the map to 8 where it will be.
        out.resize(out.len().next_multiple_of(8), 0);
        let device = self.devices[usize::from(data.device)];
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

/// Bytes of a file's chunk map behind the `head` bytes of its inode, with those that align it.
fn map_size(data: &FileData, head: u64) -> u64 {
    let chunks = match &data.chunks {
        _ if data.size == 0 => return 0,
        None => data.size.div_ceil(one_chunk(data).1),
        Some(chunks) => chunks.offsets.len() as u64,
    };
    head.next_multiple_of(8) - head + chunks * 8
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
                tree.insert(root, name.as_bytes(), Attributes::default(), Content::Fifo);
            }
            let plan = Plan::new(&tree, 1, Vec::new()).unwrap();
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
                tree.insert(root, name.as_bytes(), Attributes::default(), Content::Fifo);
            }
            assert_eq!(Plan::new(&tree, 1, Vec::new()).unwrap().places[0].offset, ROOT_OFFSET);
        }
    }
}
