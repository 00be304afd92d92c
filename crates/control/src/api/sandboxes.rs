//! Creating, finding and ending sandboxes.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::rest::{
    CreateSandboxRequest, IDEMPOTENCY_KEY, PackRequest, Packed, Sandbox, SandboxList, StopRequest,
};
use http::{HeaderMap, StatusCode};
use serde_json::json;
use utoipa::IntoParams;

use super::{Call, SandboxCall, lists};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::forward::{self, BodyKind, Outgoing};
use crate::nodes::Node;
use crate::placement;
use crate::upstream::SendError;

/// Longest idempotency key, bytes.
pub const IDEMPOTENCY_KEY_MAX: usize = 128;

/// Query of a list.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct ListQuery {
    /// Only these states (`creating`, `running`, `stopping`, `stopped`, `failed`); may be repeated: any of them.
    state: Option<Vec<String>>,
    /// Only those of this job.
    task_id: Option<String>,
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
    params(("idempotency-key" = Option<String>, Header, description = "1 to 128 visible ASCII characters. The same key with the same body answers 200 with the same sandbox; with another body, 409.")),
    request_body = CreateSandboxRequest,
    responses((status = 201, description = "It runs.", body = Sandbox),
        (status = 200, description = "An earlier request with this key made it.", body = Sandbox)))]
pub async fn create(mut call: Call) -> Reply {
    let key = idempotency_key(call.request.headers())?;
    if let Some(node) = call.app.nodes.only() {
        let node = Arc::clone(node);
        return call.forward(&node, BodyKind::Json).await;
    }
    let body = forward::whole(call.take_body()).await?;
    let mut placement = Placement::new(&call, key);
    while let Some(node) = placement.next(&call.app) {
        node.note_create();
        let mut outgoing =
            Outgoing::new(placement.request(&call, &body), &call.caller, BodyKind::Json).await?;
        match outgoing.try_send(&node, &call.app.tunnels).await {
            Ok(answer) if answer.status() == StatusCode::TOO_MANY_REQUESTS => {
                placement.refusal = Some(Ok(answer));
            }
            Err(error @ SendError::Unreachable(_)) => {
                placement.refusal.get_or_insert_with(|| Err(forward::failure_of(&node, error)));
            }
            Ok(answer) => return Ok(answer),
            Err(error) => return Err(forward::failure_of(&node, error)),
        }
    }
    // A node without room says more than a node that is down.
    placement.refusal.unwrap_or_else(|| Err(Failure::new(ErrorKind::Unavailable, "there is no node")))
}

/// One create on its way over the nodes: each is tried once.
struct Placement {
    refused: Vec<bool>,
    /// Of a create with an idempotency key: the nodes still to try, the next one last.
    order: Option<Vec<usize>>,
    refusal: Option<Reply>,
}

impl Placement {
    fn new(call: &Call, key: Option<String>) -> Self {
        let nodes = call.app.nodes.all();
        let order = key.map(|key| {
            let names: Vec<&str> = nodes.iter().map(|node| node.name().as_str()).collect();
            let scoped = [call.caller.project.as_bytes(), b"\0", key.as_bytes()].concat();
            let mut order = placement::keyed_order(&names, &scoped);
            order.reverse();
            order
        });
        Self { refused: vec![false; nodes.len()], order, refusal: None }
    }

    fn next(&mut self, app: &App) -> Option<Arc<Node>> {
        let nodes = app.nodes.all();
        let chosen = match &mut self.order {
            Some(order) => order.pop(),
            None => {
                let candidates: Vec<_> =
                    nodes.iter().zip(&self.refused).map(|(node, refused)| node.candidate(*refused)).collect();
                placement::choose(&candidates, |below| {
                    // The bias of the remainder is below 2^-54 for any number of nodes we take.
                    getrandom::u64().map_or(0, |draw| (draw % below as u64) as usize)
                })
            }
        };
        chosen.map(|index| {
            self.refused[index] = true;
            Arc::clone(&nodes[index])
        })
    }

    fn request(&self, call: &Call, body: &Bytes) -> Request {
        let mut request = Request::new(Body::from(body.clone()));
        *request.method_mut() = call.request.method().clone();
        *request.uri_mut() = call.request.uri().clone();
        *request.headers_mut() = call.request.headers().clone();
        request
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(text)
            if (1..=IDEMPOTENCY_KEY_MAX).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_graphic()) =>
        {
            Ok(Some(text.to_owned()))
        }
        _ => Err(Failure::new(
            ErrorKind::InvalidArgument,
            format!("{IDEMPOTENCY_KEY} must be 1 to {IDEMPOTENCY_KEY_MAX} visible ASCII characters"),
        )
        .detail(json!({ "field": IDEMPOTENCY_KEY }))),
    }
}

/// Lists sandboxes, newest first. Ended ones stay listed for an hour.
#[utoipa::path(get, path = "/v1/sandboxes", operation_id = "list_sandboxes", tag = "sandboxes",
    params(ListQuery),
    responses((status = 200, description = "A page.", body = SandboxList)))]
pub async fn list(call: Call) -> Reply {
    match call.app.nodes.only() {
        Some(node) => {
            let node = Arc::clone(node);
            call.forward(&node, BodyKind::Raw).await
        }
        None => lists::sandboxes(call).await,
    }
}

/// One sandbox, with what it uses now.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", operation_id = "get_sandbox", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox."), GetQuery),
    responses((status = 200, description = "Its record.", body = Sandbox)))]
pub async fn get(call: SandboxCall) -> Reply {
    call.forward().await
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
