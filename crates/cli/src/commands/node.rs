//! `dsec node`: the machines that sandboxes run on, and whether they take more.

use std::time::Duration;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;
use dsec_proto::rest::{CordonRequest, DrainRequest, FeatureState, NodeStatus, SchedulingState};
use serde::Serialize;

use super::create::seconds;
use super::{Context, completion, progress};
use crate::failure::{Failure, Outcome};
use crate::parse;
use crate::render::{self, Tone, paint};

/// How often a drain that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// `dsec node ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes
    #[command(after_help = "Examples:\n  dsec node ls\n  dsec node ls --json | jq '.[].labels'")]
    Ls,
    /// Show all that a node says of itself
    #[command(after_help = "Examples:\n  dsec node inspect n1")]
    Inspect(NodeArgs),
    /// Keep new sandboxes away from a node; those it has stay
    #[command(after_help = "Examples:\n  dsec node cordon n1 --reason 'a disk is replaced'")]
    Cordon(CordonArgs),
    /// Let a node take sandboxes again
    #[command(after_help = "Examples:\n  dsec node uncordon n1")]
    Uncordon(NodeArgs),
    /// Keep new sandboxes away from a node and wait until it has none
    #[command(after_help = "Examples:
  dsec node drain n1                      wait until all have ended by themselves
  dsec node drain n1 --stop-after 30m     stop those that are left after half an hour
  dsec node drain n1 --detach             do not wait
  dsec node drain n1 && systemctl stop dsec")]
    Drain(DrainArgs),
}

/// Which node.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// Its name
    #[arg(add = ArgValueCandidates::new(completion::node_names))]
    node: String,
}

/// `dsec node cordon`.
#[derive(Debug, Args)]
pub(crate) struct CordonArgs {
    /// Its name
    #[arg(add = ArgValueCandidates::new(completion::node_names))]
    node: String,
    /// Why, for those who wonder later
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
}

/// `dsec node drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Its name
    #[arg(add = ArgValueCandidates::new(completion::node_names))]
    node: String,
    /// Why, for those who wonder later
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    /// Stop what is left after this long [default: never]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    stop_after: Option<Duration>,
    /// Do not wait until the node has no sandbox
    #[arg(long, short = 'd')]
    detach: bool,
    /// No progress
    #[arg(long, short = 'q')]
    quiet: bool,
}

/// Runs one of the commands.
pub(crate) async fn node(context: &Context, command: NodeCommand) -> Outcome {
    match command {
        NodeCommand::Ls => {
            let nodes = context.client.nodes().await?;
            if context.global.json { render::json(&nodes)? } else { table(&nodes)? }
        }
        NodeCommand::Inspect(NodeArgs { node }) => render::json(&context.client.node(&node).await?)?,
        NodeCommand::Cordon(CordonArgs { node, reason }) => {
            told(context, &schedule(context, &node, "cordon", &CordonRequest { reason }).await?)?;
        }
        NodeCommand::Uncordon(NodeArgs { node }) => {
            told(context, &schedule(context, &node, "uncordon", &()).await?)?;
        }
        NodeCommand::Drain(args) => return drain(context, args).await,
    }
    Ok(0)
}

async fn schedule(
    context: &Context,
    node: &str,
    what: &str,
    request: &impl Serialize,
) -> Result<NodeStatus, Failure> {
    Ok(context.client.schedule_node(node, what, request).await?)
}

async fn drain(context: &Context, args: DrainArgs) -> Outcome {
    let DrainArgs { node, reason, stop_after, detach, quiet } = args;
    let request = DrainRequest { reason, stop_after: stop_after.map(seconds) };
    let mut status = schedule(context, &node, "drain", &request).await?;
    let at_first = status.usage.sandboxes();
    let bar = progress::things(&format!("draining {node}"), at_first, quiet || detach);
    while !detach && status.usage.sandboxes() > 0 {
        tokio::time::sleep(LOOK_EVERY).await;
        status = match context.client.node(&node).await {
            Ok(status) => status,
            // Its edge may be restarted meanwhile; what was said holds.
            Err(error) if error.passes() => continue,
            Err(error) => return Err(error.into()),
        };
        if status.scheduling.state != SchedulingState::Draining {
            bar.finish_and_clear();
            return Err(Failure::new(format!("node {node} is not draining any more: somebody else said so")));
        }
        bar.set_position(at_first.saturating_sub(status.usage.sandboxes()));
    }
    bar.finish_and_clear();
    told(context, &status)?;
    Ok(0)
}

fn told(context: &Context, status: &NodeStatus) -> Result<(), Failure> {
    if context.global.json {
        return render::json(status);
    }
    let (node, left) = (&status.node, status.usage.sandboxes());
    render::line(&match status.scheduling.state {
        SchedulingState::Open => format!("{node} takes sandboxes"),
        SchedulingState::Cordoned => format!("{node} takes no new sandboxes; it has {left}"),
        SchedulingState::Draining if left == 0 => format!("{node} is drained"),
        SchedulingState::Draining => format!("{node} is draining; it has {left} sandboxes"),
    })
}

/// The nodes, one a row.
pub(super) fn table(nodes: &[NodeStatus]) -> Result<(), Failure> {
    let (now, colour) = (render::now_ms(), render::colours(&std::io::stdout()));
    let row = |node: &NodeStatus| {
        let (usage, all) = (&node.usage, &node.capacity);
        let mib = |n: u64| render::bytes(n.saturating_mul(parse::MIB));
        let lacking = |state| node.features.iter().filter(|feature| feature.state == state).count();
        vec![
            node.node.clone(),
            match node.scheduling.state {
                SchedulingState::Open => "open".to_owned(),
                SchedulingState::Cordoned => paint("cordoned", Tone::Bad, colour),
                SchedulingState::Draining if node.usage.sandboxes() == 0 => {
                    paint("drained", Tone::Bad, colour)
                }
                SchedulingState::Draining => paint("draining", Tone::Bad, colour),
            },
            node.pool.to_string(),
            node.version.clone(),
            render::age(node.started_ms, now),
            format!("{} (+{} -{})", usage.running, usage.creating, usage.stopping),
            format!("{} of {} free", mib(usage.memory_available_mib), mib(all.memory_mib)),
            format!("{}", all.cpu_millis as f64 / 1000.0),
            format!("{} free", mib(usage.disk_free_mib)),
            node.backends.join(","),
            match (lacking(FeatureState::Missing), lacking(FeatureState::Degraded)) {
                (0, 0) => "all".to_owned(),
                (missing, degraded) => format!("{missing} missing, {degraded} degraded"),
            },
        ]
    };
    let heading = [
        "NODE",
        "STATE",
        "POOL",
        "VERSION",
        "UP",
        "SANDBOXES",
        "MEMORY",
        "CORES",
        "DISK",
        "BACKENDS",
        "FEATURES",
    ];
    render::table(&heading, nodes.iter().map(row).collect())
}
