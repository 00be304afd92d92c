//! The layers of an image of a registry: only those that the store has not are fetched, some at a time and ahead of the one
//! that is built.
//!
//! ```text
//! manifest, configuration ──► diff ids ── known ──► from the store
//!                                  └── missing ──► fetch ─┐
//!                                                  fetch ─┼─► file, digest checked ──► build
//!                                                  fetch ─┘    in the layers' order     file removed
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dsec_image::build::{BuiltLayer, LayerSource, Workshop};
use dsec_image::layer::Source;
use dsec_image::{ImageConfig, ImportLimits, ImportPhase, ImportProgress};
use dsec_proto::rest::{ApiError, PullRequest, RegistryCredentials};
use dsec_registry::{Allowed, Client, Credentials, Image, Layer, Platform, PullError, Reference, Settings};
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::import::Parts;
use super::work;
use crate::error::{import_failed, internal, invalid_field, pull_failed};

/// Layers fetched at a time: one connection seldom fills a link, many do not fill it better.
const FETCHES: usize = 3;
/// How often it is told how far the fetching is while a layer is waited for.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Bytes that come from the registry.
#[derive(Debug, Default)]
pub struct Fetched {
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Fetched {
    /// Bytes so far, and bytes in all as far as is known.
    pub fn now(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// An image to get from a registry.
#[derive(Debug)]
pub struct Pull {
    reference: Reference,
    platform: Platform,
    settings: Settings,
    fetched: Arc<Fetched>,
}

impl Pull {
    /// What a request asks for. `allowed` are the registries that the node may connect to.
    ///
    /// # Errors
    /// A field that cannot be understood; it is named.
    pub fn new(request: PullRequest, allowed: Allowed) -> Result<Self, ApiError> {
        let PullRequest { reference, platform, credentials, plain_http, ca_pem } = request;
        let reference = reference.parse().map_err(|e| invalid_field("reference", format!("{e}")))?;
        let platform = match platform {
            None => Platform::of_this_host(),
            Some(text) => text.parse().map_err(|e| invalid_field("platform", format!("{e}")))?,
        };
        let credentials = credentials.map(shown).transpose()?;
        let settings = Settings { plain_http, ca_pem, credentials, allowed, ..Settings::default() };
        Ok(Self { reference, platform, settings, fetched: Arc::default() })
    }

    /// How far it is.
    pub fn fetched(&self) -> Arc<Fetched> {
        Arc::clone(&self.fetched)
    }

    /// Finds the image. Blocks. Its layers are kept in `dir` for as long as they are needed.
    pub(super) fn open(&self, dir: &Path) -> Result<PulledParts<'_>, ApiError> {
        let runtime = Handle::current();
        let found = Client::new(&self.reference, &self.settings).and_then(|client| {
            let image = runtime.block_on(client.image(&self.reference, &self.platform))?;
            Ok((Arc::new(client), image))
        });
        let (client, image) = found.map_err(|e| pull_failed(&e))?;
        let (source, dir) = (LayerSource::new(0, &ImportLimits::default()), dir.to_owned());
        let last =
            ImportProgress { phase: ImportPhase::Reading, source_bytes: 0, source_bytes_total: 0, files: 0 };
        Ok(PulledParts {
            pull: self,
            client,
            image,
            source,
            dir,
            runtime: runtime.clone(),
            arriving: None,
            last,
        })
    }
}

/// Credentials as the registry is shown them.
fn shown(given: RegistryCredentials) -> Result<Credentials, ApiError> {
    let RegistryCredentials { username, password, identity_token, registry_token } = given;
    match (username, password, identity_token, registry_token) {
        (Some(user), Some(password), None, None) if !user.contains(':') => {
            Ok(Credentials::Password { user, password })
        }
        (None, None, Some(token), None) => Ok(Credentials::IdentityToken(token)),
        (None, None, None, Some(token)) => Ok(Credentials::RegistryToken(token)),
        _ => Err(invalid_field(
            "credentials",
            "credentials are username (without a colon) and password, or identity_token, or registry_token alone",
        )),
    }
}

/// The layers of one image.
pub(super) struct PulledParts<'a> {
    pull: &'a Pull,
    client: Arc<Client>,
    image: Image,
    source: LayerSource,
    dir: PathBuf,
    runtime: Handle,
    arriving: Option<Arriving>,
    last: ImportProgress,
}

/// Files of layers, in the order of the layers. Dropped, it fetches no more.
struct Arriving {
    files: mpsc::Receiver<Result<PathBuf, PullError>>,
    _fetching: AbortOnDropHandle<()>,
}

impl Parts for PulledParts<'_> {
    fn diff_ids(&self) -> Vec<Option<String>> {
        self.image.layers.iter().map(|layer| Some(layer.diff_id.clone())).collect()
    }

    fn begin(&mut self, missing: &[usize]) {
        let layers: Vec<Layer> = missing.iter().map(|number| self.image.layers[*number].clone()).collect();
        let total = layers.iter().map(|layer| layer.size).sum();
        self.pull.fetched.total.store(total, Ordering::Relaxed);
        self.source = LayerSource::new(total, &ImportLimits::default());
        let (client, fetched, dir) = (Arc::clone(&self.client), self.pull.fetched(), self.dir.clone());
        let fetches = stream::iter(layers.into_iter().enumerate()).map(move |(number, layer)| {
            let (client, fetched, file) =
                (Arc::clone(&client), Arc::clone(&fetched), dir.join(format!("layer-{number}")));
            async move {
                work::room_for(&file, layer.size).map_err(PullError::Disk)?;
                client.blob(layer.digest, layer.size, &file, &fetched.bytes).await.map(|()| file)
            }
        });
        let (sender, files) = mpsc::channel(1);
        let fetching = self.runtime.spawn(async move {
            let mut arriving = std::pin::pin!(fetches.buffered(FETCHES));
            while let Some(arrived) = arriving.next().await {
                if sender.send(arrived).await.is_err() {
                    return;
                }
            }
        });
        self.arriving = Some(Arriving { files, _fetching: AbortOnDropHandle::new(fetching) });
    }

    fn build(&mut self, number: usize, workshop: Workshop<'_>) -> Result<BuiltLayer, ApiError> {
        let Workshop { blob_path, donors, sink, progress } = workshop;
        let file = self.next_file(progress)?;
        let layer = &self.image.layers[number];
        let name = format!("layer {}", layer.digest);
        let mut last = self.last;
        let mut tell = |now| {
            last = now;
            progress(now);
        };
        let workshop = Workshop { blob_path, donors, sink, progress: &mut tell };
        let built = self.source.build(&name, &file, &layer.diff_id, workshop);
        self.last = last;
        // Its content is in the store now; the disk is for the next ones.
        let _goes_with_the_directory = std::fs::remove_file(&file);
        built.map_err(|e| import_failed(&e, &file, &name))
    }

    fn config(&self) -> ImageConfig {
        self.image.config.config.clone()
    }

    fn source(&self) -> Source {
        Source::Oci { reference: self.pull.reference.to_string(), digest: self.image.digest.to_string() }
    }
}

impl PulledParts<'_> {
    /// Waits for the next layer to be here.
    fn next_file(&mut self, progress: &mut dyn FnMut(ImportProgress)) -> Result<PathBuf, ApiError> {
        let broke_off = || internal("fetching layers broke off", &std::io::Error::other("its task ended"));
        let arriving = self.arriving.as_mut().ok_or_else(broke_off)?;
        loop {
            let next = async { tokio::time::timeout(TELL_EVERY, arriving.files.recv()).await };
            match self.runtime.block_on(next) {
                Err(_) => progress(self.last),
                Ok(Some(arrived)) => return arrived.map_err(|e| pull_failed(&e)),
                Ok(None) => return Err(broke_off()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Result<Pull, ApiError> {
        Pull::new(serde_json::from_str(text).unwrap(), Allowed::default())
    }

    #[test]
    fn what_is_asked_for_is_checked_field_by_field() {
        asked(r#"{"reference": "docker://registry.example/a:1", "platform": "linux/arm64"}"#).unwrap();
        asked(r#"{"reference": "localhost:5000/a", "credentials": {"username": "u", "password": ""}}"#)
            .unwrap();
        asked(r#"{"reference": "localhost:5000/a", "credentials": {"identity_token": "t"}}"#).unwrap();
        for (text, field) in [
            (r#"{"reference": "debian"}"#, "reference"),
            (r#"{"reference": "localhost/a", "platform": "windows/amd64"}"#, "platform"),
            (r#"{"reference": "localhost/a", "credentials": {}}"#, "credentials"),
            (r#"{"reference": "localhost/a", "credentials": {"username": "u"}}"#, "credentials"),
            (
                r#"{"reference": "localhost/a", "credentials": {"username": "u:v", "password": "p"}}"#,
                "credentials",
            ),
            (
                r#"{"reference": "localhost/a", "credentials": {"registry_token": "t", "identity_token": "t"}}"#,
                "credentials",
            ),
        ] {
            let error = asked(text).unwrap_err();
            assert_eq!(error.0.detail["field"], field, "{text}");
        }
    }

    #[test]
    fn a_request_that_is_logged_shows_no_secret() {
        let text = r#"{"reference": "localhost/a", "credentials": {"username": "u", "password": "secret"}}"#;
        let request: PullRequest = serde_json::from_str(text).unwrap();
        let shown = format!("{request:?} {:?}", Pull::new(request.clone(), Allowed::default()).unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
