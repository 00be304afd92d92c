//! Tasks: all sandboxes of a job, on whatever nodes, as one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;

use dsec_model::iam::ProjectPath;
use dsec_model::{SandboxId, State, TaskId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// Failures that an outcome lists; the others are counted.
pub const TASK_FAILURES_MAX: usize = 1000;

/// Sandboxes by state. Those that ended are counted for an hour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StateCounts {
    /// Being made.
    pub creating: u64,
    /// Running.
    pub running: u64,
    /// Being paused.
    #[serde(skip_serializing_if = "is_none")]
    pub pausing: u64,
    /// Paused.
    #[serde(skip_serializing_if = "is_none")]
    pub paused: u64,
    /// Being resumed.
    #[serde(skip_serializing_if = "is_none")]
    pub resuming: u64,
    /// Being ended.
    pub stopping: u64,
    /// Ended as asked or by their limits.
    pub stopped: u64,
    /// Ended by a failure.
    pub failed: u64,
    /// Not known: they had not ended when their node was last heard of, and it is lost.
    #[serde(skip_serializing_if = "is_none")]
    pub lost: u64,
}

/// Most have none.
fn is_none(count: &u64) -> bool {
    *count == 0
}

impl StateCounts {
    /// One more in this state.
    pub fn count(&mut self, state: State) {
        *match state {
            State::Creating => &mut self.creating,
            State::Running => &mut self.running,
            State::Pausing => &mut self.pausing,
            State::Paused => &mut self.paused,
            State::Resuming => &mut self.resuming,
            State::Stopping => &mut self.stopping,
            State::Stopped => &mut self.stopped,
            State::Failed => &mut self.failed,
            State::Lost => &mut self.lost,
        } += 1;
    }

    /// Those that have not ended. Of those that are lost nobody knows.
    pub fn living(&self) -> u64 {
        self.creating + self.running + self.pausing + self.paused + self.resuming + self.stopping
    }

    /// All of them.
    pub fn all(&self) -> u64 {
        self.living() + self.stopped + self.failed + self.lost
    }
}

impl AddAssign for StateCounts {
    fn add_assign(&mut self, other: Self) {
        self.creating += other.creating;
        self.running += other.running;
        self.pausing += other.pausing;
        self.paused += other.paused;
        self.resuming += other.resuming;
        self.stopping += other.stopping;
        self.stopped += other.stopped;
        self.failed += other.failed;
        self.lost += other.lost;
    }
}

/// A task: what its sandboxes have as `task_id`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its name.
    #[schema(value_type = String)]
    pub task_id: TaskId,
    /// Projects that it has sandboxes in, of those that the caller sees.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub projects: BTreeSet<ProjectPath>,
    /// Its sandboxes by state.
    pub sandboxes: StateCounts,
    /// Those that have not ended, by node.
    pub nodes: BTreeMap<String, u64>,
    /// When the first of them was created, Unix ms.
    pub first_created_ms: u64,
    /// When the last was.
    pub last_created_ms: u64,
}

impl Task {
    /// A task of which no sandbox is counted yet, the first of which was created then, Unix ms.
    pub fn new(task_id: TaskId, created_ms: u64) -> Self {
        Self {
            task_id,
            projects: BTreeSet::new(),
            sandboxes: StateCounts::default(),
            nodes: BTreeMap::new(),
            first_created_ms: created_ms,
            last_created_ms: created_ms,
        }
    }

    /// One of its sandboxes.
    pub fn count(&mut self, node: &str, project: &ProjectPath, state: State, created_ms: u64) {
        let mut one = StateCounts::default();
        one.count(state);
        if one.living() > 0 {
            *self.nodes.entry(node.to_owned()).or_default() += 1;
        }
        self.sandboxes += one;
        if !self.projects.contains(project) {
            self.projects.insert(project.clone());
        }
        self.first_created_ms = self.first_created_ms.min(created_ms);
        self.last_created_ms = self.last_created_ms.max(created_ms);
    }

    /// Adds what another node knows of it.
    pub fn merge(&mut self, other: Self) {
        self.projects.extend(other.projects);
        self.sandboxes += other.sandboxes;
        self.nodes.extend(other.nodes);
        self.first_created_ms = self.first_created_ms.min(other.first_created_ms);
        self.last_created_ms = self.last_created_ms.max(other.last_created_ms);
    }
}

/// Tasks, in the order of their names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskList {
    /// Those that have a sandbox, or had one within the hour.
    pub tasks: Vec<Task>,
}

/// Waits until a task has no sandbox that lives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TaskWaitRequest {
    /// How long, ms, at most an hour; then `deadline_exceeded`. Default: 60,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// What a wait for the end of sandboxes came to: none is known to live any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TaskWaited {
    /// Those that are lost with their nodes, which nobody waits for: they may live, and may be back.
    #[serde(skip_serializing_if = "is_none")]
    pub lost: u64,
}

/// What could not be done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskFailure {
    /// Where.
    pub node: String,
    /// With which sandbox; none: the node could not be asked, so that nothing is known of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub sandbox_id: Option<SandboxId>,
    /// Why.
    pub error: ErrorBody,
}

/// What became of something that was asked of all sandboxes of a task. Asking again does it to those that are left.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskOutcome {
    /// Sandboxes of the task that it was for.
    pub matched: u64,
    /// With how many it was done.
    pub done: u64,
    /// With how many, or on how many nodes, it could not be done.
    pub failed: u64,
    /// The first 1,000 of those.
    pub failures: Vec<TaskFailure>,
}

impl TaskOutcome {
    /// It could not be done with one.
    pub fn fail(&mut self, failure: TaskFailure) {
        self.failed += 1;
        if self.failures.len() < TASK_FAILURES_MAX {
            self.failures.push(failure);
        }
    }

    /// Adds what became of it on another node.
    pub fn merge(&mut self, other: Self) {
        self.matched += other.matched;
        self.done += other.done;
        self.failed += other.failed;
        let room = TASK_FAILURES_MAX - self.failures.len();
        self.failures.extend(other.failures.into_iter().take(room));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rest::ApiError;

    fn failure() -> TaskFailure {
        let error = *ApiError::new(dsec_model::ErrorKind::Unavailable, "away").0;
        TaskFailure { node: "n1".to_owned(), sandbox_id: None, error }
    }

    #[test]
    fn all_failures_are_counted_and_the_first_are_listed() {
        let mut outcome = TaskOutcome { matched: 3000, done: 1, ..TaskOutcome::default() };
        for _ in 0..TASK_FAILURES_MAX - 1 {
            outcome.fail(failure());
        }
        let mut other = TaskOutcome { matched: 10, done: 5, ..TaskOutcome::default() };
        for _ in 0..5 {
            other.fail(failure());
        }
        outcome.merge(other);
        assert_eq!((outcome.matched, outcome.done, outcome.failed), (3010, 6, 1004));
        assert_eq!(outcome.failures.len(), TASK_FAILURES_MAX);
    }

    #[test]
    fn a_task_is_what_its_nodes_know_of_it() {
        let task = |node: &str, at: u64, running: u64| Task {
            task_id: "job".parse().unwrap(),
            projects: BTreeSet::from([ProjectPath::root()]),
            sandboxes: StateCounts { running, failed: 1, ..StateCounts::default() },
            nodes: BTreeMap::from([(node.to_owned(), running)]),
            first_created_ms: at,
            last_created_ms: at + 10,
        };
        let mut all = task("n1", 100, 2);
        all.merge(task("n2", 50, 3));
        assert_eq!((all.sandboxes.living(), all.sandboxes.failed), (5, 2));
        assert_eq!((all.first_created_ms, all.last_created_ms), (50, 110));
        assert_eq!(all.nodes.values().sum::<u64>(), 5);
    }
}
