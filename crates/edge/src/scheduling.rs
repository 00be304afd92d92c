//! Whether the node takes new sandboxes, as its operator said. Kept in a file, since a node that was taken out for repair must not
//! come back because its edge was restarted.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use dsec_model::{ErrorKind, Shortage};
use dsec_proto::rest::{ApiError, NodeScheduling, SchedulingState};
use serde_json::json;

use crate::error::internal;

/// File of the state directory.
const FILE: &str = "scheduling.json";

/// What the operator said last.
#[derive(Debug)]
pub struct Scheduling {
    node: String,
    file: PathBuf,
    said: RwLock<NodeScheduling>,
    /// Held by who changes it: whoever asks meanwhile does not wait for the disk.
    writing: Mutex<()>,
    /// This edge is about to become another.
    held: AtomicBool,
}

impl Scheduling {
    /// Reads what was said before; without a file the node is open.
    ///
    /// # Errors
    /// The file is there and cannot be read or understood: to take that for an open node would undo what somebody meant.
    pub fn load(state_dir: &Path, node: &str) -> Result<Self, ApiError> {
        let file = state_dir.join(FILE);
        let said = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(NodeScheduling::default()),
            Err(error) => Err(error),
        };
        let said = said.map_err(|error| {
            internal(&format!("{} cannot be read; remove it to open the node", file.display()), &error)
        })?;
        Ok(Self {
            node: node.to_owned(),
            file,
            said: RwLock::new(said),
            writing: Mutex::default(),
            held: AtomicBool::new(false),
        })
    }

    /// What holds now.
    pub fn now(&self) -> NodeScheduling {
        self.said.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says something else, on disk first. A drain that is asked for again goes on with the time and the reason that it has, unless
    /// others are given. Blocks.
    ///
    /// # Errors
    /// It cannot be written; what held before still does.
    pub fn say(&self, mut said: NodeScheduling) -> Result<(), ApiError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.now();
        if (before.state, said.state) == (SchedulingState::Draining, SchedulingState::Draining) {
            said.stop_at_ms = said.stop_at_ms.or(before.stop_at_ms);
            if said.reason.is_empty() {
                said.reason = before.reason;
            }
        }
        let written = match said.state {
            SchedulingState::Open => match std::fs::remove_file(&self.file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed.and_then(|()| self.sync_directory()),
            },
            SchedulingState::Cordoned | SchedulingState::Draining => self.write(&said),
        };
        written.map_err(|error| internal(&format!("{} cannot be written", self.file.display()), &error))?;
        tracing::info!(state = ?said.state, reason = said.reason, "the node's scheduling was changed");
        *self.said.write().unwrap_or_else(PoisonError::into_inner) = said;
        Ok(())
    }

    fn write(&self, said: &NodeScheduling) -> io::Result<()> {
        let draft = self.file.with_extension("new");
        let file = std::fs::File::create(&draft)?;
        serde_json::to_writer(&file, said)?;
        file.sync_all()?;
        std::fs::rename(&draft, &self.file)?;
        self.sync_directory()
    }

    /// Writes through which files there are: what was said holds after a power cut too.
    fn sync_directory(&self) -> io::Result<()> {
        self.file.parent().map_or(Ok(()), |directory| std::fs::File::open(directory)?.sync_all())
    }

    /// This edge takes no new sandbox any more: the next one does.
    pub fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Refuses a new sandbox unless the node is open.
    ///
    /// # Errors
    /// It is cordoned or draining, or its edge is about to become another.
    pub fn admit(&self) -> Result<(), ApiError> {
        if self.held.load(Ordering::Acquire) {
            let message =
                format!("node {} changes its programs and takes no new sandbox for a moment", self.node);
            return Err(ApiError::new(ErrorKind::ResourceExhausted, message)
                .detail(json!({ "short": Shortage::Cordoned }))
                .hint("use another node, or try again in a moment"));
        }
        let said = self.said.read().unwrap_or_else(PoisonError::into_inner);
        let (of, what) = match said.state {
            SchedulingState::Open => return Ok(()),
            SchedulingState::Cordoned => (Shortage::Cordoned, "is cordoned"),
            SchedulingState::Draining => (Shortage::Draining, "is draining"),
        };
        let why = if said.reason.is_empty() { String::new() } else { format!(": {}", said.reason) };
        let node = &self.node;
        Err(ApiError::new(
            ErrorKind::ResourceExhausted,
            format!("node {node} {what} and takes no new sandbox{why}"),
        )
        .detail(json!({ "short": of }))
        .hint(format!("use another node, or open this one: dsec node uncordon {node}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cordoned() -> NodeScheduling {
        NodeScheduling {
            state: SchedulingState::Cordoned,
            reason: "a disk is replaced".to_owned(),
            since_ms: Some(5),
            stop_at_ms: None,
        }
    }

    #[test]
    fn what_was_said_outlives_the_edge_and_opening_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let node = Scheduling::load(dir.path(), "n1").unwrap();
        node.admit().unwrap();
        node.say(cordoned()).unwrap();
        let again = Scheduling::load(dir.path(), "n1").unwrap();
        assert_eq!(again.now(), cordoned());
        let refused = again.admit().unwrap_err();
        assert!(refused.0.message.ends_with("cordoned and takes no new sandbox: a disk is replaced"));
        assert_eq!(refused.0.detail, json!({ "short": "cordoned" }));
        again.say(NodeScheduling::default()).unwrap();
        again.admit().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_drain_that_is_asked_for_again_keeps_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let node = Scheduling::load(dir.path(), "n1").unwrap();
        let drain = |reason: &str, stop_at_ms| NodeScheduling {
            state: SchedulingState::Draining,
            reason: reason.to_owned(),
            since_ms: Some(7),
            stop_at_ms,
        };
        node.say(drain("a disk", Some(100))).unwrap();
        node.say(drain("", None)).unwrap();
        assert_eq!(node.now(), drain("a disk", Some(100)));
        node.say(drain("another", Some(50))).unwrap();
        assert_eq!(node.now(), drain("another", Some(50)));
        // A cordon takes the time away: what runs then stays.
        node.say(cordoned()).unwrap();
        node.say(drain("", None)).unwrap();
        assert_eq!(node.now().stop_at_ms, None);
    }

    #[test]
    fn a_broken_file_does_not_open_a_node() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        let error = Scheduling::load(dir.path(), "n1").unwrap_err();
        assert!(error.0.message.contains("scheduling.json"), "{error:?}");
    }

    #[test]
    fn what_cannot_be_written_does_not_hold() {
        let dir = tempfile::tempdir().unwrap();
        let node = Scheduling::load(&dir.path().join("gone"), "n1").unwrap();
        node.say(cordoned()).unwrap_err();
        node.admit().unwrap();
    }
}
