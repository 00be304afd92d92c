//! `dsec ps`, and choosing sandboxes by task, label and state.

use clap::{Args, ValueEnum};
use dsec_proto::rest::{Lost, Sandbox};

use super::Context;
use crate::client::ListQuery;
use crate::failure::Outcome;
use crate::parse;
use crate::render::{self, paint};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec ps
  dsec ps --all --wide
  dsec ps --task job-42 --label step=3
  dsec ps --quiet --state failed";

/// The states of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateName {
    /// Being launched
    Creating,
    /// Takes requests
    Running,
    /// Being paused
    Pausing,
    /// Stands still until somebody uses it
    Paused,
    /// Being resumed
    Resuming,
    /// Being ended
    Stopping,
    /// Ended as asked
    Stopped,
    /// Ended otherwise
    Failed,
    /// On a node that is lost
    Lost,
}

impl StateName {
    fn word(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// `dsec ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Those that have ended too
    #[arg(long, short = 'a')]
    all: bool,
    /// With this label. May be repeated: all of them
    #[arg(long, short = 'l', value_name = "KEY=VALUE", value_parser = parse::key_value)]
    label: Vec<(String, String)>,
    /// Of this job
    #[arg(long, value_name = "ID")]
    task: Option<String>,
    /// In this state. May be repeated: any of them
    #[arg(long, value_name = "STATE")]
    state: Vec<StateName>,
    /// More columns
    #[arg(long, short = 'w')]
    wide: bool,
    /// Ids alone
    #[arg(long, short = 'q')]
    quiet: bool,
}

/// States that are not final: what runs, or nearly.
pub(crate) fn live_states() -> Vec<String> {
    use StateName::{Creating, Paused, Pausing, Resuming, Running, Stopping};
    [Creating, Running, Pausing, Paused, Resuming, Stopping].map(StateName::word).to_vec()
}

/// Lists sandboxes.
pub(crate) async fn ps(context: &Context, args: PsArgs) -> Outcome {
    let states = match (args.state.is_empty(), args.all) {
        (false, _) => args.state.iter().map(|state| state.word()).collect(),
        (true, true) => Vec::new(),
        (true, false) => live_states().into_iter().chain([StateName::Lost.word()]).collect(),
    };
    let query = ListQuery { states, task: args.task, labels: args.label, usage: args.wide, content: false };
    let sandboxes = context.client.sandboxes(&query).await?;
    if context.global.json {
        render::json(&sandboxes)?;
    } else if args.quiet {
        let ids: Vec<&str> = sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect();
        if !ids.is_empty() {
            render::line(&ids.join("\n"))?;
        }
    } else {
        let colour = render::colours(&std::io::stdout());
        let now = render::now_ms();
        let rows = sandboxes.iter().map(|sandbox| row(sandbox, args.wide, colour, now)).collect();
        let mut heading = vec!["ID", "STATE", "IMAGE", "TASK", "AGE"];
        if args.wide {
            heading.extend(["IDLE", "MEMORY", "CPUS", "DISK", "PIDS", "USER", "NODE", "LABELS", "REASON"]);
        }
        render::table(&heading, rows)?;
    }
    Ok(0)
}

fn row(sandbox: &Sandbox, wide: bool, colour: bool, now: u64) -> Vec<String> {
    let mut cells = vec![
        sandbox.id.to_string(),
        paint(sandbox.state.as_str(), render::state_tone(sandbox.state), colour),
        sandbox.image.clone(),
        sandbox.task_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        render::age(sandbox.created_ms, sandbox.ended_ms.unwrap_or(now)),
    ];
    if wide {
        let usage = sandbox.usage.clone().unwrap_or_default();
        let limits = &sandbox.limits;
        let mib = |n: u64| render::bytes(n.saturating_mul(parse::MIB));
        cells.extend([
            render::age(sandbox.last_active_ms, sandbox.ended_ms.unwrap_or(now)),
            format!("{} / {}", render::bytes(usage.memory_bytes), mib(limits.memory_limit_mb)),
            limits.cpu_cores_limit.to_string(),
            format!("{} / {}", render::bytes(usage.disk_bytes), mib(limits.disk_limit_mb)),
            format!("{} / {}", usage.pids, limits.pids_limit),
            sandbox.init_user.clone(),
            sandbox.node.clone(),
            sandbox.labels.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","),
            reason(sandbox),
        ]);
    }
    cells
}

/// What a lost sandbox was, in a few words.
fn told(lost: &Lost) -> String {
    let (state, age) = (lost.last_state.as_str(), render::age(lost.heard_ms, render::now_ms()));
    format!("was {state} when its node was last heard of, {age} ago")
}

/// Why a sandbox ended, in a few words.
pub(crate) fn reason(sandbox: &Sandbox) -> String {
    use dsec_model::EndReason;
    match &sandbox.reason {
        None => sandbox.lost.map(|lost| told(&lost)).unwrap_or_default(),
        Some(EndReason::Asked) => "asked".to_owned(),
        Some(EndReason::Idle) => "idle".to_owned(),
        Some(EndReason::Lifetime) => "lifetime over".to_owned(),
        Some(EndReason::SocketMemory { message }) => format!("socket memory: {message}"),
        Some(EndReason::NodeDown) => "the platform went down".to_owned(),
        Some(EndReason::Drained) => "the node was drained".to_owned(),
        Some(EndReason::LaunchFailed { message }) => format!("launch failed: {message}"),
        Some(EndReason::AgentLost { message }) => format!("agent lost: {message}"),
        Some(EndReason::PausedTooLong) => "paused for too long".to_owned(),
        Some(EndReason::Rebooted) => "the machine was restarted".to_owned(),
    }
}
