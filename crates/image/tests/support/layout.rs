//! OCI layouts made by hand.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::archive::Archive;

pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// An OCI layout in the making.
#[derive(Default)]
pub(crate) struct Layout {
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    pub(crate) manifests: Vec<Value>,
}

impl Layout {
    pub(crate) fn blob(&mut self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = sha256(bytes);
        self.blobs.insert(digest.clone(), bytes.to_vec());
        json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()})
    }

    pub(crate) fn manifest(&mut self, architecture: &str, layers: &[Vec<u8>]) -> Value {
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {
                "Env": ["PATH=/bin", "A=1"], "WorkingDir": "/work", "User": "1000:1000",
                "Entrypoint": ["/init"], "Cmd": null, "Labels": {"made": "by hand"},
            },
        });
        let config = self.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let layers: Vec<_> = layers
            .iter()
            .map(|layer| self.blob("application/vnd.oci.image.layer.v1.tar+gzip", layer))
            .collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.blob(MANIFEST, manifest.to_string().as_bytes())
    }

    pub(crate) fn image(mut self, layers: &[Vec<u8>]) -> Self {
        let manifest = self.manifest("amd64", layers);
        self.manifests.push(manifest);
        self
    }

    pub(crate) fn files(&self) -> Vec<(String, Vec<u8>)> {
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": self.manifests}).to_string();
        let mut files: Vec<_> = self
            .blobs
            .iter()
            .map(|(digest, blob)| (format!("blobs/sha256/{digest}"), blob.clone()))
            .collect();
        files.push(("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()));
        files.push(("index.json".to_owned(), index.into_bytes()));
        files
    }

    pub(crate) fn tar(&self) -> Vec<u8> {
        tar(&self.files())
    }
}

pub(crate) fn tar(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    files.iter().fold(Archive::new(), |archive, (name, content)| archive.file(name, content)).finish()
}
