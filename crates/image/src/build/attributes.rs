//! Extended attributes of files in a directory.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use crate::erofs::{XattrError, Xattrs};
use crate::error::{EntryProblem, printable};
use crate::overlay;

use super::directory::proc_path;

/// Longest list of names, and longest value, that Linux has.
const XATTR_MAX: usize = 64 << 10;

/// Bookkeeping of overlayfs that means nothing in a layer.
/// Source: `fs/overlayfs/overlayfs.h` of Linux 6.18.
const BOOKKEEPING: [&[u8]; 6] = [
    b"trusted.overlay.origin",
    b"trusted.overlay.impure",
    b"trusted.overlay.nlink",
    b"trusted.overlay.upper",
    b"trusted.overlay.uuid",
    b"trusted.overlay.protattr",
];

/// What a directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Files and nothing else: what would steer overlayfs is left out.
    Plain,
    /// The upper directory of an overlay: whiteouts, opaque and renamed directories are kept.
    Upper,
}

/// The attributes of `name` in `dir` that a layer keeps.
pub(super) fn xattrs(dir: &OwnedFd, name: &CStr, source: Source) -> Result<Xattrs, EntryProblem> {
    let path = proc_path(dir, name);
    let failed = |errno: rustix::io::Errno| EntryProblem::Unreadable(errno.into());
    let mut kept = Xattrs::default();
    // Most files have none, which this tells without a large buffer.
    match rustix::fs::llistxattr_query(&path) {
        Ok(0) | Err(rustix::io::Errno::NOTSUP) => return Ok(kept),
        Ok(_) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let mut list = vec![0u8; XATTR_MAX];
    let len = rustix::fs::llistxattr(&path, &mut list[..]).map_err(failed)?;
    let mut buffer = vec![0u8; XATTR_MAX];
    for name in list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if !is_kept(name, source) {
            continue;
        }
        let len = match rustix::fs::lgetxattr(&path, name, &mut buffer[..]) {
            Ok(len) => len,
            Err(rustix::io::Errno::NODATA) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        let value = &buffer[..len];
        if source == Source::Upper && asks_for_more(name, value) {
            return Err(EntryProblem::OverlayAttribute { name: printable(name) });
        }
        match kept.set(name, value) {
            Ok(()) | Err(XattrError::UnknownNamespace) => {}
            Err(source) => return Err(EntryProblem::BadXattr { name: printable(name), source }),
        }
    }
    Ok(kept)
}

fn is_kept(name: &[u8], source: Source) -> bool {
    // SELinux labels belong to the policy of where they were made.
    if name == b"security.selinux" || name.starts_with(b"trusted.dsec.") {
        return false;
    }
    match source {
        Source::Plain => !overlay::steers(name),
        Source::Upper => !BOOKKEEPING.contains(&name),
    }
}

/// Whether an attribute asks for what layers do not have: content elsewhere, or whiteouts of another form.
fn asks_for_more(name: &[u8], value: &[u8]) -> bool {
    let known = name == overlay::REDIRECT || (name == overlay::OPAQUE && value == b"y");
    name.starts_with(b"trusted.overlay.") && !name.starts_with(overlay::ESCAPED) && !known
}
