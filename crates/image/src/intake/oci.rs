//! OCI image layouts. Source: the OCI image specification 1.1, `image-layout.md`,
//! `image-index.md`, `manifest.md` and `config.md`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::config::ImageConfig;
use crate::error::ImportError;

use super::Layer;
use super::archive::Archive;
use super::stream::hex;

/// Indexes inside indexes: docker writes two levels.
const INDEX_DEPTH_MAX: usize = 4;
/// Most layers; overlayfs and docker stop at 127, flattened images have had more.
const LAYERS_MAX: usize = 1024;
/// Most manifests looked at, over all indexes.
const MANIFESTS_MAX: usize = 1024;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

/// An image's configuration, as stored. Null and absent are the same everywhere.
#[derive(Debug, Deserialize)]
pub(crate) struct ConfigFile {
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    config: Option<RunConfig>,
    #[serde(default)]
    pub(crate) rootfs: Option<RootFs>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(default)]
    pub(crate) diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
}

impl ConfigFile {
    pub(crate) fn platform(&self) -> (&str, &str) {
        (self.os.as_deref().unwrap_or("linux"), self.architecture.as_deref().unwrap_or("unknown"))
    }

    pub(crate) fn into_config(self) -> ImageConfig {
        let run = self.config.unwrap_or_default();
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        ImageConfig {
            env: run.env.unwrap_or_default(),
            working_dir: given(run.working_dir),
            user: given(run.user),
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            labels: run.labels.unwrap_or_default(),
            architecture: self.architecture.unwrap_or_default(),
        }
    }
}

/// An image's configuration: how programs start in it, for what it is, and what its layers unpack to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciConfig {
    /// How programs start in it; with the architecture in Go's words.
    pub config: ImageConfig,
    /// The operating system in Go's words; `linux` if it does not say.
    pub os: String,
    /// Which kind of the architecture, such as `v7`.
    pub variant: Option<String>,
    /// Diff ids of its layers, `sha256:` and 64 digits, lowest first.
    pub diff_ids: Vec<String>,
}

impl OciConfig {
    /// Reads one; `what` names it in errors.
    ///
    /// # Errors
    /// It is not valid, or names a layer by anything else than its SHA-256.
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Self, ImportError> {
        let mut file: ConfigFile = parse(what, bytes)?;
        let diff_ids = file.rootfs.take().map(|rootfs| rootfs.diff_ids).unwrap_or_default();
        diff_ids.iter().try_for_each(|id| sha256_of(id).map(drop))?;
        let (os, variant) =
            (file.platform().0.to_owned(), file.variant.take().filter(|text| !text.is_empty()));
        Ok(Self { config: file.into_config(), os, variant, diff_ids })
    }

    /// What it is for, such as `linux/arm/v7`.
    pub fn platform(&self) -> String {
        let variant = self.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
        format!("{}/{}{variant}", self.os, self.config.architecture)
    }
}

/// This host's architecture in the words of Go, which OCI uses.
pub(crate) fn host_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        "x86" => "386",
        other => other,
    }
}

/// The 64 hex digits of a `sha256:` digest.
pub(crate) fn sha256_of(digest: &str) -> Result<&str, ImportError> {
    let hex = digest.strip_prefix("sha256:");
    hex.filter(|hex| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
        .ok_or_else(|| ImportError::UnsupportedDigest { digest: digest.chars().take(100).collect() })
}

/// Finds the image for `architecture`: its layers, lowest first, and its configuration.
pub(crate) fn resolve(
    archive: &Archive,
    architecture: &str,
) -> Result<(Vec<Layer>, ImageConfig), ImportError> {
    let bytes = archive
        .document("index.json")?
        .ok_or_else(|| ImportError::BlobMissing { blob: "index.json".to_owned() })?;
    let index: Index = parse("index.json", &bytes)?;
    let mut search = Search { archive, architecture, usable: Vec::new(), seen: Vec::new(), visited: 0 };
    search.index(index, INDEX_DEPTH_MAX)?;
    let mut usable = search.usable;
    let chosen = match usable.len() {
        1 => usable.remove(0),
        0 => {
            let wanted = architecture.to_owned();
            return Err(ImportError::NoPlatform { wanted, found: search.seen });
        }
        _ => {
            return Err(ImportError::Ambiguous {
                found: usable.into_iter().map(|found| found.name).collect(),
            });
        }
    };
    let Found { digest, manifest, config, .. } = chosen;
    let diff_ids = config.rootfs.as_ref().map(|rootfs| rootfs.diff_ids.clone()).unwrap_or_default();
    Ok((layers(archive, &digest, manifest, &diff_ids)?, config.into_config()))
}

struct Found {
    digest: String,
    name: String,
    manifest: Manifest,
    config: ConfigFile,
}

struct Search<'a> {
    archive: &'a Archive,
    architecture: &'a str,
    usable: Vec<Found>,
    /// Platforms met, for the error.
    seen: Vec<String>,
    visited: usize,
}

impl Search<'_> {
    fn index(&mut self, index: Index, depth: usize) -> Result<(), ImportError> {
        for descriptor in index.manifests.unwrap_or_default() {
            self.visited += 1;
            if depth == 0 || self.visited > MANIFESTS_MAX {
                let why = "it has too many or too deeply nested manifests; save one image".to_owned();
                return Err(ImportError::UnsupportedImage { what: "index.json".to_owned(), why });
            }
            if descriptor.media_type.ends_with(".index.v1+json")
                || descriptor.media_type.ends_with(".manifest.list.v2+json")
            {
                let Some(bytes) = verified(self.archive, &descriptor.digest)? else {
                    self.seen.push(format!("{} (not in this archive)", descriptor.digest));
                    continue;
                };
                self.index(parse(&descriptor.digest, &bytes)?, depth - 1)?;
            } else {
                self.manifest(descriptor)?;
            }
        }
        Ok(())
    }

    fn manifest(&mut self, descriptor: Descriptor) -> Result<(), ImportError> {
        let annotation = |key: &str| descriptor.annotations.as_ref()?.get(key).cloned();
        // Build provenance that docker stores beside images.
        if annotation("vnd.docker.reference.type").is_some() {
            return Ok(());
        }
        if let Some(platform) = &descriptor.platform
            && !platform.architecture.is_empty()
            && (platform.architecture != self.architecture || platform.os != "linux")
        {
            self.seen.push(format!("{}/{}", platform.os, platform.architecture));
            return Ok(());
        }
        if self.usable.iter().any(|found| found.digest == descriptor.digest) {
            return Ok(());
        }
        // An index of several platforms, saved with the blobs of one, is common.
        let Some(bytes) = verified(self.archive, &descriptor.digest)? else {
            self.seen.push(format!("{} (not in this archive)", descriptor.digest));
            return Ok(());
        };
        let manifest: Manifest = parse(&descriptor.digest, &bytes)?;
        let media_type = &manifest.config.media_type;
        if !media_type.is_empty()
            && !media_type.contains("image.config")
            && !media_type.contains("container.image")
        {
            self.seen.push(format!("{media_type} (no image)"));
            return Ok(());
        }
        let digest = &manifest.config.digest;
        let bytes = verified(self.archive, digest)?
            .ok_or_else(|| ImportError::BlobMissing { blob: digest.clone() })?;
        let config: ConfigFile = parse(digest, &bytes)?;
        if config.platform() != ("linux", self.architecture) {
            let (os, architecture) = config.platform();
            self.seen.push(format!("{os}/{architecture}"));
            return Ok(());
        }
        let name = annotation("io.containerd.image.name")
            .or_else(|| annotation("org.opencontainers.image.ref.name"))
            .unwrap_or_else(|| descriptor.digest.clone());
        self.usable.push(Found { digest: descriptor.digest, name, manifest, config });
        Ok(())
    }
}

fn layers(
    archive: &Archive,
    what: &str,
    manifest: Manifest,
    diff_ids: &[String],
) -> Result<Vec<Layer>, ImportError> {
    let descriptors = manifest.layers.unwrap_or_default();
    let refuse = |why: String| ImportError::UnsupportedImage { what: what.to_owned(), why };
    if descriptors.len() > LAYERS_MAX {
        return Err(refuse(format!(
            "it has {} layers and {LAYERS_MAX} is the most; flatten it",
            descriptors.len()
        )));
    }
    let mut layers = Vec::new();
    // An image without them, or with others than it has layers, is told by its blobs' digests alone.
    let has_diff_ids = diff_ids.len() == descriptors.len();
    for (at, descriptor) in descriptors.into_iter().enumerate() {
        if descriptor.media_type.contains("encrypted") {
            return Err(refuse("its layers are encrypted; save it decrypted".to_owned()));
        }
        let digest = sha256_of(&descriptor.digest)?.to_owned();
        let range = archive
            .open(&format!("blobs/sha256/{digest}"))?
            .ok_or_else(|| ImportError::BlobMissing { blob: descriptor.digest.clone() })?;
        layers.push(Layer {
            name: format!("layer {}", descriptor.digest),
            range,
            stored: Some(digest),
            diff_id: diff_ids
                .get(at)
                .filter(|_| has_diff_ids)
                .and_then(|id| Some(sha256_of(id).ok()?.to_owned())),
        });
    }
    Ok(layers)
}

/// A document by its digest, once its bytes are known to have it.
fn verified(archive: &Archive, digest: &str) -> Result<Option<Vec<u8>>, ImportError> {
    let wanted = sha256_of(digest)?;
    let Some(bytes) = archive.document(&format!("blobs/sha256/{wanted}"))? else { return Ok(None) };
    let found = hex(&Sha256::digest(&bytes));
    if found != wanted {
        return Err(ImportError::DigestMismatch {
            blob: digest.to_owned(),
            found: format!("sha256:{found}"),
        });
    }
    Ok(Some(bytes))
}

pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, ImportError> {
    serde_json::from_slice(bytes).map_err(|source| ImportError::BadDocument { what: what.to_owned(), source })
}
