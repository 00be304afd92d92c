//! The one place where failures of the parts below become what a caller is told. Causes that are
//! none of the caller's business go to the log, once, with their chain.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use dsec_backend::{BackendError, PauseError, SnapshotError};
use dsec_image::build::Denied;
use dsec_image::layer::NameError;
use dsec_image::{EntryProblem, ImportError};
use dsec_model::{EndReason, ErrorKind, IdError, LimitsError, SandboxId, State};
use dsec_proto::guest::{GuestError, GuestErrorKind};
use dsec_proto::rest::{ApiError, REGISTRY_UNAUTHORIZED, Sandbox};
use dsec_registry::PullError;
use dsec_store::StoreError;

use crate::clock::now_ms;
use crate::guest::CallError;

/// An error with all that caused it, as one text.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// A failure of this host or a defect: the chain goes to the log, the caller gets `what`.
pub fn internal(what: &str, error: &dyn Error) -> ApiError {
    tracing::error!(error = chain(error), op = what, "internal failure");
    ApiError::new(ErrorKind::Internal, what)
        .hint("the node's log has the cause; `dsec doctor` checks the host")
}

/// A value of a request that cannot be taken.
pub fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::InvalidArgument, message)
}

/// A value of one named field that cannot be taken.
pub fn invalid_field(field: &str, message: impl Into<String>) -> ApiError {
    invalid(message).detail(serde_json::json!({ "field": field }))
}

/// No sandbox of this id is known here.
pub fn no_sandbox(id: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("no sandbox {id} on this node"))
        .detail(serde_json::json!({ "sandbox_id": id }))
        .hint("`dsec ps --all` lists them; a sandbox that ended is forgotten after an hour")
}

/// The sandbox is not in a state that takes requests: says why, and since when.
pub fn not_running(record: &Sandbox) -> ApiError {
    let hint = match record.state {
        State::Creating => "wait for it with GET /v1/sandboxes/{id}?wait_state=running",
        State::Running | State::Pausing | State::Paused | State::Resuming => "try again",
        State::Stopping | State::Stopped | State::Failed | State::Lost => "create another one",
    };
    let mut message = format!("sandbox {} is {}", record.id, record.state.as_str());
    if let Some(reason) = &record.reason {
        let _ = write!(message, ": {}", told(reason, record));
    }
    if let Some(ended_ms) = record.ended_ms {
        let seconds = now_ms().saturating_sub(ended_ms) / 1000;
        let _ = write!(message, " ({seconds} s ago)");
    }
    ApiError::new(ErrorKind::Conflict, message)
        .detail(serde_json::json!({
            "sandbox_id": record.id,
            "state": record.state,
            "reason": record.reason,
            "ended_ms": record.ended_ms,
        }))
        .hint(hint)
}

/// Why a sandbox ended, for a person.
fn told(reason: &EndReason, record: &Sandbox) -> String {
    match reason {
        EndReason::Asked => "somebody asked for its end".to_owned(),
        EndReason::Idle => {
            format!("nobody used it for {} s (ttl_running_stop)", record.limits.ttl_running_stop)
        }
        EndReason::Lifetime => format!("its {} s were over (max_lifetime)", record.limits.max_lifetime),
        EndReason::PausedTooLong => {
            format!("it was paused for {} s (ttl_paused_stop)", record.limits.ttl_paused_stop)
        }
        EndReason::NodeDown => "its node was taken down".to_owned(),
        EndReason::Drained => "its node was drained".to_owned(),
        EndReason::LaunchFailed { message }
        | EndReason::AgentLost { message }
        | EndReason::SocketMemory { message } => message.clone(),
        EndReason::Rebooted => "its node was restarted".to_owned(),
    }
}

/// The agent of a sandbox cannot be reached.
pub fn agent_gone(why: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, format!("the sandbox's agent cannot be reached: {why}"))
        .hint("the sandbox is being ended as failed; create another one")
}

/// Something of a sandbox's that is not there.
pub fn no_such(what: &str, name: &str, id: &SandboxId) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("no {what} {name} in sandbox {id}"))
        .detail(serde_json::json!({ "sandbox_id": id, what: name }))
}

/// What an agent answered, as a caller is told.
pub fn from_guest(error: GuestError) -> ApiError {
    let kind = match GuestErrorKind::try_from(error.kind).unwrap_or(GuestErrorKind::Internal) {
        GuestErrorKind::Internal => ErrorKind::Internal,
        GuestErrorKind::InvalidArgument => ErrorKind::InvalidArgument,
        GuestErrorKind::NotFound => ErrorKind::NotFound,
        GuestErrorKind::AlreadyExists => ErrorKind::AlreadyExists,
        GuestErrorKind::Conflict => ErrorKind::Conflict,
        GuestErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
        GuestErrorKind::ResourceExhausted => ErrorKind::ResourceExhausted,
        GuestErrorKind::TooLarge => ErrorKind::TooLarge,
        GuestErrorKind::Unavailable => ErrorKind::Unavailable,
    };
    let answer = ApiError::new(kind, error.message).hint(error.hint);
    if error.reason.is_empty() {
        return answer;
    }
    answer.detail(serde_json::json!({ "reason": error.reason }))
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Guest(error) => from_guest(error),
            CallError::Closed(why) => agent_gone(&why),
            CallError::TimedOut => ApiError::new(
                ErrorKind::Unavailable,
                format!("the sandbox's agent did not answer within {} s", crate::guest::REPLY_MAX.as_secs()),
            )
            .hint("the node is overloaded or the sandbox hangs; try again or stop it"),
            CallError::Busy => ApiError::new(
                ErrorKind::ResourceExhausted,
                format!("{} requests wait for the sandbox's agent", crate::guest::IN_FLIGHT_MAX),
            )
            .hint("send fewer at once"),
            CallError::Unexpected => {
                tracing::error!("an agent gave an answer of the wrong kind");
                ApiError::new(ErrorKind::Internal, "the sandbox's agent gave an answer that does not fit")
            }
        }
    }
}

/// A failed launch, as its caller is told: with its cause, since that is what tells one host's trouble from
/// another's, but with paths as they are below the state directory.
pub fn launch_failed(id: &SandboxId, error: &BackendError, state_dir: &Path) -> ApiError {
    let text = chain(error);
    tracing::error!(sandbox_id = %id, error = text, "launch failed");
    let text = text.replace(&format!("{}/", state_dir.display()), "");
    ApiError::new(ErrorKind::Internal, format!("sandbox {id} could not be launched: {text}"))
        .detail(serde_json::json!({ "sandbox_id": id }))
        .hint("`dsec doctor` checks what a launch needs")
}

/// A limit out of its range.
pub fn bad_limit(error: &LimitsError) -> ApiError {
    // The caller wrote cores, the model counts thousandths.
    let (field, message) = if error.field == "cpu_limit_millis" {
        let cores = |millis: u64| millis as f64 / 1000.0;
        let message = format!(
            "cpu_cores_limit is {}; it must be between {} and {}{}",
            cores(error.given),
            cores(error.min),
            cores(error.max),
            error.because
        );
        ("cpu_cores_limit", message)
    } else {
        (error.field, error.to_string())
    };
    invalid(message).detail(serde_json::json!({ "field": field, "min": error.min, "max": error.max }))
}

/// An id in a path or a body that is none.
pub fn bad_id(error: &IdError) -> ApiError {
    invalid(error.to_string())
}

/// A name that no layer can have.
pub fn bad_layer_name(error: &NameError) -> ApiError {
    invalid_field("name", error.to_string())
}

/// A failed import. Its text says what was found and what to do, so the chain is for the caller, with what was
/// sent under the name that its sender has for it. A failure of this host is for the log alone.
pub fn import_failed(error: &ImportError, archive: &Path, source: &str) -> ApiError {
    match error.kind() {
        ErrorKind::Internal => internal("the image could not be imported", error),
        ErrorKind::ResourceExhausted => no_room_for_image(error),
        kind => {
            tracing::info!(error = chain(error), "import refused");
            ApiError::new(kind, chain(error).replace(&archive.display().to_string(), source))
        }
    }
}

/// An image that a registry does not give. As [`import_failed`].
pub fn pull_failed(error: &PullError) -> ApiError {
    match error.kind() {
        ErrorKind::Internal => internal("the image could not be fetched", error),
        ErrorKind::ResourceExhausted => no_room_for_image(error),
        kind => {
            tracing::info!(error = chain(error), "pull failed");
            let answer = ApiError::new(kind, chain(error));
            match error {
                PullError::Unauthorized { host, .. } => {
                    answer.detail(serde_json::json!({ "reason": REGISTRY_UNAUTHORIZED, "registry": host }))
                }
                _ => answer,
            }
        }
    }
}

/// The disk that imports are made on is full.
pub fn no_room_for_image(error: &dyn Error) -> ApiError {
    tracing::warn!(error = chain(error), "no room for an image");
    ApiError::new(ErrorKind::ResourceExhausted, "the node's disk has no room for the image")
        .hint("remove images that are not used: `dsec image ls`, `dsec image rm`")
}

/// The disk that layers are made on is full.
pub fn no_room_for_layer(error: &dyn Error) -> ApiError {
    tracing::warn!(error = chain(error), "no room for a layer");
    ApiError::new(ErrorKind::ResourceExhausted, "the node's disk has no room for the layer")
        .hint("remove images and layers that are not used: `dsec image ls`, `dsec layer ls`")
}

/// Why a sandbox is not paused; it runs on.
pub fn pause_failed(error: &PauseError) -> ApiError {
    match error {
        PauseError::Unsupported => ApiError::new(ErrorKind::Unsupported, error.to_string()).hint(
            "mount cgroup version 2 on the node, also beside version 1; `dsec doctor` shows what it has",
        ),
        PauseError::Restless { .. } => ApiError::new(ErrorKind::Unavailable, error.to_string())
            .hint("it waits for a device or a file system; try again"),
        PauseError::Failed(_) => internal("the sandbox cannot be paused", error),
    }
}

/// There is no snapshot of a sandbox.
pub fn snapshot_failed(error: &SnapshotError) -> ApiError {
    match error {
        SnapshotError::Unsupported => ApiError::new(ErrorKind::Unsupported, error.to_string())
            .hint("pack with quiesce `none`; `dsec doctor` shows what the host has"),
        SnapshotError::Restless { .. } => ApiError::new(ErrorKind::Unavailable, error.to_string())
            .hint("try again, or pack with quiesce `none`"),
        SnapshotError::Writing { files } => {
            let shown: Vec<_> =
                files.iter().map(|(command, path)| format!("{} by {command}", path.display())).collect();
            let message = format!("the sandbox has files open for writing: {}", shown.join(", "));
            let detail: Vec<_> = files
                .iter()
                .map(|(command, path)| serde_json::json!({ "command": command, "path": path.to_string_lossy() }))
                .collect();
            ApiError::new(ErrorKind::Conflict, message)
                .detail(serde_json::json!({ "writing": detail }))
                .hint("end what writes, or pack with quiesce `freeze`")
        }
        SnapshotError::Failed(_) => internal("a snapshot of the sandbox cannot be taken", error),
    }
}

/// A failed pack, with paths as they are in the sandbox. A failure of this host is for the log alone.
pub fn pack_failed(error: &ImportError, upper: &Path) -> ApiError {
    if let ImportError::Entry { entry, problem: EntryProblem::Denied { rule }, .. } = error {
        return denied(&Denied { rule: rule.clone(), path: format!("/{entry}") });
    }
    match error.kind() {
        ErrorKind::Internal => internal("the sandbox could not be packed", error),
        ErrorKind::ResourceExhausted => no_room_for_layer(error),
        kind => {
            tracing::info!(error = chain(error), "pack refused");
            let text = chain(error).replace(&upper.display().to_string(), "what the sandbox wrote");
            ApiError::new(kind, text.replace("imported", "packed"))
        }
    }
}

/// A rule says that something must not be in the layer.
pub fn denied(error: &Denied) -> ApiError {
    let Denied { rule, path } = error;
    ApiError::new(ErrorKind::Conflict, format!("{path} matches the deny rule {rule:?}; nothing was packed"))
        .detail(serde_json::json!({ "rule": rule, "path": path }))
        .hint("remove it from the sandbox, exclude it, or drop the rule")
}

/// A failed layer store, as a caller is told: what was wanted and what to do, not where the store is.
pub fn store_failed(error: &StoreError) -> ApiError {
    let kind = match error {
        StoreError::NotFound { .. } => ErrorKind::NotFound,
        StoreError::Unavailable { .. } | StoreError::LeaseLost { .. } => ErrorKind::Unavailable,
        StoreError::Conflict { .. } | StoreError::InUse { .. } => ErrorKind::Conflict,
        StoreError::Damaged { .. }
        | StoreError::Denied { .. }
        | StoreError::Export { .. }
        | StoreError::Manifest(_)
        | StoreError::Settings { .. } => ErrorKind::Internal,
    };
    if matches!(kind, ErrorKind::Internal | ErrorKind::Unavailable) {
        tracing::error!(error = chain(error), "the layer store failed");
    }
    let hint = match kind {
        ErrorKind::Unavailable => "try again; if it stays, the node's log says which store does not answer",
        ErrorKind::Internal => "the node's log has the cause",
        _ => "",
    };
    ApiError::new(kind, error.to_string()).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_names_each_cause_once() {
        let cause = std::io::Error::other("no space");
        let error = BackendError::new("writing /x", cause);
        assert_eq!(chain(&error), "writing /x: no space");
    }

    #[test]
    fn a_core_limit_is_told_in_the_callers_unit() {
        let error =
            LimitsError { field: "cpu_limit_millis", given: 9000, min: 10, max: 2000, because: " (all)" };
        assert_eq!(bad_limit(&error).0.message, "cpu_cores_limit is 9; it must be between 0.01 and 2 (all)");
    }
}
