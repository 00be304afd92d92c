//! Images, and layers of every other kind.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use dsec_image::layer::LayerKind;
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, ImageList, ImportEvent, PullRequest};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::{Answer, Caller, Json, Params, PathOf, Shared, json, ndjson};
use crate::error::{internal, invalid, no_room_for_image};
use crate::ids;
use crate::layers::{Import, Origin, Place, Pull, Turn, UPLOAD, parse_kind, parse_name, room_for};
use crate::node::Node;

/// How often the disk is looked at, bytes of upload.
const LOOK_EVERY: u64 = 64 << 20;
/// Least time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// How often a caller hears that an import waits for its turn.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Lines that may wait for the caller; a full queue drops progress, never the result.
const LINES: usize = 16;
/// Longest `source`, bytes.
const SOURCE_MAX: usize = 1024;

pub(super) async fn list(State(node): Shared, caller: Caller) -> Answer {
    list_kind(&node, &caller, LayerKind::Base).await
}

pub(super) async fn list_layers(State(node): Shared, caller: Caller, PathOf(kind): PathOf<String>) -> Answer {
    list_kind(&node, &caller, parse_kind(&kind)?).await
}

async fn list_kind(node: &Node, caller: &Caller, kind: LayerKind) -> Answer {
    let mut images = node.layers.list(kind).await?;
    for image in &mut images {
        caller.leave_seen(node, &mut image.used_by);
    }
    Ok(json(StatusCode::OK, &ImageList { images }))
}

pub(super) async fn get(State(node): Shared, caller: Caller, PathOf(name): PathOf<String>) -> Answer {
    get_of_kind(&node, &caller, LayerKind::Base, &name).await
}

pub(super) async fn get_layer(
    State(node): Shared,
    caller: Caller,
    PathOf((kind, name)): PathOf<(String, String)>,
) -> Answer {
    get_of_kind(&node, &caller, parse_kind(&kind)?, &name).await
}

async fn get_of_kind(node: &Node, caller: &Caller, kind: LayerKind, name: &str) -> Answer {
    let mut image = node.layers.get(kind, name).await?;
    caller.leave_seen(node, &mut image.used_by);
    Ok(json(StatusCode::OK, &image))
}

pub(super) async fn remove(
    State(node): Shared,
    caller: Caller,
    PathOf(name): PathOf<String>,
) -> Answer<StatusCode> {
    node.layers.remove(LayerKind::Base, &name, &|id| caller.sees(&node, id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remove_layer(
    State(node): Shared,
    caller: Caller,
    PathOf((kind, name)): PathOf<(String, String)>,
) -> Answer<StatusCode> {
    node.layers.remove(parse_kind(&kind)?, &name, &|id| caller.sees(&node, id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ImportParams {
    source: Option<String>,
}

/// An upload on disk, removed when dropped.
struct Upload {
    path: PathBuf,
    /// BLAKE3 of it.
    digest: String,
}

impl Drop for Upload {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

pub(super) async fn import(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    Params(params): Params<ImportParams>,
    body: Body,
) -> Answer {
    import_kind(node, LayerKind::Base, &name, params, body).await
}

pub(super) async fn import_layer(
    State(node): Shared,
    PathOf((kind, name)): PathOf<(String, String)>,
    Params(params): Params<ImportParams>,
    body: Body,
) -> Answer {
    import_kind(node, parse_kind(&kind)?, &name, params, body).await
}

async fn import_kind(
    node: Arc<Node>,
    kind: LayerKind,
    name: &str,
    params: ImportParams,
    body: Body,
) -> Answer {
    let name = parse_name(name)?;
    let source = params.source.unwrap_or_else(|| UPLOAD.to_owned());
    if source.len() > SOURCE_MAX {
        return Err(invalid(format!("source has {} bytes; {SOURCE_MAX} is the most", source.len())).into());
    }
    refuse_when_draining(&node)?;
    let place = node.layers.imports.enter()?;
    let upload = receive(&node, body).await?;
    Ok(start(Some(place), move |lines| {
        let origin = Origin::Archive { path: &upload.path, digest: upload.digest.clone(), source };
        run(&node, &Import { kind, name, origin }, lines);
    }))
}

pub(super) async fn pull(
    State(node): Shared,
    PathOf(name): PathOf<String>,
    Json(request): Json<PullRequest>,
) -> Answer {
    pull_kind(node, LayerKind::Base, &name, request)
}

pub(super) async fn pull_layer(
    State(node): Shared,
    PathOf((kind, name)): PathOf<(String, String)>,
    Json(request): Json<PullRequest>,
) -> Answer {
    pull_kind(node, parse_kind(&kind)?, &name, request)
}

fn pull_kind(node: Arc<Node>, kind: LayerKind, name: &str, request: PullRequest) -> Answer {
    let name = parse_name(name)?;
    let pull = Pull::new(request, node.config.registries.clone())?;
    refuse_when_draining(&node)?;
    let permit = node.layers.begin_pull()?;
    Ok(start(None, move |lines| {
        run(&node, &Import { kind, name, origin: Origin::Registry(&pull) }, lines);
        drop(permit);
    }))
}

fn refuse_when_draining(node: &Node) -> Result<(), ApiError> {
    if node.is_draining() {
        return Err(ApiError::new(ErrorKind::Unavailable, "the node is going down and takes no image"));
    }
    Ok(())
}

/// Starts an import, at its turn if it has a place in the queue. It goes to its end with or without its caller; the answer is
/// its lines.
fn start(place: Option<Place>, import: impl FnOnce(&mpsc::Sender<ImportEvent>) + Send + 'static) -> Response {
    let (lines, receiver) = mpsc::channel(LINES);
    tokio::spawn(async move {
        let turn = match place {
            Some(place) => Some(wait_for_turn(place, &lines).await),
            None => None,
        };
        tokio::task::spawn_blocking(move || {
            import(&lines);
            drop(turn);
        });
    });
    let body = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let event: ImportEvent = receiver.recv().await?;
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), receiver))
    });
    ndjson(Body::from_stream(body))
}

/// Waits for a turn, and lets the caller hear now and then that it does: connections on the way stay open.
async fn wait_for_turn(place: Place, lines: &mpsc::Sender<ImportEvent>) -> Turn {
    let mut turn = std::pin::pin!(place.turn());
    loop {
        if let Ok(turn) = tokio::time::timeout(SIGN_OF_LIFE, &mut turn).await {
            return turn;
        }
        let waits =
            ImportEvent::Progress { files: 0, bytes: 0, fetched_bytes: None, fetch_bytes_total: None };
        let _ = lines.try_send(waits);
    }
}

/// Takes the archive in, for as long as the disk has room.
async fn receive(node: &Node, mut body: Body) -> Result<Upload, ApiError> {
    let mut upload = Upload { path: node.layers.uploads().join(ids::request()), digest: String::new() };
    let mut hash = blake3::Hasher::new();
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => no_room_for_image(&e),
        _ => internal("the upload cannot be kept", &e),
    };
    let mut file = tokio::fs::File::create(&upload.path).await.map_err(failed)?;
    file.set_max_buf_size(LOOK_EVERY as usize / 64);
    let (mut since, mut total) = (LOOK_EVERY, 0u64);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| invalid("the request's body ended before its length was reached"))?;
        let Ok(bytes) = frame.into_data() else { continue };
        since += bytes.len() as u64;
        total += bytes.len() as u64;
        if since >= LOOK_EVERY {
            since = 0;
            room_for(&upload.path, LOOK_EVERY).map_err(failed)?;
        }
        hash.update(&bytes);
        file.write_all(&bytes).await.map_err(failed)?;
    }
    file.flush().await.map_err(failed)?;
    if total == 0 {
        return Err(invalid("the body is empty; send the image's archive"));
    }
    upload.digest = format!("blake3:{}", hash.finalize().to_hex());
    Ok(upload)
}

fn run(node: &Arc<Node>, asked: &Import<'_>, lines: &mpsc::Sender<ImportEvent>) {
    let mut last = Instant::now();
    let fetched = match &asked.origin {
        Origin::Registry(pull) => Some(pull.fetched()),
        Origin::Archive { .. } => None,
    };
    let mut progress = |now: dsec_image::ImportProgress| {
        if last.elapsed() >= PROGRESS_EVERY {
            last = Instant::now();
            let (fetched_bytes, fetch_bytes_total) = fetched.as_ref().map(|fetched| fetched.now()).unzip();
            let (files, bytes) = (now.files, now.source_bytes);
            let _ = lines.try_send(ImportEvent::Progress { files, bytes, fetched_bytes, fetch_bytes_total });
        }
    };
    let result =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| node.layers.import(asked, &mut progress)));
    let event = match result {
        Ok(Ok(image)) => ImportEvent::Done { image: Box::new(image) },
        Ok(Err(error)) => ImportEvent::Error { error: *error.0 },
        Err(_) => {
            tracing::error!(image = %asked.name, "an import panicked");
            let error = ApiError::new(ErrorKind::Internal, "the import met a defect in the edge");
            ImportEvent::Error { error: *error.0 }
        }
    };
    let _ = lines.blocking_send(event);
}
