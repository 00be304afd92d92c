//! Processes: creation straight into namespaces and a cgroup, credentials, and what a process sheds
//! before it runs something it does not trust.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Namespaces for a new process, as `CLONE_NEW*` bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Namespaces(u64);

impl Namespaces {
    /// None: a plain fork.
    pub const NONE: Self = Self(0);
    /// Process ids.
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    /// User ids.
    pub const USER: Self = Self(libc::CLONE_NEWUSER as u64);
    /// Mounts, System V IPC, host name and cgroup view together.
    pub const MOUNT_IPC_UTS_CGROUP: Self =
        Self((libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP) as u64);
    /// Mounts.
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    /// Network.
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);
}

/// Proof that this process has one thread, so that a forked child may run any code. Not `Send`; a
/// process that holds one must not start threads.
#[derive(Debug)]
pub struct SingleThread(PhantomData<*const ()>);

/// A child that was just made.
#[derive(Debug)]
pub struct Child {
    /// Its process id here.
    pub pid: i32,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
}

/// `struct clone_args` of clone3(2), with `CLONE_INTO_CGROUP` (Linux 5.7).
#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

impl SingleThread {
    /// Looks whether it is so.
    ///
    /// # Errors
    /// There are more threads, with their number.
    pub fn check() -> io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        if threads == 1 {
            Ok(Self(PhantomData))
        } else {
            Err(io::Error::other(format!("the process has {threads} threads and may have only one here")))
        }
    }

    /// Forks into new namespaces and, when given, straight into a cgroup v2 directory. The child runs
    /// `body` and ends with its result as exit code; it never returns here, nor unwinds out of `body`.
    ///
    /// # Errors
    /// The kernel's: `EAGAIN` at a process limit, `EBUSY`/`EOPNOTSUPP` when the cgroup takes no process.
    pub fn fork(
        &self,
        namespaces: Namespaces,
        cgroup: Option<BorrowedFd<'_>>,
        body: impl FnOnce() -> i32,
    ) -> io::Result<Child> {
        const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
        let mut pidfd: i32 = -1;
        let mut args = CloneArgs {
            flags: namespaces.0 | libc::CLONE_PIDFD as u64,
            pidfd: std::ptr::from_mut(&mut pidfd) as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        };
        if let Some(cgroup) = cgroup {
            args.flags |= CLONE_INTO_CGROUP;
            args.cgroup = cgroup.as_raw_fd() as u64;
        }
        // SAFETY: no CLONE_VM, so the child is a copy as after fork(2), and `self` proves that no other thread held a
        // lock; `args` is a whole clone_args and `pidfd` outlives the call.
        let pid = check(unsafe {
            libc::syscall(libc::SYS_clone3, std::ptr::from_ref(&args), size_of::<CloneArgs>())
        })?;
        if pid == 0 {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
            exit_now(code);
        }
        // SAFETY: the kernel has just put a descriptor there that nobody else owns.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        Ok(Child { pid: pid as i32, pidfd })
    }
}

/// `_exit(2)`: no destructors, no buffers, no handlers.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(code) }
}

/// Closes the child's copy of a descriptor that its parent goes on using: a forked body borrows what
/// its parent owns, and must not drop it there.
pub fn close_in_child(fd: &OwnedFd) {
    // SAFETY: only the forked copy of the table changes; the child does not use `fd` again, and never runs its destructor.
    unsafe { libc::close(fd.as_raw_fd()) };
}

/// Enters the namespace that `fd` stands for, whichever kind it is.
///
/// # Errors
/// `EPERM` without the right to; `EINVAL` for a user namespace in a process with threads.
pub fn enter(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: setns takes no memory.
    check(unsafe { libc::syscall(libc::SYS_setns, fd.as_raw_fd(), 0) }).map(drop)
}

/// Leaves namespaces for new ones.
///
/// # Errors
/// The kernel's.
pub fn unshare(namespaces: Namespaces) -> io::Result<()> {
    // SAFETY: none of the bits makes the caller share or lose memory or descriptors.
    check(unsafe { libc::syscall(libc::SYS_unshare, namespaces.0) }).map(drop)
}

/// Real, effective, saved and file-system ids of this process, and no supplementary groups.
///
/// # Errors
/// The kernel's.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: these take no memory but the empty group list. The raw calls change this thread, which is the process.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()))?;
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    Ok(())
}

/// File-system ids of this thread: what new files belong to and what permission checks go by.
pub fn set_fs_ids(uid: u32, gid: u32) {
    // SAFETY: takes no memory; these calls cannot fail, they answer the old id.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
    }
}

/// Keeps capabilities through a change of the file-system id (`SECBIT_NO_SETUID_FIXUP`).
///
/// # Errors
/// The kernel's.
pub fn keep_caps_over_id_changes() -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)
}

fn prctl(option: i32, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the options used here take numbers only.
    check(unsafe { libc::syscall(libc::SYS_prctl, option, value, 0, 0, 0) }).map(drop)
}

/// Gives up every capability for good: bounding set, ambient, permitted, effective, inheritable, and id 0 regains
/// none at an exec (`SECBIT_NOROOT`, locked).
///
/// # Errors
/// The kernel's.
pub fn drop_all_capabilities() -> io::Result<()> {
    // Locked NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE.
    const SECUREBITS: libc::c_ulong = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80;
    prctl(libc::PR_SET_SECUREBITS, SECUREBITS)?;
    for capability in 0..=63 {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => break,
            other => other?,
        }
    }
    let header: [u32; 2] = [0x2008_0522, 0];
    let none = [0u32; 6];
    // SAFETY: a version 3 header for this thread and the two capability words that version reads.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }).map(drop)
}

/// Lets (or forbids) same-user processes trace this one and open its `/proc` files.
///
/// # Errors
/// The kernel's.
pub fn set_dumpable(yes: bool) -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, u64::from(yes))
}

/// A fresh, anonymous session keyring instead of the inherited one. A kernel without keyrings has nothing to leave.
pub fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: the name is a null pointer, which asks for an anonymous keyring.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
}

/// Children that end are reaped by the kernel; waiting for them answers `ECHILD`.
pub fn reap_automatically() {
    // SAFETY: SIG_IGN is a valid disposition for SIGCHLD.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Default dispositions and an empty mask for all signals: what a program expects to start with.
pub fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL is valid for every signal; the two that take none answer an error, which is fine.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: an all-zero sigset_t is the empty set, and the old one is not asked for.
    unsafe {
        let empty: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
    }
}

/// Executes an open file. Returns only when it fails.
pub fn exec_fd(program: BorrowedFd<'_>, argv0: &CStr) -> io::Error {
    let argv = [argv0.as_ptr(), std::ptr::null()];
    let envp: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: both vectors end with a null pointer and their strings with a NUL.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Puts `fds[i]` at number `first + i`, inheritable by an exec, and closes every other descriptor from
/// `first` on. All that is given must be above the target range.
///
/// # Errors
/// The kernel's; `InvalidInput` when a source lies in the target range.
pub fn place_descriptors(first: i32, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let end = first + fds.len() as i32;
    if fds.iter().any(|fd| (first..end).contains(&fd.as_raw_fd())) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a descriptor stands where another must go"));
    }
    for (to, fd) in (first..).zip(fds) {
        // SAFETY: dup2 takes numbers only. What stood at the target is closed: the caller execs or ends right after.
        check(i64::from(unsafe { libc::dup2(fd.as_raw_fd(), to) }))?;
    }
    Ok(())
}

/// Marks every descriptor from `first` on close-on-exec.
///
/// # Errors
/// The kernel's (Linux 5.11).
pub fn close_on_exec_from(first: i32) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_ulong = 4;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOSE_RANGE_CLOEXEC) }).map(drop)
}

/// A copy of `fd` numbered `least` or higher, close-on-exec.
///
/// # Errors
/// `EMFILE` at the descriptor limit.
pub fn dup_above(fd: BorrowedFd<'_>, least: i32) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, least)?)
}

/// Takes over a descriptor that this process was started with, once: it is close-on-exec afterwards, and asking
/// for the same number again is refused.
///
/// # Errors
/// `EBADF`: there is none of that number; `EINVAL`: it is a standard stream, or was taken already.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD takes a number only.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if number <= 2 || flags & libc::FD_CLOEXEC != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: it is open, and nobody here owns it: what this process opens or has taken is close-on-exec.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// A handle on a process that a reused pid cannot fool.
///
/// # Errors
/// `ESRCH`: it is gone.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// SIGKILL through a handle. One that is gone already is fine.
pub fn kill(pidfd: BorrowedFd<'_>) {
    let _gone_already = pidfd_send_signal(pidfd, Signal::KILL);
}

/// Waits until a process has ended, at most `limit`. False: it has not.
///
/// # Errors
/// The kernel's.
pub fn wait_for_end(pidfd: BorrowedFd<'_>, limit: std::time::Duration) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let until = std::time::Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let fd = pidfd.as_fd();
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

/// Sets the host name of this UTS namespace.
///
/// # Errors
/// The kernel's.
pub fn set_hostname(name: &str) -> io::Result<()> {
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

/// Brings the loopback interface of this network namespace up.
///
/// # Errors
/// The kernel's.
pub fn loopback_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: an all-zero ifreq is valid; its name field ends with a NUL; the kernel reads name and flags only.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        check(i64::from(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request))).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_gets_no_proof() {
        // The test harness runs this on a thread of its own.
        assert!(SingleThread::check().is_err());
    }

    #[test]
    fn descriptors_in_the_way_of_each_other_are_refused() {
        let fd = std::fs::File::open("/dev/null").unwrap();
        let raw = fd.as_raw_fd();
        assert!(place_descriptors(raw, &[fd.as_fd()]).is_err());
    }

    #[test]
    fn the_end_of_a_process_is_seen_through_its_handle() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let handle = open_pidfd(child.id() as i32).unwrap();
        assert!(!wait_for_end(handle.as_fd(), std::time::Duration::ZERO).unwrap());
        kill(handle.as_fd());
        assert!(wait_for_end(handle.as_fd(), std::time::Duration::from_secs(10)).unwrap());
        child.wait().unwrap();
        kill(handle.as_fd());
    }
}
