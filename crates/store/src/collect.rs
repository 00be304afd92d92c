//! Collection: what no name and no lease refers to goes, and nothing else, while others publish and read.
//!
//! Objects lie in tiers, and each tier is marked from **all that exists** in the tier above, referred to or not:
//!
//! ```text
//! names, leases, recent steps, layers (their parents) ──► layers ──► blob indexes, metadata, file indexes ──► packs
//! ```
//!
//! What a step of a recipe came to (`steps/`) keeps its layer for a while after its last use, and promises nothing: a step that is gone
//! is done again. Who uses the layer holds it by a lease as any other.
//!
//! So what exists has all that it refers to, whether somebody refers to it or not: it may be held at any time. Of a chain of layers
//! the last goes first, then its parents.
//!
//! One tier is swept so: candidates are objects that nothing refers to and that are older than the grace, by the store's own
//! clock. The collector (1) writes them down in `collect/`, (2) reads **leases first, then the tier above** once more, (3) removes the candidates
//! that are still not referred to, unless its time is up, (4) removes the list.
//!
//! Who wants an object to stay (`Lease::settle`) (a) writes the hold, (b) reads the lists in `collect/`; if one has the
//! object it waits until the list is gone, and (c) looks whether the object is there, and puts it if not.
//!
//! **Why nothing is lost that somebody relies on.** The store is linearizable for each step. If (b) did not show the list, it was written
//! after (a), so (2) shows the hold and the object stays. If (b) showed it, (c) comes after the list's end, and any later list
//! falls under the first case. A publisher lets a hold go only after it wrote what refers to the object, and (2) reads leases before
//! references, so one of both is seen. A layer in use is held by its manifest alone: while a manifest exists, tier by tier, all below it is
//! marked; and it exists with all below it from the start, as a publisher holds everything until it has written it. A collector that dies, or whose removal
//! fails, leaves a list. It is void when the collector's time is over and no removal that was sent in it can arrive any more: each is
//! sent once, waited for no longer than the store's settings say, and taken to arrive no later than as long again. That, and that a lease counts for
//! twice its time, are the only uses of clocks. Should one be later all the same, a publisher that met a void list with an object of its
//! own looks at it once more before and after it names what relies on it. Collectors need not know of each other: each removes only under
//! its own list.
//!
//! **Fail closed.** If anything that is marked from cannot be read, the collection ends with that error and removes nothing more. A list that
//! cannot be read names everything, for two hours.

use std::collections::HashSet;
use std::time::Duration;

use dsec_image::layer::{BlobId, LayerId};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::StoreError;
use crate::lease::{Brief, Leases, read_brief};
use crate::mark::{Marks, Tier};
use crate::store::{Found, RECORD_MAX, Store, json};
use crate::{key, lease, names};

/// Objects in one list: a wait for it stays short, and the marking before each is done once for many.
const LIST_MAX: usize = 1000;
/// Bytes of a list: that many keys and room.
const LIST_SIZE_MAX: u64 = 1 << 20;
/// Objects read or removed at once.
pub(crate) const REQUESTS_MAX: usize = 16;

/// How old a half-written file or a clock's object must be to be a dead writer's, whatever the grace: no lease holds them, and no
/// write takes this long.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// What a collection goes by.
#[derive(Debug, Clone)]
pub struct CollectSettings {
    /// What is younger stays, referred to or not.
    pub grace: Duration,
    /// How long the layer of a recipe's step stays after it was last used, though nothing else refers to it.
    pub step_age: Duration,
    /// How long a collector goes by one list. A publisher that wants what a dead collector listed waits for this and twice
    /// `removal_max`.
    pub list_time: Duration,
    /// How long one removal is waited for. By default as long as the store may take: a bucket for a request, a disk of this
    /// host a minute, a directory that hosts share half an hour.
    pub removal_max: Option<Duration>,
}

impl Default for CollectSettings {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(24 * 3600),
            step_age: Duration::from_secs(7 * 24 * 3600),
            list_time: Duration::from_secs(60),
            removal_max: None,
        }
    }
}

/// What a collection removed, in objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Manifests.
    pub layers: u64,
    /// Blob indexes, metadata images and file indexes.
    pub indexes: u64,
    /// Packs.
    pub packs: u64,
    /// Their bytes.
    pub pack_bytes: u64,
    /// Hints, lists and leases that stood for nothing any more, halves of files of dead writers.
    pub leftovers: u64,
}

#[derive(Serialize, Deserialize)]
struct List {
    /// How long after it was written it counts.
    void_ms: u64,
    keys: Vec<String>,
}

/// What collections may do to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// No list names it.
    Stays,
    /// One that is void does.
    MayGoLate,
    /// One does.
    MayGo,
}

/// Whether a collection that is under way may remove this object.
pub(crate) async fn outlook(store: &Store, key: &str) -> Result<Outlook, StoreError> {
    let lists = store.list(key::COLLECT, None).await?;
    let mut outlook = Outlook::Stays;
    if lists.is_empty() {
        return Ok(outlook);
    }
    let now_ms = store.now_ms().await?;
    for object in lists {
        let list = read_brief::<List>(store, &object, "a collection's list", LIST_SIZE_MAX).await?;
        match list.may_name(key) {
            true if !list.is_void(&object, now_ms) => return Ok(Outlook::MayGo),
            true => outlook = Outlook::MayGoLate,
            false => {}
        }
    }
    Ok(outlook)
}

impl Brief<List> {
    fn is_void(&self, object: &Found, now_ms: i64) -> bool {
        let counts_ms = match self {
            Self::Gone => return true,
            Self::Unreadable => lease::UNREADABLE_MAX.as_millis() as i64,
            Self::Read(list) => i64::try_from(list.void_ms).unwrap_or(i64::MAX),
        };
        now_ms.saturating_sub(object.modified_ms) > counts_ms
    }

    fn may_name(&self, key: &str) -> bool {
        match self {
            Self::Gone => false,
            Self::Unreadable => true,
            Self::Read(list) => list.keys.iter().any(|listed| listed == key),
        }
    }
}

/// Collects, any number of times. What never changes is remembered from one time to the next, so one that is kept reads little.
pub struct Collector {
    store: Store,
    settings: CollectSettings,
    marks: Marks,
}

impl Collector {
    /// A collector that remembers nothing yet.
    pub fn new(store: &Store, settings: CollectSettings) -> Self {
        let marks = Marks::new(store, settings.step_age);
        Self { store: store.clone(), settings, marks }
    }

    /// Collects once. May be dropped at any point.
    ///
    /// # Errors
    /// [`StoreError`]; what was removed until then is gone, and nothing that somebody refers to is.
    pub async fn run(&mut self) -> Result<Collected, StoreError> {
        self.store.check_marker().await?;
        let mut collected =
            Collected { leftovers: self.remove_leases_and_lists().await?, ..Default::default() };
        // A layer keeps its parents, so those that nothing else keeps show once it is gone.
        loop {
            let before = collected.layers;
            self.sweep(Tier::Layers, &mut collected).await?;
            if collected.layers == before {
                break;
            }
        }
        for tier in [Tier::Indexes, Tier::Packs] {
            self.sweep(tier, &mut collected).await?;
        }
        collected.leftovers += self.remove_hints().await? + self.remove_halves().await?;
        Ok(collected)
    }

    /// Of these layers, those that no name stands for, nor for any above them. Who holds one of them and does not use it is to let
    /// go of it: nobody will ask for it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unnamed(&mut self, layers: Vec<LayerId>) -> Result<Vec<LayerId>, StoreError> {
        if layers.is_empty() {
            return Ok(layers);
        }
        let named = self.marks.named().await?;
        Ok(layers.into_iter().filter(|id| !named.contains(id)).collect())
    }

    async fn remove_leases_and_lists(&self) -> Result<u64, StoreError> {
        let mut removed = Leases::read(&self.store).await?.remove_run_out(&self.store).await?;
        let now_ms = self.store.now_ms().await?;
        for object in self.store.list(key::COLLECT, None).await? {
            let list = read_brief::<List>(&self.store, &object, "a collection's list", LIST_SIZE_MAX).await?;
            if list.is_void(&object, now_ms) {
                self.store.delete(&object.key).await?;
                removed += 1;
            }
        }
        for object in self.store.list(key::CLOCK, None).await? {
            if now_ms.saturating_sub(object.modified_ms) > TEMPORARY_AGE.as_millis() as i64 {
                self.store.delete(&object.key).await?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn is_old(&self, object: &Found, now_ms: i64) -> bool {
        now_ms.saturating_sub(object.modified_ms) > self.settings.grace.as_millis() as i64
    }

    async fn sweep(&mut self, tier: Tier, collected: &mut Collected) -> Result<(), StoreError> {
        let live = self.marks.live(tier).await?;
        let now_ms = self.store.now_ms().await?;
        let mut candidates = Vec::new();
        for prefix in tier.prefixes() {
            let found = self.store.list(prefix, None).await?;
            candidates.extend(
                found.into_iter().filter(|object| self.is_old(object, now_ms) && !live.contains(&object.key)),
            );
        }
        for part in candidates.chunks(LIST_MAX) {
            self.sweep_listed(tier, part, collected).await?;
        }
        Ok(())
    }

    async fn sweep_listed(
        &mut self,
        tier: Tier,
        candidates: &[Found],
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let begun = Instant::now();
        let place = format!("{}/{}", key::COLLECT, self.store.random()?);
        let keys = candidates.iter().map(|object| object.key.clone()).collect();
        let void = self.settings.list_time + 2 * self.removal_max();
        let list = List { void_ms: void.as_millis() as u64, keys };
        // Unlike a lease it is not written again: publishers would wait long for one that lost its bytes.
        self.store.put_new(&place, json(&list)).await?;
        match self.marks.live(tier).await {
            // A removal that failed may still be under way: then the list stays until it is void.
            Ok(live) => self.remove_unreferenced(tier, candidates, &live, begun, collected).await?,
            Err(error) => {
                self.store.delete(&place).await?;
                return Err(error);
            }
        }
        self.store.delete(&place).await
    }

    async fn remove_unreferenced(
        &self,
        tier: Tier,
        candidates: &[Found],
        live: &HashSet<String>,
        begun: Instant,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let (store, list_time, removal_max) = (&self.store, self.settings.list_time, self.removal_max());
        let doomed = candidates.iter().filter(|object| !live.contains(&object.key));
        let mut removals = futures_util::stream::iter(doomed)
            .map(|object| async move {
                // What is sent later could arrive when the list is void to others.
                if begun.elapsed() >= list_time {
                    return Ok(None);
                }
                let removal = tokio::time::timeout(removal_max, store.delete_once(&object.key)).await;
                let source = || format!("its removal did not end in {removal_max:?}");
                removal.map_err(|_| store.unavailable(&object.key, source()))??;
                Ok::<_, StoreError>(Some(object))
            })
            .buffer_unordered(REQUESTS_MAX);
        // One that fails keeps the others from nothing.
        let mut failed = None;
        while let Some(removed) = removals.next().await {
            match removed {
                Ok(Some(object)) => collected.count(tier, object.size),
                Ok(None) => {}
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn removal_max(&self) -> Duration {
        self.settings.removal_max.unwrap_or(self.store.removal_max())
    }

    /// Hints on what is gone. They are listed before what they speak of, so a hint on something new is never taken.
    async fn remove_hints(&mut self) -> Result<u64, StoreError> {
        let traces = self.store.list(key::TRACES, None).await?;
        let mut of_layers = self.store.list(key::OCI, None).await?;
        of_layers.extend(self.store.list(key::STEPS, None).await?);
        let layers: HashSet<LayerId> = self.marks.existing_layers().await?.into_iter().collect();
        let blobs: HashSet<BlobId> = self.marks.existing_blobs().await?.into_iter().collect();
        let now_ms = self.store.now_ms().await?;
        let mut removed = 0;
        for object in traces {
            if self.is_old(&object, now_ms) && key::id_of(&object.key).is_none_or(|id| !blobs.contains(&id)) {
                self.store.delete(&object.key).await?;
                removed += 1;
            }
        }
        for object in of_layers {
            if !self.is_old(&object, now_ms) {
                continue;
            }
            let read = self.store.get(&object.key, "a hint", RECORD_MAX).await;
            let layer = match read.and_then(|bytes| names::layer_in(&object, &bytes)) {
                Err(StoreError::NotFound { .. }) => continue,
                // One that is damaged says nothing.
                Err(StoreError::Damaged { .. }) => None,
                layer => Some(layer?),
            };
            if layer.is_none_or(|id| !layers.contains(&id)) {
                self.store.delete(&object.key).await?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// What writers that died left in a directory: files that were never given their name, `<name>#<number>`.
    async fn remove_halves(&self) -> Result<u64, StoreError> {
        let Some(directory) = self.store.directory().cloned() else { return Ok(0) };
        let now_ms = self.store.now_ms().await?;
        let before_ms = now_ms - TEMPORARY_AGE.as_millis() as i64;
        let what = directory.display().to_string();
        let walk = tokio::task::spawn_blocking(move || remove_halves(&directory, before_ms)).await;
        walk.unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| self.store.unavailable(what, error))
    }
}

fn remove_halves(directory: &std::path::Path, before_ms: i64) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut removed = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            removed += remove_halves(&entry.path(), before_ms)?;
            continue;
        }
        let is_half = name.to_str().and_then(|name| name.rsplit_once('#')).is_some_and(|(_, number)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        });
        let Ok(metadata) = entry.metadata() else { continue };
        if is_half && metadata.mtime() * 1000 < before_ms {
            match std::fs::remove_file(entry.path()) {
                Ok(()) => removed += 1,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(removed)
}

impl Collected {
    fn count(&mut self, tier: Tier, size: u64) {
        match tier {
            Tier::Layers => self.layers += 1,
            Tier::Indexes => self.indexes += 1,
            Tier::Packs => {
                self.packs += 1;
                self.pack_bytes += size;
            }
        }
    }
}

#[cfg(test)]
mod tests;
