//! What all containers of a node share besides images: one `/dev`, and things to cover other things with.
//! Each is one file system, made once; a container gets a clone of the mount, which costs no memory
//! worth speaking of (a file system of its own costs every memory cgroup of the host some bytes).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_sys::mount::{Attr, FsSetting, new_mount};
use rustix::fs::{CWD, FileType, Mode, chmodat, makedev, mkdirat, mknodat, symlinkat};

/// Character devices of every container: name, major, minor.
const DEVICES: &[(&str, u32, u32)] =
    &[("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Detached mounts that a launch clones.
#[derive(Debug)]
pub(super) struct Templates {
    /// `/dev` with mount points `pts` and `shm`.
    pub dev: OwnedFd,
    /// An empty directory that nobody can write to.
    pub empty: OwnedFd,
}

impl Templates {
    pub(super) fn make() -> io::Result<Self> {
        let settings = [FsSetting::Text("size", "64k"), FsSetting::Text("mode", "0755")];
        let dev = new_mount("tmpfs", &settings, Attr::NONE)?;
        for (name, major, minor) in DEVICES {
            mknodat(
                &dev,
                *name,
                FileType::CharacterDevice,
                Mode::from_raw_mode(0o666),
                makedev(*major, *minor),
            )?;
            // The umask took bits away.
            chmodat(&dev, *name, Mode::from_raw_mode(0o666), rustix::fs::AtFlags::empty())?;
        }
        for (name, target) in LINKS {
            symlinkat(*target, &dev, *name)?;
        }
        for name in ["pts", "shm", "mqueue"] {
            mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
        }
        let empty = [FsSetting::Text("size", "4k"), FsSetting::Text("mode", "0555")];
        Ok(Self { dev, empty: new_mount("tmpfs", &empty, Attr::READ_ONLY)? })
    }
}

/// Moves the calling process into a mount namespace with nothing in it but `/proc`: a new namespace
/// is a copy of its maker's, and each mount in it costs every launch a microsecond.
pub(super) fn enter_bare_namespace(scratch: &std::path::Path) -> io::Result<()> {
    use dsec_sys::mount::{attach, make_all_private, pivot_into_cwd};
    use dsec_sys::process::{Namespaces, unshare};
    unshare(Namespaces::MOUNT)?;
    make_all_private()?;
    let root =
        new_mount("tmpfs", &[FsSetting::Text("size", "16k"), FsSetting::Text("mode", "0755")], Attr::NONE)?;
    mkdirat(&root, "proc", Mode::from_raw_mode(0o555))?;
    let place =
        scratch.to_str().ok_or_else(|| io::Error::other("the state directory's path is not UTF-8"))?;
    attach(root.as_fd(), CWD, place)?;
    rustix::process::fchdir(&root)?;
    pivot_into_cwd()?;
    let proc = new_mount("proc", &[], Attr::DATA_ONLY)?;
    attach(proc.as_fd(), CWD, "/proc")
}
