//! What a registry has of an image beside its layers: indexes and manifests. Pure.
//!
//! Source: the OCI image specification 1.1, `image-index.md` and `manifest.md`; and "Image Manifest Version 2, Schema 2" of the
//! distribution project, which is the same under other names.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use crate::digest::Digest;
use crate::error::PullError;

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// What is asked for.
pub(crate) const ACCEPTED: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

const CONFIGS: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];
/// How a layer is compressed is seen by its first bytes.
const LAYERS: [&str; 6] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
];

/// What an image runs on, in the words of Go: `linux/amd64`, `linux/arm/v7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    architecture: String,
    variant: Option<String>,
}

/// Why a text is no platform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no platform that images are taken for; write linux/ARCHITECTURE, such as linux/amd64")]
pub struct PlatformError {
    /// As it was written.
    pub given: String,
}

impl Platform {
    /// This processor.
    pub fn of_this_host() -> Self {
        Self { architecture: dsec_image::ImageConfig::of_this_host().architecture, variant: None }
    }

    /// Whether something for `os`, `architecture` and `variant` is for this. A variant counts only if one is asked for.
    pub(crate) fn fits(&self, os: &str, architecture: &str, variant: Option<&str>) -> bool {
        os == "linux"
            && architecture == self.architecture
            && self.variant.as_deref().is_none_or(|wanted| Some(wanted) == variant)
    }
}

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        let parts: Vec<&str> = text.split('/').collect();
        let is_word = |word: &&str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let (architecture, variant) = match parts[..] {
            ["linux", architecture] => (architecture, None),
            ["linux", architecture, variant] => (architecture, Some(variant)),
            _ => ("", None),
        };
        if !is_word(&architecture) || variant.is_some_and(|variant| !is_word(&variant)) {
            return Err(PlatformError { given: text.chars().take(100).collect() });
        }
        Ok(Self { architecture: architecture.to_owned(), variant: variant.map(str::to_owned) })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "linux/{}", self.architecture)?;
        self.variant.iter().try_for_each(|variant| write!(f, "/{variant}"))
    }
}

/// A reference from one document to another, or to a layer.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    platform: Option<On>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
struct On {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
}

impl Descriptor {
    pub(crate) fn digest(&self) -> Result<Digest, PullError> {
        Ok(self.digest.parse()?)
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
}

/// The parts of an image.
#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

/// What every document may say of itself.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    schema_version: Option<u64>,
    #[serde(default)]
    manifests: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    layers: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    config: Option<serde::de::IgnoredAny>,
}

/// A document with images in it.
#[derive(Debug)]
pub(crate) enum Document {
    /// One image for several platforms.
    Index(Vec<Descriptor>),
    /// One image.
    Manifest(Manifest),
}

impl Document {
    /// Reads one. `content_type` is what the answer said of it; `what` names it in errors.
    pub(crate) fn parse(what: &str, content_type: Option<&str>, bytes: &[u8]) -> Result<Self, PullError> {
        let bad = |source| PullError::BadDocument { what: what.to_owned(), source };
        let refuse = |why: String| PullError::Unsupported { what: what.to_owned(), why };
        let shape: Shape = serde_json::from_slice(bytes).map_err(bad)?;
        let sent = content_type.and_then(|text| text.split(';').next()).map(str::trim);
        let own = shape.media_type.as_deref().filter(|own| !own.is_empty());
        let kind = match (sent, own) {
            (_, Some(own)) if sent.is_some_and(|sent| ACCEPTED.contains(&sent) && sent != own) => {
                return Err(refuse(format!(
                    "it was sent as {} and says of itself that it is {own}",
                    sent.unwrap_or_default()
                )));
            }
            (_, Some(own)) => own,
            (Some(sent), None) if sent.contains("vnd.") => sent,
            // It does not say: by what it has.
            _ if shape.manifests.is_some() => OCI_INDEX,
            _ if shape.config.is_some() => OCI_MANIFEST,
            _ => sent.unwrap_or_default(),
        };
        // A document that is both would be one image to us and another to whoever checked it.
        if shape.manifests.is_some() && (shape.layers.is_some() || shape.config.is_some()) {
            return Err(refuse("it is an index and a manifest at once; push the image again".to_owned()));
        }
        match kind {
            OCI_INDEX | DOCKER_LIST => {
                let index: Index = serde_json::from_slice(bytes).map_err(bad)?;
                Ok(Self::Index(index.manifests.unwrap_or_default()))
            }
            OCI_MANIFEST | DOCKER_MANIFEST => Ok(Self::Manifest(serde_json::from_slice(bytes).map_err(bad)?)),
            _ if shape.schema_version == Some(1) => Err(refuse(
                "it is a manifest of schema 1, which cannot be verified; push the image again with a newer tool".to_owned(),
            )),
            other => Err(refuse(format!("its media type is {other:?}, which is no image's"))),
        }
    }
}

/// What an index has for a platform.
pub(crate) enum Choice {
    /// This, another index or a manifest.
    Found(Descriptor),
    /// Nothing; what it has instead.
    Nothing(Vec<String>),
}

/// Looks for a platform's image. Of several the first whose variant is the wanted one, else the first without one, else the first:
/// variants are listed from the one that all processors can run.
pub(crate) fn choose(entries: Vec<Descriptor>, wanted: &Platform) -> Choice {
    let mut seen = Vec::new();
    let mut nested = None;
    let mut fitting: Vec<Descriptor> = Vec::new();
    for entry in entries {
        // Signatures, provenance and the like, which builders store beside images.
        if entry.annotations.as_ref().is_some_and(|all| all.contains_key("vnd.docker.reference.type")) {
            continue;
        }
        match &entry.platform {
            Some(on) if on.os == "unknown" || on.architecture == "unknown" => {}
            Some(on) if wanted.fits(&on.os, &on.architecture, on.variant.as_deref()) => fitting.push(entry),
            Some(on) => {
                let variant = on.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
                seen.push(format!("{}/{}{variant}", on.os, on.architecture));
            }
            // It is for whatever its configuration, or the index it is, says.
            None if is_image(&entry) => nested = nested.or(Some(entry)),
            None => seen.push(format!("{:?}", entry.media_type)),
        }
    }
    let plain =
        fitting.iter().position(|entry| entry.platform.as_ref().is_some_and(|on| on.variant.is_none()));
    let found = match fitting.is_empty() {
        false => Some(fitting.swap_remove(plain.unwrap_or(0))),
        true => nested,
    };
    found.map_or(Choice::Nothing(seen), Choice::Found)
}

fn is_image(entry: &Descriptor) -> bool {
    entry.media_type.is_empty() || ACCEPTED.contains(&entry.media_type.as_str())
}

impl Manifest {
    /// Checks that it is an image whose layers can be taken in, and gives them, lowest first. `what` names it in errors.
    pub(crate) fn layers(&self, what: &str) -> Result<&[Descriptor], PullError> {
        let refuse = |what: &str, why: String| Err(PullError::Unsupported { what: what.to_owned(), why });
        let config = &self.config.media_type;
        if !config.is_empty() && !CONFIGS.contains(&config.as_str()) {
            return refuse(what, format!("it holds {config:?} and no image to run"));
        }
        let layers = self.layers.as_deref().unwrap_or_default();
        for layer in layers {
            let (media_type, named) = (&layer.media_type, format!("layer {}", layer.digest));
            if media_type.contains("foreign") || media_type.contains("nondistributable") {
                let why = format!(
                    "it is {media_type:?}, which registries may not hand out; build the image without it"
                );
                return refuse(&named, why);
            }
            if media_type.contains("encrypted") {
                return refuse(&named, format!("it is {media_type:?}; push the image decrypted"));
            }
            if !LAYERS.contains(&media_type.as_str()) {
                let why = format!(
                    "it is {media_type:?}; layers are tar archives, plain or compressed with gzip or zstd"
                );
                return refuse(&named, why);
            }
        }
        Ok(layers)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(content_type: Option<&str>, document: &Value) -> Result<Document, PullError> {
        Document::parse("the manifest", content_type, document.to_string().as_bytes())
    }

    fn blob(media_type: &str) -> Value {
        json!({ "mediaType": media_type, "digest": Digest::of(media_type.as_bytes()).to_string(), "size": 3 })
    }

    fn manifest(config: &str, layers: &[&str]) -> Value {
        let layers: Vec<Value> = layers.iter().map(|media_type| blob(media_type)).collect();
        json!({ "schemaVersion": 2, "config": blob(config), "layers": layers })
    }

    fn entries(platforms: &[Value]) -> Vec<Descriptor> {
        let entry = |(at, platform): (usize, &Value)| {
            let mut entry = json!({ "mediaType": OCI_MANIFEST, "size": at, "digest": Digest::of(&[at as u8]).to_string() });
            let fields = entry.as_object_mut().unwrap();
            fields.extend(platform.as_object().unwrap().clone());
            entry
        };
        let all: Vec<Value> = platforms.iter().enumerate().map(entry).collect();
        match parse(None, &json!({ "schemaVersion": 2, "manifests": all })).unwrap() {
            Document::Index(entries) => entries,
            Document::Manifest(_) => panic!("it is an index"),
        }
    }

    fn on(text: &str) -> Value {
        let mut words = text.split('/');
        let mut word = || words.next();
        json!({ "platform": { "os": word(), "architecture": word(), "variant": word() } })
    }

    #[test]
    fn a_platform_is_os_architecture_and_variant() {
        let arm: Platform = "linux/arm/v7".parse().unwrap();
        assert_eq!(arm.to_string(), "linux/arm/v7");
        assert!(arm.fits("linux", "arm", Some("v7")) && !arm.fits("linux", "arm", None));
        let any: Platform = "linux/arm".parse().unwrap();
        assert!(any.fits("linux", "arm", Some("v7")) && !any.fits("windows", "arm", None));
        for text in
            ["", "amd64", "linux", "linux/", "windows/amd64", "linux/amd64/", "linux/a/b/c", "linux/a b"]
        {
            assert!(text.parse::<Platform>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_platforms_image_is_chosen_and_those_there_are_named() {
        let amd: Platform = "linux/amd64".parse().unwrap();
        let chosen = |platforms: &[Value], wanted: &Platform| match choose(entries(platforms), wanted) {
            Choice::Found(entry) => Ok(entry.size()),
            Choice::Nothing(seen) => Err(seen.join(" ")),
        };
        let all = [
            on("windows/amd64"),
            on("linux/arm64/v8"),
            on("linux/amd64/v3"),
            on("linux/amd64"),
            on("linux/amd64"),
        ];
        assert_eq!(chosen(&all, &amd), Ok(3));
        assert_eq!(chosen(&all, &"linux/amd64/v3".parse().unwrap()), Ok(2));
        assert_eq!(chosen(&all, &"linux/arm64".parse().unwrap()), Ok(1));
        let missing = chosen(&all, &"linux/s390x".parse().unwrap());
        assert_eq!(
            missing,
            Err("windows/amd64 linux/arm64/v8 linux/amd64/v3 linux/amd64 linux/amd64".to_owned())
        );
        // Attestations are neither chosen nor named; an entry that does not say is looked into.
        let provenance = json!({ "annotations": { "vnd.docker.reference.type": "attestation-manifest" } });
        assert_eq!(chosen(&[on("unknown/unknown"), provenance, json!({})], &amd), Ok(2));
        assert_eq!(chosen(&[on("unknown/unknown")], &amd), Err(String::new()));
    }

    #[test]
    fn both_families_of_documents_are_understood() {
        let docker = manifest(CONFIGS[1], &[LAYERS[4]]);
        for content_type in
            [Some(DOCKER_MANIFEST), Some(OCI_MANIFEST), Some("application/json; charset=utf-8"), None]
        {
            let Ok(Document::Manifest(found)) = parse(content_type, &docker) else {
                panic!("{content_type:?}")
            };
            assert_eq!(found.layers("it").unwrap().len(), 1);
        }
        for content_type in [OCI_INDEX, DOCKER_LIST] {
            let index = json!({ "schemaVersion": 2, "manifests": [] });
            assert!(matches!(parse(Some(content_type), &index), Ok(Document::Index(_))));
        }
        assert!(parse(None, &manifest(CONFIGS[0], &LAYERS)).is_ok());
    }

    #[test]
    fn a_document_is_what_it_says_and_one_thing_only() {
        let mut both = manifest(CONFIGS[0], &[]);
        both["manifests"] = json!([]);
        let mut other = manifest(CONFIGS[0], &[]);
        other["mediaType"] = json!(OCI_INDEX);
        let first = json!({ "schemaVersion": 1, "fsLayers": [], "history": [] });
        for (content_type, document, word) in [
            (Some(OCI_MANIFEST), &both, "at once"),
            (Some(OCI_MANIFEST), &other, "says of itself"),
            (Some("application/vnd.docker.distribution.manifest.v1+prettyjws"), &first, "schema 1"),
            (Some("text/html"), &json!({}), "text/html"),
            (Some("application/vnd.cncf.helm.chart"), &json!({}), "helm"),
        ] {
            let error = parse(content_type, document).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(matches!(Document::parse("x", None, b"<html>"), Err(PullError::BadDocument { .. })));
    }

    #[test]
    fn layers_that_cannot_be_taken_in_are_named() {
        for (layer, word) in [
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "may not hand out"),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", "may not hand out"),
            ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "decrypted"),
            ("application/vnd.oci.image.layer.v1.squashfs", "squashfs"),
            ("", "tar archives"),
        ] {
            let Ok(Document::Manifest(found)) = parse(None, &manifest(CONFIGS[0], &[LAYERS[0], layer]))
            else {
                panic!()
            };
            let error = found.layers("the manifest").unwrap_err().to_string();
            let digest = Digest::of(layer.as_bytes()).to_string();
            assert!(error.contains(word) && error.contains(&digest), "{error}");
        }
        let Ok(Document::Manifest(chart)) =
            parse(None, &manifest("application/vnd.cncf.helm.config.v1+json", &[]))
        else {
            panic!()
        };
        assert!(chart.layers("the manifest").unwrap_err().to_string().contains("helm"));
    }
}
