//! Sandboxes on the host's kernel.
//!
//! A launch is shared between three processes so that none waits for another longer than it must:
//!
//! ```text
//! edge, a blocking thread     cgroups, writable layer, socket, spool   ──►  one message with descriptors
//! launcher (one thread)       namespaces from its pool, clone3         ──►  pid, pidfd
//! the child itself            mounts, masks, ids, no capabilities, exec ──► phases, or what failed
//! ```

mod instance;
mod launcher;
mod oom;
mod probe;
mod setup;
mod storage;
mod templates;
mod wire;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_model::Limits;
use dsec_proto::guest::{Boot, GENERATION};
use dsec_sys::cgroup::{GroupLimits, Tree};
use dsec_sys::idmap::IdRange;
use dsec_sys::mount::{Attr, FsSetting, clone_mount, new_mount, restrict};
use dsec_sys::process::{self, Child, SingleThread};
use dsec_sys::{fdpass, memfd, procfs, seccomp};
use prost::Message;

use crate::{Anchor, BackendError, Instance, NodePaths, Phase};
use instance::{Container, FileCount, Runs};
use oom::OomLog;
pub use probe::Probe;
use storage::Storage;
use wire::{FromLaunch, Launch, MESSAGE_MAX, ToLauncher};

/// How long the launcher and the child may take to answer before a launch is given up.
const LAUNCH_LIMIT: Duration = Duration::from_secs(30);
/// Share of a sandbox's memory that `/tmp` and `/dev/shm` may take together.
const TMPFS_SHARE: u64 = 2;

/// Capabilities that root in a container keeps: the default set of container runtimes. Each counts only
/// within the container's own user namespace.
const CAPABILITIES: u64 = {
    const CHOWN: u64 = 1 << 0;
    const DAC_OVERRIDE: u64 = 1 << 1;
    const FOWNER: u64 = 1 << 3;
    const FSETID: u64 = 1 << 4;
    const KILL: u64 = 1 << 5;
    const SETGID: u64 = 1 << 6;
    const SETUID: u64 = 1 << 7;
    const SETPCAP: u64 = 1 << 8;
    const NET_BIND_SERVICE: u64 = 1 << 10;
    const NET_RAW: u64 = 1 << 13;
    const SYS_CHROOT: u64 = 1 << 18;
    const MKNOD: u64 = 1 << 27;
    const AUDIT_WRITE: u64 = 1 << 29;
    const SETFCAP: u64 = 1 << 31;
    CHOWN
        | DAC_OVERRIDE
        | FOWNER
        | FSETID
        | KILL
        | SETGID
        | SETUID
        | SETPCAP
        | NET_BIND_SERVICE
        | NET_RAW
        | SYS_CHROOT
        | MKNOD
        | AUDIT_WRITE
        | SETFCAP
};

/// What one container is to be.
#[derive(Debug, Clone)]
pub struct ContainerSpec {
    /// Random part of the sandbox's id: names its directories and cgroups.
    pub name: String,
    /// EROFS image that is its root.
    pub image: PathBuf,
    /// What it may use.
    pub limits: Limits,
    /// Environment of its commands, `K=V`.
    pub env: Vec<Vec<u8>>,
    /// Working directory of its commands.
    pub cwd: Vec<u8>,
    /// User of its commands.
    pub user: String,
    /// Host name inside.
    pub hostname: String,
    /// Setuid programs work.
    pub allow_setuid: bool,
}

/// The container backend of a node.
#[derive(Debug)]
pub struct ContainerBackend {
    shared: Arc<Shared>,
    launcher: Child,
    images: Mutex<HashMap<PathBuf, OwnedFd>>,
    boot_id: String,
}

/// What every container of the node uses.
#[derive(Debug)]
pub(crate) struct Shared {
    state: PathBuf,
    tree: Tree,
    storage: Storage,
    oom: OomLog,
    /// Directory of the agents' sockets, open: a socket's path must be short, and this makes it so.
    sockets: OwnedFd,
    launcher: Mutex<OwnedFd>,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
    let what = what.into();
    move |source| BackendError { what, source }
}

fn private_dir(path: &Path) -> Result<OwnedFd, BackendError> {
    let make = || {
        fs::create_dir_all(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
        Ok(fs::File::open(path)?.into())
    };
    make().map_err(failed(format!("make {}", path.display())))
}

/// Names this state directory's cgroups apart from those of another edge on the machine: 32 bits of
/// FNV-1a of its path.
fn tag_of(state: &Path) -> String {
    let hash = state
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

impl ContainerBackend {
    /// Forks the launcher and prepares the node (mount of the writable file system, cgroup parents).
    /// Must be called while the process has one thread.
    ///
    /// # Errors
    /// The host lacks something without which no container can run; the text says what.
    pub fn start(paths: &NodePaths) -> Result<Self, BackendError> {
        let state = fs::canonicalize(&paths.state_dir)
            .map_err(failed(format!("find the state directory {}", paths.state_dir.display())))?;
        let proof = SingleThread::check().map_err(failed("fork the launcher"))?;
        let program = fs::read(&paths.aether).map_err(failed(format!("read {}", paths.aether.display())))?;
        let program = memfd::executable("aether", &program).map_err(failed("seal the agent's program"))?;
        let scratch = state.join("run/launcher");
        private_dir(&scratch)?;
        private_dir(&state.join("spool"))?;
        let sockets = private_dir(&state.join("run/agents"))?;
        let (child, socket) =
            launcher::start(proof, program, &scratch).map_err(failed("start the launcher"))?;
        let storage = Storage::open(&state)?;
        let tree = Tree::set_up(&tag_of(&state)).map_err(failed("set up cgroups"))?;
        let boot_id = procfs::boot_id().map_err(failed("read the boot id"))?;
        let shared =
            Shared { state, tree, storage, oom: OomLog::open(), sockets, launcher: Mutex::new(socket) };
        Ok(Self { shared: Arc::new(shared), launcher: child, images: Mutex::default(), boot_id })
    }

    /// Starts a container and returns when its agent has been executed. On an error nothing of it is left.
    ///
    /// # Errors
    /// The phase that failed and why.
    pub fn launch(&self, spec: &ContainerSpec) -> Result<(Arc<dyn Instance>, Vec<Phase>), BackendError> {
        let mut clock = Clock { since: Instant::now(), phases: Vec::new() };
        let undo = Undo { shared: &self.shared, name: &spec.name, child: None, id_base: None, armed: true };
        let (container, phases) = self.build(spec, &mut clock, undo)?;
        Ok((Arc::new(container), phases))
    }

    fn build(
        &self,
        spec: &ContainerSpec,
        clock: &mut Clock,
        mut undo: Undo<'_>,
    ) -> Result<(Container, Vec<Phase>), BackendError> {
        let shared = &self.shared;
        let group = shared.tree.group(&spec.name);
        group
            .create(&group_limits(&spec.limits))
            .map_err(failed(format!("make cgroups for {}", spec.name)))?;
        clock.lap("cgroups");
        let layer = shared.storage.create(&spec.name, spec.limits.disk_mib << 20)?;
        clock.lap("writable layer");
        let image = self.image_mount(&spec.image)?;
        clock.lap("image");
        let (spool, spool_mount) = shared.make_spool(&spec.name)?;
        let listen = shared.listen(&spec.name)?;
        let agent_dir = group.agent_dir().map_err(failed("open the agent's cgroup"))?;
        let task_files = group.task_files().map_err(failed("open cgroup files"))?;
        let config = boot_config(spec, task_files.len())?;
        clock.lap("files");
        let (channel, theirs) = fdpass::pair().map_err(failed("make a channel"))?;
        let message = ToLauncher::Launch(Launch {
            hostname: spec.hostname.clone(),
            tmpfs_bytes: (spec.limits.memory_mib << 20) / TMPFS_SHARE,
            cgroup: agent_dir.is_some(),
            task_files: task_files.len(),
        });
        let fixed = [&theirs, &image, &layer.mount, &spool_mount, &listen, &config];
        let fds: Vec<_> = fixed.into_iter().chain(&agent_dir).chain(&task_files).map(AsFd::as_fd).collect();
        shared.tell_launcher(&message, &fds)?;
        drop(theirs);
        let forked = follow(&channel, &mut undo, clock)?;
        let range = IdRange::from_base(forked.id_base).ok_or_else(|| {
            BackendError::new("read the launcher's answer", io::Error::other("an id range that is none"))
        })?;
        group.delegate(range.keeper()).map_err(failed("delegate the container's cgroup"))?;
        let start_ticks =
            procfs::start_ticks(forked.pid).map_err(failed("find the agent that was launched"))?;
        clock.lap("anchor");
        let pidfd = undo
            .disarm()
            .ok_or_else(|| BackendError::new("launch", io::Error::other("no process handle")))?;
        let container = Container {
            name: spec.name.clone(),
            anchor: Anchor {
                pid: forked.pid,
                start_ticks,
                boot_id: self.boot_id.clone(),
                id_base: forked.id_base,
            },
            range,
            pidfd,
            group,
            subvolume: layer.subvolume,
            limits: spec.limits.clone(),
            shared: shared.clone(),
            spool,
            runs: Mutex::default(),
            files: FileCount::default(),
            gone: false.into(),
        };
        Ok((container, std::mem::take(&mut clock.phases)))
    }

    /// Takes over a container that an earlier edge launched. `Ok(None)`: it is gone (its leftovers
    /// are removed).
    ///
    /// # Errors
    /// It is there and cannot be taken over.
    pub fn adopt(
        &self,
        spec: &ContainerSpec,
        anchor: &Anchor,
    ) -> Result<Option<Arc<dyn Instance>>, BackendError> {
        let shared = &self.shared;
        let range = IdRange::from_base(anchor.id_base).ok_or_else(|| {
            BackendError::new(
                format!("take over {}", spec.name),
                io::Error::other("an id range that is none"),
            )
        })?;
        let alive = anchor.boot_id == self.boot_id
            && procfs::start_ticks(anchor.pid).is_ok_and(|ticks| ticks == anchor.start_ticks);
        let pidfd = if alive { process::open_pidfd(anchor.pid).ok() } else { None };
        let Some(pidfd) = pidfd else {
            shared.end_and_remove(&spec.name)?;
            return Ok(None);
        };
        shared.tell_launcher(&ToLauncher::Reserve(vec![anchor.id_base]), &[])?;
        let group = shared.tree.group(&spec.name);
        let subvolume = shared
            .storage
            .subvolume(&spec.name)
            .map_err(failed(format!("find the writable layer of {}", spec.name)))?;
        Ok(Some(Arc::new(Container {
            name: spec.name.clone(),
            anchor: anchor.clone(),
            range,
            pidfd,
            runs: Mutex::new(Runs::adopted(group.run_numbers())),
            group,
            subvolume,
            limits: spec.limits.clone(),
            shared: shared.clone(),
            spool: shared.spool_dir(&spec.name),
            files: FileCount::default(),
            gone: false.into(),
        })))
    }

    /// Removes whatever carries this node's marks and belongs to no name in `keep`: cgroups, layers,
    /// directories, processes. Returns what it removed, for the log.
    pub fn sweep(&self, keep: &[String]) -> Vec<String> {
        let mut names = self.shared.tree.names();
        names.extend(self.shared.storage.names());
        for dir in ["spool", "run/agents"] {
            let entries = fs::read_dir(self.shared.state.join(dir)).into_iter().flatten().flatten();
            names.extend(entries.filter_map(|e| e.file_name().into_string().ok()));
        }
        names.sort();
        names.dedup();
        names.retain(|name| !keep.contains(name));
        for name in &names {
            if let Err(error) = self.shared.end_and_remove(name) {
                tracing::warn!(name, error = %ErrorChain(&error), "leftovers could not be removed");
            }
        }
        names
    }

    /// Takes the node's own things down: launcher, mounts of images and of the writable file system,
    /// cgroup parents. No container may be left.
    ///
    /// # Errors
    /// What could not be removed.
    pub fn shut_down(self) -> Result<(), BackendError> {
        let Self { shared, launcher, images, .. } = self;
        drop(images);
        let shared = Arc::try_unwrap(shared).map_err(|_| {
            BackendError::new("shut the container backend down", io::Error::other("containers are left"))
        })?;
        // The launcher ends when its socket does.
        drop(shared.launcher);
        if !process::wait_for_end(launcher.pidfd.as_fd(), Duration::from_secs(5)).unwrap_or(false) {
            process::kill(launcher.pidfd.as_fd());
        }
        shared.tree.remove().map_err(failed("remove cgroups"))?;
        shared.storage.close(&shared.state)?;
        for dir in ["run/agents", "run/launcher", "spool"] {
            let path = shared.state.join(dir);
            fs::remove_dir(&path).map_err(failed(format!("remove {}", path.display())))?;
        }
        Ok(())
    }

    /// Mount of an image is dropped when nothing uses it, so that its file can be removed.
    pub fn forget_image(&self, image: &Path) {
        self.images.lock().unwrap_or_else(PoisonError::into_inner).remove(image);
    }

    /// Bytes of disk for writable layers: all, free.
    pub fn disk(&self) -> (u64, u64) {
        self.shared.storage.size()
    }

    /// Tries every kernel feature and tool this backend uses or would use, on the spot.
    pub fn probe() -> Vec<Probe> {
        probe::all()
    }

    /// A clone of the image's mount. The image itself is mounted once for all containers, nowhere in the
    /// tree: the mount is gone when the edge and the last container that uses it are.
    fn image_mount(&self, image: &Path) -> Result<OwnedFd, BackendError> {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        let what = || format!("mount the image {}", image.display());
        if !images.contains_key(image) {
            let source =
                image.to_str().ok_or_else(|| failed(what())(io::Error::other("its path is not UTF-8")))?;
            let mount = new_mount("erofs", &[FsSetting::Text("source", source)], Attr::READ_ONLY);
            images.insert(image.to_owned(), mount.map_err(failed(what()))?);
        }
        let mount = images.get(image).ok_or_else(|| failed(what())(io::ErrorKind::NotFound.into()))?;
        clone_mount(mount.as_fd(), "", false).map_err(failed(what()))
    }
}

impl Shared {
    fn tell_launcher(
        &self,
        message: &ToLauncher,
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), BackendError> {
        let bytes = serde_json::to_vec(message).map_err(|e| BackendError::new("encode a launch", e))?;
        let socket = self.launcher.lock().unwrap_or_else(PoisonError::into_inner);
        fdpass::send(socket.as_fd(), &bytes, fds).map_err(failed("reach the launcher"))
    }

    /// Gives an id range back.
    pub(crate) fn release(&self, id_base: u32) {
        // Without a launcher nobody hands ranges out.
        let _launcher_gone = self.tell_launcher(&ToLauncher::Release(id_base), &[]);
    }

    fn spool_dir(&self, name: &str) -> PathBuf {
        self.state.join("spool").join(name)
    }

    /// The directory for output of execs, and a detached mount of it: whoever holds that can reach nothing above.
    /// The agent writes there under an id that is not known yet, so the directory takes everyone; the one
    /// above it lets only root pass.
    fn make_spool(&self, name: &str) -> Result<(PathBuf, OwnedFd), BackendError> {
        let path = self.spool_dir(name);
        let make = || {
            fs::create_dir(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777))?;
            let dir = fs::OpenOptions::new().read(true).custom_flags(o_directory()).open(&path)?;
            let mount = clone_mount(dir.as_fd(), "", false)?;
            restrict(mount.as_fd(), Attr::DATA_ONLY)?;
            // Opened once more through the mount: an open_tree descriptor takes no `*at` calls that write.
            let inside = rustix::fs::openat(
                &mount,
                ".",
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?;
            Ok(inside)
        };
        let mount = make().map_err(failed(format!("make {}", path.display())))?;
        Ok((path, mount))
    }

    fn listen(&self, name: &str) -> Result<OwnedFd, BackendError> {
        let path = format!("/proc/self/fd/{}/{name}", self.sockets.as_raw_fd());
        UnixListener::bind(path).map(Into::into).map_err(failed(format!("make the agent socket of {name}")))
    }

    /// Removes what a container has on the host, whose processes have ended. Tries all of it before it fails.
    pub(crate) fn remove(&self, name: &str) -> Result<(), BackendError> {
        let not_found_is_fine = |result: io::Result<()>| match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        let results = [
            ("remove the cgroups", self.remove_groups(name)),
            ("remove the writable layer", self.storage.destroy(name)),
            ("remove the spool directory", not_found_is_fine(fs::remove_dir_all(self.spool_dir(name)))),
            (
                "remove the agent socket",
                not_found_is_fine(fs::remove_file(self.state.join("run/agents").join(name))),
            ),
        ];
        results
            .into_iter()
            .find_map(|(what, result)| Some(BackendError::new(format!("{what} of {name}"), result.err()?)))
            .map_or(Ok(()), Err)
    }

    /// A process that has just ended may still count in its cgroup for a moment.
    fn remove_groups(&self, name: &str) -> io::Result<()> {
        const LIMIT: Duration = Duration::from_secs(10);
        let group = self.tree.group(name);
        let started = Instant::now();
        let mut pause = Duration::from_micros(100);
        loop {
            match group.remove() {
                Ok(()) => return Ok(()),
                Err(error) if started.elapsed() > LIMIT => return Err(error),
                Err(_) => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
            }
        }
    }

    fn end_and_remove(&self, name: &str) -> Result<(), BackendError> {
        let group = self.tree.group(name);
        group.kill();
        for number in group.run_numbers() {
            for pid in group.run_pids(number) {
                if let Ok(pidfd) = process::open_pidfd(pid) {
                    process::kill(pidfd.as_fd());
                }
            }
        }
        self.remove(name)
    }
}

fn o_directory() -> i32 {
    rustix::fs::OFlags::DIRECTORY.bits() as i32
}

fn group_limits(limits: &Limits) -> GroupLimits {
    GroupLimits {
        memory_bytes: limits.memory_mib << 20,
        cpu_millis: limits.cpu_millis,
        cpu_weight: limits.cpu_weight,
        pids: limits.pids,
    }
}

fn boot_config(spec: &ContainerSpec, tasks_fds: usize) -> Result<OwnedFd, BackendError> {
    let boot = Boot {
        generation: GENERATION,
        env: spec.env.clone(),
        user: spec.user.clone(),
        cwd: spec.cwd.clone(),
        no_new_privs: !spec.allow_setuid,
        capabilities: CAPABILITIES,
        nofile: spec.limits.nofile,
        seccomp: seccomp::program_bytes(),
        tasks_fds: tasks_fds as u32,
    };
    memfd::data("boot", &boot.encode_to_vec()).map_err(failed("write the agent's configuration"))
}

/// Times the phases of a launch.
struct Clock {
    since: Instant,
    phases: Vec<Phase>,
}

impl Clock {
    fn lap(&mut self, name: &str) {
        let now = Instant::now();
        self.phases.push(Phase { name: name.to_owned(), took: now - self.since });
        self.since = now;
    }
}

struct Forked {
    pid: i32,
    id_base: u32,
}

/// Reads a launch's channel to its end, which is the agent's exec.
fn follow(channel: &OwnedFd, undo: &mut Undo<'_>, clock: &mut Clock) -> Result<Forked, BackendError> {
    let mut buffer = vec![0; MESSAGE_MAX];
    let mut forked = None;
    let mut inside = Vec::new();
    let until = Instant::now() + LAUNCH_LIMIT;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if !process::wait_for_end(channel.as_fd(), left).map_err(failed("wait for the launcher"))? {
            return Err(BackendError::new("wait for the launcher", io::Error::from(io::ErrorKind::TimedOut)));
        }
        let (n, mut fds) =
            fdpass::receive(channel.as_fd(), &mut buffer).map_err(failed("hear the launcher"))?;
        if n == 0 {
            break;
        }
        let message = serde_json::from_slice(&buffer[..n])
            .map_err(|e| BackendError::new("read the launcher's answer", e))?;
        match message {
            FromLaunch::Forked { pid, id_base, us: [at_hand, fork] } => {
                undo.child = fds.pop();
                undo.id_base = Some(id_base);
                forked = Some(Forked { pid, id_base });
                inside.extend([("pool".to_owned(), at_hand), ("fork".to_owned(), fork)]);
            }
            FromLaunch::Phases(phases) => inside.extend(phases),
            FromLaunch::Failed { what, error, errno } => {
                let source = errno.map_or_else(|| io::Error::other(error), io::Error::from_raw_os_error);
                return Err(BackendError::new(what, source));
            }
        }
    }
    let now = Instant::now();
    let inner: Duration = inside.iter().map(|(_, us)| Duration::from_micros(*us)).sum();
    clock.phases.extend(inside.into_iter().map(|(name, us)| Phase { name, took: Duration::from_micros(us) }));
    // Messages, scheduling and the exec itself: what the others did not measure.
    clock.phases.push(Phase { name: "exec".to_owned(), took: (now - clock.since).saturating_sub(inner) });
    clock.since = now;
    let ended = "the container's first process ended before it was an agent";
    forked.ok_or_else(|| BackendError::new("launch", io::Error::other(ended)))
}

/// Takes back what a launch made, unless it came to its end.
struct Undo<'a> {
    shared: &'a Shared,
    name: &'a str,
    child: Option<OwnedFd>,
    id_base: Option<u32>,
    armed: bool,
}

impl Undo<'_> {
    fn disarm(mut self) -> Option<OwnedFd> {
        self.armed = false;
        self.child.take()
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if let Some(child) = &self.child {
            process::kill(child.as_fd());
            let _still_there_is_found_below = process::wait_for_end(child.as_fd(), Duration::from_secs(10));
        }
        if let Err(error) = self.shared.end_and_remove(self.name) {
            tracing::error!(name = self.name, error = %ErrorChain(&error), "a failed launch left something behind");
        } else if let Some(id_base) = self.id_base {
            self.shared.release(id_base);
        }
    }
}

/// An error with its causes, on one line.
struct ErrorChain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(error) = next {
            write!(f, ": {error}")?;
            next = error.source();
        }
        Ok(())
    }
}
