//! Images, and layers of every other kind.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use bytes::Bytes;
use dsec_image::layer::{LayerKind, LayerRef};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, ImageList, ImportEvent};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::{Answer, Params, PathOf, Shared, json, ndjson};
use crate::error::{internal, invalid, no_room_for_image};
use crate::ids;
use crate::layers::{Import, UPLOAD, parse_name};
use crate::node::Node;

/// Disk that an upload leaves free, bytes: sandboxes write while it runs.
const DISK_RESERVE: u64 = 512 << 20;
/// How often the disk is looked at, bytes of upload.
const LOOK_EVERY: u64 = 64 << 20;
/// Least time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Lines that may wait for the caller; a full queue drops progress, never the result.
const LINES: usize = 16;
/// Longest `source`, bytes.
const SOURCE_MAX: usize = 1024;

pub(super) async fn list(State(node): Shared) -> Answer {
    list_kind(&node, LayerKind::Base).await
}

pub(super) async fn list_layers(State(node): Shared, PathOf(kind): PathOf<String>) -> Answer {
    list_kind(&node, parse_kind(&kind)?).await
}

async fn list_kind(node: &Node, kind: LayerKind) -> Answer {
    Ok(json(StatusCode::OK, &ImageList { images: node.layers.list(kind).await? }))
}

pub(super) async fn get(State(node): Shared, PathOf(name): PathOf<String>) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.get(LayerKind::Base, &name).await?))
}

pub(super) async fn get_layer(State(node): Shared, PathOf((kind, name)): PathOf<(String, String)>) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.get(parse_kind(&kind)?, &name).await?))
}

pub(super) async fn remove(State(node): Shared, PathOf(name): PathOf<String>) -> Answer<StatusCode> {
    node.layers.remove(LayerKind::Base, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remove_layer(
    State(node): Shared,
    PathOf((kind, name)): PathOf<(String, String)>,
) -> Answer<StatusCode> {
    node.layers.remove(parse_kind(&kind)?, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) fn parse_kind(kind: &str) -> Result<LayerKind, ApiError> {
    LayerKind::ALL.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| {
        let kinds = LayerKind::ALL.map(LayerKind::as_str).join(", ");
        invalid(format!("{kind:?} is no kind of layer; there are: {kinds}"))
    })
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
    if node.is_draining() {
        return Err(ApiError::new(ErrorKind::Unavailable, "the node is going down and takes no image").into());
    }
    let upload = receive(&node, body).await?;
    let (lines, receiver) = mpsc::channel(LINES);
    // From here it goes to its end, with or without its caller.
    tokio::task::spawn_blocking(move || run(&node, kind, name, &upload, source, &lines));
    let body = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let event: ImportEvent = receiver.recv().await?;
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), receiver))
    });
    Ok(ndjson(Body::from_stream(body)))
}

/// Takes the archive in, for as long as the disk has room.
async fn receive(node: &Node, mut body: Body) -> Result<Upload, ApiError> {
    let dir = node.layers.uploads();
    let mut upload = Upload { path: dir.join(ids::request()), digest: String::new() };
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
            let fs = rustix::fs::statvfs(&dir).map_err(|e| failed(e.into()))?;
            if fs.f_bavail * fs.f_frsize < DISK_RESERVE + LOOK_EVERY {
                return Err(no_room_for_image(&std::io::Error::from(std::io::ErrorKind::StorageFull)));
            }
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

fn run(
    node: &Arc<Node>,
    kind: LayerKind,
    name: LayerRef,
    upload: &Upload,
    source: String,
    lines: &mpsc::Sender<ImportEvent>,
) {
    let asked = Import { kind, name, archive: &upload.path, digest: upload.digest.clone(), source };
    let mut last = Instant::now();
    let mut progress = |now: dsec_image::ImportProgress| {
        if last.elapsed() >= PROGRESS_EVERY {
            last = Instant::now();
            let _ = lines.try_send(ImportEvent::Progress { files: now.files, bytes: now.source_bytes });
        }
    };
    let result =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| node.layers.import(&asked, &mut progress)));
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
