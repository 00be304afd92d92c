//! File operations, each in a child that has become the user: the kernel decides what it may do, and
//! whatever a hostile tree does to it (a hang, a signal, no memory) happens to that child alone.

mod copy;
mod list;
mod pack;
mod paths;
mod remove;
mod unpack;
mod watch;
mod write;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use dsec_proto::guest::{FileCall, FileInfo, FileMakeDir, FileMove, FileOp, FileReply, GuestError};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat, fstat, statat};
use rustix::io::Errno;

use crate::fail::{fail_hint, invalid, os, show};
use crate::users::User;
use crate::{sys, wire};

/// The only descriptor that a file child keeps besides the standard ones.
const SOCKET: RawFd = 3;

/// What a child is asked.
pub(crate) struct Request<'a> {
    pub(crate) call: &'a FileCall,
    /// Where it answers.
    pub(crate) socket: BorrowedFd<'a>,
    /// The edge takes a pipe where it is to write a file.
    pub(crate) pipes: bool,
}

/// What an operation is given.
struct Call<'a> {
    path: &'a [u8],
    user: &'a User,
    socket: BorrowedFd<'a>,
    pipes: bool,
}

/// Does the operation and answers. The caller ends the process.
pub(crate) fn serve(request: &Request<'_>, cwd: &[u8], user: &User) {
    let call = request.call;
    if sys::dup_onto(request.socket.as_raw_fd(), SOCKET).is_err() {
        return;
    }
    sys::close_range(SOCKET as u32 + 1, u32::MAX);
    let socket = sys::borrow(SOCKET);
    // The edge may have made it non-blocking: that is shared, and we wait.
    let _ = rustix::fs::fcntl_getfl(socket)
        .and_then(|flags| rustix::fs::fcntl_setfl(socket, flags - OFlags::NONBLOCK));
    let work = Call { path: &call.path, user, socket, pipes: request.pipes };
    let done = start(&work, cwd).and_then(|()| work.run(call.op.as_ref()));
    if let Err(error) = done {
        wire::reply_error(socket, error);
    }
}

fn start(call: &Call<'_>, cwd: &[u8]) -> Result<(), GuestError> {
    if call.path.is_empty() {
        return Err(invalid("the path is empty"));
    }
    if !call.path.starts_with(b"/") && !cwd.is_empty() {
        rustix::process::chdir(cwd).map_err(|e| os(format!("the working directory {}", show(cwd)), e))?;
    }
    Ok(())
}

impl Call<'_> {
    fn run(&self, op: Option<&FileOp>) -> Result<(), GuestError> {
        match op {
            Some(FileOp::Read(_)) => self.read(),
            Some(FileOp::Write(write)) => self.write(write),
            Some(FileOp::Stat(_)) => self.answer(info_at(self.path, self.path)?),
            Some(FileOp::List(list)) => self.list(*list),
            Some(FileOp::MakeDir(dir)) => self.make_dir(*dir),
            Some(FileOp::Move(to)) => self.rename(to),
            Some(FileOp::Remove(remove)) => self.remove(remove.recursive),
            Some(FileOp::Watch(watch)) => self.watch(watch.recursive),
            Some(FileOp::Tar(tar)) if tar.unpack => self.unpack(tar),
            Some(FileOp::Tar(_)) => self.pack(),
            None => Err(invalid("a file operation that this agent does not know")),
        }
    }

    /// An error about this call's path.
    fn failed(&self, what: &str, errno: Errno) -> GuestError {
        os(format!("cannot {what} {}", show(self.path)), errno)
    }

    fn send(&self, reply: FileReply, fds: &[BorrowedFd<'_>]) -> Result<(), GuestError> {
        wire::reply(self.socket, reply, fds).map_err(|e| os("the caller is gone", e))
    }

    fn answer(&self, info: FileInfo) -> Result<(), GuestError> {
        self.send(FileReply { files: vec![info], last: true, ..FileReply::default() }, &[])
    }

    fn read(&self) -> Result<(), GuestError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(self.path, flags, Mode::empty()).map_err(|e| match e {
            Errno::NXIO => self.not_regular("read", FileType::Socket),
            e => self.failed("read", e),
        })?;
        let stat = fstat(&file).map_err(|e| self.failed("read", e))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::RegularFile {
            return Err(self.not_regular("read", kind));
        }
        let reply = FileReply { files: vec![info(self.path, &stat)], last: true, ..FileReply::default() };
        self.send(reply, &[file.as_fd()])
    }

    fn not_regular(&self, what: &str, kind: FileType) -> GuestError {
        let (path, past) = (show(self.path), if what == "read" { "read" } else { "written" });
        invalid(format!("{path} is {}; only regular files can be {past}", kind_name(kind)))
    }

    fn make_dir(&self, request: FileMakeDir) -> Result<(), GuestError> {
        // A directory nobody may enter is nothing to ask for: no bits is "as usual".
        let mode = if request.mode == 0 { 0o755 } else { request.mode & 0o7777 };
        if request.parents {
            paths::make_parents(self.path)?;
        }
        match rustix::fs::mkdir(self.path, Mode::from_raw_mode(0o700)) {
            // By descriptor would be safer against a swap, but only the user's own rights are used.
            Ok(()) => rustix::fs::chmod(self.path, Mode::from_raw_mode(mode))
                .map_err(|e| self.failed("set the mode of", e))?,
            Err(Errno::EXIST) if request.parents && paths::is_dir(self.path) => {}
            Err(e) => return Err(self.failed("make directory", e)),
        }
        self.answer(info_at(self.path, self.path)?)
    }

    fn rename(&self, request: &FileMove) -> Result<(), GuestError> {
        crate::fail::no_nul("the new path", &request.to)?;
        if request.to.is_empty() {
            return Err(invalid("the new path is empty"));
        }
        let to = request.to.as_slice();
        let what = || format!("cannot move {} to {}", show(self.path), show(to));
        let flags = if request.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        let renamed = match rustix::fs::renameat_with(CWD, self.path, CWD, to, flags) {
            // A file system without NOREPLACE; looking first is the best there is.
            Err(Errno::INVAL) if !request.overwrite && !paths::exists(to) => {
                rustix::fs::rename(self.path, to)
            }
            other => other,
        };
        match renamed {
            Ok(()) => {}
            // Another file system, or a directory of a lower layer of an overlay.
            Err(Errno::XDEV) => copy::move_across(self.path, to, request.overwrite)?,
            Err(Errno::EXIST) => {
                let found = format!("{}: {} exists already", what(), show(to));
                let kind = dsec_proto::guest::GuestErrorKind::AlreadyExists;
                return Err(fail_hint(kind, found, "ask to overwrite it"));
            }
            Err(e) => return Err(os(what(), e)),
        }
        self.answer(info_at(to, to)?)
    }
}

/// A kind of file in words.
fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "of an unknown kind",
    }
}

/// A file's facts, under the given name.
fn info(name: &[u8], stat: &Stat) -> FileInfo {
    FileInfo {
        path: name.to_vec(),
        mode: stat.st_mode,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_ms: stat.st_mtime.saturating_mul(1000) + stat.st_mtime_nsec as i64 / 1_000_000,
        target: None,
    }
}

/// Facts of a path; of a link itself, with its target.
fn info_at(path: &[u8], name: &[u8]) -> Result<FileInfo, GuestError> {
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| os(format!("cannot stat {}", show(path)), e))?;
    let mut found = info(name, &stat);
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        found.target = rustix::fs::readlink(path, Vec::new()).ok().map(std::ffi::CString::into_bytes);
    }
    Ok(found)
}
