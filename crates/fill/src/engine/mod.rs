//! The fill engine: makes a range of a blob readable, or says why it cannot be.
//!
//! ```text
//! read(blob, range) ─► groups ─► in the cache? ─────────────────────────────► bytes
//!                                  │ no: somebody fetches it? wait with them ──►
//!                                  ▼ no
//!                                 runs of neighbours ─► turn, memory ─► source.fetch ─► zstd ─► BLAKE3 ─► cache
//! ```
//!
//! It knows nothing of who asks. Bytes reach a reader only after they were held against the index, so a store can make
//! reads slow or fail, never wrong. A reader that goes away does not stop a fetch that others wait for.

mod fetch;
mod flight;
mod limits;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dsec_image::layer::{BlobId, BlobIndex};
use futures_util::future::{join_all, try_join_all};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::cache::{Cache, CacheError, CachedBlob, LetGo, hold};
use crate::source::PackSource;
use crate::trace::{Prefetching, Recorder, Trace};
use fetch::{Class, WRONG_TRIES};
use flight::{Flight, Waiting, runs};
use limits::{Counters, count};
pub use limits::{Counts, FillError, Limits, LimitsError};

/// Memory is shared out in these.
const PAGE: u64 = 4096;
/// Times a read looks again for a group that was evicted between its arrival and its reading.
const LOOKS: u32 = 8;

/// A blob that the engine fills.
#[derive(Debug)]
pub struct Blob {
    pub(crate) cached: Arc<CachedBlob>,
    flights: Mutex<HashMap<u64, Waiting>>,
    counters: Counters,
    pub(crate) recorder: Recorder,
}

impl Blob {
    fn new(cached: Arc<CachedBlob>) -> Self {
        let recorder = Recorder::new(cached.index().groups().len() as u64);
        Self { cached, flights: Mutex::default(), counters: Counters::default(), recorder }
    }

    /// Its place in the cache.
    pub fn cached(&self) -> &CachedBlob {
        &self.cached
    }

    /// What readers wanted of it, in order.
    pub fn trace(&self) -> Trace {
        self.recorder.trace()
    }

    /// What was done for it.
    pub fn counts(&self) -> Counts {
        self.counters.now()
    }
}

/// The blobs of the cache that something was done for.
#[derive(Debug, Default)]
struct Blobs {
    known: HashMap<BlobId, Arc<Blob>>,
    /// What was done for those that the cache let go of.
    gone: Counts,
}

impl Blobs {
    /// Lets go of a blob that the cache let go of; one that it took in again stays.
    fn remove_gone(&mut self, id: BlobId) {
        if let Some(blob) = self.known.remove(&id) {
            match blob.cached.is_gone() {
                true => self.gone = self.gone + blob.counts(),
                false => drop(self.known.insert(id, blob)),
            }
        }
    }
}

/// The engine. Its calls need a tokio runtime with time.
pub struct Engine {
    cache: Arc<Cache>,
    source: Arc<dyn PackSource>,
    limits: Limits,
    blobs: Mutex<Blobs>,
    turns: Semaphore,
    turns_ahead: Arc<Semaphore>,
    memory: Arc<Semaphore>,
    memory_ahead: Arc<Semaphore>,
}

impl Engine {
    /// An engine between a store and a cache.
    ///
    /// # Errors
    /// The limits do not go together.
    pub fn new(
        cache: Arc<Cache>,
        source: Arc<dyn PackSource>,
        limits: Limits,
    ) -> Result<Arc<Self>, LimitsError> {
        limits.check()?;
        let pages = |bytes: u64| Arc::new(Semaphore::new((bytes / PAGE) as usize));
        let engine = Arc::new(Self {
            turns: Semaphore::new(limits.fetches),
            turns_ahead: Arc::new(Semaphore::new(limits.prefetches)),
            memory: pages(limits.memory_bytes - limits.prefetch_bytes()),
            memory_ahead: pages(limits.prefetch_bytes()),
            blobs: Mutex::default(),
            cache,
            source,
            limits,
        });
        let told = Arc::downgrade(&engine);
        engine.cache.when_removed(move |id| {
            if let Some(engine) = told.upgrade() {
                hold(&engine.blobs).remove_gone(id);
            }
        });
        Ok(engine)
    }

    /// The cache it fills.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// A blob that is known here. Blocks on the disk.
    ///
    /// # Errors
    /// The cache's.
    pub fn known(&self, id: BlobId) -> Result<Option<Arc<Blob>>, CacheError> {
        Ok(self.cache.blob(id)?.map(|cached| self.of(cached)))
    }

    /// A blob that is known here, by the device's number. Blocks on the disk.
    ///
    /// # Errors
    /// The cache's.
    pub fn by_number(&self, number: u64) -> Result<Option<Arc<Blob>>, CacheError> {
        Ok(self.cache.by_number(number)?.map(|cached| self.of(cached)))
    }

    fn of(&self, cached: Arc<CachedBlob>) -> Arc<Blob> {
        let mut blobs = hold(&self.blobs);
        if let Some(blob) = blobs.known.get(&cached.id())
            && Arc::ptr_eq(&blob.cached, &cached)
        {
            return blob.clone();
        }
        let blob = Arc::new(Blob::new(cached));
        // Who takes it out of the cache says so first, and then comes here for it.
        if !blob.cached.is_gone() {
            blobs.known.insert(blob.cached.id(), blob.clone());
        }
        blob
    }

    /// Forgets a blob of which nothing is here and that nobody has marked, unless somebody is at work with it.
    pub fn let_go(&self, id: BlobId) -> LetGo {
        let mut blobs = hold(&self.blobs);
        let Some(blob) = blobs.known.get(&id) else { return LetGo::Kept };
        // Who gets it from here needs the lock.
        if Arc::strong_count(blob) > 1 {
            return LetGo::InUse;
        }
        let ended = self.cache.let_go(&blob.cached);
        if ended == LetGo::Gone {
            blobs.remove_gone(id);
        }
        ended
    }

    /// What was done for all blobs.
    pub fn counts(&self) -> Counts {
        let blobs = hold(&self.blobs);
        blobs.known.values().fold(blobs.gone, |sum, blob| sum + blob.counts())
    }

    /// A blob, with its index from the store when it is not known here.
    ///
    /// # Errors
    /// The store does not have it, or not in time; the cache's.
    pub async fn blob(self: &Arc<Self>, id: BlobId) -> Result<Arc<Blob>, FillError> {
        let engine = self.clone();
        if let Some(blob) = on_disk(id, move || engine.known(id)).await? {
            return Ok(blob);
        }
        let deadline = tokio::time::Instant::now() + self.limits.outage();
        for _ in 0..WRONG_TRIES {
            let fetch = || self.source.index(&id);
            let nobodys = Counters::default();
            let bytes = self.fetch(id, &nobodys, Class::Demand, deadline, None, fetch).await?;
            if let Ok(index) = BlobIndex::decode(&bytes)
                && index.id() == id
            {
                let engine = self.clone();
                return on_disk(id, move || Ok(engine.of(engine.cache.add(&index)?))).await;
            }
        }
        Err(FillError::Damaged { blob: id, what: "its index".to_owned() })
    }

    /// Fills `out` from the cache alone; `false` when some of it is not there. Blocks on the disk.
    pub fn read_cached(&self, blob: &Blob, start: u64, out: &mut [u8]) -> bool {
        match blob.cached.read(start, out) {
            Ok(true) => {
                count(&blob.counters.asked_bytes, out.len() as u64);
                count(&blob.counters.cached_bytes, out.len() as u64);
                blob.recorder.touch_all(&blob.cached, start..start + out.len() as u64);
                true
            }
            Ok(false) => false,
            Err(error) => {
                let id = blob.cached.id();
                tracing::error!(blob = %id, %error, "the cache cannot be read; what it has there is fetched again");
                for group in blob.cached.groups_of(&(start..start + out.len() as u64)) {
                    self.cache.disown(&blob.cached, group);
                }
                false
            }
        }
    }

    /// The bytes of `range`, as far as the blob reaches. Cancelling it stops no fetch.
    ///
    /// # Errors
    /// They could not be had; the next read tries again.
    pub async fn read(self: &Arc<Self>, blob: &Arc<Blob>, range: Range<u64>) -> Result<Vec<u8>, FillError> {
        let range = range.start..range.end.min(blob.cached.index().size());
        if range.start >= range.end {
            return Ok(Vec::new());
        }
        count(&blob.counters.asked_bytes, range.end - range.start);
        blob.recorder.touch_all(&blob.cached, range.clone());
        let groups = blob.cached.groups_of(&range);
        let waiting = self.begin(blob, groups.clone(), Class::Demand, None);
        let pieces = groups.zip(waiting).map(|(group, waiting)| {
            let whole = blob.cached.range_of(group);
            self.piece(blob, group, range.start.max(whole.start)..range.end.min(whole.end), waiting)
        });
        let done = try_join_all(pieces).await;
        match done {
            Ok(pieces) => Ok(pieces.concat()),
            Err(error) => {
                count(&blob.counters.failed_reads, 1);
                Err(error)
            }
        }
    }

    /// Makes `range` readable: in the cache afterwards, if there is room.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn ensure(self: &Arc<Self>, blob: &Arc<Blob>, range: Range<u64>) -> Result<(), FillError> {
        let range = range.start..range.end.min(blob.cached.index().size());
        if range.start >= range.end {
            return Ok(());
        }
        let waiting = self.begin(blob, blob.cached.groups_of(&range), Class::Demand, None);
        // Each is let go of at once, for the reason that `piece` gives.
        let each = waiting.into_iter().flatten().map(|waiting| async { wait(blob, waiting).await.map(drop) });
        try_join_all(each).await.map(drop)
    }

    /// The part of a group that a reader asked for. What arrived is copied at once: its memory is not held while
    /// the reader's other groups are on their way, or readers could wait for each other's memory for ever.
    async fn piece(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        group: u64,
        part: Range<u64>,
        mut waiting: Option<Waiting>,
    ) -> Result<Vec<u8>, FillError> {
        for _ in 0..LOOKS {
            if let Some(waiting) = waiting {
                let since = Instant::now();
                let arrived = wait(blob, waiting).await;
                count(&blob.counters.waited_us, since.elapsed().as_micros() as u64);
                let from = (part.start - blob.cached.range_of(group).start) as usize;
                return arrived
                    .map(|arrived| arrived.plain[from..from + (part.end - part.start) as usize].to_vec());
            }
            let (this, its) = (blob.clone(), part.clone());
            let read = move || {
                let mut out = vec![0; (its.end - its.start) as usize];
                Ok(this.cached.read(its.start, &mut out).is_ok_and(|here| here).then_some(out))
            };
            if let Some(out) = on_disk(blob.cached.id(), read).await? {
                count(&blob.counters.cached_bytes, out.len() as u64);
                return Ok(out);
            }
            if blob.cached.has(group) {
                self.cache.disown(&blob.cached, group);
            }
            waiting = self.begin(blob, group..=group, Class::Demand, None).pop().flatten();
        }
        let what = format!(
            "group {group} was evicted {LOOKS} times before it could be read; the cache's budget is too small"
        );
        Err(FillError::Cache { blob: blob.cached.id(), what })
    }

    /// For each group nothing when it is in the cache, else what to wait on; fetches begin for those that nobody fetches.
    fn begin(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        groups: impl Iterator<Item = u64>,
        class: Class,
        mut share: Option<OwnedSemaphorePermit>,
    ) -> Vec<Option<Waiting>> {
        let mut new = Vec::new();
        let mut all = Vec::new();
        {
            let mut flights = hold(&blob.flights);
            for group in groups {
                if let Some(waiting) = flights.get(&group) {
                    all.push(Some(waiting.clone()));
                } else if blob.cached.has(group) {
                    all.push(None);
                } else {
                    let (flight, waiting) = Flight::new(blob.clone(), group);
                    flights.insert(group, waiting.clone());
                    new.push(flight);
                    all.push(Some(waiting));
                }
            }
        }
        for run in runs(new, self.limits.run_groups) {
            let pages = self.pages_of(&run) as usize;
            let part = share.as_mut().and_then(|share| share.split(pages));
            tokio::spawn(self.clone().bring(run, class, part));
        }
        all
    }

    /// What a run takes of the memory while it is brought: its bytes as stored and as plain.
    fn pages_of(&self, run: &[Flight]) -> u32 {
        let bytes = |flight: &Flight| {
            u64::from(flight.place().stored) + flight.blob.cached.index().plain_len(flight.group)
        };
        run.iter().map(bytes).sum::<u64>().div_ceil(PAGE) as u32
    }

    /// Brings a blob's groups in ahead of demand, in this order, until they are here or the readers turn out to want others.
    pub async fn prefetch(self: &Arc<Self>, blob: &Arc<Blob>, order: &[u32]) -> Prefetched {
        let groups = blob.cached.index().groups().len() as u64;
        let following = Prefetching::begin(&blob.recorder, order, groups);
        self.bring_ahead(blob, order, || following.disagrees()).await
    }

    /// Brings a blob's groups in, in this order, whatever the readers want. May be dropped and begun anew.
    pub async fn warm(self: &Arc<Self>, blob: &Arc<Blob>, order: &[u32]) -> Prefetched {
        self.bring_ahead(blob, order, || false).await
    }

    async fn bring_ahead(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        order: &[u32],
        stop: impl Fn() -> bool,
    ) -> Prefetched {
        let groups = blob.cached.index().groups().len() as u64;
        let mut under_way = tokio::task::JoinSet::new();
        let mut rest = order;
        while let [first, ..] = rest {
            if stop() {
                return Prefetched { left: rest.len(), disagreed: true, failed: None };
            }
            let alike = rest.windows(2).take_while(|pair| pair[0] + 1 == pair[1]).count();
            let (run, others) = rest.split_at((alike + 1).min(self.limits.run_groups));
            rest = others;
            let first = u64::from(*first);
            if run.len() as u64 + first > groups
                || (first..first + run.len() as u64).all(|group| blob.cached.has(group))
            {
                continue;
            }
            // Passing through the readers' turns, it waits while they are all taken.
            let (Ok(_), Ok(turn)) =
                (self.turns.acquire().await, self.turns_ahead.clone().acquire_owned().await)
            else {
                break;
            };
            let pages = (self.limits.run_bytes() / PAGE) as u32;
            let Ok(share) = self.memory_ahead.clone().acquire_many_owned(pages).await else { break };
            let waiting = self.begin(blob, first..first + run.len() as u64, Class::Ahead, Some(share));
            let blob = blob.clone();
            under_way.spawn(async move {
                let each =
                    waiting.into_iter().flatten().map(|waiting| async { wait(&blob, waiting).await.err() });
                let failed = join_all(each).await.into_iter().flatten().next();
                drop(turn);
                failed
            });
        }
        let failed = under_way.join_all().await.into_iter().flatten().next();
        Prefetched { left: rest.len(), disagreed: false, failed }
    }
}

/// How prefetching ended.
#[derive(Debug, Clone)]
pub struct Prefetched {
    /// Groups of the order that were not begun.
    pub left: usize,
    /// It stopped because the readers wanted others.
    pub disagreed: bool,
    /// Why a group did not come; a reader that needs it is told so too.
    pub failed: Option<FillError>,
}

async fn wait(blob: &Blob, mut waiting: Waiting) -> flight::Outcome {
    let stopped = || FillError::Stopped { blob: blob.cached.id() };
    let ended = waiting.wait_for(Option::is_some).await.map_err(|_| stopped())?;
    ended.clone().unwrap_or_else(|| Err(stopped()))
}

async fn on_disk<T: Send + 'static>(
    blob: BlobId,
    work: impl FnOnce() -> Result<T, CacheError> + Send + 'static,
) -> Result<T, FillError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(FillError::cache(blob, &error)),
        Err(_) => Err(FillError::Stopped { blob }),
    }
}
