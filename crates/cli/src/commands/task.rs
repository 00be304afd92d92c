//! `dsec task`: all sandboxes of a job as one.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{ErrorKind, TaskId};
use dsec_proto::rest::{Task, TaskOutcome, TaskWaited};

use super::exec::millis;
use super::{Context, completion, progress};
use crate::client::ClientError;
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

/// How long one request waits for a task to end; it is asked again and again.
const WAIT_EACH: Duration = Duration::from_secs(10);

/// `dsec task ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum TaskCommand {
    /// List the tasks that have sandboxes, or had some within the hour
    #[command(after_help = "Examples:\n  dsec task ls\n  dsec task ls --json | jq '.[].sandboxes'")]
    Ls,
    /// Show how many sandboxes a task has, by state and node
    #[command(after_help = "Examples:\n  dsec task inspect job-42")]
    Inspect(TaskArgs),
    /// End all sandboxes of tasks
    #[command(after_help = "Examples:\n  dsec task stop job-42\n  dsec task stop job-42 job-43 --grace 2s")]
    Stop(StopArgs),
    /// Wait until no sandbox of a task lives
    #[command(after_help = "Examples:\n  dsec task wait job-42\n  dsec task wait job-42 --timeout 1h")]
    Wait(TaskArgs),
}

/// Which task.
#[derive(Debug, Args)]
pub(crate) struct TaskArgs {
    /// Its name, as `--task` of a create gave it
    #[arg(add = ArgValueCandidates::new(completion::task_names))]
    task: TaskId,
}

/// `dsec task stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Their names
    #[arg(required = true, add = ArgValueCandidates::new(completion::task_names))]
    tasks: Vec<TaskId>,
    /// Time their processes get between SIGTERM and SIGKILL
    #[arg(long, short = 'g', value_name = "DURATION", default_value = "0", value_parser = parse::duration)]
    grace: Duration,
}

/// Runs one of the commands.
pub(crate) async fn task(context: &Context, command: TaskCommand) -> Outcome {
    match command {
        TaskCommand::Ls => {
            let tasks = context.client.tasks().await?;
            if context.global.json {
                render::json(&tasks)?
            } else {
                table(&tasks)?
            }
            Ok(0)
        }
        TaskCommand::Inspect(TaskArgs { task }) => {
            render::json(&context.client.task(&task).await?)?;
            Ok(0)
        }
        TaskCommand::Stop(args) => stop(context, args).await,
        TaskCommand::Wait(TaskArgs { task }) => wait(context, &task).await,
    }
}

fn table(tasks: &[Task]) -> Result<(), Failure> {
    let now = render::now_ms();
    let row = |task: &Task| {
        let counts = &task.sandboxes;
        vec![
            task.task_id.to_string(),
            format!("{} (+{} -{})", counts.running, counts.creating, counts.stopping),
            counts.stopped.to_string(),
            counts.failed.to_string(),
            counts.lost.to_string(),
            task.nodes.len().to_string(),
            render::age(task.first_created_ms, now),
        ]
    };
    let heading = ["TASK", "SANDBOXES", "STOPPED", "FAILED", "LOST", "NODES", "AGE"];
    render::table(&heading, tasks.iter().map(row).collect())
}

async fn stop(context: &Context, args: StopArgs) -> Outcome {
    let grace_ms = if args.grace.is_zero() { 0 } else { millis(args.grace) };
    let mut all = TaskOutcome::default();
    for task in &args.tasks {
        let outcome = context.client.stop_task(task, grace_ms).await?;
        if !context.global.json {
            render::line(&format!("{task}: {} of {} ended", outcome.done, outcome.matched))?;
        }
        all.merge(outcome);
    }
    told(context, &all)
}

/// Says what failed, and ends with whether anything did.
pub(super) fn told(context: &Context, all: &TaskOutcome) -> Outcome {
    for failure in &all.failures {
        let about = failure.sandbox_id.as_ref().map_or_else(|| failure.node.clone(), ToString::to_string);
        let told =
            Failure::new(format!("{about}: {}", failure.error.message)).hint(failure.error.hint.clone());
        render::failure(&told, context.global.json);
    }
    if context.global.json {
        render::json(all)?;
    }
    Ok(u8::from(all.failed > 0))
}

async fn wait(context: &Context, task: &TaskId) -> Outcome {
    let ask = async |each| context.client.wait_task(task, each).await;
    let TaskWaited { lost } = wait_for(context, task.as_str(), ask).await?;
    if context.global.json {
        render::json(&serde_json::json!({ "task_id": task, "lost": lost }))?
    }
    Ok(0)
}

/// Waits for sandboxes to end, a request after the other, for as long as `--timeout` says. Says how many are lost.
pub(super) async fn wait_for(
    context: &Context,
    what: &str,
    ask: impl AsyncFn(Duration) -> Result<TaskWaited, ClientError>,
) -> Result<TaskWaited, Failure> {
    let until = context.global.timeout.map(|limit| Instant::now() + limit);
    let spinner = progress::spinner(&format!("waiting for {what}"), context.global.json);
    let ended = loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let each = left.map_or(WAIT_EACH, |left| left.min(WAIT_EACH));
        match ask(each).await {
            Err(ClientError::Api(error))
                if error.kind() == ErrorKind::DeadlineExceeded && left.is_none_or(|left| left > each) => {}
            result => break result,
        }
    };
    spinner.finish_and_clear();
    let waited = ended?;
    if waited.lost > 0 {
        render::note(&format!(
            "warning: {} sandboxes are lost with their nodes, and may be back: `dsec ps --state lost`",
            waited.lost
        ));
    }
    Ok(waited)
}
