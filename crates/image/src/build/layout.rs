//! Writes layers as an image in an OCI layout: a directory that other tools load.
//!
//! Source: the OCI image specification 1.1, `image-layout.md`, `manifest.md`, `config.md` and `layer.md`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::ImageConfig;
use crate::erofs::LayerTree;

use crate::intake::hex;

use super::tar::{BlobReader, write_tar};

const BLOBS: &str = "blobs/sha256";

/// An image that is being written. Without [`Self::finish`] the directory has no index, and is no image.
#[derive(Debug)]
pub struct OciLayout {
    directory: PathBuf,
    layers: Vec<Value>,
    diff_ids: Vec<String>,
}

impl OciLayout {
    /// Begins an image in a directory, which is made and must not be there yet.
    ///
    /// # Errors
    /// It is there, or cannot be made.
    pub fn create(directory: &Path) -> io::Result<Self> {
        fs::create_dir(directory)?;
        fs::create_dir_all(directory.join(BLOBS))?;
        Ok(Self { directory: directory.to_owned(), layers: Vec::new(), diff_ids: Vec::new() })
    }

    /// Adds a layer on top of those that were added before, as `tar+gzip`. The same layers give the same bytes.
    ///
    /// # Errors
    /// Reading content or writing failed, or the layer has what no archive has a form for.
    pub fn layer(&mut self, layer: &LayerTree, blobs: &mut dyn BlobReader) -> io::Result<()> {
        let unfinished = self.directory.join(BLOBS).join(format!("layer-{}", self.layers.len()));
        let file = Hashing::new(BufWriter::new(File::create_new(&unfinished)?));
        let mut plain = Hashing::new(GzEncoder::new(file, Compression::default()));
        write_tar(layer, blobs, &mut plain)?;
        let (encoder, diff_id, _) = plain.finish();
        let (file, digest, size) = encoder.finish()?.finish();
        file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
        fs::rename(&unfinished, self.directory.join(BLOBS).join(&digest))?;
        self.layers.push(descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &digest, size));
        self.diff_ids.push(format!("sha256:{diff_id}"));
        Ok(())
    }

    /// Writes the configuration, the manifest, and last the index. Gives the digest of the image's manifest.
    ///
    /// # Errors
    /// Writing failed.
    pub fn finish(self, config: &ImageConfig) -> io::Result<String> {
        let run = json!({
            "Env": config.env,
            "WorkingDir": config.working_dir.as_deref().unwrap_or_default(),
            "User": config.user.as_deref().unwrap_or_default(),
            "Entrypoint": config.entrypoint,
            "Cmd": config.cmd,
            "Labels": config.labels,
        });
        let config = json!({
            "architecture": config.architecture,
            "os": "linux",
            "config": run,
            "rootfs": { "type": "layers", "diff_ids": self.diff_ids },
        });
        let config = self.document("application/vnd.oci.image.config.v1+json", &config)?;
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": config,
            "layers": self.layers,
        });
        let manifest = self.document(manifest_type, &manifest)?;
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [&manifest],
        });
        fs::write(self.directory.join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}")?;
        fs::write(self.directory.join("index.json"), index.to_string())?;
        Ok(manifest["digest"].as_str().unwrap_or_default().to_owned())
    }

    fn document(&self, media_type: &str, document: &Value) -> io::Result<Value> {
        let bytes = document.to_string();
        let digest = hex(&Sha256::digest(&bytes));
        fs::write(self.directory.join(BLOBS).join(&digest), &bytes)?;
        Ok(descriptor(media_type, &digest, bytes.len() as u64))
    }
}

fn descriptor(media_type: &str, digest: &str, size: u64) -> Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
}

/// Passes bytes on, counts and hashes them.
struct Hashing<W> {
    out: W,
    hasher: Sha256,
    size: u64,
}

impl<W: Write> Hashing<W> {
    fn new(out: W) -> Self {
        Self { out, hasher: Sha256::new(), size: 0 }
    }

    fn finish(self) -> (W, String, u64) {
        (self.out, hex(&self.hasher.finalize()), self.size)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.out.write(bytes)?;
        self.hasher.update(&bytes[..len]);
        self.size += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
