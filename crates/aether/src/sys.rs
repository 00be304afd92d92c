//! System calls that rustix has no safe form of. The only module with `unsafe`.
//!
//! The agent has one thread and forks without `CLONE_VM`, so a child may use the allocator and
//! everything else the parent could: it is a copy with no lock held by anybody.
#![allow(unsafe_code, reason = "raw system calls: fork, credentials, seccomp, exec")]

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::io::Errno;

/// Capabilities of this kernel and those to come: the kernel's sets are 64 bits wide.
const CAPABILITIES: u32 = 64;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// Copies this process. `None` in the child. With a cgroup v2 directory the child is born there.
pub(crate) fn fork(cgroup: Option<BorrowedFd<'_>>) -> Result<Option<i32>, Errno> {
    // SAFETY: an all-zero clone_args is valid: no flags, no pointers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(dir) = cgroup {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = dir.as_raw_fd() as u64;
    }
    // SAFETY: args lives through the call and holds no pointer; without CLONE_VM the child has its
    // own copy of this stack.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) })?;
    Ok((pid != 0).then_some(pid as i32))
}

/// Ends this process at once.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: no memory is involved.
    unsafe { libc::_exit(code) }
}

/// Takes ownership of a descriptor by number.
///
/// Only for the numbers that the launcher promised and nobody else in this process owns.
pub(crate) fn adopt(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: F_GETFD reads a descriptor's flags.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and called once for each number at start, before anything else is opened.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Marks every descriptor from `first` on close-on-exec.
pub(crate) fn cloexec_from(first: u32) {
    // SAFETY: changes flags of descriptors only.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Closes every descriptor in a range. For a child that ends in `_exit`, so that nothing owns them.
pub(crate) fn close_range(first: u32, last: u32) {
    // SAFETY: the caller is a child that uses none of them again and never drops their owners.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Makes `to` a copy of `from` that survives exec.
pub(crate) fn dup_onto(from: RawFd, to: RawFd) -> Result<(), Errno> {
    // SAFETY: only called in a child, for numbers that nothing in it uses under another meaning.
    check(unsafe { libc::dup2(from, to) }.into()).map(drop)
}

/// A copy of a descriptor with a number of at least `min`, close-on-exec.
pub(crate) fn dup_above(from: RawFd, min: RawFd) -> Result<RawFd, Errno> {
    // SAFETY: makes a new descriptor.
    check(unsafe { libc::fcntl(from, libc::F_DUPFD_CLOEXEC, min) }.into()).map(|fd| fd as RawFd)
}

/// A borrowed view of a descriptor number that lives as long as the process.
pub(crate) fn borrow(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: callers pass 0, 1, 2 or descriptors that a child keeps until it ends.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Enters a user namespace.
pub(crate) fn enter_user_ns(ns: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: changes this process's credentials only.
    check(unsafe { libc::setns(ns.as_raw_fd(), libc::CLONE_NEWUSER) }.into()).map(drop)
}

/// Takes all but `keep` out of the bounding set.
pub(crate) fn limit_bounding(keep: u64) -> Result<(), Errno> {
    for capability in 0..CAPABILITIES {
        if keep & (1 << capability) != 0 {
            continue;
        }
        // SAFETY: integers only.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            match errno() {
                Errno::INVAL => break, // past the last one this kernel has
                e => return Err(e),
            }
        }
    }
    Ok(())
}

/// Sets all ids, supplementary groups first.
pub(crate) fn set_ids(uid: u32, gid: u32, groups: &[u32]) -> Result<(), Errno> {
    // SAFETY: pointer and length come from one slice.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
    // SAFETY: integers only. The raw calls, since glibc's would signal threads that do not exist.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }).map(drop)
}

/// Permitted and effective become `mask`, inheritable and ambient empty. The kernel leaves out bits that
/// it has no capability for.
pub(crate) fn set_capabilities(mask: u64) -> Result<(), Errno> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    // SAFETY: integers only.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let (low, high) = (mask as u32, (mask >> 32) as u32);
    let header = Header { version: CAPABILITY_VERSION_3, pid: 0 };
    let data: [u32; 6] = [low, low, 0, high, high, 0];
    // SAFETY: header and data have the layout of version 3: two structs of three words.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) }).map(drop)
}

/// No exec below gains rights.
pub(crate) fn no_new_privs() -> Result<(), Errno> {
    // SAFETY: integers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into()).map(drop)
}

/// Loads a seccomp filter of `struct sock_filter`s.
pub(crate) fn seccomp(program: &[u8]) -> Result<(), Errno> {
    let filters: Vec<libc::sock_filter> = program
        .as_chunks::<8>()
        .0
        .iter()
        .map(|b| libc::sock_filter {
            code: u16::from_ne_bytes([b[0], b[1]]),
            jt: b[2],
            jf: b[3],
            k: u32::from_ne_bytes([b[4], b[5], b[6], b[7]]),
        })
        .collect();
    let len = u16::try_from(filters.len()).map_err(|_| Errno::INVAL)?;
    let prog = libc::sock_fprog { len, filter: filters.as_ptr().cast_mut() };
    // SAFETY: the kernel copies `len` filters that live through the call and writes none.
    check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const prog) })
        .map(drop)
}

/// Replaces the program; returns only when that failed.
pub(crate) fn execve(path: &CStr, argv: &[CString], env: &[CString]) -> Errno {
    let list = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, env) = (list(argv), list(env));
    // SAFETY: both are null-terminated lists of strings that live through the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    errno()
}

/// Blocks every signal and gives a descriptor that reports `SIGCHLD`.
pub(crate) fn child_signals() -> Result<OwnedFd, Errno> {
    // SAFETY: the sets are initialised by sigfillset and sigemptyset before use.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, ptr::null_mut());
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut child);
        libc::sigaddset(&raw mut child, libc::SIGCHLD);
        let fd = check(libc::signalfd(-1, &raw const child, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK).into())?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}

/// Default action for every signal: at start, so that children only undo [`child_signals`] and what
/// the Rust runtime ignored (`SIGPIPE`).
pub(crate) fn default_signals() {
    // The kernel's struct: handler, flags, restorer, mask; all zero is the default action. The raw
    // call, since glibc's leaves out the two signals that it keeps for itself.
    let default = [0u64; 4];
    let nothing = ptr::null::<u64>();
    for signal in 1..=64 {
        // SAFETY: installs no handler; the struct lives through the call; the mask has 8 bytes.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), nothing, 8usize) };
    }
}

/// Opens the signal mask again, in a child.
pub(crate) fn unblock_signals() {
    // SAFETY: the set is initialised by sigemptyset.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// A process that was reaped.
pub(crate) struct Reaped {
    /// Its id.
    pub(crate) pid: i32,
    /// Exit code, when it ended by itself.
    pub(crate) code: i32,
    /// Signal that ended it, or 0.
    pub(crate) signal: i32,
    /// CPU time of it and the children it waited for.
    pub(crate) cpu_us: u64,
}

/// Reaps one ended child of any kind.
pub(crate) fn reap() -> Option<Reaped> {
    let mut status = 0;
    // SAFETY: rusage is plain data.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both out-pointers are valid.
    let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG | libc::__WALL, &raw mut usage) };
    if pid <= 0 {
        return None;
    }
    let us = |t: libc::timeval| (t.tv_sec as u64).saturating_mul(1_000_000) + t.tv_usec as u64;
    let signal = if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 };
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 0 };
    Some(Reaped { pid, code, signal, cpu_us: us(usage.ru_utime) + us(usage.ru_stime) })
}

/// It has ended and was not reaped yet.
pub(crate) fn has_ended(pid: i32) -> bool {
    // SAFETY: siginfo_t is plain data.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: the out-pointer is valid; nothing is reaped.
    let found = unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut info, flags) };
    // SAFETY: a filled siginfo of a child has a process id; a zeroed one 0.
    found == 0 && unsafe { info.si_pid() } == pid
}

/// It was stopped by a signal since the last call.
pub(crate) fn was_stopped(pid: i32) -> bool {
    // SAFETY: siginfo_t is plain data.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WNOHANG;
    // SAFETY: the out-pointer is valid; an ended child is not reaped by it.
    let found = unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut info, flags) };
    // SAFETY: a filled siginfo of a child has a process id; a zeroed one 0.
    found == 0 && unsafe { info.si_pid() } == pid
}

/// Sends a signal to a process, a group (`-pgid`) or everybody (-1).
pub(crate) fn kill(pid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: integers only.
    check(unsafe { libc::kill(pid, signal) }.into()).map(drop)
}

/// What the agent does for itself at start: unreadable, called `init`, as many descriptors as it may.
pub(crate) fn harden_self() {
    // SAFETY: integers and one static string.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"init".as_ptr());
    }
    let (_, hard) = nofile();
    let limit = libc::rlimit { rlim_cur: hard, rlim_max: hard };
    // SAFETY: limit lives through the call.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    // Large buffers go back to the kernel when freed; the heap keeps no slack.
    // SAFETY: integers only.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TOP_PAD, 16 * 1024);
    }
}

fn nofile() -> (u64, u64) {
    limits_of(libc::RLIMIT_NOFILE)
}

fn limits_of(resource: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the out-pointer is valid.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    (limit.rlim_cur, limit.rlim_max)
}

/// `RLIMIT_NOFILE` (0: as it is; never above the hard limit, which only a capability of the host
/// raises) and no core files: at a limit of 1, unlike 0, the kernel also starts no handler on the host where
/// `kernel.core_pattern` is a pipe (core(5)). The filter keeps it there.
pub(crate) fn limit_child(nofile_max: u64) -> Result<(), Errno> {
    let (_, core_hard) = limits_of(libc::RLIMIT_CORE);
    let core = libc::rlimit { rlim_cur: core_hard.min(1), rlim_max: core_hard.min(1) };
    // SAFETY: core lives through the call.
    check(unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const core) }.into())?;
    let (soft, hard) = nofile();
    let wanted = if nofile_max == 0 { soft } else { nofile_max.min(hard) };
    let limit = libc::rlimit { rlim_cur: wanted, rlim_max: wanted };
    // SAFETY: limit lives through the call.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }.into()).map(drop)
}

/// Gives free heap back to the kernel.
pub(crate) fn trim_heap() {
    // SAFETY: no memory that is in use is touched.
    unsafe { libc::malloc_trim(0) };
}

/// Clock ticks a second, for the times in `/proc/<pid>/stat`.
pub(crate) fn clock_ticks() -> u64 {
    // SAFETY: integers only.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100).max(1)
}

/// Random bits; for names, not for secrets.
pub(crate) fn random() -> u64 {
    let mut bits = 0u64;
    // SAFETY: the buffer is eight bytes of ours.
    unsafe { libc::getrandom((&raw mut bits).cast(), size_of_val(&bits), libc::GRND_NONBLOCK) };
    bits
}
