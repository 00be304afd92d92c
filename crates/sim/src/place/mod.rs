//! `dsec bench place`: what placement and the whole way through control take, in a cluster that is simulated. Every figure comes
//! from all samples; a failure is counted and never left out.

mod burst;
mod path;
mod placements;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;

pub use report::Report;

/// What of the cluster and of the load is given.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Simulated nodes
    #[arg(long, value_name = "N", default_value_t = 160, value_parser = clap::value_parser!(u64).range(2..=1024))]
    pub nodes: u64,
    /// Sandboxes that live on them when the measuring begins
    #[arg(long, value_name = "N", default_value_t = 380_000, value_parser = clap::value_parser!(u64).range(..=3_000_000))]
    pub live: u64,
    /// Creates a second that are sent to control
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub rate: u64,
    /// Seconds for which they are sent
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Connections that they are sent over
    #[arg(long, short = 'c', value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub concurrency: u64,
    /// Sandboxes of the job that is spread, and of the task that is paused and stopped
    #[arg(long, value_name = "N", default_value_t = 32_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub burst: u64,
    /// Replicas of control that the job is spread by
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub replicas: u64,
    /// How long a simulated node takes to start a sandbox, ms
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub start_ms: u64,
    /// How long it takes to end or pause one of a task, ms, one after the other
    #[arg(long, value_name = "MS", default_value_t = 2)]
    pub stop_ms: u64,
    /// Gives the same cluster, jobs and draws again [default: a new one, which is printed]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// The dsec-control to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    pub control: Option<PathBuf>,
}

/// Measures all of it.
///
/// # Errors
/// The sockets cannot be made, or control does not start or answers something else than it should.
pub async fn run(options: &Options, seed: u64) -> anyhow::Result<Report> {
    let program = crate::control::locate(options.control.clone())?;
    let placements = placements::measure(options, seed);
    let (with, without) = burst::measure(options, seed);
    let path = path::measure(options, seed, &program).await?;
    let mut report = Report::new(options, &path.creates);
    for (name, value) in [
        ("seed", Value::from(seed)),
        ("nodes", options.nodes.into()),
        ("live", options.live.into()),
        ("seconds", options.seconds.into()),
        ("placements_per_s", whole(placements.per_s)),
        ("placement_us", rounded(placements.placement_us)),
        ("report_us", rounded(placements.report_us)),
        ("spread", rounded(with)),
        ("spread_without_overlay", rounded(without)),
        ("creates_per_s", whole(path.creates_per_s)),
        ("control_cpu_us", rounded(path.control_cpu_us)),
        ("fanout_sandboxes", options.burst.into()),
        ("fanout_s", rounded(path.stop.as_secs_f64())),
        ("pause_s", rounded(path.pause.as_secs_f64())),
        ("direct_p50_ms", rounded(report::ms(path.direct))),
        ("through_p50_ms", rounded(report::ms(path.through))),
        ("added_p50_ms", rounded(report::ms(path.through.saturating_sub(path.direct)))),
        ("control_memory_mib", rounded(path.memory_mib)),
        ("control_memory_after_list_mib", rounded(path.memory_after_list_mib)),
    ] {
        report.add(name, value);
    }
    Ok(report)
}

/// Without decimals.
fn whole(value: f64) -> Value {
    (value.round() as u64).into()
}

/// To three decimals.
fn rounded(value: f64) -> Value {
    ((value * 1e3).round() / 1e3).into()
}

impl Options {
    /// The sandboxes of each node when the measuring begins.
    fn live_each(&self) -> u64 {
        self.live / self.nodes
    }

    fn paces(&self) -> crate::edges::Pace {
        crate::edges::Pace {
            start: Duration::from_millis(self.start_ms),
            stop: Duration::from_millis(self.stop_ms),
        }
    }

    fn count(value: u64) -> usize {
        usize::try_from(value).unwrap_or(usize::MAX)
    }
}
