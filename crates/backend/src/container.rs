//! Sandboxes on the host's kernel.
//!
//! A launch is shared between three processes so that none waits for another longer than it must:
//!
//! ```text
//! edge, a blocking thread     cgroups, writable layer, socket, spool   ──►  one message with descriptors
//! launcher (one thread)       namespaces from its pool, clone3         ──►  pid, pidfd
//! the child itself            mounts, masks, ids, no capabilities, exec ──► phases, or what failed
//! ```

mod ground;
mod instance;
mod launch;
mod launcher;
mod layers;
mod memory;
mod oom;
mod probe;
mod setup;
mod shared;
mod still;
mod storage;
mod wire;

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsec_model::Limits;
use dsec_sys::cgroup::Tree;
use dsec_sys::idmap::IdRange;
use dsec_sys::process::{self, Child, SingleThread};
use dsec_sys::{fdpass, memfd, procfs};
use serde::{Deserialize, Serialize};

use crate::chain::ErrorChain;
use crate::shelf::Shelf;
use crate::{Anchor, BackendError, Instance, NodePaths, Phase};
use instance::{Container, FileCount, Runs};
use launch::{Clock, Undo, boot_config, follow, group_limits};
use layers::LayerMounts;
use oom::OomLog;
pub use probe::Probe;
use shared::{Shared, private_dir};
use storage::Storage;
use wire::{Launch, ToLauncher};

/// Share of a sandbox's memory that `/tmp` and `/dev/shm` may take together.
const TMPFS_SHARE: u64 = 2;

/// Most read-only layers of one container: what one message to the launcher can carry, with room to spare.
pub const LAYERS_MAX: usize = 128;
const _: () = assert!(LAYERS_MAX + wire::FIXED_FDS + 16 <= fdpass::FDS_MAX);

/// A read-only layer as it lies on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its EROFS image. Layers have file names of their own, made of their digests.
    pub image: PathBuf,
    /// Files with the content that the image points into; empty when it has its content itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PathBuf>,
}

/// What one container is to be.
#[derive(Debug, Clone)]
pub struct ContainerSpec {
    /// Random part of the sandbox's id: names its directories and cgroups.
    pub name: String,
    /// What its root is made of, the lowest first; 1 to [`LAYERS_MAX`].
    pub layers: Vec<Layer>,
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
    layers: LayerMounts,
    boot_id: String,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
    let what = what.into();
    move |source| BackendError { what, source }
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
        let spools =
            Shelf::open(state.join("run/spools")).map_err(failed("make room for spool directories"))?;
        let layers = LayerMounts::open(&state)?;
        let boot_id = procfs::boot_id().map_err(failed("read the boot id"))?;
        let (child, socket) =
            launcher::start(proof, program, &scratch).map_err(failed("start the launcher"))?;
        // What outlives this process comes last, and goes again when the step after it fails. (The launcher ends when
        // its socket does.)
        let tree = Tree::set_up(&tag_of(&state)).map_err(failed("set up cgroups"))?;
        let storage = Storage::open(&state).inspect_err(|_| {
            // Fails where containers of an earlier edge live: theirs stay.
            let _containers_live = tree.remove();
        })?;
        let shared = Shared {
            state,
            tree,
            storage,
            oom: OomLog::open(),
            sockets,
            spools,
            launcher: Mutex::new(socket),
        };
        Ok(Self { shared: Arc::new(shared), launcher: child, layers, boot_id })
    }

    /// Starts a container and returns when its agent has been executed. On an error nothing of it is left.
    ///
    /// # Errors
    /// The phase that failed and why.
    pub fn launch(&self, spec: &ContainerSpec) -> Result<(Arc<dyn Instance>, Vec<Phase>), BackendError> {
        let mut clock = Clock::start();
        let undo = Undo::of(&self.shared, &spec.name);
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
        let writable = shared.storage.create(&spec.name, spec.limits.disk_mib << 20)?;
        clock.lap("writable layer");
        let layers = self.layers.clones_of(&spec.layers)?;
        clock.lap("layers");
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
            layers: layers.len(),
            cgroup: agent_dir.is_some(),
            task_files: task_files.len(),
        });
        let fixed = [&theirs, &writable.mount, &spool_mount, &listen, &config];
        let fds = fixed.into_iter().chain(&layers).chain(&agent_dir).chain(&task_files);
        let fds: Vec<_> = fds.map(AsFd::as_fd).collect();
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
            subvolume: writable.subvolume,
            limits: spec.limits.clone(),
            shared: shared.clone(),
            spool,
            runs: Mutex::default(),
            files: FileCount::default(),
            gone: false.into(),
            snapshots: 0.into(),
            still: Mutex::default(),
            swapped: Mutex::default(),
        };
        Ok((container, std::mem::take(&mut clock.phases)))
    }

    /// Takes over a container that an earlier edge launched, and leaves it standing still if it `is_paused`. `Ok(None)`: it is gone
    /// (its leftovers are removed).
    ///
    /// # Errors
    /// It is there and cannot be taken over.
    pub fn adopt(
        &self,
        spec: &ContainerSpec,
        anchor: &Anchor,
        is_paused: bool,
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
        let container = Container {
            name: spec.name.clone(),
            anchor: anchor.clone(),
            range,
            pidfd,
            runs: Mutex::new(Runs::adopted(&group)),
            group,
            subvolume,
            limits: spec.limits.clone(),
            shared: shared.clone(),
            spool: shared.spool_dir(&spec.name),
            files: FileCount::default(),
            gone: false.into(),
            snapshots: 0.into(),
            still: Mutex::default(),
            swapped: Mutex::default(),
        };
        if is_paused {
            container.stay_paused();
        } else {
            // The edge before may have ended while it held this one still.
            container.thaw();
        }
        Ok(Some(Arc::new(container)))
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

    /// Takes the node's own things down: launcher, mounts of layers and of the writable file system,
    /// cgroup parents. No container may be left.
    ///
    /// # Errors
    /// What could not be removed.
    pub fn shut_down(self) -> Result<(), BackendError> {
        let Self { shared, launcher, layers, .. } = self;
        layers.close()?;
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
        shared.spools.remove().map_err(failed("remove spool directories"))?;
        for dir in ["run/agents", "run/launcher", "spool"] {
            let path = shared.state.join(dir);
            fs::remove_dir(&path).map_err(failed(format!("remove {}", path.display())))?;
        }
        Ok(())
    }

    /// Whether a layer is mounted, once for all containers that have it in their roots.
    pub fn has_layer(&self, image: &Path) -> bool {
        self.layers.has(image)
    }

    /// Mount of a layer is dropped when nothing uses it, so that its files can be removed.
    pub fn forget_layer(&self, image: &Path) {
        self.layers.forget(image);
    }

    /// Bytes of disk for writable layers: all, free.
    pub fn disk(&self) -> (u64, u64) {
        self.shared.storage.size()
    }

    /// Tries every kernel feature and tool this backend uses or would use, on the spot.
    pub fn probe() -> Vec<Probe> {
        probe::all()
    }
}
