//! Sandboxes: create, list, look, end.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use dsec_image::layer::LayerId;
use dsec_model::{EndReason, ErrorKind};
use dsec_proto::rest::{
    ApiError, CreateSandboxRequest, FenceRequest, Fenced, GRACE_MAX_MS, IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY,
    Position, Sandbox, SandboxFilter, SandboxList, StopRequest, UpdateSandboxRequest, WAIT_DEFAULT_MS,
    WAIT_MAX_MS, parse_state,
};
use serde::Deserialize;

use super::{Answer, Caller, Failure, Json, OptionalJson, Params, PathOf, Shared, json, ndjson};
use crate::error::{internal, invalid, invalid_field};
use crate::idempotency::StoredKey;
use crate::node::Node;
use crate::sandbox::create::{Created, Owner, create as create_sandbox};
use crate::sandbox::{Handle, usage};

pub(super) async fn create(
    State(node): Shared,
    Caller { project, charge, .. }: Caller,
    headers: HeaderMap,
    Json(request): Json<CreateSandboxRequest>,
) -> Answer {
    let text = |name: &str| match headers.get(name).map(HeaderValue::to_str) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text)),
        Some(Err(_)) => Err(invalid(format!("the header {name} is not visible ASCII"))),
    };
    let attempt = text(IDEMPOTENCY_ATTEMPT)?.map(|text| {
        let number = text.parse().ok().filter(|number: &u32| *number > 0);
        number
            .ok_or_else(|| invalid(format!("{IDEMPOTENCY_ATTEMPT} is {text:?}; it must be a number from 1")))
    });
    let attempt = attempt.transpose()?;
    let key = text(IDEMPOTENCY_KEY)?;
    let key = key.map(|key| StoredKey::new(project.as_str(), key, attempt, &request)).transpose()?;
    // A caller that hangs up drops this handler and not the create.
    let made = tokio::spawn(create_sandbox(node, request, key, Owner { project, charge })).await;
    let Created { sandbox, fresh } =
        made.map_err(|e| internal("the create met a defect in the edge", &e))??;
    let mut response = json(if fresh { StatusCode::CREATED } else { StatusCode::OK }, &sandbox);
    if let Ok(location) = HeaderValue::try_from(format!("/v1/sandboxes/{}", sandbox.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

/// Says whether a create with a key was taken here, and if not that no earlier attempt of it will be.
pub(super) async fn fence(
    State(node): Shared,
    caller: Caller,
    Json(FenceRequest { key, attempt }): Json<FenceRequest>,
) -> Answer {
    let known = node.keys.fence(caller.project.as_str(), &key, attempt);
    Ok(json(StatusCode::OK, &Fenced { known }))
}

/// A list's query: its keys repeat.
fn filter(query: &str) -> Result<SandboxFilter, ApiError> {
    let uri = axum::http::Uri::builder().path_and_query(format!("/?{query}")).build();
    let pairs = uri.ok().and_then(|uri| {
        axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&uri).ok().map(|query| query.0)
    });
    SandboxFilter::of(pairs.ok_or_else(|| invalid("the query is not valid"))?)
}

pub(super) async fn list(State(node): Shared, caller: Caller, RawQuery(query): RawQuery) -> Answer {
    let filter = filter(&query.unwrap_or_default())?;
    let mut found: Vec<(Arc<Sandbox>, Arc<Handle>)> =
        node.registry.all().into_iter().map(|handle| (handle.record(), handle)).collect();
    found.retain(|(record, _)| caller.sees.has(&record.project) && filter.takes_after_cursor(record));
    found.sort_unstable_by(|(a, _), (b, _)| {
        (Reverse(a.created_ms), &a.id).cmp(&(Reverse(b.created_ms), &b.id))
    });
    let limit = filter.limit();
    let more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|(last, _)| Position::of(last).to_string());
    let sandboxes = shown(&node, found, filter.usage, filter.content).await?;
    Ok(json(StatusCode::OK, &SandboxList { sandboxes, next_cursor }))
}

/// Records as a list has them, with as much as was asked for.
pub(super) async fn shown(
    node: &Node,
    found: Vec<(Arc<Sandbox>, Arc<Handle>)>,
    usage: bool,
    content: bool,
) -> Result<Vec<Sandbox>, ApiError> {
    let mut sandboxes: Vec<Sandbox> = if usage {
        let read = tokio::task::spawn_blocking(move || {
            found.iter().map(|(record, handle)| with_usage(handle, record)).collect()
        });
        read.await.map_err(|e| internal("reading the sandboxes' usage broke off", &e))?
    } else {
        found.iter().map(|(record, _)| Sandbox { usage: None, ..Sandbox::clone(record) }).collect()
    };
    if content {
        add_content(node, &mut sandboxes).await;
    }
    Ok(sandboxes)
}

/// Says of the layers what of their content is on the node.
async fn add_content(node: &Node, sandboxes: &mut [Sandbox]) {
    let layers = || sandboxes.iter().flat_map(|sandbox| &sandbox.layers);
    let ids: BTreeSet<LayerId> = layers().filter_map(|layer| layer.id.parse().ok()).collect();
    let contents = node.layers.contents(&ids.into_iter().collect::<Vec<_>>()).await;
    for layer in sandboxes.iter_mut().flat_map(|sandbox| &mut sandbox.layers) {
        layer.content = layer.id.parse().ok().and_then(|id: LayerId| contents.get(&id).cloned());
    }
}

/// Blocks for some tens of microseconds.
fn with_usage(handle: &Handle, record: &Sandbox) -> Sandbox {
    let mut sandbox = record.clone();
    if let Some(grip) = handle.grip().filter(|_| record.state.is_usable()) {
        sandbox.usage = grip.with(|instance| usage(instance, &handle.traffic));
    }
    sandbox
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GetParams {
    wait_state: Option<String>,
    timeout_ms: Option<u64>,
    #[serde(default)]
    content: bool,
}

/// A look at the record is no use of the sandbox, or watching for an idle one to end would keep it.
pub(super) async fn get(
    State(node): Shared,
    caller: Caller,
    PathOf(id): PathOf<String>,
    Params(params): Params<GetParams>,
) -> Answer {
    let handle = caller.find(&node, &id)?;
    if let Some(text) = &params.wait_state {
        let wanted = parse_state("wait_state", text)?;
        let ms = params.timeout_ms.unwrap_or(WAIT_DEFAULT_MS).min(WAIT_MAX_MS);
        let waited =
            tokio::time::timeout(Duration::from_millis(ms), handle.wait_for(|state| state == wanted)).await;
        if waited.is_err() {
            let state = handle.state().as_str();
            return Err(Failure(
                ApiError::new(
                    ErrorKind::DeadlineExceeded,
                    format!("sandbox {id} is {state} and was not {text} within {ms} ms"),
                )
                .detail(serde_json::json!({ "sandbox_id": id, "state": state })),
            ));
        }
    } else if params.timeout_ms.is_some() {
        return Err(invalid_field("timeout_ms", "timeout_ms goes with wait_state only").into());
    }
    let read = tokio::task::spawn_blocking(move || with_usage(&handle, &handle.record()));
    let mut sandbox = read.await.map_err(|e| internal("reading the sandbox's usage broke off", &e))?;
    if params.content {
        add_content(&node, std::slice::from_mut(&mut sandbox)).await;
    }
    Ok(json(StatusCode::OK, &sandbox))
}

async fn end(node: &Node, caller: &Caller, id: &str, grace_ms: u64) -> Answer {
    let handle = caller.find(node, id)?;
    let record = handle.stop(EndReason::Asked, grace_ms.min(GRACE_MAX_MS)).await?;
    Ok(json(StatusCode::OK, &*record))
}

pub(super) async fn update(
    State(node): Shared,
    caller: Caller,
    PathOf(id): PathOf<String>,
    Json(request): Json<UpdateSandboxRequest>,
) -> Answer {
    let record = caller.find(&node, &id)?.update(request).await?;
    Ok(json(StatusCode::OK, &*record))
}

pub(super) async fn stop(
    State(node): Shared,
    caller: Caller,
    PathOf(id): PathOf<String>,
    OptionalJson(request): OptionalJson<StopRequest>,
) -> Answer {
    end(&node, &caller, &id, request.grace_ms).await
}

pub(super) async fn delete(State(node): Shared, caller: Caller, PathOf(id): PathOf<String>) -> Answer {
    end(&node, &caller, &id, 0).await
}

/// Pauses it. A caller that hangs up leaves it on its way there.
pub(super) async fn pause(State(node): Shared, caller: Caller, PathOf(id): PathOf<String>) -> Answer {
    let record = caller.find(&node, &id)?.pause().await?;
    Ok(json(StatusCode::OK, &*record))
}

/// Resumes it.
pub(super) async fn resume(State(node): Shared, caller: Caller, PathOf(id): PathOf<String>) -> Answer {
    let record = caller.find(&node, &id)?.resume().await?;
    Ok(json(StatusCode::OK, &*record))
}

pub(super) async fn logs(
    State(node): Shared,
    caller: Caller,
    PathOf(id): PathOf<String>,
) -> Answer<Response> {
    Ok(ndjson(Body::from(caller.find(&node, &id)?.events.ndjson())))
}
