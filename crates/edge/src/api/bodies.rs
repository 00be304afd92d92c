//! Bodies that are streams: a descriptor out, a body into a descriptor.
//!
//! Disk and socket overlap: a thread reads or writes the descriptor, a short channel joins it to
//! the connection. Chunks are handed over whole and never copied.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::rest::ApiError;
use futures_util::{Stream, StreamExt};
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use crate::error::{internal, invalid};
use crate::sandbox::Entered;

/// Bytes read from a file at once.
pub(super) const READ_CHUNK: usize = 512 * 1024;
/// Chunks between the thread and the connection: one being sent, one waiting, one being read.
const DEPTH: usize = 2;
/// Files up to this are read in one piece, with no thread kept.
const SMALL_MAX: u64 = 256 * 1024;
/// Chunks of an upload that wait for the disk. They are some hundred KiB each.
const UPLOAD_DEPTH: usize = 4;

/// Where bytes come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Span {
    /// A part of a file; ending early is an error.
    Exactly {
        /// First byte.
        from: u64,
        /// How many.
        length: u64,
    },
    /// All that comes until the end, of a pipe or of a file whose size means nothing (`/proc`).
    ToEnd {
        /// First byte, where the descriptor has offsets.
        from: Option<u64>,
    },
}

fn read_some(fd: &OwnedFd, at: Option<u64>, max: usize) -> io::Result<Vec<u8>> {
    let mut chunk = Vec::with_capacity(max);
    loop {
        let spare = rustix::buffer::spare_capacity(&mut chunk);
        let read = match at {
            Some(offset) => rustix::io::pread(fd, spare, offset),
            None => rustix::io::read(fd, spare),
        };
        match read {
            Ok(_) => return Ok(chunk),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads a span and passes it on until it ends or nobody wants it. Blocks.
fn pump_out(fd: &OwnedFd, span: Span, mut send: impl FnMut(io::Result<Bytes>) -> bool) {
    let (mut at, mut left) = match span {
        Span::Exactly { from, length } => (Some(from), Some(length)),
        Span::ToEnd { from } => (from, None),
    };
    while left != Some(0) {
        let max = left.map_or(READ_CHUNK, |left| usize::try_from(left).unwrap_or(usize::MAX).min(READ_CHUNK));
        let chunk = match read_some(fd, at, max) {
            Ok(chunk) => chunk,
            Err(error) => {
                send(Err(error));
                return;
            }
        };
        if chunk.is_empty() {
            if left.is_some() {
                // The head promised a length; the connection must break, or the caller would wait.
                send(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file was shortened while it was read",
                )));
            }
            return;
        }
        at = at.map(|at| at + chunk.len() as u64);
        left = left.map(|left| left - chunk.len() as u64);
        if !send(Ok(chunk.into())) {
            return;
        }
    }
}

/// A body of a descriptor's bytes. The sandbox stays in use until it is sent.
///
/// # Errors
/// A small file that cannot be read; a large one breaks the connection instead.
pub(super) async fn from_fd(entered: Arc<Entered>, fd: OwnedFd, span: Span) -> Result<Body, ApiError> {
    if let Span::Exactly { length, .. } = span
        && length <= SMALL_MAX
    {
        let read = tokio::task::spawn_blocking(move || {
            let mut whole = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
            let mut failed = None;
            pump_out(&fd, span, |chunk| match chunk {
                Ok(bytes) if whole.is_empty() => {
                    whole = bytes.into();
                    true
                }
                Ok(bytes) => {
                    whole.extend_from_slice(&bytes);
                    true
                }
                Err(error) => {
                    failed = Some(error);
                    false
                }
            });
            failed.map_or(Ok(whole), Err)
        });
        let whole = read
            .await
            .map_err(|e| internal("reading the file broke off", &e))?
            .map_err(|e| ApiError::new(ErrorKind::Internal, format!("the file cannot be read: {e}")))?;
        entered.handle.traffic.count_out(whole.len());
        return Ok(Body::from(whole));
    }
    Ok(Body::from_stream(chunks(entered, fd, span)))
}

/// A body of a file that says it is empty: it is, or it is one of `/proc` and its end is found by
/// reading.
///
/// # Errors
/// It cannot be read.
pub(super) async fn of_unknown_length(
    entered: Arc<Entered>,
    fd: OwnedFd,
    from: u64,
) -> Result<Body, ApiError> {
    let read =
        tokio::task::spawn_blocking(move || read_some(&fd, Some(from), READ_CHUNK).map(|chunk| (chunk, fd)));
    let (first, fd) = read
        .await
        .map_err(|e| internal("reading the file broke off", &e))?
        .map_err(|e| ApiError::new(ErrorKind::Internal, format!("the file cannot be read: {e}")))?;
    if first.is_empty() {
        return Ok(Body::empty());
    }
    entered.handle.traffic.count_out(first.len());
    let rest = chunks(entered, fd, Span::ToEnd { from: Some(from + first.len() as u64) });
    let first = futures_util::stream::iter([Ok(Bytes::from(first))]);
    Ok(Body::from_stream(first.chain(rest)))
}

/// The chunks of a descriptor.
pub(super) fn chunks(
    entered: Arc<Entered>,
    fd: OwnedFd,
    span: Span,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(DEPTH);
    tokio::task::spawn_blocking(move || pump_out(&fd, span, |chunk| sender.blocking_send(chunk).is_ok()));
    futures_util::stream::unfold((receiver, entered), |(mut receiver, entered)| async move {
        let chunk: io::Result<Bytes> = receiver.recv().await?;
        if let Ok(bytes) = &chunk {
            entered.handle.traffic.count_out(bytes.len());
        }
        Some((chunk, (receiver, entered)))
    })
}

/// Why a body did not get to where it should.
#[derive(Debug)]
pub(super) enum UploadError {
    /// The caller stopped in the middle.
    Caller,
    /// The far side failed.
    Sink(io::Error),
}

/// Passes a body to `sink`, which runs on a thread of its own and reads the chunks until there are no
/// more. The sink's own result, once it has all of the body.
///
/// # Errors
/// The caller went away, or the sink failed.
pub(super) async fn into_sink<T: Send + 'static>(
    entered: &Entered,
    mut body: Body,
    sink: impl FnOnce(mpsc::Receiver<Bytes>) -> io::Result<T> + Send + 'static,
) -> Result<T, UploadError> {
    let (sender, receiver) = mpsc::channel(UPLOAD_DEPTH);
    let sink = tokio::task::spawn_blocking(move || sink(receiver));
    let mut whole = true;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            whole = false;
            break;
        };
        let Ok(bytes) = frame.into_data() else { continue };
        entered.handle.traffic.count_in(bytes.len());
        // A sink that ended early has its reason; it is asked below.
        if sender.send(bytes).await.is_err() {
            break;
        }
    }
    if !whole {
        // The sink must not take a cut body for a whole one: its channel outlives its result.
        sink.abort();
        return Err(UploadError::Caller);
    }
    drop(sender);
    match sink.await {
        Ok(result) => result.map_err(UploadError::Sink),
        Err(error) => Err(UploadError::Sink(io::Error::other(error))),
    }
}

/// Writes chunks to a descriptor, at an offset or in its own order. Blocks.
///
/// # Errors
/// The kernel's.
pub(super) fn write_chunks(
    fd: &OwnedFd,
    mut at: Option<u64>,
    mut chunks: mpsc::Receiver<Bytes>,
) -> io::Result<u64> {
    let mut total = 0;
    while let Some(chunk) = chunks.blocking_recv() {
        total += chunk.len() as u64;
        let mut rest = &chunk[..];
        while !rest.is_empty() {
            let wrote = match at {
                Some(offset) => rustix::io::pwrite(fd, rest, offset),
                None => rustix::io::write(fd, rest),
            };
            match wrote {
                Ok(wrote) => {
                    rest = &rest[wrote..];
                    at = at.map(|at| at + wrote as u64);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(total)
}

/// An upload's failure as its caller is told, for a file of a sandbox.
pub(super) fn upload_failed(error: UploadError) -> ApiError {
    match error {
        UploadError::Caller => invalid("the request's body ended before its length was reached"),
        UploadError::Sink(error) => match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                ApiError::new(ErrorKind::ResourceExhausted, "the sandbox's disk is full")
                    .hint("remove files in it, or create one with a larger disk_limit_mb")
            }
            io::ErrorKind::BrokenPipe => {
                ApiError::new(ErrorKind::Unavailable, "the sandbox stopped taking the content")
            }
            _ => internal("the content could not be written into the sandbox", &error),
        },
    }
}
