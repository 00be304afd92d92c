//! `dsec stop`: one, some, or all of a kind, side by side.

use std::time::Duration;

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use futures_util::{StreamExt, stream};

use super::exec::millis;
use super::{Context, completion, progress, ps};
use crate::client::ListQuery;
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec stop sb-n1-abc
  dsec stop sb-n1-abc --grace 2s     SIGTERM first, SIGKILL two seconds later
  dsec stop --task job-42
  dsec stop --all";

/// Stops under way at once: a node ends many side by side, and each holds a connection.
const AT_ONCE: usize = 64;

/// `dsec stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// The sandboxes
    #[arg(required_unless_present_any = ["all", "task", "label"], add = ArgValueCandidates::new(completion::sandbox_ids))]
    ids: Vec<SandboxId>,
    /// Time its processes get between SIGTERM and SIGKILL
    #[arg(long, short = 'g', value_name = "DURATION", default_value = "0", value_parser = parse::duration)]
    grace: Duration,
    /// All that run
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// Those of this job
    #[arg(long, value_name = "ID", conflicts_with = "ids")]
    task: Option<String>,
    /// Those with this label. May be repeated: all of them
    #[arg(long, short = 'l', value_name = "KEY=VALUE", value_parser = parse::key_value, conflicts_with = "ids")]
    label: Vec<(String, String)>,
}

/// Ends sandboxes.
pub(crate) async fn stop(context: &Context, args: StopArgs) -> Outcome {
    let grace_ms = if args.grace.is_zero() { 0 } else { millis(args.grace) };
    let ids = if args.ids.is_empty() { chosen(context, args.task, args.label).await? } else { args.ids };
    let bar = progress::things("ending", ids.len() as u64, ids.len() < AT_ONCE);
    let (mut stopped, mut failures) = (Vec::new(), Vec::new());
    let mut stops =
        stream::iter(ids.iter().map(|id| async move { (id, context.client.stop(id, grace_ms).await) }))
            .buffer_unordered(AT_ONCE);
    while let Some((id, result)) = stops.next().await {
        bar.inc(1);
        match result {
            Ok(sandbox) => stopped.push(sandbox),
            Err(error) => failures.push((id, Failure::from(error))),
        }
    }
    bar.finish_and_clear();
    if context.global.json {
        render::json(&stopped)?;
    } else if ids.is_empty() {
        render::line("nothing to end")?;
    } else {
        stopped.iter().try_for_each(|sandbox| render::line(sandbox.id.as_str()))?;
    }
    for (id, failure) in &failures {
        let message = if failure.message.contains(id.as_str()) {
            failure.message.clone()
        } else {
            format!("{id}: {}", failure.message)
        };
        render::failure(&Failure { message, ..failure.clone() }, context.global.json);
    }
    Ok(u8::from(!failures.is_empty()))
}

async fn chosen(
    context: &Context,
    task: Option<String>,
    labels: Vec<(String, String)>,
) -> Result<Vec<SandboxId>, Failure> {
    let query = ListQuery { states: ps::live_states(), task, labels, ..ListQuery::default() };
    Ok(context.client.sandboxes(&query).await?.into_iter().map(|sandbox| sandbox.id).collect())
}
