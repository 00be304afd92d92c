//! What a node tells control of its sandboxes once a second: `GET /internal/sandboxes/changes`. Asked with the number that the
//! answer before ended at, a node tells what has changed since.

use std::collections::BTreeMap;

use dsec_model::iam::ProjectPath;
use dsec_model::{EndReason, SandboxId, State, TaskId};
use serde::{Deserialize, Serialize};

use super::SandboxLimits;

/// Changes of one answer: some hundred kilobytes.
pub const CHANGES_MAX: usize = 5000;
/// Labels of a sandbox that are told, as JSON, bytes. Those of one that has more are left out, so that what control holds is bounded.
pub const LABELS_TOLD_MAX: usize = 1024;

/// Whose a sandbox is, and of what kind: what sandboxes are counted by.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SandboxOwner {
    /// The project it belongs to.
    pub project: ProjectPath,
    /// The job it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    /// Its backend.
    pub backend: String,
}

/// What of a sandbox's record does not change, and many sandboxes have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxShape {
    /// The image's name as it was asked for.
    pub image: String,
    /// Id of the image's layer.
    pub image_digest: String,
    /// The limits in force.
    pub limits: SandboxLimits,
    /// The user of its commands, as given.
    pub init_user: String,
}

/// A sandbox as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxChange {
    /// Its id.
    pub id: SandboxId,
    /// Place of its owner in the answer's list.
    pub owner: usize,
    /// Place of its shape.
    pub shape: usize,
    /// Its labels; none: they are too many to tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Where it is in its life.
    pub state: State,
    /// Why it ended or is ending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    /// When the create arrived, Unix ms. It does not change.
    pub created_ms: u64,
    /// When it began to run, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_ms: Option<u64>,
    /// When it ended, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
}

/// A sandbox that the node has forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxForgotten {
    /// Its id.
    pub id: SandboxId,
    /// When its create arrived, Unix ms.
    pub created_ms: u64,
}

/// One answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxChanges {
    /// Which start of the edge counts. Numbers of another start mean nothing.
    pub epoch: String,
    /// What to ask with next.
    pub seq: u64,
    /// There is more already.
    #[serde(default)]
    pub more: bool,
    /// The answer begins from nothing: what was known of the node before is void once all of it has been read.
    #[serde(default)]
    pub whole: bool,
    /// Owners of those that changed.
    #[serde(default)]
    pub owners: Vec<SandboxOwner>,
    /// Shapes of those that changed.
    #[serde(default)]
    pub shapes: Vec<SandboxShape>,
    /// Those that are new or another.
    #[serde(default)]
    pub changed: Vec<SandboxChange>,
    /// Those that are forgotten.
    #[serde(default)]
    pub forgotten: Vec<SandboxForgotten>,
}

/// Asks for the records of sandboxes by their ids: `POST /internal/sandboxes/get`. The answer is a `SandboxList` without those that are
/// not there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxesById {
    /// Which.
    pub ids: Vec<SandboxId>,
    /// With what each uses now.
    #[serde(default)]
    pub usage: bool,
    /// With what of their layers' content is on the node.
    #[serde(default)]
    pub content: bool,
}
