//! Removing files and trees. Never follows a link, and keeps one descriptor whatever the depth: the
//! way back up is by `..`, which has to be the directory that it came from.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_proto::guest::{GuestError, GuestErrorKind as Kind};
use rustix::fs::{AtFlags, CWD, FileType, OFlags, Stat, fstat, statat, unlinkat};
use rustix::io::Errno;

use super::write::raced;
use super::{Call, paths};
use crate::fail::{fail_hint, invalid, os, show};

/// Times that a directory which is not empty when it should be is gone through again: somebody
/// inside keeps making files in it.
const AGAIN_MAX: u32 = 64;

impl Call<'_> {
    pub(super) fn remove(&self, recursive: bool) -> Result<(), GuestError> {
        let (dir, name) = paths::split(self.path);
        if name.is_empty() || name == b"." || name == b".." {
            return Err(invalid(format!("{} cannot be removed", show(self.path))));
        }
        let dir = paths::open_parent(dir).map_err(|e| self.failed("remove", e))?;
        if is_root(dir.as_fd(), name) {
            return Err(invalid("the root directory cannot be removed"));
        }
        remove_at(&dir, name, recursive, self.path)?;
        self.send(dsec_proto::guest::FileReply { last: true, ..Default::default() }, &[])
    }
}

fn is_root(dir: BorrowedFd<'_>, name: &[u8]) -> bool {
    let here = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    let root = statat(CWD, "/", AtFlags::empty());
    matches!((here, root), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// Removes `name` in `dir`; `shown` is its path in messages.
pub(super) fn remove_at(dir: &OwnedFd, name: &[u8], recursive: bool, shown: &[u8]) -> Result<(), GuestError> {
    let failed = |e| os(format!("cannot remove {}", show(shown)), e);
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return unlinkat(dir, name, AtFlags::empty()).map_err(failed);
    }
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) => Ok(()),
        Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => remove_tree(dir, name, shown),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Err(fail_hint(
            Kind::Conflict,
            format!("{} is a directory that is not empty", show(shown)),
            "ask for recursive removal",
        )),
        Err(e) => Err(failed(e)),
    }
}

struct Level {
    /// Its name in the directory above.
    name: Vec<u8>,
    /// Which directory it is.
    is: (u64, u64),
    again: u32,
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn remove_tree(top: &OwnedFd, name: &[u8], shown: &[u8]) -> Result<(), GuestError> {
    let failed = |e| os(format!("cannot remove {} with all below it", show(shown)), e);
    let enter = |dir: BorrowedFd<'_>, name: &[u8]| -> Result<(OwnedFd, Level), Errno> {
        let fd = paths::open_dir_at(dir, name)?;
        let is = identity(&fstat(&fd)?);
        Ok((fd, Level { name: name.to_vec(), is, again: 0 }))
    };
    let (mut here, level) = enter(top.as_fd(), name).map_err(failed)?;
    let mut above: Vec<Level> = Vec::new();
    let mut level = level;
    loop {
        match clear(&here).map_err(failed)? {
            Some(below) => match enter(here.as_fd(), &below) {
                Ok((fd, entered)) => {
                    above.push(std::mem::replace(&mut level, entered));
                    here = fd;
                }
                // It went away or was replaced; it is met again if it is there.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(e) => return Err(failed(e)),
            },
            None => {
                let up = match above.last() {
                    None => top.try_clone().map_err(|_| failed(Errno::MFILE))?,
                    Some(parent) => {
                        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                        let up = rustix::fs::openat(&here, "..", flags, rustix::fs::Mode::empty())
                            .map_err(failed)?;
                        if identity(&fstat(&up).map_err(failed)?) != parent.is {
                            return Err(raced(&show(shown)));
                        }
                        up
                    }
                };
                match unlinkat(&up, &level.name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(Errno::NOTEMPTY | Errno::EXIST) if level.again < AGAIN_MAX => {
                        level.again += 1;
                        continue;
                    }
                    Err(e) => return Err(failed(e)),
                }
                match above.pop() {
                    None => return Ok(()),
                    Some(parent) => {
                        level = parent;
                        here = up;
                    }
                }
            }
        }
    }
}

/// Unlinks all files of a directory; the first directory in it, if there is one, is to be entered.
fn clear(dir: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    rustix::fs::seek(dir, rustix::fs::SeekFrom::Start(0))?;
    for name in paths::names(dir)? {
        match unlinkat(dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => match unlinkat(dir, &name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => return Ok(Some(name)),
                Err(e) => return Err(e),
            },
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}
