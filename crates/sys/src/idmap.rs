//! Ids: every sandbox has a range of its own, and two user namespaces.
//!
//! ```text
//! host          keeper X          base .. base+65535
//! U0 (outer)    0                 1 .. 65536            the agent, without a capability
//! U1 (inner)    (not mapped)      0 .. 65535            the sandbox's users; owned by X
//! ```
//!
//! Since X owns U1, the agent may enter it with each child and signal what lives there, without any
//! capability; nobody in U1 has any power over the agent, whose id does not exist there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use crate::process::{Namespaces, SingleThread, become_user, close_in_child, set_dumpable, unshare};

/// Ids in a sandbox: what a distribution's passwd can name.
pub const IDS: u32 = 65_536;
/// First host id of the first range. Far above what administrators and subuid tools hand out.
pub const FIRST_BASE: u32 = 0x1000_0000;
/// Host id of the first agent. The agents' ids lie below [`FIRST_BASE`].
pub const FIRST_KEEPER: u32 = 0x0f00_0000;
/// Ranges there are: more than sandboxes on any node.
pub const RANGES: u32 = 32_768;

const _: () = assert!(FIRST_KEEPER + RANGES <= FIRST_BASE);
const _: () = assert!(FIRST_BASE as u64 + (RANGES as u64 * IDS as u64) < u32::MAX as u64);

/// The host ids of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdRange(u32);

impl IdRange {
    /// The `n`th range, from 0 to [`RANGES`] - 1.
    pub fn nth(n: u32) -> Option<Self> {
        (n < RANGES).then_some(Self(n))
    }

    /// The range that begins at this host id.
    pub fn from_base(base: u32) -> Option<Self> {
        let offset = base.checked_sub(FIRST_BASE)?;
        if offset.is_multiple_of(IDS) { Self::nth(offset / IDS) } else { None }
    }

    /// Which one it is.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Host id of the sandbox's root.
    pub fn base(self) -> u32 {
        FIRST_BASE + self.0 * IDS
    }

    /// Host id of its agent.
    pub fn keeper(self) -> u32 {
        FIRST_KEEPER + self.0
    }
}

/// The two user namespaces of a sandbox, open.
#[derive(Debug)]
pub struct UserNamespaces {
    /// U0.
    pub outer: OwnedFd,
    /// U1.
    pub inner: OwnedFd,
}

fn write_map(pid: u32, map: &str) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/uid_map"), map)?;
    fs::write(format!("/proc/{pid}/gid_map"), map)
}

/// Makes both. The inner map must be written from inside the outer namespace, so a child does it and
/// ends; about 0.3 ms.
///
/// # Errors
/// The kernel's: `ENOSPC` or `EUSERS` at a limit of user namespaces.
pub fn user_namespaces(proof: &SingleThread, range: IdRange) -> io::Result<UserNamespaces> {
    let (go_read, go_write) = pipe()?;
    let (ready_read, ready_write) = pipe()?;
    let outer = proof.fork(Namespaces::NONE, None, || {
        close_in_child(&go_write);
        outer_child(proof, range, go_read, &ready_write)
            .map_or_else(|error| tell_error(&ready_write, &error), |()| 0)
    })?;
    drop(ready_write);
    let (mut go_write, mut ready_read) = (File::from(go_write), File::from(ready_read));
    let outer_pid = outer.pid as u32;
    hear(&mut ready_read)?;
    write_map(outer_pid, &format!("0 {} 1\n1 {} {IDS}\n", range.keeper(), range.base()))?;
    go_write.write_all(b"m")?;
    let inner_pid = hear(&mut ready_read)?;
    let open = |pid: u32| File::open(format!("/proc/{pid}/ns/user")).map(OwnedFd::from);
    Ok(UserNamespaces { outer: open(outer_pid)?, inner: open(inner_pid)? })
    // Dropping `go_write` ends both children.
}

/// Tells the process above: done, with a process id where there is one to tell.
fn tell(up: &OwnedFd, pid: u32) -> io::Result<()> {
    Ok(rustix::io::write(up, &i64::from(pid).to_le_bytes()).map(drop)?)
}

/// Tells it what failed, and returns the exit code.
fn tell_error(up: &OwnedFd, error: &io::Error) -> i32 {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    // Who does not hear it finds the pipe closed.
    let _nobody_listens = rustix::io::write(up, &(-i64::from(errno)).to_le_bytes());
    1
}

fn hear(below: &mut File) -> io::Result<u32> {
    let mut told = [0; 8];
    below.read_exact(&mut told)?;
    let told = i64::from_le_bytes(told);
    u32::try_from(told).map_err(|_| io::Error::from_raw_os_error(-told as i32))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Becomes X, makes U0, waits for its map, makes a child in U1 and writes that one's map. U0 is made by X and not by
/// root, since the kernel counts what is used in a namespace (inotify instances, queued signals, message queues) on
/// its maker too: what one sandbox takes would be missing to all others and to the host.
fn outer_child(proof: &SingleThread, range: IdRange, go: OwnedFd, ready: &OwnedFd) -> io::Result<()> {
    let mut go = File::from(go);
    let mut byte = [0];
    become_user(range.keeper(), range.keeper())?;
    unshare(Namespaces::USER)?;
    tell(ready, 0)?;
    go.read_exact(&mut byte)?;
    become_user(0, 0)?;
    // The change of ids has made the process non-dumpable, and then even its own /proc files are root's.
    set_dumpable(true)?;
    let (up_read, up_write) = pipe()?;
    let inner = proof.fork(Namespaces::NONE, None, || {
        if let Err(error) = unshare(Namespaces::USER).and_then(|()| tell(&up_write, 0)) {
            return tell_error(&up_write, &error);
        }
        // Lives until the launcher has opened the namespace and closes its end of `go`.
        i32::from(matches!(go.read(&mut byte), Ok(1..)))
    })?;
    drop(up_write);
    hear(&mut File::from(up_read))?;
    write_map(inner.pid as u32, &format!("0 1 {IDS}\n"))?;
    tell(ready, inner.pid as u32)?;
    let _end_of_file = go.read(&mut byte);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_come_back_from_their_base() {
        let (a, b) = (IdRange::nth(0).unwrap(), IdRange::nth(1).unwrap());
        assert_eq!(a.base() + IDS, b.base());
        assert_ne!(a.keeper(), b.keeper());
        let last = IdRange::nth(RANGES - 1).unwrap();
        assert!(last.base().checked_add(IDS).is_some());
        assert_eq!(IdRange::from_base(last.base()), Some(last));
        assert_eq!(IdRange::nth(RANGES), None);
        assert_eq!(IdRange::from_base(FIRST_BASE + 1), None);
        assert_eq!(IdRange::from_base(0), None);
    }
}
