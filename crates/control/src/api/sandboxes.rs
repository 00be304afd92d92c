//! Creating, finding and ending sandboxes.

use std::sync::Arc;

use dsec_proto::rest::{
    CreateSandboxRequest, NodeHealth, PackRequest, Packed, Sandbox, SandboxList, StopRequest,
    UpdateSandboxRequest,
};
use utoipa::IntoParams;

use super::{Call, SandboxCall, listing, lists};
use crate::create::{Create, Needs, attempt, idempotency_key};
use crate::failure::Reply;
use crate::forward::{self, BodyKind};

/// Query of a list.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct ListQuery {
    /// Only these states (`creating`, `running`, `pausing`, `paused`, `resuming`, `stopping`, `stopped`, `failed`, `lost`); may be repeated: any of them.
    state: Option<Vec<String>>,
    /// Only those of this job.
    task_id: Option<String>,
    /// Only those of this project and of all that are in it.
    project: Option<String>,
    /// Only those with this label, `key=value`; may be repeated: all of them.
    label: Option<Vec<String>>,
    /// At most this many.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Adds what each one uses now.
    #[param(default = false)]
    usage: Option<bool>,
    /// Says of their layers what of their content is on the node, and what was done for it.
    #[param(default = false)]
    content: Option<bool>,
}

/// Query of a get.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct GetQuery {
    /// Answers once it is in this state, or in a final one.
    wait_state: Option<String>,
    /// How long to wait for it, ms; then `deadline_exceeded`.
    #[param(default = 60000)]
    timeout_ms: Option<u64>,
    /// Says of its layers what of their content is on the node, and what was done for it.
    #[param(default = false)]
    content: Option<bool>,
}

/// Creates a sandbox and waits until it runs.
///
/// If the caller hangs up, the create runs to its end and the sandbox stays until its `ttl_running_stop`.
#[utoipa::path(post, path = "/v1/sandboxes", operation_id = "create_sandbox", tag = "sandboxes",
    params(("idempotency-key" = Option<String>, Header, description = "1 to 128 visible ASCII characters. The same key with the same body answers 200 with the same sandbox; with another body, 409."),
        ("idempotency-attempt" = Option<u32>, Header, description = "With a key: which attempt of the caller's this is, counted from 1. The first then goes where there is most room.")),
    request_body = CreateSandboxRequest,
    responses((status = 201, description = "It runs.", body = Sandbox),
        (status = 200, description = "An earlier request with this key made it.", body = Sandbox)))]
pub async fn create(call: Call) -> Reply {
    let key = idempotency_key(call.request.headers())?;
    let attempt = attempt(call.request.headers())?;
    let identity = lists::identity(&call);
    let Call { app, behalf, request } = call;
    let (head, body) = request.into_parts();
    let body = forward::whole(body).await?;
    let needs = Arc::new(Needs::of(&body));
    Create { head, body, needs, key, attempt }.place(&app, &behalf, &identity).await
}

/// Lists sandboxes, newest first. Ended ones stay listed for an hour.
#[utoipa::path(get, path = "/v1/sandboxes", operation_id = "list_sandboxes", tag = "sandboxes",
    params(ListQuery),
    responses((status = 200, description = "A page. `x-dsec-unreachable-nodes` names the nodes that do not answer: of their sandboxes what was last heard is there, with less in it; those of a lost node that had not ended are `lost`. Of a lost node that was not heard of since this server started nothing is known.", body = SandboxList,
        headers(("x-dsec-unreachable-nodes" = String, description = "Comma-separated; missing when every node answers.")))))]
pub async fn list(call: Call) -> Reply {
    match call.app.nodes.only_placed() {
        // Its own list is all there is.
        Some((at, node)) if call.app.nodes.watched.standing(at).health == NodeHealth::Well => {
            call.forward(&node, BodyKind::Raw).await
        }
        _ => listing::sandboxes(call).await,
    }
}

/// One sandbox, with what it uses now.
///
/// Of one whose node is lost, what was last heard of it, in the state `lost`. Waiting for a state of it is `unavailable` then.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", operation_id = "get_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox."), GetQuery),
    responses((status = 200, description = "Its record.", body = Sandbox)))]
pub async fn get(call: SandboxCall) -> Reply {
    call.look().await
}

/// Gives a sandbox that runs other limits of CPU time, for what runs in it already too.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}", operation_id = "update_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = UpdateSandboxRequest,
    responses((status = 200, description = "Its record, with the limits in force.", body = Sandbox)))]
pub async fn update(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Ends a sandbox and waits until nothing is left of it.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/stop", operation_id = "stop_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body(content = Option<StopRequest>, description = "May be empty."),
    responses((status = 200, description = "Its last record; of one that ended before, the record of then.", body = Sandbox)))]
pub async fn stop(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Ends a sandbox at once: the same as stop with `grace_ms` 0.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", operation_id = "delete_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "Its last record.", body = Sandbox)))]
pub async fn remove(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Pauses a sandbox: its processes stand still, and its memory is given back as far as the node has swap.
///
/// Waits until that is done. Of one that is paused nothing is changed. Any request that needs it to run resumes it first; one that comes
/// while it is being paused breaks that off, and this call is a conflict then.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", operation_id = "pause_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "It is paused; `pauses` says how much memory was given back.", body = Sandbox)))]
pub async fn pause(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Resumes a sandbox and waits until it runs. One that runs is used by it and otherwise left alone.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", operation_id = "resume_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "It runs.", body = Sandbox)))]
pub async fn resume(call: SandboxCall) -> Reply {
    call.forward().await
}

/// What happened to a sandbox, a JSON object `{"time_ms", "event", ...}` a line.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", operation_id = "sandbox_logs", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "Its events.", body = String, content_type = "application/x-ndjson")))]
pub async fn logs(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Makes a layer of what a running sandbox wrote, which other sandboxes start from.
///
/// Packing the same sandbox again stores only what changed. If the caller hangs up, the pack runs to its end.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pack", operation_id = "pack_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = PackRequest,
    responses((status = 201, description = "The layer is there, under its name.", body = Packed)))]
pub async fn pack(call: SandboxCall) -> Reply {
    call.forward_json().await
}
