//! Directories as tar, both ways, through a pipe to a child in the sandbox.

use std::io;
use std::sync::Arc;

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use bytes::{Bytes, BytesMut};
use dsec_proto::guest::{FileOp, FileTar};
use dsec_proto::rest::ApiError;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};
use tokio_util::io::StreamReader;

use super::bodies::{UploadError, counted, is_caller, of_pipe, upload_failed};
use super::files::{PathParams, call};
use super::{Answer, In, Params};
use crate::error::invalid;
use crate::guest::files::FileChild;
use crate::guest::pipe::Pipe;
use crate::sandbox::plan::check_user;

/// Bytes decompressed at once.
const DECOMPRESS_CHUNK: usize = 256 * 1024;
/// Bytes that tell how an archive is compressed.
const MAGIC: usize = 4;

pub(super) async fn pack(In(entered): In, Params(params): Params<PathParams>) -> Answer {
    let call = call(&params.path, params.user.as_deref(), FileOp::Tar(FileTar::default()))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    let content = of_pipe(Arc::new(entered), child.readable().await?);
    // The pipe's end alone does not say that the archive is whole; the child does.
    let verdict = futures_util::stream::once(async move {
        match child.next_soon().await {
            Ok(_) => Ok(Bytes::new()),
            Err(error) => Err(io::Error::other(error)),
        }
    });
    let body = Body::from_stream(content.chain(verdict));
    let mut response = super::files::raw(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(response)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UnpackParams {
    path: String,
    owner: Option<String>,
    user: Option<String>,
}

pub(super) async fn unpack(In(entered): In, Params(params): Params<UnpackParams>, body: Body) -> Answer {
    if let Some(owner) = &params.owner {
        check_user("owner", owner)?;
    }
    let op = FileTar { unpack: true, owner: params.owner.unwrap_or_default() };
    let call = call(&params.path, params.user.as_deref(), FileOp::Tar(op))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    let pipe = child.writable().await?;
    let sent = feed(Box::pin(StreamReader::new(counted(Arc::new(entered), body))), &pipe).await;
    // The end of the archive for the child.
    drop(pipe);
    match sent {
        Ok(()) => {}
        // The child stopped reading: it knows why.
        Err(UploadError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Err(UploadError::Sink(error)) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(damaged(&error).into());
        }
        Err(error) => return Err(upload_failed(error).into()),
    }
    let (reply, _) = child.next_soon().await?;
    Ok(super::json(StatusCode::OK, &json!({ "files": reply.count, "bytes": reply.bytes })))
}

fn damaged(error: &io::Error) -> ApiError {
    invalid(format!("the archive cannot be decompressed: {error}"))
        .hint("send a tar, plain or as gzip or zstd")
}

/// Passes an archive on, decompressed.
async fn feed(
    mut archive: impl AsyncBufRead + Send + Unpin + 'static,
    pipe: &Pipe,
) -> Result<(), UploadError> {
    let magic = peek(&mut archive).await?;
    let magic = io::Cursor::new(magic);
    let whole = AsyncReadExt::chain(magic.clone(), archive);
    match magic.get_ref()[..] {
        [0x1f, 0x8b, ..] => {
            let mut decoder = GzipDecoder::new(whole);
            decoder.multiple_members(true);
            copy(decoder, pipe).await
        }
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let mut decoder = ZstdDecoder::new(whole);
            decoder.multiple_members(true);
            copy(decoder, pipe).await
        }
        _ => pass(whole, pipe).await,
    }
}

/// The first bytes of an archive, all where there are fewer.
async fn peek(archive: &mut (impl AsyncBufRead + Unpin)) -> Result<Bytes, UploadError> {
    let mut magic = BytesMut::with_capacity(MAGIC);
    while magic.len() < MAGIC {
        let there = archive.fill_buf().await.map_err(of_body)?;
        let taken = there.len().min(MAGIC - magic.len());
        if taken == 0 {
            break;
        }
        magic.extend_from_slice(&there[..taken]);
        archive.consume(taken);
    }
    Ok(magic.freeze())
}

fn of_body(error: io::Error) -> UploadError {
    if is_caller(&error) { UploadError::Caller } else { UploadError::Sink(error) }
}

/// As it is, without a copy.
async fn pass(mut archive: impl AsyncBufRead + Unpin, pipe: &Pipe) -> Result<(), UploadError> {
    loop {
        let there = archive.fill_buf().await.map_err(of_body)?;
        let taken = there.len();
        if taken == 0 {
            return Ok(());
        }
        pipe.write_all(there).await.map_err(UploadError::Sink)?;
        archive.consume(taken);
    }
}

async fn copy(mut decoder: impl AsyncRead + Unpin, pipe: &Pipe) -> Result<(), UploadError> {
    let mut buffer = BytesMut::with_capacity(DECOMPRESS_CHUNK);
    loop {
        match decoder.read_buf(&mut buffer).await {
            Ok(0) => return Ok(()),
            Ok(_) => pipe.write_all(&buffer).await.map_err(UploadError::Sink)?,
            Err(error) if is_caller(&error) => return Err(UploadError::Caller),
            Err(error) => {
                return Err(UploadError::Sink(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
        }
        buffer.clear();
    }
}
