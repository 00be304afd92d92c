//! The file that says which groups of a blob are in the cache.
//!
//! ```text
//! 0   "DSECMAP1"
//! 8   boot id [16]   the boot in which `filled` was written
//! 24  sealed  u8     1: all content was on the disk before this was written
//! 64  filled  words  content was written, in that boot
//! ..  doubted words  content was written in an earlier boot and has not been checked since
//! ```
//!
//! A bit is written after its content. That is enough while the machine runs, however processes die: both are in the
//! page cache. After a power cut the disk may have kept the bit and lost the content. So bits from another boot are only
//! doubted, unless the blob was sealed, and a doubted group is held against its digest before anybody sees it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::BootId;
use super::bits::{Bits, words_for};

const MAGIC: &[u8; 8] = b"DSECMAP1";
const BOOT: usize = 8;
const SEALED: usize = 24;
const HEAD: usize = 64;

/// The file, open. Its owner keeps the bits; this writes them through.
#[derive(Debug)]
pub(super) struct MapFile {
    file: File,
    groups: u64,
    sealed: bool,
}

/// What a map file says.
pub(super) struct Loaded {
    pub(super) map: MapFile,
    pub(super) filled: Bits,
    pub(super) doubted: Bits,
    /// Seconds since 1970 when it was last written: how old its use is.
    pub(super) written_s: u32,
}

impl MapFile {
    /// Opens or makes the map of a blob with this many groups. One that is no map claims nothing.
    pub(super) fn load(path: &Path, groups: u64, boot: &BootId) -> io::Result<Loaded> {
        let words = words_for(groups);
        let old = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(e),
        };
        let valid = old.len() == HEAD + 2 * 8 * words && &old[..8] == MAGIC;
        let region = |at: usize| {
            let bytes = if valid { &old[HEAD + at * 8 * words..][..8 * words] } else { &[] };
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word))
        };
        let sealed = valid && old[SEALED] == 1;
        let same_boot = valid && old[BOOT..SEALED] == boot.0;
        let (filled, doubted): (Vec<u64>, Vec<u64>) = if same_boot || sealed {
            (region(0).collect(), region(1).collect())
        } else {
            (Vec::new(), region(0).zip(region(1)).map(|(filled, doubted)| filled | doubted).collect())
        };
        let (filled, doubted) = (Bits::new(groups, filled), Bits::new(groups, doubted));
        if !same_boot {
            Self::replace(path, boot, sealed, &filled, &doubted)?;
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let written_s = seconds(file.metadata()?.modified()?);
        Ok(Loaded { map: Self { file, groups, sealed }, filled, doubted, written_s })
    }

    /// Whole or not at all: a process that dies in between must not leave old bits under a new boot's id.
    fn replace(path: &Path, boot: &BootId, sealed: bool, filled: &Bits, doubted: &Bits) -> io::Result<()> {
        let mut bytes = vec![0; HEAD];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[BOOT..SEALED].copy_from_slice(&boot.0);
        bytes[SEALED] = u8::from(sealed);
        for word in filled.words().chain(doubted.words()) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let new = path.with_extension("map.new");
        let mut file = File::create(&new)?;
        file.write_all(&bytes)?;
        if sealed {
            file.sync_data()?;
        }
        std::fs::rename(new, path)
    }

    /// Writes the word of `filled` that `group` is in.
    pub(super) fn write_filled(&self, filled: &Bits, group: u64) -> io::Result<()> {
        self.write_word(filled, group, 0)
    }

    /// Writes the word of `doubted` that `group` is in.
    pub(super) fn write_doubted(&self, doubted: &Bits, group: u64) -> io::Result<()> {
        self.write_word(doubted, group, words_for(self.groups))
    }

    fn write_word(&self, bits: &Bits, group: u64, first: usize) -> io::Result<()> {
        let word = (group / 64) as usize;
        self.file.write_all_at(&bits.word_of(group).to_le_bytes(), (HEAD + (first + word) * 8) as u64)
    }

    /// Whether the content was on the disk before it was said to be here.
    pub(super) fn sealed(&self) -> bool {
        self.sealed
    }

    /// Says (or takes back), on the disk, that all content is on the disk.
    pub(super) fn set_sealed(&mut self, sealed: bool) -> io::Result<()> {
        if self.sealed != sealed {
            self.file.write_all_at(&[u8::from(sealed)], SEALED as u64)?;
            self.file.sync_data()?;
            self.sealed = sealed;
        }
        Ok(())
    }
}

/// Seconds since 1970, for comparing ages.
pub(super) fn seconds(time: std::time::SystemTime) -> u32 {
    time.duration_since(std::time::UNIX_EPOCH).map_or(0, |age| age.as_secs() as u32)
}
