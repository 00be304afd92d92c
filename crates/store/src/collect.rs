//! Collection: what no name and no lease refers to goes, and nothing else, while others publish and read.
//!
//! Objects lie in tiers, and each tier is marked from **all that exists** in the tier above, referred to or not:
//!
//! ```text
//! names, leases ──► layers (and their parents) ──► blob indexes, metadata ──► packs
//! ```
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
//! marked; and it exists with all below it from the start, as a publisher holds everything until it has written it. A collector that dies leaves a list; it is
//! void after twice the time a collector gives itself, which also bounds how late a request that is under way may arrive. That, and that a
//! lease counts for twice its time, are the only uses of clocks. Collectors need not know of each other: each removes only under
//! its own list.
//!
//! **Fail closed.** If anything that is marked from cannot be read, the collection ends with that error and removes nothing more.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use dsec_image::layer::{BlobId, LayerId, PackId};
use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::PutMode;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::StoreError;
use crate::lease::Leases;
use crate::store::{Found, Store, json, random};
use crate::{key, names};

/// Objects in one list: a wait for it stays short, and the marking before each is done once for many.
const LIST_MAX: usize = 1000;
/// Objects read or removed at once.
const REQUESTS_MAX: usize = 16;
/// How often marking begins again when what it read from vanishes under it, as another collector may make it.
const MARKINGS_MAX: usize = 5;

/// How old a half-written file or a clock's object must be to be a dead writer's, whatever the grace: no lease holds them, and no
/// write takes this long.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// What a collection goes by.
#[derive(Debug, Clone)]
pub struct CollectSettings {
    /// What is younger stays, referred to or not.
    pub grace: Duration,
    /// How long a collector goes by one list. A publisher that wants what a dead collector listed waits for twice this.
    pub list_time: Duration,
}

impl Default for CollectSettings {
    fn default() -> Self {
        Self { grace: Duration::from_secs(24 * 3600), list_time: Duration::from_secs(60) }
    }
}

/// What a collection removed, in objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Manifests.
    pub layers: u64,
    /// Blob indexes and metadata images.
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
    time_ms: u64,
    keys: Vec<String>,
}

/// Whether a collection that is under way may remove this object.
pub(crate) async fn is_condemned(store: &Store, key: &str) -> Result<bool, StoreError> {
    let lists = store.list(key::COLLECT, None).await?;
    if lists.is_empty() {
        return Ok(false);
    }
    let now_ms = store.now_ms().await?;
    for object in lists {
        if let Some(list) = read_list(store, &object).await?
            && !list.is_void(&object, now_ms)
            && list.keys.iter().any(|listed| listed == key)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

impl List {
    fn is_void(&self, object: &Found, now_ms: i64) -> bool {
        now_ms.saturating_sub(object.modified_ms) > 2 * self.time_ms as i64
    }
}

async fn read_list(store: &Store, object: &Found) -> Result<Option<List>, StoreError> {
    match store.get(&object.key, "a collection's list").await {
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|error| StoreError::damaged(&object.key, error))
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    Layers,
    Indexes,
    Packs,
}

/// What a layer keeps.
struct Refs {
    parents: Vec<LayerId>,
    below: Vec<String>,
}

/// Collects, any number of times. What never changes is remembered from one time to the next, so one that is kept reads little.
pub struct Collector {
    store: Store,
    settings: CollectSettings,
    layers: HashMap<LayerId, Refs>,
    blobs: HashMap<BlobId, Vec<PackId>>,
    names: HashMap<(String, Option<String>), LayerId>,
}

impl Collector {
    /// A collector that remembers nothing yet.
    pub fn new(store: &Store, settings: CollectSettings) -> Self {
        Self {
            store: store.clone(),
            settings,
            layers: HashMap::new(),
            blobs: HashMap::new(),
            names: HashMap::new(),
        }
    }

    /// Collects once. May be dropped at any point.
    ///
    /// # Errors
    /// [`StoreError`]; what was removed until then is gone, and nothing that somebody refers to is.
    pub async fn run(&mut self) -> Result<Collected, StoreError> {
        self.store.check_marker().await?;
        let mut collected =
            Collected { leftovers: self.remove_leases_and_lists().await?, ..Default::default() };
        for tier in [Tier::Layers, Tier::Indexes, Tier::Packs] {
            self.sweep(tier, &mut collected).await?;
        }
        collected.leftovers += self.remove_hints().await? + self.remove_halves().await?;
        Ok(collected)
    }

    async fn remove_leases_and_lists(&self) -> Result<u64, StoreError> {
        let mut removed = Leases::read(&self.store).await?.remove_run_out(&self.store).await?;
        let now_ms = self.store.now_ms().await?;
        for object in self.store.list(key::COLLECT, None).await? {
            if read_list(&self.store, &object).await?.is_some_and(|list| list.is_void(&object, now_ms)) {
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
        let live = self.live(tier).await?;
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
        let place = format!("{}/{}", key::COLLECT, random()?);
        let keys = candidates.iter().map(|object| object.key.clone()).collect();
        let list = List { time_ms: self.settings.list_time.as_millis() as u64, keys };
        self.store.put_brief(&place, json(&list), PutMode::Create).await?;
        let removed = self.remove_unreferenced(tier, candidates, begun, collected).await;
        self.store.delete(&place).await?;
        removed
    }

    async fn remove_unreferenced(
        &mut self,
        tier: Tier,
        candidates: &[Found],
        begun: Instant,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let live = self.live(tier).await?;
        let (store, list_time) = (&self.store, self.settings.list_time);
        let doomed = candidates.iter().filter(|object| !live.contains(&object.key));
        let mut removals = futures_util::stream::iter(doomed)
            .map(|object| async move {
                // Past its time the list is void to others.
                if begun.elapsed() >= list_time {
                    return Ok(None);
                }
                store.delete(&object.key).await.map(|()| Some(object))
            })
            .buffer_unordered(REQUESTS_MAX);
        while let Some(removed) = removals.try_next().await? {
            if let Some(object) = removed {
                collected.count(tier, object.size);
            }
        }
        Ok(())
    }

    /// The keys of a tier that are referred to. Leases are read before the tier above, which the safety rests on.
    async fn live(&mut self, tier: Tier) -> Result<HashSet<String>, StoreError> {
        for _ in 1..MARKINGS_MAX {
            match self.mark(tier).await {
                Err(StoreError::NotFound { .. }) => {}
                other => return other,
            }
        }
        self.mark(tier).await.map_err(|error| match error {
            StoreError::NotFound { what } => StoreError::damaged(what, "it is referred to and is not there"),
            other => other,
        })
    }

    async fn mark(&mut self, tier: Tier) -> Result<HashSet<String>, StoreError> {
        let leases = Leases::read(&self.store).await?;
        let mut live: HashSet<String> = leases.held().map(str::to_owned).collect();
        match tier {
            Tier::Layers => self.mark_layers(&mut live).await?,
            Tier::Indexes => {
                let existing = self.existing_layers().await?;
                for id in existing {
                    live.extend(self.layers[&id].below.iter().cloned());
                }
            }
            Tier::Packs => {
                for id in self.existing_blobs().await? {
                    live.extend(self.blobs[&id].iter().map(key::pack));
                }
            }
        }
        Ok(live)
    }

    /// Adds the layers that names refer to, and the parents of all.
    async fn mark_layers(&mut self, live: &mut HashSet<String>) -> Result<(), StoreError> {
        let held: Vec<LayerId> = live
            .iter()
            .filter(|key| key.starts_with(key::LAYERS))
            .filter_map(|key| key::id_of(key))
            .collect();
        let mut open = Vec::new();
        for id in held {
            // What is held may not be published yet.
            match self.load_layer(id).await {
                Err(StoreError::NotFound { .. }) => {}
                other => {
                    other?;
                    open.push(id);
                }
            }
        }
        for id in self.named_layers().await? {
            if live.insert(key::layer(&id)) {
                self.load_layer(id).await?;
                open.push(id);
            }
        }
        while let Some(id) = open.pop() {
            for parent in self.layers[&id].parents.clone() {
                if live.insert(key::layer(&parent)) {
                    self.load_layer(parent).await?;
                    open.push(parent);
                }
            }
        }
        Ok(())
    }

    async fn named_layers(&mut self) -> Result<Vec<LayerId>, StoreError> {
        let found = self.store.list(key::NAMES, None).await?;
        let mut known = HashMap::with_capacity(found.len());
        let mut unread = Vec::new();
        for object in found {
            let place = (object.key.clone(), object.e_tag.clone());
            match self.names.get(&place) {
                Some(id) => drop(known.insert(place, *id)),
                None => unread.push(object),
            }
        }
        let store = &self.store;
        let mut reads = futures_util::stream::iter(unread)
            .map(|object| async move {
                match store.get(&object.key, "a name").await {
                    Err(StoreError::NotFound { .. }) => Ok(None),
                    Err(error) => Err(error),
                    Ok(bytes) => names::layer_in(&object, &bytes).map(|id| Some((object, id))),
                }
            })
            .buffer_unordered(REQUESTS_MAX);
        while let Some(read) = reads.try_next().await? {
            if let Some((object, id)) = read {
                known.insert((object.key, object.e_tag), id);
            }
        }
        self.names = known;
        Ok(self.names.values().copied().collect())
    }

    async fn existing_layers(&mut self) -> Result<Vec<LayerId>, StoreError> {
        let ids: Vec<LayerId> =
            self.store.list(key::LAYERS, None).await?.iter().filter_map(|o| key::id_of(&o.key)).collect();
        for id in &ids {
            self.load_layer(*id).await?;
        }
        let existing: HashSet<LayerId> = ids.iter().copied().collect();
        self.layers.retain(|id, _| existing.contains(id));
        Ok(ids)
    }

    async fn existing_blobs(&mut self) -> Result<Vec<BlobId>, StoreError> {
        let ids: Vec<BlobId> =
            self.store.list(key::BLOBS, None).await?.iter().filter_map(|o| key::id_of(&o.key)).collect();
        let existing: HashSet<BlobId> = ids.iter().copied().collect();
        self.blobs.retain(|id, _| existing.contains(id));
        let unread: Vec<BlobId> = ids.iter().filter(|id| !self.blobs.contains_key(id)).copied().collect();
        let store = &self.store;
        let mut reads = futures_util::stream::iter(unread)
            .map(|id| async move { store.blob_index(&id).await.map(|index| (id, index)) })
            .buffer_unordered(REQUESTS_MAX);
        while let Some((id, index)) = reads.try_next().await? {
            self.blobs.insert(id, index.packs().iter().map(|pack| pack.id).collect());
        }
        Ok(ids)
    }

    /// A layer's references. One that is remembered must still be there to keep its parents: what is gone keeps nothing.
    async fn load_layer(&mut self, id: LayerId) -> Result<(), StoreError> {
        if self.layers.contains_key(&id) {
            return Ok(());
        }
        let manifest = self.store.manifest(&id).await?;
        let mut below: Vec<String> = manifest.blobs.iter().map(|blob| key::blob(&blob.id)).collect();
        below.push(key::metadata(&manifest.metadata.id));
        let parents = manifest.parents.iter().map(|parent| parent.layer).collect();
        self.layers.insert(id, Refs { parents, below });
        Ok(())
    }

    /// Hints on what is gone. They are listed before what they speak of, so a hint on something new is never taken.
    async fn remove_hints(&mut self) -> Result<u64, StoreError> {
        let (oci, traces) =
            (self.store.list(key::OCI, None).await?, self.store.list(key::TRACES, None).await?);
        let layers: HashSet<LayerId> = self.existing_layers().await?.into_iter().collect();
        let blobs: HashSet<BlobId> = self.existing_blobs().await?.into_iter().collect();
        let now_ms = self.store.now_ms().await?;
        let mut removed = 0;
        for object in traces {
            if self.is_old(&object, now_ms) && key::id_of(&object.key).is_none_or(|id| !blobs.contains(&id)) {
                self.store.delete(&object.key).await?;
                removed += 1;
            }
        }
        for object in oci {
            if !self.is_old(&object, now_ms) {
                continue;
            }
            let bytes = match self.store.get(&object.key, "a conversion").await {
                Err(StoreError::NotFound { .. }) => continue,
                other => other?,
            };
            if names::layer_in(&object, &bytes).map_or(true, |id| !layers.contains(&id)) {
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
            .map_err(|error| StoreError::Unavailable { what, source: Box::new(error) })
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

impl Tier {
    fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Layers => &[key::LAYERS],
            Self::Indexes => &[key::BLOBS, key::METADATA],
            Self::Packs => &[key::PACKS],
        }
    }
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
