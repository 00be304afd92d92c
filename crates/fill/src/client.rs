//! The edge's side of the control socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_image::layer::BlobId;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout_at};

use crate::protocol::{BlobStats, Fetched, LINE_MAX, LOOK_MAX, Request, Response, Room, Stats};
use crate::trace::{Trace, TraceError};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// Pause between tries while a worker is being replaced.
const PAUSE: Duration = Duration::from_millis(5);

/// Why the fill worker did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It could not be asked.
    #[error("the fill worker at {path} does not answer")]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The last try.
        #[source]
        source: io::Error,
    },
    /// It said no.
    #[error("{message}")]
    Refused {
        /// Its words.
        message: String,
        /// Later it may work.
        again: bool,
    },
    /// It said something else.
    #[error("the fill worker answered {found}, which is no answer to that")]
    Other {
        /// What it said.
        found: String,
    },
    /// It gave a trace that is none.
    #[error("the fill worker gave a bad trace")]
    Trace(#[from] TraceError),
}

/// Where a blob can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// The file to read or mount.
    pub path: PathBuf,
    /// It is the cache's own file.
    pub direct: bool,
    /// Plain bytes.
    pub size_bytes: u64,
}

/// Talks to the worker that serves a socket, whichever that is: a call whose worker ends is repeated with the next one.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    limit: Duration,
}

macro_rules! expect {
    ($response:expr, $pattern:pat => $value:expr) => {
        match $response {
            $pattern => Ok($value),
            other => Err(ClientError::Other { found: format!("{other:?}").chars().take(200).collect() }),
        }
    };
}

impl Client {
    /// For the worker at `socket`; a call may take `limit` with all its repetitions.
    pub fn new(socket: &Path, limit: Duration) -> Self {
        Self { socket: socket.to_owned(), limit }
    }

    /// One request and its answer.
    ///
    /// # Errors
    /// Nobody answers within the limit; the worker refuses.
    pub async fn call(&self, request: &Request) -> Result<Response, ClientError> {
        let deadline = Instant::now() + self.limit;
        loop {
            let tried = timeout_at(deadline, self.try_call(request)).await;
            let source = match tried {
                Ok(Ok(Response::Error { message, again })) => {
                    return Err(ClientError::Refused { message, again });
                }
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => error,
                Err(_) => io::ErrorKind::TimedOut.into(),
            };
            if Instant::now() + PAUSE >= deadline {
                return Err(ClientError::Silent { path: self.socket.clone(), source });
            }
            sleep(PAUSE).await;
        }
    }

    async fn try_call(&self, request: &Request) -> io::Result<Response> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut answer = Vec::new();
        let mut reader = BufReader::new(stream).take(LINE_MAX as u64);
        reader.read_until(b'\n', &mut answer).await?;
        if answer.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&answer)?)
    }

    /// Makes a blob readable.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn open(&self, blob: BlobId) -> Result<Opened, ClientError> {
        expect!(self.call(&Request::Open { blob }).await?,
            Response::Opened { path, direct, size_bytes } => Opened { path, direct, size_bytes })
    }

    /// The blob is not mounted any more.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn close(&self, blob: BlobId) -> Result<(), ClientError> {
        expect!(self.call(&Request::Close { blob }).await?, Response::Done => ())
    }

    /// Nothing of the blob may be evicted, or again may.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn pin(&self, blob: BlobId, on: bool) -> Result<(), ClientError> {
        let request = if on { Request::Pin { blob } } else { Request::Unpin { blob } };
        expect!(self.call(&request).await?, Response::Done => ())
    }

    /// Brings content in ahead of demand: along a trace, or all of it.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn prefetch(&self, blob: BlobId, trace: Option<&Trace>) -> Result<(), ClientError> {
        let trace = trace.map(|trace| BASE64_STANDARD.encode(trace.encode()));
        expect!(self.call(&Request::Prefetch { blob, trace }).await?, Response::Done => ())
    }

    /// Brings content in, along a trace or all of it, and tells after `limit` at the latest how far it is: repeat it while
    /// it is not over.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn fetch(
        &self,
        blob: BlobId,
        trace: Option<&Trace>,
        limit: Duration,
    ) -> Result<Fetched, ClientError> {
        let trace = trace.map(|trace| BASE64_STANDARD.encode(trace.encode()));
        let request = Request::Fetch { blob, trace, limit_ms: limit.as_millis() as u64 };
        expect!(self.call(&request).await?, Response::Fetched(fetched) => fetched)
    }

    /// What was wanted of the blob, in order.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn trace(&self, blob: BlobId, restart: bool) -> Result<Trace, ClientError> {
        let text =
            expect!(self.call(&Request::Trace { blob, restart }).await?, Response::Trace(text) => text)?;
        let other = |_| ClientError::Other { found: "a trace that is not base64".to_owned() };
        Ok(Trace::decode(&BASE64_STANDARD.decode(text).map_err(other)?)?)
    }

    /// Takes in a blob that was made on this node, copied and checked: whether it is complete here now.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn insert(&self, blob: BlobId, file: &Path) -> Result<bool, ClientError> {
        self.bring(blob, file, false).await
    }

    /// Hands over the file of a blob that was made and hashed on this node just now; nobody may write to it any more. Whether
    /// the blob is complete here now; the file is then gone.
    ///
    /// # Errors
    /// As [`Self::call`]; the file stays.
    pub async fn hand_over(&self, blob: BlobId, file: &Path) -> Result<bool, ClientError> {
        self.bring(blob, file, true).await
    }

    async fn bring(&self, blob: BlobId, file: &Path, take: bool) -> Result<bool, ClientError> {
        let request = Request::Insert { blob, file: file.to_owned(), take };
        expect!(self.call(&request).await?, Response::Inserted { complete } => complete)
    }

    /// Takes a blob's content out: bytes that became free.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn evict(&self, blob: BlobId) -> Result<u64, ClientError> {
        expect!(self.call(&Request::Evict { blob }).await?, Response::Evicted { freed_bytes } => freed_bytes)
    }

    /// What was done, and what is here, over all blobs.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn stats(&self) -> Result<Stats, ClientError> {
        expect!(self.call(&Request::Stats).await?, Response::Stats(stats) => stats)
    }

    /// What was done for these blobs and what of them is here; nothing of those that are not known here.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn look(&self, blobs: &[BlobId]) -> Result<Vec<BlobStats>, ClientError> {
        let mut known = Vec::new();
        for part in blobs.chunks(LOOK_MAX) {
            let request = Request::Look { blobs: part.to_vec() };
            known.extend(expect!(self.call(&request).await?, Response::Looked(known) => known)?);
        }
        Ok(known)
    }

    /// What the cache has room for.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn room(&self) -> Result<Room, ClientError> {
        expect!(self.call(&Request::Room).await?, Response::Room(room) => room)
    }

    /// Has a new worker take over.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn replace(&self) -> Result<(), ClientError> {
        expect!(self.call(&Request::Replace).await?, Response::Done => ())
    }

    /// Ends worker and holder, and unmounts.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn shut_down(&self) -> Result<(), ClientError> {
        expect!(self.call(&Request::Shutdown).await?, Response::Done => ())
    }
}
