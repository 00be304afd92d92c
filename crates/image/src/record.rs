//! What the store knows of an image.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ImageName;
use crate::intake::host_architecture;

/// How programs are to be started in an image.
/// Source: the OCI image specification, `config.md`; a root file system has only `PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Environment, as `NAME=value`.
    pub env: Vec<String>,
    /// Working directory, if the image sets one.
    pub working_dir: Option<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`, if the image sets one.
    pub user: Option<String>,
    /// What is put before the command.
    pub entrypoint: Vec<String>,
    /// The default command.
    pub cmd: Vec<String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// CPU architecture in Go's words, such as `amd64`.
    pub architecture: String,
}

impl ImageConfig {
    /// That of a root file system, which says nothing: the usual `PATH`, and this host's processor.
    pub fn of_this_host() -> Self {
        Self {
            env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
            working_dir: None,
            user: None,
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            labels: BTreeMap::new(),
            architecture: host_architecture().to_owned(),
        }
    }
}

/// One named image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Its name.
    pub name: ImageName,
    /// SHA-256 of the EROFS blob, in hex.
    pub digest: String,
    /// Size of the blob in bytes.
    pub size_bytes: u64,
    /// Sum of the sizes of its regular files in bytes, holes included, hard links once.
    pub content_bytes: u64,
    /// Inodes in it.
    pub files: u64,
    /// When it was imported, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The path it was imported from.
    pub source: String,
    /// How programs are started in it.
    pub config: ImageConfig,
}

/// What a removal did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// The image that had the name, or nothing if none had.
    pub record: Option<ImageRecord>,
    /// Whether its blob went too: no other name had it.
    pub blob_deleted: bool,
}
