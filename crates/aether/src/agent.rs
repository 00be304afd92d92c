//! The loop: one thread, one epoll, no waiting anywhere else.
//!
//! Each turn takes what is ready, in this order: output of commands, then ended processes, then
//! requests; at its end everything that is to be said goes out in as few `sendmsg` as may be. Output
//! before ends, so that a short command's exit and output leave in the turn in which it ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use crate::child::Host;
use crate::chronus::Session;
use crate::clock::Clock;
use crate::conn::{Ack, Conn};
use crate::dial::Dialing;
use crate::exec::Exec;
use crate::slab::{Key, Slab};
use crate::{stream, sys};

/// Events taken in one turn.
const EVENTS: usize = 64;
/// Processes reaped in one turn: a storm of orphans does not keep the loop from its other work.
const REAP_TURN: usize = 256;
/// Descriptors kept open for writers of forgotten execs. Of more the next is closed, and its writer killed
/// by that (SIGPIPE) or told (EPIPE): who starts so many and leaves them behind cannot have them all.
const DRAINS_MAX: usize = 256;
/// How long a file operation whose caller is gone may go on: time to undo, or to end, what it began.
const FILE_END_MAX: Duration = Duration::from_secs(60);

/// What an epoll event is about; the kind is the top byte of its data, a [`Key`] the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum On {
    Listen,
    Conn,
    Signal,
    ExecReport,
    ExecOut,
    ExecErr,
    SessionReport,
    SessionScript,
    SessionControl,
    SessionOut,
    SessionErr,
    Check,
    Dial,
    Drain,
    File,
}

const KINDS: [On; 15] = [
    On::Listen,
    On::Conn,
    On::Signal,
    On::ExecReport,
    On::ExecOut,
    On::ExecErr,
    On::SessionReport,
    On::SessionScript,
    On::SessionControl,
    On::SessionOut,
    On::SessionErr,
    On::Check,
    On::Dial,
    On::Drain,
    On::File,
];

/// A user and a directory being checked by a child.
pub(crate) struct Check {
    pub(crate) pid: i32,
    /// Given up then.
    pub(crate) until: Instant,
    pub(crate) report: OwnedFd,
    pub(crate) ack: Ack,
}

/// A running file operation.
pub(crate) struct FileChild {
    pid: i32,
    /// Its socket, watched for the caller's end.
    socket: OwnedFd,
    /// The caller is gone: killed then.
    end_at: Option<Instant>,
}

/// Everything the agent holds.
pub(crate) struct Agent {
    pub(crate) host: Host,
    pub(crate) poll: Poll,
    pub(crate) clock: Clock,
    listen: OwnedFd,
    signals: OwnedFd,
    pub(crate) conn: Option<Conn>,
    pub(crate) connections: u32,
    pub(crate) execs: Slab<Exec>,
    /// Ended execs, the oldest first.
    pub(crate) ended: std::collections::VecDeque<Key>,
    /// Execs with something to tell.
    pub(crate) news: std::collections::VecDeque<Key>,
    pub(crate) sessions: Slab<Session>,
    /// Sessions whose end is to be told.
    pub(crate) ended_sessions: Vec<String>,
    pub(crate) checks: Slab<Check>,
    pub(crate) dials: Slab<Dialing>,
    /// Output of forgotten execs that something still writes to: read and dropped, since closing it
    /// would kill the writer.
    drains: Slab<OwnedFd>,
    /// Running file children.
    pub(crate) file_children: Slab<FileChild>,
    pub(crate) terminating: bool,
    reap_again: bool,
    /// Given up when there is no descriptor left for an edge.
    spare: Option<OwnedFd>,
}

/// The epoll descriptor.
pub(crate) struct Poll(OwnedFd);

impl Poll {
    /// Watches `fd` for reading.
    pub(crate) fn read(&self, fd: &OwnedFd, on: On, key: Option<Key>) -> Result<(), Errno> {
        self.add(fd, on, key, EventFlags::IN)
    }

    /// Watches `fd` for the given events.
    pub(crate) fn add(&self, fd: &OwnedFd, on: On, key: Option<Key>, flags: EventFlags) -> Result<(), Errno> {
        epoll::add(&self.0, fd, EventData::new_u64(token(on, key)), flags)
    }

    /// Watches it for something else.
    pub(crate) fn change(&self, fd: &OwnedFd, on: On, key: Option<Key>, flags: EventFlags) {
        let _ = epoll::modify(&self.0, fd, EventData::new_u64(token(on, key)), flags);
    }

    /// Stops watching it. Needed where another process has the same open file.
    pub(crate) fn remove(&self, fd: &OwnedFd) {
        let _ = epoll::delete(&self.0, fd);
    }
}

fn token(on: On, key: Option<Key>) -> u64 {
    (on as u64) << 56 | key.map_or(0, Key::bits)
}

impl Agent {
    /// An agent that listens and holds nothing.
    pub(crate) fn new(host: Host, listen: OwnedFd) -> Result<Self, Errno> {
        let poll = Poll(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let signals = sys::child_signals()?;
        let flags = rustix::fs::fcntl_getfl(&listen)?;
        rustix::fs::fcntl_setfl(&listen, flags | rustix::fs::OFlags::NONBLOCK)?;
        poll.read(&listen, On::Listen, None)?;
        poll.read(&signals, On::Signal, None)?;
        let spare = host.null.try_clone().ok();
        Ok(Self {
            host,
            poll,
            clock: Clock::default(),
            listen,
            signals,
            conn: None,
            connections: 0,
            execs: Slab::default(),
            ended: Default::default(),
            news: Default::default(),
            sessions: Slab::default(),
            ended_sessions: Vec::new(),
            checks: Slab::default(),
            dials: Slab::default(),
            drains: Slab::default(),
            file_children: Slab::default(),
            terminating: false,
            reap_again: false,
            spare,
        })
    }

    /// Runs until the sandbox ends.
    pub(crate) fn run(mut self) -> Errno {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let timeout = self.timeout().map(|d| rustix::time::Timespec {
                tv_sec: d.as_secs() as i64,
                tv_nsec: d.subsec_nanos().into(),
            });
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.poll.0, room, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return e,
            }
            self.turn(&events);
        }
    }

    fn turn(&mut self, events: &[epoll::Event]) {
        let mut signalled = std::mem::take(&mut self.reap_again);
        let (mut accept, mut request) = (false, false);
        for event in events {
            let data = event.data.u64();
            let Some(on) = KINDS.get((data >> 56) as usize) else { continue };
            let key = Key::from_bits(data & ((1 << 56) - 1));
            match on {
                On::Listen => accept = true,
                On::Conn => request = true,
                On::Signal => signalled = true,
                On::ExecReport => self.exec_report(key),
                On::ExecOut => self.exec_output(key, 0),
                On::ExecErr => self.exec_output(key, 1),
                On::SessionReport => self.session_report(key),
                On::SessionScript => self.session_script(key),
                On::SessionControl => self.session_control(key),
                On::SessionOut => self.session_output(key, 0),
                On::SessionErr => self.session_output(key, 1),
                On::Check => self.check_report(key),
                On::Dial => self.dial_ready(key),
                On::Drain => self.drain(key),
                On::File => self.file_caller_gone(key),
            }
        }
        if signalled {
            self.reap();
        }
        self.timers(self.clock.now());
        if request {
            self.requests();
        }
        if accept {
            self.accept();
        }
        self.tell();
    }

    /// Until something is due.
    fn timeout(&self) -> Option<Duration> {
        if self.reap_again {
            return Some(Duration::ZERO);
        }
        let execs = self.execs.iter().filter_map(|(_, exec)| exec.due());
        let sessions = self.sessions.iter().filter_map(|(_, session)| session.due());
        let dials = self.dials.iter().map(|(_, dial)| dial.due());
        let checks = self.checks.iter().map(|(_, check)| check.until);
        let files = self.file_children.iter().filter_map(|(_, child)| child.end_at);
        let due = execs.chain(sessions).chain(dials).chain(checks).chain(files).min()?;
        // Rounded up, so that the wait does not end just before.
        Some(self.clock.until(due)? + Duration::from_micros(50))
    }

    fn timers(&mut self, now: Instant) {
        let due: Vec<Key> =
            self.execs.iter().filter(|(_, e)| e.due().is_some_and(|d| d <= now)).map(|(k, _)| k).collect();
        for key in due {
            self.exec_due(key, now);
        }
        let due: Vec<Key> =
            self.sessions.iter().filter(|(_, s)| s.due().is_some_and(|d| d <= now)).map(|(k, _)| k).collect();
        for key in due {
            self.session_due(key, now);
        }
        let due: Vec<Key> = self.dials.iter().filter(|(_, d)| d.due() <= now).map(|(k, _)| k).collect();
        for key in due {
            self.dial_due(key);
        }
        let due: Vec<Key> = self.checks.iter().filter(|(_, c)| c.until <= now).map(|(k, _)| k).collect();
        for key in due {
            self.check_due(key);
        }
        for (_, child) in self.file_children.iter_mut() {
            if child.end_at.is_some_and(|at| at <= now) {
                child.end_at = None;
                let _ = sys::kill(child.pid, libc::SIGKILL);
            }
        }
    }

    /// Keeps an eye on a file operation.
    pub(crate) fn watch_file(&mut self, pid: i32, socket: OwnedFd) {
        let key = self.file_children.insert(FileChild { pid, socket, end_at: None });
        if let Some(child) = self.file_children.get(key) {
            // For nothing but the other side's end, which is always told. Fails without memory only.
            let _ = self.poll.add(&child.socket, On::File, Some(key), EventFlags::empty());
        }
    }

    fn file_caller_gone(&mut self, key: Key) {
        let Some(child) = self.file_children.get_mut(key) else { return };
        self.poll.remove(&child.socket);
        child.end_at = Some(self.clock.now() + FILE_END_MAX);
    }

    /// Reaps whatever ended: commands, file children, and every orphan of the sandbox.
    fn reap(&mut self) {
        // One read empties it: signals do not queue up.
        let mut info = [0; 128];
        let _ = rustix::io::read(&self.signals, &mut info);
        // Users can signal a child that runs with their rights. One that stands still would hold up its caller for ever.
        let files = self.file_children.iter().map(|(_, child)| child.pid);
        for pid in
            files.chain(self.checks.iter().map(|(_, check)| check.pid)).filter(|pid| sys::was_stopped(*pid))
        {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        for _ in 0..REAP_TURN {
            let Some(reaped) = sys::reap() else { return };
            if let Some(key) = self.file_children.find(|child| child.pid == reaped.pid) {
                if let Some(child) = self.file_children.remove(key) {
                    self.poll.remove(&child.socket);
                }
                continue;
            }
            if let Some(key) = self.execs.find(|e| e.is_process(reaped.pid)) {
                self.exec_reaped(key, &reaped);
            } else if let Some(key) = self.sessions.find(|s| s.is_shell(reaped.pid)) {
                self.session_reaped(key, &reaped);
            }
        }
        self.reap_again = true;
    }

    /// A newcomer replaces whoever was connected.
    fn accept(&mut self) {
        use rustix::net::{SocketFlags, accept_with};
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            let socket = match accept_with(&self.listen, flags) {
                Ok(socket) => socket,
                // Without a descriptor left the newcomer would be announced for ever: one is kept for it.
                Err(Errno::MFILE | Errno::NFILE) if self.spare.take().is_some() => continue,
                Err(_) => break,
            };
            self.connections = self.connections.wrapping_add(1);
            self.hang_up();
            if self.poll.read(&socket, On::Conn, None).is_ok() {
                self.conn = Some(Conn::new(socket, self.connections));
                self.news.clear();
                self.ended_sessions.clear();
            }
        }
        if self.spare.is_none() {
            self.spare = self.host.null.try_clone().ok();
        }
    }

    /// Output of something that was forgotten.
    pub(crate) fn keep_draining(&mut self, fd: OwnedFd) {
        self.poll.remove(&fd);
        if self.drains.len() >= DRAINS_MAX {
            return;
        }
        let key = self.drains.insert(fd);
        if let Some(fd) = self.drains.get(key)
            && self.poll.read(fd, On::Drain, Some(key)).is_err()
        {
            self.drains.remove(key);
        }
    }

    fn drain(&mut self, key: Key) {
        let Some(fd) = self.drains.get(key) else { return };
        match stream::discard(fd.as_fd(), self.null(), stream::TURN_BUDGET) {
            Ok(1..) | Err(Errno::AGAIN | Errno::INTR) => {}
            _ => {
                self.poll.remove(fd);
                self.drains.remove(key);
            }
        }
    }

    pub(crate) fn null(&self) -> BorrowedFd<'_> {
        self.host.null.as_fd()
    }
}
