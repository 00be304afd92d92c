//! The public API's JSON types. Times are Unix milliseconds (`_ms`), durations carry their unit in
//! the name, sizes are bytes unless the name says MiB (`_mb` in the names that callers know from
//! DSec means MiB).

mod cluster;
mod counts;
mod errors;
mod exec;
mod files;
mod filter;
mod hop;
mod iam;
mod image;
mod layer;
mod limits;
mod node;
mod pack;
mod pool;
mod records;
mod release;
mod sandbox;
mod session;
mod task;

pub use cluster::{
    AnnounceRequest, Announced, Cluster, EdgeInstance, JoinRequest, Joined, Member, MemberList, RefusedFor,
    TOKEN_TTL_DEFAULT_S, TOKEN_TTL_MAX_S, Token, TokenRequest,
};
pub use counts::{COUNTED_MAX, Counts, NodeCounts, NodeHealth, NodeKnown};
pub use errors::{ApiError, ErrorBody, status_of};
pub use exec::{
    AttachEvent, Exec, ExecList, ExecRequest, ExecState, INLINE_MAX, OomKill, PtySize, SignalRequest,
    StdinMode,
};
pub use files::{FileEvent, FileEventKind, FileInfo, FileKind, FileList, MakeDirRequest, MoveRequest};
pub use filter::{Filtered, Position, SandboxFilter, parse_state};
pub use hop::{
    Arrived, CHARGE, Charge, Charged, ChargesFenced, FenceChargesRequest, KEY_ID, MAY, PROJECT, SEES,
};
pub use iam::{
    AuditEntry, AuditList, ChangeProjectRequest, CreateGrantRequest, CreateIdentityRequest, CreateKeyRequest,
    CreateProjectRequest, Grant, GrantList, Identity, IdentityList, Key, Project, ProjectList,
    UNTOLD_SERVERS, WhoAmI,
};
pub use image::{
    Image, ImageList, ImportEvent, LAYER_BASE, PullRequest, REGISTRY_UNAUTHORIZED, RegistryCredentials,
};
pub use layer::{
    BlobContent, BlobTrace, CollectEvent, Collected, ContentCounts, Finding, GROUP_BYTES, HeldLayer,
    LayerContent, LayerOnNode, LayerTrace, PrefetchEvent, PrefetchRequest, PrefetchWhat, VerifyEvent,
};
pub use limits::{
    CREATE_AT_ONCE_MAX, CREATE_MANY_MAX, GRACE_MAX_MS, IDEMPOTENCY_KEY_MAX, JSON_BODY_MAX, PAGE_DEFAULT,
    PAGE_MAX, REQUEST_ID_MAX, SOCKET_PATH_MAX, WAIT_DEFAULT_MS, WAIT_MAX_MS,
};
pub use node::{
    CordonRequest, DrainRequest, Feature, FeatureState, NodeScheduling, NodeStatus, NodeUsage,
    SchedulingState,
};
pub use pack::{ImageSettings, LAYER_WORKSPACE, LeftOut, PackRequest, Packed, Quiesce};
pub use pool::{
    ACCESSES_KEPT_DAYS, ACCESSES_SINCE_DAYS, Pool, PoolBurst, PoolContent, PoolLayerChosen, PoolLayerFailed,
    PoolList, PoolSyncEvent, PoolSyncRequest, PoolSynced,
};
pub use records::{
    CHANGES_MAX, LABELS_TOLD_MAX, SandboxChange, SandboxChanges, SandboxForgotten, SandboxOwner,
    SandboxShape, SandboxesById,
};
pub use release::{
    ChangeBegun, EndTrialRequest, FailedChange, INSTALLED, NodeChange, NodeRelease, NodeTrial, Programs,
    RELEASE_BYTES_MAX, RELEASE_PROGRAMS, ReleaseName, ReleaseNameError, StoredRelease, TRIAL_MS_DEFAULT,
    TRIAL_MS_RANGE, TryConfigRequest, TryReleaseRequest, digest_text,
};
pub use sandbox::{
    BACKEND_CONTAINER, CreateManyEvent, CreateManyRequest, CreateSandboxRequest, FenceRequest, Fenced,
    LaunchPhase, Lost, Pauses, Sandbox, SandboxLayer, SandboxLimits, SandboxList, StopRequest,
    UpdateSandboxRequest, Usage,
};
pub use session::{Session, SessionList, SessionRequest};
pub use task::{
    StateCounts, TASK_FAILURES_MAX, Task, TaskFailure, TaskList, TaskOutcome, TaskWaitRequest, TaskWaited,
};

/// Header that makes a create idempotent: the same key gives the same sandbox.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Which attempt of its caller's a create with a key is, counted from 1, no number twice. A caller who counts has the first
/// placed where there is most room; later ones look for what the first became.
pub const IDEMPOTENCY_ATTEMPT: &str = "idempotency-attempt";
/// Header that names, separated by commas, the nodes without which an answer is.
pub const UNREACHABLE_NODES: &str = "x-dsec-unreachable-nodes";
/// Header that says that its caller takes an answer to a command with `wait` before the command has ended, and goes on waiting: a node
/// whose edge is about to become another gives one.
pub const TAKES_EARLY: &str = "x-dsec-takes-early";
/// Header that names one request in logs of every process; made where it is missing.
pub const REQUEST_ID: &str = "x-request-id";
