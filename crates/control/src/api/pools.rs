//! Pools of nodes, and bringing to one what it is to take over with.

mod plan;
mod syncing;

use std::convert::Infallible;

use axum::RequestExt;
use axum::body::Body;
use axum::extract::Path;
use dsec_iam::{Accessed, IamError};
use dsec_model::placement::Pools as Allowed;
use dsec_model::{ErrorKind, PoolName};
use dsec_proto::rest::{
    ACCESSES_KEPT_DAYS, ACCESSES_SINCE_DAYS, Pool, PoolBurst, PoolContent, PoolList, PoolSyncEvent,
    PoolSyncRequest,
};
use http::StatusCode;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::call::{bad_id, malformed_path, parsed};
use super::identities::{Acting, answer};
use super::{Call, system};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::pools::today;
use crate::watcher::PoolView;
use syncing::Syncing;

/// Events that wait for a caller who reads slowly.
const EVENTS_MAX: usize = 16;

/// The pools of nodes: how full they are, and what was brought to them.
#[utoipa::path(get, path = "/v1/pools", operation_id = "list_pools", tag = "nodes",
    responses((status = 200, description = "The pools of which some node has said that it is, by name.", body = PoolList)))]
pub async fn list(call: Call) -> Reply {
    let app = &call.app;
    app.nodes.watched.gathered().await;
    let accesses = app.iam.accesses(first_day(ACCESSES_SINCE_DAYS)).await?;
    let mut pools = Vec::new();
    for view in app.nodes.watched.pools() {
        pools.push(shown(app, view, &accesses).await?);
    }
    answer(StatusCode::OK, &PoolList { pools })
}

/// The first of so many days of which today is the last.
fn first_day(days: u64) -> u64 {
    (today() + 1).saturating_sub(days)
}

async fn shown(app: &App, view: PoolView, accesses: &[Accessed]) -> Result<Pool, IamError> {
    let PoolView { name, nodes, answering, filled } = view;
    let names = nodes.iter().filter_map(|at| app.nodes.at(*at)).map(|node| node.name().to_string());
    let burst = app.pools.burst().filter(|burst| burst.pool == name).map(|burst| PoolBurst {
        above: burst.above,
        share: burst.share,
        home_utilisation: app.nodes.watched.filled(Allowed::AllBut(&name)).utilisation(),
    });
    let set = app.pools.set_of(app, &name).await?;
    let synced = (set.version > 0).then(|| PoolContent {
        layers: set.layers.len() as u64,
        bytes: set.bytes,
        budget_bytes: set.budget,
        synced_ms: Some(set.synced_ms).filter(|ms| *ms > 0),
        accesses: accesses.iter().map(|accessed| accessed.count).sum(),
        covered: app.pools.covered(&name, &set, accesses),
    });
    Ok(Pool {
        nodes: names.collect(),
        answering: answering.len() as u64,
        memory_used_mib: filled.memory_used_mib,
        memory_mib: filled.memory_mib,
        sandboxes: filled.sandboxes,
        sandboxes_max: filled.sandboxes_max,
        utilisation: filled.utilisation(),
        burst,
        synced,
        name,
    })
}

/// Chooses what a pool has ahead of time, by what creates asked for, and brings it to all its nodes that answer.
///
/// Greatest coverage first within the budget. What falls out of the choice is not of the pool any more before anything is brought; each
/// layer is of it once it is whole on every node. Answers a line of JSON (`PoolSyncEvent`) for each step; the last is `done` or
/// `error`. Ends when the caller hangs up, or when another sync of the pool begins.
#[utoipa::path(post, path = "/v1/pools/{pool}/sync", operation_id = "sync_pool", tag = "nodes",
    params(("pool" = String, Path, description = "The pool's name.")),
    request_body = PoolSyncRequest,
    responses((status = 200, description = "How it goes, a line each.", body = PoolSyncEvent, content_type = "application/x-ndjson")))]
pub async fn sync(mut call: Call) -> Reply {
    let Path(pool) = call.request.extract_parts::<Path<String>>().await.map_err(malformed_path)?;
    let pool: PoolName = pool.parse().map_err(bad_id)?;
    let (acting, body) = Acting::of(call).await?;
    let request: PoolSyncRequest = parsed(&body)?;
    let days = request.since_days.unwrap_or(ACCESSES_SINCE_DAYS);
    if !(1..=ACCESSES_KEPT_DAYS).contains(&days) {
        let message = format!(
            "since_days is {days}; it must be 1 to {ACCESSES_KEPT_DAYS}: older accesses are not kept"
        );
        return Err(
            Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": "since_days" }))
        );
    }
    let syncing = Syncing::new(&acting, pool, &request, first_day(days)).await?;
    if !request.dry_run {
        acting.app.iam.note(acting.did(), "pool.sync", syncing.pool().as_str()).await?;
    }
    let (events, mut told) = mpsc::channel(EVENTS_MAX);
    let task = AbortOnDropHandle::new(tokio::spawn(async move {
        let last = match syncing.run(&events).await {
            Ok(synced) => PoolSyncEvent::Done { synced: Box::new(synced) },
            Err(failure) => PoolSyncEvent::Error { error: *failure.0.0 },
        };
        // Who hung up hears nothing.
        let _ = events.send(last).await;
    }));
    let lines = futures_util::stream::poll_fn(move |context| {
        let _is_held = &task;
        told.poll_recv(context).map(|event| event.map(|event| Ok::<_, Infallible>(system::line(&event))))
    });
    Ok(system::text("application/x-ndjson", Body::from_stream(lines)))
}
