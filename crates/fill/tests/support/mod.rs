//! A blob that is made here, and a store that fails in every way a store can.
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod platform;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dsec_fill::cache::{BootId, Cache};
use dsec_fill::engine::{Blob, Engine, Limits};
use dsec_fill::source::{FetchError, Fetching, PackSource};
use dsec_image::layer::{BlobId, BlobIndex, Digest, GROUP_SIZE, GroupRef, PackId, PackRef};
use dsec_store::Publish;
use tempfile::TempDir;

pub(crate) const GROUP: u64 = GROUP_SIZE;

/// A blob with its content, and its packs as a store has them.
pub(crate) struct Made {
    pub(crate) index: BlobIndex,
    pub(crate) plain: Vec<u8>,
    pub(crate) packs: HashMap<PackId, Bytes>,
}

impl Made {
    /// Of `size` bytes that no group shares with another; every third group does not compress.
    pub(crate) fn new(seed: u64, size: u64) -> Self {
        let mut random = Random(2 * seed + 1);
        let mut plain = vec![0; size as usize];
        for (group, bytes) in plain.chunks_mut(GROUP as usize).enumerate() {
            for chunk in bytes.chunks_mut(8) {
                let word = if group % 3 == 0 { random.next() } else { random.next() & 0x0f0f };
                chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
            }
        }
        let (mut packs, mut refs, mut groups) = (HashMap::new(), Vec::new(), Vec::new());
        // Small packs, so that most blobs here have several.
        for (pack, content) in plain.chunks(GROUP as usize * 24).enumerate() {
            let mut bytes = Vec::new();
            for group in content.chunks(GROUP as usize) {
                let packed = zstd::bulk::compress(group, 1).unwrap();
                let stored = if packed.len() < group.len() { packed.as_slice() } else { group };
                let (offset, stored_len) = (bytes.len() as u32, stored.len() as u32);
                groups.push(GroupRef {
                    hash: Digest::of(group),
                    pack: pack as u32,
                    offset,
                    stored: stored_len,
                });
                bytes.extend_from_slice(stored);
            }
            let id = PackId(Digest::of(&bytes));
            refs.push(PackRef { id, size: bytes.len() as u32 });
            packs.insert(id, Bytes::from(bytes));
        }
        Self { index: BlobIndex::new(size, refs, groups).unwrap(), plain, packs }
    }

    pub(crate) fn id(&self) -> BlobId {
        self.index.id()
    }

    pub(crate) fn part(&self, range: Range<u64>) -> &[u8] {
        let size = self.plain.len() as u64;
        &self.plain[range.start.min(size) as usize..range.end.min(size) as usize]
    }

    /// Bytes that fetching each of these groups once brings.
    pub(crate) fn stored_bytes(&self, groups: Range<usize>) -> u64 {
        self.index.groups()[groups].iter().map(|group| u64::from(group.stored)).sum()
    }

    /// Puts it into a store as publishers do.
    pub(crate) async fn publish(&self, session: &Publish) {
        for (id, bytes) in &self.packs {
            session.pack(*id, bytes.clone()).await.unwrap();
        }
        session.blob(&self.index).await.unwrap();
    }
}

/// Numbers that look random and are the same for the same seed (xorshift64*).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// What the fake store does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// One bit is another.
    Corrupt,
    /// The last byte is not there.
    Truncated,
    /// Bytes of another place, as many as were asked for.
    Swapped,
    /// Zeros.
    Zeros,
    Missing,
    Outage,
    /// It never answers.
    Silent,
}

/// A store in memory.
pub(crate) struct FakeStore {
    packs: HashMap<PackId, Bytes>,
    indexes: HashMap<BlobId, Bytes>,
    /// The fault, and for how many fetches it stays.
    fault: Mutex<(Fault, u64)>,
    delay: Mutex<Duration>,
    pub(crate) fetches: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) under_way: AtomicU64,
    pub(crate) under_way_max: AtomicU64,
    /// First bytes of what was fetched, in order.
    pub(crate) order: Mutex<Vec<(PackId, u32)>>,
}

impl FakeStore {
    pub(crate) fn of(blobs: &[&Made]) -> Arc<Self> {
        Arc::new(Self {
            packs: blobs.iter().flat_map(|blob| blob.packs.clone()).collect(),
            indexes: blobs.iter().map(|blob| (blob.id(), blob.index.encode().into())).collect(),
            fault: Mutex::new((Fault::None, 0)),
            delay: Mutex::default(),
            fetches: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            under_way_max: AtomicU64::new(0),
            order: Mutex::default(),
        })
    }

    pub(crate) fn fail(&self, fault: Fault, times: u64) {
        *self.fault.lock().unwrap() = (fault, times);
    }

    pub(crate) fn slow(&self, delay: Duration) {
        *self.delay.lock().unwrap() = delay;
    }

    fn next_fault(&self) -> Fault {
        let mut fault = self.fault.lock().unwrap();
        if fault.1 == 0 {
            return Fault::None;
        }
        fault.1 -= 1;
        fault.0
    }

    fn answer(&self, whole: Option<&Bytes>, range: Option<Range<u32>>) -> Fetching<'_> {
        let what = "something".to_owned();
        let Some(whole) = whole.cloned() else {
            return Box::pin(async move { Err(FetchError::Missing { what }) });
        };
        let (fault, delay) = (self.next_fault(), *self.delay.lock().unwrap());
        Box::pin(async move {
            self.fetches.fetch_add(1, Ordering::SeqCst);
            let now = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            self.under_way_max.fetch_max(now, Ordering::SeqCst);
            tokio::time::sleep(delay).await;
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            let range = range.unwrap_or(0..whole.len() as u32);
            let mut bytes = whole[range.start as usize..range.end as usize].to_vec();
            let (middle, last) = (bytes.len() / 2, bytes.len() - 1);
            match fault {
                Fault::None => {}
                Fault::Corrupt => bytes[middle] ^= 1,
                Fault::Truncated => bytes.truncate(last),
                Fault::Swapped => bytes = whole.iter().rev().copied().cycle().take(bytes.len()).collect(),
                Fault::Zeros => bytes.fill(0),
                Fault::Missing => return Err(FetchError::Missing { what }),
                Fault::Outage => return Err(FetchError::Unreachable { why: format!("{what}: it is down") }),
                Fault::Silent => std::future::pending().await,
            }
            self.bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
            Ok(bytes.into())
        })
    }
}

impl PackSource for FakeStore {
    fn fetch(&self, pack: &PackId, range: Range<u32>) -> Fetching<'_> {
        self.order.lock().unwrap().push((*pack, range.start));
        self.answer(self.packs.get(pack), Some(range))
    }

    fn index(&self, blob: &BlobId) -> Fetching<'_> {
        self.answer(self.indexes.get(blob), None)
    }
}

/// An engine between a fake store and a cache of its own.
pub(crate) struct Bench {
    pub(crate) dir: TempDir,
    pub(crate) store: Arc<FakeStore>,
    pub(crate) engine: Arc<Engine>,
}

pub(crate) const BOOT: BootId = BootId([7; 16]);

impl Bench {
    pub(crate) fn new(made: &[&Made], limits: Limits) -> Self {
        Self::with_budget(made, limits, 1 << 40)
    }

    pub(crate) fn with_budget(made: &[&Made], limits: Limits, budget: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::open(dir.path(), budget, BOOT).unwrap());
        let store = FakeStore::of(made);
        let engine = Engine::new(cache, store.clone(), limits).unwrap();
        Self { dir, store, engine }
    }

    pub(crate) async fn blob(&self, made: &Made) -> Arc<Blob> {
        self.engine.blob(made.id()).await.unwrap()
    }
}

/// Limits with times that tests can wait for.
pub(crate) fn quick() -> Limits {
    Limits { outage_ms: 2_000, attempt_ms: 300, ..Limits::default() }
}
