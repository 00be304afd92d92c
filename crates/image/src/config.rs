//! What an image says of itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::intake::host_architecture;

/// How programs are to be started in an image.
/// Source: the OCI image specification, `config.md`; a root file system has only `PATH`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
