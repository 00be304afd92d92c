//! What all containers of a node share besides images: one `/dev`, and things to cover other things with.
//! Each is one file system, made once; a container gets clones of its mount, which cost no memory
//! worth speaking of (a file system of its own costs every memory cgroup of the host some bytes).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_sys::mount::{Attr, FsSetting, attach, clone_mount, new_mount, restrict};
use rustix::fs::{CWD, FileType, Mode, OFlags, chmodat, makedev, mkdirat, mknodat, open, symlinkat};

use super::LAYERS_MAX;

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

/// Directories of the launcher's root: where templates are mounted, and where a launch mounts what only has to be
/// somewhere in its namespace. All of them end up below the container's root, out of reach.
pub(super) mod place {
    /// `/dev` of every container.
    pub(in super::super) const DEV: &str = "/dev";
    /// An empty directory that nobody can write to.
    pub(in super::super) const EMPTY: &str = "/empty";
    /// Where the layers of one launch are, numbered from the lowest.
    pub(in super::super) const LAYERS: &str = "/layers";
    /// The writable layer of one launch.
    pub(in super::super) const WRITABLE: &str = "/writable";
    /// The tmpfs of one launch.
    pub(in super::super) const MEMORY: &str = "/memory";

    /// The place of a launch's layer with this number.
    pub(in super::super) fn layer(number: usize) -> String {
        format!("{LAYERS}/{number}")
    }
}

/// Mounts in the launcher's namespace that a launch clones. (Before Linux 6.15 only an attached mount can be cloned, and
/// only from its own namespace.)
#[derive(Debug)]
pub(super) struct Templates {
    dev: OwnedFd,
    empty: OwnedFd,
}

/// Clones for one container, made while its process is still in the launcher's namespace.
#[derive(Debug)]
pub(super) struct Clones {
    /// `/dev` with mount points `pts` and `shm`.
    pub dev: OwnedFd,
    /// What covers files.
    pub nulls: Vec<OwnedFd>,
    /// What covers directories.
    pub empties: Vec<OwnedFd>,
}

impl Templates {
    /// Mounts them. Called in the bare namespace.
    pub(super) fn make() -> io::Result<Self> {
        make_dev()?;
        let empty = [FsSetting::Text("size", "4k"), FsSetting::Text("mode", "0555")];
        attach(new_mount("tmpfs", &empty, Attr::READ_ONLY)?.as_fd(), CWD, place::EMPTY)?;
        let at = |path| open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { dev: at(place::DEV)?, empty: at(place::EMPTY)? })
    }

    /// A cover for a file. Read-only: all containers share its inode, whose times are nobody's to set.
    fn null(&self) -> io::Result<OwnedFd> {
        let null = clone_mount(self.dev.as_fd(), "null", false)?;
        restrict(null.as_fd(), Attr::DEVICES)?;
        Ok(null)
    }

    /// Clones with this many covers.
    pub(super) fn clones(&self, files: usize, dirs: usize) -> io::Result<Clones> {
        Ok(Clones {
            dev: clone_mount(self.dev.as_fd(), "", false)?,
            nulls: (0..files).map(|_| self.null()).collect::<io::Result<_>>()?,
            empties: (0..dirs)
                .map(|_| clone_mount(self.empty.as_fd(), "", false))
                .collect::<io::Result<_>>()?,
        })
    }
}

fn make_dev() -> io::Result<()> {
    let settings = [FsSetting::Text("size", "64k"), FsSetting::Text("mode", "0755")];
    let dev = new_mount("tmpfs", &settings, Attr::NONE)?;
    for (name, major, minor) in DEVICES {
        mknodat(&dev, *name, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(*major, *minor))?;
        // The umask took bits away.
        chmodat(&dev, *name, Mode::from_raw_mode(0o666), rustix::fs::AtFlags::empty())?;
    }
    for (name, target) in LINKS {
        symlinkat(*target, &dev, *name)?;
    }
    for name in ["pts", "shm", "mqueue"] {
        mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
    }
    attach(dev.as_fd(), CWD, place::DEV)
}

/// Moves the calling process into a mount namespace with nothing in it but `/proc`: a new namespace
/// is a copy of its maker's, and each mount in it costs every launch a microsecond.
pub(super) fn enter_bare_namespace(scratch: &std::path::Path) -> io::Result<()> {
    use dsec_sys::mount::{make_all_private, pivot_into_cwd};
    use dsec_sys::process::{Namespaces, unshare};
    unshare(Namespaces::MOUNT)?;
    make_all_private()?;
    let root =
        new_mount("tmpfs", &[FsSetting::Text("size", "16k"), FsSetting::Text("mode", "0755")], Attr::NONE)?;
    for path in ["/proc", place::DEV, place::EMPTY, place::LAYERS, place::WRITABLE, place::MEMORY] {
        mkdirat(&root, &path[1..], Mode::from_raw_mode(0o755))?;
    }
    for number in 0..LAYERS_MAX {
        mkdirat(&root, &place::layer(number)[1..], Mode::from_raw_mode(0o755))?;
    }
    let place =
        scratch.to_str().ok_or_else(|| io::Error::other("the state directory's path is not UTF-8"))?;
    attach(root.as_fd(), CWD, place)?;
    rustix::process::fchdir(&root)?;
    pivot_into_cwd()?;
    let proc = new_mount("proc", &[], Attr::DATA_ONLY)?;
    attach(proc.as_fd(), CWD, "/proc")
}
