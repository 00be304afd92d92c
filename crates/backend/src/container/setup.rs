//! A container's first process, from the fork to the agent's first instruction: one phase after the
//! other, each timed. It is the host's root in a new pid namespace until the last phase takes
//! everything away. If a phase fails the process ends, and all it made, which is nowhere but in its
//! own namespaces and descriptors, ends with it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use dsec_proto::guest::boot_fd;
use dsec_sys::fdpass;
use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, id_map, new_mount};
use dsec_sys::process::{self, Namespaces};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, chownat, fstat, mkdirat, openat, openat2,
};
use rustix::io::Errno;

use super::ground::place;
use super::launcher::Ready;
use super::memory::Memory;
use super::wire::{FIXED_FDS, FromLaunch, Launch};

/// Files of the host's kernel that tell about the host or who else is on it, each covered by `/dev/null`. Writing is not
/// the matter here: the host owns `/proc`, and root in the container is nobody to it. What programs cannot do
/// without stays: `cpuinfo`, `loadavg`, `meminfo`, `stat`, `uptime`, `version`.
const MASKED_FILES: &[&str] = &[
    "buddyinfo",
    "cgroups",
    "cmdline",
    "config.gz",
    "diskstats",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "latency_stats",
    "locks",
    "mdstat",
    "modules",
    "mtrr",
    "partitions",
    "sched_debug",
    "schedstat",
    "softirqs",
    "swaps",
    "timer_list",
    "vmstat",
    "zoneinfo",
];
/// Directories of that kind, each covered by an empty one.
const MASKED_DIRS: &[&str] = &["acpi", "asound", "bus", "driver", "fs", "irq", "pressure", "scsi"];
/// Terminals of one container: the kernel has 4,096 for all.
const TERMINALS_MAX: &str = "256";

/// The descriptors of one launch.
#[derive(Debug)]
pub(super) struct LaunchFds {
    /// Where to report.
    pub channel: OwnedFd,
    /// Read-only layers, the lowest first.
    layers: Vec<OwnedFd>,
    writable: OwnedFd,
    spool: OwnedFd,
    listen: OwnedFd,
    config: OwnedFd,
    /// Directory of the agent's cgroup, version 2.
    pub cgroup: Option<OwnedFd>,
    task_files: Vec<OwnedFd>,
}

impl LaunchFds {
    /// Takes the descriptors of a message apart. `None`: not the number that was announced.
    pub(super) fn sort(launch: &Launch, fds: Vec<OwnedFd>) -> Option<Self> {
        if fds.len() != FIXED_FDS + launch.layers + usize::from(launch.cgroup) + launch.task_files {
            return None;
        }
        let mut fds = fds.into_iter();
        Some(Self {
            channel: fds.next()?,
            writable: fds.next()?,
            spool: fds.next()?,
            listen: fds.next()?,
            config: fds.next()?,
            layers: fds.by_ref().take(launch.layers).collect(),
            cgroup: if launch.cgroup { fds.next() } else { None },
            task_files: fds.collect(),
        })
    }
}

/// Sends one report on a launch's channel.
pub(super) fn tell(channel: BorrowedFd<'_>, report: &FromLaunch, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    fdpass::send(channel, &serde_json::to_vec(report).map_err(io::Error::other)?, fds)
}

/// Reports a failure.
pub(super) fn tell_failure(channel: BorrowedFd<'_>, what: &str, error: &io::Error) -> io::Result<()> {
    let report =
        FromLaunch::Failed { what: what.to_owned(), error: error.to_string(), errno: error.raw_os_error() };
    tell(channel, &report, &[])
}

/// A phase's name and what went wrong in it.
type Failure = (&'static str, io::Error);

/// Times phases and names the one that fails.
struct Phases {
    since: Instant,
    done: Vec<(String, u64)>,
}

impl Phases {
    fn run<T>(&mut self, name: &'static str, phase: impl FnOnce() -> io::Result<T>) -> Result<T, Failure> {
        let result = phase().map_err(|error| (name, error));
        self.done.push((name.to_owned(), self.since.elapsed().as_micros() as u64));
        self.since = Instant::now();
        result
    }
}

/// Runs all phases and executes the agent. Returns the exit code when one of them failed.
pub(super) fn run(launch: &Launch, fds: &LaunchFds, ready: &Ready, program: BorrowedFd<'_>) -> i32 {
    let mut phases = Phases { since: Instant::now(), done: Vec::new() };
    let (what, error) = match build(&mut phases, launch, fds, ready) {
        Err(failure) => failure,
        Ok(()) => match become_agent(&mut phases, fds, ready) {
            Err(failure) => failure,
            Ok(channel) => {
                let _edge_gone =
                    tell(channel.as_fd(), &FromLaunch::Phases(std::mem::take(&mut phases.done)), &[]);
                let error = process::exec_fd(program, c"init");
                let _edge_gone = tell_failure(channel.as_fd(), "execute the agent", &error);
                return 127;
            }
        },
    };
    let _edge_gone = tell_failure(fds.channel.as_fd(), what, &error);
    127
}

fn build(phases: &mut Phases, launch: &Launch, fds: &LaunchFds, ready: &Ready) -> Result<(), Failure> {
    let users = ready.users.inner.as_fd();
    let base = ready.range.base();
    phases.run("network", || process::enter(ready.net.as_fd()))?;
    phases.run("idmap", || {
        fds.layers.iter().try_for_each(|layer| id_map(layer.as_fd(), users, Attr::READ_ONLY))?;
        id_map(fds.writable.as_fd(), users, Attr::NODEV)
    })?;
    phases.run("namespaces", || process::unshare(Namespaces::MOUNT_IPC_UTS_CGROUP))?;
    let root = phases.run("overlay", || overlay(&fds.layers, fds.writable.as_fd(), base))?;
    let memory = phases.run("tmpfs", || Memory::make(launch.tmpfs_bytes, base))?;
    phases.run("root", || {
        attach(root.as_fd(), CWD, "/")?;
        rustix::process::fchdir(&root)?;
        rustix::process::chroot(".")?;
        Ok(())
    })?;
    let proc = phases.run("mounts", || {
        process::set_fs_ids(base, base);
        let made = mounts(&root, &memory, base).and_then(|proc| {
            name_files(&root, &memory.root, &launch.hostname, base)?;
            Ok(proc)
        });
        process::set_fs_ids(0, 0);
        made
    })?;
    phases.run("masks", || masks(&proc, &memory))?;
    phases.run("names", || {
        process::set_hostname(&launch.hostname)?;
        process::leave_session_keyring();
        Ok(())
    })
}

/// The container's root: the read-only layers, each over the one before it, and its writable layer above all. Made with
/// the file-system ids of the container's root, so that what overlayfs itself creates in the writable layer belongs to it
/// (else it answers EOVERFLOW and silently becomes read-only). `volatile`: never synced; a container does not
/// outlive a crash of its host, and without it the end of one would sync the whole file system. The layers are named by
/// paths, which every kernel since 6.7 takes (descriptors need 6.13, and detached layers 6.15).
fn overlay(layers: &[OwnedFd], writable: BorrowedFd<'_>, base: u32) -> io::Result<OwnedFd> {
    let places: Vec<String> = (0..layers.len()).map(place::layer).collect();
    layers.iter().zip(&places).try_for_each(|(layer, place)| attach(layer.as_fd(), CWD, place))?;
    attach(writable, CWD, place::WRITABLE)?;
    process::keep_caps_over_id_changes()?;
    process::set_fs_ids(base, base);
    let (upper, work) = (format!("{}/upper", place::WRITABLE), format!("{}/work", place::WRITABLE));
    let mut settings = vec![
        FsSetting::Text("source", "overlay"),
        FsSetting::Text("upperdir", &upper),
        FsSetting::Text("workdir", &work),
        FsSetting::Text("redirect_dir", "on"),
        FsSetting::Flag("volatile"),
    ];
    // Overlayfs takes them from the topmost down.
    settings.extend(places.iter().rev().map(|place| FsSetting::Text("lowerdir+", place)));
    let mounted = new_mount("overlay", &settings, Attr::NODEV);
    process::set_fs_ids(0, 0);
    mounted
}

/// Opens a path of the container as the container would see it: links never lead out of its root.
fn inside(root: &OwnedFd, path: &str) -> rustix::io::Result<OwnedFd> {
    openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::IN_ROOT)
}

/// The directory `name` of the root, made when the image has none. A link is refused and not followed: what is mounted on
/// must be what everyone inside finds under that name.
fn directory(root: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = match openat(root, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            mkdirat(root, name, Mode::from_raw_mode(0o755))?;
            openat(root, name, flags, Mode::empty())?
        }
        other => other?,
    };
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        FileType::Directory => Ok(found),
        kind => {
            let what = if kind == FileType::Symlink { "a symbolic link" } else { "no directory" };
            Err(io::Error::other(format!(
                "/{name} of the image is {what}; make it a directory, or leave it out"
            )))
        }
    }
}

/// Mounts what every container has. Returns its `/proc`.
fn mounts(root: &OwnedFd, memory: &Memory, base: u32) -> io::Result<OwnedFd> {
    let proc = new_mount("proc", &[FsSetting::Text("hidepid", "ptraceable")], Attr::DATA_ONLY)?;
    attach(proc.as_fd(), directory(root, "proc")?.as_fd(), "")?;

    let dev = &memory.dev;
    attach(dev.as_fd(), directory(root, "dev")?.as_fd(), "")?;
    // Group 5 is `tty` in every distribution.
    let tty = (base + 5).to_string();
    let terminals = [
        FsSetting::Text("gid", &tty),
        FsSetting::Text("mode", "0620"),
        FsSetting::Text("ptmxmode", "0666"),
        FsSetting::Text("max", TERMINALS_MAX),
    ];
    let pts = new_mount("devpts", &terminals, Attr::NONE)?;
    attach(pts.as_fd(), dev.as_fd(), "pts")?;

    let memory = memory.root.as_fd();
    attach(clone_mount(memory, "shm", false)?.as_fd(), dev.as_fd(), "shm")?;
    attach(clone_mount(memory, "tmp", false)?.as_fd(), directory(root, "tmp")?.as_fd(), "")?;
    Ok(proc)
}

/// `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`: the container's own, over whatever the image has, and not
/// part of the writable layer. An image whose `/etc` is a file or a link to nowhere goes without.
fn name_files(root: &OwnedFd, memory: &OwnedFd, hostname: &str, base: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let etc = openat2(root, "etc", flags, Mode::empty(), ResolveFlags::IN_ROOT);
    let Ok(etc) = etc.or_else(|_| directory(root, "etc")) else { return Ok(()) };
    let hosts =
        format!("127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost ip6-loopback {hostname}\n");
    let files = [
        ("hosts", hosts),
        ("hostname", format!("{hostname}\n")),
        ("resolv.conf", "# This sandbox has no network but loopback.\n".to_owned()),
    ];
    for (name, text) in files {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = openat(memory, name, flags, Mode::from_raw_mode(0o644))?;
        rustix::io::write(&file, text.as_bytes())?;
        chownat(memory, name, Some(Uid::from_raw(base)), Some(Gid::from_raw(base)), AtFlags::empty())?;
        let place = match inside(root, &format!("etc/{name}")) {
            Err(Errno::NOENT) => {
                // Missing, or a link to nowhere; the latter stays as it is.
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                if openat(&etc, name, flags, Mode::from_raw_mode(0o644)).is_err() {
                    continue;
                }
                inside(root, &format!("etc/{name}"))?
            }
            other => other?,
        };
        if FileType::from_raw_mode(fstat(&place)?.st_mode) == FileType::RegularFile {
            attach(clone_mount(memory.as_fd(), name, false)?.as_fd(), place.as_fd(), "")?;
        }
    }
    Ok(())
}

/// Covers names of `/proc`, found through its own descriptor: whatever the image made of the path does not matter.
fn masks(proc: &OwnedFd, memory: &Memory) -> io::Result<()> {
    let (files, dirs) =
        (MASKED_FILES.iter().map(|name| (name, true)), MASKED_DIRS.iter().map(|name| (name, false)));
    for (name, is_file) in files.chain(dirs) {
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let place = match openat2(proc, *name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), within) {
            // This kernel was built without it.
            Err(Errno::NOENT) => continue,
            other => other?,
        };
        let cover = if is_file {
            clone_mount(memory.dev.as_fd(), "null", false)?
        } else {
            clone_mount(memory.empty.as_fd(), "", false)?
        };
        attach(cover.as_fd(), place.as_fd(), "")?;
    }
    Ok(())
}

/// Gives everything up: descriptors but the agent's, ids, capabilities. Returns the channel, which an exec closes.
fn become_agent(phases: &mut Phases, fds: &LaunchFds, ready: &Ready) -> Result<OwnedFd, Failure> {
    phases.run("agent", || {
        let wanted = [fds.listen.as_fd(), ready.users.inner.as_fd(), fds.spool.as_fd(), fds.config.as_fd()];
        let wanted = wanted.into_iter().chain(fds.task_files.iter().map(AsFd::as_fd));
        // Above every target number and every number that something else may have.
        let clear: Vec<OwnedFd> = wanted.map(|fd| process::dup_above(fd, 512)).collect::<io::Result<_>>()?;
        let channel = process::dup_above(fds.channel.as_fd(), 512)?;
        let outer = process::dup_above(ready.users.outer.as_fd(), 512)?;
        let null = openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        process::close_on_exec_from(3)?;
        let borrowed: Vec<_> = clear.iter().map(AsFd::as_fd).collect();
        process::place_descriptors(boot_fd::LISTEN, &borrowed)?;
        process::enter(outer.as_fd())?;
        process::become_user(0, 0)?;
        process::drop_all_capabilities()?;
        rustix::process::setsid()?;
        process::reset_signals();
        // Owned by the process until the exec closes them.
        std::mem::forget((clear, outer, null));
        Ok(channel)
    })
}
