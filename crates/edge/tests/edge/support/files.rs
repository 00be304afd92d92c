//! File operations of the fake guest, and blocking frames with descriptors.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use bytes::BytesMut;
use dsec_edge::guest::codec;
use dsec_proto::guest::{
    self, FileCall, FileEvent, FileEventKind, FileInfo, FileOp, FileReply, GuestError, GuestErrorKind,
};

use super::guest::{FakeGuest, refusal};

/// One blocking `recvmsg`.
pub fn receive(stream: &UnixStream, buffer: &mut BytesMut, fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut chunk = vec![0; 64 * 1024];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(stream, &mut [io::IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    buffer.extend_from_slice(&chunk[..got.bytes]);
    Ok(got.bytes)
}

/// Sends all of it, waiting where the socket is full.
pub fn send_all(stream: &UnixStream, mut bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let mut own: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    while !bytes.is_empty() {
        match codec::send(stream.as_fd(), bytes, &own) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                own.clear();
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut poll = [rustix::event::PollFd::new(stream, rustix::event::PollFlags::OUT)];
                rustix::event::poll(&mut poll, None)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn reply(socket: &UnixStream, reply: FileReply, fds: &[OwnedFd]) {
    let mut bytes = Vec::new();
    guest::encode(&FileReply { fds: fds.len() as u32, ..reply }, &mut bytes);
    let _ = send_all(socket, &bytes, fds);
}

fn map(error: &io::Error, path: &Path) -> GuestError {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => GuestErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => GuestErrorKind::AlreadyExists,
        io::ErrorKind::PermissionDenied => GuestErrorKind::PermissionDenied,
        _ => GuestErrorKind::InvalidArgument,
    };
    refusal(kind, format!("{}: {error}", path.display()))
}

fn info(path: &Path, shown: &[u8]) -> io::Result<FileInfo> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok(FileInfo {
        path: shown.to_vec(),
        mode: meta.mode(),
        size: meta.len(),
        uid: meta.uid(),
        gid: meta.gid(),
        modified_ms: meta.mtime() * 1000,
        target: std::fs::read_link(path).ok().map(|t| t.to_string_lossy().into_owned().into_bytes()),
    })
}

pub fn serve(guest: &Arc<FakeGuest>, call: &FileCall, socket: &UnixStream) {
    let name = String::from_utf8_lossy(&call.path).into_owned();
    // What the host has in /proc is the same inside.
    let path = if name.starts_with("/proc/") {
        PathBuf::from(&name)
    } else {
        guest.root.join(name.trim_start_matches('/'))
    };
    if let Err(error) = run(guest, call, &path, socket) {
        reply(socket, FileReply { error: Some(map(&error, &path)), ..FileReply::default() }, &[]);
    }
}

fn run(guest: &Arc<FakeGuest>, call: &FileCall, path: &Path, socket: &UnixStream) -> io::Result<()> {
    if let Some(what) = path.file_name().and_then(|name| name.to_str()?.strip_prefix("hostile-")) {
        return hostile(what, call, socket);
    }
    let last = |files| FileReply { files, last: true, ..FileReply::default() };
    match call.op.as_ref().unwrap() {
        FileOp::Read(_) => {
            let file = File::open(path)?;
            reply(socket, last(vec![info(path, &call.path)?]), &[file.into()]);
        }
        FileOp::Write(write) => {
            if write.parents {
                std::fs::create_dir_all(path.parent().unwrap())?;
            }
            let draft = path.with_extension("draft");
            let target = if write.offset.is_some() { path } else { draft.as_path() };
            let file =
                File::options().create(true).truncate(write.offset.is_none()).write(true).open(target)?;
            reply(socket, FileReply::default(), &[file.into()]);
            let mut commit = [0];
            if (&mut &*socket).read(&mut commit)? == 0 {
                return std::fs::remove_file(draft);
            }
            if write.offset.is_none() {
                std::fs::rename(draft, path)?;
            }
            if let Some(mode) = write.mode {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
            }
            reply(socket, last(vec![info(path, &call.path)?]), &[]);
        }
        FileOp::Stat(_) => reply(socket, last(vec![info(path, &call.path)?]), &[]),
        FileOp::List(list) => {
            let mut files = Vec::new();
            for entry in std::fs::read_dir(path)? {
                let entry = entry?;
                files.push(info(&entry.path(), entry.file_name().as_encoded_bytes())?);
            }
            files.sort_by(|a, b| a.path.cmp(&b.path));
            let truncated = files.len() as u64 > list.limit;
            files.truncate(list.limit as usize);
            // In two frames, as a large one would come.
            let rest = files.split_off(files.len() / 2);
            reply(socket, FileReply { files, ..FileReply::default() }, &[]);
            reply(socket, FileReply { truncated, ..last(rest) }, &[]);
        }
        FileOp::MakeDir(dir) => {
            if dir.parents {
                std::fs::create_dir_all(path)?
            } else {
                std::fs::create_dir(path)?
            }
            reply(socket, last(vec![info(path, &call.path)?]), &[]);
        }
        FileOp::Move(to) => {
            let target = guest.root.join(String::from_utf8_lossy(&to.to).trim_start_matches('/'));
            if target.exists() && !to.overwrite {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            std::fs::rename(path, &target)?;
            reply(socket, last(vec![info(&target, &to.to)?]), &[]);
        }
        FileOp::Remove(remove) => {
            match (path.is_dir(), remove.recursive) {
                (true, true) => std::fs::remove_dir_all(path)?,
                (true, false) => std::fs::remove_dir(path)?,
                _ => std::fs::remove_file(path)?,
            }
            reply(socket, last(Vec::new()), &[]);
        }
        FileOp::Watch(_) => watch(guest, path, socket)?,
        FileOp::Tar(tar) if tar.unpack => unpack(path, socket)?,
        FileOp::Tar(_) => pack(path, socket)?,
    }
    Ok(())
}

/// A child that answers with something else than it was asked for, or stands still.
fn hostile(what: &str, call: &FileCall, socket: &UnixStream) -> io::Result<()> {
    let (read, write) = io::pipe()?;
    let (sent, _kept): (Vec<OwnedFd>, Vec<OwnedFd>) = match what {
        "stalled-pack" => (vec![read.into()], vec![write.into()]),
        "stalled-unpack" => (vec![write.into()], vec![read.into()]),
        "pipe" => (vec![read.into()], vec![write.into()]),
        "socket" => (vec![UnixStream::pair()?.0.into()], Vec::new()),
        "device" => (vec![File::open("/dev/zero")?.into()], Vec::new()),
        "directory" => (vec![File::open("/")?.into()], Vec::new()),
        "two" => (vec![read.into(), write.into()], Vec::new()),
        other => panic!("{other} is no way to be hostile"),
    };
    let info = FileInfo { path: call.path.clone(), size: 100, mode: 0o100_644, ..FileInfo::default() };
    reply(socket, FileReply { files: vec![info], ..FileReply::default() }, &sent);
    drop(sent);
    // Until the edge has had enough.
    let _ = (&mut &*socket).read(&mut [0]);
    Ok(())
}

fn watch(guest: &Arc<FakeGuest>, path: &Path, socket: &UnixStream) -> io::Result<()> {
    std::fs::metadata(path)?;
    let (sender, events) = std::sync::mpsc::channel();
    guest.file_events.lock().unwrap().push(sender);
    let event = |event| FileReply { events: vec![event], ..FileReply::default() };
    let ready = FileEvent { kind: FileEventKind::Ready as i32, path: Vec::new(), from: None };
    reply(socket, event(ready), &[]);
    for change in events {
        reply(socket, event(change), &[]);
    }
    Ok(())
}

fn pack(path: &Path, socket: &UnixStream) -> io::Result<()> {
    std::fs::metadata(path)?;
    let (read, write) = io::pipe()?;
    let child = Command::new("tar").arg("-c").arg("-C").arg(path).arg(".").stdout(write).spawn();
    reply(socket, FileReply::default(), &[read.into()]);
    let whole = child?.wait()?.success();
    let error = (!whole).then(|| refusal(GuestErrorKind::Internal, "tar failed"));
    reply(socket, FileReply { error, last: true, ..FileReply::default() }, &[]);
    Ok(())
}

fn unpack(path: &Path, socket: &UnixStream) -> io::Result<()> {
    std::fs::create_dir_all(path)?;
    let (read, write) = io::pipe()?;
    let mut child =
        Command::new("tar").arg("-xv").arg("-C").arg(path).stdin(read).stdout(Stdio::piped()).spawn()?;
    reply(socket, FileReply::default(), &[write.into()]);
    let mut names = String::new();
    child.stdout.take().unwrap().read_to_string(&mut names)?;
    if !child.wait()?.success() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a tar"));
    }
    let count = names.lines().filter(|name| !name.ends_with('/')).count() as u64;
    reply(socket, FileReply { last: true, count, bytes: 7, ..FileReply::default() }, &[]);
    Ok(())
}

/// Content of a file below a guest's root.
pub fn content(guest: &FakeGuest, path: &str) -> Option<Vec<u8>> {
    std::fs::read(guest.root.join(path)).ok()
}

/// Writes a file below a guest's root.
pub fn put(guest: &FakeGuest, path: &str, bytes: &[u8]) {
    File::create(guest.root.join(path)).unwrap().write_all(bytes).unwrap();
}
