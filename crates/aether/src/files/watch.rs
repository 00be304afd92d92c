//! Reporting changes below a path, by inotify.
//!
//! Recursive watches follow new directories: one that appears is watched and then read, and what is
//! in it already is reported as created, since it may have come before the watch. A directory that
//! moves takes its watches with it. Both halves of a rename carry a cookie; a first half whose second
//! does not follow was a move out of the tree.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use dsec_proto::guest::{FileEvent, FileEventKind as Kind, FileReply, GuestError, GuestErrorKind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, CWD, FileType, statat};
use rustix::io::Errno;

use super::{Call, paths};
use crate::fail::{fail_hint, show};

/// Watches of one request: below the kernel's usual limit for one user.
const WATCHES_MAX: usize = 65536;
/// How long the second half of a rename is waited for.
const PAIR_WAIT_MS: i64 = 20;
/// Events of one frame.
const FRAME: usize = 512;

struct Watcher<'a> {
    call: &'a Call<'a>,
    inotify: OwnedFd,
    recursive: bool,
    /// Directory of each watch, relative to the watched path, `""` for itself.
    dirs: HashMap<i32, Vec<u8>>,
    events: Vec<FileEvent>,
    /// First half of a rename: cookie, path, whether a directory.
    moved: Option<(u32, Vec<u8>, bool)>,
    over: bool,
}

impl Call<'_> {
    pub(super) fn watch(&self, recursive: bool) -> Result<(), GuestError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|e| self.failed("watch", e))?;
        let dirs = HashMap::new();
        let (events, moved) = (Vec::new(), None);
        let mut watcher = Watcher { call: self, inotify, recursive, dirs, events, moved, over: false };
        watcher.add(b"", true)?;
        if recursive && paths::is_dir(self.path) {
            watcher.add_below(b"", false)?;
        }
        watcher.push(Kind::Ready, Vec::new(), None);
        watcher.run()
    }
}

impl Watcher<'_> {
    fn full(&self, path: &[u8]) -> Vec<u8> {
        if path.is_empty() { self.call.path.to_vec() } else { [self.call.path, b"/", path].concat() }
    }

    /// Watches one path. What is gone or may not be read is passed over, but for the first.
    fn add(&mut self, path: &[u8], first: bool) -> Result<(), GuestError> {
        let mut flags = WatchFlags::CREATE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF;
        if !first {
            flags |= WatchFlags::DONT_FOLLOW | WatchFlags::ONLYDIR;
        }
        let full = self.full(path);
        if self.dirs.len() >= WATCHES_MAX {
            return Err(too_many(&show(self.call.path)));
        }
        match inotify::add_watch(&self.inotify, &full[..], flags) {
            Ok(watch) => {
                self.dirs.insert(watch, path.to_vec());
                Ok(())
            }
            Err(Errno::NOSPC) => Err(too_many(&show(self.call.path))),
            Err(e) if first => Err(self.call.failed("watch", e)),
            Err(_) => Ok(()),
        }
    }

    /// Watches the directories below one; with `report` what is in them is news.
    fn add_below(&mut self, path: &[u8], report: bool) -> Result<(), GuestError> {
        let mut todo = vec![path.to_vec()];
        while let Some(at) = todo.pop() {
            let Ok(dir) = paths::open_dir(&self.full(&at)) else { continue };
            for name in paths::names(&dir).unwrap_or_default() {
                let below = join(&at, &name);
                if report {
                    self.push(Kind::Created, below.clone(), None);
                }
                let stat = statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW);
                if self.recursive
                    && stat.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory)
                {
                    self.add(&below, false)?;
                    todo.push(below);
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, kind: Kind, path: Vec<u8>, from: Option<Vec<u8>>) {
        self.events.push(FileEvent { kind: kind.into(), path, from });
    }

    fn run(&mut self) -> Result<(), GuestError> {
        while !self.over {
            self.send()?;
            let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: PAIR_WAIT_MS * 1_000_000 };
            let timeout = self.moved.is_some().then_some(&wait);
            let mut fds = [
                PollFd::new(&self.inotify, PollFlags::IN),
                PollFd::from_borrowed_fd(self.call.socket, PollFlags::IN),
            ];
            match poll(&mut fds, timeout) {
                Ok(0) => self.lone_move(),
                Ok(_) => {
                    // The edge says nothing on this socket: readable means closed.
                    if !fds[1].revents().is_empty() {
                        return Ok(());
                    }
                    self.read()?;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(self.call.failed("watch", e)),
            }
        }
        self.lone_move();
        self.send()?;
        self.call.send(FileReply { last: true, ..FileReply::default() }, &[])
    }

    fn send(&mut self) -> Result<(), GuestError> {
        while !self.events.is_empty() {
            let rest = self.events.split_off(self.events.len().min(FRAME));
            let events = std::mem::replace(&mut self.events, rest);
            self.call.send(FileReply { events, ..FileReply::default() }, &[])?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), GuestError> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let inotify = self.inotify.try_clone().map_err(|_| self.call.failed("watch", Errno::MFILE))?;
        let mut reader = Reader::new(inotify.as_fd(), &mut buffer);
        // All of one read at least; the rest waits for the next turn, after these were sent.
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|n| n.to_bytes().to_vec());
                    let (watch, flags, cookie) = (event.wd(), event.events(), event.cookie());
                    self.event(watch, flags, cookie, name)?;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(e) => return Err(self.call.failed("watch", e)),
            }
            if reader.is_buffer_empty() {
                return Ok(());
            }
        }
    }

    fn event(
        &mut self,
        watch: i32,
        flags: ReadFlags,
        cookie: u32,
        name: Option<Vec<u8>>,
    ) -> Result<(), GuestError> {
        if !flags.contains(ReadFlags::MOVED_TO) {
            // Before the directory is looked up: it may have just left the tree.
            self.lone_move();
        }
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.push(Kind::Overflow, Vec::new(), None);
            // Directories that came unseen are watched from now on.
            return if self.recursive { self.add_below(b"", false) } else { Ok(()) };
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&watch);
            return Ok(());
        }
        let Some(dir) = self.dirs.get(&watch).cloned() else { return Ok(()) };
        if flags.contains(ReadFlags::DELETE_SELF) {
            if dir.is_empty() {
                self.push(Kind::Removed, dir, None);
                self.over = true;
            }
            return Ok(());
        }
        let is_dir = flags.contains(ReadFlags::ISDIR);
        // A subdirectory's own attributes come from its parent as well, with its name.
        let path = match name {
            Some(name) => join(&dir, &name),
            None if dir.is_empty() => dir,
            None => return Ok(()),
        };
        if flags.contains(ReadFlags::MOVED_TO) {
            return self.moved_to(cookie, path, is_dir);
        }
        if flags.contains(ReadFlags::MOVED_FROM) {
            self.moved = Some((cookie, path, is_dir));
        } else if flags.contains(ReadFlags::CREATE) {
            self.created(path, is_dir)?;
        } else if flags.contains(ReadFlags::CLOSE_WRITE) {
            self.push(Kind::Modified, path, None);
        } else if flags.contains(ReadFlags::DELETE) {
            self.push(Kind::Removed, path, None);
        } else if flags.contains(ReadFlags::ATTRIB) && (!path.is_empty() || self.still_there()) {
            self.push(Kind::Attributes, path, None);
        }
        Ok(())
    }

    /// Removing a watched file changes its link count first.
    fn still_there(&self) -> bool {
        statat(CWD, self.call.path, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    fn created(&mut self, path: Vec<u8>, is_dir: bool) -> Result<(), GuestError> {
        self.push(Kind::Created, path.clone(), None);
        if is_dir && self.recursive {
            self.add(&path, false)?;
            self.add_below(&path, true)?;
        }
        Ok(())
    }

    fn moved_to(&mut self, cookie: u32, path: Vec<u8>, is_dir: bool) -> Result<(), GuestError> {
        match self.moved.take() {
            Some((first, from, _)) if first == cookie => {
                for dir in self.dirs.values_mut() {
                    if let Some(rest) = below(dir, &from) {
                        *dir = [&path, rest].concat();
                    }
                }
                self.push(Kind::Renamed, path, Some(from));
                Ok(())
            }
            other => {
                self.moved = other;
                self.lone_move();
                self.created(path, is_dir)
            }
        }
    }

    /// The other half did not come: it was moved out of what is watched.
    fn lone_move(&mut self) {
        let Some((_, path, is_dir)) = self.moved.take() else { return };
        if is_dir {
            let gone: Vec<i32> =
                self.dirs.iter().filter(|(_, dir)| below(dir, &path).is_some()).map(|(w, _)| *w).collect();
            for watch in gone {
                let _ = inotify::remove_watch(&self.inotify, watch);
                self.dirs.remove(&watch);
            }
        }
        self.push(Kind::Removed, path, None);
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

/// What of `dir` comes after `top`, if it is that or below it.
fn below<'a>(dir: &'a [u8], top: &[u8]) -> Option<&'a [u8]> {
    let rest = dir.strip_prefix(top)?;
    (rest.is_empty() || rest.starts_with(b"/")).then_some(rest)
}

fn too_many(path: &str) -> GuestError {
    fail_hint(
        GuestErrorKind::ResourceExhausted,
        format!("cannot watch all of {path}: there are too many directories below it"),
        "watch a smaller part",
    )
}
