//! Names: versions, which never change, and tags, which move.
//!
//! A tag is a row of objects numbered upwards, of which the last counts. Moving it makes the next number, if absent: of two
//! that move it at once one gets a conflict, on a directory as on a bucket, and a reader sees the one or the other.

use std::collections::BTreeMap;

use bytes::Bytes;
use dsec_image::layer::{Digest, Label, LayerId, LayerKind, LayerName, LayerRef, Select};
use serde::{Deserialize, Serialize};

use crate::error::StoreError;
use crate::store::{Found, RECORD_MAX, Store, json};
use crate::{key, lease};

/// How often a tag is looked up again when it moves between the listing and the reading.
const LOOKUPS_MAX: usize = 8;

/// One version of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Which.
    pub version: Label,
    /// Its layer.
    pub layer: LayerId,
}

/// A name with all that it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameEntry {
    /// What its layers are for.
    pub kind: LayerKind,
    /// The name.
    pub name: LayerName,
    /// Its versions, by their text.
    pub versions: Vec<Label>,
    /// Its tags, by their text.
    pub tags: Vec<Label>,
}

/// A part of the list of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePage {
    /// Names, in order.
    pub entries: Vec<NameEntry>,
    /// Give this as `after` for the next page; `None` at the end.
    pub next: Option<LayerName>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VersionRecord {
    layer: LayerId,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TagRecord {
    version: Label,
    layer: LayerId,
}

impl Store {
    /// The layer a name means now.
    ///
    /// # Errors
    /// `NotFound` says which of name, tag and version there is none of.
    pub async fn resolve(&self, kind: LayerKind, name: &LayerRef) -> Result<LayerId, StoreError> {
        match &name.select {
            Select::Version(version) => self.version(kind, &name.name, version).await,
            Select::Tag(tag) => match self.tag_record(kind, &name.name, tag).await? {
                Some((_, record)) => Ok(record.layer),
                None => Err(StoreError::NotFound { what: format!("{kind} {name}") }),
            },
        }
    }

    async fn version(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
    ) -> Result<LayerId, StoreError> {
        let what = format!("{kind} {name}@{version}");
        let bytes = self.get(&key::version(kind, name, version), &what, RECORD_MAX).await?;
        let record: VersionRecord =
            serde_json::from_slice(&bytes).map_err(|error| StoreError::damaged(what, error))?;
        Ok(record.layer)
    }

    /// Gives a layer a version of a name, for ever. The same once more is no error. The caller holds the layer.
    ///
    /// # Errors
    /// `Conflict` if the version is another layer.
    pub async fn put_version(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
        layer: LayerId,
    ) -> Result<(), StoreError> {
        if self.put_new(&key::version(kind, name, version), json(&VersionRecord { layer })).await? {
            return Ok(());
        }
        let there = self.version(kind, name, version).await?;
        if there == layer {
            return Ok(());
        }
        Err(StoreError::Conflict {
            what: format!("{kind} {name}@{version}"),
            problem: format!("it is layer {there} already and a version never changes: give another version"),
        })
    }

    /// Puts a tag on a version, wherever it was before.
    ///
    /// # Errors
    /// `Conflict` if somebody else moves it at the same time; `NotFound` if there is no such version.
    pub async fn tag(
        &self,
        kind: LayerKind,
        name: &LayerName,
        tag: &Label,
        version: &Label,
    ) -> Result<(), StoreError> {
        let layer = self.version(kind, name, version).await?;
        let there = self.tag_record(kind, name, tag).await?;
        if there.as_ref().is_some_and(|(_, record)| record.version == *version && record.layer == layer) {
            return Ok(());
        }
        let number = there.map_or(0, |(number, _)| number) + 1;
        let place = |number: u64| format!("{}/{tag}@{number:016x}", key::tags(kind, name));
        let record = TagRecord { version: version.clone(), layer };
        if !self.put_new(&place(number), json(&record)).await? {
            return Err(StoreError::Conflict {
                what: format!("{kind} {name}:{tag}"),
                problem: "somebody else moved the tag just now: look where it is and try again".to_owned(),
            });
        }
        for old in self.tag_objects(kind, name, tag).await? {
            if old.1 < number {
                self.delete(&old.0.key).await?;
            }
        }
        Ok(())
    }

    /// The version that a tag is on.
    ///
    /// # Errors
    /// `NotFound` if there is no such tag.
    pub async fn tagged(&self, kind: LayerKind, name: &LayerName, tag: &Label) -> Result<Label, StoreError> {
        let found = self.tag_record(kind, name, tag).await?;
        let none = || StoreError::NotFound { what: format!("{kind} {name}:{tag}") };
        found.map(|(_, record)| record.version).ok_or_else(none)
    }

    /// Takes a tag away. The version stays.
    ///
    /// # Errors
    /// `NotFound` if there is no such tag.
    pub async fn untag(&self, kind: LayerKind, name: &LayerName, tag: &Label) -> Result<(), StoreError> {
        let objects = self.tag_objects(kind, name, tag).await?;
        if objects.is_empty() {
            return Err(StoreError::NotFound { what: format!("{kind} {name}:{tag}") });
        }
        // Oldest first: cut short, the tag is still where it was.
        for (object, _) in objects {
            self.delete(&object.key).await?;
        }
        Ok(())
    }

    /// Takes a version away that nobody uses; its layer goes when nothing else refers to it.
    ///
    /// # Errors
    /// `InUse` names the tag or the lease; `NotFound` if there is no such version.
    pub async fn remove_version(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
    ) -> Result<LayerId, StoreError> {
        let layer = self.untagged(kind, name, version).await?;
        if let Some(holder) = lease::user_of(self, &key::layer(&layer)).await? {
            let by = format!("the lease of {holder}");
            return Err(StoreError::InUse { what: format!("{kind} {name}@{version}"), by });
        }
        self.delete(&key::version(kind, name, version)).await?;
        Ok(layer)
    }

    /// Takes a version away whether or not its layer is used, which is then kept by its users alone, and by its other names.
    ///
    /// # Errors
    /// `InUse` names the tag that is on it; `NotFound` if there is no such version.
    pub async fn forget_version(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
    ) -> Result<LayerId, StoreError> {
        let layer = self.untagged(kind, name, version).await?;
        self.delete(&key::version(kind, name, version)).await?;
        Ok(layer)
    }

    /// The layer of a version that no tag is on.
    async fn untagged(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
    ) -> Result<LayerId, StoreError> {
        let layer = self.version(kind, name, version).await?;
        for tag in self.name(kind, name).await?.tags {
            let record = self.tag_record(kind, name, &tag).await?;
            if record.is_some_and(|(_, record)| record.version == *version) {
                let by = format!("the tag {tag}: move it or take it away first");
                return Err(StoreError::InUse { what: format!("{kind} {name}@{version}"), by });
            }
        }
        Ok(layer)
    }

    /// All that a name has.
    ///
    /// # Errors
    /// `NotFound` if it has neither version nor tag.
    pub async fn name(&self, kind: LayerKind, name: &LayerName) -> Result<NameEntry, StoreError> {
        let mut entries = entries(self.list(&key::name(kind, name), None).await?);
        entries.pop().ok_or_else(|| StoreError::NotFound { what: format!("{kind} {name}") })
    }

    /// The versions of a name with their layers.
    ///
    /// # Errors
    /// As [`Self::name`].
    pub async fn versions(&self, kind: LayerKind, name: &LayerName) -> Result<Vec<Version>, StoreError> {
        let mut versions = Vec::new();
        for version in self.name(kind, name).await?.versions {
            match self.version(kind, name, &version).await {
                Ok(layer) => versions.push(Version { version, layer }),
                Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(versions)
    }

    /// Up to `limit` names of a kind that come after `after`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn names(
        &self,
        kind: LayerKind,
        after: Option<&LayerName>,
        limit: usize,
    ) -> Result<NamePage, StoreError> {
        // `z` sorts behind all that a name's objects begin with.
        let after = after.map(|name| format!("{}/z", key::name(kind, name)));
        let found = self.list(&format!("{}/{kind}", key::NAMES), after.as_deref()).await?;
        let mut entries = entries(found);
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|entry| entry.name.clone());
        Ok(NamePage { entries, next })
    }

    /// The layer an OCI layer was converted to, if it is known; whoever uses it takes it into a lease first.
    ///
    /// # Errors
    /// [`StoreError`]; that it is not known, or that what is known is damaged, is no error.
    pub async fn converted(&self, diff_id: &str) -> Result<Option<LayerId>, StoreError> {
        self.hint(&key::oci(diff_id), format!("what {diff_id} was converted to")).await
    }

    /// Remembers what an OCI layer was converted to, in place of what was remembered.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_converted(&self, diff_id: &str, layer: LayerId) -> Result<(), StoreError> {
        self.replace(&key::oci(diff_id), json(&VersionRecord { layer })).await
    }

    /// The layer that a step of a recipe came to, if it is known; whoever uses it takes it into a lease first.
    ///
    /// # Errors
    /// [`StoreError`]; that it is not known, or that what is known is damaged, is no error.
    pub async fn step(&self, key: &Digest) -> Result<Option<LayerId>, StoreError> {
        self.hint(&key::step(key), format!("what step {key} came to")).await
    }

    /// Remembers what a step of a recipe came to, in place of what was remembered, and that it was used now. The caller holds the layer.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_step(&self, key: &Digest, layer: LayerId) -> Result<(), StoreError> {
        self.replace(&key::step(key), json(&VersionRecord { layer })).await
    }

    async fn hint(&self, place: &str, what: String) -> Result<Option<LayerId>, StoreError> {
        let bytes = self.get(place, &what, RECORD_MAX).await;
        let read =
            |bytes: Bytes| serde_json::from_slice(&bytes).map_err(|error| StoreError::damaged(&what, error));
        match bytes.and_then(read) {
            Ok(VersionRecord { layer }) => Ok(Some(layer)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(StoreError::Damaged { what, problem }) => {
                tracing::warn!(object = what, problem, "damaged hint left aside");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn tag_objects(
        &self,
        kind: LayerKind,
        name: &LayerName,
        tag: &Label,
    ) -> Result<Vec<(Found, u64)>, StoreError> {
        let found = self.list(&key::tags(kind, name), None).await?;
        Ok(found
            .into_iter()
            .filter_map(|object| {
                let (label, number) = object.key.rsplit('/').next()?.split_once('@')?;
                let number = u64::from_str_radix(number, 16).ok()?;
                (label == tag.as_str()).then_some((object, number))
            })
            .collect())
    }

    async fn tag_record(
        &self,
        kind: LayerKind,
        name: &LayerName,
        tag: &Label,
    ) -> Result<Option<(u64, TagRecord)>, StoreError> {
        let what = format!("{kind} {name}:{tag}");
        for _ in 0..LOOKUPS_MAX {
            let Some((object, number)) = self.tag_objects(kind, name, tag).await?.pop() else {
                self.check_marker().await?;
                return Ok(None);
            };
            match self.get(&object.key, &what, RECORD_MAX).await {
                Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(error),
                Ok(bytes) => {
                    let record =
                        serde_json::from_slice(&bytes).map_err(|error| StoreError::damaged(what, error))?;
                    return Ok(Some((number, record)));
                }
            }
        }
        Err(self.unavailable(what, "it moves faster than it can be read"))
    }
}

/// The layer that an object below `names/` refers to.
pub(crate) fn layer_in(object: &Found, bytes: &[u8]) -> Result<LayerId, StoreError> {
    #[derive(Deserialize)]
    struct Any {
        layer: LayerId,
    }
    serde_json::from_slice::<Any>(bytes)
        .map(|any| any.layer)
        .map_err(|error| StoreError::damaged(&object.key, error))
}

/// Names from their objects, in the order of the keys, which is the order that pages are cut in: `a-b/` comes before `a/`.
fn entries(found: Vec<Found>) -> Vec<NameEntry> {
    let mut names: BTreeMap<(LayerKind, String), NameEntry> = BTreeMap::new();
    for object in found {
        let Some((kind, name, rest)) = key::parse_name(&object.key) else { continue };
        let place = (kind, format!("{}/", name.as_str().replace('/', "+")));
        let entry = names.entry(place).or_insert_with(|| NameEntry {
            kind,
            name,
            versions: Vec::new(),
            tags: Vec::new(),
        });
        if let Some(version) = rest.strip_prefix("versions/") {
            entry.versions.extend(version.parse::<Label>());
        } else if let Some((tag, _)) = rest.strip_prefix("tags/").and_then(|tag| tag.split_once('@')) {
            entry.tags.extend(tag.parse::<Label>());
        }
    }
    let mut entries: Vec<NameEntry> = names.into_values().collect();
    for entry in &mut entries {
        entry.versions.sort();
        entry.tags.sort();
        entry.tags.dedup();
    }
    entries
}
