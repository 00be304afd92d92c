//! One container's file system in memory: `/tmp`, `/dev/shm`, `/dev`, the name files, and what other things are
//! covered with.
//!
//! The devices are files of its own and no clones of the host's or of another container's: locks and watches belong to a
//! file, and would carry signals between all who have it. The kernel lets a device node work only in a file system that
//! was mounted by the host's user namespace, as this one is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, new_mount, replace_attr, restrict};
use dsec_sys::process;
use rustix::fs::{CWD, FileType, Mode, makedev, mkdirat, mknodat, symlinkat};

use super::ground::place;

/// Character devices of every container: name, major, minor.
const DEVICES: &[(&str, u32, u32)] =
    &[("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const LINKS: &[(&str, &str)] = &[
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/ptmx", "pts/ptmx"),
];

/// The file system and two of its directories.
#[derive(Debug)]
pub(super) struct Memory {
    /// All of it, at [`place::MEMORY`].
    pub root: OwnedFd,
    /// `/dev`, with mount points `pts` and `shm`: detached, read-only, where devices work.
    pub dev: OwnedFd,
    /// Empty and read-only, at [`place::EMPTY`].
    pub empty: OwnedFd,
}

impl Memory {
    /// Mounts and fills it, all owned by the container's root. The caller keeps its capabilities over changes of the
    /// file-system ids.
    pub(super) fn make(bytes: u64, base: u32) -> io::Result<Self> {
        let (size, files) = (bytes.to_string(), (bytes / 4096).max(1024).to_string());
        let settings = [
            FsSetting::Text("size", &size),
            FsSetting::Text("nr_inodes", &files),
            FsSetting::Text("mode", "0755"),
        ];
        let root = new_mount("tmpfs", &settings, Attr::NOSUID_NODEV)?;
        // Attached, so that it can be cloned.
        attach(root.as_fd(), CWD, place::MEMORY)?;
        let umask = rustix::process::umask(Mode::empty());
        process::set_fs_ids(base, base);
        let filled = fill(&root);
        process::set_fs_ids(0, 0);
        rustix::process::umask(umask);
        filled?;
        let dev = clone_mount(root.as_fd(), "dev", false)?;
        replace_attr(dev.as_fd(), Attr::DEVICES, Attr::NODEV)?;
        let empty = clone_mount(root.as_fd(), "empty", false)?;
        restrict(empty.as_fd(), Attr::READ_ONLY)?;
        attach(empty.as_fd(), CWD, place::EMPTY)?;
        Ok(Self { root, dev, empty })
    }
}

fn fill(root: &OwnedFd) -> io::Result<()> {
    let directories = [
        ("shm", 0o1777),
        ("tmp", 0o1777),
        ("empty", 0o555),
        ("dev", 0o755),
        ("dev/pts", 0o755),
        ("dev/shm", 0o755),
        ("dev/mqueue", 0o755),
    ];
    for (name, mode) in directories {
        mkdirat(root, name, Mode::from_raw_mode(mode))?;
    }
    for (name, major, minor) in DEVICES {
        let (path, mode) = (format!("dev/{name}"), Mode::from_raw_mode(0o666));
        mknodat(root, path, FileType::CharacterDevice, mode, makedev(*major, *minor))?;
    }
    for (path, target) in LINKS {
        symlinkat(*target, root, *path)?;
    }
    Ok(())
}
