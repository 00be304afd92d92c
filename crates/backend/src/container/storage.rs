//! Writable layers: one btrfs file system a node, in a sparse file on a loop device, with a subvolume
//! and an exact quota for each container. Made in 60 us and dropped in 25 us, however much was
//! written. The mount is at `STATE/rw`, where a restarted edge finds it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, new_mount, restrict, unmount};
use dsec_sys::{btrfs, loopdev};
use rustix::fs::{CWD, Mode, OFlags, fstatfs, mkdirat, open, openat};

use crate::BackendError;

/// Least size of the file system, bytes: btrfs needs about 110 MiB to begin with.
const SIZE_MIN: u64 = 512 << 20;
/// What stays free on the host's file system when the sparse file is full, bytes.
const HOST_RESERVE: u64 = 1 << 30;
/// Magic of btrfs in statfs(2).
const BTRFS_MAGIC: i64 = 0x9123_683e;

/// The node's file system for writable layers.
#[derive(Debug)]
pub(super) struct Storage {
    mount_point: PathBuf,
    root: OwnedFd,
    quotas: String,
}

/// One container's writable layer.
#[derive(Debug)]
pub(super) struct Layer {
    /// Id of its subvolume.
    pub subvolume: u64,
    /// Detached mount of it, with `upper` and `work`.
    pub mount: OwnedFd,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
    let what = what.into();
    move |source| BackendError { what, source }
}

impl Storage {
    /// Makes or finds the file system and mounts it at `state/rw`.
    pub(super) fn open(state: &Path) -> Result<Self, BackendError> {
        let mount_point = state.join("rw");
        fs::create_dir_all(&mount_point).map_err(failed(format!("make {}", mount_point.display())))?;
        if is_btrfs(&mount_point) {
            return Self::use_mount(mount_point);
        }
        mount_file_system(state, &mount_point)?;
        Self::use_mount(mount_point.clone()).inspect_err(|_| {
            // The first error is the one to report.
            let _ = remove_mount(state, &mount_point);
        })
    }

    fn use_mount(mount_point: PathBuf) -> Result<Self, BackendError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&mount_point, flags, Mode::empty())
            .map_err(|e| failed(format!("open {}", mount_point.display()))(e.into()))?;
        // What sandboxes wrote is data to the host. Their own mounts of it are clones that let programs run.
        restrict(root.as_fd(), Attr::DATA_ONLY)
            .map_err(failed(format!("restrict the mount at {}", mount_point.display())))?;
        btrfs::enable_simple_quotas(root.as_fd())
            .map_err(failed("turn on simple quotas of btrfs (Linux 6.7 or newer)"))?;
        let quotas = btrfs::quota_directory(root.as_fd()).map_err(failed("find btrfs quotas in /sys"))?;
        Ok(Self { mount_point, root, quotas })
    }

    /// Makes a container's layer, owned by its root (on disk id 0; the mount is id-mapped later).
    pub(super) fn create(&self, name: &str, bytes: u64) -> Result<Layer, BackendError> {
        let what = || format!("make the writable layer of {name}");
        btrfs::create_subvolume(self.root.as_fd(), name).map_err(failed(what()))?;
        self.fill(name, bytes).map_err(failed(what())).inspect_err(|_| {
            // The first error is the one to report.
            let _ = self.destroy(name);
        })
    }

    fn fill(&self, name: &str, bytes: u64) -> io::Result<Layer> {
        let mount = clone_mount(self.root.as_fd(), name, false)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(&mount, ".", flags, Mode::empty())?;
        for (child, mode) in [("upper", 0o755), ("work", 0o755)] {
            mkdirat(&dir, child, Mode::from_raw_mode(mode))?;
        }
        let subvolume = btrfs::subvolume_id(dir.as_fd())?;
        btrfs::limit_subvolume(self.root.as_fd(), subvolume, Some(bytes))?;
        Ok(Layer { subvolume, mount })
    }

    /// The id of a layer that is there.
    pub(super) fn subvolume(&self, name: &str) -> io::Result<u64> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        btrfs::subvolume_id(openat(&self.root, name, flags, Mode::empty())?.as_fd())
    }

    /// Sets the size limit anew.
    pub(super) fn limit(&self, subvolume: u64, bytes: u64) -> io::Result<()> {
        btrfs::limit_subvolume(self.root.as_fd(), subvolume, Some(bytes))
    }

    /// Bytes that a layer holds.
    pub(super) fn used(&self, subvolume: u64) -> u64 {
        btrfs::used_bytes(&self.quotas, subvolume).unwrap_or(0)
    }

    /// Where a container's own files lie.
    pub(super) fn upper(&self, name: &str) -> PathBuf {
        self.mount_point.join(name).join("upper")
    }

    /// Makes a read-only snapshot of a container's layer, called `snapshot`; [`Self::destroy`] drops it.
    ///
    /// Made twice: before one, btrfs writes out what is dirty, and may pass over a page that is on its way to the disk already and was
    /// written to since. Making one waits for the end of that way, so that the second one of a layer that stands still has all.
    pub(super) fn snapshot(&self, name: &str, snapshot: &str) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let source = openat(&self.root, name, flags, Mode::empty())?;
        btrfs::snapshot_subvolume(self.root.as_fd(), snapshot, source.as_fd())?;
        self.destroy(snapshot)?;
        btrfs::snapshot_subvolume(self.root.as_fd(), snapshot, source.as_fd())
    }

    /// Drops a layer. One that is gone is fine.
    pub(super) fn destroy(&self, name: &str) -> io::Result<()> {
        match btrfs::destroy_subvolume(self.root.as_fd(), name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Names of all layers.
    pub(super) fn names(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.mount_point) else { return Vec::new() };
        entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
    }

    /// Bytes: all, free.
    pub(super) fn size(&self) -> (u64, u64) {
        fstatfs(&self.root).map_or((0, 0), |s| {
            let block = s.f_bsize as u64;
            (s.f_blocks * block, s.f_bavail * block)
        })
    }

    /// Unmounts it and removes its file: nothing in it outlives its containers.
    pub(super) fn close(self, state: &Path) -> Result<(), BackendError> {
        drop(self.root);
        remove_mount(state, &self.mount_point)
    }
}

/// Unmounts the file system and removes its file.
fn remove_mount(state: &Path, mount_point: &Path) -> Result<(), BackendError> {
    let path = std::ffi::CString::new(mount_point.as_os_str().as_encoded_bytes())
        .map_err(|e| failed("unmount")(io::Error::other(e)))?;
    unmount(&path, false).map_err(failed(format!("unmount {}", mount_point.display())))?;
    for result in [fs::remove_dir(mount_point), fs::remove_file(file_of(state))] {
        result.map_err(failed("remove the file of the writable layers"))?;
    }
    Ok(())
}

fn file_of(state: &Path) -> PathBuf {
    state.join("rw.btrfs")
}

fn is_btrfs(path: &Path) -> bool {
    File::open(path).is_ok_and(|dir| fstatfs(&dir).is_ok_and(|s| s.f_type == BTRFS_MAGIC))
}

fn mount_file_system(state: &Path, mount_point: &Path) -> Result<(), BackendError> {
    let path = file_of(state);
    // A file without a mount is of an edge that was killed before its machine was; a device may still hold it.
    let device = if path.exists() {
        loopdev::find(&path).map_err(failed("look for a loop device"))?
    } else {
        make_file(state, &path)?;
        None
    };
    let (device, _keep) = match device {
        Some(device) => (device, None),
        None => {
            let file = OpenOptions::new().read(true).write(true).open(&path);
            let made = file.and_then(|f| loopdev::create(&f));
            let made = made.map_err(failed(format!("make a loop device of {}", path.display())))?;
            (made.path.clone(), Some(made))
        }
    };
    let source = device.display().to_string();
    // noatime, no checksums (a layer does not outlive its host's crash, so it needs no proof against
    // one), free space punched out of the file.
    let settings = [
        FsSetting::Text("source", &source),
        FsSetting::Flag("nodatasum"),
        FsSetting::Flag("nobarrier"),
        FsSetting::Text("discard", "async"),
    ];
    let mount = new_mount("btrfs", &settings, Attr::DATA_ONLY)
        .map_err(failed(format!("mount the btrfs file system of {}", path.display())))?;
    let place = mount_point.to_str().ok_or_else(|| {
        failed("mount the writable layers")(io::Error::other("the state directory's path is not UTF-8"))
    })?;
    attach(mount.as_fd(), CWD, place).map_err(failed(format!("mount at {}", mount_point.display())))
}

fn make_file(state: &Path, path: &Path) -> Result<(), BackendError> {
    let free = rustix::fs::statvfs(state).map(|s| s.f_bavail * s.f_frsize).unwrap_or(0);
    let size = free.saturating_sub(HOST_RESERVE);
    if size < SIZE_MIN {
        return Err(failed(format!("make {}", path.display()))(io::Error::new(
            io::ErrorKind::StorageFull,
            format!(
                "{} MiB are free there and {} MiB are needed",
                free >> 20,
                (SIZE_MIN + HOST_RESERVE) >> 20
            ),
        )));
    }
    let unfinished = path.with_extension("new");
    let made = (|| {
        File::create(&unfinished)?.set_len(size)?;
        let output = Command::new("mkfs.btrfs")
            .args(["-q", "-f", "-m", "single", "-d", "single"])
            .arg(&unfinished)
            .output();
        let output = output.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                io::Error::new(e.kind(), "mkfs.btrfs is not installed (package btrfs-progs)")
            }
            _ => e,
        })?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        fs::rename(&unfinished, path)
    })();
    made.map_err(|error| {
        let _nothing_was_made = fs::remove_file(&unfinished);
        failed(format!("make {}", path.display()))(error)
    })
}
