//! What a child does between fork and its work: become a user of the sandbox, exactly in the order
//! that the kernel's rules ask for.
//!
//! 1. cgroups, while still the agent: the descriptors are the host's;
//! 2. a session of its own, then the users' namespace: root there, with every capability there;
//! 3. look the user up (as that root), shrink the bounding set, change ids;
//! 4. without `no_new_privs` the filter is loaded here, since that needs `CAP_SYS_ADMIN`;
//! 5. capabilities down to what the user may have; from here on everything is done with the user's
//!    rights: the terminal (whose owner is its opener), the working directory, the program;
//! 6. with `no_new_privs` the filter is loaded last.
//!
//! Until exec the child is a copy of the agent's memory. The agent is not dumpable and its memory
//! belongs to the outer user namespace, and both are inherited, so nobody inside can look into it.

mod program;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use dsec_proto::guest::{Boot, GuestError, GuestErrorKind as Kind, Pty};
use prost::Message;
use rustix::io::Errno;

use crate::fail::{fail, invalid, os, reason, show};
use crate::users::{self, User};
use crate::{files, sys, wire};

pub(crate) use program::Program;

/// Descriptors that are held for children, from the launcher.
pub(crate) struct Host {
    pub(crate) boot: Boot,
    pub(crate) user_ns: OwnedFd,
    pub(crate) tasks: Vec<OwnedFd>,
    pub(crate) spool: OwnedFd,
    /// `/dev/null`, opened before anybody could replace it.
    pub(crate) null: OwnedFd,
}

/// A cgroup v2 directory of one exec or session, and its `cgroup.kill`.
pub(crate) struct Cgroup {
    pub(crate) dir: OwnedFd,
    pub(crate) kill: OwnedFd,
}

/// Standard descriptors of a command.
pub(crate) enum Stdio<'a> {
    /// Input, output, error.
    Pipes([BorrowedFd<'a>; 3]),
    /// A new terminal, whose master is sent with the report.
    Terminal(Pty),
}

/// A program to run.
pub(crate) struct Exec<'a> {
    pub(crate) program: Program<'a>,
    pub(crate) env: &'a [Vec<u8>],
    pub(crate) stdio: Stdio<'a>,
    /// More descriptors, under fixed numbers.
    pub(crate) extra: &'a [(BorrowedFd<'a>, RawFd)],
}

/// What a check that found everything reports: an end of file alone could be that of a killed child.
pub(crate) const CHECKED: [u8; 1] = [0];

/// What the child is for.
pub(crate) enum Work<'a> {
    Exec(Exec<'a>),
    /// Only see whether the user and the directory exist.
    Check,
    /// A file operation.
    Files(files::Request<'a>),
}

/// A child to make.
pub(crate) struct Plan<'a> {
    /// Empty: the sandbox's.
    pub(crate) user: &'a str,
    /// Empty: the sandbox's.
    pub(crate) cwd: &'a [u8],
    pub(crate) work: Work<'a>,
}

/// A child that was made. `report` is at end of file when it has exec'd; before that it has a
/// [`GuestError`] when it failed, or [`CHECKED`].
pub(crate) struct Child {
    pub(crate) pid: i32,
    pub(crate) report: OwnedFd,
}

/// Forks and sets the child going.
pub(crate) fn spawn(
    host: &Host,
    cgroup: Option<BorrowedFd<'_>>,
    plan: &Plan<'_>,
) -> Result<Child, GuestError> {
    let (report, theirs) = report_channel(plan).map_err(|e| os("cannot make a pipe", e))?;
    // Its own work is done in a sandbox without room for a process as well: there is a limit of its own on it.
    let past_limit = !matches!(plan.work, Work::Exec(_));
    match fork_into(cgroup, past_limit) {
        Ok((None, join)) => run(host, plan, &theirs, join),
        Ok((Some(pid), _)) => Ok(Child { pid, report }),
        Err(Errno::AGAIN) => Err(fail(
            Kind::ResourceExhausted,
            "no process could be started: the sandbox's limit of processes (pids) is reached",
        )),
        Err(Errno::NOMEM) => Err(fail(Kind::ResourceExhausted, "no process could be started: out of memory")),
        Err(e) => Err(os("fork", e)),
    }
}

/// A pipe, or where a terminal comes back a socket.
fn report_channel(plan: &Plan<'_>) -> Result<(OwnedFd, OwnedFd), Errno> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    if matches!(&plan.work, Work::Exec(Exec { stdio: Stdio::Terminal(_), .. })) {
        return socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    }
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)
}

/// Born in the cgroup where the kernel lets us; else the child moves itself (`Some` directory).
fn fork_into(
    cgroup: Option<BorrowedFd<'_>>,
    past_limit: bool,
) -> Result<(Option<i32>, Option<BorrowedFd<'_>>), Errno> {
    let moves_itself = || sys::fork(None).map(|pid| (pid, cgroup));
    match sys::fork(cgroup) {
        Err(Errno::ACCESS | Errno::PERM | Errno::INVAL) if cgroup.is_some() => moves_itself(),
        Err(Errno::AGAIN) if cgroup.is_some() && past_limit => moves_itself(),
        other => other.map(|pid| (pid, None)),
    }
}

fn run(host: &Host, plan: &Plan<'_>, report: &OwnedFd, join: Option<BorrowedFd<'_>>) -> ! {
    let failed = match work(host, plan, report, join) {
        Ok(()) => {
            if let Work::Check = plan.work {
                let _ = rustix::io::write(report, &CHECKED);
            }
            sys::exit(0)
        }
        Err(error) => error,
    };
    if let Work::Files(request) = &plan.work {
        wire::reply_error(request.socket, failed);
        sys::exit(1);
    }
    let bytes = failed.encode_to_vec();
    let mut rest = bytes.as_slice();
    while let Ok(n @ 1..) = rustix::io::write(report, rest) {
        rest = &rest[n..];
    }
    sys::exit(127)
}

fn work(
    host: &Host,
    plan: &Plan<'_>,
    report: &OwnedFd,
    join: Option<BorrowedFd<'_>>,
) -> Result<(), GuestError> {
    enter_cgroups(host, join)?;
    sys::unblock_signals();
    rustix::process::setsid().map_err(|e| os("setsid", e))?;
    let user = become_user(host, plan.user)?;
    match &plan.work {
        Work::Check => {
            if !plan.cwd.is_empty() {
                change_dir(plan.cwd, &user)?;
            }
            Ok(())
        }
        Work::Files(request) => {
            sys::limit_child(host.boot.nofile).map_err(|e| os("setrlimit", e))?;
            filter_last(host)?;
            files::serve(request, &host.boot.cwd, &user);
            Ok(())
        }
        Work::Exec(exec) => {
            let terminal = match &exec.stdio {
                Stdio::Pipes(_) => None,
                Stdio::Terminal(size) => Some(open_terminal(*size, report)?),
            };
            place_descriptors(exec, terminal.as_ref()).map_err(|e| os("cannot place descriptors", e))?;
            sys::limit_child(host.boot.nofile).map_err(|e| os("setrlimit", e))?;
            let cwd = if plan.cwd.is_empty() { host.boot.cwd.as_slice() } else { plan.cwd };
            change_dir(if cwd.is_empty() { b"/" } else { cwd }, &user)?;
            let image = program::prepare(host, exec, &user, !plan.user.is_empty())?;
            filter_last(host)?;
            Err(image.exec(&user))
        }
    }
}

fn enter_cgroups(host: &Host, join: Option<BorrowedFd<'_>>) -> Result<(), GuestError> {
    for tasks in &host.tasks {
        rustix::io::write(tasks, b"0").map_err(|e| os("cannot enter the sandbox's cgroup", e))?;
    }
    let Some(dir) = join else { return Ok(()) };
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
    let joined = rustix::fs::openat(dir, "cgroup.procs", flags, rustix::fs::Mode::empty())
        .and_then(|procs| rustix::io::write(procs, b"0"));
    joined.map(drop).map_err(|e| {
        fail(
            Kind::Internal,
            format!("cannot enter the command's cgroup ({}): the agent must be able to write to its cgroup.procs and to that of its parent", reason(e)),
        )
    })
}

/// Steps 2 to 5 of the module's list.
fn become_user(host: &Host, spec: &str) -> Result<User, GuestError> {
    let boot = &host.boot;
    sys::enter_user_ns(host.user_ns.as_fd()).map_err(|e| os("cannot enter the users' namespace", e))?;
    let user = users::lookup(if spec.is_empty() { &boot.user } else { spec })?;
    sys::limit_bounding(boot.capabilities).map_err(|e| os("cannot drop capabilities", e))?;
    sys::set_ids(user.uid, user.gid, &user.groups).map_err(|e| match e {
        Errno::INVAL => invalid(format!(
            "user {} or a group of it ({:?}) is outside the range of ids of the sandbox",
            user.uid,
            [&[user.gid], user.groups.as_slice()].concat(),
        )),
        e => os(format!("cannot become user {}", user.uid), e),
    })?;
    if !boot.no_new_privs {
        load_filter(boot)?;
    }
    let keep = if user.uid == 0 { boot.capabilities } else { 0 };
    sys::set_capabilities(keep).map_err(|e| os("cannot set capabilities", e))?;
    if boot.no_new_privs {
        sys::no_new_privs().map_err(|e| os("cannot set no_new_privs", e))?;
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(user)
}

fn filter_last(host: &Host) -> Result<(), GuestError> {
    if host.boot.no_new_privs { load_filter(&host.boot) } else { Ok(()) }
}

fn load_filter(boot: &Boot) -> Result<(), GuestError> {
    if boot.seccomp.is_empty() {
        return Ok(());
    }
    sys::seccomp(&boot.seccomp).map_err(|e| os("cannot load the seccomp filter", e))
}

fn change_dir(cwd: &[u8], user: &User) -> Result<(), GuestError> {
    rustix::process::chdir(cwd).map_err(|e| {
        let (cwd, who) = (show(cwd), user.uid);
        match e {
            Errno::NOENT => invalid(format!("cwd {cwd} does not exist")),
            Errno::NOTDIR => invalid(format!("cwd {cwd} is not a directory")),
            Errno::ACCESS => invalid(format!("cwd {cwd} may not be entered by user {who}")),
            e => invalid(format!("cwd {cwd}: {}", reason(e))),
        }
    })
}

/// The terminal's user side; its master goes to the agent.
fn open_terminal(size: Pty, report: &OwnedFd) -> Result<OwnedFd, GuestError> {
    use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};
    let open = || -> Result<OwnedFd, Errno> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let master = rustix::fs::open("/dev/ptmx", flags, rustix::fs::Mode::empty())?;
        unlockpt(&master)?;
        let rows = u16::try_from(size.rows).unwrap_or(u16::MAX);
        let cols = u16::try_from(size.cols).unwrap_or(u16::MAX);
        let (rows, cols) = if rows == 0 || cols == 0 { (24, 80) } else { (rows, cols) };
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&master, size)?;
        let slave =
            ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        wire::send_descriptor(report.as_fd(), &[1], master.as_fd())?;
        rustix::process::ioctl_tiocsctty(&slave)?;
        Ok(slave)
    };
    open().map_err(|e| os("cannot open a terminal (/dev/ptmx)", e))
}

/// Everything but the standard descriptors and `extra` is closed by exec.
fn place_descriptors(exec: &Exec<'_>, terminal: Option<&OwnedFd>) -> Result<(), Errno> {
    /// Above every number that is a target.
    const PARKED: RawFd = 16;
    sys::cloexec_from(3);
    let mut parked = Vec::new();
    for (fd, to) in exec.extra {
        parked.push((sys::dup_above(fd.as_raw_fd(), PARKED.max(to + 1))?, *to));
    }
    match (&exec.stdio, terminal) {
        (Stdio::Pipes(fds), _) => {
            for (to, fd) in fds.iter().enumerate() {
                sys::dup_onto(fd.as_raw_fd(), to as RawFd)?;
            }
        }
        (Stdio::Terminal(_), Some(slave)) => {
            for to in 0..3 {
                sys::dup_onto(slave.as_raw_fd(), to)?;
            }
        }
        (Stdio::Terminal(_), None) => return Err(Errno::BADF),
    }
    for (from, to) in parked {
        sys::dup_onto(from, to)?;
    }
    Ok(())
}
