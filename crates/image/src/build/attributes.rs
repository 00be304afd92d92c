//! Extended attributes of files in a directory.

use std::borrow::Cow;
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

const CAPABILITY: &[u8] = b"security.capability";
/// Length of its value as root in a user namespace writes it: with the id of that root behind what the host's root writes.
/// The first four bytes are flags and the revision. Source: `include/uapi/linux/capability.h`.
const CAPABILITY_3: usize = 24;
const REVISION_2: [u8; 4] = 0x0200_0000_u32.to_le_bytes();
/// Ids that a sandbox has.
const IDS: u32 = 65_536;

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
        let Some(value) = (if name == CAPABILITY { capability(value) } else { Some(value.into()) }) else {
            continue;
        };
        let value = value.as_ref();
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

/// A file capability as a layer has it: in the form of the host's root, who is whoever mounts the layer, when it is root's
/// inside. That of another namespace stays its; one with an id of the host goes.
fn capability(value: &[u8]) -> Option<Cow<'_, [u8]>> {
    let Some((rest, root)) = value.split_last_chunk::<4>().filter(|_| value.len() == CAPABILITY_3) else {
        return Some(value.into());
    };
    match u32::from_le_bytes(*root) {
        0 => {
            // The lowest bit of the flags says that the capabilities take effect by themselves.
            Some(
                [[rest[0], REVISION_2[1], REVISION_2[2], REVISION_2[3]].as_slice(), &rest[4..]]
                    .concat()
                    .into(),
            )
        }
        1..IDS => Some(value.into()),
        _ => None,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_of_root_inside_is_that_of_whoever_mounts_the_layer() {
        let of = |root: u32| {
            let flags = (0x0300_0000_u32 | 1).to_le_bytes();
            [flags.as_slice(), &[0x20, 0, 0, 0], &[0; 12], &root.to_le_bytes()].concat()
        };
        let plain = capability(&of(0)).unwrap().into_owned();
        assert_eq!((plain.len(), &plain[..5]), (20, [1, 0, 0, 2, 0x20].as_slice()));
        assert_eq!(capability(&plain).unwrap(), plain);
        assert_eq!(capability(&of(1000)).unwrap(), of(1000));
        assert_eq!(capability(&of(0x1000_0000)), None);
    }
}
