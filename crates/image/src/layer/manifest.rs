//! The manifest: all that a layer is, in one small document whose digest is the layer's id.

use serde::{Deserialize, Serialize};

use super::digest::{BlobId, Digest, LayerId, MetadataId};
use crate::config::ImageConfig;
use crate::erofs::{BLOCK_SIZE, LayerTree};

/// The form of manifests written here, and the only one read.
pub const MANIFEST_FORMAT: u32 = 1;
/// Longest encoded manifest in bytes: one with as many blobs, parents and diff ids as are allowed stays below half of it.
pub const MANIFEST_SIZE_MAX: usize = 1 << 20;
/// Most blobs a layer points into: each is a device of the mount, and a base of 127 OCI layers, the most that image builders
/// make, is one blob each.
pub const BLOBS_MAX: usize = 1024;
/// Most parents: a hundred toolkits over a base and a workspace fit.
pub const PARENTS_MAX: usize = 1024;

/// What a layer is for, which is also where it lies in a sandbox's root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// A root file system, lowest.
    Base,
    /// A repository and what it needs, over a base.
    Workspace,
    /// Tools for the agent, over a workspace.
    Toolkit,
    /// All that a sandbox had over its base, the workspace and toolkits it started with too. Toolkits that are given with it
    /// lie below it.
    Snapshot,
}

impl LayerKind {
    /// Every kind, lowest first.
    pub const ALL: [Self; 4] = [Self::Base, Self::Workspace, Self::Toolkit, Self::Snapshot];

    /// The kind as it stands in names, paths and manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Workspace => "workspace",
            Self::Toolkit => "toolkit",
            Self::Snapshot => "snapshot",
        }
    }
}

impl std::fmt::Display for LayerKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The metadata image of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetadataRef {
    /// Which.
    pub id: MetadataId,
    /// Its length in bytes.
    pub size: u64,
}

/// A blob that a layer's metadata points into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlobRef {
    /// Which.
    pub id: BlobId,
    /// Length of its encoded index in bytes.
    pub index_size: u64,
    /// Plain bytes of the blob: the size of its device.
    pub size: u64,
}

/// How a parent takes part in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParentRole {
    /// It lies below this layer, in the order given, lowest first.
    Below,
    /// Its metadata was merged into this layer's, whose blobs have its own among them.
    Merged,
}

/// A layer that this one was made over or of. It is kept as long as this one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Which.
    pub layer: LayerId,
    /// How it takes part.
    pub role: ParentRole,
}

/// What a layer was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// An archive.
    Archive {
        /// What whoever made the layer says it was made of, such as a file's name.
        name: String,
        /// Digest of its bytes, such as `sha256:...`.
        digest: String,
    },
    /// An OCI image, or one layer of it.
    Oci {
        /// Where it was found.
        reference: String,
        /// Digest of its manifest or layer.
        digest: String,
    },
    /// A step of a recipe.
    Recipe {
        /// Digest of the recipe.
        recipe: Digest,
        /// Which step, from 0.
        step: u32,
    },
    /// A sandbox's writable layer.
    Sandbox {
        /// Which.
        id: dsec_model::SandboxId,
        /// The job it belonged to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        task: Option<dsec_model::TaskId>,
        /// The project that asked for the layer.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        project: String,
    },
}

/// What is known of how a layer came to be and how large it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// When it was made, in milliseconds since 1970. Part of the layer's id: who wants two builds of one thing to be one
    /// layer gives both the time of what they are made of.
    pub created_unix_ms: u64,
    /// Who made it: a program with its version, a node.
    pub builder: String,
    /// Of what.
    pub source: Source,
    /// Diff ids of the OCI layers in it, `sha256:` and 64 digits, lowest first; empty if it is of none.
    pub diff_ids: Vec<String>,
    /// Inodes in it.
    pub files: u64,
    /// Sum of the sizes of its regular files in bytes, holes included, hard links once.
    pub content_bytes: u64,
    /// What it takes in the store in bytes, its own metadata and the packs of all its blobs.
    pub stored_bytes: u64,
}

/// Why bytes are not a manifest, or a manifest is none that may be published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a layer's manifest: {0}")]
pub struct ManifestError(pub String);

/// All that a layer is. Made with public fields and checked when it is encoded and decoded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`MANIFEST_FORMAT`].
    pub format: u32,
    /// What it is for.
    pub kind: LayerKind,
    /// Its metadata image.
    pub metadata: MetadataRef,
    /// The blobs its metadata points into, in the order of the mount's devices.
    pub blobs: Vec<BlobRef>,
    /// The layers it was made over or of.
    pub parents: Vec<Parent>,
    /// How programs are started in it; of a base only, and of one that is a part of an image not even there.
    pub config: Option<ImageConfig>,
    /// How it came to be.
    pub facts: Facts,
}

impl Manifest {
    /// Its bytes, which [`LayerId`] is the digest of: compact JSON, the fields in the order of the type. The same manifest
    /// always has the same bytes.
    ///
    /// # Errors
    /// It breaks a rule of this module.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        self.check().map_err(ManifestError)?;
        let bytes = serde_json::to_vec(self).map_err(|error| ManifestError(error.to_string()))?;
        if bytes.len() > MANIFEST_SIZE_MAX {
            return Err(ManifestError(format!("{} bytes; at most {MANIFEST_SIZE_MAX}", bytes.len())));
        }
        Ok(bytes)
    }

    /// Reads a manifest. Other bytes than [`Self::encode`] writes are refused, so that one layer has one id.
    ///
    /// # Errors
    /// It is none, of another format, has fields that are not known here, or breaks a rule of this module.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let parse = |error: serde_json::Error| ManifestError(error.to_string());
        if bytes.len() > MANIFEST_SIZE_MAX {
            return Err(ManifestError(format!("{} bytes; at most {MANIFEST_SIZE_MAX}", bytes.len())));
        }
        let Format { format } = serde_json::from_slice(bytes).map_err(parse)?;
        if format != MANIFEST_FORMAT {
            return Err(ManifestError(format!(
                "it has format {format} and this program reads {MANIFEST_FORMAT}"
            )));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(parse)?;
        if manifest.encode()? != bytes {
            return Err(ManifestError("it is not in canonical form".to_owned()));
        }
        Ok(manifest)
    }

    /// The layer's id.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn id(&self) -> Result<LayerId, ManifestError> {
        Ok(LayerId(Digest::of(&self.encode()?)))
    }

    /// Whether a metadata image is one that is made here and stands on the blobs that this manifest names. To be asked before a kernel
    /// reads it, as root: and it takes a device that is too short for one that is full of zeros at its end.
    ///
    /// # Errors
    /// What is wrong with the image.
    pub fn check_metadata(&self, image: &[u8]) -> Result<(), ManifestError> {
        let layer = LayerTree::decode(image)
            .map_err(|error| ManifestError(format!("its metadata cannot be used: {error}")))?;
        let found = layer.blobs.iter().map(|blob| (blob.id, u64::from(blob.blocks) * BLOCK_SIZE));
        if found.eq(self.blobs.iter().map(|blob| (blob.id, blob.size))) {
            return Ok(());
        }
        Err(ManifestError("its metadata stands on other blobs than it names".to_owned()))
    }

    fn check(&self) -> Result<(), String> {
        let Self { format, kind, metadata, blobs, parents, config, facts } = self;
        if *format != MANIFEST_FORMAT {
            return Err(format!("format {format}"));
        }
        if metadata.size == 0 {
            return Err("its metadata is empty".to_owned());
        }
        if blobs.len() > BLOBS_MAX || parents.len() > PARENTS_MAX {
            return Err(format!(
                "{} blobs and {} parents; at most {BLOBS_MAX} and {PARENTS_MAX}",
                blobs.len(),
                parents.len()
            ));
        }
        for (at, blob) in blobs.iter().enumerate() {
            if blob.size == 0 || !blob.size.is_multiple_of(BLOCK_SIZE) {
                return Err(format!(
                    "blob {} has {} bytes, which is no number of blocks",
                    blob.id, blob.size
                ));
            }
            if blobs[..at].iter().any(|other| other.id == blob.id) {
                return Err(format!("blob {} is listed twice", blob.id));
            }
        }
        if config.is_some() && *kind != LayerKind::Base {
            return Err(format!("a {kind} says how programs start, which only a base may"));
        }
        match facts.diff_ids.iter().find(|id| !is_diff_id(id)) {
            Some(id) => Err(format!("{id:?} is not a diff id: it must be sha256: and 64 lower-case digits")),
            None => Ok(()),
        }
    }
}

/// Whether the text is a diff id: `sha256:` and 64 lower-case hexadecimal digits.
pub fn is_diff_id(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| hex.parse::<Digest>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let blob = BlobRef { id: BlobId(Digest::of(b"blob")), index_size: 104, size: 8192 };
        Manifest {
            format: MANIFEST_FORMAT,
            kind: LayerKind::Workspace,
            metadata: MetadataRef { id: MetadataId(Digest::of(b"metadata")), size: 4096 },
            blobs: vec![blob],
            parents: vec![Parent { layer: LayerId(Digest::of(b"base")), role: ParentRole::Below }],
            config: None,
            facts: Facts {
                created_unix_ms: 1,
                builder: "test".to_owned(),
                source: Source::Recipe { recipe: Digest::of(b"recipe"), step: 3 },
                diff_ids: vec![format!("sha256:{}", Digest::of(b"diff"))],
                files: 2,
                content_bytes: 5000,
                stored_bytes: 4500,
            },
        }
    }

    #[test]
    fn a_manifest_survives_its_encoding_and_has_one_id() {
        let manifest = manifest();
        let bytes = manifest.encode().unwrap();
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
        assert_eq!(manifest.id().unwrap(), LayerId(Digest::of(&bytes)));
        // Written down: an id that changes makes every published layer unreadable.
        assert_eq!(
            manifest.id().unwrap().to_string(),
            "2cb3a88d0df65d87b33298d029a97c8612ddb18157d7cd66b079fb3c90675ef1"
        );
    }

    #[test]
    fn metadata_that_stands_on_other_blobs_is_refused() {
        use crate::erofs::{Attributes, BlobRef as Device, Content, FileData, Tree};

        let (one, two) = (BlobId(Digest::of(b"one")), BlobId(Digest::of(b"two")));
        let mut tree = Tree::new();
        for device in [1, 2] {
            let file = Content::File(FileData::dense(4096, 0, device));
            tree.insert(tree.root(), &[b'0' + device as u8], Attributes::default(), file);
        }
        let blobs = vec![Device { id: one, blocks: 3 }, Device { id: two, blocks: 1 }];
        let (image, _) = LayerTree { tree, blobs }.encode().unwrap();
        let check = |blobs: &[(BlobId, u64)]| {
            let named = |(id, size): &(BlobId, u64)| BlobRef { id: *id, index_size: 104, size: *size };
            Manifest { blobs: blobs.iter().map(named).collect(), ..manifest() }.check_metadata(&image)
        };
        check(&[(one, 12288), (two, 4096)]).unwrap();
        for wrong in [&[(one, 12288)][..], &[(two, 4096), (one, 12288)], &[(one, 8192), (two, 4096)]] {
            assert!(check(wrong).unwrap_err().0.contains("other blobs"), "{wrong:?}");
        }
        assert!(manifest().check_metadata(&image[..4096]).unwrap_err().0.contains("cannot be used"));
    }

    #[test]
    fn other_bytes_for_the_same_manifest_are_refused() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        let changed = [
            text.replacen(':', ": ", 1),
            format!("{text}\n"),
            text.replacen("\"kind\"", "\"more\":1,\"kind\"", 1),
            text.replacen("\"format\":1", "\"format\":2", 1),
            text.replacen("\"step\":3", "\"step\":3,\"why\":1", 1),
            text.replacen(",\"config\":null", "", 1),
            text[..text.len() - 1].to_owned(),
            String::new(),
        ];
        for changed in changed {
            assert_ne!(changed, text);
            assert!(Manifest::decode(changed.as_bytes()).is_err(), "{changed}");
        }
    }

    #[test]
    fn what_breaks_a_rule_is_not_encoded() {
        let config = ImageConfig {
            env: vec![],
            working_dir: None,
            user: None,
            entrypoint: vec![],
            cmd: vec![],
            labels: Default::default(),
            architecture: "amd64".to_owned(),
        };
        let breaks: [&dyn Fn(&mut Manifest); 7] = [
            &|m| m.format = 2,
            &|m| m.metadata.size = 0,
            &|m| m.blobs[0].size = 4097,
            &|m| m.blobs.push(m.blobs[0]),
            &|m| m.parents = vec![m.parents[0]; PARENTS_MAX + 1],
            &|m| m.config = Some(config.clone()),
            &|m| m.facts.diff_ids = vec!["sha256:12".to_owned()],
        ];
        for (at, change) in breaks.iter().enumerate() {
            let mut manifest = manifest();
            change(&mut manifest);
            assert!(manifest.encode().is_err(), "{at}");
        }
    }
}
