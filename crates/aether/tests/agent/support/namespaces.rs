//! The two user namespaces: U0, which the agent's credentials are in, and U1 below it for users.
#![allow(unsafe_code, reason = "fork and unshare")]

use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Both namespaces.
pub(crate) struct UserNamespaces {
    pub(crate) outer: OwnedFd,
    pub(crate) users: OwnedFd,
}

/// Ids mapped into each sandbox.
pub(crate) const RANGE: u32 = 65536;

fn fork() -> i32 {
    // SAFETY: glibc's fork keeps the allocator usable in the child, which ends in `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    pid
}

fn quit(code: i32) -> ! {
    // SAFETY: no memory is involved.
    unsafe { libc::_exit(code) }
}

fn new_user_ns() -> bool {
    // SAFETY: changes this process's credentials only.
    unsafe { libc::unshare(libc::CLONE_NEWUSER) == 0 }
}

fn dumpable() {
    // SAFETY: integers only. So that `/proc/<pid>` is this process's own and not root's.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
}

/// Makes them: U0 maps 0 to `owner` and 1.. to `owner + 1`..; U1, made by `owner`, maps 0.. to U0's 1...
pub(crate) fn make(owner: u32) -> UserNamespaces {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let outer = fork();
    if outer == 0 {
        quit(i32::from(!outer_side(theirs)));
    }
    drop(theirs);
    let mut byte = [0];
    ours.read_exact(&mut byte).unwrap();
    let map = format!("0 {owner} 1\n1 {} {RANGE}\n", owner + 1);
    fs::write(format!("/proc/{outer}/uid_map"), &map).unwrap();
    fs::write(format!("/proc/{outer}/gid_map"), &map).unwrap();
    ours.write_all(b"m").unwrap();
    let mut pid = [0; 4];
    ours.read_exact(&mut pid).unwrap();
    let users = u32::from_ne_bytes(pid);
    let made = UserNamespaces {
        outer: fs::File::open(format!("/proc/{outer}/ns/user")).unwrap().into(),
        users: fs::File::open(format!("/proc/{users}/ns/user")).unwrap().into(),
    };
    // A byte, not an end of file: other tests' children may have copies of our end.
    ours.write_all(b"q").unwrap();
    // SAFETY: waits for a child of ours.
    unsafe { libc::waitpid(outer, std::ptr::null_mut(), 0) };
    made
}

/// In U0: becomes its root, makes U1 and writes its map, which only somebody in U0 may.
fn outer_side(mut socket: UnixStream) -> bool {
    let mut byte = [0];
    if !new_user_ns() || socket.write_all(b"n").is_err() || socket.read_exact(&mut byte).is_err() {
        return false;
    }
    // SAFETY: integers only; this process has one thread.
    unsafe {
        libc::syscall(libc::SYS_setresgid, 0, 0, 0);
        libc::syscall(libc::SYS_setresuid, 0, 0, 0);
    }
    dumpable();
    let Ok((mut ours, mut theirs)) = UnixStream::pair() else { return false };
    let inner = fork();
    if inner == 0 {
        drop(ours);
        let made = new_user_ns();
        dumpable();
        let told = theirs.write_all(b"n").is_ok();
        let _ = theirs.read_exact(&mut byte);
        quit(i32::from(!(made && told)));
    }
    drop(theirs);
    let map = format!("0 1 {RANGE}\n");
    let done = ours.read_exact(&mut byte).is_ok()
        && fs::write(format!("/proc/{inner}/uid_map"), &map).is_ok()
        && fs::write(format!("/proc/{inner}/gid_map"), &map).is_ok()
        && socket.write_all(&(inner as u32).to_ne_bytes()).is_ok();
    // Until the caller has both open.
    let _ = socket.read(&mut byte);
    let _ = ours.write_all(b"q");
    // SAFETY: waits for a child of ours.
    unsafe { libc::waitpid(inner, std::ptr::null_mut(), 0) };
    done
}
