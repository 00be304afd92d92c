//! The node's layers: which there are, which are mounted here, and who uses them.
//!
//! ```text
//! name ──resolve──► layer id ──ready (once a layer)──► metadata file, devices ──► backend mounts it at first use
//!        names.rs               lease, fill worker                              kept while used, then by budget
//! ```
//!
//! A layer that somebody uses is held in the store by the node's lease, which outlives a restart of the edge.

mod blobs;
mod care;
mod content;
mod filler;
mod hold;
mod import;
mod measure;
mod meta;
mod names;
mod pack;
mod prefetch;
mod publish;
mod pull;
mod ready;
mod room;
mod steps;
mod store;
mod turns;
mod work;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_backend::container::{LAYERS_MAX, Layer};
use dsec_image::ImageConfig;
use dsec_image::layer::{Digest, LayerId, LayerKind};
use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{ApiError, CreateSandboxRequest, SandboxLayer};
use dsec_store::{CollectSettings, Collected, Collector, StoreSettings};

pub use care::Exported;
pub use content::{Calling, Content};
pub use filler::Filler;
pub use import::{Import, Origin};
pub use names::{parse_kind, parse_name};
pub use pack::Pack;
pub use pull::{Fetched, Pull};
pub use steps::parse_step;
pub use turns::{Place, Turn, Turns};
pub use work::room_for;

use crate::BLOCKING_THREADS;
use crate::error::{internal, invalid_field};
use crate::launch::Launch;
use blobs::Blobs;
use meta::Meta;
use ready::Ready;
use store::Backing;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How often the store is cleared of what nothing refers to: what is removed is kept for a day anyway, in case a build
/// that begins now wants it.
const COLLECT_EVERY: Duration = Duration::from_secs(3600);
/// Layers that stay mounted though nobody uses them, so that the next sandbox finds them: a mount costs some 100 KiB.
const IDLE_MAX: usize = 512;
/// Pulls at a time: each has a thread, and most of what they share is one line to the same registries.
const PULLS_MAX: usize = 16;
/// Imports of archives at a time: each keeps a core busy and has a thread.
const IMPORTS_MAX: usize = 8;
/// Imports that wait for their turn, whose archives wait on the disk.
const IMPORTS_WAITING_MAX: usize = 64;
/// Verifications, collections and exports at a time: each has a thread for as long as the store, or an export's reader, takes.
const CARE_MAX: usize = 8;
/// Of these, how many wait for their turn.
const CARE_WAITING_MAX: usize = 32;
/// Packs at once: each may keep a core busy, and the trees of what is packed in memory.
const PACKS_MAX: usize = 4;
/// Work that has a thread and waits for what needs another: most threads are to stay for that.
const _: () = assert!(PULLS_MAX + IMPORTS_MAX + CARE_MAX + PACKS_MAX <= BLOCKING_THREADS / 4);
/// What a layer was made from when its importer did not say.
pub const UPLOAD: &str = "upload";
/// Toolkits of one sandbox, with room for a base and a workspace.
const TOOLKITS_MAX: usize = LAYERS_MAX - 2;

/// A layer when it is ready, locked by whoever makes it so or takes it away.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<Ready>>>>;

/// A layer's way from its name to a mount.
#[derive(Default)]
struct Entry {
    slot: Slot,
    users: BTreeSet<SandboxId>,
    /// Others that use it for a while.
    pins: usize,
    /// When its last user left.
    idle_since: Option<Instant>,
}

impl Entry {
    fn is_unused(&self) -> bool {
        self.users.is_empty() && self.pins == 0
    }

    /// Somebody left.
    fn left(&mut self) {
        if self.is_unused() {
            self.idle_since = Some(Instant::now());
        }
    }
}

/// The node's layers.
pub struct Layers {
    backing: Backing,
    node: String,
    content: Arc<dyn Content>,
    blobs: Blobs,
    meta: Meta,
    dir: PathBuf,
    backend: Arc<dyn Launch>,
    entries: Mutex<HashMap<LayerId, Entry>>,
    names: names::Cache,
    pulls: Arc<Semaphore>,
    donors: Mutex<pack::DonorCache>,
    /// Turns of packs.
    pub packs: Arc<Semaphore>,
    /// Turns of imports of archives.
    pub imports: Turns,
    /// Turns of verifications, collections and exports.
    pub care: Turns,
}

/// Layers in use by one sandbox, for as long as it is held.
pub struct LayerUse {
    layers: Arc<Layers>,
    ids: Vec<LayerId>,
    user: SandboxId,
}

impl Drop for LayerUse {
    fn drop(&mut self) {
        let mut entries = self.layers.entries();
        for id in &self.ids {
            if let Some(entry) = entries.get_mut(id)
                && entry.users.remove(&self.user)
            {
                entry.left();
            }
        }
    }
}

/// A layer that is not taken away for as long as this is held, though no sandbox uses it.
struct Pin {
    layers: Arc<Layers>,
    id: LayerId,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(entry) = self.layers.entries().get_mut(&self.id) {
            entry.pins -= 1;
            entry.left();
        }
    }
}

/// What a sandbox's root is made of.
pub struct Composed {
    /// As the backend takes it, the lowest first.
    pub layers: Vec<Layer>,
    /// As the record shows it, in the same order.
    pub shown: Vec<SandboxLayer>,
    /// How programs are started in it.
    pub config: ImageConfig,
    /// Keeps them.
    pub held: LayerUse,
}

impl Layers {
    /// Opens what is on this node. [`Self::take_up`] opens the store, once it is known what runs here.
    ///
    /// # Errors
    /// Directories cannot be made.
    pub fn open(
        state_dir: &Path,
        node: &str,
        settings: &StoreSettings,
        content: Arc<dyn Content>,
        backend: Arc<dyn Launch>,
    ) -> Result<Arc<Self>, ApiError> {
        let dir = state_dir.join("layers");
        let failed = |e: std::io::Error| internal("the directories for layers cannot be used", &e);
        // Imports of an edge that was killed are of no use to anybody.
        let _ = std::fs::remove_dir_all(dir.join("work"));
        std::fs::create_dir_all(dir.join("work")).map_err(failed)?;
        let meta = Meta::open(dir.join("meta")).map_err(failed)?;
        let earlier = meta.all().map_err(failed)?;
        let mut entries = HashMap::new();
        for (id, note) in &earlier {
            // The device may be another now, the content complete.
            if note.is_partial {
                backend.forget_layer(&meta.image(id));
            }
            entries.insert(*id, Entry { idle_since: Some(Instant::now()), ..Entry::default() });
        }
        let blobs_of = |note: meta::Note| note.manifest.blobs.iter().map(|blob| blob.id).collect();
        let earlier: Vec<_> = earlier.into_iter().map(|(id, note)| (id, blobs_of(note))).collect();
        let blobs = Blobs::new(Arc::clone(&content), &earlier);
        let (entries, names, donors) = (Mutex::new(entries), names::Cache::default(), Mutex::default());
        let (pulls, packs) = (Arc::new(Semaphore::new(PULLS_MAX)), Arc::new(Semaphore::new(PACKS_MAX)));
        Ok(Arc::new(Self {
            backing: Backing::new(settings, &dir),
            node: node.to_owned(),
            content,
            blobs,
            meta,
            dir,
            backend,
            entries,
            names,
            pulls,
            donors,
            packs,
            imports: Turns::new("imports", IMPORTS_MAX, IMPORTS_WAITING_MAX),
            care: Turns::new("verifications, collections and exports", CARE_MAX, CARE_WAITING_MAX),
        }))
    }

    fn slot(&self, id: &LayerId) -> Slot {
        Arc::clone(&self.entries().entry(*id).or_default().slot)
    }

    /// Forgets a slot that is empty and that nobody else has.
    fn drop_slot(&self, id: &LayerId, slot: &Slot) {
        let mut entries = self.entries();
        // The map's and the caller's.
        let is_dropped = entries.get(id).is_some_and(Entry::is_unused)
            && Arc::strong_count(slot) == 2
            && slot.try_lock().is_ok_and(|here| here.is_none());
        if is_dropped {
            entries.remove(id);
        }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<LayerId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for one more pull, until it is dropped.
    ///
    /// # Errors
    /// There is none now.
    pub fn begin_pull(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.pulls).try_acquire_owned().map_err(|_| {
            let message = format!("{PULLS_MAX} images are pulled on this node already");
            ApiError::new(ErrorKind::ResourceExhausted, message).hint("try again when one of them is here")
        })
    }

    /// Where uploads are kept until they are imported.
    pub fn uploads(&self) -> PathBuf {
        self.dir.join("work")
    }

    /// Looks up what a sandbox's root is to be made of, makes it ready to be mounted and keeps it for as long as the
    /// use is held.
    ///
    /// # Errors
    /// A layer that does not exist, is named twice, or cannot be had from the store.
    pub async fn compose(
        self: &Arc<Self>,
        request: &CreateSandboxRequest,
        user: &SandboxId,
    ) -> Result<Composed, ApiError> {
        let mut ids = Vec::new();
        let mut shown: Vec<SandboxLayer> = Vec::new();
        for (field, kind, name) in wanted(request)? {
            let id = match step_key(field, name) {
                Some(key) => self.resolve_step(&key).await?,
                None => self.resolve(field, kind, name).await?,
            };
            if let Some(at) = ids.iter().position(|known| *known == id) {
                let message = format!("{name} is the same layer as {}; name it once", shown[at].name);
                return Err(invalid_field(field, message));
            }
            ids.push(id);
            shown.push(SandboxLayer {
                kind: kind.to_string(),
                name: name.to_owned(),
                id: id.to_string(),
                content: None,
            });
        }
        let held = self.hold(ids.clone(), user);
        let mut layers = Vec::with_capacity(ids.len());
        let mut config = None;
        for id in ids {
            let ready = self.ready(id).await?;
            layers.push(ready.layer.clone());
            config = config.or_else(|| ready.manifest.config.clone());
        }
        let config = config.ok_or_else(|| {
            let message = format!("{} is a part of an image and no image itself", request.container_image);
            invalid_field("container_image", message).hint("`dsec image ls` lists the images")
        })?;
        Ok(Composed { layers, shown, config, held })
    }

    /// Keeps layers for a sandbox that runs already.
    pub fn hold(self: &Arc<Self>, ids: Vec<LayerId>, user: &SandboxId) -> LayerUse {
        let mut entries = self.entries();
        for id in &ids {
            let entry = entries.entry(*id).or_default();
            entry.users.insert(user.clone());
            entry.idle_since = None;
        }
        drop(entries);
        LayerUse { layers: Arc::clone(self), ids, user: user.clone() }
    }

    fn pin(self: &Arc<Self>, id: LayerId) -> Pin {
        let mut entries = self.entries();
        let entry = entries.entry(id).or_default();
        entry.pins += 1;
        entry.idle_since = None;
        drop(entries);
        Pin { layers: Arc::clone(self), id }
    }

    fn is_unused(&self, id: &LayerId) -> bool {
        self.entries().get(id).is_none_or(Entry::is_unused)
    }

    /// The sandboxes of this node that use a layer.
    fn users(&self, id: &LayerId) -> BTreeSet<SandboxId> {
        self.entries().get(id).map(|entry| entry.users.clone()).unwrap_or_default()
    }

    /// Layers that nobody uses, the longest idle first.
    fn longest_idle(&self) -> Vec<LayerId> {
        let mut idle: Vec<(Instant, LayerId)> =
            self.entries().iter().filter_map(|(id, entry)| Some((entry.idle_since?, *id))).collect();
        idle.sort_unstable_by_key(|(since, _)| *since);
        idle.into_iter().map(|(_, id)| id).collect()
    }

    /// Lets go of layers that nobody uses, beyond the budget the longest idle first. Called now and then.
    pub async fn trim(&self) {
        let idle = self.longest_idle();
        for id in idle.iter().take(idle.len().saturating_sub(IDLE_MAX)) {
            self.let_go(id).await;
        }
    }

    /// Removes from the store what no name, no sandbox and no publisher refers to, again and again, for as long as the
    /// node lives. Each node of a store does it, at times of its own; that several do at once is fine.
    pub async fn collect(self: Arc<Self>) {
        let layers = Arc::downgrade(&self);
        drop(self);
        let mut collector: Option<Collector> = None;
        loop {
            tokio::time::sleep(COLLECT_EVERY).await;
            let Some(this) = layers.upgrade() else { return };
            let Ok(store) = this.store() else { continue };
            let mut kept =
                collector.take().unwrap_or_else(|| Collector::new(store, CollectSettings::default()));
            // On a thread of its own: the compiler cannot show that its future may move between threads.
            let runtime = tokio::runtime::Handle::current();
            let ran = tokio::task::spawn_blocking(move || {
                let result = runtime.block_on(this.clear(&mut kept));
                (kept, result)
            });
            let Ok((kept, result)) = ran.await else { return };
            collector = Some(kept);
            match result {
                Ok(done) if done == Collected::default() => {}
                Ok(done) => tracing::info!(
                    layers = done.layers,
                    packs = done.packs,
                    pack_bytes = done.pack_bytes,
                    "unused layers collected"
                ),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "layers were not collected")
                }
            }
        }
    }

    /// Lets go of everything and ends the fill worker. The backend is down: no sandbox and no mount of a layer is left.
    pub async fn shut_down(&self) {
        let all: Vec<LayerId> = self.entries().keys().copied().collect();
        for id in all {
            let slot = self.slot(&id);
            *slot.lock().await = None;
            self.forget(&id).await;
        }
        if let Err(error) = self.content.shut_down().await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the fill worker was not ended");
        }
        if let Some(held) = self.held() {
            held.release(&self.dir).await;
        }
    }
}

/// The layers a request names, the lowest first, with the field each stands in.
fn wanted(request: &CreateSandboxRequest) -> Result<Vec<(&'static str, LayerKind, &str)>, ApiError> {
    if request.container_image.is_empty() {
        return Err(invalid_field("container_image", "container_image is empty; name an imported image")
            .hint("`dsec image ls` lists them"));
    }
    if request.toolkits.len() > TOOLKITS_MAX {
        let message = format!("{} toolkits were named; {TOOLKITS_MAX} is the most", request.toolkits.len());
        return Err(invalid_field("toolkits", message));
    }
    let base = ("container_image", LayerKind::Base, request.container_image.as_str());
    let workspace = request.workspace.as_deref().map(workspace);
    let toolkits = request.toolkits.iter().map(|name| ("toolkits", LayerKind::Toolkit, name.as_str()));
    let (below, above) = match workspace {
        Some(snapshot @ (_, LayerKind::Snapshot, _)) => (None, Some(snapshot)),
        other => (other, None),
    };
    Ok(std::iter::once(base).chain(below).chain(toolkits).chain(above).collect())
}

/// The key of a step that `workspace` names: `step/KEY`.
fn step_key(field: &str, name: &str) -> Option<Digest> {
    name.strip_prefix(steps::PREFIX).filter(|_| field == "workspace")?.parse().ok()
}

/// What `workspace` names: `snapshot/NAME` a snapshot, `workspace/NAME` and any other name a workspace.
fn workspace(name: &str) -> (&'static str, LayerKind, &str) {
    let of = |kind: LayerKind| name.strip_prefix(kind.as_str()).and_then(|rest| rest.strip_prefix('/'));
    let found =
        [LayerKind::Snapshot, LayerKind::Workspace].into_iter().find_map(|kind| Some((kind, of(kind)?)));
    let (kind, name) = found.unwrap_or((LayerKind::Workspace, name));
    ("workspace", kind, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composed(request: serde_json::Value) -> Vec<(LayerKind, String)> {
        let request: CreateSandboxRequest = serde_json::from_value(request).unwrap();
        wanted(&request).unwrap().into_iter().map(|(_, kind, name)| (kind, name.to_owned())).collect()
    }

    #[test]
    fn a_workspace_lies_below_toolkits_and_a_snapshot_above_them() {
        let with = |workspace: &str| {
            composed(serde_json::json!({ "container_image": "b", "workspace": workspace, "toolkits": ["t"] }))
        };
        let kinds = |layers: &[(LayerKind, String)]| layers.iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
        for (given, name) in [("w:1", "w:1"), ("workspace/w", "w"), ("workspace/snapshot/w", "snapshot/w")] {
            let layers = with(given);
            assert_eq!(kinds(&layers), [LayerKind::Base, LayerKind::Workspace, LayerKind::Toolkit]);
            assert_eq!(layers[1].1, name);
        }
        let layers = with("snapshot/team/s@1");
        assert_eq!(kinds(&layers), [LayerKind::Base, LayerKind::Toolkit, LayerKind::Snapshot]);
        assert_eq!(layers[2].1, "team/s@1");
        assert_eq!(with("snapshots/x")[1], (LayerKind::Workspace, "snapshots/x".to_owned()));
    }
}
