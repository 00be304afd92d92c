//! What a layer is, apart from where it is kept: digests, blob indexes, manifests.
//! The picture is in `docs/adr/008-layers.md`.

mod blob;
mod digest;

pub use blob::{BlobIndex, BlobIndexError, GROUP_SIZE, GroupRef, PACK_SIZE_MAX, PackRef};
pub use digest::{BlobId, Digest, DigestError, LayerId, MetadataId, PackId};
