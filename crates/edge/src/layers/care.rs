//! The care of the store on somebody's word: tags, exports, verification, collection.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsec_image::layer::{Label, LayerKind, LayerRef, Select};
use dsec_proto::rest::{ApiError, Image};
use dsec_store::{CollectSettings, Collected, Collector, Lease, StoreError, Tell, Verified};

use super::{Layers, names};
use crate::error::{bad_layer_name, internal, store_failed};

/// How long a lease of an export that was killed lives on.
const EXPORT_LEASE_TTL: Duration = Duration::from_secs(300);

/// An exported layer: a directory that goes with this.
pub struct Exported {
    dir: tempfile::TempDir,
}

impl Exported {
    /// The OCI layout.
    pub fn layout(&self) -> PathBuf {
        self.dir.path().join("layout")
    }
}

impl Layers {
    /// Puts a tag on the version that a name means, wherever the tag was before.
    ///
    /// # Errors
    /// There is no such layer; the tag is none; somebody else moves it at the same time.
    pub async fn tag(&self, kind: LayerKind, name: &str, tag: &str) -> Result<Image, ApiError> {
        let tag: Label = tag.parse().map_err(|e| bad_layer_name(&e))?;
        let asked = names::parse_name(name)?;
        let id = self.named(kind, name).await?;
        let version = match &asked.select {
            Select::Version(version) => version.clone(),
            Select::Tag(on) => {
                self.store()?.tagged(kind, &asked.name, on).await.map_err(|e| store_failed(&e))?
            }
        };
        self.store()?.tag(kind, &asked.name, &tag, &version).await.map_err(|e| store_failed(&e))?;
        self.names.forget(kind, &asked.name);
        let manifest = self.manifest(&id).await?;
        let name = LayerRef { name: asked.name, select: Select::Tag(tag) };
        Ok(self.show(names::shown(&name), &id, &manifest))
    }

    /// Writes a layer, with those below it, as an OCI layout.
    ///
    /// # Errors
    /// There is no such layer; the store cannot be read; the disk is full.
    pub async fn export(&self, kind: LayerKind, name: &str) -> Result<Exported, ApiError> {
        let id = self.named(kind, name).await?;
        let dir = tempfile::tempdir_in(self.uploads())
            .map_err(|e| internal("a directory for the export cannot be made", &e))?;
        let exported = Exported { dir };
        let store = self.store()?;
        let lease = Lease::begin(store, "export", EXPORT_LEASE_TTL).await.map_err(|e| store_failed(&e))?;
        let written = match lease.use_layer(&id).await {
            Ok(_) => store.export(&id, &exported.layout()).await,
            Err(error) => Err(error),
        };
        if let Err(error) = lease.release().await {
            tracing::warn!(error = &error as &dyn std::error::Error, "an export's lease was not given back");
        }
        written.map_err(|e| store_failed(&e))?;
        Ok(exported)
    }

    /// Reads a layer whole, or all of them, and checks every digest. `tell` is called now and then with what was seen; it
    /// says whether to go on. Blocks, on a thread of a runtime that may.
    ///
    /// # Errors
    /// There is no such layer; the store does not answer.
    pub fn verify(
        self: &Arc<Self>,
        layer: Option<(LayerKind, String)>,
        tell: Tell<'_>,
    ) -> Result<Verified, ApiError> {
        tokio::runtime::Handle::current().block_on(async {
            let id = match layer {
                Some((kind, name)) => Some(self.named(kind, &name).await?),
                None => None,
            };
            self.store()?.verify_while(id.as_ref(), tell).await.map_err(|e| store_failed(&e))
        })
    }

    /// Removes from the store what is older than `grace` and nothing refers to, steps of recipes that were not used for `step_age`
    /// among it. Blocks, on a thread of a runtime that may.
    ///
    /// # Errors
    /// The store does not answer.
    pub fn collect_now(
        &self,
        grace: Option<Duration>,
        step_age: Option<Duration>,
    ) -> Result<Collected, ApiError> {
        let mut settings = CollectSettings::default();
        settings.grace = grace.unwrap_or(settings.grace);
        settings.step_age = step_age.unwrap_or(settings.step_age);
        let mut collector = Collector::new(self.store()?, settings);
        tokio::runtime::Handle::current().block_on(self.clear(&mut collector)).map_err(|e| store_failed(&e))
    }

    /// Lets go of what is idle here and has no name any more, and collects.
    pub(super) async fn clear(&self, collector: &mut Collector) -> Result<Collected, StoreError> {
        for id in collector.unnamed(self.longest_idle()).await? {
            self.let_go(&id).await;
        }
        collector.run().await
    }
}
