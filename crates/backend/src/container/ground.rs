//! Where launches start: the launcher's own bare mount namespace, and its directories.

use std::io;
use std::os::fd::AsFd;

use dsec_sys::mount::{Attr, FsSetting, attach, make_all_private, new_mount, pivot_into_cwd};
use dsec_sys::process::{Namespaces, unshare};
use rustix::fs::{CWD, Mode, mkdirat};

use super::LAYERS_MAX;

/// Directories of the launcher's root, where a launch mounts what only has to be somewhere in its namespace. All of
/// them end up below the container's root, out of reach.
pub(super) mod place {
    /// Where the layers of one launch are, numbered from the lowest.
    pub(in super::super) const LAYERS: &str = "/layers";
    /// The writable layer of one launch.
    pub(in super::super) const WRITABLE: &str = "/writable";
    /// The tmpfs of one launch.
    pub(in super::super) const MEMORY: &str = "/memory";
    /// An empty directory of that tmpfs that nobody can write to.
    pub(in super::super) const EMPTY: &str = "/empty";

    /// The place of a launch's layer with this number.
    pub(in super::super) fn layer(number: usize) -> String {
        format!("{LAYERS}/{number}")
    }
}

/// Moves the calling process into a mount namespace with nothing in it but `/proc`: a new namespace
/// is a copy of its maker's, and each mount in it costs every launch a microsecond.
pub(super) fn enter_bare_namespace(scratch: &std::path::Path) -> io::Result<()> {
    unshare(Namespaces::MOUNT)?;
    make_all_private()?;
    let root =
        new_mount("tmpfs", &[FsSetting::Text("size", "16k"), FsSetting::Text("mode", "0755")], Attr::NONE)?;
    for path in ["/proc", place::EMPTY, place::LAYERS, place::WRITABLE, place::MEMORY] {
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
