//! The holder: keeps the device, the mount and the control socket, and a worker that serves them.
//!
//! ```text
//! holder ── /dev/fuse and its clones, the mount, the bound socket
//!   └─ worker ── the same descriptors; killed, crashed or replaced, the next one takes over
//! ```
//!
//! It does nothing else, so that there is nothing in it to go wrong or to be upgraded: it reads no request but the first
//! (`FUSE_INIT`), and nothing from the socket. It keeps one capability, `CAP_SYS_ADMIN`, for unmounting; the worker none.
//! The worker dies with it, and readers then fail instead of waiting for ever.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dsec_sys::{fuse, mount};
use rustix::fs::{AtFlags, CWD, FlockOperation, StatxFlags, flock, statx};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::thread::{CapabilitySet, CapabilitySets};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::fuse::negotiate;

/// Pause before a worker is started again whose predecessor did not come to serve; it doubles up to the second.
/// After one that served, the next is started at once: readers wait for it.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Readahead of the device, as large as its largest answer.
const READ_AHEAD_KIB: u32 = 1024;
/// `f_type` of statfs(2) on FUSE.
const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;

/// What a holder holds.
#[derive(Debug)]
struct Held {
    devices: Vec<OwnedFd>,
    control: UnixListener,
    mount: PathBuf,
    socket: PathBuf,
    /// One holder for a socket.
    _lock: File,
}

/// Mounts, holds, and keeps a worker of `program` going until SIGTERM or SIGINT. SIGHUP replaces the worker. `ready` is
/// called when the device can be opened and the socket connected to.
///
/// # Errors
/// It cannot be set up, or not be taken down.
pub fn run(
    config: &Config,
    file: &Path,
    program: &Path,
    ready: impl FnOnce() -> io::Result<()>,
) -> anyhow::Result<()> {
    let held = Held::set_up(config)?;
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the async runtime cannot be started")
        .and_then(|runtime| {
            keep_only_unmounting()?;
            runtime.block_on(async {
                let mut signals = Signals::new()?;
                ready().context("the one who waits cannot be told")?;
                held.keep_going(file, program, &mut signals).await
            })
        });
    // Without a worker whatever was busy stays so; with it gone and the descriptors closed below, readers fail.
    held.take_down().and(result)
}

impl Held {
    fn set_up(config: &Config) -> anyhow::Result<Self> {
        let lock_path = config.socket.with_extension("lock");
        let lock =
            File::create(&lock_path).with_context(|| format!("{} cannot be made", lock_path.display()))?;
        if let Err(Errno::WOULDBLOCK) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            bail!("another holder serves {}; end it first", config.socket.display());
        }
        std::fs::create_dir_all(&config.mount)
            .or_else(|error| if is_mount_point_in_the_way(&error) { Ok(()) } else { Err(error) })
            .with_context(|| format!("{} cannot be made", config.mount.display()))?;
        clear_mount_point(&config.mount)?;
        match std::fs::remove_file(&config.socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("{} is in the way", config.socket.display()));
            }
            _ => {}
        }
        let control = UnixListener::bind(&config.socket)
            .with_context(|| format!("{} cannot be bound", config.socket.display()))?;
        std::fs::set_permissions(&config.socket, std::fs::Permissions::from_mode(0o600))
            .with_context(|| format!("{} cannot be closed to others", config.socket.display()))?;

        let device = fuse::open_device().context("/dev/fuse cannot be opened")?;
        let detached = fuse::mount(&device, "dsec-fill").context("the device cannot be mounted")?;
        negotiate(&device)?;
        let mut devices = vec![device];
        while devices.len() < config.devices {
            devices.push(fuse::clone_device(&devices[0]).context("the FUSE session cannot be cloned")?);
        }
        let at = config.mount.to_str().context("the mount point's path is not UTF-8")?;
        mount::attach(detached.as_fd(), CWD, at)
            .with_context(|| format!("nothing can be mounted at {at}"))?;
        set_read_ahead(&config.mount);
        let held = Self {
            devices,
            control,
            mount: config.mount.clone(),
            socket: config.socket.clone(),
            _lock: lock,
        };
        for fd in held.devices.iter().map(OwnedFd::as_fd).chain([held.control.as_fd()]) {
            // Nothing but workers is started here, and every one of them gets all of these.
            fcntl_setfd(fd, FdFlags::empty()).context("a descriptor cannot be handed on")?;
        }
        Ok(held)
    }

    async fn keep_going(&self, file: &Path, program: &Path, signals: &mut Signals) -> anyhow::Result<()> {
        let mut pause = PAUSE_MIN;
        loop {
            let served = match self.start(file, program) {
                Ok((worker, ready)) => match attend(worker, signals).await? {
                    Attended::Ended(status) => {
                        let mut served = [0];
                        let served = matches!(rustix::io::read(&ready, &mut served), Ok(1));
                        tracing::info!(ended = %shown(status), served, "the worker ended; starting another");
                        served
                    }
                    Attended::ToEnd(worker) => {
                        self.unmount_while_served();
                        return stop(worker).await;
                    }
                },
                // The program may be in the midst of its replacement, the host short of memory or processes for a while.
                Err(error) => {
                    tracing::error!(error = format!("{error:#}"), "no worker can be started");
                    false
                }
            };
            if served {
                pause = PAUSE_MIN;
                continue;
            }
            tracing::error!(?pause, "there was no worker that served; pausing");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = signals.replace.recv() => {}
                _ = signals.end.recv() => return Ok(()),
                _ = signals.interrupt.recv() => return Ok(()),
            }
            pause = PAUSE_MAX.min(pause * 2);
        }
    }

    /// A worker, and what it says to when it serves.
    fn start(&self, file: &Path, program: &Path) -> anyhow::Result<(Child, OwnedFd)> {
        let (ready, told) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("a pipe")?;
        fcntl_setfd(&told, FdFlags::empty()).context("a descriptor cannot be handed on")?;
        let devices: Vec<String> = self.devices.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        let worker = Command::new(program)
            .arg("work")
            .arg("--config")
            .arg(file)
            .args(["--devices", &devices.join(",")])
            .args(["--control", &self.control.as_raw_fd().to_string()])
            .args(["--ready", &told.as_raw_fd().to_string()])
            .args(["--holder", &std::process::id().to_string()])
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        Ok((worker, ready))
    }

    /// While there is a worker, unmounting cannot wait for one.
    fn unmount_while_served(&self) {
        if let Err(error) = unmount(&self.mount, false) {
            tracing::warn!(%error, "the device is still used; its users fail from now on");
        }
    }

    fn take_down(&self) -> anyhow::Result<()> {
        match unmount(&self.mount, true) {
            Err(e) if e.raw_os_error() != Some(Errno::INVAL.raw_os_error()) => {
                return Err(e).with_context(|| format!("{} cannot be unmounted", self.mount.display()));
            }
            _ => {}
        }
        std::fs::remove_file(&self.socket)
            .with_context(|| format!("{} cannot be removed", self.socket.display()))
    }
}

/// Why a worker is not attended to any more.
enum Attended {
    Ended(ExitStatus),
    /// The holder is to end.
    ToEnd(Child),
}

async fn attend(mut worker: Child, signals: &mut Signals) -> anyhow::Result<Attended> {
    loop {
        tokio::select! {
            status = worker.wait() => return Ok(Attended::Ended(status.context("a worker cannot be waited for")?)),
            _ = signals.end.recv() => return Ok(Attended::ToEnd(worker)),
            _ = signals.interrupt.recv() => return Ok(Attended::ToEnd(worker)),
            _ = signals.replace.recv() => worker.start_kill().context("a worker cannot be ended")?,
        }
    }
}

struct Signals {
    end: Signal,
    interrupt: Signal,
    replace: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("signals cannot be handled");
        Ok(Self {
            end: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
            replace: on(SignalKind::hangup())?,
        })
    }
}

async fn stop(mut worker: Child) -> anyhow::Result<()> {
    worker.kill().await.context("the worker cannot be ended")
}

fn shown(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".to_owned(),
    }
}

/// Everything but `CAP_SYS_ADMIN` is given up.
fn keep_only_unmounting() -> anyhow::Result<()> {
    let only = CapabilitySet::SYS_ADMIN;
    let sets = CapabilitySets { effective: only, permitted: only, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).context("capabilities cannot be given up")
}

/// A mount whose holder was killed answers nothing, not even that it is a directory.
fn is_mount_point_in_the_way(error: &io::Error) -> bool {
    [Errno::NOTCONN, Errno::EXIST].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Takes away what a killed holder left, and nothing else.
fn clear_mount_point(path: &Path) -> anyhow::Result<()> {
    loop {
        match rustix::fs::statfs(path) {
            Err(Errno::NOTCONN) => {
                unmount(path, true).with_context(|| format!("{} is a dead mount", path.display()))?
            }
            Err(e) => return Err(e).with_context(|| format!("{} cannot be looked at", path.display())),
            Ok(found) if found.f_type == FUSE_SUPER_MAGIC => {
                bail!("a FUSE file system is mounted at {} already; unmount it first", path.display());
            }
            Ok(_) => return Ok(()),
        }
    }
}

fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    mount::unmount(&CString::new(path.as_os_str().as_bytes())?, lazy)
}

/// Larger reads are fewer requests. Without it everything works.
fn set_read_ahead(path: &Path) {
    // Nobody serves yet: only what the kernel knows by itself may be asked for.
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    let set = found.map_err(io::Error::from).and_then(|found| {
        let (major, minor) = (found.stx_dev_major, found.stx_dev_minor);
        std::fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READ_AHEAD_KIB.to_string())
    });
    if let Err(error) = set {
        tracing::warn!(%error, "the device's readahead stays as the kernel has it");
    }
}
