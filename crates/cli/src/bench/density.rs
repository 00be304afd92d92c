//! `dsec bench density`: many sandboxes that live at once, and what they cost while nobody uses them.

use std::time::{Duration, Instant};

use clap::Args;
use dsec_proto::rest::NodeStatus;
use futures_util::{StreamExt, stream};
use tokio::time::MissedTickBehavior;

use super::create::{Plan, Sample};
use super::numbers::{self, Summary};
use super::{Load, Report};
use crate::commands::Context;
use crate::failure::Failure;
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench density --count 3200 --concurrency 16
  dsec bench density --count 1000 --rate 200 --time 30s --json

All are made with their first command in the same request; then nothing is asked for as long as --time; then commands come at --rate a
second, to one sandbox after the other, whether those before have ended or not; then all are ended. Memory is what the nodes have less of
than before. The edge's CPU is given where it runs on this machine.";

/// Sandboxes when `--count` is not given.
const COUNT: u64 = 1000;
/// Between the last create and the quiet time: what is cleared up behind creates is not what idle ones cost.
const SETTLE: Duration = Duration::from_secs(3);
/// `sysconf(_SC_CLK_TCK)` of every Linux: what `/proc` counts CPU time in.
const TICKS_PER_S: f64 = 100.0;

/// `dsec bench density`.
#[derive(Debug, Args)]
pub(crate) struct DensityBench {
    #[command(flatten)]
    load: Load,
    /// Commands a second, of all sandboxes together
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// How long nothing is asked, and then how long commands come
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse::duration)]
    time: Duration,
}

/// Measures.
pub(super) async fn run(context: &Context, args: DensityBench) -> Result<Report, Failure> {
    let load = args.load.clone();
    let plan = Plan::new(context, load.request(context).await?, true)?;
    let free_before = free_mib(&context.client.nodes().await?);
    let mut samples = load.drive(COUNT, "creating", context.global.json, |counts| plan.once(counts)).await;
    let measured = measure(context, &plan, &samples.good, &args).await;
    let start = Instant::now();
    plan.stop_all(&mut samples, load.concurrency as usize).await;
    let stopped = start.elapsed();
    let found = measured?;
    let mut report = Report::new("density", &load, &samples, |sample| sample.create);
    let used_mib = free_before.saturating_sub(found.free_mib);
    report.add("burst_s", numbers::round(samples.wall.as_secs_f64()));
    report.add("memory_mib", used_mib);
    report.add("memory_each_kib", used_mib * 1024 / samples.good.len().max(1) as u64);
    report.add("edge_cpu_percent", found.edge_cpu_percent);
    report.add("exec_rate_per_s", args.rate);
    report.add("exec_failed", found.execs_failed);
    report.add("exec_p50_ms", found.execs.p50_ms);
    report.add("exec_p99_ms", found.execs.p99_ms);
    report.add("stop_s", numbers::round(stopped.as_secs_f64()));
    Ok(report)
}

struct Found {
    free_mib: u64,
    edge_cpu_percent: Option<f64>,
    execs: Summary,
    execs_failed: usize,
}

async fn measure(
    context: &Context,
    plan: &Plan<'_>,
    live: &[Sample],
    args: &DensityBench,
) -> Result<Found, Failure> {
    tokio::time::sleep(SETTLE).await;
    let nodes = context.client.nodes().await?;
    let (before, start) = (edge_ticks(&nodes), Instant::now());
    tokio::time::sleep(args.time).await;
    let (after, quiet) = (edge_ticks(&nodes), start.elapsed());
    let used = before.zip(after).map(|(before, after)| after.saturating_sub(before) as f64 / TICKS_PER_S);
    let free_mib = free_mib(&context.client.nodes().await?);
    let execs = execs(plan, live, args).await;
    let good = execs.iter().filter_map(|took| took.as_ref().ok().copied());
    if let Some(failure) = execs.iter().find_map(|took| took.as_ref().err()) {
        render::note(&format!("dsec: a command failed: {failure}"));
    }
    Ok(Found {
        free_mib,
        edge_cpu_percent: used.map(|used| numbers::rate(used * 100.0, quiet)),
        execs: Summary::of(good),
        execs_failed: execs.iter().filter(|took| took.is_err()).count(),
    })
}

/// Commands at a steady rate, however long those before take.
async fn execs(plan: &Plan<'_>, live: &[Sample], args: &DensityBench) -> Vec<Result<Duration, Failure>> {
    let mut due = tokio::time::interval(Duration::from_secs(1) / args.rate);
    due.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let count = (args.time.as_secs_f64() * f64::from(args.rate)) as usize;
    let begun = stream::unfold(due, |mut due| async {
        let at = due.tick().await;
        Some((at.into_std(), due))
    });
    // One after the other in another order than they were made in: neighbours in time are neighbours in memory.
    let step = live.len() / 2 + 1;
    let runs =
        begun.take(if live.is_empty() { 0 } else { count }).enumerate().map(|(number, at)| async move {
            plan.exec(&live[number * step % live.len()].id).await.map(|()| at.elapsed())
        });
    runs.buffer_unordered(usize::MAX).collect().await
}

/// Memory that the nodes have left, MiB.
fn free_mib(nodes: &[NodeStatus]) -> u64 {
    nodes.iter().map(|node| node.usage.memory_available_mib).sum()
}

/// CPU time of the edges so far, if all of them run on this machine.
fn edge_ticks(nodes: &[NodeStatus]) -> Option<u64> {
    nodes.iter().map(|node| ticks_of(node.pid)).sum()
}

fn ticks_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
    // Fields 14 and 15, user and system time; those after the name begin with the third.
    let mut fields = rest.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
    (name == "dsec-edge").then_some(fields.next()? + fields.next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_another_program_is_not_an_edges() {
        assert_eq!(ticks_of(std::process::id()), None);
        assert_eq!(ticks_of(u32::MAX), None);
    }
}
