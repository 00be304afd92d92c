//! Output of a session: of the line that runs, or of nobody.

use std::os::fd::{AsFd, OwnedFd};

use crate::agent::Agent;
use crate::slab::Key;
use crate::stream;

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
                let pumped = exec.streams[which].pump(fd.as_fd(), &self.host, &file, stream::TURN_BUDGET);
                self.note(line);
                pumped == stream::Pumped::End
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
            exec.streams[which].pump(fd.as_fd(), &self.host, &file, there);
            self.note(line);
        }
    }
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
