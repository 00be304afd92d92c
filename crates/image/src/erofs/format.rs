//! The bytes on disk. Every layout here is the kernel's `fs/erofs/erofs_fs.h`; names follow it.

/// log2 of the block size: 4 KiB, the page size, which file-backed mounts ask for.
pub(crate) const BLOCK_BITS: u8 = 12;
/// Block size as a `usize`, for buffers.
pub(crate) const BLOCK: usize = 1 << BLOCK_BITS;
/// `EROFS_SUPER_OFFSET`.
pub(crate) const SUPER_OFFSET: usize = 1024;
/// `sizeof(struct erofs_inode_extended)`.
pub(crate) const INODE_SIZE: u64 = 64;
/// Inodes are addressed in units of 32 bytes from `meta_blkaddr`.
pub(crate) const SLOT: u64 = 32;
/// `sizeof(struct erofs_dirent)`.
pub(crate) const DIRENT_SIZE: usize = 12;
/// `sizeof(struct erofs_xattr_ibody_header)`.
pub(crate) const XATTR_HEADER_SIZE: usize = 12;
/// `EROFS_NULL_ADDR`: a chunk that is a hole.
pub(crate) const NULL_ADDR: u32 = u32::MAX;

/// Bytes of `struct erofs_super_block`.
const SUPER_SIZE: usize = 128;
/// `sizeof(struct erofs_deviceslot)`, which is also the unit of `devt_slotoff`.
pub(crate) const DEVICE_SLOT: usize = 128;
/// The first device slot: right behind the superblock.
pub(crate) const DEVICE_TABLE: usize = SUPER_OFFSET + SUPER_SIZE;
/// `EROFS_CHUNK_FORMAT_INDEXES`: chunk maps have entries of eight bytes, with a device in each.
pub(crate) const CHUNK_INDEXES: u32 = 0x20;
/// `EROFS_CHUNK_FORMAT_BLKBITS_MASK`.
pub(crate) const CHUNK_BITS_MASK: u32 = 0x1f;

pub(crate) const MAGIC: u32 = 0xE0F5_E1E2;
pub(crate) const COMPAT: u32 = 0x1 | 0x2; // SB_CHKSUM, MTIME
pub(crate) const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
pub(crate) const INCOMPAT_DEVICE_TABLE: u32 = 0x8;

/// `EROFS_INODE_*`: where an inode's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataLayout {
    FlatPlain = 0,
    FlatInline = 2,
    ChunkBased = 4,
}

/// `FT_*`, as stored in a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileType {
    Regular = 1,
    Directory = 2,
    CharDevice = 3,
    BlockDevice = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
}

impl FileType {
    /// The type with this number.
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        [
            Self::Regular,
            Self::Directory,
            Self::CharDevice,
            Self::BlockDevice,
            Self::Fifo,
            Self::Socket,
            Self::Symlink,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == number)
    }

    /// The type with these `S_IFMT` bits.
    pub(crate) fn from_mode(mode: u16) -> Option<Self> {
        (1..=7).filter_map(Self::from_number).find(|kind| kind.mode_bits() == mode & 0o170_000)
    }

    /// The `S_IFMT` bits of `i_mode`.
    pub(crate) fn mode_bits(self) -> u16 {
        match self {
            Self::Regular => 0o100_000,
            Self::Directory => 0o040_000,
            Self::CharDevice => 0o020_000,
            Self::BlockDevice => 0o060_000,
            Self::Fifo => 0o010_000,
            Self::Socket => 0o140_000,
            Self::Symlink => 0o120_000,
        }
    }
}

/// The fields of the superblock that differ between images.
pub(crate) struct Superblock<'a> {
    pub(crate) root_nid: u16,
    pub(crate) inodes: u64,
    pub(crate) blocks: u32,
    pub(crate) meta_block: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) chunked: bool,
    pub(crate) devices: &'a [DeviceSlot],
}

/// The fields of `struct erofs_deviceslot` that are used. The unified address is 0: inodes name the device.
#[derive(Clone)]
pub(crate) struct DeviceSlot {
    /// A text of 64 characters, which the kernel does not read.
    pub(crate) tag: [u8; 64],
    pub(crate) blocks: u32,
}

/// Blocks that superblock and device table take.
pub(crate) fn head_blocks(devices: usize) -> u64 {
    (DEVICE_TABLE + devices * DEVICE_SLOT).div_ceil(BLOCK) as u64
}

impl Superblock<'_> {
    /// The first blocks of the image: superblock, with its checksum, and device table.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut head = vec![0u8; head_blocks(self.devices.len()) as usize * BLOCK];
        for (slot, device) in head[DEVICE_TABLE..].chunks_exact_mut(DEVICE_SLOT).zip(self.devices) {
            put(slot, 0, &device.tag);
            put(slot, 64, &device.blocks.to_le_bytes());
        }
        let mut incompat = if self.chunked { INCOMPAT_CHUNKED_FILE } else { 0 };
        let sb = &mut head[SUPER_OFFSET..BLOCK];
        if !self.devices.is_empty() {
            incompat |= INCOMPAT_DEVICE_TABLE;
            put(sb, 86, &(self.devices.len() as u16).to_le_bytes());
            put(sb, 88, &((DEVICE_TABLE / DEVICE_SLOT) as u16).to_le_bytes());
        }
        put(sb, 0, &MAGIC.to_le_bytes());
        put(sb, 8, &COMPAT.to_le_bytes());
        sb[12] = BLOCK_BITS;
        put(sb, 14, &self.root_nid.to_le_bytes());
        put(sb, 16, &self.inodes.to_le_bytes());
        put(sb, 36, &self.blocks.to_le_bytes());
        put(sb, 40, &self.meta_block.to_le_bytes());
        put(sb, 48, &self.uuid);
        put(sb, 80, &incompat.to_le_bytes());
        let checksum = superblock_checksum(&head);
        put(&mut head[SUPER_OFFSET..], 4, &checksum.to_le_bytes());
        head
    }
}

/// The checksum of a superblock: of the rest of block 0, with its own field as zero.
pub(crate) fn superblock_checksum(image: &[u8]) -> u32 {
    let mut rest = image[SUPER_OFFSET..BLOCK].to_vec();
    rest[4..8].fill(0);
    crc32c(&rest)
}

/// `struct erofs_inode_extended`.
#[derive(Debug)]
pub(crate) struct InodeRecord {
    pub(crate) layout: DataLayout,
    pub(crate) xattr_count: u16,
    pub(crate) mode: u16,
    pub(crate) size: u64,
    /// `i_u`: block address, device number or chunk format, by layout and type.
    pub(crate) union: u32,
    pub(crate) ino: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime_secs: i64,
    pub(crate) mtime_nanos: u32,
    pub(crate) nlink: u32,
}

impl InodeRecord {
    pub(crate) fn encode(&self) -> [u8; INODE_SIZE as usize] {
        let mut raw = [0u8; INODE_SIZE as usize];
        // Bit 0: the extended form; bits 1 to 3: the data layout.
        let format = 1 | ((self.layout as u16) << 1);
        put(&mut raw, 0, &format.to_le_bytes());
        put(&mut raw, 2, &self.xattr_count.to_le_bytes());
        put(&mut raw, 4, &self.mode.to_le_bytes());
        put(&mut raw, 8, &self.size.to_le_bytes());
        put(&mut raw, 16, &self.union.to_le_bytes());
        put(&mut raw, 20, &self.ino.to_le_bytes());
        put(&mut raw, 24, &self.uid.to_le_bytes());
        put(&mut raw, 28, &self.gid.to_le_bytes());
        put(&mut raw, 32, &self.mtime_secs.to_le_bytes());
        put(&mut raw, 40, &self.mtime_nanos.to_le_bytes());
        put(&mut raw, 44, &self.nlink.to_le_bytes());
        raw
    }
}

impl InodeRecord {
    /// Reads one; none if its form or layout is not one that [`Self::encode`] makes.
    pub(crate) fn decode(raw: &[u8; INODE_SIZE as usize]) -> Option<Self> {
        let u16_at = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | (u64::from(u32_at(at + 4)) << 32);
        let layout = match u16_at(0) {
            1 => DataLayout::FlatPlain,
            5 => DataLayout::FlatInline,
            9 => DataLayout::ChunkBased,
            _ => return None,
        };
        let record = Self {
            layout,
            xattr_count: u16_at(2),
            mode: u16_at(4),
            size: u64_at(8),
            union: u32_at(16),
            ino: u32_at(20),
            uid: u32_at(24),
            gid: u32_at(28),
            mtime_secs: u64_at(32) as i64,
            mtime_nanos: u32_at(40),
            nlink: u32_at(44),
        };
        // What is reserved must be zero: a later form may give it a meaning.
        (record.encode() == *raw).then_some(record)
    }
}

/// Major and minor number of [`encode_device`].
pub(crate) fn decode_device(number: u32) -> (u32, u32) {
    ((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & !0xff))
}

/// The 32-bit form of a device number in `i_u` (`new_encode_dev` in `linux/kdev_t.h`): 12 bits of
/// major, 20 of minor.
pub(crate) fn encode_device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Packs a directory: blocks of entries followed by their names, all in byte order of the name.
/// `entries` must be sorted and hold `.` and `..`. The last block is cut at its last name.
pub(crate) fn pack_directory(entries: &[(&[u8], u64, FileType)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = entries;
    while !rest.is_empty() {
        let count = fitting(rest.iter().map(|(name, ..)| name.len()));
        let (block, after) = rest.split_at(count);
        out.resize(out.len().next_multiple_of(BLOCK), 0);
        let mut name_offset = count * DIRENT_SIZE;
        for (name, nid, kind) in block {
            out.extend_from_slice(&nid.to_le_bytes());
            out.extend_from_slice(&(name_offset as u16).to_le_bytes());
            out.extend_from_slice(&[*kind as u8, 0]);
            name_offset += name.len();
        }
        for (name, ..) in block {
            out.extend_from_slice(name);
        }
        rest = after;
    }
    out
}

/// How many bytes [`pack_directory`] makes of entries with names of these lengths.
pub(crate) fn packed_directory_size(names: impl Iterator<Item = usize>) -> u64 {
    let (mut full, mut used) = (0u64, 0usize);
    for len in names {
        let need = DIRENT_SIZE + len;
        if used + need > BLOCK {
            full += 1;
            used = 0;
        }
        used += need;
    }
    full * BLOCK as u64 + used as u64
}

fn fitting(names: impl Iterator<Item = usize>) -> usize {
    let (mut count, mut used) = (0, 0);
    for len in names {
        used += DIRENT_SIZE + len;
        if used > BLOCK {
            break;
        }
        count += 1;
    }
    count
}

fn put(buffer: &mut [u8], at: usize, bytes: &[u8]) {
    buffer[at..at + bytes.len()].copy_from_slice(bytes);
}

/// CRC-32C as the kernel's `crc32c(~0, ..)` computes it: reflected, without the final inversion.
/// Bit by bit: it only ever sees one superblock.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { (c >> 1) ^ POLYNOMIAL } else { c >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn crc32c_matches_the_published_check_value() {
        // RFC 3720 B.4 gives E3069283 for "123456789", after the final inversion.
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn device_numbers_use_the_kernels_split() {
        assert_eq!(encode_device(1, 3), 0x103);
        assert_eq!(encode_device(0xfff, 0xf_ffff), u32::MAX);
        assert_eq!(encode_device(8, 0x1_23), (0x1 << 20) | (8 << 8) | 0x23);
        for (major, minor) in [(0, 0), (1, 3), (0xfff, 0xf_ffff), (8, 0x123), (259, 70_000)] {
            assert_eq!(decode_device(encode_device(major, minor)), (major, minor));
        }
    }

    proptest! {
        #[test]
        fn predicted_directory_size_is_the_packed_size(lens in proptest::collection::vec(1usize..=255, 1..400)) {
            let names: Vec<Vec<u8>> = lens.iter().map(|len| vec![b'n'; *len]).collect();
            let entries: Vec<_> = names.iter().map(|n| (n.as_slice(), 7u64, FileType::Regular)).collect();
            let packed = pack_directory(&entries);
            prop_assert_eq!(packed.len() as u64, packed_directory_size(lens.iter().copied()));
            // Every block tells how many entries it has by where its first name begins.
            let mut seen = 0;
            for block in packed.chunks(BLOCK) {
                let first = u16::from_le_bytes([block[8], block[9]]) as usize;
                prop_assert_eq!(first % DIRENT_SIZE, 0);
                seen += first / DIRENT_SIZE;
            }
            prop_assert_eq!(seen, names.len());
        }
    }
}
