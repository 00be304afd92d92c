//! Files of a sandbox.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::guest::{
    self, Empty, FileCall, FileListOp, FileMakeDir, FileMove, FileOp, FileRemove, FileWrite,
};
use dsec_proto::rest::{ApiError, FileInfo, FileKind, MakeDirRequest, MoveRequest};
use serde::Deserialize;

use super::bodies::{self, UploadError, upload_failed};
use super::{Answer, In, Json, Params, json};
use crate::error::invalid_field;
use crate::guest::files::{FileChild, Sink};
use crate::sandbox::Entered;
use crate::sandbox::plan::{check_path, check_user};

/// Entries of a list when nothing is said.
const LIST_DEFAULT: u64 = 10_000;
/// Most entries of a list.
const LIST_MAX: u64 = 1_000_000;
/// Most levels of a list: deeper than any path can be.
const DEPTH_MAX: u32 = 4096;
/// Permission bits, with setuid, setgid and sticky.
const MODE_MASK: u32 = 0o7777;
/// Permission bits of a new directory.
const DIR_MODE_DEFAULT: u32 = 0o755;

/// A checked call on one path.
pub(super) fn call(path: &str, user: Option<&str>, op: FileOp) -> Result<FileCall, ApiError> {
    check_path("path", path)?;
    if let Some(user) = user {
        check_user("user", user)?;
    }
    Ok(FileCall { user: user.unwrap_or_default().to_owned(), path: path.as_bytes().to_vec(), op: Some(op) })
}

/// Bytes of a path as text, and exactly where they are none.
fn text_of(bytes: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (String::from_utf8_lossy(bytes).into_owned(), Some(STANDARD.encode(bytes))),
    }
}

/// A file as callers see it.
pub(super) fn describe(info: &guest::FileInfo) -> FileInfo {
    let (path, path_base64) = text_of(&info.path);
    let kind = match info.mode & 0o170_000 {
        0o040_000 => FileKind::Directory,
        0o120_000 => FileKind::Symlink,
        0o010_000 => FileKind::Fifo,
        0o140_000 => FileKind::Socket,
        0o020_000 | 0o060_000 => FileKind::Device,
        _ => FileKind::File,
    };
    FileInfo {
        path,
        path_base64,
        kind,
        size: info.size,
        mode: info.mode & MODE_MASK,
        uid: info.uid,
        gid: info.gid,
        modified_ms: info.modified_ms,
        target: info.target.as_ref().map(|target| text_of(target).0),
    }
}

async fn one(entered: &Entered, call: FileCall) -> Result<FileInfo, ApiError> {
    let mut child = FileChild::start(entered.guest(), call).await?;
    Ok(describe(&child.info().await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReadParams {
    path: String,
    offset: Option<u64>,
    length: Option<u64>,
    user: Option<String>,
}

pub(super) async fn read(In(entered): In, Params(params): Params<ReadParams>, headers: HeaderMap) -> Answer {
    let call = call(&params.path, params.user.as_deref(), FileOp::Read(Empty {}))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    let (reply, fd) = child.regular().await?;
    let size = reply.files.first().map_or(0, |info| info.size);
    let range = match (params.offset, params.length) {
        (None, None) => headers.get(header::RANGE).and_then(|range| parse_range(range, size)),
        _ => None,
    };
    let entered = Arc::new(entered);
    let (from, length) = match range {
        Some(Range::Unsatisfiable) => {
            let mut response = super::Failure(
                ApiError::new(
                    ErrorKind::RangeNotSatisfiable,
                    format!("the file has {size} bytes and the range begins after them"),
                )
                .detail(serde_json::json!({ "field": "range", "size": size })),
            )
            .into_response();
            if let Ok(whole) = HeaderValue::try_from(format!("bytes */{size}")) {
                response.headers_mut().insert(header::CONTENT_RANGE, whole);
            }
            return Ok(response);
        }
        Some(Range::Part { from, length }) => (from, length),
        None => {
            let from = params.offset.unwrap_or(0).min(size);
            (from, params.length.unwrap_or(u64::MAX).min(size - from))
        }
    };
    if size == 0 && params.length != Some(0) {
        return Ok(raw(bodies::of_unknown_length(entered, fd, params.offset.unwrap_or(0)).await?));
    }
    let mut response = raw(bodies::of_file(entered, fd, from, length).await?);
    let head = response.headers_mut();
    head.insert(header::CONTENT_LENGTH, length.into());
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if range.is_some() {
        if let Ok(part) = HeaderValue::try_from(format!("bytes {from}-{}/{size}", from + length - 1)) {
            head.insert(header::CONTENT_RANGE, part);
        }
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

/// Raw bytes.
pub(super) fn raw(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response()
}

#[derive(Debug, PartialEq, Eq)]
enum Range {
    Part { from: u64, length: u64 },
    Unsatisfiable,
}

/// One byte range. What is not understood, several ranges among it, is ignored, as RFC 9110 allows.
fn parse_range(value: &HeaderValue, size: u64) -> Option<Range> {
    let (first, last) = value.to_str().ok()?.strip_prefix("bytes=")?.trim().split_once('-')?;
    let (from, to) = match (first.is_empty(), last.is_empty()) {
        (true, true) => return None,
        (true, false) => (size.saturating_sub(last.parse().ok()?), size),
        (false, true) => (first.parse().ok()?, size),
        (false, false) => {
            let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
            if last < first {
                return None;
            }
            (first, last.saturating_add(1).min(size))
        }
    };
    if from >= to { Some(Range::Unsatisfiable) } else { Some(Range::Part { from, length: to - from }) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WriteParams {
    path: String,
    mode: Option<String>,
    owner: Option<String>,
    #[serde(default)]
    parents: bool,
    offset: Option<u64>,
    user: Option<String>,
}

fn parse_mode(text: &str) -> Result<u32, ApiError> {
    let mode = u32::from_str_radix(text.trim_start_matches("0o"), 8).ok().filter(|mode| *mode <= MODE_MASK);
    mode.ok_or_else(|| invalid_field("mode", format!("mode is {text:?}; it must be octal, such as 0644")))
}

pub(super) async fn write(In(entered): In, Params(params): Params<WriteParams>, body: Body) -> Answer {
    if let Some(owner) = &params.owner {
        check_user("owner", owner)?;
    }
    let op = FileWrite {
        offset: params.offset,
        mode: params.mode.as_deref().map(parse_mode).transpose()?,
        owner: params.owner.unwrap_or_default(),
        parents: params.parents,
    };
    let call = call(&params.path, params.user.as_deref(), FileOp::Write(op))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    // Whatever fails here drops the child's socket, and with it the file that was being written.
    let sent = match child.sink().await? {
        Sink::File(fd) => bodies::into_file(&entered, body, fd, params.offset.unwrap_or(0)).await,
        Sink::Pipe(pipe) => bodies::into_pipe(&entered, body, &pipe).await,
    };
    match sent {
        // A child that stopped reading knows why.
        Err(UploadError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            child.info().await?;
            return Err(upload_failed(UploadError::Sink(error)).into());
        }
        sent => sent.map_err(upload_failed)?,
    }
    Ok(json(StatusCode::OK, &describe(&child.commit().await?)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoveParams {
    path: String,
    #[serde(default)]
    recursive: bool,
    user: Option<String>,
}

pub(super) async fn remove(In(entered): In, Params(params): Params<RemoveParams>) -> Answer<StatusCode> {
    let op = FileOp::Remove(FileRemove { recursive: params.recursive });
    let call = call(&params.path, params.user.as_deref(), op)?;
    FileChild::start(entered.guest(), call).await?.next_soon().await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PathParams {
    pub(super) path: String,
    pub(super) user: Option<String>,
}

pub(super) async fn stat(In(entered): In, Params(params): Params<PathParams>) -> Answer {
    let call = call(&params.path, params.user.as_deref(), FileOp::Stat(Empty {}))?;
    Ok(json(StatusCode::OK, &one(&entered, call).await?))
}

pub(super) async fn mkdir(In(entered): In, Json(request): Json<MakeDirRequest>) -> Answer {
    let mode = request.mode.unwrap_or(DIR_MODE_DEFAULT);
    if mode > MODE_MASK {
        return Err(invalid_field(
            "mode",
            format!("mode is {mode}; it must be at most {MODE_MASK} (0o7777)"),
        )
        .into());
    }
    let op = FileOp::MakeDir(FileMakeDir { parents: request.parents, mode });
    let call = call(&request.path, request.user.as_deref(), op)?;
    Ok(json(StatusCode::OK, &one(&entered, call).await?))
}

pub(super) async fn rename(In(entered): In, Json(request): Json<MoveRequest>) -> Answer {
    check_path("from", &request.from)?;
    check_path("to", &request.to)?;
    let op = FileOp::Move(FileMove { to: request.to.into_bytes(), overwrite: request.overwrite });
    let call = call(&request.from, request.user.as_deref(), op)?;
    Ok(json(StatusCode::OK, &one(&entered, call).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParams {
    path: String,
    depth: Option<u32>,
    limit: Option<u64>,
    user: Option<String>,
}

/// A list that is being told, in pieces: a million entries never stand in memory.
struct Listing {
    entered: Entered,
    child: FileChild,
    pending: Option<guest::FileReply>,
    first: bool,
}

pub(super) async fn list(In(entered): In, Params(params): Params<ListParams>) -> Answer {
    let depth = params.depth.unwrap_or(1);
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(invalid_field("depth", format!("depth is {depth}; it must be 1 to {DEPTH_MAX}")).into());
    }
    let limit = params.limit.unwrap_or(LIST_DEFAULT);
    if !(1..=LIST_MAX).contains(&limit) {
        return Err(invalid_field("limit", format!("limit is {limit}; it must be 1 to {LIST_MAX}")).into());
    }
    let op = FileOp::List(FileListOp { depth, limit });
    let call = call(&params.path, params.user.as_deref(), op)?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    // The first answer decides the status; a failure after it breaks the connection.
    let pending = Some(child.next_soon().await?.0);
    let listing = Listing { entered, child, pending, first: true };
    let body = Body::from_stream(futures_util::stream::unfold(Some(listing), next_entries));
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

async fn next_entries(listing: Option<Listing>) -> Option<(Result<Bytes, ApiError>, Option<Listing>)> {
    let mut listing = listing?;
    let reply = match listing.pending.take() {
        Some(reply) => reply,
        None => match listing.child.next_soon().await {
            Ok((reply, _)) => reply,
            Err(error) => return Some((Err(error), None)),
        },
    };
    let mut text = Vec::new();
    for info in &reply.files {
        text.extend_from_slice(if listing.first { b"{\"entries\":[" } else { b"," });
        listing.first = false;
        if let Err(error) = serde_json::to_writer(&mut text, &describe(info)) {
            return Some((Err(ApiError::new(ErrorKind::Internal, error.to_string())), None));
        }
    }
    if reply.last {
        if listing.first {
            text.extend_from_slice(b"{\"entries\":[");
        }
        text.extend_from_slice(format!("],\"truncated\":{}}}", reply.truncated).as_bytes());
    }
    listing.entered.handle.traffic.count_out(text.len());
    let rest = (!reply.last).then_some(listing);
    Some((Ok(text.into()), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str, size: u64) -> Option<Range> {
        parse_range(&HeaderValue::try_from(text).unwrap(), size)
    }

    #[test]
    fn ranges_are_those_of_rfc_9110() {
        assert_eq!(range("bytes=0-9", 100), Some(Range::Part { from: 0, length: 10 }));
        assert_eq!(range("bytes=90-", 100), Some(Range::Part { from: 90, length: 10 }));
        assert_eq!(range("bytes=-5", 100), Some(Range::Part { from: 95, length: 5 }));
        assert_eq!(range("bytes=50-1000", 100), Some(Range::Part { from: 50, length: 50 }));
        assert_eq!(range("bytes=100-", 100), Some(Range::Unsatisfiable));
        assert_eq!(range("bytes=5-1", 100), None);
        assert_eq!(range("bytes=0-1,3-4", 100), None);
        assert_eq!(range("lines=0-1", 100), None);
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(parse_mode("0644").unwrap(), 0o644);
        assert_eq!(parse_mode("4755").unwrap(), 0o4755);
        assert!(parse_mode("9").is_err() && parse_mode("17777").is_err() && parse_mode("").is_err());
    }
}
