//! What can go wrong. Every error says what was found and what to do; none repeats its source.

use std::io;
use std::path::{Path, PathBuf};

use dsec_model::ErrorKind;

use crate::erofs::{AppendError, XattrError};

/// What is wrong with one entry of an archive.
#[derive(Debug, thiserror::Error)]
pub enum EntryProblem {
    /// A path with a `..` component.
    #[error("its path contains `..`, which could leave the image; rebuild the archive without it")]
    ParentTraversal,
    /// A name, target or path with a NUL byte.
    #[error("it contains a NUL byte, which no file name can have; rebuild the archive")]
    NulByte,
    /// A file name that no Linux file system takes.
    #[error("one of its names has {len} bytes and 255 is the most; shorten it")]
    NameTooLong {
        /// Bytes in the name.
        len: usize,
    },
    /// A path that no system call takes.
    #[error("its path has {len} bytes and 4096 is the most; shorten it")]
    PathTooLong {
        /// Bytes in the path.
        len: usize,
    },
    /// A path with no name in it, for something that is not a directory.
    #[error("it names the root of the image, which can only be a directory; rebuild the archive")]
    RootNotDirectory,
    /// More than `ImportLimits::max_files` entries.
    #[error("it is beyond the {max} entries an import may have; use a smaller image or raise the limit")]
    TooManyFiles {
        /// The limit.
        max: u64,
    },
    /// More than `ImportLimits::max_bytes` of content.
    #[error("with it the content passes the limit of {max} bytes; use a smaller image or raise the limit")]
    TooManyBytes {
        /// The limit.
        max: u64,
    },
    /// More than `ImportLimits::max_metadata_bytes` of names and attributes.
    #[error(
        "with it names and attributes pass the limit of {max} bytes; use a smaller image or raise the limit"
    )]
    TooMuchMetadata {
        /// The limit.
        max: u64,
    },
    /// A symlink target that no system call takes.
    #[error("its link target has {len} bytes and 4095 is the most; shorten it")]
    TargetTooLong {
        /// Bytes in the target.
        len: usize,
    },
    /// A symlink or hard link to nothing.
    #[error("its link target is empty; rebuild the archive")]
    EmptyTarget,
    /// An extended header that is larger than any honest one.
    #[error("its extended header has {size} bytes and 1048576 is the most; drop its attributes")]
    ExtendedHeaderTooLarge {
        /// Bytes announced.
        size: u64,
    },
    /// A PAX record that cannot be understood.
    #[error("its extended header is not valid ({what}); rebuild the archive with GNU tar or bsdtar")]
    BadExtendedHeader {
        /// What is wrong.
        what: &'static str,
    },
    /// A header that is not one: wrong checksum or a field that is no number.
    #[error("its header is not valid ({what}); the archive is damaged or no tar archive, get it again")]
    BadHeader {
        /// What is wrong.
        what: &'static str,
    },
    /// The archive ends too early.
    #[error("the archive ends in it, or right after it without an end mark; it is cut off, get it again")]
    Truncated,
    /// A kind of entry that images cannot have.
    #[error("it has the type {type_flag:?}, which an image cannot have; leave it out of the archive")]
    UnsupportedType {
        /// The tar type flag.
        type_flag: char,
    },
    /// Symlinks among its parents go in a circle, or further than anyone's do.
    #[error("its parent directories lead through more than 40 symlinks; they go in a circle, mend them")]
    SymlinkLoop,
    /// A parent that is a file.
    #[error("`{parent}` in its path is no directory in the image; add the directory before the entry")]
    ParentNotDirectory {
        /// The component.
        parent: String,
    },
    /// A hard link to a file that is not in the image.
    #[error("it is a hard link to `{target}`, which is not in the image before it; add the target first")]
    LinkTargetMissing {
        /// The target.
        target: String,
    },
    /// A hard link to a directory.
    #[error("it is a hard link to `{target}`, which is a directory; use a symlink")]
    LinkTargetDirectory {
        /// The target.
        target: String,
    },
    /// A hard link whose target has a `..` component.
    #[error("it is a hard link to `{target}`, which could leave the image; name the target without `..`")]
    LinkTargetOutside {
        /// The target.
        target: String,
    },
    /// A sparse map that cannot be true.
    #[error("its map of holes is not valid ({what}); rebuild the archive with GNU tar --sparse")]
    BadSparseMap {
        /// What is wrong.
        what: &'static str,
    },
    /// A device number outside Linux's range.
    #[error("its device number {major}:{minor} is out of range (4095:1048575); leave it out of the archive")]
    BadDevice {
        /// Major number.
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// An extended attribute that cannot be stored.
    #[error("its attribute `{name}` cannot be kept; shorten or drop it")]
    BadXattr {
        /// The attribute.
        name: String,
        /// Why.
        #[source]
        source: XattrError,
    },
    /// A whiteout of nothing.
    #[error("it is a whiteout of no valid name; rebuild the layer")]
    BadWhiteout,
    /// The bytes cannot be had: damaged compression, or a failing disk.
    #[error("the archive cannot be read further; if it is damaged, get it again")]
    Read(#[source] io::Error),
    /// The file that takes content in cannot be written.
    #[error("its content cannot be written to {path}; look at the disk")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The node's disk is full.
    #[error("the disk of {path} is full; free some room or use a larger disk")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
    /// A file or directory of the host cannot be read.
    #[error("it cannot be read; look at its disk and permissions")]
    Unreadable(#[source] io::Error),
    /// Something changed while it was read.
    #[error("it changed while it was read; stop what writes to the directory, or give a snapshot of it")]
    Changed,
    /// It was not read by when it had to be.
    #[error("reading took longer than it may")]
    Late,
    /// An attribute of overlayfs that layers do not have.
    #[error(
        "it has the attribute `{name}`, which says that its content is elsewhere; mount the overlay without metacopy"
    )]
    OverlayAttribute {
        /// The attribute.
        name: String,
    },
    /// A rule says that it must not be there.
    #[error("it matches the deny rule `{rule}`; remove it, exclude it, or drop the rule")]
    Denied {
        /// The rule.
        rule: String,
    },
    /// The store did not take a pack.
    #[error("a pack of the layer's content cannot be stored; look at the store")]
    Pack {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// More than EROFS can address.
    #[error("with it the image would be larger than 16 TiB; split it")]
    ImageTooLarge,
}

/// Why an import failed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The source cannot be read.
    #[error("the source {path} cannot be read; check that it exists and may be read")]
    Source {
        /// The source, or the file in it.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The source is nothing that can be imported.
    #[error(
        "{path} {found}; give a root file system as tar, an OCI layout or a `docker save` archive, \
             plain or compressed with gzip, zstd or xz"
    )]
    NotAnArchive {
        /// The source.
        path: PathBuf,
        /// What it is instead.
        found: &'static str,
    },
    /// An entry cannot be taken in.
    #[error("entry `{entry}` of {archive} cannot be imported")]
    Entry {
        /// The source or the layer in it.
        archive: String,
        /// The entry's path, or where in the archive it is when it has none.
        entry: String,
        /// What is wrong with it.
        #[source]
        problem: EntryProblem,
    },
    /// A blob is not what its digest says.
    #[error("blob {blob} has the digest {found}; the archive is damaged, get it again")]
    DigestMismatch {
        /// The digest it should have.
        blob: String,
        /// The digest it has.
        found: String,
    },
    /// A blob is missing.
    #[error("{blob} is not in the archive; save the image again with all its layers")]
    BlobMissing {
        /// Digest or member name.
        blob: String,
    },
    /// A digest of a kind that cannot be verified, or no digest at all.
    #[error("{digest:?} is no SHA-256 digest, and only those are verified; save the image with SHA-256")]
    UnsupportedDigest {
        /// As it is written.
        digest: String,
    },
    /// A manifest, index or configuration that is too large to be one.
    #[error("{what} has {size} bytes and 8388608 is the most; it is no manifest")]
    DocumentTooLarge {
        /// The document.
        what: String,
        /// Its size in bytes.
        size: u64,
    },
    /// A manifest, index or configuration that cannot be understood.
    #[error("{what} is not valid; save the image again")]
    BadDocument {
        /// The document.
        what: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A manifest that contradicts itself or asks for something not built.
    #[error("{what} cannot be used: {why}")]
    UnsupportedImage {
        /// The document.
        what: String,
        /// Why, and what to do.
        why: String,
    },
    /// No image for this host.
    #[error("no image for linux/{wanted} is in the archive; it has: {}; save it for this platform", list(.found))]
    NoPlatform {
        /// This host's architecture.
        wanted: String,
        /// The platforms there are.
        found: Vec<String>,
    },
    /// More than one image for this host.
    #[error("the archive has several images: {}; save only the one to import", list(.found))]
    Ambiguous {
        /// Names or digests of them.
        found: Vec<String>,
    },
    /// The node's disk is full.
    #[error("the disk of {path} is full; free some room or use a larger disk")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
    /// The import's directory cannot be written.
    #[error("{path} cannot be written; look at its disk and permissions")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The store did not take the last of a layer's packs.
    #[error("the layer's content cannot be stored; look at the store")]
    Pack(#[source] AppendError),
}

impl ImportError {
    /// The kind a caller of the API is told.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Entry { problem, .. } => problem.kind(),
            Self::NoPlatform { .. } => ErrorKind::Unsupported,
            Self::DocumentTooLarge { .. } => ErrorKind::TooLarge,
            Self::DiskFull { .. } => ErrorKind::ResourceExhausted,
            Self::Write { .. } | Self::Pack(_) => ErrorKind::Internal,
            Self::Source { .. }
            | Self::NotAnArchive { .. }
            | Self::DigestMismatch { .. }
            | Self::BlobMissing { .. }
            | Self::UnsupportedDigest { .. }
            | Self::BadDocument { .. }
            | Self::UnsupportedImage { .. }
            | Self::Ambiguous { .. } => ErrorKind::InvalidArgument,
        }
    }

    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if is_full(&source) { Self::DiskFull { path } } else { Self::Write { path, source } }
    }
}

impl EntryProblem {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::TooManyFiles { .. }
            | Self::TooManyBytes { .. }
            | Self::TooMuchMetadata { .. }
            | Self::ImageTooLarge => ErrorKind::TooLarge,
            Self::DiskFull { .. } => ErrorKind::ResourceExhausted,
            Self::Write { .. } | Self::Pack { .. } => ErrorKind::Internal,
            Self::Denied { .. } => ErrorKind::Conflict,
            _ => ErrorKind::InvalidArgument,
        }
    }

    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if is_full(&source) { Self::DiskFull { path } } else { Self::Write { path, source } }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn list(items: &[String]) -> String {
    if items.is_empty() { "nothing".to_owned() } else { items.join(", ") }
}

/// Bytes of an archive as text for an error: lossy, without control characters, and short.
pub(crate) fn printable(bytes: &[u8]) -> String {
    const MOST: usize = 200;
    let text = String::from_utf8_lossy(bytes);
    let mut out: String =
        text.chars().take(MOST).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        out.push('…');
    }
    out
}
