//! The worker's side of the control socket.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dsec_image::layer::BlobId;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore};

use crate::cache::{Cache, LetGo, Mark, Stored};
use crate::engine::{Blob, Engine, FillError};
use crate::protocol::{
    BlobStats, CONNECTIONS_MAX, Fetched, LINE_MAX, LOOK_MAX, Request, Response, Room, Stats,
};
use crate::source::with_causes;
use crate::trace::Trace;

/// Prefetches under way at once. Each is a list of groups and a task; what they fetch at once is the engine's limit.
const PREFETCHES_MAX: usize = 256;

/// Pauses between looks whether a blob that is of no use is still in somebody's hands; each is twice the one before.
const LET_GO_PAUSE_MIN: Duration = Duration::from_millis(5);
const LET_GO_PAUSE_MAX: Duration = Duration::from_secs(10);

/// What the caller of a request wants of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Make room for a new worker.
    Replace,
    /// End the holder too.
    Shutdown,
}

/// Serves the control socket.
pub struct Control {
    engine: Arc<Engine>,
    mount: PathBuf,
    prefetches: Arc<Semaphore>,
    ending: std::sync::Mutex<Option<Ending>>,
    ended: Notify,
}

impl Control {
    /// For this engine, whose device is mounted at `mount`.
    pub fn new(engine: Arc<Engine>, mount: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            engine,
            mount,
            prefetches: Arc::new(Semaphore::new(PREFETCHES_MAX)),
            ending: std::sync::Mutex::default(),
            ended: Notify::new(),
        })
    }

    /// Serves until a request asks for the end.
    pub async fn serve(self: Arc<Self>, listener: UnixListener) -> Ending {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let accept = async {
            loop {
                let place = places.clone().acquire_owned().await;
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        tracing::warn!(%error, "a control connection cannot be accepted");
                        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                        continue;
                    }
                };
                let control = self.clone();
                tokio::spawn(async move {
                    let _place = place;
                    if let Err(error) = control.connection(stream).await {
                        tracing::debug!(%error, "a control connection broke");
                    }
                });
            }
        };
        tokio::select! {
            () = accept => unreachable!("accepting goes on for ever"),
            () = self.ended.notified() => {}
        }
        crate::cache::hold(&self.ending).unwrap_or(Ending::Replace)
    }

    async fn connection(&self, stream: UnixStream) -> io::Result<()> {
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::new(read);
        loop {
            let mut line = Vec::new();
            (&mut read).take(LINE_MAX as u64).read_until(b'\n', &mut line).await?;
            if line.is_empty() {
                return Ok(());
            }
            let (response, ending) = match serde_json::from_slice::<Request>(&line) {
                Ok(Request::Replace) => (Response::Done, Some(Ending::Replace)),
                Ok(Request::Shutdown) => (Response::Done, Some(Ending::Shutdown)),
                Ok(request) => (self.answer(request).await, None),
                Err(error) => (refused(format!("not a request: {error}")), None),
            };
            let mut bytes = serde_json::to_vec(&response)?;
            bytes.push(b'\n');
            write.write_all(&bytes).await?;
            if let Some(ending) = ending {
                *crate::cache::hold(&self.ending) = Some(ending);
                self.ended.notify_one();
            }
            // A line without its end is followed by nothing.
            if line.last() != Some(&b'\n') {
                return Ok(());
            }
        }
    }

    async fn answer(&self, request: Request) -> Response {
        let done = match request {
            Request::Open { blob } => self.open(blob).await,
            Request::Close { blob } => {
                self.mark(blob, vec![(Mark::Direct, false), (Mark::Open, false)]).await
            }
            Request::Pin { blob } => match self.engine.blob(blob).await {
                Ok(_) => self.mark(blob, vec![(Mark::Pinned, true)]).await,
                Err(error) => Err(error),
            },
            Request::Unpin { blob } => self.mark(blob, vec![(Mark::Pinned, false)]).await,
            Request::Prefetch { blob, trace } => self.prefetch(blob, trace).await,
            Request::Fetch { blob, trace, limit_ms } => {
                self.fetch(blob, trace, Duration::from_millis(limit_ms)).await
            }
            Request::Trace { blob, restart } => self.trace(blob, restart).await,
            Request::Insert { blob, file, take } => self.insert(blob, file, take).await,
            Request::Evict { blob } => self.evict(blob).await,
            Request::Stats => Ok(Response::Stats(self.stats())),
            Request::Look { blobs } => self.look(blobs).await,
            Request::Room => self.room().await,
            Request::Replace | Request::Shutdown => Ok(Response::Done),
        };
        done.unwrap_or_else(|error| {
            let again = matches!(
                error,
                FillError::Unreachable { .. } | FillError::Busy { .. } | FillError::Stopped { .. }
            );
            Response::Error { message: with_causes(&error), again }
        })
    }

    async fn open(&self, id: BlobId) -> Result<Response, FillError> {
        let blob = self.engine.blob(id).await?;
        let mount = self.mount.clone();
        blocking(id, move || {
            blob.cached().set_mark(Mark::Open, true)?;
            let size_bytes = blob.cached().index().size();
            if prove_if_complete(&blob)? {
                blob.cached().set_mark(Mark::Direct, true)?;
                // From here on nothing is evicted; something may have been just before.
                if blob.cached().is_complete() {
                    let path = blob.cached().path().to_owned();
                    return Ok(Response::Opened { path, direct: true, size_bytes });
                }
                blob.cached().set_mark(Mark::Direct, false)?;
            }
            Ok(Response::Opened { path: mount.join(id.to_string()), direct: false, size_bytes })
        })
        .await
    }

    async fn mark(&self, id: BlobId, marks: Vec<(Mark, bool)>) -> Result<Response, FillError> {
        let engine = self.engine.clone();
        let done = blocking(id, move || {
            if let Some(blob) = engine.known(id).map_err(io::Error::other)? {
                for (mark, on) in marks {
                    blob.cached().set_mark(mark, on)?;
                }
            }
            Ok(Response::Done)
        })
        .await;
        let_go(&self.engine, id);
        done
    }

    async fn prefetch(&self, id: BlobId, trace: Option<String>) -> Result<Response, FillError> {
        let (blob, order) = match self.order(id, trace).await? {
            Ok(found) => found,
            Err(refused) => return Ok(refused),
        };
        let Ok(place) = self.prefetches.clone().try_acquire_owned() else {
            let message =
                format!("{PREFETCHES_MAX} blobs are being prefetched, which is the limit; try later");
            return Ok(Response::Error { message, again: true });
        };
        let engine = self.engine.clone();
        tokio::spawn(async move {
            let done = engine.prefetch(&blob, &order).await;
            tracing::debug!(blob = %id, left = done.left, disagreed = done.disagreed, "prefetching ended");
            drop(blob);
            let_go(&engine, id);
            drop(place);
        });
        Ok(Response::Done)
    }

    async fn fetch(&self, id: BlobId, trace: Option<String>, limit: Duration) -> Result<Response, FillError> {
        let (blob, order) = match self.order(id, trace).await? {
            Ok(found) => found,
            Err(refused) => return Ok(refused),
        };
        let ended = tokio::time::timeout(limit, self.engine.warm(&blob, &order)).await;
        let bytes = |is_wanted: &dyn Fn(u64) -> bool| {
            let wanted = order.iter().map(|group| u64::from(*group)).filter(|group| is_wanted(*group));
            wanted.map(|group| blob.cached().index().plain_len(group)).sum()
        };
        let (wanted_bytes, left_bytes) = (bytes(&|_| true), bytes(&|group| !blob.cached().has(group)));
        let problem = match &ended {
            Ok(ended) if left_bytes > 0 => Some(match &ended.failed {
                Some(error) => with_causes(error),
                None => format!(
                    "the node's cache, which has {} bytes, has no room for it",
                    self.engine.cache().used_bytes()
                ),
            }),
            _ => None,
        };
        drop(blob);
        let_go(&self.engine, id);
        Ok(Response::Fetched(Fetched { wanted_bytes, left_bytes, is_over: ended.is_ok(), problem }))
    }

    /// A blob, and which of its groups a trace says, or all.
    async fn order(
        &self,
        id: BlobId,
        trace: Option<String>,
    ) -> Result<Result<(Arc<Blob>, Vec<u32>), Response>, FillError> {
        let order = match trace {
            None => None,
            Some(text) => {
                let decoded = BASE64_STANDARD.decode(text).map_err(|error| error.to_string());
                match decoded.and_then(|bytes| Trace::decode(&bytes).map_err(|error| error.to_string())) {
                    Ok(trace) => Some(trace.order()),
                    Err(error) => return Ok(Err(refused(format!("the trace for {id}: {error}")))),
                }
            }
        };
        let blob = self.engine.blob(id).await?;
        let groups = blob.cached().index().groups().len() as u32;
        let mut order = order.unwrap_or_else(|| (0..groups).collect());
        order.retain(|group| *group < groups);
        Ok(Ok((blob, order)))
    }

    async fn trace(&self, id: BlobId, restart: bool) -> Result<Response, FillError> {
        let engine = self.engine.clone();
        blocking(id, move || {
            let Some(blob) = engine.known(id).map_err(io::Error::other)? else {
                return Ok(Response::Trace(BASE64_STANDARD.encode(Trace::default().encode())));
            };
            let trace = blob.trace();
            if restart {
                blob.recorder.restart(blob.cached().index().groups().len() as u64);
            }
            Ok(Response::Trace(BASE64_STANDARD.encode(trace.encode())))
        })
        .await
    }

    async fn insert(&self, id: BlobId, file: PathBuf, take: bool) -> Result<Response, FillError> {
        let blob = self.engine.blob(id).await?;
        let (engine, inserted) = (self.engine.clone(), blob.clone());
        let stored = blocking(id, move || {
            let (cache, blob) = (engine.cache(), inserted.cached());
            let insert = if take { Cache::take_complete } else { Cache::insert_complete };
            insert(cache, blob, &file).map_err(io::Error::other)
        })
        .await;
        blob.cached.seal_soon();
        drop(blob);
        let_go(&self.engine, id);
        Ok(Response::Inserted { complete: stored? == Stored::Cached })
    }

    async fn evict(&self, id: BlobId) -> Result<Response, FillError> {
        let engine = self.engine.clone();
        blocking(id, move || {
            let freed_bytes = match engine.known(id).map_err(io::Error::other)? {
                Some(blob) => engine.cache().evict_blob(blob.cached()),
                None => 0,
            };
            Ok(Response::Evicted { freed_bytes })
        })
        .await
    }

    async fn look(&self, ids: Vec<BlobId>) -> Result<Response, FillError> {
        let Some(first) = ids.first().copied() else { return Ok(Response::Looked(Vec::new())) };
        if ids.len() > LOOK_MAX {
            return Ok(refused(format!("{} blobs in one look; {LOOK_MAX} is the limit", ids.len())));
        }
        let engine = self.engine.clone();
        blocking(first, move || {
            let known =
                ids.into_iter().filter_map(|id| engine.known(id).map_err(io::Error::other).transpose());
            let known: Vec<BlobStats> =
                known.map(|blob| blob.map(|blob| stats_of(&blob))).collect::<io::Result<_>>()?;
            Ok(Response::Looked(known))
        })
        .await
    }

    async fn room(&self) -> Result<Response, FillError> {
        let engine = self.engine.clone();
        let look = move || {
            let cache = engine.cache();
            Room {
                budget_bytes: cache.budget(),
                used_bytes: cache.used_bytes(),
                kept_bytes: cache.kept_bytes(),
            }
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(room) => Ok(Response::Room(room)),
            Err(error) => Ok(refused(format!("the cache was not looked through: {error}"))),
        }
    }

    fn stats(&self) -> Stats {
        Stats {
            worker_pid: std::process::id(),
            used_bytes: self.engine.cache().used_bytes(),
            known_blobs: self.engine.cache().known().len() as u64,
            counts: self.engine.counts(),
        }
    }
}

fn stats_of(blob: &Blob) -> BlobStats {
    let cached = blob.cached();
    BlobStats {
        blob: cached.id(),
        size_bytes: cached.index().size(),
        groups_here: cached.groups_here(),
        groups: cached.index().groups().len() as u64,
        here_bytes: cached.here_bytes(),
        counts: blob.counts(),
    }
}

/// Whether every group is here, after those were checked that are only believed to be, if they are what is missing.
fn prove_if_complete(blob: &Blob) -> io::Result<bool> {
    let cached = blob.cached();
    let groups = cached.index().groups().len() as u64;
    if (0..groups).all(|group| cached.has(group) || cached.doubts(group)) {
        for group in (0..groups).filter(|group| cached.doubts(*group)) {
            cached.prove(group)?;
        }
    }
    Ok(cached.is_complete())
}

/// Forgets a blob that is of no use any more, as soon as those who are at work with it are done, which is soon or their own task.
fn let_go(engine: &Arc<Engine>, id: BlobId) {
    let engine = engine.clone();
    tokio::spawn(async move {
        let mut pause = LET_GO_PAUSE_MIN;
        while pause <= LET_GO_PAUSE_MAX {
            let this = engine.clone();
            match tokio::task::spawn_blocking(move || this.let_go(id)).await {
                Ok(LetGo::InUse) => tokio::time::sleep(pause).await,
                _ => return,
            }
            pause *= 2;
        }
    });
}

fn refused(message: String) -> Response {
    Response::Error { message, again: false }
}

async fn blocking<T: Send + 'static>(
    blob: BlobId,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, FillError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| FillError::Cache { blob, what: with_causes(&error) }),
        Err(_) => Err(FillError::Stopped { blob }),
    }
}
