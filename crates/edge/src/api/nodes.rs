//! The node itself.

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::json;

use super::{Answer, Shared, ndjson};
use crate::error::internal;
use crate::shutdown;

pub(super) async fn list(State(node): Shared) -> Answer {
    let content = node.layers.content_of_node().await;
    let read = tokio::task::spawn_blocking(move || node.status());
    let mut status = read.await.map_err(|e| internal("reading the node's numbers broke off", &e))??;
    if let Some((cache_bytes, counts)) = content {
        (status.usage.content_cache_bytes, status.usage.content) = (cache_bytes, counts);
    }
    Ok(super::json(StatusCode::OK, &json!({ "nodes": [status] })))
}

pub(super) async fn health() -> Response {
    super::json(StatusCode::OK, &json!({ "status": "ok" }))
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
