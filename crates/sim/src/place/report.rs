//! What was found: one line of JSON with the fields of the other benchmarks, or lines for people.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use super::Options;
use crate::caller::Samples;

/// What was found.
#[derive(Debug, Serialize)]
pub struct Report {
    bench: &'static str,
    count: u64,
    concurrency: u64,
    ok: u64,
    failed: u64,
    rate_per_s: f64,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// What this benchmark has on top.
    #[serde(flatten)]
    more: Map<String, Value>,
    #[serde(skip)]
    first_error: Option<String>,
}

impl Report {
    /// Of the creates that were sent at their times.
    pub(super) fn new(options: &Options, samples: &Samples) -> Self {
        let mut sorted = samples.good.clone();
        sorted.sort_unstable();
        let at = |q| ms(percentile(&sorted, q));
        let ok = sorted.len() as u64;
        Self {
            bench: "place",
            count: ok + samples.failed,
            concurrency: options.concurrency,
            ok,
            failed: samples.failed,
            rate_per_s: rate(ok, samples.wall),
            p50_ms: at(50.0),
            p90_ms: at(90.0),
            p99_ms: at(99.0),
            max_ms: at(100.0),
            more: Map::new(),
            first_error: samples.first_error.clone(),
        }
    }

    /// Adds a figure of this benchmark's own.
    pub(super) fn add(&mut self, name: &str, value: Value) {
        self.more.insert(name.to_owned(), value);
    }

    /// How many creates failed.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Why the first of them did.
    pub fn first_error(&self) -> Option<&str> {
        self.first_error.as_deref()
    }

    /// Lines for people.
    pub fn lines(&self) -> Vec<String> {
        let figure = |name: &str| self.more.get(name).map(Value::to_string).unwrap_or_default();
        let row = |what: &str, found: String, aim: &str| format!("{what:<58} {found:>14}   {aim}");
        let f = |name, unit: &str| format!("{}{unit}", figure(name));
        vec![
            format!(
                "simulated: {} nodes, {} sandboxes; seed {}",
                figure("nodes"),
                figure("live"),
                figure("seed")
            ),
            row("", "found".to_owned(), "aim, of two cores"),
            row("placements a second, one core, reports taken in too", f("placements_per_s", ""), "100000"),
            row("spread of a job, fullest node over the mean", f("spread", ""), "1.10 at most"),
            row("  without counting what was just sent", f("spread_without_overlay", ""), "far more"),
            row("creates a second through control, as fast as it can", f("creates_per_s", ""), "5000"),
            row("  processor time of control for each", f("control_cpu_us", " us"), ""),
            row("creates a second, sent at their times", format!("{:.0}", self.rate_per_s), ""),
            row(
                "  p50, p90, p99, max",
                format!("{:.2} {:.2} {:.2} {:.2} ms", self.p50_ms, self.p90_ms, self.p99_ms, self.max_ms),
                "",
            ),
            row("  failed", self.failed.to_string(), "0"),
            row("latency that control adds to a create, p50", f("added_p50_ms", " ms"), "1 ms"),
            row(
                &format!("stop of a task of {} sandboxes", figure("fanout_sandboxes")),
                f("fanout_s", " s"),
                "5 s",
            ),
            row("pause of the same", f("pause_s", " s"), "5 s"),
            row("control's memory at its most", f("control_memory_mib", " MiB"), "1024 MiB"),
            row(
                "  after the largest page of a list over all nodes",
                f("control_memory_after_list_mib", " MiB"),
                "1024 MiB",
            ),
        ]
    }
}

/// The smallest sample that at least `q` of 100 samples do not exceed (nearest rank); zero when there are none.
pub(super) fn percentile(sorted: &[Duration], q: f64) -> Duration {
    let rank = (q / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// Milliseconds, to the microsecond.
pub(super) fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// So many in so long, a second, to three decimals.
pub(super) fn rate(count: u64, wall: Duration) -> f64 {
    let seconds = wall.as_secs_f64();
    if seconds > 0.0 { (count as f64 / seconds * 1e3).round() / 1e3 } else { 0.0 }
}
