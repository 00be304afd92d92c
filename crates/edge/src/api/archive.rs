//! Directories as tar, both ways, through a pipe to a child in the sandbox.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use bytes::{Buf, Bytes};
use dsec_proto::guest::{FileOp, FileTar};
use dsec_proto::rest::ApiError;
use futures_util::StreamExt;
use serde_json::json;
use tokio::sync::mpsc;

use super::bodies::{Span, UploadError, chunks, into_sink, upload_failed, write_chunks};
use super::files::{PathParams, call};
use super::{Answer, In, Params};
use crate::error::invalid;
use crate::guest::files::FileChild;

/// Bytes that a pipe is asked to hold, so that both ends work in large pieces. The kernel's most
/// for everyone (`/proc/sys/fs/pipe-max-size`); refused, the usual 64 KiB do.
const PIPE_SIZE: usize = 1 << 20;
/// Bytes decompressed at once.
const DECOMPRESS_CHUNK: usize = 256 * 1024;
/// Largest window of a zstd frame, log2: what `zstd --long` writes at most without asking (128 MiB).
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

pub(super) async fn pack(In(entered): In, Params(params): Params<PathParams>) -> Answer {
    let call = call(&params.path, params.user.as_deref(), FileOp::Tar(FileTar { unpack: false }))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    let (_, pipe) = child.opened().await?;
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_SIZE);
    let content = chunks(Arc::new(entered), pipe, Span::ToEnd { from: None });
    // The pipe's end alone does not say that the archive is whole; the child does.
    let verdict = futures_util::stream::once(async move {
        match child.next().await {
            Ok(_) => Ok(Bytes::new()),
            Err(error) => Err(io::Error::other(error)),
        }
    });
    let body = Body::from_stream(content.chain(verdict));
    let mut response = super::files::raw(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(response)
}

pub(super) async fn unpack(In(entered): In, Params(params): Params<PathParams>, body: Body) -> Answer {
    let call = call(&params.path, params.user.as_deref(), FileOp::Tar(FileTar { unpack: true }))?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    let (_, pipe) = child.opened().await?;
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_SIZE);
    let sent = into_sink(&entered, body, move |chunks| feed(&pipe, chunks)).await;
    match sent {
        Ok(()) => {}
        // The child stopped reading: it knows why.
        Err(UploadError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Err(UploadError::Sink(error)) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(damaged(&error).into());
        }
        Err(error) => return Err(upload_failed(error).into()),
    }
    let (reply, _) = child.next().await?;
    Ok(super::json(StatusCode::OK, &json!({ "files": reply.count, "bytes": reply.bytes })))
}

fn damaged(error: &io::Error) -> ApiError {
    invalid(format!("the archive cannot be decompressed: {error}"))
        .hint("send a tar, plain or as gzip or zstd")
}

/// Passes an archive on, decompressed. Blocks.
fn feed(pipe: &OwnedFd, chunks: mpsc::Receiver<Bytes>) -> io::Result<()> {
    // The child made the pipe and may have made it non-blocking; this thread wants to wait.
    rustix::io::ioctl_fionbio(pipe, false)?;
    let mut chunks = ChunkReader { chunks, current: Bytes::new() };
    let magic = chunks.peek(4);
    let bad = |error: io::Error| match error.kind() {
        io::ErrorKind::BrokenPipe => error,
        _ => io::Error::new(io::ErrorKind::InvalidData, error),
    };
    match magic.as_slice() {
        [0x1f, 0x8b, ..] => copy(flate2::read::MultiGzDecoder::new(chunks), pipe).map_err(bad),
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let mut decoder = zstd::Decoder::new(chunks)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            copy(decoder, pipe).map_err(bad)
        }
        _ => {
            let mut sink = FdWriter(pipe);
            sink.write_all(&chunks.current)?;
            write_chunks(pipe, None, chunks.chunks).map(|_| ())
        }
    }
}

fn copy(mut from: impl Read, pipe: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; DECOMPRESS_CHUNK];
    let mut sink = FdWriter(pipe);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(got) => sink.write_all(&buffer[..got])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

struct FdWriter<'a>(&'a OwnedFd);

impl Write for FdWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A body's chunks as a reader.
struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    current: Bytes,
}

impl ChunkReader {
    /// The first `count` bytes, or all where there are fewer. They are read again afterwards.
    fn peek(&mut self, count: usize) -> Vec<u8> {
        while self.current.len() < count {
            match self.chunks.blocking_recv() {
                // Only the first few bytes of a body can be in pieces this small.
                Some(more) => self.current = [self.current.as_ref(), more.as_ref()].concat().into(),
                None => break,
            }
        }
        self.current.iter().take(count).copied().collect()
    }
}

impl Read for ChunkReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.chunks.blocking_recv() {
                Some(next) => self.current = next,
                None => return Ok(0),
            }
        }
        let count = into.len().min(self.current.len());
        self.current.split_to(count).copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}
