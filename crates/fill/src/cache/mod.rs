//! The node's cache: for each blob one sparse plain file, its index, and a map of the groups that are there.
//!
//! ```text
//! DIR/ID        content, sparse        DIR/ID.open    marks: see Mark
//! DIR/ID.index  the encoded index      DIR/ID.direct
//! DIR/ID.map    which groups are here  DIR/ID.pinned  DIR/lock, DIR/boot
//! ```
//!
//! All calls block on the disk and belong on a thread that may.

mod bits;
mod blob;
mod map;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use dsec_image::layer::{BlobId, BlobIndex, Digest};
use rustix::fs::{FlockOperation, flock};

pub(crate) use bits::Bits;
pub use blob::{CachedBlob, Mark};

/// How long a new worker waits for the cache: the one before it is being ended by the kernel.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// What is freed at once when the disk is full: enough for a few groups, little enough not to empty the cache for a
/// disk that others fill.
const FULL_DISK_FREES: u64 = 16 * dsec_image::layer::GROUP_SIZE;
/// Of the budget, what eviction leaves: it runs once per tenth of the budget, not once per group.
const EVICT_TO_PERCENT: u64 = 90;

/// Which boot of the machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootId(pub [u8; 16]);

impl BootId {
    /// Of the running kernel.
    ///
    /// # Errors
    /// `/proc` is not there.
    pub fn current() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let digits = text.trim().replace('-', "");
        let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
        Ok(Self(id.to_be_bytes()))
    }
}

/// What the cache could not do.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file of the cache.
    #[error("the cache's {path} cannot be used")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process works in this directory.
    #[error("{path} is another worker's cache; give each its own directory")]
    Taken {
        /// Which.
        path: PathBuf,
    },
    /// The first eight bytes of the ids of two blobs are the same, and the device tells blobs apart by them.
    #[error("blob {new} cannot be opened on this node: its number is that of {old}")]
    SameNumber {
        /// The one that is here.
        old: BlobId,
        /// The one that was to be opened.
        new: BlobId,
    },
    /// A file that was to become a blob's content is not that.
    #[error("{path} is not the content of blob {blob}: {found}")]
    NotTheContent {
        /// The file.
        path: PathBuf,
        /// The blob.
        blob: BlobId,
        /// What is wrong with it.
        found: String,
    },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> CacheError + '_ {
    move |source| CacheError::File { path: path.to_owned(), source }
}

/// What became of a group that was to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It is in the cache.
    Cached,
    /// There was no room: the budget is taken by what may not go, or the disk is full.
    NoRoom,
}

/// What became of a blob that may be of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LetGo {
    /// It is out of the cache.
    Gone,
    /// Some of it is here, or somebody has marked it, or it is not known here.
    Kept,
    /// Somebody is at work with it: later it may go.
    InUse,
}

/// Told of a blob that was taken out of the cache with its files.
type Removed = Box<dyn Fn(BlobId) + Send + Sync>;

/// The cache of a node.
pub struct Cache {
    dir: PathBuf,
    boot: BootId,
    budget: u64,
    used: AtomicU64,
    blobs: Mutex<Blobs>,
    evicting: Mutex<()>,
    removed: OnceLock<Removed>,
    /// Held as long as this lives.
    _lock: File,
}

#[derive(Debug, Default)]
struct Blobs {
    /// Every blob that has an index here, by the device's number for it.
    by_number: HashMap<u64, BlobId>,
    loaded: HashMap<BlobId, Arc<CachedBlob>>,
}

/// The device's number for a blob: the same in every worker that ever serves it. 0 and 1 mean other things.
pub fn number_of(blob: &BlobId) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&blob.0.as_bytes()[..8]);
    u64::from_be_bytes(bytes).max(2)
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cache").field(&self.dir).finish()
    }
}

impl Cache {
    /// Opens or makes the cache in `dir`, which may take `budget` bytes of content. Blobs of which nothing is here and that
    /// nobody has marked are forgotten.
    ///
    /// # Errors
    /// The directory cannot be used, or another process does.
    pub fn open(dir: &Path, budget: u64, boot: BootId) -> Result<Self, CacheError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))?;
        let lock = take_lock(dir)?;
        end_marks_of_other_boots(dir, boot)?;
        let (blobs, used) = look_through(dir)?;
        Ok(Self {
            dir: dir.to_owned(),
            boot,
            budget,
            used: AtomicU64::new(used),
            blobs: Mutex::new(blobs),
            evicting: Mutex::new(()),
            removed: OnceLock::new(),
            _lock: lock,
        })
    }

    /// Has `tell` called, on any thread and with no lock of the cache held, after a blob was taken out with its files. The
    /// first who asks is told.
    pub(crate) fn when_removed(&self, tell: impl Fn(BlobId) + Send + Sync + 'static) {
        self.removed.set(Box::new(tell)).ok();
    }

    /// A blob whose index is here.
    ///
    /// # Errors
    /// Its files cannot be used.
    pub fn blob(&self, id: BlobId) -> Result<Option<Arc<CachedBlob>>, CacheError> {
        self.find(&mut hold(&self.blobs), id)
    }

    fn find(&self, blobs: &mut Blobs, id: BlobId) -> Result<Option<Arc<CachedBlob>>, CacheError> {
        if let Some(blob) = blobs.loaded.get(&id) {
            return Ok(Some(blob.clone()));
        }
        if blobs.by_number.get(&number_of(&id)) != Some(&id) {
            return Ok(None);
        }
        let path = self.dir.join(id.to_string()).with_extension("index");
        let index = match fs::read(&path) {
            Ok(bytes) => BlobIndex::decode(&bytes).ok().filter(|index| index.id() == id),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(at(&path)(e)),
        };
        // A power cut can leave an index without its bytes; it is fetched again.
        let Some(index) = index else { return Ok(None) };
        let blob = Arc::new(CachedBlob::load(&self.dir, id, index, &self.boot).map_err(at(&path))?);
        blobs.loaded.insert(id, blob.clone());
        Ok(Some(blob))
    }

    /// A blob by the device's number for it.
    ///
    /// # Errors
    /// As [`Self::blob`].
    pub fn by_number(&self, number: u64) -> Result<Option<Arc<CachedBlob>>, CacheError> {
        let mut blobs = hold(&self.blobs);
        match blobs.by_number.get(&number).copied() {
            Some(id) => self.find(&mut blobs, id),
            None => Ok(None),
        }
    }

    /// Makes a blob known by its index, which is its id's.
    ///
    /// # Errors
    /// The index cannot be written; another blob has its number.
    pub fn add(&self, index: &BlobIndex) -> Result<Arc<CachedBlob>, CacheError> {
        let id = index.id();
        let mut blobs = hold(&self.blobs);
        if let Some(blob) = self.find(&mut blobs, id)? {
            return Ok(blob);
        }
        if let Some(old) = blobs.by_number.get(&number_of(&id)).copied()
            && old != id
        {
            return Err(CacheError::SameNumber { old, new: id });
        }
        let path = self.dir.join(id.to_string()).with_extension("index");
        let new = path.with_extension("index.new");
        fs::write(&new, index.encode()).map_err(at(&new))?;
        fs::rename(&new, &path).map_err(at(&path))?;
        blobs.by_number.insert(number_of(&id), id);
        let blob = CachedBlob::load(&self.dir, id, index.clone(), &self.boot).map_err(at(&path))?;
        Ok(blobs.loaded.entry(id).insert_entry(Arc::new(blob)).get().clone())
    }

    /// Blobs that are known here, with their numbers.
    pub fn known(&self) -> Vec<(u64, BlobId)> {
        hold(&self.blobs).by_number.iter().map(|(number, id)| (*number, *id)).collect()
    }

    /// Bytes of content that are here.
    pub fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes of content that may be here.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of content that may not go: their blobs are mounted directly or pinned.
    pub fn kept_bytes(&self) -> u64 {
        let (kept, _) = self.by_fate();
        kept.iter().map(|blob| blob.here_bytes()).sum()
    }

    /// The blobs of which nothing may go, and the others.
    fn by_fate(&self) -> (Vec<Arc<CachedBlob>>, Vec<Arc<CachedBlob>>) {
        let known = self.known().into_iter().filter_map(|(_, id)| {
            let found = self.blob(id);
            found
                .inspect_err(|error| tracing::warn!(blob = %id, %error, "a blob cannot be looked at"))
                .ok()?
        });
        known.partition(|blob| blob.is_kept())
    }

    /// Keeps a group whose bytes were checked.
    ///
    /// # Errors
    /// The disk, for another reason than being full.
    pub fn store(&self, blob: &CachedBlob, group: u64, plain: &[u8]) -> Result<Stored, CacheError> {
        let need = plain.len() as u64;
        if !self.make_room(need) {
            return Ok(Stored::NoRoom);
        }
        let mut written = blob.write(group, plain);
        if is_full(&written) && self.evict_oldest(FULL_DISK_FREES) > 0 {
            written = blob.write(group, plain);
        }
        if !matches!(written, Ok(true)) {
            self.count_freed(need);
        }
        match written {
            Ok(_) => Ok(Stored::Cached),
            Err(_) if is_full(&written) => Ok(Stored::NoRoom),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Stored::NoRoom),
            Err(e) => Err(at(blob.path())(e)),
        }
    }

    /// Takes this much of the budget, from other content if it must. Whether it could.
    fn make_room(&self, bytes: u64) -> bool {
        if self.reserve(bytes) {
            return true;
        }
        let to = self.budget * EVICT_TO_PERCENT / 100;
        self.evict_oldest((self.used_bytes() + bytes).saturating_sub(to));
        self.reserve(bytes)
    }

    fn reserve(&self, bytes: u64) -> bool {
        let more = |used: u64| (used + bytes <= self.budget).then_some(used + bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Takes content out, what was asked for longest ago first, until `bytes` are free: bytes that were freed.
    pub fn evict_oldest(&self, bytes: u64) -> u64 {
        let _one = hold(&self.evicting);
        let (_, blobs) = self.by_fate();
        let mut ages: Vec<(u32, usize, u64)> = Vec::new();
        for (at, blob) in blobs.iter().enumerate() {
            ages.extend(blob.ages().map(|(used_s, group)| (used_s, at, group)));
        }
        ages.sort_unstable();
        let mut freed = 0;
        for same_blob in ages.chunk_by(|a, b| a.1 == b.1) {
            if freed >= bytes {
                break;
            }
            let blob = &blobs[same_blob[0].1];
            let mut chosen = 0;
            let enough = |(_, _, group): &&(u32, usize, u64)| {
                let wanted = freed + chosen < bytes;
                chosen += blob.index().plain_len(*group);
                wanted
            };
            let groups: Vec<u64> = same_blob.iter().take_while(enough).map(|(_, _, group)| *group).collect();
            freed += self.evict(blob, groups);
        }
        freed
    }

    /// Takes a blob's content out, and its files when nobody has marked it: bytes that were freed.
    pub fn evict_blob(&self, blob: &CachedBlob) -> u64 {
        self.evict(blob, 0..blob.index().groups().len() as u64)
    }

    fn evict(&self, blob: &CachedBlob, groups: impl IntoIterator<Item = u64>) -> u64 {
        let freed = blob.evict(groups).unwrap_or_else(|error| {
            tracing::warn!(blob = %blob.id(), %error, "content cannot be evicted");
            0
        });
        self.count_freed(freed);
        let removed = self.remove_if_unused(&mut hold(&self.blobs), blob);
        if let Some(tell) = self.removed.get().filter(|_| removed) {
            tell(blob.id());
        }
        freed
    }

    /// Takes a blob out with its files if nothing of it is here and nobody has marked it. Besides the cache and the caller
    /// nobody may be at work with it. Who was to be told of it is not.
    pub(crate) fn let_go(&self, blob: &Arc<CachedBlob>) -> LetGo {
        let mut blobs = hold(&self.blobs);
        let known = blobs.loaded.get(&blob.id()).is_some_and(|known| Arc::ptr_eq(known, blob));
        if !known || !blob.is_unused() {
            return LetGo::Kept;
        }
        // Who gets it from here needs the lock.
        if Arc::strong_count(blob) > 2 {
            return LetGo::InUse;
        }
        if self.remove_if_unused(&mut blobs, blob) { LetGo::Gone } else { LetGo::Kept }
    }

    fn remove_if_unused(&self, blobs: &mut Blobs, blob: &CachedBlob) -> bool {
        let removed = blob.remove_if_unused();
        if removed {
            blobs.loaded.remove(&blob.id());
            blobs.by_number.remove(&number_of(&blob.id()));
        }
        removed
    }

    /// Says of a group whose bytes cannot be read that it is not here, so that it is fetched again.
    pub fn disown(&self, blob: &CachedBlob, group: u64) {
        match blob.disown(group) {
            Ok(true) => self.count_freed(blob.index().plain_len(group)),
            Ok(false) => {}
            Err(error) => tracing::error!(blob = %blob.id(), group, %error, "a group cannot be disowned"),
        }
    }

    /// What was there before the count began is counted by blocks, so it can come out below.
    fn count_freed(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok();
    }

    /// Takes in a whole blob that was made on this node, group by group, each checked. The file stays.
    ///
    /// # Errors
    /// The file is something else; the disk.
    pub fn insert_complete(&self, blob: &CachedBlob, path: &Path) -> Result<Stored, CacheError> {
        let file = File::open(path).map_err(at(path))?;
        check_size(blob, path, &file)?;
        for (group, expected) in (0..).zip(blob.index().groups()) {
            if blob.has(group) {
                continue;
            }
            let range = blob.range_of(group);
            let mut plain = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut plain, range.start).map_err(at(path))?;
            if Digest::of(&plain) != expected.hash {
                let found = format!("the bytes from {} on have another digest", range.start);
                return Err(CacheError::NotTheContent { path: path.to_owned(), blob: blob.id(), found });
            }
            if self.store(blob, group, &plain)? == Stored::NoRoom {
                return Ok(Stored::NoRoom);
            }
        }
        blob.seal().map_err(at(blob.path()))?;
        Ok(Stored::Cached)
    }

    /// Takes over the file of a whole blob that its maker has just hashed: by its name, without reading it. One on another file
    /// system is copied and checked. The file is gone afterwards, unless there was no room for it. It is not sealed.
    ///
    /// # Errors
    /// As [`Self::insert_complete`]; the file stays.
    pub fn take_complete(&self, blob: &CachedBlob, path: &Path) -> Result<Stored, CacheError> {
        let stored = if blob.is_complete() { Stored::Cached } else { self.adopt(blob, path)? };
        if stored == Stored::Cached {
            blob::remove(path).map_err(at(path))?;
        }
        Ok(stored)
    }

    fn adopt(&self, blob: &CachedBlob, path: &Path) -> Result<Stored, CacheError> {
        check_size(blob, path, &File::open(path).map_err(at(path))?)?;
        let need = blob.missing_bytes();
        if !self.make_room(need) {
            return Ok(Stored::NoRoom);
        }
        let adopted = blob.adopt(path);
        // Others may have brought some of it meanwhile, or taken some away.
        match &adopted {
            Ok(came) if *came > need => {
                self.used.fetch_add(came - need, Ordering::Relaxed);
            }
            Ok(came) => self.count_freed(need - came),
            Err(_) => self.count_freed(need),
        }
        match adopted {
            Ok(_) => Ok(Stored::Cached),
            Err(e) if e.kind() == io::ErrorKind::CrossesDevices => self.insert_complete(blob, path),
            Err(e) => Err(at(path)(e)),
        }
    }
}

fn check_size(blob: &CachedBlob, path: &Path, file: &File) -> Result<(), CacheError> {
    let found = file.metadata().map_err(at(path))?;
    if found.is_file() && found.len() == blob.index().size() {
        return Ok(());
    }
    let found = format!("it has {} bytes instead of {}", found.len(), blob.index().size());
    Err(CacheError::NotTheContent { path: path.to_owned(), blob: blob.id(), found })
}

fn is_full(written: &io::Result<bool>) -> bool {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    written.as_ref().is_err_and(|error| full.contains(&error.kind()))
}

fn take_lock(dir: &Path) -> Result<File, CacheError> {
    let path = dir.join("lock");
    let file = File::create(&path).map_err(at(&path))?;
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(CacheError::Taken { path: dir.to_owned() }),
            Err(e) => return Err(at(&path)(e.into())),
        }
    }
}

/// What is here, and how many bytes of content it takes. What is of no use any more is removed.
fn look_through(dir: &Path) -> Result<(Blobs, u64), CacheError> {
    let (mut blobs, mut used, mut others) = (Blobs::default(), 0, Vec::new());
    let mut kept = HashSet::new();
    for entry in fs::read_dir(dir).map_err(at(dir))? {
        let entry = entry.map_err(at(dir))?;
        let (name, path) = (entry.file_name(), entry.path());
        let Some((id, extension)) = name.to_str().and_then(blob_of) else { continue };
        if extension.is_some() {
            others.push((id, path));
            continue;
        }
        let is_marked = || Mark::ALL.iter().any(|mark| path.with_extension(mark.extension()).exists());
        let bytes = entry.metadata().map_err(at(&path))?.blocks() * 512;
        if path.with_extension("index").exists() && (bytes > 0 || is_marked()) {
            blobs.by_number.insert(number_of(&id), id);
            kept.insert(id);
            used += bytes;
        } else {
            // Its index never came, its removal was cut short, or it was opened and never read.
            fs::remove_file(&path).map_err(at(&path))?;
        }
    }
    for (id, path) in others {
        let is_half = path.extension().is_some_and(|end| end == blob::TAKEN || end == blob::NEW);
        if is_half || !kept.contains(&id) {
            blob::remove(&path).map_err(at(&path))?;
        }
    }
    Ok((blobs, used))
}

/// The blob that a file here is of, and what follows the dot in its name.
fn blob_of(name: &str) -> Option<(BlobId, Option<&str>)> {
    let (id, extension) = match name.split_once('.') {
        Some((id, extension)) => (id, Some(extension)),
        None => (name, None),
    };
    Some((id.parse().ok()?, extension))
}

/// Mounts end with the machine; what they kept is free again.
fn end_marks_of_other_boots(dir: &Path, boot: BootId) -> Result<(), CacheError> {
    let path = dir.join("boot");
    match fs::read(&path) {
        Ok(bytes) if bytes == boot.0 => return Ok(()),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(at(&path)(e)),
    }
    for entry in fs::read_dir(dir).map_err(at(dir))? {
        let file = entry.map_err(at(dir))?.path();
        let ends = [Mark::Open, Mark::Direct].map(|mark| mark.extension());
        if file.extension().is_some_and(|extension| ends.iter().any(|end| extension == *end)) {
            fs::remove_file(&file).map_err(at(&file))?;
        }
    }
    fs::write(&path, boot.0).map_err(at(&path))
}

/// A lock whose holder panicked still guards what each step leaves whole.
pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_hold<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write_hold<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
