//! Which blobs the layers of this node stand on. Several layers may stand on one blob, so it is closed with the last of
//! them, and opening and closing one blob never interleave.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use dsec_fill::client::{ClientError, Opened};
use dsec_image::layer::{BlobId, LayerId};

use super::content::Content;

/// The layers that stand on a blob, locked while it is opened or closed.
type Users = Arc<tokio::sync::Mutex<HashSet<LayerId>>>;

/// The blobs that layers stand on.
pub(super) struct Blobs {
    content: Arc<dyn Content>,
    users: Mutex<HashMap<BlobId, Users>>,
}

impl Blobs {
    /// Those that layers of an earlier edge stand on are open already.
    pub(super) fn new(content: Arc<dyn Content>, earlier: &[(LayerId, Vec<BlobId>)]) -> Self {
        let mut users: HashMap<BlobId, HashSet<LayerId>> = HashMap::new();
        for (layer, blobs) in earlier {
            for blob in blobs {
                users.entry(*blob).or_default().insert(*layer);
            }
        }
        let lock = |(blob, layers)| (blob, Arc::new(tokio::sync::Mutex::new(layers)));
        Self { content, users: Mutex::new(users.into_iter().map(lock).collect()) }
    }

    fn users(&self, blob: BlobId) -> Users {
        Arc::clone(self.users.lock().unwrap_or_else(PoisonError::into_inner).entry(blob).or_default())
    }

    /// Whether a layer stands on a blob, or somebody is about to change that.
    pub(super) fn is_used(&self, blob: &BlobId) -> bool {
        let all = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(blob).is_some_and(|users| users.try_lock().map_or(true, |layers| !layers.is_empty()))
    }

    /// Makes a blob readable for a layer, which stands on it from now on, also if that did not work.
    ///
    /// # Errors
    /// The worker's.
    pub(super) async fn open(&self, blob: BlobId, layer: LayerId) -> Result<Opened, ClientError> {
        let users = self.users(blob);
        let mut layers = users.lock().await;
        layers.insert(layer);
        self.content.open(blob).await
    }

    /// The layer does not stand on the blob any more.
    pub(super) async fn close(&self, blob: BlobId, layer: LayerId) {
        let users = self.users(blob);
        let mut layers = users.lock().await;
        layers.remove(&layer);
        if !layers.is_empty() {
            return;
        }
        if let Err(error) = self.content.close(blob).await {
            tracing::warn!(%blob, error = &error as &dyn std::error::Error, "a blob stays open");
        }
        let mut all = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        // The map's and this one: nobody else waits for it.
        if Arc::strong_count(&users) == 2 {
            all.remove(&blob);
        }
    }
}
