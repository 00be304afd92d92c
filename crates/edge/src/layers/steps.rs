//! What steps of recipes came to, found by their keys.
//!
//! A key keeps its layer for a while after its last use, and so does what was made of the layer; `dsec_store::collect` has the rules.

use std::time::Duration;

use dsec_image::layer::{Digest, LayerId, LayerRef, Manifest};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, Image};
use dsec_store::{Lease, StoreError};
use serde_json::json;

use super::publish::version_and_tag;
use super::{Layers, names};
use crate::error::{invalid_field, store_failed};

/// What a step is called where layers are named: in `workspace` of a create, and in what is shown.
pub(super) const PREFIX: &str = "step/";
/// How long the lease of a use that was cut short lives on.
const LEASE_TTL: Duration = Duration::from_secs(60);

/// Checks a key that a caller gives.
///
/// # Errors
/// It is none.
pub fn parse_step(key: &str) -> Result<Digest, ApiError> {
    key.parse().map_err(|_| {
        invalid_field("step", format!("{key:?} is no key of a step: it has 64 hexadecimal digits"))
    })
}

/// How a step's layer is shown.
pub(super) fn shown(key: &Digest) -> String {
    format!("{PREFIX}{key}")
}

impl Layers {
    /// The layer of a step, which counts as used now.
    ///
    /// # Errors
    /// There is none.
    pub async fn step(&self, key: &Digest) -> Result<Image, ApiError> {
        let (id, manifest) = self.held_step(key, async |_, _| Ok(())).await?;
        Ok(self.show(shown(key), &id, &manifest))
    }

    /// Gives the layer of a step a name of its kind.
    ///
    /// # Errors
    /// There is no such layer; the name's version is another layer; somebody else moves the tag at the same time.
    pub async fn name_step(&self, key: &Digest, name: &LayerRef) -> Result<Image, ApiError> {
        let naming = async |id: LayerId, manifest: &Manifest| {
            let (version, tag) = version_and_tag(&id, name)?;
            let (store, kind) = (self.store()?, manifest.kind);
            store.put_version(kind, &name.name, &version, id).await.map_err(|e| store_failed(&e))?;
            store.tag(kind, &name.name, &tag, &version).await.map_err(|e| store_failed(&e))
        };
        let (id, manifest) = self.held_step(key, naming).await?;
        self.names.forget(manifest.kind, &name.name);
        Ok(self.show(names::shown(name), &id, &manifest))
    }

    /// The layer of a step, for a sandbox that takes it into the node's lease.
    pub(super) async fn resolve_step(&self, key: &Digest) -> Result<LayerId, ApiError> {
        self.store()?.step(key).await.map_err(|e| store_failed(&e))?.ok_or_else(|| no_step(key))
    }

    /// Does something with the layer of a step while it cannot go.
    async fn held_step(
        &self,
        key: &Digest,
        then: impl AsyncFnOnce(LayerId, &Manifest) -> Result<(), ApiError>,
    ) -> Result<(LayerId, Manifest), ApiError> {
        let id = self.resolve_step(key).await?;
        let lease = Lease::begin(self.store()?, "step", LEASE_TTL).await.map_err(|e| store_failed(&e))?;
        let done = async {
            let manifest = lease.use_layer(&id).await.map_err(|error| match error {
                StoreError::NotFound { .. } => no_step(key),
                error => store_failed(&error),
            })?;
            self.store()?.put_step(key, id).await.map_err(|e| store_failed(&e))?;
            then(id, &manifest).await?;
            Ok((id, manifest))
        }
        .await;
        if let Err(error) = lease.release().await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the lease on a step was not given back"
            );
        }
        done
    }
}

fn no_step(key: &Digest) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("no layer of step {key}"))
        .detail(json!({ "step": key.to_string() }))
        .hint("the step is done again by who builds its recipe")
}
