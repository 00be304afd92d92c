//! A writer of metadata images ([`LayerTree::encode`]), and a reader of them ([`LayerTree::decode`]): EROFS without file
//! content, which lies in blobs, the devices of the mount.
//!
//! ```text
//! metadata   superblock, device table: a slot a blob, tagged with its id
//!            directory blocks and symlink targets too long to sit in their inode
//!            inodes, with xattrs, inline tails, and chunk maps ──(device, block)──► blob 1, blob 2, ...
//! ```
//!
//! Every file with content has a chunk map with entries of eight bytes (device, block); one without holes has a single
//! chunk. The format could also map all devices into one address space and let plain files point there. Both mount from
//! plain files; the map is used because it names its device, where the kernel finds a unified address by going through
//! all devices each time, because 32-bit addresses would otherwise have to do for all blobs together, and because the
//! blobs of a merged layer keep their addresses. It costs eight bytes a file.
//!
//! Content is never inlined beside an inode: blobs hold files and nothing else, which is what DAX and
//! devices filled on demand need. Directories and symlinks are inline where they fit.
//!
//! The same tree and the same content give the same bytes: inodes are numbered breadth-first in
//! name order, the build time is zero and the UUID is drawn from the metadata and the blobs' ids.
//!
//! Source: the on-disk format is the kernel's `Documentation/filesystems/erofs.rst` and
//! `fs/erofs/erofs_fs.h`; the images need Linux 5.16 (chunk-based files, devices) and 6.12 to be mounted
//! straight from a file. The arrangement is ours.

mod area;
mod data;
mod devices;
mod format;
mod read;
mod sparse;
mod tree;
mod write;
mod xattr;

pub(crate) use area::{Area, Extent, Passing};
pub(crate) use data::ChunkMap;
pub use data::{AppendError, FileData};
pub(crate) use data::{ContentStore, Segment};
pub(crate) use devices::device;
pub use devices::{BLOBS_MAX, BlobRef, LayerTree};
pub(crate) use format::NULL_ADDR;
pub use read::ReadError;
pub(crate) use sparse::CHUNK_BITS_MAX;
pub use tree::{Attributes, Content, Inode, InodeId, Timestamp, Tree};
pub use write::EncodeError;
pub use xattr::{XattrError, Xattrs};

/// Bytes in a block, of the file system and of its directories.
pub const BLOCK_SIZE: u64 = 1 << format::BLOCK_BITS;
