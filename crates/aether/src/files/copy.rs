//! A move that `rename` cannot do: to another file system, or of a directory that a lower layer of
//! the overlay holds. The copy is made beside the new place and renamed there; then the old is
//! removed. Whoever looks at the new path sees nothing or all of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_proto::guest::GuestError;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, Uid, fstat, statat,
};
use rustix::io::Errno;

use super::{paths, remove};
use crate::fail::{invalid, os, show};

/// Deeper trees are refused: each level holds two descriptors.
const DEPTH_MAX: usize = 128;

/// Moves by copying.
pub(super) fn move_across(from: &[u8], to: &[u8], overwrite: bool) -> Result<(), GuestError> {
    let failed = |e| os(format!("cannot move {} to {}", show(from), show(to)), e);
    let (from_dir, from_name) = paths::split(from);
    let (to_dir, to_name) = paths::split(to);
    if from_name.is_empty() || to_name.is_empty() {
        return Err(invalid("the root directory cannot be moved"));
    }
    let from_dir = paths::open_parent(from_dir).map_err(failed)?;
    let to_dir = paths::open_parent(to_dir).map_err(failed)?;
    if !overwrite && paths::exists(to) {
        return Err(failed(Errno::EXIST));
    }
    let temporary = paths::temporary(to_name);
    let copied = copy(from_dir.as_fd(), from_name, to_dir.as_fd(), &temporary, 0);
    let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let placed =
        copied.and_then(|()| rustix::fs::renameat_with(&to_dir, &temporary, &to_dir, to_name, flags));
    if let Err(e) = placed {
        let _ = remove::remove_at(&to_dir, &temporary, true, to);
        return Err(failed(e));
    }
    remove::remove_at(&from_dir, from_name, true, from)
}

fn copy(
    from: BorrowedFd<'_>,
    name: &[u8],
    to: BorrowedFd<'_>,
    new: &[u8],
    depth: usize,
) -> Result<(), Errno> {
    if depth > DEPTH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let stat = statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = rustix::fs::openat(to, new, flags, Mode::from_raw_mode(0o600))?;
            copy_content(&source, &file)?;
            keep_facts(&file, &fstat(&source)?)
        }
        FileType::Directory => {
            let source = paths::open_dir_at(from, name)?;
            rustix::fs::mkdirat(to, new, Mode::from_raw_mode(0o700))?;
            let target = paths::open_dir_at(to, new)?;
            for entry in paths::names(&source)? {
                copy(source.as_fd(), &entry, target.as_fd(), &entry, depth + 1)?;
            }
            keep_facts(&target, &stat)
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(from, name, Vec::new())?;
            rustix::fs::symlinkat(target, to, new)?;
            own(rustix::fs::chownat(to, new, Some(uid(&stat)), Some(gid(&stat)), AtFlags::SYMLINK_NOFOLLOW))
        }
        kind => {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            rustix::fs::mknodat(to, new, kind, mode, stat.st_rdev)?;
            own(rustix::fs::chownat(to, new, Some(uid(&stat)), Some(gid(&stat)), AtFlags::SYMLINK_NOFOLLOW))
        }
    }
}

fn uid(stat: &Stat) -> Uid {
    Uid::from_raw(stat.st_uid)
}

fn gid(stat: &Stat) -> Gid {
    Gid::from_raw(stat.st_gid)
}

/// Only root can keep owners; for others the copy is their own.
fn own(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        other => other,
    }
}

fn keep_facts(file: &OwnedFd, stat: &Stat) -> Result<(), Errno> {
    own(rustix::fs::fchown(file, Some(uid(stat)), Some(gid(stat))))?;
    rustix::fs::fchmod(file, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
    rustix::fs::futimens(
        file,
        &Timestamps {
            last_access: Timespec { tv_sec: stat.st_atime, tv_nsec: stat.st_atime_nsec as i64 },
            last_modification: Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as i64 },
        },
    )
}

fn copy_content(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
    const STEP: usize = 1 << 30;
    loop {
        match rustix::fs::copy_file_range(from, None, to, None, STEP) {
            Ok(0) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
                return copy_by_hand(from, to);
            }
            Err(e) => return Err(e),
        }
    }
}

fn copy_by_hand(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
    let mut chunk = vec![0; 128 << 10];
    loop {
        let n = rustix::io::read(from, &mut chunk)?;
        if n == 0 {
            return Ok(());
        }
        let mut rest = &chunk[..n];
        while !rest.is_empty() {
            let written = rustix::io::write(to, rest)?;
            rest = &rest[written..];
        }
    }
}
