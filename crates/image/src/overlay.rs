//! How a layer says what it hides: overlayfs's own form, which the kernel reads when layers are mounted over each
//! other, and two marks of ours for what only a merge can settle.
//!
//! ```text
//! char device 0:0               whiteout: the name is not there
//! trusted.overlay.opaque=y      what layers below have in this directory is not there
//! trusted.overlay.redirect      the directory was renamed: it goes on with that one of the layers below
//! trusted.overlay.origin        (empty) the directory has whiteouts; see [`crate::build::mark_whiteouts`]
//! trusted.dsec.implied          a directory that an archive has entries of, but not itself
//! trusted.dsec.link=PATH        a hard link to a file that only layers below have
//! ```
//!
//! Source: `Documentation/filesystems/overlayfs.rst`; the marks are ours.

use crate::erofs::{Attributes, Content, Xattrs};

pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
pub(crate) const REDIRECT: &[u8] = b"trusted.overlay.redirect";
pub(crate) const ORIGIN: &[u8] = b"trusted.overlay.origin";
pub(crate) const METACOPY: &[u8] = b"trusted.overlay.metacopy";
/// Attributes of overlayfs that a container set through it, as overlayfs keeps them.
pub(crate) const ESCAPED: &[u8] = b"trusted.overlay.overlay.";
pub(crate) const IMPLIED: &[u8] = b"trusted.dsec.implied";
pub(crate) const LINK: &[u8] = b"trusted.dsec.link";

/// Whether an attribute says how layers are merged; no archive may bring one.
pub(crate) fn steers(name: &[u8]) -> bool {
    [b"trusted.overlay.".as_slice(), b"user.overlay.", b"trusted.dsec."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

pub(crate) fn is_whiteout(content: &Content) -> bool {
    matches!(content, Content::CharDevice(0, 0))
}

/// A whiteout, as overlayfs makes them.
pub(crate) fn whiteout() -> (Attributes, Content) {
    (Attributes::default(), Content::CharDevice(0, 0))
}

pub(crate) fn get<'a>(attributes: &'a Attributes, name: &[u8]) -> Option<&'a [u8]> {
    attributes.xattrs.as_ref()?.get(name)
}

pub(crate) fn is_opaque(attributes: &Attributes) -> bool {
    get(attributes, OPAQUE).is_some_and(|value| value == b"y")
}

/// Sets an attribute. One that does not fit beside 256 KiB of others stays away.
pub(crate) fn mark(attributes: &mut Attributes, name: &[u8], value: &[u8]) {
    let mut xattrs = attributes.xattrs.take().unwrap_or_default();
    // The only way to fail is the size of all together.
    let _ = Xattrs::set(&mut xattrs, name, value);
    attributes.xattrs = Some(xattrs);
}

/// Removes the attributes that `doomed` says yes to.
pub(crate) fn unmark(attributes: &mut Attributes, doomed: impl FnMut(&[u8]) -> bool) {
    if let Some(xattrs) = &mut attributes.xattrs {
        xattrs.remove_if(doomed);
        if xattrs.is_empty() {
            attributes.xattrs = None;
        }
    }
}
