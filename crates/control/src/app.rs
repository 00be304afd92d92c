//! What every handler shares.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::keys::{FileKeys, KeyFileError, KeyStore, RECHECK};
use crate::metrics::Metrics;
use crate::nodes::NodeSet;

/// What every handler shares: settings made into the things they name.
pub struct App {
    /// Who may ask.
    pub keys: Box<dyn KeyStore>,
    /// The nodes.
    pub nodes: NodeSet,
    /// Counters.
    pub metrics: Metrics,
    /// Upgraded connections and everything else that outlives its request.
    pub tunnels: TaskTracker,
}

impl App {
    /// Builds it from settings, with keys from their file.
    ///
    /// # Errors
    /// The key file cannot be used.
    pub fn new(config: &Config) -> Result<Arc<Self>, KeyFileError> {
        let path: &PathBuf = &config.keys_file;
        Ok(Self::with_keys(config, Box::new(FileKeys::open(path, RECHECK)?)))
    }

    /// Builds it with another key store.
    pub fn with_keys(config: &Config, keys: Box<dyn KeyStore>) -> Arc<Self> {
        Arc::new(Self {
            keys,
            nodes: NodeSet::new(&config.nodes),
            metrics: Metrics::new(),
            tunnels: TaskTracker::new(),
        })
    }
}
