//! `dsec pause` and `dsec resume`.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{SandboxId, TaskId};
use dsec_proto::rest::Sandbox;
use futures_util::{StreamExt, stream};

use super::{Context, completion, task};
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const PAUSE_EXAMPLES: &str = "\
Examples:
  dsec pause sb-n1-abc
  dsec pause --task job-42     all sandboxes of a job";

pub(crate) const RESUME_EXAMPLES: &str = "\
Examples:
  dsec resume sb-n1-abc
  dsec resume --task job-42";

/// Calls under way at once: a node does many side by side, and each holds a connection.
const AT_ONCE: usize = 64;

/// Which sandboxes.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// The sandboxes
    #[arg(required_unless_present = "task", add = ArgValueCandidates::new(completion::sandbox_ids))]
    ids: Vec<SandboxId>,
    /// Those of this job
    #[arg(long, value_name = "ID", conflicts_with = "ids", add = ArgValueCandidates::new(completion::task_names))]
    task: Option<TaskId>,
}

/// Pauses or resumes them.
pub(crate) async fn set_paused(context: &Context, args: PauseArgs, paused: bool) -> Outcome {
    if let Some(of) = &args.task {
        let outcome = context.client.set_task_paused(of, paused).await?;
        if !context.global.json {
            let what = if paused { "paused" } else { "resumed" };
            render::line(&format!("{of}: {} of {} {what}", outcome.done, outcome.matched))?;
        }
        return task::told(context, &outcome);
    }
    let asked = args.ids.iter().map(|id| context.client.set_paused(id, paused));
    let mut answers = stream::iter(asked).buffered(AT_ONCE);
    let (mut done, mut failed): (Vec<Sandbox>, bool) = (Vec::new(), false);
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(sandbox) => done.push(sandbox),
            Err(error) => {
                failed = true;
                render::failure(&Failure::from(error), context.global.json);
            }
        }
    }
    if context.global.json {
        render::json(&done)?;
    } else {
        done.iter().try_for_each(|sandbox| render::line(&told(sandbox, paused)))?;
    }
    Ok(u8::from(failed))
}

fn told(sandbox: &Sandbox, paused: bool) -> String {
    let pauses = sandbox.pauses.filter(|_| paused).unwrap_or_default();
    match pauses.resident_bytes >> 20 {
        0 => sandbox.id.to_string(),
        resident => format!("{}  {} of {resident} MiB given back", sandbox.id, pauses.returned_bytes >> 20),
    }
}
