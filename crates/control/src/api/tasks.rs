//! What concerns all sandboxes of a task, on whatever nodes: every node is told at the same time, and the answers are one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::RequestExt;
use axum::extract::{FromRequest, Path, Request};
use bytes::Bytes;
use dsec_model::{ErrorKind, TaskId};
use dsec_proto::rest::{
    ErrorBody, GRACE_MAX_MS, StateCounts, StopRequest, Task, TaskFailure, TaskList, TaskOutcome,
    TaskWaitRequest, TaskWaited, WAIT_DEFAULT_MS, WAIT_MAX_MS,
};
use futures_util::future::join_all;
use http::HeaderMap;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::json;

use super::call::{bad_id, malformed_path, parsed};
use super::{Call, lists};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::forward;
use crate::nodes::Node;
use crate::records::Meant;
use crate::watcher::Standing;

/// What ending a sandbox may take beside the grace that was given, on a node that ends hundreds at once.
const STOP_MARGIN: Duration = Duration::from_secs(120);
/// The way there and back, beside a wait on the node.
const WAIT_MARGIN: Duration = Duration::from_secs(10);
/// How long until nodes are asked again after one did not answer: it is heard of once a second.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What is left of sandboxes whose end is waited for.
#[derive(Default)]
struct Left {
    living: u64,
    /// Some of those are on nodes that do not answer.
    is_silent: bool,
    lost: u64,
    lost_nodes: Vec<String>,
}

/// The tasks that have sandboxes, or had some within the hour.
#[utoipa::path(get, path = "/v1/tasks", operation_id = "list_tasks", tag = "tasks",
    responses((status = 200, description = "The tasks of all nodes; those of nodes that do not answer, which `x-dsec-unreachable-nodes` names, as they were last heard of, or as lost.",
        body = TaskList,
        headers(("x-dsec-unreachable-nodes" = String, description = "Comma-separated; missing when every node answers.")))))]
pub async fn list(call: Call) -> Reply {
    let headers = lists::identity(&call);
    let meant = Meant { task: None, scope: call.behalf.may.clone() };
    let (tasks, silent) = gather(&call.app, &headers, "/v1/tasks", &meant).await?;
    lists::partial(&TaskList { tasks }, &silent)
}

/// One task: how many sandboxes it has, by state and node.
#[utoipa::path(get, path = "/v1/tasks/{task}", operation_id = "get_task", tag = "tasks",
    params(("task" = String, Path, description = "The task, percent-encoded.")),
    responses((status = 200, description = "The task. What it has on nodes that do not answer, which `x-dsec-unreachable-nodes` names, is as it was last heard of, or lost.",
        body = Task,
        headers(("x-dsec-unreachable-nodes" = String, description = "Comma-separated; missing when every node answers.")))))]
pub async fn get(TaskCall { task, to_all: ToAll { app, headers, meant, .. } }: TaskCall) -> Reply {
    let path = format!("/v1/tasks?task_id={}", lists::percent_encoded(task.as_str()));
    let (mut tasks, silent) = gather(&app, &headers, &path, &meant).await?;
    let Some(found) = tasks.pop() else {
        return Err(Failure::new(ErrorKind::NotFound, format!("no sandbox belongs to task {task}"))
            .hint("`dsec task ls` lists the tasks; one is forgotten an hour after its last sandbox ended")
            .detail(json!({ "task_id": task, "unreachable_nodes": silent })));
    };
    lists::partial(&found, &silent)
}

/// Ends all sandboxes of a task and waits until nothing is left of them. Safe to repeat: it then ends those that are left.
#[utoipa::path(post, path = "/v1/tasks/{task}/stop", operation_id = "stop_task", tag = "tasks",
    params(("task" = String, Path, description = "The task, percent-encoded.")),
    request_body(content = Option<StopRequest>, description = "May be empty."),
    responses((status = 200, description = "How many were ended, and what failed.", body = TaskOutcome)))]
pub async fn stop(TaskCall { to_all, .. }: TaskCall) -> Reply {
    to_all.stop().await
}

/// Pauses all sandboxes of a task, side by side. Those that do not run yet are left alone. Safe to repeat.
#[utoipa::path(post, path = "/v1/tasks/{task}/pause", operation_id = "pause_task", tag = "tasks",
    params(("task" = String, Path, description = "The task, percent-encoded.")),
    responses((status = 200, description = "How many were paused, and what failed.", body = TaskOutcome)))]
pub async fn pause(TaskCall { to_all, .. }: TaskCall) -> Reply {
    to_all.pause().await
}

/// Resumes all paused sandboxes of a task, side by side.
#[utoipa::path(post, path = "/v1/tasks/{task}/resume", operation_id = "resume_task", tag = "tasks",
    params(("task" = String, Path, description = "The task, percent-encoded.")),
    responses((status = 200, description = "How many were resumed, and what failed.", body = TaskOutcome)))]
pub async fn resume(TaskCall { to_all, .. }: TaskCall) -> Reply {
    to_all.pause().await
}

/// Waits until no sandbox of a task is known to live.
///
/// For those of a node that does not answer it waits until the node does or is lost. For those that are lost it does not wait: the answer
/// counts them.
#[utoipa::path(post, path = "/v1/tasks/{task}/wait", operation_id = "wait_task", tag = "tasks",
    params(("task" = String, Path, description = "The task, percent-encoded.")),
    request_body(content = Option<TaskWaitRequest>, description = "May be empty."),
    responses((status = 200, description = "None is known to live any more; `x-dsec-unreachable-nodes` names the nodes that are lost.", body = TaskWaited,
        headers(("x-dsec-unreachable-nodes" = String, description = "Comma-separated; missing when no node is lost.")))))]
pub async fn wait(TaskCall { task, to_all }: TaskCall) -> Reply {
    to_all.wait(&format!("task {task}"), json!({ "task_id": task })).await
}

/// A request that every node is told, taken apart.
pub(super) struct ToAll {
    pub(super) app: Arc<App>,
    pub(super) headers: HeaderMap,
    /// Its path on the nodes.
    pub(super) path: String,
    pub(super) body: Bytes,
    /// Whose sandboxes it is about.
    pub(super) meant: Meant,
}

/// An authenticated request about the task that its path names.
pub struct TaskCall {
    task: TaskId,
    to_all: ToAll,
}

impl FromRequest<Arc<App>> for TaskCall {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let mut call = Call::from_request(request, app).await?;
        let Path(task) = call.request.extract_parts::<Path<String>>().await.map_err(malformed_path)?;
        let task: TaskId = task.parse().map_err(bad_id)?;
        let meant = Meant { task: Some(task.clone()), scope: call.behalf.may.clone() };
        let (headers, path) = (lists::identity(&call), call.request.uri().path().to_owned());
        let body = forward::whole(call.request.into_body()).await?;
        Ok(Self { task, to_all: ToAll { app: call.app, headers, path, body, meant } })
    }
}

impl ToAll {
    /// Has every node wait until it has none of the sandboxes that are meant.
    async fn wait_once(&self, ms: u64) -> Result<Left, Failure> {
        let body = serde_json::to_vec(&TaskWaitRequest { timeout_ms: Some(ms) }).unwrap_or_default().into();
        let mut left = Left::default();
        for (at, node, answer) in
            self.ask_all::<IgnoredAny>(&body, Duration::from_millis(ms) + WAIT_MARGIN).await
        {
            let Err(failure) = answer else { continue };
            let standing = self.app.nodes.watched.standing(at);
            if standing.is_lost() {
                left.lost += self.counted(at, standing).unwrap_or_default().lost;
                left.lost_nodes.push(node.name().to_string());
                continue;
            }
            match (failure.0.kind(), self.counted(at, standing)) {
                (ErrorKind::DeadlineExceeded, _) => {
                    left.living += failure.0.0.detail["left"].as_u64().unwrap_or(1);
                }
                // It answers again, or is lost. What it took since it was last heard of nobody knows, so that one is left at least.
                (ErrorKind::Unavailable, Some(counts)) => {
                    left.living += counts.living().max(1);
                    left.is_silent = true;
                }
                _ => return Err(failure),
            }
        }
        Ok(left)
    }

    /// What a node had of those that are meant when it was last heard of, if that is known.
    fn counted(&self, at: usize, standing: Standing) -> Option<StateCounts> {
        let counts = self.app.nodes.records.counts(at, standing, &self.meant)?;
        Some(counts.into_iter().fold(StateCounts::default(), |mut all, (_, counts)| {
            all += counts;
            all
        }))
    }

    /// Asks every node the same. One that is lost is not asked.
    async fn ask_all<T: DeserializeOwned>(
        &self,
        body: &Bytes,
        within: Duration,
    ) -> Vec<(usize, Arc<Node>, Result<T, Failure>)> {
        let tell = async |(at, node): (usize, Arc<Node>)| {
            let asked = node.post_within(&self.path, &self.headers, body.clone(), within);
            let answer = self.app.nodes.unless_lost(at, &node, asked).await;
            (at, node, answer)
        };
        join_all(self.app.nodes.placed().into_iter().map(tell)).await
    }

    /// Tells every node, and adds up what became of it. A node that cannot be asked is a failure of the outcome, unless all are.
    pub(super) async fn tell(&self, within: Duration) -> Reply {
        let mut outcome = TaskOutcome::default();
        let (mut answered, mut first) = (false, None);
        for (_, node, answer) in self.ask_all::<TaskOutcome>(&self.body, within).await {
            match answer {
                Ok(done) => {
                    answered = true;
                    outcome.merge(done);
                }
                Err(failure) => {
                    let error = ErrorBody::clone(&failure.0.0);
                    outcome.fail(TaskFailure { node: node.name().to_string(), sandbox_id: None, error });
                    first.get_or_insert(failure);
                }
            }
        }
        match first {
            Some(failure) if !answered => Err(failure),
            _ => lists::partial(&outcome, &[]),
        }
    }

    /// Has every node end those that are meant.
    pub(super) async fn stop(&self) -> Reply {
        let StopRequest { grace_ms } = parsed_or_default(&self.body)?;
        self.tell(Duration::from_millis(grace_ms.min(GRACE_MAX_MS)) + STOP_MARGIN).await
    }

    /// Has every node pause or resume those that are meant.
    pub(super) async fn pause(&self) -> Reply {
        self.tell(STOP_MARGIN).await
    }

    /// Waits until no node has any of those that are meant; `what` they are, for the error.
    pub(super) async fn wait(&self, what: &str, detail: serde_json::Value) -> Reply {
        let TaskWaitRequest { timeout_ms } = parsed_or_default(&self.body)?;
        let ms = timeout_ms.unwrap_or(WAIT_DEFAULT_MS).min(WAIT_MAX_MS);
        let end = Instant::now() + Duration::from_millis(ms);
        let mut for_ms = ms;
        let left = loop {
            let left = self.wait_once(for_ms).await?;
            let remaining = end.saturating_duration_since(Instant::now());
            match (left.living, for_ms) {
                // One moment at which no node had any. After a longer wait, others may have been made where none was left at first.
                (0, 0) => return lists::partial(&TaskWaited { lost: left.lost }, &left.lost_nodes),
                (0, _) => for_ms = 0,
                (living, _) if remaining.is_zero() => break living,
                _ => {
                    if left.is_silent {
                        tokio::time::sleep(LOOK_AGAIN.min(remaining)).await;
                    }
                    let remaining = end.saturating_duration_since(Instant::now());
                    for_ms = u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX);
                }
            }
        };
        let mut detail = detail;
        detail["left"] = json!(left);
        let message = format!("{left} sandboxes of {what} did not end within {ms} ms");
        Err(Failure::new(ErrorKind::DeadlineExceeded, message).detail(detail))
    }
}

/// What all nodes know of tasks, and the nodes that do not answer: of those, what was last heard.
///
/// # Errors
/// None answers, and of none anything is known.
async fn gather(
    app: &App,
    headers: &HeaderMap,
    path: &str,
    meant: &Meant,
) -> Result<(Vec<Task>, Vec<String>), Failure> {
    let mut tasks: BTreeMap<TaskId, Task> = BTreeMap::new();
    let (mut answered, mut silent, mut first) = (false, Vec::new(), None);
    for (at, node, answer) in app.nodes.ask_all::<TaskList>(path, headers).await {
        let of_node = answer.map(|list| list.tasks).or_else(|failure| {
            silent.push(node.name().to_string());
            app.nodes.records.tasks(at, app.nodes.watched.standing(at), meant).ok_or(failure)
        });
        match of_node {
            Ok(of_node) => {
                answered = true;
                for task in of_node {
                    match tasks.get_mut(&task.task_id) {
                        Some(known) => known.merge(task),
                        None => drop(tasks.insert(task.task_id.clone(), task)),
                    }
                }
            }
            Err(failure) => drop(first.get_or_insert(failure)),
        }
    }
    match first {
        Some(failure) if !answered => Err(failure),
        _ => Ok((tasks.into_values().collect(), silent)),
    }
}

/// A JSON body that may be empty.
fn parsed_or_default<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, Failure> {
    if body.trim_ascii().is_empty() { Ok(T::default()) } else { parsed(body) }
}
