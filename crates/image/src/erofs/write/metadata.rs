//! Metadata images: everything but content, which stays in the blobs.

use sha2::{Digest, Sha256};

use super::super::BLOCK_SIZE;
use super::super::devices::{BlobRef, LayerTree};
use super::super::format::{BLOCK_BITS, DeviceSlot, SLOT, Superblock, head_blocks};
use super::super::tree::Content;
use super::{Plan, ROOT_OFFSET, Writer};

/// Why a layer's metadata could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The image would have more than 2^32 blocks (16 TiB).
    #[error("the metadata would be larger than 16 TiB")]
    TooLarge,
    /// A file has content, but in no blob of the layer.
    #[error("the tree's blobs are not those its files point into")]
    NoBlob,
}

impl LayerTree {
    /// The metadata image: everything but content, which stays in the blobs. Gives the blobs that
    /// are its devices, in their order, too: those that a file points into.
    ///
    /// # Errors
    /// [`EncodeError`]
    pub fn encode(&self) -> Result<(Vec<u8>, Vec<BlobRef>), EncodeError> {
        let (numbers, used) = self.used_blobs()?;
        // Writing to memory does not fail.
        let full = |_| EncodeError::TooLarge;
        let head = head_blocks(used.len());
        let plan = Plan::new(&self.tree, head, Some(numbers)).ok_or(EncodeError::TooLarge)?;
        let blocks = plan.meta_block + plan.meta_size.div_ceil(BLOCK_SIZE);
        let blocks = u32::try_from(blocks).map_err(|_| EncodeError::TooLarge)?;
        let devices: Vec<_> = used.iter().map(BlobRef::slot).collect();
        let start = head << BLOCK_BITS;
        let mut image = Vec::with_capacity((u64::from(blocks) << BLOCK_BITS) as usize);
        image.resize(start as usize, 0);
        let mut out = Writer { out: image, position: start, hash: Sha256::new() };
        for device in &devices {
            out.hash.update(device.tag);
        }
        plan.write_outside(&self.tree, &mut out).map_err(full)?;
        plan.write_inodes(&self.tree, &mut out).map_err(full)?;
        let (mut image, uuid) = out.finish();
        let superblock = Superblock {
            root_nid: (ROOT_OFFSET / SLOT) as u16,
            inodes: plan.order.len() as u64,
            blocks,
            meta_block: plan.meta_block as u32,
            uuid,
            chunked: plan.chunked,
            devices: &devices,
        };
        image[..start as usize].copy_from_slice(&superblock.encode());
        Ok((image, used))
    }

    /// The blobs that files point into, and for each number in the tree the one in the image.
    fn used_blobs(&self) -> Result<(Vec<u16>, Vec<BlobRef>), EncodeError> {
        let mut numbers = vec![0; self.blobs.len() + 1];
        for (_, inode) in self.tree.iter() {
            if let Content::File(data) = &inode.content
                && (data.blocks > 0 || data.device > 0)
            {
                let end = u64::from(data.start) + u64::from(data.blocks);
                let blob = usize::from(data.device).checked_sub(1).and_then(|at| self.blobs.get(at));
                if blob.is_none_or(|blob| end > u64::from(blob.blocks)) {
                    return Err(EncodeError::NoBlob);
                }
                numbers[usize::from(data.device)] = 1;
            }
        }
        let mut used = Vec::new();
        for (number, blob) in numbers.iter_mut().skip(1).zip(&self.blobs) {
            if *number == 1 {
                used.push(*blob);
                *number = used.len() as u16;
            }
        }
        Ok((numbers, used))
    }
}

impl BlobRef {
    fn slot(&self) -> DeviceSlot {
        let mut tag = [0; 64];
        tag.copy_from_slice(self.id.to_string().as_bytes());
        DeviceSlot { tag, blocks: self.blocks }
    }
}
