//! Output of a session: of the line that runs, or of nobody.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::messages::Messages;
use crate::agent::Agent;
use crate::child::Host;
use crate::slab::Key;
use crate::stream::{self, Pumped, Stream};

/// Standard error among a session's two streams.
pub(super) const STDERR: usize = 1;
/// Bytes of it that are read at once.
const TELL_CHUNK: usize = 16 << 10;

/// Background output kept for the next line, of each stream.
pub(super) const BETWEEN_MAX: usize = 4096;

impl Agent {
    /// Output of the session is there.
    pub(crate) fn session_output(&mut self, key: Key, which: usize) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let Some(fd) = &session.fds[which] else { return };
        let ended = match session.line.and_then(|line| self.execs.get_mut(line).map(|e| (line, e))) {
            Some((line, exec)) => {
                let file = exec.file(which);
                let stream = &mut exec.streams[which];
                let ended = match which {
                    STDERR => tell(stream, &mut session.messages, fd, &self.host, &file, stream::TURN_BUDGET),
                    _ => stream.pump(fd.as_fd(), &self.host, &file, stream::TURN_BUDGET) == Pumped::End,
                };
                self.note(line);
                ended
            }
            None => keep_between(fd, &mut session.between[which], &self.host.null),
        };
        if ended && let Some(session) = self.sessions.get_mut(key) {
            if let Some(fd) = &session.fds[which] {
                self.poll.remove(fd);
            }
            session.fds[which] = None;
        }
    }

    /// What is in the pipe at this moment is the running line's.
    pub(super) fn drain_session(&mut self, key: Key, which: usize) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let Some(fd) = &session.fds[which] else { return };
        let there = rustix::io::ioctl_fionread(fd).unwrap_or(0) as usize;
        let Some(line) = session.line else { return };
        if there > 0
            && let Some(exec) = self.execs.get_mut(line)
        {
            let file = exec.file(which);
            let stream = &mut exec.streams[which];
            match which {
                STDERR => drop(tell(stream, &mut session.messages, fd, &self.host, &file, there)),
                _ => drop(stream.pump(fd.as_fd(), &self.host, &file, there)),
            }
            self.note(line);
        }
    }

    /// The line is over: what might have become a message of the shell's is none.
    pub(super) fn end_messages(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let held = session.messages.end();
        if let Some(line) = session.line.filter(|_| !held.is_empty())
            && let Some(exec) = self.execs.get_mut(line)
        {
            let file = exec.file(STDERR);
            exec.streams[STDERR].push(&held, &self.host, &file);
            self.note(line);
        }
    }
}

/// Moves up to `budget` bytes of standard error, with the shell's messages made readable. True at end of file.
fn tell(
    stream: &mut Stream,
    messages: &mut Messages,
    fd: &OwnedFd,
    host: &Host,
    file: &str,
    budget: usize,
) -> bool {
    let mut chunk = [0; TELL_CHUNK];
    let mut left = budget;
    while left > 0 {
        let most = left.min(chunk.len());
        match rustix::io::read(fd, &mut chunk[..most]) {
            Ok(0) => return true,
            Ok(n) => {
                stream.push(&messages.pass(&chunk[..n]), host, file);
                left -= n;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(_) => return true,
        }
    }
    false
}

/// Output while no line runs. True at end of file.
fn keep_between(fd: &OwnedFd, kept: &mut Vec<u8>, null: &OwnedFd) -> bool {
    let mut chunk = [0; BETWEEN_MAX];
    let room = BETWEEN_MAX - kept.len().min(BETWEEN_MAX);
    let got = if room > 0 {
        rustix::io::read(fd, &mut chunk[..room]).inspect(|n| kept.extend_from_slice(&chunk[..*n]))
    } else {
        stream::discard(fd.as_fd(), null.as_fd(), stream::TURN_BUDGET)
    };
    got == Ok(0)
}
