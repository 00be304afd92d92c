//! Where everything lies in the store.

use dsec_image::layer::{BlobId, Digest, Label, LayerId, LayerKind, LayerName, MetadataId, PackId};

pub(crate) const MARKER: &str = "dsec-store.json";
pub(crate) const ID: &str = "dsec-store-id";
pub(crate) const PACKS: &str = "packs";
pub(crate) const BLOBS: &str = "blobs";
pub(crate) const METADATA: &str = "meta";
pub(crate) const LAYERS: &str = "layers";
pub(crate) const FILES: &str = "files";
pub(crate) const NAMES: &str = "names";
pub(crate) const OCI: &str = "oci";
pub(crate) const STEPS: &str = "steps";
pub(crate) const TRACES: &str = "traces";
pub(crate) const LEASES: &str = "leases";
pub(crate) const COLLECT: &str = "collect";
pub(crate) const CLOCK: &str = "clock";

pub(crate) fn pack(id: &PackId) -> String {
    let id = id.to_string();
    format!("{PACKS}/{}/{id}", &id[..2])
}

pub(crate) fn blob(id: &BlobId) -> String {
    format!("{BLOBS}/{id}")
}

pub(crate) fn metadata(id: &MetadataId) -> String {
    format!("{METADATA}/{id}")
}

pub(crate) fn layer(id: &LayerId) -> String {
    format!("{LAYERS}/{id}")
}

pub(crate) fn files(id: &LayerId) -> String {
    format!("{FILES}/{id}")
}

pub(crate) fn trace(id: &BlobId) -> String {
    format!("{TRACES}/{id}")
}

/// A diff id has a colon, which some stores and tools take amiss.
pub(crate) fn oci(diff_id: &str) -> String {
    format!("{OCI}/{}", diff_id.replace(':', "-"))
}

pub(crate) fn step(key: &Digest) -> String {
    format!("{STEPS}/{key}")
}

/// `/` becomes `+`, which is in no name: else the versions of `a` and the name `a/versions/b` would share places.
pub(crate) fn name(kind: LayerKind, name: &LayerName) -> String {
    format!("{NAMES}/{kind}/{}", name.as_str().replace('/', "+"))
}

pub(crate) fn version(kind: LayerKind, name: &LayerName, version: &Label) -> String {
    format!("{}/versions/{version}", self::name(kind, name))
}

pub(crate) fn tags(kind: LayerKind, name: &LayerName) -> String {
    format!("{}/tags", self::name(kind, name))
}

/// The digest at the end of a key, if there is one.
pub(crate) fn id_of<T: std::str::FromStr>(key: &str) -> Option<T> {
    key.rsplit('/').next()?.parse().ok()
}

/// Kind, name and what follows of a key below `names/`.
pub(crate) fn parse_name(key: &str) -> Option<(LayerKind, LayerName, &str)> {
    let mut parts = key.strip_prefix(NAMES)?.strip_prefix('/')?.splitn(3, '/');
    let kind = parts.next()?;
    let kind = LayerKind::ALL.into_iter().find(|known| known.as_str() == kind)?;
    let name = parts.next()?.replace('+', "/").parse().ok()?;
    Some((kind, name, parts.next()?))
}
