//! A tar of a directory's content, or of one file, written to a pipe that the edge reads.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dsec_proto::guest::{FileReply, GuestError};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, statat};
use rustix::pipe::{PipeFlags, pipe_with};
use tar::{Builder, EntryType, Header};

use super::{Call, paths};
use crate::fail::{os, show};

/// Levels followed, each with a descriptor open.
const DEPTH_MAX: usize = 128;
/// Pipe and buffer: tar's own writes are 512 bytes.
const BUFFER: usize = 256 << 10;

struct Packer<'a> {
    tar: Builder<BufWriter<File>>,
    /// Files with several names, by what they are: the first name met.
    linked: HashMap<(u64, u64), PathBuf>,
    count: u64,
    bytes: u64,
    root: &'a [u8],
}

impl Call<'_> {
    pub(super) fn pack(&self) -> Result<(), GuestError> {
        let stat = statat(CWD, self.path, AtFlags::empty()).map_err(|e| self.failed("pack", e))?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| os("cannot make a pipe", e))?;
        let _ = rustix::pipe::fcntl_setpipe_size(&write, BUFFER);
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let (dir, name) = if is_dir { (self.path, &b""[..]) } else { paths::split(self.path) };
        let opened = if is_dir { paths::open_dir(dir) } else { paths::open_parent(dir) };
        let dir = opened.map_err(|e| self.failed("pack", e))?;
        self.send(FileReply::default(), &[read.as_fd()])?;
        drop(read);
        let mut packer = Packer {
            tar: Builder::new(BufWriter::with_capacity(BUFFER, File::from(write))),
            linked: HashMap::new(),
            count: 0,
            bytes: 0,
            root: self.path,
        };
        if is_dir {
            packer.directory(dir.as_fd(), Path::new(""), 0)?;
        } else {
            packer.entry(dir.as_fd(), name, Path::new(std::ffi::OsStr::from_bytes(name)), 0)?;
        }
        let (count, bytes) = (packer.count, packer.bytes);
        packer.finish()?;
        self.send(FileReply { last: true, count, bytes, ..FileReply::default() }, &[])
    }
}

impl Packer<'_> {
    fn failed(&self, path: &Path, e: &std::io::Error) -> GuestError {
        let errno = rustix::io::Errno::from_io_error(e).unwrap_or(rustix::io::Errno::IO);
        let path = path.as_os_str().as_bytes();
        os(format!("cannot pack {} of {}", show(path), show(self.root)), errno)
    }

    fn finish(self) -> Result<(), GuestError> {
        let root = show(self.root);
        let done = self.tar.into_inner().and_then(|mut pipe| pipe.flush());
        done.map_err(|e| {
            let errno = rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO);
            os(format!("cannot pack {root}"), errno)
        })
    }

    fn directory(&mut self, dir: BorrowedFd<'_>, at: &Path, depth: usize) -> Result<(), GuestError> {
        let names = paths::names(dir).map_err(|e| self.failed(at, &e.into()))?;
        for name in names {
            self.entry(dir, &name, &at.join(std::ffi::OsStr::from_bytes(&name)), depth)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        path: &Path,
        depth: usize,
    ) -> Result<(), GuestError> {
        // Gone since it was read.
        let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(()) };
        let mut header = header(&stat);
        let added = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file(dir, name, path, &stat, &mut header),
            FileType::Directory => {
                header.set_entry_type(EntryType::Directory);
                // The trailing slash is how tar names directories.
                let mut named = path.as_os_str().to_owned();
                named.push("/");
                self.tar.append_data(&mut header, PathBuf::from(named), std::io::empty())
            }
            FileType::Symlink => match rustix::fs::readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
                    self.tar.append_link(&mut header, path, target)
                }
                Err(_) => return Ok(()),
            },
            FileType::Fifo => {
                header.set_entry_type(EntryType::Fifo);
                self.tar.append_data(&mut header, path, std::io::empty())
            }
            kind @ (FileType::CharacterDevice | FileType::BlockDevice) => {
                let block = kind == FileType::BlockDevice;
                header.set_entry_type(if block { EntryType::Block } else { EntryType::Char });
                header
                    .set_device_major(rustix::fs::major(stat.st_rdev))
                    .and_then(|()| header.set_device_minor(rustix::fs::minor(stat.st_rdev)))
                    .and_then(|()| self.tar.append_data(&mut header, path, std::io::empty()))
            }
            // Sockets have no form in a tar.
            _ => return Ok(()),
        };
        added.map_err(|e| self.failed(path, &e))?;
        self.count += 1;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory && depth < DEPTH_MAX {
            let below = paths::open_dir_at(dir, name).map_err(|e| self.failed(path, &e.into()))?;
            self.directory(below.as_fd(), path, depth + 1)?;
        }
        Ok(())
    }

    fn file(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        path: &Path,
        stat: &Stat,
        header: &mut Header,
    ) -> std::io::Result<()> {
        if stat.st_nlink > 1 {
            let is = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&is) {
                header.set_entry_type(EntryType::Link);
                return self.tar.append_link(header, path, first.clone());
            }
            self.linked.insert(is, path.to_owned());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        header.set_entry_type(EntryType::Regular);
        header.set_size(size);
        self.bytes += size;
        // As long as the header says, however the file changes meanwhile.
        let content = File::from(file).chain(std::io::repeat(0)).take(size);
        self.tar.append_data(header, path, content)
    }
}

fn header(stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}
