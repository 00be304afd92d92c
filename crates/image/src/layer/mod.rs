//! What a layer is, apart from where it is kept: digests, blob indexes, manifests.
//! The picture is in `docs/adr/008-layers.md`.

mod blob;
mod digest;
mod manifest;
mod name;

pub use blob::{BlobIndex, BlobIndexError, GROUP_SIZE, GroupRef, PACK_SIZE_MAX, PackRef};
pub use digest::{BlobId, Digest, DigestError, LayerId, MetadataId, PackId};
pub use manifest::{
    BLOBS_MAX, BlobRef, Facts, LayerKind, MANIFEST_FORMAT, MANIFEST_SIZE_MAX, Manifest, ManifestError,
    MetadataRef, PARENTS_MAX, Parent, ParentRole, Source, is_diff_id,
};
pub use name::{Label, LayerName, LayerRef, NameError, Select};
