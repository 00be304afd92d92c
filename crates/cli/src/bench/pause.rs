//! `dsec bench pause`: what a pause gives back and how long it and the way back take.

use std::time::{Duration, Instant};

use clap::Args;
use dsec_model::SandboxId;
use dsec_proto::rest::{ExecRequest, Pauses};

use super::create::Plan;
use super::numbers::{Summary, round};
use super::{Load, Report};
use crate::client::{Frame, Offsets};
use crate::commands::Context;
use crate::failure::Failure;
use crate::parse::{self, MIB};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench pause
  dsec bench pause --fill 1g --count 5 --json
  dsec bench pause --fill 0        processes alone

A run makes a sandbox, has a process of it fill memory with random bytes, pauses the sandbox, and runs /bin/true in it, which resumes it. The
image must have python3 unless --fill is 0. Memory is given back only where the node has swap (`[swap]` of edge.toml).";

/// Runs when `--count` is not given.
const COUNT: u64 = 10;
/// What a sandbox may use beside the memory that is filled.
const SPARE_MIB: u64 = 256;

/// Fills so many MiB, says so, and waits.
const FILL: &str = "\
import os, sys, time
held = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]
print('full', flush=True)
time.sleep(1e6)
";

/// `dsec bench pause`.
#[derive(Debug, Args)]
pub(crate) struct PauseBench {
    #[command(flatten)]
    load: Load,
    /// Memory that a process of each sandbox fills
    #[arg(long, value_name = "SIZE", default_value = "256m", value_parser = parse::size)]
    fill: u64,
}

struct Sample {
    pause: Duration,
    resume: Duration,
    pauses: Pauses,
}

/// Measures.
pub(super) async fn run(context: &Context, args: PauseBench) -> Result<Report, Failure> {
    let load = args.load;
    let fill_mib = args.fill / MIB;
    let mut request = load.request(context).await?;
    request.memory_limit_mb.get_or_insert(fill_mib + SPARE_MIB);
    let plan = Plan::new(context, request, true)?;
    let once = |_| async {
        let made = plan.once(true).await?;
        let sample = one(context, &plan, &made.id, fill_mib).await;
        super::end(context, &made.id).await;
        sample
    };
    let samples = load.drive(COUNT, "pausing", context.global.json, once).await;
    let mut report = Report::new("pause", &load, &samples, |sample| sample.pause);
    let (pauses, resumes) = (
        Summary::of(samples.good.iter().map(|sample| sample.pause)),
        Summary::of(samples.good.iter().map(|sample| sample.resume)),
    );
    let sum = |of: fn(&Pauses) -> u64| samples.good.iter().map(|sample| of(&sample.pauses)).sum::<u64>();
    let (resident, returned) = (sum(|pauses| pauses.resident_bytes), sum(|pauses| pauses.returned_bytes));
    let each = samples.good.len().max(1) as u64;
    report.add("pause_p50_ms", pauses.p50_ms);
    report.add("pause_p99_ms", pauses.p99_ms);
    report.add("resume_p50_ms", resumes.p50_ms);
    report.add("resume_p99_ms", resumes.p99_ms);
    report.add("memory_mib", resident / each / MIB);
    report.add("returned_mib", returned / each / MIB);
    report.add("returned_ratio", if resident > 0 { round(returned as f64 / resident as f64) } else { 0.0 });
    Ok(report)
}

async fn one(context: &Context, plan: &Plan<'_>, id: &SandboxId, fill_mib: u64) -> Result<Sample, Failure> {
    if fill_mib > 0 {
        fill(context, id, fill_mib).await?;
    }
    let start = Instant::now();
    let paused = context.client.set_paused(id, true).await?;
    let pause = start.elapsed();
    let start = Instant::now();
    plan.exec(id).await?;
    let resume = start.elapsed();
    Ok(Sample { pause, resume, pauses: paused.pauses.unwrap_or_default() })
}

/// Returns when the memory is full.
async fn fill(context: &Context, id: &SandboxId, mib: u64) -> Result<(), Failure> {
    let argv = ["python3", "-c", FILL, &mib.to_string()].map(str::to_owned).to_vec();
    let exec = context.client.exec(id, &ExecRequest { argv, ..ExecRequest::default() }).await?;
    let attach = context.client.attach(id, &exec.id, Offsets::default()).await?;
    let (mut reader, _writer) = attach.split();
    match reader.next().await? {
        Frame::Stdout(_) => Ok(()),
        Frame::Stderr(text) => {
            Err(Failure::new("memory was not filled").hint(String::from_utf8_lossy(&text).trim()))
        }
        _ => Err(Failure::new("memory was not filled").hint("the image must have python3")),
    }
}
