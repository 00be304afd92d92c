//! Sandboxes: the create request and the record.

use std::collections::BTreeMap;

use dsec_model::iam::ProjectPath;
use dsec_model::{CpuClass, EndReason, Limits, SandboxId, State, TaskId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ExecRequest;

/// The container backend's word.
pub const BACKEND_CONTAINER: &str = "container";

fn container() -> String {
    BACKEND_CONTAINER.to_owned()
}

/// Asks for one sandbox. Every limit that is left out gets the node's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandboxRequest {
    /// `container` for now.
    #[serde(default = "container")]
    #[schema(example = "container")]
    pub backend: String,
    /// Name of an imported image.
    #[schema(example = "debian")]
    pub container_image: String,
    /// Layer over the image: a workspace, or the snapshot of a sandbox, as `name`, `name:tag` or `name@version`; or `step/KEY`, what a
    /// step of a recipe came to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "click")]
    pub workspace: Option<String>,
    /// Toolkits over both, each over the one before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub toolkits: Vec<String>,
    /// Memory, MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mb: Option<u64>,
    /// Cores; fractions are allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_cores_limit: Option<f64>,
    /// CPU time, ms, that it saves up while it uses less than its cores and may use later: at most what they give in 100 ms. Default: as
    /// much, up to 200.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_burst_ms: Option<u64>,
    /// Share of CPU among those of its class under contention, 1 to 10,000 (100 is the usual one).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<u64>,
    /// `latency_sensitive`: it gets its share of a busy node at once; `best_effort`: it gets what the others leave. Default: the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "best_effort")]
    pub cpu_class: Option<CpuClass>,
    /// Processes and threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids_limit: Option<u64>,
    /// Open files a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files_limit: Option<u64>,
    /// Writable layer, MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_limit_mb: Option<u64>,
    /// Files and directories in the writable layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_files_limit: Option<u64>,
    /// Seconds without a request or an attached session until it is stopped. 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_running_stop: Option<u64>,
    /// Pauses it when `ttl_running_stop` is over, instead of stopping it. Any request resumes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Seconds paused until it is stopped. 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_paused_stop: Option<u64>,
    /// Seconds from running until it is stopped, whatever it does. Time paused does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lifetime: Option<u64>,
    /// User of its commands, by name or `uid[:gid]`, from the image's own passwd. Default: the image's user, else root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_user: Option<String>,
    /// Environment of every command, over the image's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory of every command. Default: the image's, else `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Host name inside. Default: the sandbox's random part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Services that may be reached, by name. Empty: no network but loopback. This version serves no other value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub network_rules: BTreeMap<String, bool>,
    /// Lets setuid programs such as `sudo` work; off, `no_new_privs` is set.
    #[serde(default)]
    pub allow_setuid: bool,
    /// The job it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub task_id: Option<TaskId>,
    /// Free labels to filter by: at most 64, keys up to 63 and values up to 255 bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The pool of nodes that it is to run in. Left out: any but the one that takes over when the others are full, and that one too
    /// when they are and it has all of the layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "cloud")]
    pub pool: Option<String>,
    /// Architecture of its node's processors, `x86_64` or `aarch64`. Left out: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "x86_64")]
    pub architecture: Option<String>,
    /// Labels that its node must have, as its operator gave them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_labels: BTreeMap<String, String>,
    /// Kernel features that must work on its node, by the names that `GET /v1/nodes` has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_features: Vec<String>,
    /// A command to run as soon as the sandbox runs; its result is in the reply's `first_exec`, which saves a round trip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecRequest>,
}

/// Other limits for a sandbox that runs. What is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateSandboxRequest {
    /// Share of CPU among those of its class under contention, 1 to 10,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<u64>,
    /// `latency_sensitive` or `best_effort`. It counts for what runs already too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "best_effort")]
    pub cpu_class: Option<CpuClass>,
}

/// One read-only layer of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLayer {
    /// `base`, `workspace`, `toolkit` or `snapshot`.
    pub kind: String,
    /// As it was asked for.
    pub name: String,
    /// The layer's id, which does not change when the name moves.
    pub id: String,
    /// Its content on the node, which all sandboxes there share. Given when `content=true` is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<super::LayerContent>,
}

/// The limits in force, as the record shows them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLimits {
    /// Memory, MiB.
    pub memory_limit_mb: u64,
    /// Cores.
    pub cpu_cores_limit: f64,
    /// CPU time that it may save up, ms.
    #[serde(default)]
    pub cpu_burst_ms: u64,
    /// Share of CPU among those of its class under contention.
    pub cpu_weight: u64,
    /// `latency_sensitive` or `best_effort`.
    #[serde(default)]
    #[schema(value_type = String, example = "latency_sensitive")]
    pub cpu_class: CpuClass,
    /// Processes and threads.
    pub pids_limit: u64,
    /// Open files a process.
    pub open_files_limit: u64,
    /// Writable layer, MiB.
    pub disk_limit_mb: u64,
    /// Files and directories in the writable layer.
    pub disk_files_limit: u64,
    /// Idle seconds until it is stopped. 0: never.
    pub ttl_running_stop: u64,
    /// It is paused then, instead of being stopped.
    #[serde(default)]
    pub auto_pause: bool,
    /// Seconds paused until it is stopped. 0: never.
    #[serde(default)]
    pub ttl_paused_stop: u64,
    /// Seconds from running until it is stopped, those paused not counted.
    pub max_lifetime: u64,
}

impl From<&Limits> for SandboxLimits {
    fn from(l: &Limits) -> Self {
        Self {
            memory_limit_mb: l.memory_mib,
            cpu_cores_limit: l.cpu_millis as f64 / 1000.0,
            cpu_burst_ms: l.cpu_burst_ms,
            cpu_weight: l.cpu_weight,
            cpu_class: l.cpu_class,
            pids_limit: l.pids,
            open_files_limit: l.nofile,
            disk_limit_mb: l.disk_mib,
            disk_files_limit: l.disk_files,
            ttl_running_stop: l.ttl_running_stop_s,
            auto_pause: l.auto_pause,
            ttl_paused_stop: l.ttl_paused_stop_s,
            max_lifetime: l.max_lifetime_s,
        }
    }
}

/// What a sandbox uses. Read when it is asked for; of an ended sandbox, as last seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// CPU time of all its processes so far, seconds.
    pub cpu_seconds: f64,
    /// Memory now, bytes.
    pub memory_bytes: u64,
    /// Most memory at once so far, bytes.
    pub memory_peak_bytes: u64,
    /// Writable layer now, bytes.
    pub disk_bytes: u64,
    /// Processes and threads now.
    pub pids: u64,
    /// Bytes that callers sent into it (files, stdin, ports).
    pub bytes_in: u64,
    /// Bytes that callers read from it (files, output, ports).
    pub bytes_out: u64,
    /// Processes the kernel killed because its memory was full.
    pub oom_kills: u64,
}

/// The pauses of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Pauses {
    /// How often it was paused.
    pub count: u64,
    /// Of one that is paused: since when, Unix ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// How long it was paused in all, the pause that it is in not counted, ms.
    pub total_ms: u64,
    /// Memory that it had when it was last paused, bytes.
    pub resident_bytes: u64,
    /// Of that, what its node had back when the pause was done.
    pub returned_bytes: u64,
}

/// One phase of a launch and how long it took: the phases in order add up to the launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LaunchPhase {
    /// Name of the phase.
    pub name: String,
    /// Microseconds.
    pub us: u64,
}

/// Of a sandbox whose node is lost: what was last heard. Whether it still runs nobody knows; a node that was cut off says so when it
/// is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lost {
    /// Its state of then.
    #[schema(value_type = String, example = "running")]
    pub last_state: State,
    /// When its node was last heard of, Unix ms.
    pub heard_ms: u64,
}

/// The record of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// `sb-<node>-<random>`.
    #[schema(value_type = String, example = "sb-n1-4k2j9xq0w1ab")]
    pub id: SandboxId,
    /// Where it is in its life.
    #[schema(value_type = String, example = "running")]
    pub state: State,
    /// Why it ended or is ending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub reason: Option<EndReason>,
    /// Of one in the state `lost`. Its record then has no layers, launch phases and usage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<Lost>,
    /// `container`.
    pub backend: String,
    /// The image's name as it was asked for.
    pub image: String,
    /// Id of the image's layer, which does not change when the name moves.
    pub image_digest: String,
    /// All its read-only layers, the lowest first: the image's, then the workspace and the toolkits.
    #[serde(default)]
    pub layers: Vec<SandboxLayer>,
    /// The node that runs it.
    pub node: String,
    /// The project it belongs to.
    #[serde(default = "ProjectPath::root")]
    #[schema(value_type = String, example = "root/rl")]
    pub project: ProjectPath,
    /// The limits in force.
    pub limits: SandboxLimits,
    /// The user of its commands, as given.
    pub init_user: String,
    /// The job it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub task_id: Option<TaskId>,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// When the create arrived, Unix ms.
    pub created_ms: u64,
    /// When it began to run, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_ms: Option<u64>,
    /// When it ended, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Last request or end of an attached session, Unix ms.
    pub last_active_ms: u64,
    /// Its pauses; missing of one that was never paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pauses: Option<Pauses>,
    /// What it uses. Lists leave it out unless `usage=true` is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// How long each phase of its launch took.
    #[serde(default)]
    pub launch_phases: Vec<LaunchPhase>,
    /// Result of the create request's `exec`, in the reply to the create alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_exec: Option<super::Exec>,
}

/// A page of sandboxes, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxList {
    /// The page.
    pub sandboxes: Vec<Sandbox>,
    /// Give it as `cursor` to get the next page; missing on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Ends a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StopRequest {
    /// Milliseconds that its processes get between SIGTERM and SIGKILL. Default 0: at once.
    pub grace_ms: u64,
}

/// What control asks every node before it sends a later attempt of a create anywhere: `POST /internal/keys/fence`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceRequest {
    /// The idempotency key.
    pub key: String,
    /// Which attempt is about to be sent.
    pub attempt: u32,
}

/// What the node answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fenced {
    /// It has the sandbox of the key, or makes it now. If not, it will take no attempt before the one it was told of.
    pub known: bool,
}

/// Asks for many sandboxes that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateManyRequest {
    /// How many, 1 to 100,000.
    #[schema(minimum = 1, maximum = 100_000)]
    pub count: u32,
    /// How many are being made at once, 1 to 1,024. Default: 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1024)]
    pub at_once: Option<u32>,
    /// Indices that are not wanted, as ranges with both ends: what a caller has already, who asks again with the same idempotency key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skip: Vec<[u32; 2]>,
    /// What each is like. Of a first command's output at most 64 KiB a stream are in the answer.
    pub sandbox: CreateSandboxRequest,
}

/// One line of the answer to a [`CreateManyRequest`] (`application/x-ndjson`), as each is made or fails; the last is `done`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CreateManyEvent {
    /// One runs.
    Created {
        /// Which, from 0. They come in no order.
        index: u32,
        /// Its record.
        sandbox: Box<Sandbox>,
    },
    /// One could not be made; or it runs and its first command could not be started: then the error's `detail.sandbox_id` names it.
    Failed {
        /// Which.
        index: u32,
        /// Why.
        error: super::ErrorBody,
    },
    /// There are no more.
    Done {
        /// How many run.
        created: u32,
        /// How many failed.
        failed: u32,
        /// How many were not tried, since one was refused for a reason that all have.
        left: u32,
    },
}
