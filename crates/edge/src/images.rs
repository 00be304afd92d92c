//! The node's images and who uses them.
//!
//! Sandboxes mount `pinned/<digest>.erofs`, a hard link to the store's blob that is made when a
//! digest is used first and goes when neither a name nor a sandbox has it. So whatever an import or a
//! removal does to the store, a create never loses its image between lookup and mount. Lookup, use
//! counts and removal happen under one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_image::{ImageName, ImageRecord, ImageStore, ImportLimits, ImportProgress};
use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{ApiError, Image};
use serde_json::json;

use crate::error::{bad_image_name, import_failed, internal, invalid_field, store_failed};
use crate::launch::Launch;

/// Sandboxes named in the refusal to remove an image; `used_by` has all.
const NAMED_MAX: usize = 10;

/// What an image was made from when its importer did not say.
pub const UPLOAD: &str = "upload";

#[derive(Default)]
struct Tables {
    names: BTreeMap<ImageName, Arc<ImageRecord>>,
    /// What each image was made from, as its importer said.
    sources: BTreeMap<ImageName, String>,
    users: HashMap<String, BTreeSet<SandboxId>>,
}

/// The images.
pub struct Images {
    store: ImageStore,
    dir: PathBuf,
    backend: Arc<dyn Launch>,
    tables: Mutex<Tables>,
}

/// An image in use by one sandbox, for as long as it is held.
pub struct ImageUse {
    images: Arc<Images>,
    digest: String,
    user: SandboxId,
}

impl Drop for ImageUse {
    fn drop(&mut self) {
        let mut tables = self.images.tables();
        if let Some(users) = tables.users.get_mut(&self.digest) {
            users.remove(&self.user);
            if users.is_empty() {
                tables.users.remove(&self.digest);
                self.images.unpin_if_unused(&tables, &self.digest);
            }
        }
    }
}

impl Images {
    /// Opens `STATE/images`. Blocks.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub fn open(state_dir: &Path, backend: Arc<dyn Launch>) -> Result<Arc<Self>, ApiError> {
        let dir = state_dir.join("images");
        let store = ImageStore::open(&dir).map_err(|e| store_failed(&e))?;
        let uploads = dir.join("uploads");
        // Uploads of an edge that was killed are of no use to anybody.
        let _ = std::fs::remove_dir_all(&uploads);
        for made in [&uploads, &dir.join("pinned")] {
            std::fs::create_dir_all(made)
                .map_err(|e| internal("the image store's directories cannot be made", &e))?;
        }
        let names = match store.list() {
            Ok(records) => records.into_iter().map(|r| (r.name.clone(), Arc::new(r))).collect(),
            Err(error) => {
                // A damaged record must not keep the node down; the log names the file.
                let _ = store_failed(&error);
                BTreeMap::new()
            }
        };
        let sources = std::fs::read(dir.join("sources.json"))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        let tables = Mutex::new(Tables { names, sources, users: HashMap::new() });
        Ok(Arc::new(Self { store, dir, backend, tables }))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where uploads are kept until they are imported: on the store's own disk.
    pub fn uploads(&self) -> PathBuf {
        self.dir.join("uploads")
    }

    fn pin_path(&self, digest: &str) -> PathBuf {
        self.dir.join("pinned").join(format!("{digest}.erofs"))
    }

    /// Looks an image up for a sandbox and keeps it for as long as the use is held.
    ///
    /// # Errors
    /// No such image.
    pub fn acquire(
        self: &Arc<Self>,
        name: &str,
        user: &SandboxId,
    ) -> Result<(Arc<ImageRecord>, PathBuf, ImageUse), ApiError> {
        let parsed: ImageName = name.parse().map_err(|_| no_image(name))?;
        let mut tables = self.tables();
        let record = Arc::clone(tables.names.get(&parsed).ok_or_else(|| no_image(name))?);
        let pin = self.pin_path(&record.digest);
        match std::fs::hard_link(self.store.blob_path(&record.digest), &pin) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(internal(&format!("image {name} cannot be read"), &error));
            }
            _ => {}
        }
        tables.users.entry(record.digest.clone()).or_default().insert(user.clone());
        let used = ImageUse { images: Arc::clone(self), digest: record.digest.clone(), user: user.clone() };
        Ok((record, pin, used))
    }

    /// Keeps an image for a sandbox that runs already.
    pub fn reacquire(self: &Arc<Self>, digest: &str, user: &SandboxId) -> ImageUse {
        self.tables().users.entry(digest.to_owned()).or_default().insert(user.clone());
        ImageUse { images: Arc::clone(self), digest: digest.to_owned(), user: user.clone() }
    }

    /// Removes links that neither a name nor a sandbox has: after a restart. Blocks.
    pub fn clear_pins(&self) {
        let Ok(entries) = std::fs::read_dir(self.dir.join("pinned")) else { return };
        let tables = self.tables();
        for entry in entries.flatten() {
            let path = entry.path();
            if let Some(digest) = path.file_stem().and_then(|stem| stem.to_str()) {
                self.unpin_if_unused(&tables, digest);
            }
        }
    }

    fn unpin_if_unused(&self, tables: &Tables, digest: &str) {
        let used = tables.users.contains_key(digest) || tables.names.values().any(|r| r.digest == digest);
        let pin = self.pin_path(digest);
        if !used && pin.exists() {
            self.backend.forget_layer(&pin);
            if let Err(error) = std::fs::remove_file(&pin) {
                tracing::warn!(path = %pin.display(), %error, "an unused image link stays");
            }
        }
    }

    /// Drops every mount: no sandbox is left, the node goes down. Blocks.
    pub fn release_all(&self) {
        let Ok(entries) = std::fs::read_dir(self.dir.join("pinned")) else { return };
        for entry in entries.flatten() {
            self.backend.forget_layer(&entry.path());
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// All images, by name.
    pub fn list(&self) -> Vec<Image> {
        let tables = self.tables();
        tables.names.values().map(|record| tables.describe(record)).collect()
    }

    /// One image.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<Image, ApiError> {
        let parsed: ImageName = name.parse().map_err(|_| no_image(name))?;
        let tables = self.tables();
        tables.names.get(&parsed).map(|record| tables.describe(record)).ok_or_else(|| no_image(name))
    }

    /// Imports an archive under a name. Blocks, for minutes with a large one.
    ///
    /// # Errors
    /// The archive cannot be imported; the store is as it was.
    pub fn import(
        &self,
        name: &ImageName,
        archive: &Path,
        source: &str,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<Image, ApiError> {
        let record = self
            .store
            .import(name, archive, &ImportLimits::default(), progress)
            .map_err(|e| import_failed(&e, archive, source))?;
        let record = Arc::new(record);
        let mut tables = self.tables();
        // Two imports of one name may end in another order here than in the store, which decides.
        let record = self.store.get(name).ok().flatten().map_or(record, Arc::new);
        let replaced = tables.names.insert(name.clone(), Arc::clone(&record));
        tables.sources.insert(name.clone(), source.to_owned());
        self.write_sources(&tables);
        if let Some(old) = replaced.filter(|old| old.digest != record.digest) {
            self.unpin_if_unused(&tables, &old.digest);
        }
        Ok(tables.describe(&record))
    }

    /// Removes a name, and the image with its last one. Blocks.
    ///
    /// # Errors
    /// There is none, or it is the last name of an image that sandboxes use: then their ids are in the error.
    pub fn remove(&self, name: &str) -> Result<(), ApiError> {
        let parsed: ImageName = name.parse().map_err(|_| no_image(name))?;
        let mut tables = self.tables();
        let record = Arc::clone(tables.names.get(&parsed).ok_or_else(|| no_image(name))?);
        // The content stays for as long as another name has it, so what runs on it does not mind.
        let is_last = tables.names.values().filter(|other| other.digest == record.digest).count() == 1;
        if let Some(users) = tables.users.get(&record.digest).filter(|_| is_last) {
            let named: Vec<_> = users.iter().take(NAMED_MAX).map(SandboxId::as_str).collect();
            let more = if users.len() > NAMED_MAX { " and others" } else { "" };
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("image {name} is in use by {} sandboxes: {}{more}", users.len(), named.join(", ")),
            )
            .detail(json!({ "image": name, "used_by": users }))
            .hint("stop them first"));
        }
        tables.names.remove(&parsed);
        self.unpin_if_unused(&tables, &record.digest);
        if let Err(error) = self.store.remove(&parsed) {
            tables.names.insert(parsed, record);
            return Err(store_failed(&error));
        }
        tables.sources.remove(&parsed);
        self.write_sources(&tables);
        Ok(())
    }

    fn write_sources(&self, tables: &Tables) {
        let path = self.dir.join("sources.json");
        let draft = self.dir.join("sources.json.new");
        let written = serde_json::to_vec(&tables.sources)
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(&draft, bytes))
            .and_then(|()| std::fs::rename(&draft, &path));
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "what images were made from is not written down");
        }
    }
}

impl Tables {
    fn describe(&self, record: &ImageRecord) -> Image {
        let users = self.users.get(&record.digest);
        Image {
            name: record.name.to_string(),
            digest: record.digest.clone(),
            size_bytes: record.size_bytes,
            content_bytes: record.content_bytes,
            files: record.files,
            created_ms: record.created_unix_ms,
            source: self.sources.get(&record.name).cloned().unwrap_or_else(|| UPLOAD.to_owned()),
            architecture: record.config.architecture.clone(),
            env: record.config.env.clone(),
            working_dir: record.config.working_dir.clone(),
            user: record.config.user.clone(),
            used_by: users.map(|ids| ids.iter().map(ToString::to_string).collect()).unwrap_or_default(),
        }
    }
}

/// Checks a name for a new image.
///
/// # Errors
/// No image can have it.
pub fn parse_name(name: &str) -> Result<ImageName, ApiError> {
    name.parse().map_err(|e| bad_image_name(&e))
}

fn no_image(name: &str) -> ApiError {
    if name.is_empty() {
        return invalid_field("container_image", "container_image is empty; name an imported image")
            .hint("`dsec image ls` lists them");
    }
    ApiError::new(ErrorKind::NotFound, format!("no image {name:?} on this node"))
        .detail(json!({ "image": name }))
        .hint("`dsec image ls` lists the images; `dsec image import` brings one in")
}
