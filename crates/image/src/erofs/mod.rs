//! A writer of uncompressed EROFS images.
//!
//! The image has three areas, in this order, so that file content is written exactly once, while
//! it streams in, and everything that is only known at the end comes last:
//!
//! ```text
//! block 0        superblock (written last)
//! block 1 ..     data: the content of regular files, each starting on a block
//!   ..           directory blocks and symlink targets too long to sit in their inode
//! meta_blkaddr   inodes, with their xattrs, inline tails and chunk maps
//! ```
//!
//! Content is never inlined beside an inode: the data area then holds files and nothing else,
//! which is what DAX and a data device filled on demand need. Directories and symlinks are inline
//! where they fit.
//!
//! The same tree and the same content give the same bytes: inodes are numbered breadth-first in
//! name order, the build time is zero and the UUID is drawn from the metadata and the content's
//! checksums.
//!
//! Source: the on-disk format is the kernel's `Documentation/filesystems/erofs.rst` and
//! `fs/erofs/erofs_fs.h`; the images need Linux 5.15 (chunk-based files) and 6.12 to be mounted
//! straight from a file. The arrangement is ours.

mod data;
mod format;
mod tree;
mod write;
mod xattr;

pub use data::{AppendError, DataArea, FileData, Segment};
pub use tree::{Attributes, Content, Dirent, Inode, InodeId, Timestamp, Tree, WHOLE_TREE_LAYER};
pub use write::{ImageSummary, WriteError, finish};
pub use xattr::{XattrError, Xattrs};

/// Bytes in a block, of the file system and of its directories.
pub const BLOCK_SIZE: u64 = 1 << format::BLOCK_BITS;
