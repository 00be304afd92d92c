//! `dsec fleet`: other programs and configurations for the nodes, some at a time.
//!
//! ```text
//! release ─ a directory or a tar of programs, its name and its archive
//! change  ─ what is done to one node: sent, tried, looked at, kept or gone back from
//! rollout ─ the nodes in batches, until too many have failed
//! ```

mod change;
mod release;
mod rollout;
mod status;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;
use dsec_proto::rest::{NodeStatus, TryConfigRequest};

use super::signals::Signals;
use super::{Context, completion};
use crate::failure::{Failure, Outcome};
use crate::parse;
use crate::render;
use change::{OnNodes, Wanted};
use release::Release;
use rollout::{Batch, Report, Rollout};

/// `dsec fleet ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Show what the nodes run
    #[command(
        after_help = "Examples:\n  dsec fleet status\n  dsec fleet status --json | jq '.[] | {node, running}'"
    )]
    Status,
    /// Have nodes run other programs, some at a time; sandboxes run on
    #[command(after_help = "Examples:
  dsec fleet upgrade ./dsec-0.2.0                 a directory with dsec-edge, dsec-fill and dsec-aether
  dsec fleet upgrade dsec-0.2.0.tar --batch 1     one node after the other
  dsec fleet upgrade ./dsec-0.2.0 --label rack=7 --dry-run
  dsec fleet upgrade ./dsec-0.1.0                 an older release is one like any other

Each node tries the release and is looked at; one that is not well is back on its own before at once, and no more are begun.
Nodes that have the release are passed over, so that what was interrupted can be called again.")]
    Upgrade(UpgradeArgs),
    /// Have nodes run the programs of before again
    #[command(
        after_help = "Examples:\n  dsec fleet rollback --nodes n1,n2\n  dsec fleet rollback --batch 50%"
    )]
    Rollback(RollbackArgs),
    /// Change the configuration of nodes, some at a time; sandboxes run on
    #[command(after_help = "Examples:
  echo 'max_sandboxes = 500' > change.toml; dsec fleet config change.toml
  dsec fleet config change.toml --unset admission.cpu_overcommit --label rack=7

The file has keys of edge.toml, which are set; all else stays, comments too. Every node looks at it before any is changed.")]
    Config(ConfigArgs),
}

/// Which nodes, and how many at a time.
#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// These nodes [default: all]
    #[arg(long, value_name = "NODE,...", value_delimiter = ',', add = ArgValueCandidates::new(completion::node_names))]
    nodes: Vec<String>,
    /// Nodes with this label (may be repeated: with all of them)
    #[arg(long = "label", value_name = "K=V", value_parser = parse::key_value)]
    labels: Vec<(String, String)>,
    /// Nodes at a time: a number, or a share of all such as 25%
    #[arg(long, value_name = "N|P%", default_value = "10%")]
    batch: Batch,
    /// Nodes that may fail; one more, and no further batch is begun
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_failures: usize,
    /// How long a node may take until it is well
    #[arg(long, value_name = "DURATION", value_parser = parse::duration, default_value = "60s")]
    health_timeout: Duration,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
}

/// `dsec fleet upgrade`.
#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// Directory, or tar, with dsec-edge, dsec-fill and dsec-aether
    #[arg(value_name = "DIR|TAR")]
    release: PathBuf,
    #[command(flatten)]
    how: HowArgs,
}

/// `dsec fleet rollback`.
#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    how: HowArgs,
}

/// `dsec fleet config`.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// TOML with the keys to set
    #[arg(value_name = "FILE", required_unless_present = "unset")]
    file: Option<PathBuf>,
    /// Remove a key, such as labels.rack (may be repeated)
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    #[command(flatten)]
    how: HowArgs,
}

/// Runs one of the commands.
pub(crate) async fn fleet(context: &Context, command: FleetCommand) -> Outcome {
    match command {
        FleetCommand::Status => status::status(context).await,
        FleetCommand::Upgrade(UpgradeArgs { release, how }) => {
            let release = Release::read(&release)?;
            let name = release.name.to_string();
            roll_out(context, how, Wanted::Release(release), &name).await
        }
        FleetCommand::Rollback(RollbackArgs { how }) => {
            roll_out(context, how, Wanted::Previous, "the programs of before").await
        }
        FleetCommand::Config(ConfigArgs { file, unset, how }) => {
            let set = match file {
                Some(file) => std::fs::read_to_string(&file)
                    .map_err(|error| Failure::io(format!("cannot read {}", file.display()), &error))?,
                None => String::new(),
            };
            let request = TryConfigRequest { set, unset, ..TryConfigRequest::default() };
            roll_out(context, how, Wanted::Config(request), "the configuration").await
        }
    }
}

async fn roll_out(context: &Context, how: HowArgs, wanted: Wanted, what: &str) -> Outcome {
    let nodes = chosen(context.client.nodes().await?, &how)?;
    let change = OnNodes::new(context.client.clone(), wanted, how.health_timeout);
    let json = context.global.json;
    let tell = |line: &str| if json { Ok(()) } else { render::line(line) };
    let rollout = Rollout { batch: how.batch, max_failures: how.max_failures, dry_run: how.dry_run };
    let report = rollout.run(&change, nodes, &mut Signals::new()?, tell).await?;
    if json {
        render::json(&report)?;
    }
    ended(&report, what, json)
}

/// The last word: a report that is not all good is a failure.
fn ended(report: &Report, what: &str, json: bool) -> Outcome {
    if let Some(failure) = report.failure(what) {
        return if json { Ok(1) } else { Err(failure) };
    }
    if !json {
        render::line(&report.summary(what))?;
    }
    Ok(0)
}

/// The nodes that are meant, by name.
fn chosen(all: Vec<NodeStatus>, how: &HowArgs) -> Result<Vec<String>, Failure> {
    if let Some(missing) = how.nodes.iter().find(|name| !all.iter().any(|node| node.node == **name)) {
        return Err(
            Failure::usage(format!("no node {missing} answers")).hint("`dsec node ls` lists those that do")
        );
    }
    let has_labels =
        |node: &NodeStatus| how.labels.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    let is_named = |node: &NodeStatus| how.nodes.is_empty() || how.nodes.contains(&node.node);
    let mut nodes: Vec<String> =
        all.into_iter().filter(|node| is_named(node) && has_labels(node)).map(|node| node.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.is_empty() {
        return Err(
            Failure::usage("no node that answers is meant").hint("`dsec node ls --json` shows their labels")
        );
    }
    Ok(nodes)
}
