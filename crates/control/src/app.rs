//! What every handler shares.

use std::sync::Arc;

use dsec_iam::{Iam, IamError};
use dsec_proto::rest::CREATE_AT_ONCE_MAX;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::cluster::{Cluster, ClusterStore, DatabaseStore, FileStore, StoreError};
use crate::config::{ClusterConfig, ClusterPlace, Config};
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
    /// What the cluster knows.
    #[error(transparent)]
    Cluster(#[from] StoreError),
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
        let iam = Iam::open(&config.database).await?;
        let cluster = match &config.cluster {
            Some(cluster) => {
                let names = config.nodes.iter().map(|node| node.name.clone()).collect();
                Some(Cluster::new(store_of(cluster, &iam).await?, cluster.settings(), names))
            }
            None => None,
        };
        Ok(Arc::new(Self {
            keys,
            iam,
            quotas: Quotas::default(),
            nodes: NodeSet::new(&config.nodes),
            cluster,
            pools: Pools::new(config.burst.clone().map(Into::into)),
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

async fn store_of(config: &ClusterConfig, iam: &Iam) -> Result<Arc<dyn ClusterStore>, StoreError> {
    Ok(match &config.place {
        ClusterPlace::Files { dir } => Arc::new(FileStore::new(dir)),
        ClusterPlace::Database { earlier } => {
            let store = DatabaseStore::new(iam.documents());
            if let Some(dir) = earlier {
                store.take_over(dir).await?;
            }
            Arc::new(store)
        }
    })
}
