//! The edge's side of one launch: what it prepares, how it follows the child's progress, and how it takes back
//! what a failed one made.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_model::{CpuClass, Limits};
use dsec_proto::guest::{Boot, GENERATION};
use dsec_sys::cgroup::{CpuLimits, GroupLimits};
use dsec_sys::{fdpass, memfd, process, seccomp};
use prost::Message;

use super::shared::Shared;
use super::wire::{FromLaunch, MESSAGE_MAX};
use super::{ContainerSpec, failed};
use crate::chain::ErrorChain;
use crate::{BackendError, Phase};

/// How long the launcher and the child may take to answer before a launch is given up.
const LAUNCH_LIMIT: Duration = Duration::from_secs(30);

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

/// Times the phases of a launch.
pub(super) struct Clock {
    since: Instant,
    pub(super) phases: Vec<Phase>,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { since: Instant::now(), phases: Vec::new() }
    }

    pub(super) fn lap(&mut self, name: &str) {
        let now = Instant::now();
        self.phases.push(Phase { name: name.to_owned(), took: now - self.since });
        self.since = now;
    }
}

pub(super) struct Forked {
    pub(super) pid: i32,
    pub(super) id_base: u32,
}

/// Reads a launch's channel to its end, which is the agent's exec.
pub(super) fn follow(
    channel: &OwnedFd,
    undo: &mut Undo<'_>,
    clock: &mut Clock,
) -> Result<Forked, BackendError> {
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
pub(super) struct Undo<'a> {
    shared: &'a Shared,
    name: &'a str,
    child: Option<OwnedFd>,
    id_base: Option<u32>,
    armed: bool,
}

impl<'a> Undo<'a> {
    pub(super) fn of(shared: &'a Shared, name: &'a str) -> Self {
        Self { shared, name, child: None, id_base: None, armed: true }
    }

    /// The launch came to its end: hands the child's handle over.
    pub(super) fn disarm(mut self) -> Option<OwnedFd> {
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

pub(super) fn group_limits(limits: &Limits) -> GroupLimits {
    GroupLimits { memory_bytes: limits.memory_mib << 20, cpu: cpu_limits(limits), pids: limits.pids }
}

pub(super) fn cpu_limits(limits: &Limits) -> CpuLimits {
    CpuLimits {
        millis: limits.cpu_millis,
        burst_ms: limits.cpu_burst_ms,
        weight: limits.cpu_weight,
        idle: limits.cpu_class == CpuClass::BestEffort,
    }
}

pub(super) fn boot_config(spec: &ContainerSpec, tasks_fds: usize) -> Result<OwnedFd, BackendError> {
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
