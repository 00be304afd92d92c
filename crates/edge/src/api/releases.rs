//! Which programs the node runs, and changes of them and of its configuration.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use dsec_model::ErrorKind;
use dsec_proto::rest::{
    ApiError, ChangeBegun, EndTrialRequest, RELEASE_BYTES_MAX, ReleaseName, StoredRelease, TryConfigRequest,
    TryReleaseRequest,
};
use http_body_util::BodyExt as _;
use tokio::io::AsyncWriteExt as _;

use super::nodes::is_this;
use super::{Answer, Json, PathOf, Shared, json};
use crate::error::{internal, invalid, invalid_field};
use crate::node::Node;
use crate::release::trial::After;

pub(super) async fn get(State(node): Shared, PathOf(name): PathOf<String>) -> Answer {
    is_this(&node, &name)?;
    Ok(json(StatusCode::OK, &node.releases.status(&node.instance)))
}

/// Takes a release in. Nothing runs it yet.
pub(super) async fn put(
    State(node): Shared,
    PathOf((name, release)): PathOf<(String, String)>,
    body: Body,
) -> Answer {
    is_this(&node, &name)?;
    let release: ReleaseName =
        release.parse().map_err(|error| invalid_field("release", format!("{error}")))?;
    if node.releases.has(&release) {
        return Ok(json(StatusCode::OK, &StoredRelease { release, was_there: true }));
    }
    let draft = node.releases.draft()?;
    let archive = draft.path().join("archive");
    receive(body, &archive).await?;
    let kept = tokio::task::spawn_blocking(move || node.releases.store(&release, &draft, &archive));
    let stored = kept.await.map_err(|e| internal("taking a release in broke off", &e))??;
    Ok(json(StatusCode::OK, &stored))
}

async fn receive(mut body: Body, archive: &std::path::Path) -> Result<(), ApiError> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            ApiError::new(ErrorKind::ResourceExhausted, "the node's disk has no room for the release")
                .hint("free some space where its state directory lies")
        }
        _ => internal("the release cannot be kept", &error),
    };
    let (mut file, mut left) =
        (tokio::fs::File::create_new(archive).await.map_err(failed)?, RELEASE_BYTES_MAX);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| invalid("the request's body ended before its length was reached"))?;
        let Ok(bytes) = frame.into_data() else { continue };
        left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
            ApiError::new(
                ErrorKind::TooLarge,
                format!("the release is larger than {RELEASE_BYTES_MAX} bytes"),
            )
        })?;
        file.write_all(&bytes).await.map_err(failed)?;
    }
    file.flush().await.map_err(failed)
}

pub(super) async fn try_release(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    Json(request): Json<TryReleaseRequest>,
) -> Answer {
    is_this(&node, &name)?;
    let begun = node.releases.try_programs(&request, sandboxes(&node)).await?;
    Ok(hand_on(node, &begun, begun.changes))
}

pub(super) async fn try_config(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    Json(request): Json<TryConfigRequest>,
) -> Answer {
    is_this(&node, &name)?;
    let begun = node.releases.try_config(&request, sandboxes(&node)).await?;
    Ok(hand_on(node, &begun, begun.changes && !request.only_look))
}

pub(super) async fn end_trial(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    Json(request): Json<EndTrialRequest>,
) -> Answer {
    is_this(&node, &name)?;
    let ending = Arc::clone(&node);
    let ended = tokio::task::spawn_blocking(move || ending.releases.end_trial(&request));
    let after = ended.await.map_err(|e| internal("ending a trial broke off", &e))??;
    let status = node.releases.status(&node.instance);
    if after == After::Become {
        tokio::spawn(async move { node.hand_on().await });
    }
    Ok(json(StatusCode::OK, &status))
}

/// The sandboxes that an edge which takes over should find.
fn sandboxes(node: &Node) -> u64 {
    node.registry.living().len() as u64
}

/// Answers, and then becomes what is tried. A caller that hangs up changes nothing of it.
fn hand_on(node: Arc<Node>, begun: &ChangeBegun, changes: bool) -> axum::response::Response {
    if changes {
        tokio::spawn(async move { node.hand_on().await });
    }
    json(StatusCode::OK, begun)
}
