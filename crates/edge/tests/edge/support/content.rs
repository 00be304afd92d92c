//! Content of layers without a device: blobs are plain files that stay where they are handed over to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsec_edge::layers::{Calling, Content};
use dsec_fill::client::{ClientError, Opened};
use dsec_fill::engine::Counts;
use dsec_fill::protocol::{BlobStats, Fetched, Room, Stats};
use dsec_fill::trace::Trace;
use dsec_image::layer::BlobId;

use super::Host;

/// What is known of content; it outlives an edge, as the worker does.
#[derive(Default)]
pub struct State {
    pub open: Mutex<BTreeSet<BlobId>>,
    /// Blobs are said to be incomplete: they are read through a device.
    pub is_partial: AtomicBool,
    pub generation: AtomicU64,
    /// While this is set, closing a blob waits.
    pub hold_close: tokio::sync::watch::Sender<bool>,
    /// Closings that wait.
    pub closing: AtomicU64,
    /// The same of opening.
    pub hold_open: tokio::sync::watch::Sender<bool>,
    pub opening: AtomicU64,
    /// Rounds that each fetch takes.
    pub rounds: AtomicU64,
    /// Why fetches end without their content.
    pub problem: Mutex<Option<String>>,
    /// Fetches that were asked for, and what is said to have been done for each blob.
    pub fetches: Mutex<Vec<Option<Vec<u32>>>>,
    pub counts: Mutex<BTreeMap<BlobId, Counts>>,
    /// The cache's budget; without one there is room for everything.
    pub budget: AtomicU64,
    pub evicted: Mutex<Vec<BlobId>>,
}

pub struct FakeContent(Arc<Host>);

impl FakeContent {
    pub fn new(host: Arc<Host>) -> Self {
        std::fs::create_dir_all(host.dir.join("content")).unwrap();
        Self(host)
    }

    fn path(&self, blob: BlobId) -> PathBuf {
        self.0.dir.join("content").join(blob.to_string())
    }
}

impl Content for FakeContent {
    fn generation(&self) -> u64 {
        self.0.content.generation.load(Ordering::SeqCst)
    }

    fn open(&self, blob: BlobId) -> Calling<'_, Opened> {
        let path = self.path(blob);
        Box::pin(async move {
            let mut held = self.0.content.hold_open.subscribe();
            self.0.content.opening.fetch_add(1, Ordering::SeqCst);
            let _ = held.wait_for(|held| !held).await;
            self.0.content.opening.fetch_sub(1, Ordering::SeqCst);
            let size_bytes = path.metadata().map(|meta| meta.len()).map_err(|error| {
                ClientError::Refused { message: format!("no content of {blob}: {error}"), again: false }
            })?;
            self.0.content.open.lock().unwrap().insert(blob);
            if self.0.content.is_partial.load(Ordering::SeqCst) {
                let path = self.0.dir.join("device").join(blob.to_string());
                return Ok(Opened { path, direct: false, size_bytes });
            }
            Ok(Opened { path, direct: true, size_bytes })
        })
    }

    fn close(&self, blob: BlobId) -> Calling<'_, ()> {
        Box::pin(async move {
            let mut held = self.0.content.hold_close.subscribe();
            self.0.content.closing.fetch_add(1, Ordering::SeqCst);
            let _ = held.wait_for(|held| !held).await;
            self.0.content.closing.fetch_sub(1, Ordering::SeqCst);
            self.0.content.open.lock().unwrap().remove(&blob);
            Ok(())
        })
    }

    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool> {
        Box::pin(async move {
            std::fs::rename(file, self.path(blob)).unwrap();
            Ok(true)
        })
    }

    fn prefetch<'a>(&'a self, _: BlobId, _: Option<&'a Trace>) -> Calling<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn fetch<'a>(&'a self, _: BlobId, trace: Option<&'a Trace>, _: Duration) -> Calling<'a, Fetched> {
        Box::pin(async move {
            let content = &self.0.content;
            let mut fetches = content.fetches.lock().unwrap();
            fetches.push(trace.map(Trace::order));
            let left_bytes = content.rounds.load(Ordering::SeqCst).saturating_sub(fetches.len() as u64);
            let problem = content.problem.lock().unwrap().clone();
            let left_bytes = left_bytes.max(u64::from(problem.is_some()));
            let is_over = left_bytes == 0 || problem.is_some();
            Ok(Fetched { wanted_bytes: 100, left_bytes, is_over, problem })
        })
    }

    fn trace(&self, _: BlobId) -> Calling<'_, Trace> {
        Box::pin(async { Ok(Trace::default()) })
    }

    fn stats(&self) -> Calling<'_, Stats> {
        let all = self.0.content.open.lock().unwrap().len() as u64;
        let counts = self.0.content.counts.lock().unwrap();
        let counts = counts.values().fold(Counts::default(), |sum, counts| sum + *counts);
        let stats = Stats { worker_pid: 1, used_bytes: 4096 * all, known_blobs: all, counts };
        Box::pin(async { Ok(stats) })
    }

    fn look<'a>(&'a self, blobs: &'a [BlobId]) -> Calling<'a, Vec<BlobStats>> {
        let counts = self.0.content.counts.lock().unwrap();
        let of = |blob: &BlobId| BlobStats {
            blob: *blob,
            size_bytes: 4096,
            groups_here: 1,
            groups: 1,
            here_bytes: 4096,
            counts: counts.get(blob).copied().unwrap_or_default(),
        };
        let known = blobs.iter().map(of).collect();
        Box::pin(async { Ok(known) })
    }

    /// Every open blob is whole, and the rest of the cache is of what was closed.
    fn room(&self) -> Calling<'_, Room> {
        let kept_bytes = 4096 * self.0.content.open.lock().unwrap().len() as u64;
        let budget_bytes = self.0.content.budget.load(Ordering::SeqCst);
        let room = match budget_bytes {
            0 => Room { budget_bytes: u64::MAX, used_bytes: kept_bytes, kept_bytes },
            _ => Room { budget_bytes, used_bytes: budget_bytes, kept_bytes },
        };
        Box::pin(async move { Ok(room) })
    }

    fn evict(&self, blob: BlobId) -> Calling<'_, u64> {
        self.0.content.evicted.lock().unwrap().push(blob);
        Box::pin(async { Ok(4096) })
    }

    fn shut_down(&self) -> Calling<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}
