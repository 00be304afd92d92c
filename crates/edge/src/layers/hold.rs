//! The node's lease, by which the store keeps what is here.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dsec_image::layer::LayerId;
use dsec_proto::rest::ApiError;
use dsec_store::{Lease, Store, StoreError};
use futures_util::StreamExt as _;

use super::Layers;
use crate::error::{internal, store_failed};

/// How long the node's lease lives past its last sign of life: a restart of the machine takes less.
const LEASE_TTL: Duration = Duration::from_secs(600);
/// Where the lease of the node is noted for the next edge.
const LEASE_FILE: &str = "lease";
/// How long nobody uses a layer before the store is told: what runs one after the other on one image is not worth telling.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How often it is looked whether there is something to tell.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Layers of which it is told at once.
const TELL_AT_ONCE: usize = 8;
/// How long a start waits until the store knows that a layer is used again. Nothing rests on it but that names of what is used are
/// not removed.
const TELL_MAX: Duration = Duration::from_secs(2);
/// How long a node that goes down waits for the store to take its lease back; it runs out by itself.
const RELEASE_MAX: Duration = Duration::from_secs(10);

/// The lease, which is another one after it was lost.
pub(super) struct Held {
    lease: Mutex<Arc<Lease>>,
    /// It is new, and what was here before is not held by it yet.
    is_empty: AtomicBool,
    node: String,
}

impl Held {
    /// Goes on with the lease of this node's last edge, or takes a new one.
    pub(super) async fn begin(store: &Store, dir: &Path, node: &str) -> Result<Self, ApiError> {
        let adopted = match std::fs::read_to_string(dir.join(LEASE_FILE)) {
            Ok(id) => Lease::adopt(store, id.trim(), LEASE_TTL)
                .await
                .inspect_err(|error| tracing::info!(lease = id.trim(), %error, "a new lease is taken"))
                .ok(),
            Err(_) => None,
        };
        let is_empty = AtomicBool::new(adopted.is_none());
        let lease = match adopted {
            Some(lease) => lease,
            None => new(store, dir, node).await?,
        };
        Ok(Self { lease: Mutex::new(Arc::new(lease)), is_empty, node: node.to_owned() })
    }

    pub(super) fn lease(&self) -> Arc<Lease> {
        Arc::clone(&self.lease.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn renew(&self, store: &Store, dir: &Path) -> Result<(), ApiError> {
        let lease = Arc::new(new(store, dir, &self.node).await?);
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = lease;
        self.is_empty.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives it back.
    pub(super) async fn release(&self, dir: &Path) {
        match tokio::time::timeout(RELEASE_MAX, self.lease().release()).await {
            Ok(Ok(())) => {
                let _gone_already = std::fs::remove_file(dir.join(LEASE_FILE));
            }
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the node's lease was not given back");
            }
            Err(_) => tracing::warn!("the store did not take the node's lease back in time"),
        }
    }
}

async fn new(store: &Store, dir: &Path, node: &str) -> Result<Lease, ApiError> {
    let lease = Lease::begin(store, node, LEASE_TTL).await.map_err(|e| store_failed(&e))?;
    std::fs::write(dir.join(LEASE_FILE), lease.id())
        .map_err(|e| internal("the node's lease cannot be noted", &e))?;
    Ok(lease)
}

impl Layers {
    /// Sees to it that all that is here is held in the store: the lease may have run out, while no edge ran or while the
    /// store did not answer. Called at the start and now and then.
    pub async fn keep_hold(&self) {
        let (Ok(store), Some(held)) = (self.store(), self.held()) else { return };
        if held.lease().check().is_err() {
            if let Err(error) = held.renew(store, &self.dir).await {
                tracing::error!(error = error.0.message, "the node has no lease on the store");
                return;
            }
            tracing::warn!("the node's lease was lost; a new one is taken");
        }
        if !held.is_empty.swap(false, Ordering::AcqRel) {
            return;
        }
        let (lease, all): (_, Vec<LayerId>) = (held.lease(), self.entries().keys().copied().collect());
        for id in all {
            match lease.use_layer(&id).await {
                Ok(_) => {}
                Err(StoreError::NotFound { .. }) if self.is_unused(&id) => self.let_go(&id).await,
                Err(error) => {
                    let lost = &error as &dyn std::error::Error;
                    tracing::error!(layer = %id, error = lost, "a layer that is used is not held in the store");
                    // What is gone stays gone; anything else is tried again.
                    if !matches!(error, StoreError::NotFound { .. }) {
                        held.is_empty.store(true, Ordering::Release);
                    }
                }
            }
        }
    }

    /// Tells the store, for as long as the node lives, which of the layers that are held nobody uses: these may lose their names.
    pub async fn tell_idle(self: Arc<Self>) {
        let layers = Arc::downgrade(&self);
        drop(self);
        loop {
            tokio::time::sleep(TELL_EVERY).await;
            let Some(this) = layers.upgrade() else { return };
            let all: Vec<LayerId> = this.entries().keys().copied().collect();
            let tell = |id: LayerId| {
                let this = Arc::clone(&this);
                async move { this.tell(&id).await }
            };
            futures_util::stream::iter(all.into_iter().map(tell))
                .buffer_unordered(TELL_AT_ONCE)
                .count()
                .await;
        }
    }

    async fn tell(&self, id: &LayerId) {
        let Ok(lease) = self.lease() else { return };
        let idle_for = match self.entries().get(id) {
            Some(entry) => entry.idle_since.map(|since| since.elapsed()),
            None => return,
        };
        // In between it is left as it was told.
        let is_idle = match idle_for {
            None => false,
            Some(time) if time >= IDLE_AFTER => true,
            Some(_) => return,
        };
        if let Err(error) = lease.tell_idle(id, is_idle).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(layer = %id, error, "the store is not told whether a layer is used");
        }
    }

    /// Tells the store that a layer is used again.
    pub(super) async fn tell_used(&self, id: &LayerId) {
        let Ok(lease) = self.lease() else { return };
        match tokio::time::timeout(TELL_MAX, lease.tell_idle(id, false)).await {
            Ok(Ok(())) => {}
            // It is told again within seconds.
            Ok(Err(error)) => {
                tracing::warn!(layer = %id, error = &error as &dyn std::error::Error, "a layer is still called idle")
            }
            Err(_) => tracing::warn!(layer = %id, "the store was not told in time that a layer is used"),
        }
    }
}
