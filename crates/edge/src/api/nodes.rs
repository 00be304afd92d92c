//! The node itself.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::rest::{
    ApiError, ChargesFenced, CordonRequest, DrainRequest, EdgeInstance, FenceChargesRequest, NodeScheduling,
    NodeStatus, SchedulingState,
};
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::json;

use super::{Answer, Json, OptionalJson, Params, PathOf, Shared, json as answer, ndjson};
use crate::clock::now_ms;
use crate::error::{internal, invalid_field};
use crate::node::Node;
use crate::shutdown;

/// Longest reason of an operator's, bytes.
const REASON_MAX: usize = 256;
/// Longest time that sandboxes of a draining node get, seconds: 30 days.
const STOP_AFTER_MAX: u64 = 30 * 24 * 3600;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParams {
    #[serde(default)]
    layers: bool,
}

pub(super) async fn list(State(node): Shared, Params(ListParams { layers }): Params<ListParams>) -> Answer {
    Ok(answer(StatusCode::OK, &json!({ "nodes": [status(node, layers).await?] })))
}

pub(super) async fn get(State(node): Shared, PathOf(name): PathOf<String>) -> Answer {
    is_this(&node, &name)?;
    Ok(answer(StatusCode::OK, &status(node, false).await?))
}

async fn status(node: Arc<Node>, with_layers: bool) -> Result<NodeStatus, ApiError> {
    let content = node.layers.content_of_node().await;
    let read = tokio::task::spawn_blocking(move || node.status(with_layers));
    let mut status = read.await.map_err(|e| internal("reading the node's numbers broke off", &e))??;
    if let Some((cache_bytes, counts)) = content {
        (status.usage.content_cache_bytes, status.usage.content) = (cache_bytes, counts);
    }
    Ok(status)
}

pub(super) async fn cordon(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    OptionalJson(CordonRequest { reason }): OptionalJson<CordonRequest>,
) -> Answer {
    schedule(node, &name, SchedulingState::Cordoned, reason, None).await
}

/// Takes no body, and reads none.
pub(super) async fn uncordon(State(node): Shared, PathOf(name): PathOf<String>) -> Answer {
    schedule(node, &name, SchedulingState::Open, String::new(), None).await
}

pub(super) async fn drain(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    OptionalJson(DrainRequest { reason, stop_after }): OptionalJson<DrainRequest>,
) -> Answer {
    if let Some(seconds) = stop_after.filter(|seconds| *seconds > STOP_AFTER_MAX) {
        return Err(invalid_field(
            "stop_after",
            format!("stop_after is {seconds} s; it must be at most {STOP_AFTER_MAX}"),
        )
        .into());
    }
    schedule(node, &name, SchedulingState::Draining, reason, stop_after).await
}

async fn schedule(
    node: Arc<Node>,
    name: &str,
    state: SchedulingState,
    reason: String,
    stop_after: Option<u64>,
) -> Answer {
    is_this(&node, name)?;
    if reason.len() > REASON_MAX || reason.chars().any(char::is_control) {
        return Err(invalid_field(
            "reason",
            format!("reason must be at most {REASON_MAX} bytes in one line; it has {} bytes", reason.len()),
        )
        .into());
    }
    let now = now_ms();
    let stop_at_ms = stop_after.map(|seconds| now + seconds * 1000);
    let said = NodeScheduling { state, reason, since_ms: Some(now), stop_at_ms };
    let told = Arc::clone(&node);
    let said = tokio::task::spawn_blocking(move || {
        told.scheduling.say(said)?;
        // From here on every sandbox that was let in before is counted.
        told.pending.pause();
        Ok::<(), ApiError>(())
    });
    said.await.map_err(|e| internal("changing the node's scheduling broke off", &e))??;
    Ok(answer(StatusCode::OK, &status(node, false).await?))
}

/// Refuses a call that means another node.
pub(super) fn is_this(node: &Node, name: &str) -> Result<(), ApiError> {
    if node.config.node.as_str() == name {
        return Ok(());
    }
    let this = &node.config.node;
    Err(ApiError::new(ErrorKind::NotFound, format!("no node {name}; this one is {this}"))
        .detail(json!({ "node": name }))
        .hint("`dsec node ls` lists them"))
}

pub(super) async fn health() -> Response {
    answer(StatusCode::OK, &json!({ "status": "ok" }))
}

/// Which edge this is.
pub(super) async fn instance(State(node): Shared) -> Response {
    let instance = EdgeInstance { node: node.config.node.to_string(), instance: node.instance.clone() };
    answer(StatusCode::OK, &instance)
}

/// Takes nothing more that is charged to a replica of control which is no more, and says what is.
pub(super) async fn fence_charges(
    State(node): Shared,
    Json(FenceChargesRequest { by }): Json<FenceChargesRequest>,
) -> Answer {
    Ok(answer(StatusCode::OK, &ChargesFenced { charged: node.charges.fence(&by) }))
}

/// Ends everything, tells how far it is, then has the process end.
pub(super) async fn shutdown(State(node): Shared) -> Response {
    let lines = shutdown::start(node).map(|progress| {
        let mut line = serde_json::to_vec(&progress).unwrap_or_default();
        line.push(b'\n');
        Ok::<_, std::convert::Infallible>(Bytes::from(line))
    });
    ndjson(Body::from_stream(lines))
}
