//! Read-only layers, each mounted once for all containers of the node, at `STATE/run/layers/NAME`. A restarted edge finds
//! them there, so containers from before and after share one page cache; containers have clones, and go on when
//! the mount is taken away.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, new_mount, unmount};
use rustix::fs::{CWD, Mode, OFlags, open, statfs};

use super::{LAYERS_MAX, Layer, failed, private_dir};
use crate::BackendError;

/// Magic of EROFS in statfs(2).
const EROFS_MAGIC: i64 = 0xe0f5_e1e2;

/// A layer's mount, open, once it is made, and what it was made of; of one that was there before that is not known. Its
/// own lock, so that two launches mount two layers side by side and one layer once.
type Slot = Arc<Mutex<Option<(OwnedFd, Option<Layer>)>>>;

/// Mounts of the node's layers.
#[derive(Debug)]
pub(super) struct LayerMounts {
    dir: PathBuf,
    mounts: Mutex<HashMap<PathBuf, Slot>>,
}

impl LayerMounts {
    pub(super) fn open(state: &Path) -> Result<Self, BackendError> {
        let dir = state.join("run/layers");
        private_dir(&dir)?;
        Ok(Self { dir, mounts: Mutex::default() })
    }

    fn slot(&self, image: &Path) -> Slot {
        let mut mounts = self.mounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = mounts.get(image) {
            return Arc::clone(slot);
        }
        Arc::clone(mounts.entry(image.to_owned()).or_default())
    }

    /// Where a layer's mount is.
    fn place(&self, image: &Path) -> PathBuf {
        self.dir.join(image.file_stem().unwrap_or_default())
    }

    /// Detached clones of the layers' mounts, in their order. What is not mounted yet is.
    pub(super) fn clones_of(&self, layers: &[Layer]) -> Result<Vec<OwnedFd>, BackendError> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            let found = format!("{} layers; a container has 1 to {LAYERS_MAX}", layers.len());
            return Err(BackendError::new("compose the root", io::Error::other(found)));
        }
        layers.iter().map(|layer| self.clone_of(layer)).collect()
    }

    fn clone_of(&self, layer: &Layer) -> Result<OwnedFd, BackendError> {
        let what = || format!("mount the layer {}", layer.image.display());
        let slot = self.slot(&layer.image);
        let mut made = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let place = self.place(&layer.image);
        // Its content may be elsewhere by now. Containers keep what they have.
        if made.as_ref().is_some_and(|(_, of)| of.as_ref().is_some_and(|of| of != layer)) {
            *made = None;
            drop_mount(&place).map_err(failed(what()))?;
        }
        let mount = match made.take() {
            Some(mount) => mount,
            None => mount(layer, &place).map_err(failed(what()))?,
        };
        clone_mount(made.insert(mount).0.as_fd(), "", false).map_err(failed(what()))
    }

    /// Whether a layer is mounted, by this edge or one before it.
    pub(super) fn has(&self, image: &Path) -> bool {
        is_mounted(&self.place(image))
    }

    /// Takes a layer's mount away, so that its files can be removed or it be mounted anew.
    pub(super) fn forget(&self, image: &Path) {
        let slot = self.slot(image);
        let mut made = slot.lock().unwrap_or_else(PoisonError::into_inner);
        *made = None;
        if let Err(error) = drop_mount(&self.place(image)) {
            tracing::warn!(image = %image.display(), %error, "cannot take the mount of a layer away");
        }
        let mut mounts = self.mounts.lock().unwrap_or_else(PoisonError::into_inner);
        // The map's and this one: no launch waits for it.
        if Arc::strong_count(&slot) == 2 {
            mounts.remove(image);
        }
    }

    /// Takes all of them away, those of earlier edges too.
    pub(super) fn close(self) -> Result<(), BackendError> {
        drop(self.mounts);
        let entries = fs::read_dir(&self.dir).map_err(failed(format!("read {}", self.dir.display())))?;
        for entry in entries.flatten() {
            drop_mount(&entry.path()).map_err(failed(format!("unmount {}", entry.path().display())))?;
        }
        fs::remove_dir(&self.dir).map_err(failed(format!("remove {}", self.dir.display())))
    }
}

fn is_mounted(place: &Path) -> bool {
    statfs(place).is_ok_and(|s| s.f_type == EROFS_MAGIC)
}

fn mount(layer: &Layer, place: &Path) -> io::Result<(OwnedFd, Option<Layer>)> {
    let text = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.ok_or_else(|| io::Error::other(format!("{} is not UTF-8", path.display())))
    };
    let was_mounted = is_mounted(place);
    if !was_mounted {
        fs::create_dir_all(place)?;
        let source = text(&layer.image)?;
        let devices = layer.devices.iter().map(|path| text(path)).collect::<io::Result<Vec<_>>>()?;
        let mut settings = vec![FsSetting::Text("source", &source)];
        settings.extend(devices.iter().map(|device| FsSetting::Text("device", device)));
        let mount = new_mount("erofs", &settings, Attr::READ_ONLY_DATA)?;
        attach(mount.as_fd(), CWD, &text(place)?)?;
    }
    let mount = open(place, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    Ok((mount, (!was_mounted).then(|| layer.clone())))
}

fn drop_mount(place: &Path) -> io::Result<()> {
    if is_mounted(place) {
        unmount(&CString::new(place.as_os_str().as_encoded_bytes()).map_err(io::Error::other)?, true)?;
    }
    match fs::remove_dir(place) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
