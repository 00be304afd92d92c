//! The platform itself.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use dsec_model::ErrorKind;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{HeaderMap, HeaderValue, header};
use serde::Serialize;

use super::{Call, lists};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::{metrics, openapi};

/// How long a node may take to say that it is well.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the nodes may take to say what they did for content: who scrapes waits for some ten seconds.
const NODES_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether the platform serves: 503 when no node answers.
#[utoipa::path(get, path = "/healthz", operation_id = "healthz", tag = "system", security(()),
    responses((status = 200, description = "At least one node answers.", body = Object, example = json!({"status": "ok"}))))]
pub async fn healthz(State(app): State<Arc<App>>) -> Reply {
    let headers = HeaderMap::new();
    let nodes = app.nodes.all();
    let mut answers: FuturesUnordered<_> =
        nodes.iter().map(|node| node.ask::<serde_json::Value>("/healthz", &headers)).collect();
    let one_is_well = async {
        while let Some(answer) = answers.next().await {
            if answer.is_ok() {
                return true;
            }
        }
        false
    };
    if tokio::time::timeout(HEALTH_TIMEOUT, one_is_well).await.unwrap_or(false) {
        return Ok(text("application/json", r#"{"status":"ok"}"#));
    }
    Err(Failure::new(ErrorKind::Unavailable, "no node answers")
        .hint("see that dsec-edge runs on the nodes (`dsec doctor`)"))
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "openapi", tag = "system", security(()),
    responses((status = 200, description = "The OpenAPI document.", body = Object)))]
pub async fn openapi() -> Response {
    text("application/json", openapi::document())
}

/// Counters of this server, and of content on the nodes that answer, in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "system",
    responses((status = 200, description = "The counters.", body = String, content_type = "text/plain")))]
pub async fn metrics(call: Call) -> Response {
    let own = call.app.metrics.render() + &call.app.pools.render(&call.app);
    let nodes = tokio::time::timeout(NODES_TIMEOUT, lists::statuses(call)).await.unwrap_or_default();
    let body = own + &metrics::content(&nodes);
    text("text/plain; version=0.0.4; charset=utf-8", body)
}

pub(super) fn text(content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// An event as a line of `application/x-ndjson`.
pub(super) fn line(event: &impl Serialize) -> Bytes {
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line.into()
}
