//! `docker save` archives from before they were OCI layouts too, and those of tools that write the
//! same. Source: the Moby image specification 1.2, "Combined Image JSON + Filesystem Changeset".

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::config::ImageConfig;
use crate::error::ImportError;

use super::Layer;
use super::archive::Archive;
use super::oci::{ConfigFile, parse, sha256_of};
use super::stream::hex;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

/// Finds the archive's one image. Its layers have no digest of their own; their unpacked bytes
/// are checked against the configuration, and that against its file name where it is a digest.
pub(crate) fn resolve(
    archive: &Archive,
    architecture: &str,
) -> Result<(Vec<Layer>, ImageConfig), ImportError> {
    let missing = |blob: &str| ImportError::BlobMissing { blob: format!("`{blob}`") };
    let bytes = archive.document("manifest.json")?.ok_or_else(|| missing("manifest.json"))?;
    let mut images: Vec<Image> = parse("manifest.json", &bytes)?;
    if images.len() > 1 {
        let name = |image: Image| image.repo_tags.unwrap_or_default().pop().unwrap_or(image.config);
        return Err(ImportError::Ambiguous { found: images.into_iter().map(name).collect() });
    }
    let Some(image) = images.pop() else {
        return Err(ImportError::Ambiguous { found: Vec::new() });
    };
    let bytes = archive.document(&image.config)?.ok_or_else(|| missing(&image.config))?;
    verify_config(&image.config, &bytes)?;
    let config: ConfigFile = parse(&image.config, &bytes)?;
    if config.platform() != ("linux", architecture) {
        let (os, found) = config.platform();
        let found = vec![format!("{os}/{found}")];
        return Err(ImportError::NoPlatform { wanted: architecture.to_owned(), found });
    }
    let names = image.layers.unwrap_or_default();
    let diff_ids = config.rootfs.as_ref().map(|rootfs| rootfs.diff_ids.clone()).unwrap_or_default();
    if diff_ids.len() != names.len() {
        let why = format!("it names {} layers and its configuration {}", names.len(), diff_ids.len());
        return Err(ImportError::UnsupportedImage {
            what: "manifest.json".to_owned(),
            why: format!("{why}; save the image again"),
        });
    }
    let mut layers = Vec::new();
    for (name, diff_id) in names.iter().zip(&diff_ids) {
        layers.push(Layer {
            name: format!("layer {name}"),
            range: archive.open(name)?.ok_or_else(|| missing(name))?,
            stored: None,
            diff_id: Some(sha256_of(diff_id)?.to_owned()),
        });
    }
    Ok((layers, config.into_config()))
}

fn verify_config(name: &str, bytes: &[u8]) -> Result<(), ImportError> {
    let stem = name.rsplit('/').next().unwrap_or(name);
    let stem = stem.strip_suffix(".json").unwrap_or(stem);
    let stem = stem.strip_prefix("sha256:").unwrap_or(stem);
    let found = hex(&Sha256::digest(bytes));
    let is_digest = stem.len() == 64 && stem.bytes().all(|b| b.is_ascii_hexdigit());
    if is_digest && stem != found {
        return Err(ImportError::DigestMismatch { blob: name.to_owned(), found: format!("sha256:{found}") });
    }
    Ok(())
}
