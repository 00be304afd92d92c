//! What a collection must leave. The tiers, and why they are marked so, are in [`crate::collect`].

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use dsec_image::layer::{BlobId, LayerId, PackId};
use futures_util::{StreamExt as _, TryStreamExt as _};

use crate::collect::REQUESTS_MAX;
use crate::error::StoreError;
use crate::lease::Leases;
use crate::store::{Found, RECORD_MAX, Store};
use crate::{key, names};

/// How often marking begins again when what it read from vanishes under it, as another collector may make it.
const MARKINGS_MAX: usize = 8;
/// How long it waits before: the other may be in the midst of removing much.
const MARKING_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    Layers,
    Indexes,
    Packs,
}

impl Tier {
    pub(crate) fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Layers => &[key::LAYERS],
            Self::Indexes => &[key::BLOBS, key::METADATA, key::FILES],
            Self::Packs => &[key::PACKS],
        }
    }
}

/// What a layer keeps.
struct Refs {
    parents: Vec<LayerId>,
    below: Vec<String>,
}

/// Reads what refers to what. What never changes is remembered.
pub(crate) struct Marks {
    store: Store,
    layers: HashMap<LayerId, Refs>,
    blobs: HashMap<BlobId, Vec<PackId>>,
    names: References,
    steps: References,
    step_age: Duration,
}

/// The layers that objects refer to, by the objects' keys and states.
type References = HashMap<(String, Option<String>), LayerId>;

impl Marks {
    /// Steps that were used within `step_age` keep their layers.
    pub(crate) fn new(store: &Store, step_age: Duration) -> Self {
        Self {
            store: store.clone(),
            layers: HashMap::new(),
            blobs: HashMap::new(),
            names: HashMap::new(),
            steps: HashMap::new(),
            step_age,
        }
    }

    /// The keys of a tier that are referred to. Leases are read before all that refers, which the safety rests on.
    pub(crate) async fn live(&mut self, tier: Tier) -> Result<HashSet<String>, StoreError> {
        for _ in 1..MARKINGS_MAX {
            match self.mark(tier).await {
                Err(StoreError::NotFound { .. }) => tokio::time::sleep(MARKING_PAUSE).await,
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
                for id in self.existing_layers().await? {
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

    /// Adds the layers that names refer to, and the parents of all that exist. Of those that somebody relies on, none
    /// may be missing.
    async fn mark_layers(&mut self, live: &mut HashSet<String>) -> Result<(), StoreError> {
        let held: Vec<LayerId> = live
            .iter()
            .filter(|key| key.starts_with(key::LAYERS))
            .filter_map(|key| key::id_of(key))
            .collect();
        let mut relied_on = self.named_layers().await?;
        live.extend(relied_on.iter().map(key::layer));
        live.extend(self.recent_steps().await?.iter().map(key::layer));
        let existing = self.existing_layers().await?;
        for id in &existing {
            live.extend(self.layers[id].parents.iter().map(key::layer));
        }
        // What is held may not be published yet.
        relied_on.extend(held.into_iter().filter(|id| self.layers.contains_key(id)));
        self.with_those_below(relied_on).map(drop)
    }

    /// These layers and all below them.
    fn with_those_below(&self, mut open: Vec<LayerId>) -> Result<HashSet<LayerId>, StoreError> {
        let mut seen = HashSet::new();
        while let Some(id) = open.pop() {
            if seen.insert(id) {
                let refs = self.layers.get(&id);
                let refs = refs.ok_or_else(|| StoreError::NotFound { what: format!("layer {id}") })?;
                open.extend(&refs.parents);
            }
        }
        Ok(seen)
    }

    /// The layers that names stand for, and all below them.
    pub(crate) async fn named(&mut self) -> Result<HashSet<LayerId>, StoreError> {
        let named = self.named_layers().await?;
        self.existing_layers().await?;
        self.with_those_below(named)
    }

    async fn named_layers(&mut self) -> Result<Vec<LayerId>, StoreError> {
        let found = self.store.list(key::NAMES, None).await?;
        self.names = self.references(&self.names, found, false).await?;
        Ok(self.names.values().copied().collect())
    }

    /// The layers of steps that were used not long ago, as far as they are there: nobody relies on them.
    async fn recent_steps(&mut self) -> Result<Vec<LayerId>, StoreError> {
        let since_ms = self.store.now_ms().await?.saturating_sub(self.step_age.as_millis() as i64);
        let mut found = self.store.list(key::STEPS, None).await?;
        found.retain(|object| object.modified_ms >= since_ms);
        self.steps = self.references(&self.steps, found, true).await?;
        Ok(self.steps.values().copied().collect())
    }

    /// What objects refer to; those that are known are not read again. Of hints, a damaged one is none.
    async fn references(
        &self,
        known: &References,
        found: Vec<Found>,
        are_hints: bool,
    ) -> Result<References, StoreError> {
        let mut referred = HashMap::with_capacity(found.len());
        let mut unread = Vec::new();
        for object in found {
            let place = (object.key.clone(), object.e_tag.clone());
            match known.get(&place) {
                Some(id) => drop(referred.insert(place, *id)),
                None => unread.push(object),
            }
        }
        let store = &self.store;
        let mut reads = futures_util::stream::iter(unread)
            .map(|object| async move {
                let read = store.get(&object.key, "a reference", RECORD_MAX).await;
                match unless_gone(read.and_then(|bytes| names::layer_in(&object, &bytes))) {
                    Err(StoreError::Damaged { .. }) if are_hints => Ok(None),
                    read => Ok::<_, StoreError>(read?.map(|id| (object, id))),
                }
            })
            .buffer_unordered(REQUESTS_MAX);
        while let Some(read) = reads.try_next().await? {
            if let Some((object, id)) = read {
                referred.insert((object.key, object.e_tag), id);
            }
        }
        Ok(referred)
    }

    /// The layers that exist, each of which is known from now on, and no other.
    pub(crate) async fn existing_layers(&mut self) -> Result<Vec<LayerId>, StoreError> {
        let existing: HashSet<LayerId> =
            self.store.list(key::LAYERS, None).await?.iter().filter_map(|o| key::id_of(&o.key)).collect();
        self.layers.retain(|id, _| existing.contains(id));
        let unread = existing.into_iter().filter(|id| !self.layers.contains_key(id));
        let unread: Vec<LayerId> = unread.collect();
        let store = &self.store;
        let mut reads = futures_util::stream::iter(unread)
            .map(|id| async move {
                let manifest = unless_gone(store.manifest(&id).await)?;
                Ok::<_, StoreError>(manifest.map(|manifest| (id, manifest)))
            })
            .buffer_unordered(REQUESTS_MAX);
        while let Some(read) = reads.try_next().await? {
            let Some((id, manifest)) = read else { continue };
            let mut below: Vec<String> = manifest.blobs.iter().map(|blob| key::blob(&blob.id)).collect();
            below.extend([key::metadata(&manifest.metadata.id), key::files(&id)]);
            let parents = manifest.parents.iter().map(|parent| parent.layer).collect();
            self.layers.insert(id, Refs { parents, below });
        }
        Ok(self.layers.keys().copied().collect())
    }

    /// The blobs that exist, likewise.
    pub(crate) async fn existing_blobs(&mut self) -> Result<Vec<BlobId>, StoreError> {
        let existing: HashSet<BlobId> =
            self.store.list(key::BLOBS, None).await?.iter().filter_map(|o| key::id_of(&o.key)).collect();
        self.blobs.retain(|id, _| existing.contains(id));
        let unread = existing.into_iter().filter(|id| !self.blobs.contains_key(id));
        let unread: Vec<BlobId> = unread.collect();
        let store = &self.store;
        let mut reads = futures_util::stream::iter(unread)
            .map(|id| async move {
                let index = unless_gone(store.blob_index(&id).await)?;
                Ok::<_, StoreError>(index.map(|index| (id, index)))
            })
            .buffer_unordered(REQUESTS_MAX);
        while let Some(read) = reads.try_next().await? {
            if let Some((id, index)) = read {
                self.blobs.insert(id, index.packs().iter().map(|pack| pack.id).collect());
            }
        }
        Ok(self.blobs.keys().copied().collect())
    }
}

/// What was listed and is gone when it is read was removed by another collector or its owner, and keeps nothing: who puts
/// it again holds what it keeps, and either that hold was seen before the listing, or it waits for the list that is under
/// way.
fn unless_gone<T>(read: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match read {
        Err(StoreError::NotFound { .. }) => Ok(None),
        other => other.map(Some),
    }
}
