//! Getting a run of groups from the store, checked, whatever the store does.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dsec_image::layer::{BlobId, Digest};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::flight::{Arrived, Flight};
use super::limits::{Counters, count};
use super::{Engine, FillError};
use crate::cache::Stored;
use crate::source::{FetchError, Fetching};

/// First pause after a failed fetch, and the longest. The real one is between half of it and all of it, at random, so that
/// those who lost a store together do not come back together.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Times that a store may say it has no such thing, or give what cannot be it: a store that copies itself may be late.
const USELESS_TRIES: u32 = 3;
/// Times that wrong bytes are fetched: what went wrong on the way comes right, what is stored wrong does not.
pub(super) const WRONG_TRIES: u32 = 3;

/// What a fetch is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Somebody waits: it takes a turn among those who do.
    Demand,
    /// Nobody waits yet: whoever prefetches holds the turn.
    Ahead,
}

impl Engine {
    /// Brings one run in, and tells each group's readers how it ended.
    pub(super) async fn bring(
        self: Arc<Self>,
        mut run: Vec<Flight>,
        class: Class,
        share: Option<OwnedSemaphorePermit>,
    ) {
        let deadline = Instant::now() + self.limits.outage();
        let Some(cached) = run.first().map(|flight| flight.blob.cached.clone()) else { return };
        let blob = cached.id();
        let share = match share {
            Some(share) => share,
            None => match timeout_at(deadline, self.memory.clone().acquire_many_owned(self.pages_of(&run)))
                .await
            {
                Ok(Ok(share)) => share,
                _ => return end_all(run, &FillError::Busy { blob }),
            },
        };
        let share = Arc::new(share);
        if run.iter().any(|flight| flight.blob.cached.doubts(flight.group)) {
            run = self.prove(run, &share).await;
        }
        for flight in self.fetch_run(run, class, deadline, &share).await {
            self.bring_again(flight, class, deadline, &share).await;
        }
        cached.seal_soon();
    }

    /// A group that came with wrong bytes.
    async fn bring_again(&self, mut flight: Flight, class: Class, deadline: Instant, share: &Share) {
        for _ in 1..WRONG_TRIES {
            sleep(jittered(PAUSE_MIN)).await;
            match self.fetch_run(vec![flight], class, deadline, share).await.pop() {
                Some(still_wrong) => flight = still_wrong,
                None => return,
            }
        }
        let (blob, what) = (flight.blob.cached.id(), format!("group {}", flight.group));
        flight.end(Err(FillError::Damaged { blob, what }));
    }

    /// Looks whether what an earlier boot left is right; the flights for which it is not come back.
    async fn prove(&self, run: Vec<Flight>, share: &Share) -> Vec<Flight> {
        let share = share.clone();
        blocking(run, move |flight| match flight.blob.cached.prove(flight.group) {
            Ok(Some(plain)) => {
                flight.end(Ok(Arc::new(Arrived { plain, _share: share.clone() })));
                None
            }
            Ok(None) => Some(flight),
            Err(error) => {
                tracing::warn!(blob = %flight.blob.cached.id(), %error, "the cache's map cannot be written");
                Some(flight)
            }
        })
        .await
    }

    /// One fetch for a run, repeated while the store fails. Returns the flights whose bytes were wrong; the others have ended.
    async fn fetch_run(
        &self,
        run: Vec<Flight>,
        class: Class,
        deadline: Instant,
        share: &Share,
    ) -> Vec<Flight> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return run };
        let (blob, begin, end) = (first.blob.clone(), first.place(), last.place());
        let pack = blob.cached.index().packs()[begin.pack as usize].id;
        let range = begin.offset..end.offset + end.stored;
        let length = u64::from(range.end - range.start);
        let id = blob.cached.id();
        let fetch = || self.source.fetch(&pack, range.clone());
        let stored = match self.fetch(id, &blob.counters, class, deadline, Some(length), fetch).await {
            Ok(stored) => stored,
            Err(error) => {
                end_all(run, &error);
                return Vec::new();
            }
        };
        let (cache, share) = (self.cache.clone(), share.clone());
        blocking(run, move |flight| {
            let place = flight.place();
            let from = (place.offset - begin.offset) as usize;
            let stored = &stored[from..from + place.stored as usize];
            let Some(plain) = plain_of(stored, flight.blob.cached.index().plain_len(flight.group), &place.hash) else {
                count(&flight.blob.counters.wrong_groups, 1);
                tracing::warn!(blob = %id, group = flight.group, %pack, "the store gave wrong bytes for a group");
                return Some(flight);
            };
            let counters = &flight.blob.counters;
            match cache.store(&flight.blob.cached, flight.group, &plain) {
                Ok(Stored::Cached) => count(&counters.filled_groups, 1),
                Ok(Stored::NoRoom) => count(&counters.uncached_groups, 1),
                Err(error) => {
                    count(&counters.uncached_groups, 1);
                    tracing::warn!(blob = %id, group = flight.group, %error, "a group cannot be cached");
                }
            }
            flight.end(Ok(Arc::new(Arrived { plain, _share: share.clone() })));
            None
        })
        .await
    }

    /// Fetches until it comes whole (of `length` bytes, where that is known), or the store says for good that there is none,
    /// or the deadline is over.
    pub(super) async fn fetch<'a>(
        &'a self,
        blob: BlobId,
        counters: &Counters,
        class: Class,
        deadline: Instant,
        length: Option<u64>,
        fetch: impl Fn() -> Fetching<'a>,
    ) -> Result<Bytes, FillError> {
        let mut pause = PAUSE_MIN;
        let mut useless = 0;
        loop {
            let turn = match class {
                Class::Demand => match timeout_at(deadline, self.turns.acquire()).await {
                    Ok(Ok(turn)) => Some(turn),
                    _ => return Err(FillError::Busy { blob }),
                },
                Class::Ahead => None,
            };
            count(&counters.fetches, 1);
            let came = timeout(self.limits.attempt(), fetch()).await;
            drop(turn);
            let source = match came {
                Ok(Ok(bytes)) => {
                    count(&counters.fetched_bytes, bytes.len() as u64);
                    match length {
                        Some(length) if bytes.len() as u64 != length => {
                            unreachable_because(format!("{} bytes came instead of {length}", bytes.len()))
                        }
                        _ => return Ok(bytes),
                    }
                }
                Ok(Err(error)) => error,
                Err(_) => unreachable_because(format!("nothing came in {} ms", self.limits.attempt_ms)),
            };
            if let FetchError::Missing { .. } | FetchError::Damaged { .. } = source {
                useless += 1;
                if useless >= USELESS_TRIES {
                    return Err(FillError::Missing { blob, source });
                }
            }
            tracing::debug!(%blob, error = %source, "a fetch failed");
            if Instant::now() >= deadline {
                return Err(FillError::Unreachable { blob, source });
            }
            sleep_until(deadline.min(Instant::now() + jittered(pause))).await;
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
}

/// The part of the engine's memory that a run has.
type Share = Arc<OwnedSemaphorePermit>;

fn unreachable_because(why: String) -> FetchError {
    FetchError::Unreachable { why: format!("a part of a pack: {why}") }
}

fn end_all(run: Vec<Flight>, error: &FillError) {
    for flight in run {
        flight.end(Err(error.clone()));
    }
}

/// A group's bytes, when they are what the index says.
fn plain_of(stored: &[u8], length: u64, hash: &Digest) -> Option<Vec<u8>> {
    let plain = if stored.len() as u64 == length {
        stored.to_vec()
    } else {
        zstd::bulk::decompress(stored, length as usize).ok()?
    };
    (plain.len() as u64 == length && Digest::of(&plain) == *hash).then_some(plain)
}

/// Does something that takes the processor or the disk with each flight, and returns those that it gave back.
async fn blocking(run: Vec<Flight>, each: impl Fn(Flight) -> Option<Flight> + Send + 'static) -> Vec<Flight> {
    let work = move || run.into_iter().filter_map(each).collect();
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "filling a run failed");
        Vec::new()
    })
}

fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}
