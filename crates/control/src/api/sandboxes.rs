//! Creating, finding and ending sandboxes.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_model::placement::{self, Refusals, TRIES_MAX, Tries, Wanted};
use dsec_proto::rest::{
    BACKEND_CONTAINER, CreateSandboxRequest, FenceRequest, Fenced, IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY,
    PackRequest, Packed, Sandbox, SandboxList, StopRequest,
};
use futures_util::future::join_all;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use super::{Call, SandboxCall, lists};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::forward::{self, BodyKind, Outgoing};
use crate::keys::Principal;
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
    params(("idempotency-key" = Option<String>, Header, description = "1 to 128 visible ASCII characters. The same key with the same body answers 200 with the same sandbox; with another body, 409."),
        ("idempotency-attempt" = Option<u32>, Header, description = "With a key: which attempt of the caller's this is, counted from 1. The first then goes where there is most room.")),
    request_body = CreateSandboxRequest,
    responses((status = 201, description = "It runs.", body = Sandbox),
        (status = 200, description = "An earlier request with this key made it.", body = Sandbox)))]
pub async fn create(call: Call) -> Reply {
    let key = idempotency_key(call.request.headers())?;
    let attempt = attempt(call.request.headers())?;
    if let Some(node) = call.app.nodes.only() {
        let node = Arc::clone(node);
        return call.forward(&node, BodyKind::Json).await;
    }
    let identity = lists::identity(&call);
    let Call { app, caller, request } = call;
    let (head, body) = request.into_parts();
    let body = forward::whole(body).await?;
    app.nodes.watched.gathered().await;
    let mut placement = Placement::new(&app, &caller, key.as_deref(), attempt, &body);
    if let (Some(key), Some(attempt @ 2..)) = (&key, attempt) {
        placement.order = find(&app, &identity, key, attempt).await?.map(|at| vec![at]);
    }
    while let Some((at, sent_ms)) = placement.next(&app) {
        let node = &app.nodes.all()[at];
        let request = Request::from_parts(head.clone(), Body::from(body.clone()));
        let mut outgoing = Outgoing::new(request, &caller, BodyKind::Json).await?;
        match outgoing.try_send(node, &app.tunnels).await {
            Ok(answer) if answer.status() == StatusCode::TOO_MANY_REQUESTS => {
                app.nodes.watched.refused(at, sent_ms);
                placement.refusals.add(WITHOUT_ROOM);
            }
            Err(SendError::Unreachable(_)) => {
                app.nodes.watched.refused(at, sent_ms);
                app.nodes.watched.unreachable(at);
                placement.refusals.add("unreachable");
            }
            Ok(answer) => return Ok(answer),
            Err(error) => return Err(forward::failure_of(node, error)),
        }
    }
    Err(placement.failure(&app))
}

/// What a node that refuses for lack of room is counted as.
const WITHOUT_ROOM: &str = "without room";

/// One create on its way over the nodes: each is tried once.
struct Placement {
    backend: String,
    tries: Tries,
    /// The nodes still to try, the next one last, of a create that must meet an earlier one.
    order: Option<Vec<usize>>,
    refusals: Refusals,
}

impl Placement {
    fn new(app: &App, caller: &Principal, key: Option<&str>, attempt: Option<u32>, body: &Bytes) -> Self {
        /// What of a request decides where it can go. One that is malformed goes anywhere, and the node says why.
        #[derive(Deserialize)]
        struct Needs {
            backend: Option<String>,
        }
        let needs: Option<Needs> = serde_json::from_slice(body).ok();
        let backend = needs.and_then(|needs| needs.backend).unwrap_or_else(|| BACKEND_CONTAINER.to_owned());
        // Who does not count attempts may be here for the second time.
        let order = key.filter(|_| attempt.is_none()).map(|key| {
            let names = app.nodes.all().iter().map(|node| node.name().as_str());
            let scoped = [caller.project.as_bytes(), b"\0", key.as_bytes()].concat();
            let mut order = placement::keyed_order(names, &scoped);
            order.truncate(TRIES_MAX);
            order.reverse();
            order
        });
        Self { backend, tries: Tries::default(), order, refusals: Refusals::default() }
    }

    /// The node to try next, and when that was.
    fn next(&mut self, app: &App) -> Option<(usize, u64)> {
        match &mut self.order {
            Some(order) => order.pop().map(|at| (at, app.nodes.watched.placed(at))),
            None => app.nodes.watched.place(&wanted(&self.backend), &mut self.tries),
        }
    }

    /// Why no node took it, all in one.
    fn failure(self, app: &App) -> Failure {
        let Self { backend, order, mut refusals, .. } = self;
        let is_full = refusals.counts().contains_key(WITHOUT_ROOM);
        if order.is_none() {
            app.nodes.watched.add_unfit(&wanted(&backend), &mut refusals);
        }
        let kind = if is_full { ErrorKind::ResourceExhausted } else { ErrorKind::Unavailable };
        let hint = match kind {
            ErrorKind::ResourceExhausted => {
                "stop sandboxes you do not need, ask for less, or try again later"
            }
            _ => "`dsec status` shows the nodes",
        };
        Failure::new(kind, format!("no node takes the sandbox: {refusals}"))
            .hint(hint)
            .detail(json!({ "refusals": refusals.counts() }))
    }
}

fn wanted(backend: &str) -> Wanted<'_> {
    Wanted { backend, ..Wanted::default() }
}

/// The node that took an earlier attempt of a create, or is about to. When none has, none will: each that answers takes no
/// earlier attempt from now on.
async fn find(app: &App, headers: &HeaderMap, key: &str, attempt: u32) -> Result<Option<usize>, Failure> {
    let nodes = app.nodes.all();
    let question = FenceRequest { key: key.to_owned(), attempt };
    let answers: Vec<Result<Fenced, Failure>> =
        join_all(nodes.iter().map(|node| node.tell("/internal/keys/fence", headers, &question))).await;
    if let Some(at) = answers.iter().position(|answer| matches!(answer, Ok(Fenced { known: true }))) {
        return Ok(Some(at));
    }
    // An edge of before this question says that there is no such path.
    let is_silent = |answer: &Result<Fenced, Failure>| {
        answer.as_ref().is_err_and(|failure| failure.0.kind() != ErrorKind::NotFound)
    };
    let silent = nodes
        .iter()
        .zip(&answers)
        .filter(|(node, answer)| is_silent(answer) && !app.nodes.watched.is_lost(node.name()));
    let silent: Vec<&str> = silent.map(|(node, _)| node.name().as_str()).collect();
    if silent.is_empty() {
        return Ok(None);
    }
    let message = format!(
        "an earlier attempt may have made the sandbox on a node that does not answer: {}",
        silent.join(", ")
    );
    Err(Failure::new(ErrorKind::Unavailable, message)
        .hint("try again: when the node answers its sandbox is found, when it is lost another is made")
        .detail(json!({ "nodes": silent })))
}

fn attempt(headers: &HeaderMap) -> Result<Option<u32>, Failure> {
    let Some(value) = headers.get(IDEMPOTENCY_ATTEMPT) else { return Ok(None) };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(attempt @ 1..) => Ok(Some(attempt)),
        _ => Err(Failure::new(
            ErrorKind::InvalidArgument,
            format!("{IDEMPOTENCY_ATTEMPT} must be a number from 1"),
        )
        .detail(json!({ "field": IDEMPOTENCY_ATTEMPT }))),
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
