//! Which programs this node runs, and how it gets others (ADR 18).
//!
//! ```text
//! PUT releases/NAME ──► store: checked, beside the others
//! POST trial ──► Choice: on trial ──► this process becomes the other program (exec: the same pid)
//!                                        │ told that it is good: kept
//!                                        │ not told in time, or told that it is bad: becomes the one of before
//!                                        │ ends: whoever starts the edge starts the installed one, which goes back (start)
//!                                        └ stands still: ended by a guard that the one of before left (guard)
//! ```
//!
//! A change of `edge.toml` is tried in the same way. Nothing here touches a sandbox: what starts takes them over.

pub mod choice;
pub mod dir;
pub mod guard;
pub mod settings;
pub mod start;
mod store;
pub mod trial;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, NodeChange, NodeRelease, NodeTrial, Programs, ReleaseName, TRIAL_MS_RANGE};
use serde_json::json;

use crate::config::Config;
use crate::error::{internal, invalid_field};
use choice::{Choice, Trial};
use dir::ReleaseDir;

/// What became of the sandboxes of the edge before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// How many are here.
    pub count: u64,
    /// Ids of those that ran and are not.
    pub lost: Vec<String>,
}

/// The programs of this node.
pub struct Releases {
    node: String,
    dir: ReleaseDir,
    config: Config,
    /// What is the operator's in the configuration that this process runs with.
    config_digest: String,
    running: Programs,
    choice: Mutex<Choice>,
    taken_over: OnceLock<TakenOver>,
}

impl Releases {
    /// Looks which programs these are, and what was chosen.
    ///
    /// # Errors
    /// What was chosen cannot be read.
    pub fn open(config: &Config) -> Result<Self, ApiError> {
        let dir = ReleaseDir::new(&config.state_dir);
        let choice = dir
            .load()
            .map_err(|error| internal(&format!("{} cannot be read", dir.choice_file().display()), &error))?;
        if let Err(error) = dir.clear_drafts() {
            tracing::warn!(%error, "what is left of an upload stays");
        }
        let running = std::env::current_exe().ok().and_then(|exe| dir.release_of(&exe));
        // Without a file there is nothing of the operator's in it: so it is in tests.
        let text = std::fs::read_to_string(&config.file).unwrap_or_default();
        Ok(Self {
            node: config.node.to_string(),
            dir,
            config: config.clone(),
            config_digest: settings::digest(&text).unwrap_or_default(),
            running: running.map_or(Programs::Installed, Programs::Release),
            choice: Mutex::new(choice.unwrap_or_default()),
            taken_over: OnceLock::new(),
        })
    }

    fn choice(&self) -> MutexGuard<'_, Choice> {
        self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what became of the sandboxes of the edge before. The first word counts.
    pub fn took_over(&self, taken_over: TakenOver) {
        let _said_before = self.taken_over.set(taken_over);
    }

    /// What runs, and how it stands with changes.
    pub fn status(&self, instance: &str) -> NodeRelease {
        let choice = self.choice().clone();
        let stored = self.dir.stored().unwrap_or_default();
        let trial = choice.trial.as_ref().map(|trial| self.shown(trial));
        NodeRelease {
            node: self.node.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            running: self.running.clone(),
            instance: instance.to_owned(),
            chosen: choice.chosen,
            since_ms: choice.since_ms,
            previous: choice.previous,
            stored,
            config: self.config_digest.clone(),
            trial,
            failed: choice.failed,
        }
    }

    fn shown(&self, trial: &Trial) -> NodeTrial {
        let taken_over = self.taken_over.get().filter(|_| self.tries(&trial.change));
        NodeTrial {
            change: trial.change.clone(),
            until_ms: trial.until_ms,
            sandboxes: trial.sandboxes,
            taken_over: taken_over.map(|taken| taken.count),
            lost: taken_over.map(|taken| taken.lost.clone()).unwrap_or_default(),
        }
    }

    /// Whether this process is what a change makes of the node.
    fn tries(&self, change: &NodeChange) -> bool {
        match change {
            NodeChange::Programs(programs) => *programs == self.running,
            NodeChange::Config(digest) => *digest == self.config_digest,
        }
    }

    fn save(&self, choice: &Choice) -> Result<(), ApiError> {
        self.dir.save(choice).map_err(|error| {
            internal(&format!("{} cannot be written", self.dir.choice_file().display()), &error)
        })
    }
}

/// How long a trial is to last.
fn trial_length(asked_ms: Option<u64>) -> Result<Duration, ApiError> {
    let ms = asked_ms.unwrap_or(dsec_proto::rest::TRIAL_MS_DEFAULT);
    let (least, most) = TRIAL_MS_RANGE;
    if !(least..=most).contains(&ms) {
        let message = format!("trial_ms is {ms}; it must be {least} to {most}");
        return Err(invalid_field("trial_ms", message));
    }
    Ok(Duration::from_millis(ms))
}

fn no_release(name: &ReleaseName, node: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("node {node} has no release {name}"))
        .detail(json!({ "release": name }))
        .hint("`dsec fleet upgrade` sends it")
}

fn conflict(message: String) -> ApiError {
    ApiError::new(ErrorKind::Conflict, message).hint("`dsec fleet status` shows how the nodes stand")
}
