//! Images, each mounted once for all containers of the node, at `STATE/run/images/NAME`. A restarted edge finds them there,
//! so containers from before and after share one page cache; containers have clones, and go on when the
//! mount is taken away.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, new_mount, unmount};
use rustix::fs::{CWD, Mode, OFlags, open, statfs};

use super::{failed, private_dir};
use crate::BackendError;

/// Magic of EROFS in statfs(2).
const EROFS_MAGIC: i64 = 0xe0f5_e1e2;

/// Mounts of the node's images.
#[derive(Debug)]
pub(super) struct Images {
    dir: PathBuf,
    /// By image: its mount, open.
    mounts: Mutex<HashMap<PathBuf, OwnedFd>>,
}

impl Images {
    pub(super) fn open(state: &Path) -> Result<Self, BackendError> {
        let dir = state.join("run/images");
        private_dir(&dir)?;
        Ok(Self { dir, mounts: Mutex::default() })
    }

    fn mounts(&self) -> MutexGuard<'_, HashMap<PathBuf, OwnedFd>> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an image's mount is: images have names of their own, made of their digests.
    fn place(&self, image: &Path) -> PathBuf {
        self.dir.join(image.file_stem().unwrap_or_default())
    }

    /// A detached clone of the image's mount, which is made when it is not there.
    pub(super) fn clone_of(&self, image: &Path) -> Result<OwnedFd, BackendError> {
        let what = || format!("mount the image {}", image.display());
        let mut mounts = self.mounts();
        if !mounts.contains_key(image) {
            mounts.insert(image.to_owned(), mount(image, &self.place(image)).map_err(failed(what()))?);
        }
        let mount = mounts.get(image).ok_or_else(|| failed(what())(io::ErrorKind::NotFound.into()))?;
        clone_mount(mount.as_fd(), "", false).map_err(failed(what()))
    }

    /// Takes an image's mount away, so that its file can be removed.
    pub(super) fn forget(&self, image: &Path) {
        self.mounts().remove(image);
        if let Err(error) = drop_mount(&self.place(image)) {
            tracing::warn!(image = %image.display(), %error, "cannot take the mount of an image away");
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

fn mount(image: &Path, place: &Path) -> io::Result<OwnedFd> {
    let not_utf8 = || io::Error::other("its path is not UTF-8");
    if !is_mounted(place) {
        fs::create_dir_all(place)?;
        let source = image.to_str().ok_or_else(not_utf8)?;
        let mount = new_mount("erofs", &[FsSetting::Text("source", source)], Attr::READ_ONLY)?;
        attach(mount.as_fd(), CWD, place.to_str().ok_or_else(not_utf8)?)?;
    }
    Ok(open(place, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
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
