//! What a child reports between fork and exec: nothing (it was exec'd, and the channel closed with
//! that), or why not.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dsec_proto::guest::{GuestError, GuestErrorKind as Kind};
use prost::Message;
use rustix::io::Errno;

use crate::child::CHECKED;
use crate::fail::{fail, os};
use crate::{sys, tree, wire};

/// From fork to exec: longer takes only who is stopped.
pub(crate) const START_MAX: Duration = Duration::from_secs(60);

/// What a child's report says.
pub(crate) enum Report {
    /// Nothing yet, or the terminal only.
    Wait,
    /// It was exec'd.
    Done,
    /// A check found everything.
    Checked,
    /// It could not.
    Failed(GuestError),
}

/// Nobody starts for this long but who is held up (stopped, by somebody inside).
pub(crate) fn not_started() -> GuestError {
    let message = format!("the command did not start within {} s: it is held up", START_MAX.as_secs());
    fail(Kind::Unavailable, message)
}

/// Reads a child's report; a terminal's master that comes with it goes to `master`.
pub(crate) fn read(report: &OwnedFd, pid: i32, master: &mut Option<OwnedFd>) -> Report {
    let mut bytes = Vec::new();
    loop {
        let mut fds = std::collections::VecDeque::new();
        let before = bytes.len();
        let got = match wire::receive(report.as_fd(), &mut bytes, &mut fds) {
            Err(Errno::NOTSOCK) => read_pipe(report, &mut bytes),
            other => other,
        };
        if let Some(fd) = fds.pop_front() {
            *master = Some(fd);
            bytes.truncate(before);
        }
        match got {
            Err(Errno::AGAIN) if bytes.is_empty() => return Report::Wait,
            // The end of file of a child that was killed says the same as that of one that was exec'd.
            Ok(0) if bytes.is_empty() && sys::has_ended(pid) && tree::never_ran(pid) => {
                let message = "the command was killed before it ran: the sandbox may be out of memory";
                return Report::Failed(fail(Kind::ResourceExhausted, message));
            }
            Ok(0) if bytes.is_empty() => return Report::Done,
            Ok(0) | Err(Errno::AGAIN) if bytes == CHECKED => return Report::Checked,
            // It was written by one call: what is there is all, and nobody is waited for.
            Ok(0) | Err(Errno::AGAIN) => {
                let unreadable = || fail(Kind::Internal, "the command could not be started");
                let error = GuestError::decode(bytes.as_slice());
                return Report::Failed(error.unwrap_or_else(|_| unreadable()));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Report::Failed(os("the command could not be started", e)),
        }
    }
}

fn read_pipe(pipe: &OwnedFd, into: &mut Vec<u8>) -> Result<usize, Errno> {
    let mut chunk = [0; 1024];
    let n = rustix::io::read(pipe, &mut chunk)?;
    into.extend_from_slice(&chunk[..n]);
    Ok(n)
}
