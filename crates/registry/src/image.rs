//! From a reference to an image: which manifest, how programs start in it, which layers.

use dsec_image::OciConfig;
use http::header;
use http::header::HeaderValue;

use crate::client::{Client, Wanted};
use crate::digest::Digest;
use crate::documents::{ACCEPTED, Choice, Descriptor, Document, Manifest, Platform, choose};
use crate::error::PullError;
use crate::reference::{Reference, Select};

/// Indexes inside indexes: docker writes two levels.
const INDEXES_MAX: usize = 4;

/// An image of a registry. Nothing of its layers is here yet.
#[derive(Debug, Clone)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: Digest,
    /// How programs start in it, and what its layers unpack to: of each of `layers` the diff id.
    pub config: OciConfig,
    /// Lowest first.
    pub layers: Vec<Layer>,
}

/// A layer as the registry has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Digest of it as it is stored.
    pub digest: Digest,
    /// Bytes of it as it is stored.
    pub size: u64,
    /// Digest of it unpacked: `sha256:` and 64 digits.
    pub diff_id: String,
}

impl Client {
    /// Finds the image of `reference`, which the client was made for, that is for `platform`.
    ///
    /// # Errors
    /// [`PullError`]
    pub async fn image(&self, reference: &Reference, platform: &Platform) -> Result<Image, PullError> {
        let nothing = |found: Vec<String>| PullError::NoPlatform {
            reference: reference.to_string(),
            wanted: platform.to_string(),
            found,
        };
        let (mut digest, mut document) = self.named(reference).await?;
        for _ in 0..INDEXES_MAX {
            let entries = match document {
                Document::Manifest(manifest) => {
                    let config = self.config(&manifest, digest).await?;
                    if !platform.fits(&config.os, &config.config.architecture, config.variant.as_deref()) {
                        return Err(nothing(vec![config.platform()]));
                    }
                    return self.of_manifest(digest, &manifest, config);
                }
                Document::Index(entries) => entries,
            };
            match choose(entries, platform) {
                Choice::Found(entry) => (digest, document) = (entry.digest()?, self.referred(&entry).await?),
                Choice::Nothing(seen) => return Err(nothing(seen)),
            }
        }
        let why = format!("it has more than {INDEXES_MAX} indexes inside each other");
        Err(PullError::Unsupported { what: reference.to_string(), why })
    }

    /// The document that the reference itself names.
    async fn named(&self, reference: &Reference) -> Result<(Digest, Document), PullError> {
        let what = match reference.select() {
            Select::Tag(tag) => format!("image {}:{tag}", reference.repository()),
            Select::Digest(digest) => format!("image {}@{digest}", reference.repository()),
        };
        let wanted = match reference.select() {
            Select::Tag(_) => None,
            Select::Digest(digest) => Some(*digest),
        };
        self.manifest(&reference.select().to_string(), &what, wanted).await
    }

    async fn referred(&self, entry: &Descriptor) -> Result<Document, PullError> {
        let digest = entry.digest()?;
        let what = format!("manifest {digest}");
        Ok(self.manifest(&digest.to_string(), &what, Some(digest)).await?.1)
    }

    async fn manifest(
        &self,
        name: &str,
        what: &str,
        wanted: Option<Digest>,
    ) -> Result<(Digest, Document), PullError> {
        let accept = ACCEPTED.map(|media_type| (header::ACCEPT, HeaderValue::from_static(media_type)));
        let path = format!("manifests/{name}");
        let wanting = Wanted { path: &path, what, headers: &accept };
        let fetched = self.document(&wanting, self.limits().document_bytes).await?;
        let found = Digest::of(&fetched.bytes);
        // A tag is believed, yet what the registry says it has under it must be what it gives.
        if let Some(wanted) = wanted.or(fetched.claimed).filter(|wanted| *wanted != found) {
            return Err(PullError::DigestMismatch { what: wanted, found });
        }
        Ok((found, Document::parse(what, fetched.content_type.as_deref(), &fetched.bytes)?))
    }

    async fn config(&self, manifest: &Manifest, of: Digest) -> Result<OciConfig, PullError> {
        // Before it is fetched: what is no image has another kind of configuration.
        manifest.layers(&format!("manifest {of}"))?;
        let digest = manifest.config.digest()?;
        let what = format!("configuration {digest}");
        let max = self.limits().config_bytes;
        if manifest.config.size() > max {
            return Err(PullError::TooLarge { what, found: manifest.config.size(), max, unit: "bytes" });
        }
        let bytes = self.small_blob(digest, &what, max).await?;
        Ok(OciConfig::parse(&what, &bytes)?)
    }

    fn of_manifest(
        &self,
        digest: Digest,
        manifest: &Manifest,
        config: OciConfig,
    ) -> Result<Image, PullError> {
        let what = format!("manifest {digest}");
        let stored = manifest.layers(&what)?;
        let (found, max) = (stored.len() as u64, self.limits().layers as u64);
        if found > max {
            return Err(PullError::TooLarge { what, found, max, unit: "layers" });
        }
        let (found, max) = (
            stored.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size())),
            self.limits().total_bytes,
        );
        if found > max {
            return Err(PullError::TooLarge {
                what: "the image's layers".to_owned(),
                found,
                max,
                unit: "bytes",
            });
        }
        if stored.len() != config.diff_ids.len() {
            let why = format!(
                "it has {} layers and its configuration {} diff ids; push the image again",
                stored.len(),
                config.diff_ids.len()
            );
            return Err(PullError::Unsupported { what, why });
        }
        let layers = stored.iter().zip(&config.diff_ids);
        let layers = layers.map(|(layer, diff_id)| {
            Ok::<_, PullError>(Layer {
                digest: layer.digest()?,
                size: layer.size(),
                diff_id: diff_id.clone(),
            })
        });
        Ok(Image { digest, layers: layers.collect::<Result<_, _>>()?, config })
    }
}
