//! Images.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of a layer that is an image.
pub const LAYER_BASE: &str = "base";

/// `reason` in the detail of a pull's error when the registry wants credentials, or other ones.
pub const REGISTRY_UNAUTHORIZED: &str = "registry_unauthorized";

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
    /// It on the nodes. A list names only those that have it at hand.
    #[serde(default)]
    pub nodes: Vec<super::LayerOnNode>,
}

/// Images, or layers of another kind, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// The images.
    pub images: Vec<Image>,
}

/// An image that the node is to get from a registry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// `docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`; the host must be there, the tag is `latest` by default.
    pub reference: String,
    /// `linux/ARCHITECTURE[/VARIANT]` of an image for several platforms. Default: the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// What the registry is shown when it asks. Neither kept nor logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RegistryCredentials>,
    /// Speak HTTP without TLS. To `localhost` and loopback addresses it is spoken anyway, unless `ca_pem` is given.
    #[serde(default)]
    pub plain_http: bool,
    /// Certificates to trust beside those of the node, as PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_pem: Option<String>,
}

/// What a registry is shown: `username` and `password`, or one of the tokens.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryCredentials {
    /// A user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The user's password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// What a log-in gave in place of a password, for the registry's token service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_token: Option<String>,
    /// A token for the registry itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry_token: Option<String>,
}

impl fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegistryCredentials")
    }
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
        /// Of a pull: bytes that came from the registry so far.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fetched_bytes: Option<u64>,
        /// Of a pull: bytes that are to come from it in all; layers that are here already are not among them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fetch_bytes_total: Option<u64>,
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
