//! Writing a file: whole and atomic, or in place from an offset.
//!
//! The edge writes the content itself, through a descriptor of a file that this child opened; then
//! it sends one byte to commit. Without it the temporary file is removed. A file in memory is written by
//! this child, from a pipe: memory is charged to whoever first writes to it, and that is to be the sandbox.

use std::os::fd::{AsFd, OwnedFd};

use dsec_proto::guest::{FileReply, FileWrite, GuestError};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid, fstat, statat};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};

use super::paths::{self, Place};
use super::{Call, info};
use crate::fail::{fail, fail_hint, invalid, os, show};
use crate::users;

/// `PROC_SUPER_MAGIC`.
const PROC: u64 = 0x9fa0;
/// `TMPFS_MAGIC`.
const TMPFS: u64 = 0x0102_1994;
/// Bytes of the content's pipe.
const PIPE: usize = 1 << 20;

impl Call<'_> {
    pub(super) fn write(&self, request: &FileWrite) -> Result<(), GuestError> {
        let owner = match request.owner.as_str() {
            "" => None,
            spec => {
                crate::fail::no_nul("the owner", spec.as_bytes())?;
                Some(users::owner(spec)?)
            }
        };
        if request.parents {
            paths::make_parents(self.path)?;
        }
        match request.offset {
            Some(_) => self.write_in_place(request, owner),
            None => self.replace(request, owner),
        }
    }

    fn write_in_place(&self, request: &FileWrite, owner: Option<(u32, u32)>) -> Result<(), GuestError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(self.path, flags, Mode::from_raw_mode(0o644)).map_err(|e| match e {
            // A pipe without a reader, or a socket.
            Errno::NXIO => self.not_regular("write", FileType::Fifo),
            e => self.failed("write", e),
        })?;
        let stat = fstat(&file).map_err(|e| self.failed("write", e))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::RegularFile {
            return Err(self.not_regular("write", kind));
        }
        // `/proc/self` would be this child, through a link that somebody inside has planted.
        if is_on(&file, PROC) {
            return Err(invalid(format!(
                "{} is in /proc; only stored files can be written",
                show(self.path)
            )));
        }
        let replied = FileReply { files: vec![info(self.path, &stat)], ..FileReply::default() };
        if !self.content(replied, &file, request.offset.unwrap_or(0))? {
            return Ok(());
        }
        self.finish(&file, owner, request.mode)?;
        self.answer(info(self.path, &fstat(&file).map_err(|e| self.failed("stat", e))?))
    }

    fn replace(&self, request: &FileWrite, owner: Option<(u32, u32)>) -> Result<(), GuestError> {
        let place = paths::place(self.path)?;
        let old = statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW).ok();
        if let Some(old) = &old {
            let kind = FileType::from_raw_mode(old.st_mode);
            if kind != FileType::RegularFile {
                return Err(self.not_regular("write", kind));
            }
        }
        let temporary = paths::temporary(&place.name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&place.dir, &temporary, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| self.failed("write", e))?;
        let done = self.fill(request, owner, &place, old.as_ref(), &file, &temporary);
        if !matches!(done, Ok(true)) {
            let _ = rustix::fs::unlinkat(&place.dir, &temporary, AtFlags::empty());
        }
        done?;
        Ok(())
    }

    /// True when the file is in its place.
    fn fill(
        &self,
        request: &FileWrite,
        owner: Option<(u32, u32)>,
        place: &Place,
        old: Option<&Stat>,
        file: &OwnedFd,
        temporary: &[u8],
    ) -> Result<bool, GuestError> {
        if !self.content(FileReply::default(), file, 0)? {
            return Ok(false);
        }
        // Root keeps the owner of what it replaces; others own what they write.
        let kept = old.filter(|_| self.user.uid == 0).map(|o| (o.st_uid, o.st_gid));
        let mode = request.mode.or(old.map(|o| o.st_mode & 0o7777)).unwrap_or(0o644);
        self.finish(file, owner.or(kept), Some(mode))?;
        rustix::fs::renameat(&place.dir, temporary, &place.dir, &place.name).map_err(|e| match e {
            Errno::BUSY => fail_hint(
                dsec_proto::guest::GuestErrorKind::Conflict,
                format!("cannot replace {}: it is a mount point", show(self.path)),
                "write it in place (with an offset)",
            ),
            e => self.failed("replace", e),
        })?;
        self.answer(info(self.path, &fstat(file).map_err(|e| self.failed("stat", e))?))?;
        Ok(true)
    }

    /// Hands out where the content is to go; true when it is there and counts.
    fn content(&self, reply: FileReply, file: &OwnedFd, mut at: u64) -> Result<bool, GuestError> {
        if !self.pipes || !is_on(file, TMPFS) {
            self.send(reply, &[file.as_fd()])?;
            return Ok(self.committed());
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| os("cannot make a pipe", e))?;
        let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE);
        self.send(reply, &[write.as_fd()])?;
        drop(write);
        loop {
            match splice(&read, None, file, Some(&mut at), PIPE, SpliceFlags::empty()) {
                Ok(0) => return Ok(self.committed()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(self.failed("write", e)),
            }
        }
    }

    /// Owner, then mode: a change of owner takes the set-id bits away.
    fn finish(&self, file: &OwnedFd, owner: Option<(u32, u32)>, mode: Option<u32>) -> Result<(), GuestError> {
        if let Some((uid, gid)) = owner {
            rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
                .map_err(|e| os(format!("cannot give {} to {uid}:{gid}", show(self.path)), e))?;
        }
        if let Some(mode) = mode {
            if mode & !0o7777 != 0 {
                return Err(invalid(format!("{mode:o} are no permission bits")));
            }
            rustix::fs::fchmod(file, Mode::from_raw_mode(mode))
                .map_err(|e| self.failed("set the mode of", e))?;
        }
        Ok(())
    }

    /// Waits for the commit byte; false when the edge went away instead.
    fn committed(&self) -> bool {
        let mut byte = [0];
        loop {
            match rustix::io::read(self.socket, &mut byte) {
                Err(Errno::INTR) => {}
                Ok(1) => return byte[0] == 1,
                _ => return false,
            }
        }
    }
}

fn is_on(file: &OwnedFd, file_system: u64) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type as u64 == file_system)
}

/// Something was changed under us.
pub(super) fn raced(what: &str) -> GuestError {
    fail(dsec_proto::guest::GuestErrorKind::Conflict, format!("{what} was changed meanwhile"))
}
