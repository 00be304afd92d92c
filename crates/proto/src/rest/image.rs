//! Images.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of a layer that is an image.
pub const LAYER_BASE: &str = "base";

/// A layer by name: an image, a workspace, a toolkit or a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Its name, with the tag unless that is `latest`, or with the version.
    pub name: String,
    /// `base` (an image), `workspace`, `toolkit` or `snapshot`.
    #[serde(default)]
    pub kind: String,
    /// The layer's id.
    pub digest: String,
    /// Bytes in the store: metadata, and content as it is compressed there.
    pub size_bytes: u64,
    /// Bytes of file content.
    pub content_bytes: u64,
    /// Files, directories and links.
    pub files: u64,
    /// Ids of the blobs with its content.
    #[serde(default)]
    pub blobs: Vec<String>,
    /// Ids of the layers it was made over or of.
    #[serde(default)]
    pub parents: Vec<String>,
    /// Time of the newest thing in it, Unix ms: the same content is the same layer whenever it is imported.
    pub created_ms: u64,
    /// What it was made from, as given.
    pub source: String,
    /// Its processor architecture (`amd64`).
    pub architecture: String,
    /// Its environment.
    pub env: Vec<String>,
    /// Its working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    /// Its user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Ids of the sandboxes that use it now.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Its content on the node that answers. Lists leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<super::LayerContent>,
}

/// The images of a node, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// The images.
    pub images: Vec<Image>,
}

/// One line of an import's answer (`application/x-ndjson`); the last is `done` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ImportEvent {
    /// How far it is.
    Progress {
        /// Files taken in so far.
        files: u64,
        /// Bytes of content taken in so far.
        bytes: u64,
    },
    /// It is there.
    Done {
        /// The image.
        image: Box<Image>,
    },
    /// It failed and left nothing behind.
    Error {
        /// Why.
        error: super::ErrorBody,
    },
}
