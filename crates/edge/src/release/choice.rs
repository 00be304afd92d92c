//! What was chosen for this node, as a state machine without a clock or a disk.
//!
//! ```text
//!            begin               started, once
//! chosen ──────────► on trial ─────────────────► running ── keep ──► chosen, with the one before as previous
//!    ▲                  │ begun anew: refused       │
//!    └──── back: told so, too late, or started again ┘
//! ```
//!
//! Releases of other versions read and write it too: fields are only ever added, and unknown ones are passed over.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use dsec_proto::rest::{FailedChange, NodeChange, Programs};
use serde::{Deserialize, Serialize};

/// The installed program, told from one that was put in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// Its file.
    pub path: PathBuf,
    /// Bytes of it.
    pub bytes: u64,
    /// When it was last written, Unix nanoseconds.
    pub written_ns: i64,
}

impl Installed {
    /// A program as it is now.
    ///
    /// # Errors
    /// It is not there.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        let written_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
        Ok(Self { path: path.to_owned(), bytes: meta.len(), written_ns })
    }
}

/// A change that is being tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// To what.
    pub change: NodeChange,
    /// When the node goes back from it, Unix ms.
    pub until_ms: u64,
    /// Starts of an edge that were to try it.
    #[serde(default)]
    pub starts: u32,
    /// Sandboxes that there were.
    #[serde(default)]
    pub sandboxes: u64,
}

/// What was chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Choice {
    /// The program over which it was chosen. Another one in its place is the operator's newer word.
    pub installed: Option<Installed>,
    /// What the node starts with.
    pub chosen: Programs,
    /// Since when, Unix ms.
    pub since_ms: Option<u64>,
    /// What it started with before.
    pub previous: Option<Programs>,
    /// What it tries.
    pub trial: Option<Trial>,
    /// What it went back from last.
    pub failed: Option<FailedChange>,
}

impl Choice {
    /// What a start of the edge is to run now.
    pub fn to_run(&self) -> &Programs {
        match self.trial.as_ref().map(|trial| &trial.change) {
            Some(NodeChange::Programs(programs)) => programs,
            Some(NodeChange::Config(_)) | None => &self.chosen,
        }
    }

    /// A change is to be tried. There is none on trial.
    pub fn begin(&mut self, change: NodeChange, until_ms: u64, sandboxes: u64) {
        self.trial = Some(Trial { change, until_ms, starts: 0, sandboxes });
    }

    /// An edge starts. It is the trial's only start, or the change is gone back from: what tried it has ended without a word.
    pub fn started(&mut self, now_ms: u64) -> Option<NodeChange> {
        let trial = self.trial.as_mut()?;
        if trial.starts == 0 && now_ms < trial.until_ms {
            trial.starts = 1;
            return None;
        }
        let why = match trial.starts {
            0 => "it was not begun in time",
            _ => "its edge ended before it was known to be good",
        };
        self.back(why, now_ms)
    }

    /// What is tried is good. Returns what it was.
    pub fn keep(&mut self, now_ms: u64) -> Option<NodeChange> {
        let trial = self.trial.take()?;
        if let NodeChange::Programs(programs) = &trial.change {
            self.previous = Some(std::mem::replace(&mut self.chosen, programs.clone()));
            self.since_ms = Some(now_ms);
        }
        self.failed = None;
        Some(trial.change)
    }

    /// What is tried is not good. Returns what it was.
    pub fn back(&mut self, why: &str, now_ms: u64) -> Option<NodeChange> {
        let Trial { change, .. } = self.trial.take()?;
        self.failed = Some(FailedChange { change: change.clone(), why: why.to_owned(), at_ms: now_ms });
        Some(change)
    }

    /// Another program was installed than the one over which this was chosen: from now on it is what runs. Returns a trial that
    /// ends with it.
    pub fn reinstalled(&mut self, installed: Installed, now_ms: u64) -> Option<NodeChange> {
        let tried = self.back("other programs were installed on the node", now_ms);
        self.installed = Some(installed);
        let before = std::mem::take(&mut self.chosen);
        self.previous = Some(before).filter(|before| *before != Programs::Installed);
        self.since_ms = Some(now_ms);
        tried
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(digit: char) -> Programs {
        format!("0.1.0-{}", digit.to_string().repeat(16)).parse().unwrap()
    }

    fn on_trial() -> Choice {
        let mut choice = Choice { chosen: release('a'), ..Choice::default() };
        choice.begin(NodeChange::Programs(release('b')), 100, 7);
        choice
    }

    #[test]
    fn a_trial_has_one_start_and_the_next_one_goes_back() {
        let mut choice = on_trial();
        assert_eq!(choice.started(10), None);
        assert_eq!(*choice.to_run(), release('b'));
        assert_eq!(choice.started(20), Some(NodeChange::Programs(release('b'))));
        assert_eq!((choice.to_run(), &choice.trial), (&release('a'), &None));
        assert!(choice.failed.as_ref().unwrap().why.contains("ended"), "{choice:?}");
        assert_eq!(choice.started(30), None);
        assert_eq!(*choice.to_run(), release('a'));
    }

    #[test]
    fn a_trial_that_is_late_is_not_begun() {
        let mut choice = on_trial();
        choice.started(100).unwrap();
        assert_eq!(*choice.to_run(), release('a'));
    }

    #[test]
    fn what_is_kept_is_started_from_then_on_and_the_one_before_is_remembered() {
        let mut choice = on_trial();
        choice.started(10);
        choice.keep(20).unwrap();
        for _ in 0..3 {
            assert_eq!(choice.started(1000), None);
        }
        assert_eq!((choice.to_run(), choice.previous.as_ref()), (&release('b'), Some(&release('a'))));
        assert_eq!(choice.keep(30), None);
    }

    #[test]
    fn a_configuration_on_trial_runs_the_chosen_programs() {
        let mut choice = Choice { chosen: release('a'), ..Choice::default() };
        choice.begin(NodeChange::Config("0123".to_owned()), 100, 0);
        assert_eq!(*choice.to_run(), release('a'));
        choice.keep(5).unwrap();
        assert_eq!((choice.chosen, choice.previous), (release('a'), None));
    }

    #[test]
    fn programs_that_were_installed_since_are_the_operators_newer_word() {
        let mut choice = on_trial();
        let new = Installed { path: "/x".into(), bytes: 1, written_ns: 2 };
        assert!(choice.reinstalled(new.clone(), 50).is_some());
        assert_eq!((choice.to_run(), choice.previous.as_ref()), (&Programs::Installed, Some(&release('a'))));
        assert_eq!(choice.installed, Some(new));
    }

    #[test]
    fn what_a_newer_release_wrote_is_read() {
        let text = format!(r#"{{"chosen":"{}","colour":"blue","trial":null}}"#, release('a'));
        let choice: Choice = serde_json::from_str(&text).unwrap();
        assert_eq!(choice.chosen, release('a'));
    }
}
