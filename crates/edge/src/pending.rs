//! Creates that have been taken and have no sandbox yet: their layers are being fetched. What is said meanwhile about new sandboxes, or
//! about all of a task, counts for them too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_model::iam::{ProjectPath, Scope};
use dsec_model::{ErrorKind, TaskId};
use dsec_proto::rest::ApiError;
use serde_json::json;
use tokio::sync::watch;

/// Sandboxes that something is said about: those of a task, or all, in a part of the project tree.
#[derive(Debug)]
pub struct Meant {
    /// The task; none: whatever task they have, or none.
    pub task: Option<TaskId>,
    /// Where.
    pub scope: Scope,
}

impl Meant {
    /// Whether one is among them.
    pub fn has(&self, task: Option<&TaskId>, project: &ProjectPath) -> bool {
        self.task.as_ref().is_none_or(|meant| task == Some(meant)) && self.scope.has(project)
    }
}

/// The creates of a node that have no sandbox yet.
#[derive(Debug, Default)]
pub struct Pending {
    creates: Arc<Mutex<Creates>>,
}

#[derive(Debug, Default)]
struct Creates {
    last: u64,
    of: HashMap<u64, Create>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Create {
    task: Option<TaskId>,
    project: ProjectPath,
    stopped: bool,
}

/// One of them, for as long as it is held.
#[derive(Debug)]
pub struct Turn {
    creates: Arc<Mutex<Creates>>,
    number: u64,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut creates = lock(&self.creates);
        creates.of.remove(&self.number);
        creates.changed.send_replace(());
    }
}

impl Turn {
    /// Makes it a sandbox. What is said before this begins is known to `make`, and what is said after it ended finds the sandbox.
    ///
    /// # Errors
    /// Its task was stopped, or what `make` says.
    pub fn settle<T>(self, make: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
        let creates = lock(&self.creates);
        let made = match creates.of.get(&self.number) {
            Some(Create { task, project, stopped: true }) => {
                let what = match task {
                    Some(task) => format!("task {task} was"),
                    None => format!("all sandboxes of {project} were"),
                };
                let message = format!("{what} stopped while the sandbox was created");
                Err(ApiError::new(ErrorKind::Conflict, message)
                    .detail(json!({ "task_id": task, "project": project })))
            }
            _ => make(),
        };
        drop(creates);
        made
    }
}

impl Pending {
    /// A create begins.
    pub fn begin(&self, task: Option<TaskId>, project: ProjectPath) -> Turn {
        let mut creates = lock(&self.creates);
        creates.last += 1;
        let number = creates.last;
        creates.of.insert(number, Create { task, project, stopped: false });
        Turn { creates: Arc::clone(&self.creates), number }
    }

    /// Stops those that are meant; returns how many.
    pub fn stop(&self, meant: &Meant) -> u64 {
        let mut creates = lock(&self.creates);
        let meant = creates.of.values_mut().filter(|create| meant.has(create.task.as_ref(), &create.project));
        meant.map(|create| create.stopped = true).count() as u64
    }

    /// Whether there is any of those that are meant.
    pub fn has(&self, meant: &Meant) -> bool {
        lock(&self.creates).of.values().any(|create| meant.has(create.task.as_ref(), &create.project))
    }

    /// Resolves once there is none of those that are meant.
    pub async fn none_of(&self, meant: &Meant) {
        let mut changed = lock(&self.creates).changed.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        while self.has(meant) && changed.changed().await.is_ok() {}
    }

    /// When it returns, no create is in the midst of becoming a sandbox that had begun to before.
    pub fn pause(&self) {
        drop(lock(&self.creates));
    }
}

fn lock(creates: &Mutex<Creates>) -> MutexGuard<'_, Creates> {
    creates.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn of(task: Option<&str>, scope: &str) -> Meant {
        Meant { task: task.map(|task| task.parse().unwrap()), scope: scope.parse().unwrap() }
    }

    fn begin(pending: &Pending, task: Option<&str>, project: &str) -> Turn {
        pending.begin(task.map(|task| task.parse().unwrap()), project.parse().unwrap())
    }

    #[tokio::test]
    async fn a_create_whose_task_is_stopped_makes_nothing() {
        let pending = Pending::default();
        let (job, other) = (of(Some("job"), "root"), of(Some("other"), "root"));
        let mine = begin(&pending, Some("job"), "root");
        let (others, free) = (begin(&pending, Some("other"), "root"), begin(&pending, None, "root"));
        assert_eq!((pending.stop(&job), pending.has(&job), pending.has(&other)), (1, true, true));
        let refused = mine.settle(|| -> Result<(), ApiError> { panic!("it was made") }).unwrap_err();
        assert!(refused.0.message.contains("task job was stopped"));
        others.settle(|| Ok(())).unwrap();
        free.settle(|| Ok(())).unwrap();
        assert!(!pending.has(&job) && !pending.has(&other));
        // What begins after the stop is another create.
        begin(&pending, Some("job"), "root").settle(|| Ok(())).unwrap();
        assert_eq!(pending.stop(&job), 0);
    }

    #[tokio::test]
    async fn a_task_of_another_project_is_another_task() {
        let pending = Pending::default();
        let (mine, theirs) =
            (begin(&pending, Some("job"), "root/a/b"), begin(&pending, Some("job"), "root/c"));
        let untold = begin(&pending, None, "root/a");
        assert_eq!(pending.stop(&of(Some("job"), "root/a")), 1);
        mine.settle(|| Ok(())).unwrap_err();
        theirs.settle(|| Ok(())).unwrap();
        assert_eq!(pending.stop(&of(None, "root/a")), 1);
        let refused = untold.settle(|| Ok(())).unwrap_err();
        assert!(refused.0.message.contains("all sandboxes of root/a were stopped"), "{}", refused.0.message);
    }

    #[tokio::test]
    async fn waiting_ends_with_the_last_of_a_task() {
        let job = of(Some("job"), "root");
        let pending = Pending::default();
        pending.none_of(&job).await;
        let turn = begin(&pending, Some("job"), "root");
        let waits = pending.none_of(&job);
        tokio::pin!(waits);
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut waits).await.is_err());
        drop(turn);
        tokio::time::timeout(Duration::from_secs(5), waits).await.unwrap();
    }
}
