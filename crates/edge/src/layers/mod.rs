//! The node's layers: which there are, which are mounted here, and who uses them.
//!
//! ```text
//! name ──resolve──► layer id ──ready (once a layer)──► metadata file, devices ──► backend mounts it at first use
//!        names.rs               lease, fill worker                              kept while used, then by budget
//! ```
//!
//! A layer that somebody uses is held in the store by the node's lease, which outlives a restart of the edge.

mod content;
mod import;
mod names;
mod publish;
mod ready;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_backend::container::{LAYERS_MAX, Layer};
use dsec_image::ImageConfig;
use dsec_image::layer::{LayerId, LayerKind};
use dsec_model::SandboxId;
use dsec_proto::rest::{ApiError, CreateSandboxRequest, SandboxLayer};
use dsec_store::{CollectSettings, Collected, Collector, Lease, Store, StoreSettings};

pub use content::{Calling, Content, Filler};
pub use import::Import;
pub use names::parse_name;

use crate::error::{internal, invalid_field, store_failed};
use crate::launch::Launch;
use ready::Ready;

/// How long the node's lease lives past its last sign of life: a restart of the machine takes less.
const LEASE_TTL: Duration = Duration::from_secs(600);
/// How often the store is cleared of what nothing refers to: what is removed is kept for a day anyway, in case a build
/// that begins now wants it.
const COLLECT_EVERY: Duration = Duration::from_secs(3600);
/// Layers that stay mounted though nobody uses them, so that the next sandbox finds them: a mount costs some 100 KiB.
const IDLE_MAX: usize = 512;
/// What a layer was made from when its importer did not say.
pub const UPLOAD: &str = "upload";
/// Toolkits of one sandbox, with room for a base and a workspace.
const TOOLKITS_MAX: usize = LAYERS_MAX - 2;

/// A layer's way from its name to a mount.
#[derive(Default)]
struct Entry {
    slot: Arc<tokio::sync::OnceCell<Arc<Ready>>>,
    users: BTreeSet<SandboxId>,
    /// When its last user left.
    idle_since: Option<Instant>,
}

/// The node's layers.
pub struct Layers {
    store: Store,
    lease: Arc<Lease>,
    content: Arc<dyn Content>,
    dir: PathBuf,
    backend: Arc<dyn Launch>,
    entries: Mutex<HashMap<LayerId, Entry>>,
    names: names::Cache,
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
                && entry.users.is_empty()
            {
                entry.idle_since = Some(Instant::now());
            }
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
    /// Opens store and content.
    ///
    /// # Errors
    /// The store cannot be reached; directories cannot be made.
    pub async fn open(
        state_dir: &Path,
        node: &str,
        settings: &StoreSettings,
        content: Arc<dyn Content>,
        backend: Arc<dyn Launch>,
    ) -> Result<Arc<Self>, ApiError> {
        let dir = state_dir.join("layers");
        // Imports of an edge that was killed are of no use to anybody.
        let _ = std::fs::remove_dir_all(dir.join("work"));
        for made in [dir.join("work"), dir.join("meta")] {
            std::fs::create_dir_all(&made)
                .map_err(|e| internal("the directories for layers cannot be made", &e))?;
        }
        let store = Store::create(settings).await.map_err(|e| store_failed(&e))?;
        let lease = Arc::new(lease(&store, &dir, node).await?);
        let (entries, names) = (Mutex::default(), names::Cache::default());
        Ok(Arc::new(Self { store, lease, content, dir, backend, entries, names }))
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<LayerId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
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
            let id = self.resolve(field, kind, name).await?;
            if let Some(at) = ids.iter().position(|known| *known == id) {
                let message = format!("{name} is the same layer as {}; name it once", shown[at].name);
                return Err(invalid_field(field, message));
            }
            ids.push(id);
            shown.push(SandboxLayer { kind: kind.to_string(), name: name.to_owned(), id: id.to_string() });
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

    /// The sandboxes of this node that use a layer.
    fn users(&self, id: &LayerId) -> BTreeSet<SandboxId> {
        self.entries().get(id).map(|entry| entry.users.clone()).unwrap_or_default()
    }

    async fn ready(self: &Arc<Self>, id: LayerId) -> Result<Arc<Ready>, ApiError> {
        let slot = Arc::clone(&self.entries().entry(id).or_default().slot);
        slot.get_or_try_init(|| self.prepare(id)).await.cloned()
    }

    /// Lets go of layers that nobody uses, beyond the budget the longest idle first. Called now and then.
    pub async fn trim(&self) {
        let mut doomed = Vec::new();
        {
            let mut entries = self.entries();
            let mut idle: Vec<(Instant, LayerId)> =
                entries.iter().filter_map(|(id, entry)| Some((entry.idle_since?, *id))).collect();
            idle.sort_unstable_by_key(|(since, _)| *since);
            for (_, id) in idle.iter().take(idle.len().saturating_sub(IDLE_MAX)) {
                doomed.extend(entries.remove(id).map(|entry| (*id, entry.slot.get().cloned())));
            }
        }
        for (id, ready) in doomed {
            self.forget(&id, ready).await;
        }
    }

    /// Lets go of a layer at once if nobody uses it: its name was removed.
    async fn drop_idle(&self, id: &LayerId) {
        let entry = {
            let mut entries = self.entries();
            if entries.get(id).is_some_and(|entry| !entry.users.is_empty()) {
                return;
            }
            entries.remove(id)
        };
        // Also of one that is not known here: the edge before may have held it.
        self.forget(id, entry.and_then(|entry| entry.slot.get().cloned())).await;
    }

    /// Removes from the store what no name, no sandbox and no publisher refers to, again and again, for as long as the
    /// node lives. Each node of a store does it, at times of its own; that several do at once is fine.
    pub async fn collect(self: Arc<Self>) {
        let layers = Arc::downgrade(&self);
        let mut collector = Collector::new(&self.store, CollectSettings::default());
        drop(self);
        loop {
            tokio::time::sleep(COLLECT_EVERY).await;
            if layers.strong_count() == 0 {
                return;
            }
            // On a thread of its own: the compiler cannot show that its future may move between threads.
            let runtime = tokio::runtime::Handle::current();
            let ran = tokio::task::spawn_blocking(move || {
                let result = runtime.block_on(collector.run());
                (collector, result)
            });
            let Ok((kept, result)) = ran.await else { return };
            collector = kept;
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

    /// Ends the fill worker. The backend is down: no sandbox and no mount of a layer is left.
    pub async fn shut_down(&self) {
        if let Err(error) = self.content.shut_down().await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the fill worker was not ended");
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
    let workspace = request.workspace.iter().map(|name| ("workspace", LayerKind::Workspace, name.as_str()));
    let toolkits = request.toolkits.iter().map(|name| ("toolkits", LayerKind::Toolkit, name.as_str()));
    Ok(std::iter::once(base).chain(workspace).chain(toolkits).collect())
}

/// The lease of this node's last edge, or a new one.
async fn lease(store: &Store, dir: &Path, node: &str) -> Result<Lease, ApiError> {
    let file = dir.join("lease");
    if let Ok(id) = std::fs::read_to_string(&file) {
        match Lease::adopt(store, id.trim(), LEASE_TTL).await {
            Ok(lease) => return Ok(lease),
            Err(error) => tracing::info!(lease = id.trim(), %error, "a new lease is taken"),
        }
    }
    let lease = Lease::begin(store, node, LEASE_TTL).await.map_err(|e| store_failed(&e))?;
    std::fs::write(&file, lease.id()).map_err(|e| internal("the node's lease cannot be noted", &e))?;
    Ok(lease)
}
