//! What every handler shares.

use std::sync::Arc;

use dsec_iam::{Iam, IamError};
use dsec_proto::rest::CREATE_AT_ONCE_MAX;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::cluster::Cluster;
use crate::config::Config;
use crate::keys::{FileKeys, KeyFileError, RECHECK};
use crate::metrics::Metrics;
use crate::nodes::NodeSet;
use crate::pools::Pools;
use crate::quota::Quotas;

/// Creates of all batches together that are under way: what one batch may have, so that the answers held are some GiB at the very worst.
const BATCH_TURNS: usize = CREATE_AT_ONCE_MAX as usize;

/// What every handler shares: settings made into the things they name.
pub struct App {
    /// The cluster's own keys.
    pub keys: FileKeys,
    /// Everybody else's, and all about them.
    pub iam: Iam,
    /// What may be let in still.
    pub quotas: Quotas,
    /// The nodes.
    pub nodes: NodeSet,
    /// The pools that they are of.
    pub pools: Pools,
    /// The cluster that machines may join, where one is kept here.
    pub cluster: Option<Arc<Cluster>>,
    /// Counters.
    pub metrics: Metrics,
    /// A permit for each create of a batch that is under way.
    pub batch_turns: Semaphore,
    /// Upgraded connections and everything else that outlives its request.
    pub tunnels: TaskTracker,
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The cluster's own keys.
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    /// The database of identities.
    #[error(transparent)]
    Iam(#[from] IamError),
}

impl App {
    /// Builds it from settings.
    ///
    /// # Errors
    /// The key file or the database cannot be used.
    pub async fn open(config: &Config) -> Result<Arc<Self>, AppError> {
        Self::with_keys(config, FileKeys::open(&config.keys_file, RECHECK)?).await
    }

    /// Builds it with these keys of the cluster's.
    ///
    /// # Errors
    /// The database cannot be used.
    pub async fn with_keys(config: &Config, keys: FileKeys) -> Result<Arc<Self>, AppError> {
        Ok(Arc::new(Self {
            keys,
            iam: Iam::open(&config.database).await?,
            quotas: Quotas::default(),
            nodes: NodeSet::new(&config.nodes),
            pools: Pools::new(config.burst.clone().map(Into::into)),
            cluster: config.cluster.as_ref().map(|cluster| {
                let names = config.nodes.iter().map(|node| node.name.clone()).collect();
                Cluster::in_dir(&cluster.dir, cluster.settings(), names)
            }),
            metrics: Metrics::new(),
            batch_turns: Semaphore::new(BATCH_TURNS),
            tunnels: TaskTracker::new(),
        }))
    }

    /// Watches nodes, identities, quotas and pools until it is dropped.
    pub async fn watch(&self) {
        tokio::join!(self.nodes.watch(), self.iam.keep(), self.quotas.keep(self), self.pools.keep(self));
    }
}
