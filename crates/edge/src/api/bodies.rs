//! Bodies that are streams: a file or a pipe out, a body into one.
//!
//! A thread is held only while the disk is read or written, never while a caller or a file child is
//! waited for: a short channel joins the disk to the connection, and a pipe is read and written without
//! blocking. Chunks are handed over whole and never copied.

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
use crate::guest::pipe::Pipe;
use crate::sandbox::{Entered, Handle};

/// Bytes read at once.
const READ_CHUNK: usize = 512 * 1024;
/// Chunks between the disk and the connection: one being sent, one waiting, one being read.
const DEPTH: usize = 2;
/// Files up to this are read in one piece.
const SMALL_MAX: u64 = 256 * 1024;
/// Chunks of an upload that wait for the disk. They are some hundred KiB each.
const UPLOAD_DEPTH: usize = 4;

/// A part of a file that is read from its start on.
pub(super) struct Source {
    fd: OwnedFd,
    at: u64,
    /// What is left of a length that was promised; `None` reads to the end, of a file whose size means
    /// nothing (`/proc`).
    left: Option<u64>,
}

impl Source {
    /// Exactly `length` bytes from `from` on; ending early is an error.
    pub(super) fn exactly(fd: OwnedFd, from: u64, length: u64) -> Self {
        Self { fd, at: from, left: Some(length) }
    }

    /// All that comes from `from` on.
    pub(super) fn to_end(fd: OwnedFd, from: u64) -> Self {
        Self { fd, at: from, left: None }
    }

    /// The next chunk, empty at the end. Blocks.
    fn next(&mut self) -> io::Result<Bytes> {
        let max =
            self.left.map_or(READ_CHUNK, |left| usize::try_from(left).unwrap_or(usize::MAX).min(READ_CHUNK));
        if max == 0 {
            return Ok(Bytes::new());
        }
        let mut chunk = Vec::with_capacity(max);
        loop {
            match rustix::io::pread(&self.fd, rustix::buffer::spare_capacity(&mut chunk), self.at) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if chunk.is_empty() && self.left.is_some() {
            // The head promised a length; the connection must break, or the caller would wait.
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file was shortened while it was read",
            ));
        }
        self.at += chunk.len() as u64;
        self.left = self.left.map(|left| left - chunk.len() as u64);
        Ok(chunk.into())
    }

    /// Reads while the channel takes chunks at once. Blocks for the disk alone. True: there may be more.
    fn burst(&mut self, sender: &mpsc::Sender<io::Result<Bytes>>) -> bool {
        while sender.capacity() > 0 {
            let chunk = self.next();
            let more = chunk.as_ref().is_ok_and(|chunk| !chunk.is_empty());
            let ends = chunk.as_ref().is_ok_and(Bytes::is_empty);
            // The one sender: there was room. Else nobody listens any more.
            if ends || sender.try_send(chunk).is_err() || !more {
                return false;
            }
        }
        true
    }

    /// All of it, in one piece. Blocks.
    fn whole(mut self) -> io::Result<Vec<u8>> {
        let mut whole = Vec::new();
        loop {
            let chunk = self.next()?;
            match chunk.is_empty() {
                true => return Ok(whole),
                false if whole.is_empty() => whole = chunk.into(),
                false => whole.extend_from_slice(&chunk),
            }
        }
    }
}

/// Does something with a file of a sandbox on a thread, of which one sandbox has but a few at once.
async fn on_disk<T: Send + 'static>(
    handle: &Handle,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let _turn = handle.disk_threads.acquire().await.map_err(io::Error::other)?;
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

fn unreadable(error: &io::Error) -> ApiError {
    ApiError::new(ErrorKind::Internal, format!("the file cannot be read: {error}"))
}

/// A body of `length` bytes of a file. The sandbox stays in use until it is sent.
///
/// # Errors
/// A small file that cannot be read; a large one breaks the connection instead.
pub(super) async fn of_file(
    entered: Arc<Entered>,
    fd: OwnedFd,
    from: u64,
    length: u64,
) -> Result<Body, ApiError> {
    let source = Source::exactly(fd, from, length);
    if length > SMALL_MAX {
        return Ok(Body::from_stream(chunks(entered, source)));
    }
    let whole = on_disk(&entered.handle, || source.whole()).await.flatten().map_err(|e| unreadable(&e))?;
    entered.handle.traffic.count_out(whole.len());
    Ok(Body::from(whole))
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
    let mut source = Source::to_end(fd, from);
    let read = on_disk(&entered.handle, move || source.next().map(|chunk| (chunk, source)));
    let (first, rest) = read.await.flatten().map_err(|e| unreadable(&e))?;
    if first.is_empty() {
        return Ok(Body::empty());
    }
    entered.handle.traffic.count_out(first.len());
    let first = futures_util::stream::iter([Ok(first)]);
    Ok(Body::from_stream(first.chain(chunks(entered, rest))))
}

/// The chunks of a file.
fn chunks(entered: Arc<Entered>, source: Source) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(DEPTH);
    tokio::spawn(read_ahead(Arc::clone(&entered.handle), source, sender));
    futures_util::stream::unfold((receiver, entered), |(mut receiver, entered)| async move {
        let chunk: io::Result<Bytes> = receiver.recv().await?;
        if let Ok(bytes) = &chunk {
            entered.handle.traffic.count_out(bytes.len());
        }
        Some((chunk, (receiver, entered)))
    })
}

/// Keeps the channel full for as long as somebody reads it.
async fn read_ahead(handle: Arc<Handle>, mut source: Source, sender: mpsc::Sender<io::Result<Bytes>>) {
    // Room first: no thread waits for a slow caller. The permit itself is given back at once.
    while sender.reserve().await.is_ok() {
        let into = sender.clone();
        let read = on_disk(&handle, move || {
            let more = source.burst(&into);
            (source, more)
        });
        match read.await {
            Ok((rest, true)) => source = rest,
            Ok((_, false)) => return,
            Err(error) => {
                let _ = sender.send(Err(error)).await;
                return;
            }
        }
    }
}

/// The chunks of a pipe.
pub(super) fn of_pipe(
    entered: Arc<Entered>,
    pipe: Pipe,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    futures_util::stream::unfold(Some((pipe, entered)), |state| async move {
        let (pipe, entered) = state?;
        match pipe.read(READ_CHUNK).await {
            Ok(chunk) if chunk.is_empty() => None,
            Ok(chunk) => {
                entered.handle.traffic.count_out(chunk.len());
                Some((Ok(chunk), Some((pipe, entered))))
            }
            Err(error) => Some((Err(error), None)),
        }
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

/// The next bytes of a body that is going into a sandbox; `None` at its end.
async fn next_of(entered: &Entered, body: &mut Body) -> Result<Option<Bytes>, UploadError> {
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Err(UploadError::Caller) };
        let Ok(bytes) = frame.into_data() else { continue };
        entered.handle.traffic.count_in(bytes.len());
        return Ok(Some(bytes));
    }
    Ok(None)
}

/// Passes a body into a pipe.
///
/// # Errors
/// The caller went away, or the pipe failed.
pub(super) async fn into_pipe(entered: &Entered, mut body: Body, pipe: &Pipe) -> Result<(), UploadError> {
    while let Some(bytes) = next_of(entered, &mut body).await? {
        pipe.write_all(&bytes).await.map_err(UploadError::Sink)?;
    }
    Ok(())
}

/// A body's bytes, counted; a caller that goes away is an error that [`is_caller`] knows.
pub(super) fn counted(
    entered: Arc<Entered>,
    body: Body,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    futures_util::stream::try_unfold((entered, body), |(entered, mut body)| async move {
        match next_of(&entered, &mut body).await {
            Ok(next) => Ok(next.map(|bytes| (bytes, (entered, body)))),
            Err(UploadError::Sink(error)) => Err(error),
            Err(UploadError::Caller) => Err(io::Error::other(CallerGone)),
        }
    })
}

#[derive(Debug, thiserror::Error)]
#[error("the caller went away")]
struct CallerGone;

/// The error is that the caller of an upload went away.
pub(super) fn is_caller(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<CallerGone>())
}

/// Passes a body into a file, from an offset on.
///
/// # Errors
/// The caller went away, or the file cannot be written.
pub(super) async fn into_file(
    entered: &Entered,
    mut body: Body,
    fd: OwnedFd,
    at: u64,
) -> Result<(), UploadError> {
    let (sender, receiver) = mpsc::channel(UPLOAD_DEPTH);
    let writer = tokio::spawn(write_behind(Arc::clone(&entered.handle), fd, at, receiver));
    // A cut body drops the channel with what waits in it; what was written counts only when it is committed.
    while let Some(bytes) = next_of(entered, &mut body).await? {
        // A writer that ended early has its reason; it is asked below.
        if sender.send(bytes).await.is_err() {
            break;
        }
    }
    drop(sender);
    writer.await.map_err(io::Error::other).flatten().map_err(UploadError::Sink)
}

/// Writes what comes. A thread is held while there is something to write.
async fn write_behind(
    handle: Arc<Handle>,
    fd: OwnedFd,
    mut at: u64,
    mut chunks: mpsc::Receiver<Bytes>,
) -> io::Result<()> {
    let fd = Arc::new(fd);
    while let Some(first) = chunks.recv().await {
        let fd = Arc::clone(&fd);
        let written = on_disk(&handle, move || {
            let mut next = Some(first);
            while let Some(chunk) = next {
                write_at(&fd, &chunk, at)?;
                at += chunk.len() as u64;
                next = chunks.try_recv().ok();
            }
            Ok((chunks, at))
        });
        (chunks, at) = written.await.flatten()?;
    }
    Ok(())
}

fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            Ok(wrote) => {
                bytes = &bytes[wrote..];
                at += wrote as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
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
            io::ErrorKind::TimedOut => stood_still(&error),
            _ => internal("the content could not be written into the sandbox", &error),
        },
    }
}

/// The file child made no progress.
pub(super) fn stood_still(error: &io::Error) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, error.to_string()).hint(
        "something in the sandbox starves or stops it; look at its processes, raise its limits, or stop it",
    )
}
