//! The part of the kernel's FUSE protocol that a read-only directory of files needs. Names are those of `fuse.h`; the
//! layouts are its structs, little-endian as on every machine this runs on.

/// Protocol version that is spoken. 7.40 (Linux 6.9) brought `FUSE_NOTIFY_RESEND`.
pub(super) const FUSE_KERNEL_VERSION: u32 = 7;
pub(super) const FUSE_KERNEL_MINOR_VERSION: u32 = 40;
pub(super) const FUSE_ROOT_ID: u64 = 1;

pub(super) const FUSE_LOOKUP: u32 = 1;
pub(super) const FUSE_FORGET: u32 = 2;
pub(super) const FUSE_GETATTR: u32 = 3;
pub(super) const FUSE_OPEN: u32 = 14;
pub(super) const FUSE_READ: u32 = 15;
pub(super) const FUSE_STATFS: u32 = 17;
pub(super) const FUSE_RELEASE: u32 = 18;
pub(super) const FUSE_FLUSH: u32 = 25;
pub(super) const FUSE_INIT: u32 = 26;
pub(super) const FUSE_OPENDIR: u32 = 27;
pub(super) const FUSE_READDIR: u32 = 28;
pub(super) const FUSE_RELEASEDIR: u32 = 29;
pub(super) const FUSE_INTERRUPT: u32 = 36;
pub(super) const FUSE_DESTROY: u32 = 38;
pub(super) const FUSE_BATCH_FORGET: u32 = 42;

pub(super) const FUSE_NOTIFY_RESEND: i32 = 7;

pub(super) const FUSE_ASYNC_READ: u64 = 1 << 0;
pub(super) const FUSE_ASYNC_DIO: u64 = 1 << 15;
pub(super) const FUSE_PARALLEL_DIROPS: u64 = 1 << 18;
pub(super) const FUSE_MAX_PAGES: u64 = 1 << 22;
pub(super) const FUSE_EXPLICIT_INVAL_DATA: u64 = 1 << 25;
pub(super) const FUSE_INIT_EXT: u64 = 1 << 30;
pub(super) const FUSE_HAS_RESEND: u64 = 1 << 39;

pub(super) const FOPEN_DIRECT_IO: u32 = 1 << 0;
pub(super) const FOPEN_NOFLUSH: u32 = 1 << 5;

/// Smallest buffer the kernel lets a request be read into.
pub(super) const FUSE_MIN_READ_BUFFER: usize = 8192;
/// Names and attributes hold for ever: a file is named by its content.
const VALID_FOR_EVER_S: u64 = 1 << 40;

/// Length of `fuse_in_header`, `fuse_out_header`.
const IN_HEADER: usize = 40;
pub(super) const OUT_HEADER: usize = 16;

/// A request, as `fuse_in_header` and what follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) nodeid: u64,
    pub(super) body: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads what the kernel wrote; `None`: it is not a request.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, body) = bytes.split_at_checked(IN_HEADER)?;
        (u32_at(header, 0)? as usize == bytes.len()).then_some(())?;
        Some(Self {
            opcode: u32_at(header, 4)?,
            unique: u64_at(header, 8)?,
            nodeid: u64_at(header, 16)?,
            body,
        })
    }

    /// `fuse_read_in`: offset and size.
    pub(super) fn read_in(&self) -> Option<(u64, u32)> {
        Some((u64_at(self.body, 8)?, u32_at(self.body, 16)?))
    }

    /// The name that LOOKUP asks for.
    pub(super) fn name(&self) -> Option<&'a str> {
        std::str::from_utf8(self.body.strip_suffix(&[0])?).ok()
    }

    /// `fuse_init_in`: minor version, readahead, flags.
    pub(super) fn init_in(&self) -> Option<InitIn> {
        Some(InitIn {
            major: u32_at(self.body, 0)?,
            minor: u32_at(self.body, 4)?,
            max_readahead: u32_at(self.body, 8)?,
            flags: u64::from(u32_at(self.body, 12)?)
                | (u64::from(u32_at(self.body, 16).unwrap_or_default()) << 32),
        })
    }
}

/// `fuse_init_in`.
#[derive(Debug, Clone, Copy)]
pub(super) struct InitIn {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead: u32,
    pub(super) flags: u64,
}

/// `fuse_init_out`.
#[derive(Debug, Clone, Copy)]
pub(super) struct InitOut {
    pub(super) max_readahead: u32,
    pub(super) flags: u64,
    pub(super) max_background: u16,
    pub(super) max_write: u32,
    pub(super) max_pages: u16,
}

impl InitOut {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        put32(
            &mut out,
            &[FUSE_KERNEL_VERSION, FUSE_KERNEL_MINOR_VERSION, self.max_readahead, self.flags as u32],
        );
        out.extend_from_slice(&self.max_background.to_le_bytes());
        // congestion_threshold: the kernel's usual three quarters.
        out.extend_from_slice(&(self.max_background / 4 * 3).to_le_bytes());
        put32(&mut out, &[self.max_write, 1]);
        out.extend_from_slice(&self.max_pages.to_le_bytes());
        out.extend_from_slice(&0u16.to_le_bytes());
        put32(&mut out, &[(self.flags >> 32) as u32]);
        out.resize(64, 0);
        out
    }
}

/// What GETATTR and LOOKUP say of a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) nodeid: u64,
    pub(super) size: u64,
    pub(super) directory: bool,
}

impl Node {
    pub(super) const ROOT: Self = Self { nodeid: FUSE_ROOT_ID, size: 0, directory: true };

    /// `fuse_attr_out`.
    pub(super) fn attr_out(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(104);
        put64(&mut out, &[VALID_FOR_EVER_S]);
        put32(&mut out, &[0, 0]);
        self.attr(&mut out);
        out
    }

    /// `fuse_entry_out`.
    pub(super) fn entry_out(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        // generation 0: a number means one blob for ever.
        put64(&mut out, &[self.nodeid, 0, VALID_FOR_EVER_S, VALID_FOR_EVER_S]);
        put32(&mut out, &[0, 0]);
        self.attr(&mut out);
        out
    }

    /// `fuse_attr`.
    fn attr(&self, out: &mut Vec<u8>) {
        let (mode, links) = if self.directory { (0o040_555, 2) } else { (0o100_444, 1) };
        // ino, size, blocks; three times of day, all 1970; their nanoseconds; mode, nlink, uid, gid, rdev, blksize, flags.
        put64(out, &[self.nodeid, self.size, self.size.div_ceil(512), 0, 0, 0]);
        put32(out, &[0, 0, 0, mode, links, 0, 0, 0, 4096, 0]);
    }
}

/// `fuse_dirent` of a file, padded; its `off` is the file's number, after which the next listing goes on.
pub(super) fn dirent(nodeid: u64, name: &str, out: &mut Vec<u8>) {
    /// Of readdir(3).
    const DT_REG: u32 = 8;
    put64(out, &[nodeid, nodeid]);
    put32(out, &[name.len() as u32, DT_REG]);
    out.extend_from_slice(name.as_bytes());
    out.resize(out.len().next_multiple_of(8), 0);
}

/// `fuse_open_out`.
pub(super) fn open_out(flags: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(16);
    put64(&mut out, &[0]);
    put32(&mut out, &[flags, 0]);
    out
}

/// `fuse_statfs_out`.
pub(super) fn statfs_out(blocks: u64, files: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(80);
    put64(&mut out, &[blocks, 0, 0, files, 0]);
    put32(&mut out, &[4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0]);
    out
}

/// `fuse_out_header`; `error` is an errno, or 0.
pub(super) fn out_header(unique: u64, error: i32, body: usize) -> [u8; OUT_HEADER] {
    let mut out = [0; OUT_HEADER];
    out[..4].copy_from_slice(&((OUT_HEADER + body) as u32).to_le_bytes());
    out[4..8].copy_from_slice(&(-error).to_le_bytes());
    out[8..].copy_from_slice(&unique.to_le_bytes());
    out
}

/// The message that has the kernel send again all that was read and not answered.
pub(super) fn notify_resend() -> [u8; OUT_HEADER] {
    out_header(0, -FUSE_NOTIFY_RESEND, 0)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn put32(out: &mut Vec<u8>, numbers: &[u32]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

fn put64(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_lengths_of_the_kernels_structs() {
        let init = InitOut { max_readahead: 0, flags: 0, max_background: 0, max_write: 0, max_pages: 0 };
        let lengths = [
            Node::ROOT.attr_out().len(),
            Node::ROOT.entry_out().len(),
            open_out(0).len(),
            statfs_out(0, 0).len(),
            init.encode().len(),
        ];
        assert_eq!(lengths, [104, 128, 16, 80, 64]);
        let mut dirent = Vec::new();
        super::dirent(2, "abc", &mut dirent);
        assert_eq!(dirent.len(), 32);
    }

    #[test]
    fn a_cut_request_is_none() {
        assert!(Request::parse(&[0; 39]).is_none() && Request::parse(&[0; 40]).is_none());
        let mut bytes = vec![0; 40];
        bytes[0] = 40;
        let request = Request::parse(&bytes).unwrap();
        assert!(request.read_in().is_none() && request.name().is_none() && request.init_in().is_none());
    }
}
