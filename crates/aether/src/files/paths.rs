//! Paths and directories.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_proto::guest::GuestError;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, statat};
use rustix::io::Errno;

use crate::fail::{invalid, os, show};

/// As many as the kernel follows.
const LINKS_MAX: usize = 40;

/// Where a file is made or replaced: a directory, and the name in it.
pub(super) struct Place {
    pub(super) dir: OwnedFd,
    pub(super) name: Vec<u8>,
}

/// Directory part and last name of a path: `a/b` of `a/b/c` and `c`.
pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
    let path = &path[..end];
    match path.iter().rposition(|b| *b == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b".", path),
    }
}

pub(super) fn exists(path: &[u8]) -> bool {
    statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

pub(super) fn is_dir(path: &[u8]) -> bool {
    statat(CWD, path, AtFlags::empty())
        .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory)
}

/// Makes the directories above a path.
pub(super) fn make_parents(path: &[u8]) -> Result<(), GuestError> {
    let (dir, _) = split(path);
    make_dirs(dir)
}

/// Makes a directory and those above it.
pub(super) fn make_dirs(dir: &[u8]) -> Result<(), GuestError> {
    if is_dir(dir) {
        return Ok(());
    }
    let ends = dir.iter().enumerate().filter(|(at, b)| **b == b'/' && *at > 0).map(|(at, _)| at);
    for end in ends.chain([dir.len()]) {
        match rustix::fs::mkdir(&dir[..end], Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            // A directory may be there and its parent closed to us.
            Err(_) if is_dir(&dir[..end]) => {}
            Err(e) => return Err(os(format!("cannot make directory {}", show(&dir[..end])), e)),
        }
    }
    Ok(())
}

/// Follows a link at the end of a path to where the file really is to be, there or not.
pub(super) fn place(path: &[u8]) -> Result<Place, GuestError> {
    let failed = |e| os(format!("cannot write {}", show(path)), e);
    let mut path = path.to_vec();
    for _ in 0..LINKS_MAX {
        let (dir, name) = split(&path);
        if name.is_empty() || name == b"." || name == b".." {
            return Err(invalid(format!("{} is a directory", show(&path))));
        }
        match rustix::fs::readlink(&path, Vec::new()) {
            Ok(target) if target.as_bytes().starts_with(b"/") => path = target.into_bytes(),
            Ok(target) => path = [dir, b"/", target.as_bytes()].concat(),
            Err(Errno::INVAL | Errno::NOENT) => {
                if path.ends_with(b"/") {
                    return Err(invalid(format!("{} names a directory", show(&path))));
                }
                return Ok(Place { dir: open_parent(dir).map_err(failed)?, name: name.to_vec() });
            }
            Err(e) => return Err(failed(e)),
        }
    }
    Err(failed(Errno::LOOP))
}

/// Opens a directory to be read.
pub(super) fn open_dir(path: &[u8]) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a directory to reach what is in it, which needs no right to list it.
pub(super) fn open_parent(path: &[u8]) -> Result<OwnedFd, Errno> {
    open_dir(path).or_else(|e| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if e == Errno::ACCESS { rustix::fs::open(path, flags, Mode::empty()) } else { Err(e) }
    })
}

/// Opens a directory in a directory, never through a link.
pub(super) fn open_dir_at(dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// Names in a directory, sorted.
pub(super) fn names(dir: impl AsFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut buffer = Vec::with_capacity(32 << 10);
    let mut found = Vec::new();
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        match entry {
            Ok(entry) => {
                let name = entry.file_name().to_bytes();
                if name != b"." && name != b".." {
                    found.push(name.to_vec());
                }
            }
            // It was removed while it was read.
            Err(Errno::NOENT) => break,
            Err(e) => return Err(e),
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// A name for a file that is to become `name`.
pub(super) fn temporary(name: &[u8]) -> Vec<u8> {
    /// With what is added it stays below `NAME_MAX`.
    const MOST: usize = 200;
    let random = crate::sys::random();
    [b".", &name[..name.len().min(MOST)], format!(".dsec-{random:016x}").as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_splits_into_directory_and_name() {
        assert_eq!(split(b"/a/b"), (&b"/a"[..], &b"b"[..]));
        assert_eq!(split(b"/a"), (&b"/"[..], &b"a"[..]));
        assert_eq!(split(b"a/"), (&b"."[..], &b"a"[..]));
        assert_eq!(split(b"/").1, b"");
    }
}
