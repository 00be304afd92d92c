//! `dsec pool`: pools of nodes, and bringing to one what it is to take over with.

use std::time::Duration;

use clap::{Args, Subcommand};
use dsec_model::PoolName;
use dsec_proto::rest::{Pool, PoolSyncEvent, PoolSyncRequest, PoolSynced};

use super::{Context, layer, progress};
use crate::failure::{Failure, Outcome};
use crate::parse;
use crate::render;

const DAY_S: u64 = 24 * 3600;

/// `dsec pool ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// List the pools: how full they are, and what they could take over
    #[command(after_help = "Examples:\n  dsec pool ls\n  dsec pool ls --json | jq '.[].synced'")]
    Ls,
    /// Bring to a pool what creates asked for most, and let it take over only what is there
    #[command(after_help = "Examples:
  dsec pool sync cloud --budget 30TiB
  dsec pool sync cloud --budget 30TiB --dry-run          what would be chosen, and what it would cover
  dsec pool sync cloud --budget 500g --since 1d --json")]
    Sync(SyncArgs),
}

/// `dsec pool sync`.
#[derive(Debug, Args)]
pub(crate) struct SyncArgs {
    /// Its name, as `dsec pool ls` shows it
    pool: PoolName,
    /// Bytes that the content may have on each of its nodes, uncompressed: less than their caches have room for
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    budget: u64,
    /// Creates of this long ago and since count, in whole days: 1 to 30 [default: 7d]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    since: Option<Duration>,
    /// Only say what would be chosen
    #[arg(long)]
    dry_run: bool,
    /// No progress
    #[arg(long, short = 'q')]
    quiet: bool,
}

/// Runs one of the commands.
pub(crate) async fn pool(context: &Context, command: PoolCommand) -> Outcome {
    match command {
        PoolCommand::Ls => {
            let pools = context.client.pools().await?;
            if context.global.json {
                render::json(&pools)?
            } else {
                table(&pools)?
            }
            Ok(0)
        }
        PoolCommand::Sync(args) => sync(context, &args).await,
    }
}

async fn sync(context: &Context, args: &SyncArgs) -> Outcome {
    let since_days = args.since.map(|since| since.as_secs().div_ceil(DAY_S));
    let request = PoolSyncRequest { budget_bytes: args.budget, since_days, dry_run: args.dry_run };
    let response = context.client.sync_pool(&args.pool, &request).await?;
    let bar = progress::bytes("bringing in", Some(0), args.quiet || context.global.json);
    let done = layer::last(context, response, "sync", |event| match event {
        PoolSyncEvent::Progress { layer, layers, layers_done, bytes, bytes_done } => {
            bar.set_message(format!("{layer} ({} of {layers})", layers_done + 1));
            bar.set_length(bytes);
            bar.set_position(bytes_done);
            None
        }
        PoolSyncEvent::Done { synced } => Some(Ok(synced)),
        PoolSyncEvent::Error { error } => Some(Err(Failure::new(error.message).hint(error.hint))),
    })
    .await;
    bar.finish_and_clear();
    let synced = done?;
    if context.global.json {
        render::json(&synced)?;
    } else {
        told(&synced)?;
    }
    Ok(u8::from(!synced.failed.is_empty()))
}

fn told(synced: &PoolSynced) -> Result<(), Failure> {
    let PoolSynced { pool, accesses, covered, covered_before, .. } = synced;
    let (bytes, budget) = (render::bytes(synced.bytes), render::bytes(synced.budget_bytes));
    let has = if synced.dry_run { "would have" } else { "has" };
    render::line(&format!("{pool} {has} {} layers, {bytes} of {budget}", synced.layers.len()))?;
    let could = if synced.dry_run { "would cover" } else { "covers" };
    let (before, after) = (share(*covered_before, *accesses), share(*covered, *accesses));
    render::line(&format!("that {could} {after} of {accesses} creates ({before} before)"))?;
    if synced.gone > 0 {
        let gone = share(synced.gone, *accesses);
        render::line(&format!("{gone} of the creates were of layers that are not there any more"))?;
    }
    if !synced.dropped.is_empty() {
        render::line(&format!("dropped: {}", synced.dropped.join(", ")))?;
    }
    for failed in &synced.failed {
        render::note(&format!("{} is not on all nodes: {}", failed.layer, failed.problem));
    }
    if !synced.away.is_empty() {
        let away = synced.away.join(", ");
        render::note(&format!(
            "nodes that do not answer have what they had: {away}; sync again when they do"
        ));
    }
    Ok(())
}

/// `70.0 %`.
fn share(part: u64, all: u64) -> String {
    if all == 0 { "-".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / all as f64) }
}

fn table(pools: &[Pool]) -> Result<(), Failure> {
    let row = |pool: &Pool| {
        let mib = |n: u64| render::bytes(n.saturating_mul(parse::MIB));
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let takes_over = pool.burst.map_or_else(
            || "-".to_owned(),
            |burst| {
                let (share, above) = (percent(burst.share), percent(burst.above));
                format!("{share} above {above} (now {})", percent(burst.home_utilisation))
            },
        );
        let synced = pool.synced.as_ref();
        vec![
            pool.name.to_string(),
            format!("{} of {}", pool.answering, pool.nodes.len()),
            percent(pool.utilisation),
            format!("{} of {}", pool.sandboxes, pool.sandboxes_max),
            format!("{} of {}", mib(pool.memory_used_mib), mib(pool.memory_mib)),
            takes_over,
            synced.map_or_else(
                || "-".to_owned(),
                |synced| format!("{} layers, {}", synced.layers, render::bytes(synced.bytes)),
            ),
            synced.map_or_else(|| "-".to_owned(), |synced| share(synced.covered, synced.accesses)),
        ]
    };
    let heading = ["POOL", "NODES", "USED", "SANDBOXES", "MEMORY", "TAKES OVER", "SYNCED", "COVERS"];
    render::table(&heading, pools.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_nothing_is_no_number() {
        assert_eq!(share(0, 0), "-");
        assert_eq!(share(7, 10), "70.0 %");
    }
}
