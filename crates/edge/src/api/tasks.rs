//! What concerns all sandboxes of a task on this node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use dsec_model::State::Running;
use dsec_model::{EndReason, ErrorKind, TaskId};
use dsec_proto::rest::{
    ApiError, GRACE_MAX_MS, Sandbox, StopRequest, Task, TaskFailure, TaskList, TaskOutcome, TaskWaitRequest,
    WAIT_DEFAULT_MS, WAIT_MAX_MS,
};
use futures_util::future::join_all;
use serde::Deserialize;
use serde_json::json;

use super::{Answer, Caller, Failure, OptionalJson, Params, PathOf, Shared, json as answer};
use crate::error::invalid_field;
use crate::node::Node;
use crate::pending::Meant;
use crate::sandbox::Handle;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParams {
    task_id: Option<String>,
}

/// All tasks, or the one that is asked for.
pub(super) async fn list(State(node): Shared, caller: Caller, Params(asked): Params<ListParams>) -> Answer {
    let asked = asked.task_id.as_deref().map(parse).transpose()?;
    let mut tasks: BTreeMap<TaskId, Task> = BTreeMap::new();
    for handle in node.registry.all() {
        let record = handle.record();
        let Some(task_id) = &record.task_id else { continue };
        if asked.as_ref().is_some_and(|asked| asked != task_id) || !caller.sees.has(&record.project) {
            continue;
        }
        let new = || Task::new(task_id.clone(), record.created_ms);
        let task = tasks.entry(task_id.clone()).or_insert_with(new);
        task.count(&record.node, &record.project, record.state, record.created_ms);
    }
    Ok(answer(StatusCode::OK, &TaskList { tasks: tasks.into_values().collect() }))
}

pub(super) async fn stop(
    State(node): Shared,
    caller: Caller,
    PathOf(task): PathOf<String>,
    OptionalJson(request): OptionalJson<StopRequest>,
) -> Answer {
    stop_meant(&node, &of_task(caller, &task)?, &request).await
}

/// Stops all that the caller may stop.
pub(super) async fn stop_all(
    State(node): Shared,
    caller: Caller,
    OptionalJson(request): OptionalJson<StopRequest>,
) -> Answer {
    stop_meant(&node, &Meant { task: None, scope: caller.may }, &request).await
}

async fn stop_meant(node: &Node, meant: &Meant, request: &StopRequest) -> Answer {
    // Those that are being made make nothing any more.
    let pending = node.pending.stop(meant);
    let grace_ms = request.grace_ms.min(GRACE_MAX_MS);
    let stop = move |handle: Arc<Handle>| async move { handle.stop(EndReason::Asked, grace_ms).await };
    let outcome = with_each(node, living(node, meant), stop).await;
    let outcome = TaskOutcome { matched: outcome.matched + pending, done: outcome.done + pending, ..outcome };
    Ok(answer(StatusCode::OK, &outcome))
}

/// Does something with each sandbox, side by side, and adds up what became of it. A caller that hangs up ends the waiting and not what
/// was begun.
async fn with_each<F>(node: &Node, handles: Vec<Arc<Handle>>, act: impl Fn(Arc<Handle>) -> F) -> TaskOutcome
where
    F: Future<Output = Result<Arc<Sandbox>, ApiError>> + Send + 'static,
{
    let begun: Vec<_> = handles.iter().map(|handle| tokio::spawn(act(Arc::clone(handle)))).collect();
    let mut outcome = TaskOutcome { matched: handles.len() as u64, ..TaskOutcome::default() };
    for (handle, ended) in handles.iter().zip(join_all(begun).await) {
        let broken = |_| Err(ApiError::new(ErrorKind::Internal, "the call met a defect in the edge"));
        match ended.unwrap_or_else(broken) {
            Ok(_) => outcome.done += 1,
            Err(error) => outcome.fail(TaskFailure {
                node: node.config.node.to_string(),
                sandbox_id: Some(handle.id.clone()),
                error: *error.0,
            }),
        }
    }
    outcome
}

pub(super) async fn wait(
    State(node): Shared,
    caller: Caller,
    PathOf(task): PathOf<String>,
    OptionalJson(request): OptionalJson<TaskWaitRequest>,
) -> Answer {
    wait_meant(&node, &of_task(caller, &task)?, &request).await
}

/// Waits for all that the caller sees.
pub(super) async fn wait_all(
    State(node): Shared,
    caller: Caller,
    OptionalJson(request): OptionalJson<TaskWaitRequest>,
) -> Answer {
    wait_meant(&node, &Meant { task: None, scope: caller.may }, &request).await
}

async fn wait_meant(node: &Node, meant: &Meant, request: &TaskWaitRequest) -> Answer {
    let ms = request.timeout_ms.unwrap_or(WAIT_DEFAULT_MS).min(WAIT_MAX_MS);
    let all_ended = async {
        loop {
            node.pending.none_of(meant).await;
            let living = living(node, meant);
            if living.is_empty() && !node.pending.has(meant) {
                return;
            }
            // Others may be created meanwhile, so it is looked again.
            join_all(living.iter().map(|handle| handle.wait_for(|_| false))).await;
        }
    };
    if tokio::time::timeout(Duration::from_millis(ms), all_ended).await.is_ok() {
        return Ok(answer(StatusCode::OK, &json!({})));
    }
    let left = living(node, meant).len().max(usize::from(node.pending.has(meant)));
    let what = match &meant.task {
        Some(task) => format!("sandboxes of task {task}"),
        None => "sandboxes".to_owned(),
    };
    Err(Failure(
        ApiError::new(ErrorKind::DeadlineExceeded, format!("{left} {what} did not end within {ms} ms"))
            .detail(json!({ "task_id": meant.task, "left": left })),
    ))
}

pub(super) async fn pause(State(node): Shared, caller: Caller, PathOf(task): PathOf<String>) -> Answer {
    pause_meant(&node, &of_task(caller, &task)?).await
}

/// Pauses all that the caller may pause.
pub(super) async fn pause_all(State(node): Shared, caller: Caller) -> Answer {
    pause_meant(&node, &Meant { task: None, scope: caller.may }).await
}

async fn pause_meant(node: &Node, meant: &Meant) -> Answer {
    let mut handles = living(node, meant);
    handles.retain(|handle| handle.state().is_usable());
    let outcome = with_each(node, handles, |handle| async move { handle.pause().await }).await;
    Ok(answer(StatusCode::OK, &outcome))
}

pub(super) async fn resume(State(node): Shared, caller: Caller, PathOf(task): PathOf<String>) -> Answer {
    resume_meant(&node, &of_task(caller, &task)?).await
}

/// Resumes all that the caller may resume.
pub(super) async fn resume_all(State(node): Shared, caller: Caller) -> Answer {
    resume_meant(&node, &Meant { task: None, scope: caller.may }).await
}

async fn resume_meant(node: &Node, meant: &Meant) -> Answer {
    let mut handles = living(node, meant);
    handles.retain(|handle| handle.state().is_usable() && handle.state() != Running);
    let outcome = with_each(node, handles, |handle| async move { handle.resume().await }).await;
    Ok(answer(StatusCode::OK, &outcome))
}

/// A task's name, parsed.
pub(super) fn parse(task: &str) -> Result<TaskId, ApiError> {
    task.parse().map_err(|e: dsec_model::IdError| invalid_field("task_id", e.to_string()))
}

fn of_task(caller: Caller, task: &str) -> Result<Meant, ApiError> {
    Ok(Meant { task: Some(parse(task)?), scope: caller.may })
}

fn living(node: &Node, meant: &Meant) -> Vec<Arc<Handle>> {
    let mut living = node.registry.living();
    living.retain(|handle| {
        let record = handle.record();
        meant.has(record.task_id.as_ref(), &record.project)
    });
    living
}
