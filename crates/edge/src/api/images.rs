//! Images.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use bytes::Bytes;
use dsec_image::ImageName;
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, ImageList, ImportEvent};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::{Answer, Params, PathOf, Shared, json, ndjson};
use crate::error::{internal, invalid, no_room_for_image};
use crate::ids;
use crate::images::{UPLOAD, parse_name};
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
    Ok(json(StatusCode::OK, &ImageList { images: node.images.list() }))
}

pub(super) async fn get(State(node): Shared, PathOf(name): PathOf<String>) -> Answer {
    Ok(json(StatusCode::OK, &node.images.get(&name)?))
}

pub(super) async fn remove(State(node): Shared, PathOf(name): PathOf<String>) -> Answer<StatusCode> {
    let removed = tokio::task::spawn_blocking(move || node.images.remove(&name));
    removed.await.map_err(|e| internal("removing the image broke off", &e))??;
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
    let name = parse_name(&name)?;
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
    tokio::task::spawn_blocking(move || run(&node, &name, &upload, &source, &lines));
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
    let dir = node.images.uploads();
    let upload = Upload { path: dir.join(ids::request()) };
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
        file.write_all(&bytes).await.map_err(failed)?;
    }
    file.flush().await.map_err(failed)?;
    if total == 0 {
        return Err(invalid("the body is empty; send the image's archive"));
    }
    Ok(upload)
}

fn run(node: &Arc<Node>, name: &ImageName, upload: &Upload, source: &str, lines: &mpsc::Sender<ImportEvent>) {
    let mut last = Instant::now();
    let mut progress = |now: dsec_image::ImportProgress| {
        if last.elapsed() >= PROGRESS_EVERY {
            last = Instant::now();
            let _ = lines.try_send(ImportEvent::Progress { files: now.files, bytes: now.source_bytes });
        }
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        node.images.import(name, &upload.path, source, &mut progress)
    }));
    let event = match result {
        Ok(Ok(image)) => ImportEvent::Done { image },
        Ok(Err(error)) => ImportEvent::Error { error: *error.0 },
        Err(_) => {
            tracing::error!(image = %name, "an import panicked");
            let error = ApiError::new(ErrorKind::Internal, "the import met a defect in the edge");
            ImportEvent::Error { error: *error.0 }
        }
    };
    let _ = lines.blocking_send(event);
}
