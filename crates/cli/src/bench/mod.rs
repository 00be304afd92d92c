//! `dsec bench`: the platform measured from outside, through its public API, as a caller meets it.
//! Every figure comes from all samples; a failure is counted and never left out.

mod bulk;
mod create;
mod density;
mod exec;
mod numbers;
mod pause;
mod place;
mod pull;
mod qos;

use std::future::Future;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use dsec_model::SandboxId;
use dsec_proto::rest::{CreateSandboxRequest, LAYER_BASE, Sandbox};
use futures_util::{StreamExt, stream};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::Global;
use crate::client::ListQuery;
use crate::commands::create::SandboxOptions;
use crate::commands::signals::Signals;
use crate::commands::{Context, progress};
use crate::failure::{Failure, Outcome};
use crate::{parse, render};
use numbers::Summary;

/// Label of every sandbox that a benchmark makes: by it an interrupted one finds what it left.
const LABEL: &str = "dsec-bench";
/// Idle limit of a benchmark's sandboxes: whatever happens to this program, they end by themselves.
const TTL_S: u64 = 300;

/// `dsec bench ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Those that call a platform.
    #[command(flatten)]
    Platform(Box<PlatformBench>),
    /// Placement and the whole way through control, on nodes that are simulated
    #[command(after_help = place::EXAMPLES)]
    Place(place::PlaceBench),
}

/// Benchmarks that call a platform.
#[derive(Debug, Subcommand)]
pub(crate) enum PlatformBench {
    /// From create to the first successful command
    #[command(after_help = create::EXAMPLES)]
    Create(create::CreateBench),
    /// Many that live at once, and what they cost while nobody uses them
    #[command(after_help = density::EXAMPLES)]
    Density(density::DensityBench),
    /// One command in a sandbox, there and back
    #[command(after_help = exec::EXAMPLES)]
    Exec(exec::ExecBench),
    /// A command's output as it comes
    #[command(after_help = bulk::OUTPUT_EXAMPLES)]
    Output(bulk::OutputBench),
    /// A file in and out
    #[command(after_help = bulk::FILES_EXAMPLES)]
    Files(bulk::FilesBench),
    /// What a pause gives back, and how long it and the way back take
    #[command(after_help = pause::EXAMPLES)]
    Pause(pause::PauseBench),
    /// A burst of sandboxes on a node without their images' content
    #[command(after_help = pull::EXAMPLES)]
    Pull(pull::PullBench),
    /// What a latency-sensitive sandbox feels of busy others
    #[command(after_help = qos::EXAMPLES)]
    Qos(qos::QosBench),
}

/// How much of it.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Load {
    /// Image to use [default: the only one there is]
    #[arg(long, value_name = "NAME")]
    pub(crate) image: Option<String>,
    /// Runs to measure
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) count: Option<u64>,
    /// Runs under way at once
    #[arg(long, short = 'c', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub(crate) concurrency: u64,
    /// Runs before them that do not count [default: as many as are under way at once]
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<u64>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxOptions,
}

/// What one benchmark found: one line of JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    count: u64,
    concurrency: u64,
    ok: u64,
    failed: u64,
    rate_per_s: f64,
    #[serde(flatten)]
    latency: Summary,
    /// What this benchmark has on top.
    #[serde(flatten)]
    more: serde_json::Map<String, serde_json::Value>,
    #[serde(skip)]
    first_error: Option<String>,
}

/// The samples of one benchmark.
pub(crate) struct Samples<S> {
    /// Of the runs that succeeded.
    pub(crate) good: Vec<S>,
    /// How many did not.
    pub(crate) failed: u64,
    /// Why the first of them did not.
    pub(crate) first_error: Option<String>,
    /// From the first start to the last end.
    pub(crate) wall: Duration,
}

/// Runs a benchmark and prints what it found.
pub(crate) async fn bench(global: &Global, command: BenchCommand) -> Outcome {
    match command {
        BenchCommand::Platform(command) => on_platform(&Context::new(global)?, *command).await,
        BenchCommand::Place(args) => place::run(&args, global.json),
    }
}

async fn on_platform(context: &Context, command: PlatformBench) -> Outcome {
    let mut signals = Signals::new()?;
    let run = async {
        match command {
            PlatformBench::Create(args) => create::run(context, args).await,
            PlatformBench::Density(args) => density::run(context, args).await,
            PlatformBench::Exec(args) => exec::run(context, args).await,
            PlatformBench::Output(args) => bulk::output(context, args).await,
            PlatformBench::Files(args) => bulk::files(context, args).await,
            PlatformBench::Pause(args) => pause::run(context, args).await,
            PlatformBench::Pull(args) => pull::run(context, args).await,
            PlatformBench::Qos(args) => qos::run(context, args).await,
        }
    };
    let report = tokio::select! {
        report = run => report?,
        asked = signals.next() => {
            clean_up(context).await;
            return Ok(asked.exit_code());
        }
    };
    if let Some(error) = &report.first_error {
        let message = format!("{} of {} runs failed; the first: {error}", report.failed, report.count);
        render::failure(&Failure::new(message), context.global.json);
    }
    if context.global.json {
        render::json_line(&report)?
    } else {
        people(&report)?
    }
    Ok(u8::from(report.failed > 0))
}

fn people(report: &Report) -> Result<(), Failure> {
    let l = &report.latency;
    let (count, at_once) = (report.count, report.concurrency);
    render::line(&format!("{}: {count} runs, {at_once} at once, {} failed", report.bench, report.failed))?;
    render::line(&format!("  {:.1} a second", report.rate_per_s))?;
    render::line(&format!(
        "  p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms, max {:.3} ms",
        l.p50_ms, l.p90_ms, l.p99_ms, l.max_ms
    ))?;
    report.more.iter().try_for_each(|(name, value)| match value {
        serde_json::Value::Array(parts) => {
            parts.iter().try_for_each(|part| render::line(&format!("  {part}")))
        }
        value => render::line(&format!("  {name} {value}")),
    })
}

impl Report {
    /// A report of these samples; `elapsed` reads how long a run took.
    pub(crate) fn new<S>(
        bench: &'static str,
        load: &Load,
        samples: &Samples<S>,
        elapsed: impl Fn(&S) -> Duration,
    ) -> Self {
        let ok = samples.good.len() as u64;
        Self {
            bench,
            count: ok + samples.failed,
            concurrency: load.concurrency,
            ok,
            failed: samples.failed,
            rate_per_s: numbers::rate(ok as f64, samples.wall),
            latency: Summary::of(samples.good.iter().map(elapsed)),
            more: serde_json::Map::new(),
            first_error: samples.first_error.clone(),
        }
    }

    /// Adds a figure of this benchmark's own.
    pub(crate) fn add(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.more.insert(name.to_owned(), value.into());
    }
}

impl Load {
    /// The request for one sandbox, with the label that finds it again.
    pub(crate) async fn request(&self, context: &Context) -> Result<CreateSandboxRequest, Failure> {
        let image = match &self.image {
            Some(image) => image.clone(),
            None => only_image(context).await?,
        };
        let mut request = self.sandbox.clone().request(image);
        request.labels.insert(LABEL.to_owned(), std::process::id().to_string());
        request.ttl_running_stop.get_or_insert(TTL_S);
        Ok(request)
    }

    /// A sandbox for a benchmark that needs one.
    pub(crate) async fn sandbox(&self, context: &Context, disk_bytes: u64) -> Result<Sandbox, Failure> {
        let mut request = self.request(context).await?;
        let disk_mib = disk_bytes.div_ceil(parse::MIB);
        if disk_mib > 0 && request.disk_limit_mb.is_none() {
            request.disk_limit_mb = Some(disk_mib);
        }
        Ok(context.client.create(&request).await?)
    }

    /// Drives `run`, warm-up first; `run` is told whether it counts. `count`: where the command line
    /// has none.
    pub(crate) async fn drive<S, E, R>(
        &self,
        count: u64,
        what: &str,
        quiet: bool,
        run: impl Fn(bool) -> R,
    ) -> Samples<S>
    where
        R: Future<Output = Result<S, E>>,
        Failure: From<E>,
    {
        let count = self.count.unwrap_or(count);
        let warmup = self.warmup.unwrap_or(self.concurrency.min(count));
        let at_once = usize::try_from(self.concurrency).unwrap_or(usize::MAX);
        let bar = progress::things("warming up", warmup, quiet);
        collect(warmup, at_once, &bar, || run(false)).await;
        bar.finish_and_clear();
        let bar = progress::things(what, count, quiet);
        let samples = collect(count, at_once, &bar, || run(true)).await;
        bar.finish_and_clear();
        samples
    }
}

async fn collect<S, E, R>(count: u64, at_once: usize, bar: &ProgressBar, run: impl Fn() -> R) -> Samples<S>
where
    R: Future<Output = Result<S, E>>,
    Failure: From<E>,
{
    let capacity = usize::try_from(count).unwrap_or_default();
    let mut samples =
        Samples { good: Vec::with_capacity(capacity), failed: 0, first_error: None, wall: Duration::ZERO };
    let start = Instant::now();
    let mut runs = stream::iter((0..count).map(|_| run())).buffer_unordered(at_once);
    while let Some(result) = runs.next().await {
        bar.inc(1);
        match result {
            Ok(sample) => samples.good.push(sample),
            Err(error) => {
                samples.failed += 1;
                samples.first_error.get_or_insert_with(|| Failure::from(error).message);
            }
        }
    }
    samples.wall = start.elapsed();
    samples
}

async fn only_image(context: &Context) -> Result<String, Failure> {
    let mut images = context.client.layers(LAYER_BASE).await?;
    match (images.pop(), images.is_empty()) {
        (Some(image), true) => Ok(image.name),
        (None, _) => Err(Failure::new("there is no image to make sandboxes from")
            .hint("take one in with `dsec image import NAME SOURCE`")),
        (Some(_), false) => {
            Err(Failure::new("there are several images").hint("choose one with --image; see `dsec image ls`"))
        }
    }
}

/// Ends a benchmark's own sandbox.
pub(crate) async fn end(context: &Context, id: &SandboxId) {
    if let Err(error) = context.client.stop(id, 0).await {
        render::note(&format!("dsec: {id} was not ended: {error}"));
    }
}

async fn clean_up(context: &Context) {
    let labels = vec![(LABEL.to_owned(), std::process::id().to_string())];
    let query = ListQuery { states: crate::commands::ps::live_states(), labels, ..ListQuery::default() };
    match context.client.sandboxes(&query).await {
        Ok(left) => {
            stream::iter(left.iter().map(|sandbox| end(context, &sandbox.id)))
                .buffer_unordered(64)
                .collect::<Vec<()>>()
                .await;
        }
        Err(error) => render::note(&format!("dsec: what was made could not be ended: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load {
            image: None,
            count: Some(5),
            concurrency: 2,
            warmup: Some(1),
            sandbox: SandboxOptions::default(),
        }
    }

    #[tokio::test]
    async fn the_report_has_its_shape_and_counts_failures() {
        let n = std::cell::Cell::new(0);
        let samples = load()
            .drive(99, "testing", true, |_| {
                n.set(n.get() + 1);
                let fails = n.get() == 3;
                async move { if fails { Err(Failure::new("no room")) } else { Ok(Duration::from_millis(2)) } }
            })
            .await;
        assert_eq!(n.get(), 6, "one run to warm up and five that count");
        let mut report = Report::new("create", &load(), &samples, |d| *d);
        report.add("stop_p50_ms", 1.5);
        assert_eq!(report.first_error.as_deref(), Some("no room"));
        let json = serde_json::to_value(&report).unwrap();
        let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "bench",
                "concurrency",
                "count",
                "failed",
                "max_ms",
                "ok",
                "p50_ms",
                "p90_ms",
                "p99_ms",
                "rate_per_s",
                "stop_p50_ms"
            ]
        );
        assert_eq!((&json["ok"], &json["failed"], &json["count"]), (&4.into(), &1.into(), &5.into()));
        assert_eq!(json["p50_ms"], 2.0);
    }
}
