//! Listing a directory, to a depth, sorted, links not followed.

use std::os::fd::{AsFd, BorrowedFd};

use dsec_proto::guest::{FileInfo, FileListOp, FileReply, GuestError};
use rustix::fs::{AtFlags, FileType, statat};
use rustix::io::Errno;

use super::{Call, info, paths};
use crate::fail::invalid;

/// Entries of one frame: with long names still far below its limit.
const FRAME: usize = 512;
/// Levels followed, each with a descriptor open.
const DEPTH_MAX: u32 = 128;

struct Listing<'a> {
    call: &'a Call<'a>,
    batch: Vec<FileInfo>,
    left: u64,
    truncated: bool,
}

impl Call<'_> {
    pub(super) fn list(&self, request: FileListOp) -> Result<(), GuestError> {
        let dir = paths::open_dir(self.path).map_err(|e| match e {
            Errno::NOTDIR => invalid(format!("{} is not a directory", crate::fail::show(self.path))),
            e => self.failed("list", e),
        })?;
        let names = paths::names(&dir).map_err(|e| self.failed("list", e))?;
        let mut listing = Listing { call: self, batch: Vec::new(), left: request.limit, truncated: false };
        let depth = request.depth.clamp(1, DEPTH_MAX);
        listing.directory(dir.as_fd(), names, b"", depth)?;
        let last = FileReply {
            files: listing.batch,
            last: true,
            truncated: listing.truncated,
            ..FileReply::default()
        };
        self.send(last, &[])
    }
}

impl Listing<'_> {
    fn directory(
        &mut self,
        dir: BorrowedFd<'_>,
        names: Vec<Vec<u8>>,
        prefix: &[u8],
        depth: u32,
    ) -> Result<(), GuestError> {
        for name in names {
            if self.left == 0 {
                self.truncated = true;
                return Ok(());
            }
            // Gone since it was read.
            let Ok(stat) = statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let path = [prefix, &name].concat();
            let mut entry = info(&path, &stat);
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind == FileType::Symlink {
                let target = rustix::fs::readlinkat(dir, &name, Vec::new());
                entry.target = target.ok().map(std::ffi::CString::into_bytes);
            }
            self.batch.push(entry);
            self.left -= 1;
            if self.batch.len() == FRAME {
                let files = std::mem::take(&mut self.batch);
                self.call.send(FileReply { files, ..FileReply::default() }, &[])?;
            }
            if kind == FileType::Directory && depth > 1 {
                // One that may not be read is listed itself, without content.
                let Ok(below) = paths::open_dir_at(dir, &name) else { continue };
                let Ok(names) = paths::names(&below) else { continue };
                self.directory(below.as_fd(), names, &[&path, &b"/"[..]].concat(), depth - 1)?;
            }
        }
        Ok(())
    }
}
