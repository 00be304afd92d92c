//! The door to the kernel: what the edge needs of a backend besides its instances.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use dsec_backend::container::{ContainerBackend, ContainerSpec, Probe};
use dsec_backend::{Anchor, BackendError, Instance, NodePaths, Phase};

/// A backend of the node. Everything blocks and is called from threads that may.
pub trait Launch: Send + Sync + 'static {
    /// Starts a sandbox. On an error nothing of it is left.
    ///
    /// # Errors
    /// The phase that failed and why.
    fn launch(&self, spec: &ContainerSpec) -> Result<(Arc<dyn Instance>, Vec<Phase>), BackendError>;
    /// Takes over a sandbox of an earlier edge, which stands still and is to stay so if it `is_paused`; `None` when it is gone.
    ///
    /// # Errors
    /// It is there and cannot be taken over.
    fn adopt(
        &self,
        spec: &ContainerSpec,
        anchor: &Anchor,
        is_paused: bool,
    ) -> Result<Option<Arc<dyn Instance>>, BackendError>;
    /// Removes what carries this node's marks and belongs to no name in `keep`; says what it removed.
    fn sweep(&self, keep: &[String]) -> Vec<String>;
    /// Whether a layer is mounted.
    fn has_layer(&self, image: &Path) -> bool;
    /// Drops a layer's mount so that its files can be removed. Nothing uses it.
    fn forget_layer(&self, image: &Path);
    /// Bytes of disk for writable layers: all, free.
    fn disk(&self) -> (u64, u64);
    /// Tries the kernel features this backend uses.
    fn probe(&self) -> Vec<Probe>;
    /// Takes the backend's own things down. No sandbox is left; nothing is launched after it.
    ///
    /// # Errors
    /// What could not be removed.
    fn shut_down(&self) -> Result<(), BackendError>;
}

/// The container backend until it is shut down.
pub struct Containers {
    backend: RwLock<Option<ContainerBackend>>,
}

impl Containers {
    /// Starts the backend. The process must still have one thread.
    ///
    /// # Errors
    /// The host lacks something without which no container can run.
    pub fn start(paths: &NodePaths) -> Result<Self, BackendError> {
        Ok(Self { backend: RwLock::new(Some(ContainerBackend::start(paths)?)) })
    }

    fn with<T>(
        &self,
        what: &str,
        f: impl FnOnce(&ContainerBackend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        match self.backend.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(backend) => f(backend),
            None => Err(BackendError::new(what, std::io::Error::other("the backend was shut down"))),
        }
    }
}

impl Launch for Containers {
    fn launch(&self, spec: &ContainerSpec) -> Result<(Arc<dyn Instance>, Vec<Phase>), BackendError> {
        self.with("launching", |b| b.launch(spec))
    }

    fn adopt(
        &self,
        spec: &ContainerSpec,
        anchor: &Anchor,
        is_paused: bool,
    ) -> Result<Option<Arc<dyn Instance>>, BackendError> {
        self.with("taking over", |b| b.adopt(spec, anchor, is_paused))
    }

    fn sweep(&self, keep: &[String]) -> Vec<String> {
        self.with("sweeping", |b| Ok(b.sweep(keep))).unwrap_or_default()
    }

    fn has_layer(&self, image: &Path) -> bool {
        self.with("looking for a layer", |b| Ok(b.has_layer(image))).unwrap_or_default()
    }

    fn forget_layer(&self, image: &Path) {
        let _ = self.with("forgetting a layer", |b| {
            b.forget_layer(image);
            Ok(())
        });
    }

    fn disk(&self) -> (u64, u64) {
        self.with("reading the disk", |b| Ok(b.disk())).unwrap_or_default()
    }

    fn probe(&self) -> Vec<Probe> {
        ContainerBackend::probe()
    }

    fn shut_down(&self) -> Result<(), BackendError> {
        match self.backend.write().unwrap_or_else(PoisonError::into_inner).take() {
            Some(backend) => backend.shut_down(),
            None => Ok(()),
        }
    }
}
