//! `dsec bench pull`: a burst of sandboxes on images whose content is not on the node, and what that moved.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use dsec_proto::rest::{CreateSandboxRequest, ExecRequest, LAYER_BASE, LayerOnNode, NodeUsage, PrefetchWhat};
use tokio::sync::OnceCell;

use super::numbers::round;
use super::{Load, Report, end};
use crate::commands::Context;
use crate::commands::create::SandboxOptions;
use crate::commands::layer::bring;
use crate::failure::Failure;
use crate::parse::MIB;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench pull --mode ondemand django flask pandas --count 200 --concurrency 16
  dsec bench pull --mode traced debian --work 'python3 -c \"import asyncio, json\"' --json

Sandboxes are spread over the images in turn. A run is a create, --work, a stop. The modes:
  local     all content is brought to the node first, and that time does not count
  ondemand  content comes as it is read; the images have no traces yet
  traced    the same, and what earlier runs read first comes ahead
  full      an image is brought in whole before its first sandbox starts, and that time counts

But for `local` the node must be cold: bench/pull starts one for each mode, with a slow store behind it.";

/// Runs when `--count` is not given.
const COUNT: u64 = 200;
/// Of an image's content, what may be on a node that is called cold: one part in so many.
const COLD_PART: u64 = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Everything is there
    Local,
    /// As it is read
    Ondemand,
    /// Ahead of the reads
    Traced,
    /// Whole images first
    Full,
}

/// `dsec bench pull`.
#[derive(Debug, Args)]
pub(crate) struct PullBench {
    /// Images to use
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// How content comes to the node
    #[arg(long, value_enum)]
    mode: Mode,
    /// What each sandbox does, a shell line
    #[arg(long, value_name = "LINE", default_value = "true")]
    work: String,
    /// Sandboxes
    #[arg(long, short = 'n', value_name = "N", default_value_t = COUNT, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    count: u64,
    /// Sandboxes under way at once
    #[arg(long, short = 'c', value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    concurrency: u64,
    #[command(flatten)]
    sandbox: SandboxOptions,
}

struct Target {
    name: String,
    request: CreateSandboxRequest,
    /// Set when all of its content is on the node.
    whole: OnceCell<()>,
}

/// Measures.
pub(super) async fn run(context: &Context, args: PullBench) -> Result<Report, Failure> {
    let load = Load {
        image: None,
        count: Some(args.count),
        concurrency: args.concurrency,
        warmup: Some(0),
        sandbox: args.sandbox.clone(),
    };
    let mut targets = Vec::with_capacity(args.images.len());
    for name in &args.images {
        let of_image = Load { image: Some(name.clone()), ..load.clone() };
        let request = of_image.request(context).await?;
        targets.push(Target { name: name.clone(), request, whole: OnceCell::new() });
    }
    for target in &targets {
        match args.mode {
            Mode::Local => target.bring(context).await?,
            mode => target.check_cold(context, mode).await?,
        }
    }
    let before = Moved::now(context).await?;
    let next = std::cell::Cell::new(0);
    let once = |_| {
        let target = &targets[next.get() % targets.len()];
        next.set(next.get() + 1);
        one(context, target, &args)
    };
    let samples = load.drive(args.count, "running", context.global.json, once).await;
    let after = Moved::now(context).await?;
    let mut report = Report::new("pull", &load, &samples, |took| *took);
    report.add("mode", args.mode.to_possible_value().map(|mode| mode.get_name().to_owned()));
    report.add("images", targets.len());
    report.add("wall_s", round(samples.wall.as_secs_f64()));
    report.add("asked_mib", mib(after.asked.saturating_sub(before.asked)));
    report.add("fetched_mib", mib(after.fetched.saturating_sub(before.fetched)));
    report.add("disk_written_mib", mib(after.written.saturating_sub(before.written)));
    Ok(report)
}

async fn one(context: &Context, target: &Target, args: &PullBench) -> Result<Duration, Failure> {
    let start = Instant::now();
    if args.mode == Mode::Full {
        target.whole.get_or_try_init(|| target.bring(context)).await?;
    }
    let sandbox = context.client.create(&target.request).await?;
    let work = ExecRequest { shell: Some(args.work.clone()), wait: true, ..ExecRequest::default() };
    let done = context.client.exec(&sandbox.id, &work).await;
    let took = start.elapsed();
    end(context, &sandbox.id).await;
    let done = done?;
    if done.exit_code == Some(0) {
        return Ok(took);
    }
    let said = done.stderr.unwrap_or_default();
    Err(Failure::new(format!("--work ended with {:?}: {}", done.exit_code, said.trim_end())))
}

impl Target {
    /// Brings all of its content to the nodes.
    async fn bring(&self, context: &Context) -> Result<(), Failure> {
        bring(context, LAYER_BASE, &self.name, PrefetchWhat::All, |_, _| ()).await.map(drop)
    }

    /// Refuses a node or a store on which the mode would measure something else.
    async fn check_cold(&self, context: &Context, mode: Mode) -> Result<(), Failure> {
        let name = &self.name;
        let image = context.client.layer(LAYER_BASE, name).await?;
        for LayerOnNode { node, content, .. } in image.nodes {
            let content = content.unwrap_or_default();
            if content.here_bytes > content.size_bytes / COLD_PART {
                let (here, all) = (content.here_bytes / MIB, content.size_bytes / MIB);
                let message = format!("{here} of {all} MiB of {name} are on {node} already");
                return Err(Failure::new(message).hint("start a node with an empty cache; bench/pull does"));
            }
        }
        let trace = context.client.layer_trace(LAYER_BASE, name).await?;
        let runs = trace.blobs.iter().map(|blob| blob.runs).max().unwrap_or_default();
        match (mode, runs) {
            (Mode::Traced, 0) => Err(Failure::new(format!("{name} has no trace yet"))
                .hint("run it once on demand, and give its sandboxes 20 seconds to be recorded")),
            (Mode::Ondemand, 1..) => Err(Failure::new(format!("{name} has a trace of {runs} runs"))
                .hint("that is --mode traced; without one it needs a store in which it never ran")),
            _ => Ok(()),
        }
    }
}

/// What the nodes have moved so far, bytes.
struct Moved {
    asked: u64,
    fetched: u64,
    written: u64,
}

impl Moved {
    async fn now(context: &Context) -> Result<Self, Failure> {
        let nodes = context.client.nodes().await?;
        let sum = |of: fn(&NodeUsage) -> u64| nodes.iter().map(|node| of(&node.usage)).sum();
        Ok(Self {
            asked: sum(|usage| usage.content.asked_bytes),
            fetched: sum(|usage| usage.content.fetched_bytes),
            written: sum(|usage| usage.content_cache_bytes),
        })
    }
}

fn mib(bytes: u64) -> f64 {
    round(bytes as f64 / MIB as f64)
}
