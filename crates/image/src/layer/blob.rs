//! The blob index: what a blob consists of and where its groups are stored.
//!
//! ```text
//! "DSECBLB1"  size u64  packs u32  groups u32          little-endian throughout
//! packs  x    id [32]   size u32
//! groups x    hash [32] pack u32  offset u32  stored u32
//! ```

use super::digest::{BlobId, Digest, PackId};

/// Plain bytes in a group; the last group of a blob may be shorter. Smaller groups fetch less that nobody asked for but
/// pay more round trips; at 256 KiB the excess stays below twice.
pub const GROUP_SIZE: u64 = 256 << 10;
/// Longest pack: what one object is written with in one request, and lost work when a publisher dies.
pub const PACK_SIZE_MAX: u32 = 32 << 20;

const MAGIC: &[u8; 8] = b"DSECBLB1";
const HEAD: usize = 8 + 8 + 4 + 4;
const PACK_RECORD: usize = 32 + 4;
const GROUP_RECORD: usize = 32 + 12;

/// Why bytes are not a blob index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a blob index: {0}")]
pub struct BlobIndexError(pub &'static str);

/// One pack of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRef {
    /// Which.
    pub id: PackId,
    /// Its length in bytes.
    pub size: u32,
}

/// One group of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRef {
    /// BLAKE3 of its plain bytes.
    pub hash: Digest,
    /// Which of the blob's packs it is in.
    pub pack: u32,
    /// Where in the pack it begins.
    pub offset: u32,
    /// How many bytes of the pack it takes. As many as its plain bytes: it is stored as it is; fewer: as one zstd frame.
    pub stored: u32,
}

/// What a blob consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobIndex {
    size: u64,
    packs: Vec<PackRef>,
    groups: Vec<GroupRef>,
}

impl BlobIndex {
    /// An index, checked: every group lies in its pack and there are as many as the size asks for.
    ///
    /// # Errors
    /// It contradicts itself.
    pub fn new(size: u64, packs: Vec<PackRef>, groups: Vec<GroupRef>) -> Result<Self, BlobIndexError> {
        if size.div_ceil(GROUP_SIZE) != groups.len() as u64 {
            return Err(BlobIndexError("the number of groups does not fit the size"));
        }
        if packs.iter().any(|pack| pack.size == 0 || pack.size > PACK_SIZE_MAX) {
            return Err(BlobIndexError("a pack has an impossible length"));
        }
        let index = Self { size, packs, groups };
        for (at, group) in index.groups.iter().enumerate() {
            let Some(pack) = index.packs.get(group.pack as usize) else {
                return Err(BlobIndexError("a group names a pack that is not listed"));
            };
            if u64::from(group.offset) + u64::from(group.stored) > u64::from(pack.size) {
                return Err(BlobIndexError("a group reaches past its pack"));
            }
            if group.stored == 0 || u64::from(group.stored) > index.plain_len(at as u64) {
                return Err(BlobIndexError("a group has an impossible length"));
            }
        }
        Ok(index)
    }

    /// Its bytes, which [`BlobId`] is the digest of.
    pub fn encode(&self) -> Vec<u8> {
        let mut out =
            Vec::with_capacity(HEAD + self.packs.len() * PACK_RECORD + self.groups.len() * GROUP_RECORD);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&(self.packs.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.groups.len() as u32).to_le_bytes());
        for pack in &self.packs {
            out.extend_from_slice(pack.id.0.as_bytes());
            out.extend_from_slice(&pack.size.to_le_bytes());
        }
        for group in &self.groups {
            out.extend_from_slice(group.hash.as_bytes());
            for number in [group.pack, group.offset, group.stored] {
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
        out
    }

    /// Reads an index and checks it as [`Self::new`] does.
    ///
    /// # Errors
    /// It is none, is cut, goes on after its end, or contradicts itself.
    pub fn decode(bytes: &[u8]) -> Result<Self, BlobIndexError> {
        let cut = BlobIndexError("it is cut");
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or(cut)?;
        if &head[..8] != MAGIC {
            return Err(BlobIndexError("it does not begin as one"));
        }
        let (packs, groups) = (number(head, 16) as usize, number(head, 20) as usize);
        let (pack_bytes, group_bytes) = rest.split_at_checked(packs * PACK_RECORD).ok_or(cut)?;
        if group_bytes.len() != groups * GROUP_RECORD {
            return Err(BlobIndexError("its length does not fit its counts"));
        }
        let pack = |raw: &[u8]| PackRef { id: PackId(digest(raw)), size: number(raw, 32) };
        let group = |raw: &[u8]| GroupRef {
            hash: digest(raw),
            pack: number(raw, 32),
            offset: number(raw, 36),
            stored: number(raw, 40),
        };
        Self::new(
            u64::from(number(head, 8)) | (u64::from(number(head, 12)) << 32),
            pack_bytes.chunks_exact(PACK_RECORD).map(pack).collect(),
            group_bytes.chunks_exact(GROUP_RECORD).map(group).collect(),
        )
    }

    /// The blob's id.
    pub fn id(&self) -> BlobId {
        BlobId(Digest::of(&self.encode()))
    }

    /// Plain bytes of the blob: a whole number of 4 KiB blocks.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its packs.
    pub fn packs(&self) -> &[PackRef] {
        &self.packs
    }

    /// Its groups, in order.
    pub fn groups(&self) -> &[GroupRef] {
        &self.groups
    }

    /// Plain bytes of the group with this number.
    pub fn plain_len(&self, group: u64) -> u64 {
        self.size.saturating_sub(group * GROUP_SIZE).min(GROUP_SIZE)
    }
}

fn number(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

fn digest(raw: &[u8]) -> Digest {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(&raw[..32]);
    Digest::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> BlobIndex {
        let packs = vec![PackRef { id: PackId(Digest::of(b"pack")), size: 300_000 }];
        let group = |offset, stored| GroupRef { hash: Digest::of(b"group"), pack: 0, offset, stored };
        BlobIndex::new(GROUP_SIZE + 4096, packs, vec![group(0, 262_144), group(262_144, 100)]).unwrap()
    }

    #[test]
    fn an_index_survives_its_encoding() {
        let index = index();
        assert_eq!(BlobIndex::decode(&index.encode()).unwrap(), index);
        assert_eq!((index.plain_len(0), index.plain_len(1), index.plain_len(2)), (GROUP_SIZE, 4096, 0));
    }

    #[test]
    fn a_cut_a_longer_and_a_lying_index_are_refused() {
        let good = index().encode();
        for end in 0..good.len() {
            assert!(BlobIndex::decode(&good[..end]).is_err(), "cut at {end}");
        }
        assert!(BlobIndex::decode(&[good.as_slice(), b"x"].concat()).is_err());
        let GroupRef { hash, .. } = index().groups[1];
        for (pack, offset, stored) in [(1, 0, 1), (0, 299_999, 2), (0, 0, 0), (0, 0, 4097), (0, u32::MAX, 1)]
        {
            let mut groups = index().groups;
            groups[1] = GroupRef { hash, pack, offset, stored };
            assert!(BlobIndex::new(index().size, index().packs, groups).is_err(), "{pack} {offset} {stored}");
        }
        assert!(BlobIndex::new(GROUP_SIZE, index().packs, index().groups).is_err());
    }
}
