//! A tree whose content lies in blobs, and the devices that stand for them in a metadata image.

use super::tree::Tree;
use crate::layer::BlobId;

/// Most blobs one metadata image may point into. The kernel takes 65,535 devices; each costs an open file a mount, and
/// no sensible merge comes near a thousand.
pub const BLOBS_MAX: usize = 1000;

/// A blob that files of a tree point into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobRef {
    /// Which.
    pub id: BlobId,
    /// Its length in blocks of 4 KiB.
    pub blocks: u32,
}

/// The metadata of a layer: a tree, and the blobs its files point into.
#[derive(Debug, Default, Clone)]
pub struct LayerTree {
    /// Names and attributes.
    pub tree: Tree,
    /// The blobs, in the order in which the metadata image wants them as devices. May hold some that no file points
    /// into; the image leaves those out.
    pub blobs: Vec<BlobRef>,
}

impl LayerTree {
    /// The number by which files point into a blob, which is added if it is new; none when there are too many.
    pub(crate) fn device(&mut self, blob: BlobRef) -> Option<u16> {
        device(&mut self.blobs, blob)
    }
}

/// The number of `blob` in a table, which it is added to if it is new; none when there are too many.
pub(crate) fn device(blobs: &mut Vec<BlobRef>, blob: BlobRef) -> Option<u16> {
    let at = blobs.iter().position(|known| known.id == blob.id);
    if at.is_none() && blobs.len() == BLOBS_MAX {
        return None;
    }
    let at = at.unwrap_or_else(|| {
        blobs.push(blob);
        blobs.len() - 1
    });
    Some(at as u16 + 1)
}
