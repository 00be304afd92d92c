//! Names of layers: looking one up fast, listing, removing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_image::layer::{
    Label, LayerId, LayerKind, LayerName, LayerRef, Manifest, NameError, Select, Source,
};
use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{ApiError, Image};
use dsec_store::{StoreError, Version};
use serde_json::json;

use super::Layers;
use crate::error::{bad_layer_name, invalid_field, store_failed};

/// How long a create believes a tag to be where it was: a burst of them asks the store once. What moves through this node is
/// seen at once.
const TAG_FRESH: Duration = Duration::from_secs(2);
/// Manifests and versions remembered; both never change. A manifest of an image with some layers is 2 KiB.
const REMEMBERED_MAX: usize = 20_000;
/// Names read from the store at a time.
const PAGE: usize = 1000;
/// Whether somebody sees a sandbox.
type Sees<'a> = &'a (dyn Fn(&SandboxId) -> bool + Sync);

/// Sandboxes named in the refusal to remove a layer; `used_by` has all.
const NAMED_MAX: usize = 10;

/// What is known of names without asking.
#[derive(Default)]
pub(super) struct Cache {
    names: Mutex<HashMap<(LayerKind, LayerRef), (LayerId, Instant)>>,
    manifests: Mutex<HashMap<LayerId, Arc<Manifest>>>,
}

impl Cache {
    fn find(&self, kind: LayerKind, name: &LayerRef) -> Option<LayerId> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let (id, since) = names.get(&(kind, name.clone()))?;
        let is_fixed = matches!(name.select, Select::Version(_));
        (is_fixed || since.elapsed() < TAG_FRESH).then_some(*id)
    }

    fn note(&self, kind: LayerKind, name: LayerRef, id: LayerId) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.len() >= REMEMBERED_MAX {
            names.clear();
        }
        names.insert((kind, name), (id, Instant::now()));
    }

    /// Forgets all that is known of a name: it has changed.
    pub(super) fn forget(&self, kind: LayerKind, name: &LayerName) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|(known, reference), _| *known != kind || reference.name != *name);
    }
}

impl Layers {
    /// The layer that a field of a request names.
    ///
    /// # Errors
    /// There is none; the store cannot be read.
    pub(super) async fn resolve(
        &self,
        field: &'static str,
        kind: LayerKind,
        name: &str,
    ) -> Result<LayerId, ApiError> {
        let none = || no_layer(field, kind, name);
        if name.is_empty() {
            return Err(none());
        }
        let parsed: LayerRef =
            name.parse().map_err(|error: NameError| invalid_field(field, error.to_string()))?;
        if let Some(found) = self.recall(kind, &parsed).await? {
            return Ok(found);
        }
        let has_namesake = field == "workspace"
            && kind == LayerKind::Workspace
            && self.recall(LayerKind::Snapshot, &parsed).await?.is_some();
        Err(match has_namesake {
            true => none().hint(format!("there is a snapshot of this name: `snapshot/{name}`")),
            false => none(),
        })
    }

    /// The layer that a name stands for, or stood for a moment ago.
    async fn recall(&self, kind: LayerKind, name: &LayerRef) -> Result<Option<LayerId>, ApiError> {
        match self.names.find(kind, name) {
            Some(id) => Ok(Some(id)),
            None => self.find(kind, name).await,
        }
    }

    /// The layer that a name stands for, if it stands for one. Asks the store: the name may have been moved through another
    /// node just now, by the very caller.
    async fn find(&self, kind: LayerKind, name: &LayerRef) -> Result<Option<LayerId>, ApiError> {
        match self.store()?.resolve(kind, name).await {
            Ok(id) => {
                self.names.note(kind, name.clone(), id);
                Ok(Some(id))
            }
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(store_failed(&error)),
        }
    }

    pub(super) async fn manifest(&self, id: &LayerId) -> Result<Arc<Manifest>, ApiError> {
        let remembered = |layers: &Self| {
            layers.names.manifests.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
        };
        if let Some(known) = remembered(self) {
            return Ok(known);
        }
        // Of a layer that is on this node also while the store is away.
        let manifest = Arc::new(match self.meta.noted(id) {
            Some(note) => note.manifest,
            None => self.store()?.manifest(id).await.map_err(|e| store_failed(&e))?,
        });
        let mut manifests = self.names.manifests.lock().unwrap_or_else(PoisonError::into_inner);
        if manifests.len() >= REMEMBERED_MAX {
            manifests.clear();
        }
        Ok(Arc::clone(manifests.entry(*id).or_insert(manifest)))
    }

    /// The layers of a kind, each tag of each name once, in the names' order.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn list(&self, kind: LayerKind) -> Result<Vec<Image>, ApiError> {
        let mut found = Vec::new();
        let mut after: Option<LayerName> = None;
        loop {
            let page = self.store()?.names(kind, after.as_ref(), PAGE).await.map_err(|e| store_failed(&e))?;
            for entry in &page.entries {
                for tag in &entry.tags {
                    let reference = LayerRef { name: entry.name.clone(), select: Select::Tag(tag.clone()) };
                    // One that was removed just now is none.
                    found.extend(self.describe(kind, &reference).await?);
                }
            }
            after = page.next;
            if after.is_none() {
                return Ok(found);
            }
        }
    }

    /// One layer by name.
    ///
    /// # Errors
    /// There is none.
    pub async fn get(&self, kind: LayerKind, name: &str) -> Result<Image, ApiError> {
        let id = self.named(kind, name).await?;
        let manifest = self.manifest(&id).await?;
        let content = self.contents(&[id]).await.remove(&id);
        let nodes = vec![self.here(&id, content)];
        Ok(Image { nodes, ..self.show(shown(&parse_name(name)?), &id, &manifest) })
    }

    /// The layer that a caller names.
    ///
    /// # Errors
    /// It is no name, or there is none.
    pub(super) async fn named(&self, kind: LayerKind, name: &str) -> Result<LayerId, ApiError> {
        self.find(kind, &parse_name(name)?).await?.ok_or_else(|| no_layer("name", kind, name))
    }

    async fn describe(&self, kind: LayerKind, name: &LayerRef) -> Result<Option<Image>, ApiError> {
        let Some(id) = self.find(kind, name).await? else { return Ok(None) };
        let manifest = self.manifest(&id).await?;
        Ok(Some(self.show(shown(name), &id, &manifest)))
    }

    pub(super) fn show(&self, name: String, id: &LayerId, manifest: &Manifest) -> Image {
        let facts = &manifest.facts;
        let config = manifest.config.clone().unwrap_or_default();
        let is_at_hand = self.entries().contains_key(id);
        Image {
            name,
            kind: manifest.kind.to_string(),
            digest: id.to_string(),
            size_bytes: facts.stored_bytes,
            content_bytes: facts.content_bytes,
            files: facts.files,
            blobs: manifest.blobs.iter().map(|blob| blob.id.to_string()).collect(),
            parents: manifest.parents.iter().map(|parent| parent.layer.to_string()).collect(),
            created_ms: facts.created_unix_ms,
            source: source(&facts.source),
            architecture: config.architecture,
            env: config.env,
            working_dir: config.working_dir,
            user: config.user,
            used_by: self.users(id).iter().map(ToString::to_string).collect(),
            nodes: is_at_hand.then(|| self.here(id, None)).into_iter().collect(),
        }
    }

    /// Removes a tag, and the version it is on unless another tag is on it too. What it stands for goes when nothing
    /// refers to it any more.
    ///
    /// # Errors
    /// There is none, or somebody uses it and it is the last name: the sandboxes of this node are named.
    pub async fn remove(&self, kind: LayerKind, name: &str, sees: Sees<'_>) -> Result<(), ApiError> {
        let asked = parse_name(name)?;
        self.names.forget(kind, &asked.name);
        let id = self.find(kind, &asked).await?.ok_or_else(|| no_layer("name", kind, name))?;
        let removed = self.remove_found(kind, name, &asked, &id, sees).await;
        self.names.forget(kind, &asked.name);
        removed
    }

    async fn remove_found(
        &self,
        kind: LayerKind,
        name: &str,
        asked: &LayerRef,
        id: &LayerId,
        sees: Sees<'_>,
    ) -> Result<(), ApiError> {
        let (store, own) = (self.store()?, &asked.name);
        let failed = |e: StoreError| store_failed(&e);
        if let Select::Tag(tag) = &asked.select
            && self.is_tagged(kind, own, id, tag).await?
        {
            return store.untag(kind, own, tag).await.map_err(failed);
        }
        match self.in_use(name, id, sees) {
            Some(refused) if !self.has_other_name(kind, own, id).await? => return Err(refused),
            Some(_) => {}
            None => self.let_go(id).await,
        }
        let versions = store.versions(kind, own).await.map_err(failed)?;
        if let Select::Tag(tag) = &asked.select {
            store.untag(kind, own, tag).await.map_err(failed)?;
        }
        for Version { version, layer } in &versions {
            let is_on = match &asked.select {
                Select::Version(asked) => version == asked,
                Select::Tag(_) => layer == id,
            };
            if !is_on {
                continue;
            }
            if let Err(error) = self.remove_version(kind, own, version, id).await {
                // As it was: whoever uses it on another node may be asked to let go.
                if let Select::Tag(tag) = &asked.select {
                    let _still_untagged = store.tag(kind, own, tag, version).await;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes a version; one that is in use goes if its layer has another name.
    async fn remove_version(
        &self,
        kind: LayerKind,
        name: &LayerName,
        version: &Label,
        id: &LayerId,
    ) -> Result<(), ApiError> {
        let store = self.store()?;
        let removed = match store.remove_version(kind, name, version).await {
            Err(StoreError::InUse { .. }) if self.has_other_name(kind, name, id).await? => {
                store.forget_version(kind, name, version).await
            }
            other => other,
        };
        removed.map(drop).map_err(|e| store_failed(&e))
    }

    /// Whether another tag of the name stands for the same layer.
    async fn is_tagged(
        &self,
        kind: LayerKind,
        name: &LayerName,
        id: &LayerId,
        but: &Label,
    ) -> Result<bool, ApiError> {
        let store = self.store()?;
        let entry = store.name(kind, name).await.map_err(|e| store_failed(&e))?;
        for tag in entry.tags.iter().filter(|tag| *tag != but) {
            let reference = LayerRef { name: name.clone(), select: Select::Tag(tag.clone()) };
            match store.resolve(kind, &reference).await {
                Ok(found) if found == *id => return Ok(true),
                Ok(_) | Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(store_failed(&error)),
            }
        }
        Ok(false)
    }

    /// Whether another name of the kind stands for the same layer. Reads all of them: asked only of what is in use.
    async fn has_other_name(
        &self,
        kind: LayerKind,
        name: &LayerName,
        id: &LayerId,
    ) -> Result<bool, ApiError> {
        let id = id.to_string();
        let is_other = |other: &Image| parse_name(&other.name).is_ok_and(|other| other.name != *name);
        Ok(self.list(kind).await?.iter().any(|other| other.digest == id && is_other(other)))
    }

    /// Why a layer stays that sandboxes use: those that the caller sees are named.
    fn in_use(&self, name: &str, id: &LayerId, sees: Sees<'_>) -> Option<ApiError> {
        let users = self.users(id);
        if users.is_empty() {
            return None;
        }
        let seen: Vec<&SandboxId> = users.iter().filter(|user| sees(user)).collect();
        let named: Vec<_> = seen.iter().take(NAMED_MAX).map(|user| user.as_str()).collect();
        let message = match (named.len(), users.len()) {
            (0, _) => format!("{name} is in use by sandboxes of other projects"),
            (named_all, all) if named_all == all => {
                format!("{name} is in use by {all} sandboxes: {}", named.join(", "))
            }
            (_, all) if seen.len() == all => {
                format!("{name} is in use by {all} sandboxes: {} and others", named.join(", "))
            }
            _ => format!("{name} is in use by sandboxes: {} and others", named.join(", ")),
        };
        Some(
            ApiError::new(ErrorKind::Conflict, message)
                .detail(json!({ "image": name, "used_by": seen }))
                .hint("stop them first"),
        )
    }
}

/// A name as it is shown: the tag that a name alone means is left out.
pub(super) fn shown(name: &LayerRef) -> String {
    match &name.select {
        Select::Tag(tag) if *tag == Label::latest() => name.name.to_string(),
        _ => name.to_string(),
    }
}

/// The kind of layer that a field or a path names.
///
/// # Errors
/// There is none of this name.
pub fn parse_kind(kind: &str) -> Result<LayerKind, ApiError> {
    LayerKind::ALL.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| {
        let kinds = LayerKind::ALL.map(LayerKind::as_str).join(", ");
        invalid_field("kind", format!("{kind:?} is no kind of layer; there are: {kinds}"))
    })
}

/// Checks a name that a caller gives.
///
/// # Errors
/// No layer can have it.
pub fn parse_name(name: &str) -> Result<LayerRef, ApiError> {
    name.parse().map_err(|e| bad_layer_name(&e))
}

fn source(source: &Source) -> String {
    match source {
        Source::Archive { name, .. } => name.clone(),
        Source::Oci { reference, .. } => reference.clone(),
        Source::Recipe { recipe, step } => format!("step {step} of recipe {recipe}"),
        Source::Sandbox { id, .. } => format!("sandbox {id}"),
    }
}

fn no_layer(field: &'static str, kind: LayerKind, name: &str) -> ApiError {
    if kind == LayerKind::Base {
        return ApiError::new(ErrorKind::NotFound, format!("no image {name:?}"))
            .detail(json!({ "image": name }))
            .hint("`dsec image ls` lists the images; `dsec image import` brings one in");
    }
    if name.is_empty() {
        return invalid_field(field, format!("{field} has an empty name"));
    }
    ApiError::new(ErrorKind::NotFound, format!("no {kind} {name:?}"))
        .detail(json!({ "field": field, "layer": name }))
        .hint(format!("`dsec layer ls {kind}` lists them"))
}
