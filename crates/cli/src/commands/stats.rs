//! `dsec stats`: what sandboxes use, once or again and again.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use dsec_proto::rest::{Sandbox, SandboxLayer, Usage};
use serde::Serialize;

use super::{Context, completion};
use crate::client::ListQuery;
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec stats
  dsec stats sb-n1-abc --watch
  dsec stats --watch --json       one line of JSON every two seconds

ASKED / FETCHED: bytes of its layers that the kernel asked for and that came from the layer store, since the
node's fill worker began, for all sandboxes with these layers. Content that is whole on the node is not counted.";

/// Time between two rounds of `--watch`.
const ROUND: Duration = Duration::from_secs(2);

/// `dsec stats`.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// The sandboxes; all that run when left out
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    ids: Vec<SandboxId>,
    /// Again every two seconds, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    id: SandboxId,
    state: &'static str,
    /// Cores in use since the round before. Missing in the first round.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_cores: Option<f64>,
    memory_limit_bytes: u64,
    disk_limit_bytes: u64,
    pids_limit: u64,
    #[serde(flatten)]
    usage: Usage,
    /// Each of its layers, with what of its content is on the node and what was done for it there, for all who use it.
    layers: Vec<SandboxLayer>,
}

/// Shows what sandboxes use.
pub(crate) async fn stats(context: &Context, args: StatsArgs) -> Outcome {
    let mut before: HashMap<SandboxId, (Instant, f64)> = HashMap::new();
    loop {
        let sandboxes = read(context, &args.ids).await?;
        let now = Instant::now();
        let lines: Vec<Line> = sandboxes.into_iter().map(|s| line(s, now, &mut before)).collect();
        show(&lines, args.watch, context.global.json)?;
        if !args.watch {
            return Ok(0);
        }
        tokio::time::sleep(ROUND).await;
    }
}

async fn read(context: &Context, ids: &[SandboxId]) -> Result<Vec<Sandbox>, Failure> {
    if ids.is_empty() {
        let query = ListQuery {
            states: vec!["running".to_owned()],
            usage: true,
            content: true,
            ..ListQuery::default()
        };
        return Ok(context.client.sandboxes(&query).await?);
    }
    let mut all = Vec::with_capacity(ids.len());
    for id in ids {
        all.push(context.client.sandbox_with_content(id).await?);
    }
    Ok(all)
}

fn line(sandbox: Sandbox, now: Instant, before: &mut HashMap<SandboxId, (Instant, f64)>) -> Line {
    let usage = sandbox.usage.unwrap_or_default();
    let cpu_cores = before.insert(sandbox.id.clone(), (now, usage.cpu_seconds)).and_then(|(then, used)| {
        let seconds = now.duration_since(then).as_secs_f64();
        (seconds > 0.0).then(|| (usage.cpu_seconds - used).max(0.0) / seconds)
    });
    Line {
        id: sandbox.id,
        state: sandbox.state.as_str(),
        cpu_cores,
        memory_limit_bytes: sandbox.limits.memory_limit_mb.saturating_mul(parse::MIB),
        disk_limit_bytes: sandbox.limits.disk_limit_mb.saturating_mul(parse::MIB),
        pids_limit: sandbox.limits.pids_limit,
        usage,
        layers: sandbox.layers,
    }
}

/// Bytes of its layers that the kernel asked for, and bytes that came from the store for them.
fn content(layers: &[SandboxLayer]) -> String {
    let counts = || layers.iter().filter_map(|layer| layer.content.as_ref()).map(|content| content.counts);
    let (asked, fetched) =
        (counts().map(|counts| counts.asked_bytes).sum(), counts().map(|counts| counts.fetched_bytes).sum());
    format!("{} / {}", render::bytes(asked), render::bytes(fetched))
}

fn show(lines: &[Line], watch: bool, json: bool) -> Result<(), Failure> {
    if json {
        return if watch { render::json_line(&lines) } else { render::json(&lines) };
    }
    if watch && std::io::stdout().is_terminal() {
        // Home, and clear what was there.
        render::emit("\x1b[H\x1b[J")?;
    }
    let rows = lines.iter().map(|line| {
        let usage = &line.usage;
        vec![
            line.id.to_string(),
            line.cpu_cores.map_or_else(|| "-".to_owned(), |cores| format!("{cores:.2}")),
            format!("{:.1}s", usage.cpu_seconds),
            format!("{} / {}", render::bytes(usage.memory_bytes), render::bytes(line.memory_limit_bytes)),
            render::bytes(usage.memory_peak_bytes),
            format!("{} / {}", render::bytes(usage.disk_bytes), render::bytes(line.disk_limit_bytes)),
            format!("{} / {}", usage.pids, line.pids_limit),
            render::bytes(usage.bytes_in),
            render::bytes(usage.bytes_out),
            usage.oom_kills.to_string(),
            content(&line.layers),
        ]
    });
    let heading =
        ["ID", "CORES", "CPU TIME", "MEMORY", "PEAK", "DISK", "PIDS", "IN", "OUT", "OOM", "ASKED / FETCHED"];
    render::table(&heading, rows.collect())
}
