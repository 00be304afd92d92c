//! Unpacking a tar into a directory, and never out of it: parents are opened with `openat2` and
//! `RESOLVE_BENEATH`, so neither `..` nor a link, planted by the archive or there before, leads out.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use dsec_proto::guest::{FileReply, FileTar, GuestError, GuestErrorKind as Kind};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, openat2, statat,
};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use tar::{Archive, Entry, EntryType};

use super::{Call, paths};
use crate::fail::{fail, invalid, os, show};
use crate::users;

/// Pipe and buffer.
const BUFFER: usize = 256 << 10;
/// Nanoseconds that leave a time as it is (`UTIME_OMIT`).
const OMIT: i64 = 0x3fff_fffe;

type Input = BufReader<File>;

/// A directory whose mode and time are set at the end, when nothing is made in it any more.
struct Later {
    path: Vec<u8>,
    mode: u32,
    mtime: u64,
}

struct Unpacker<'a> {
    root: OwnedFd,
    is_root: bool,
    /// Whose all of it becomes, if not as the archive has it.
    owner: Option<(u32, u32)>,
    shown: &'a [u8],
    later: Vec<Later>,
    count: u64,
    bytes: u64,
}

impl Call<'_> {
    pub(super) fn unpack(&self, request: &FileTar) -> Result<(), GuestError> {
        let owner = match request.owner.as_str() {
            "" => None,
            spec => {
                crate::fail::no_nul("the owner", spec.as_bytes())?;
                Some(users::owner(spec)?)
            }
        };
        paths::make_dirs(self.path)?;
        let root =
            rustix::fs::open(self.path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|e| self.failed("unpack into", e))?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| os("cannot make a pipe", e))?;
        let _ = rustix::pipe::fcntl_setpipe_size(&write, BUFFER);
        self.send(FileReply::default(), &[write.as_fd()])?;
        drop(write);
        let is_root = self.user.uid == 0;
        let mut unpacker =
            Unpacker { root, is_root, owner, shown: self.path, later: Vec::new(), count: 0, bytes: 0 };
        let mut archive = Archive::new(BufReader::with_capacity(BUFFER, File::from(read)));
        unpacker.all(&mut archive)?;
        // What follows the end mark: read, or the writer would find its pipe broken.
        let mut rest = archive.into_inner();
        let _ = std::io::copy(&mut rest, &mut std::io::sink());
        unpacker.finish_directories();
        let (count, bytes) = (unpacker.count, unpacker.bytes);
        self.send(FileReply { last: true, count, bytes, ..FileReply::default() }, &[])
    }
}

impl Unpacker<'_> {
    fn all(&mut self, archive: &mut Archive<Input>) -> Result<(), GuestError> {
        let broken = |e: std::io::Error| invalid(format!("the archive is damaged or cut short: {e}"));
        for entry in archive.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            let named = entry.path_bytes().into_owned();
            self.entry(&mut entry, &named)?;
        }
        Ok(())
    }

    fn failed(&self, name: &[u8], errno: Errno) -> GuestError {
        match errno {
            Errno::XDEV | Errno::LOOP => {
                invalid(format!("entry {} leads out of {}, through a link", show(name), show(self.shown)))
            }
            e => os(format!("cannot unpack {} into {}", show(name), show(self.shown)), e),
        }
    }

    fn entry(&mut self, entry: &mut Entry<'_, Input>, named: &[u8]) -> Result<(), GuestError> {
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader) {
            return Ok(());
        }
        let path = inside(named)?;
        if path.is_empty() {
            // The directory itself: it stays as it is.
            return Ok(());
        }
        let header = entry.header();
        let mode = header.mode().unwrap_or(0o644) & if self.is_root { 0o7777 } else { 0o777 };
        let (uid, gid) = (header.uid().unwrap_or(0), header.gid().unwrap_or(0));
        let mtime = header.mtime().unwrap_or(0);
        let (parent, name) = self.parent(&path, named)?;
        let failed = |e| self.failed(named, e);
        match kind {
            EntryType::Directory => {
                self.directory(&parent, name).map_err(failed)?;
                self.later.push(Later { path: path.clone(), mode, mtime });
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                clear_way(&parent, name).map_err(failed)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file =
                    rustix::fs::openat(&parent, name, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
                let written = copy_content(entry, &file, named, self.shown)?;
                self.bytes += written;
                self.own(&parent, name, uid, gid).map_err(|e| self.failed(named, e))?;
                rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(|e| self.failed(named, e))?;
                self.count += 1;
                return rustix::fs::futimens(&file, &times(mtime)).map_err(|e| self.failed(named, e));
            }
            EntryType::Symlink => {
                let target = link_target(entry, named)?;
                clear_way(&parent, name).map_err(failed)?;
                rustix::fs::symlinkat(&target[..], &parent, name).map_err(failed)?;
                let _ = rustix::fs::utimensat(&parent, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW);
            }
            EntryType::Link => {
                let target = inside(&link_target(entry, named)?)?;
                let (from, from_name) = self.parent(&target, named)?;
                clear_way(&parent, name).map_err(failed)?;
                rustix::fs::linkat(&from, from_name, &parent, name, AtFlags::empty()).map_err(failed)?;
                // Owner and mode are the file's, which came before.
                self.count += 1;
                return Ok(());
            }
            EntryType::Fifo => {
                clear_way(&parent, name).map_err(failed)?;
                rustix::fs::mknodat(&parent, name, FileType::Fifo, Mode::from_raw_mode(mode), 0)
                    .map_err(failed)?;
            }
            EntryType::Char | EntryType::Block => {
                return Err(invalid(format!("entry {} is a device; a sandbox makes none", show(named))));
            }
            other => {
                return Err(invalid(format!(
                    "entry {} is of a kind this agent does not know ({other:?})",
                    show(named)
                )));
            }
        }
        self.own(&parent, name, uid, gid).map_err(|e| self.failed(named, e))?;
        self.count += 1;
        Ok(())
    }

    /// Opens the directory that a path is in, making those that are missing.
    fn parent<'p>(&self, path: &'p [u8], named: &[u8]) -> Result<(OwnedFd, &'p [u8]), GuestError> {
        let (dir, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b"."[..], path),
        };
        match self.beneath(dir) {
            Ok(fd) => return Ok((fd, name)),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(self.failed(named, e)),
        }
        let ends = dir.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| at);
        let mut above = self.beneath(b".").map_err(|e| self.failed(named, e))?;
        let mut start = 0;
        for end in ends.chain([dir.len()]) {
            match rustix::fs::mkdirat(&above, &dir[start..end], Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(self.failed(named, e)),
            }
            above = self.beneath(&dir[..end]).map_err(|e| self.failed(named, e))?;
            start = end + 1;
        }
        Ok((above, name))
    }

    fn beneath(&self, dir: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        loop {
            match openat2(&self.root, dir, flags, Mode::empty(), resolve) {
                // Somebody renames at this moment.
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return other,
            }
        }
    }

    fn directory(&self, parent: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
        // A directory is kept; anything else makes way.
        let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(());
        }
        rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))
    }

    /// Root gives files to their owners. An owner that the sandbox has no id for is left root, as is
    /// everything of others theirs.
    fn own(&self, parent: &OwnedFd, name: &[u8], uid: u64, gid: u64) -> Result<(), Errno> {
        if let Some((uid, gid)) = self.owner {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            return rustix::fs::chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
        }
        let (Ok(uid), Ok(gid)) = (u32::try_from(uid), u32::try_from(gid)) else { return Ok(()) };
        if !self.is_root || (uid, gid) == (0, 0) || uid == u32::MAX || gid == u32::MAX {
            return Ok(());
        }
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        match rustix::fs::chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::INVAL) => Ok(()),
            other => other,
        }
    }

    fn finish_directories(&self) {
        for later in self.later.iter().rev() {
            let Ok(dir) = self.beneath(&later.path) else { continue };
            let _ = rustix::fs::fchmod(&dir, Mode::from_raw_mode(later.mode));
            let _ = rustix::fs::futimens(&dir, &times(later.mtime));
        }
    }
}

fn times(mtime: u64) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: OMIT },
        last_modification: Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 },
    }
}

/// An entry's path below the target. A leading `/` is taken off, as tar does; `..` is refused.
fn inside(named: &[u8]) -> Result<Vec<u8>, GuestError> {
    crate::fail::no_nul("an entry's name", named)?;
    let mut path: Vec<u8> = Vec::with_capacity(named.len());
    for part in Path::new(std::ffi::OsStr::from_bytes(named)).components() {
        match part {
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            Component::ParentDir => {
                return Err(invalid(format!("entry {} has `..` in its path", show(named))));
            }
            Component::Normal(part) => {
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(part.as_bytes());
            }
        }
    }
    Ok(path)
}

fn link_target(entry: &Entry<'_, Input>, named: &[u8]) -> Result<Vec<u8>, GuestError> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() => Ok(target.into_owned()),
        _ => Err(invalid(format!("entry {} is a link to nothing", show(named)))),
    }
}

/// Removes what is in the way, but no directory with content.
fn clear_way(parent: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR),
        other => other,
    }
}

fn copy_content(
    entry: &mut Entry<'_, Input>,
    file: &OwnedFd,
    named: &[u8],
    shown: &[u8],
) -> Result<u64, GuestError> {
    let size = entry.size();
    let mut chunk = vec![0; (64 << 10).min(usize::try_from(size).unwrap_or(usize::MAX).max(1))];
    let mut done = 0;
    loop {
        let n = entry
            .read(&mut chunk)
            .map_err(|e| invalid(format!("the archive is damaged or cut short at {}: {e}", show(named))))?;
        if n == 0 {
            break;
        }
        let mut rest = &chunk[..n];
        while !rest.is_empty() {
            let written = rustix::io::write(file, rest)
                .map_err(|e| os(format!("cannot unpack {} into {}", show(named), show(shown)), e))?;
            rest = &rest[written..];
        }
        done += n as u64;
    }
    if done < size {
        let message = format!("the archive ends within {} ({done} of {size} bytes)", show(named));
        return Err(fail(Kind::InvalidArgument, message));
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_paths_stay_below() {
        assert_eq!(inside(b"/etc//passwd").unwrap(), b"etc/passwd");
        assert_eq!(inside(b"./a/./b/").unwrap(), b"a/b");
        assert_eq!(inside(b"./").unwrap(), b"");
        assert!(inside(b"a/../../b").is_err());
    }
}
