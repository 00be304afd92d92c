//! Making a layer of what a sandbox wrote.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Image, LaunchPhase};

/// The kind of a pack when nothing is said.
pub const LAYER_WORKSPACE: &str = "workspace";

fn workspace() -> String {
    LAYER_WORKSPACE.to_owned()
}

/// What a sandbox's processes do while its writable layer is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quiesce {
    /// They stand still meanwhile, so that all that is taken is of one moment.
    #[default]
    Freeze,
    /// As `freeze`; and while one of them has a file open for writing, the pack is refused with `conflict`.
    Refuse,
    /// They go on. What is taken is of one moment all the same; a process may be between two writes that belong together.
    None,
}

/// Asks for a layer of what a sandbox wrote.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PackRequest {
    /// Name to give the layer: `name`, `name:tag` or `name@version`. Left out, the layer has only a `step`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "click-built")]
    pub name: Option<String>,
    /// Key of a step of a recipe, 64 hexadecimal digits, that the layer is found by at `/v1/steps/{key}`. It keeps the layer for a
    /// week after its last use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// `workspace` (what it wrote, with the workspace it started from), `snapshot` (that and its toolkits), `toolkit` (what it
    /// wrote, alone) or `base` (all of it, as an image).
    #[serde(default = "workspace")]
    #[schema(example = "workspace")]
    pub kind: String,
    /// Patterns of paths that are packed as though the sandbox had not touched them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["/data/**", "*.o"]))]
    pub exclude: Vec<String>,
    /// Names of the rules for residue of work that are applied, such as `caches` or `caches/pip`. Left out: all of them.
    /// Empty: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = json!(["caches", "history", "keys", "logs", "temp"]))]
    pub scrub: Option<Vec<String>>,
    /// Patterns of paths with answers that whoever uses the layer must not find: left out, whatever `scrub` says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<String>,
    /// Patterns of paths that must not be in the layer: what still matches fails the pack.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// What the sandbox's processes do meanwhile.
    #[serde(default)]
    pub quiesce: Quiesce,
    /// Of a `base`: what the image says of itself, over what the sandbox's image says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<ImageSettings>,
}

/// How commands are run in an image, as far as it is to differ from the one it was made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ImageSettings {
    /// Environment, over the image's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory, absolute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    /// User, by name or `uid[:gid]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// What one rule left out of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftOut {
    /// The rule's name, or the pattern.
    pub rule: String,
    /// Files, directories and links.
    pub files: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// The first paths that matched; what is in a directory that matched is counted and not listed.
    pub paths: Vec<String>,
}

/// A layer that was made of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Packed {
    /// The layer.
    pub layer: Image,
    /// Bytes of content that no layer had before.
    pub new_bytes: u64,
    /// Bytes that were added to the store: that content compressed, and metadata.
    pub stored_bytes: u64,
    /// Residue that was left out.
    pub scrubbed: Vec<LeftOut>,
    /// What was left out as asked.
    pub excluded: Vec<LeftOut>,
    /// Of a workspace that was packed over toolkits: what was changed in the toolkits' own paths. It is in the layer, and
    /// where the same toolkits lie over it again, theirs shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under_toolkits: Option<LeftOut>,
    /// How long each step took.
    pub phases: Vec<LaunchPhase>,
}
