//! `dsec bench qos`: what a latency-sensitive sandbox feels of busy others, which are best effort and which are not.

use std::time::{Duration, Instant};

use clap::Args;
use dsec_model::{CpuClass, SandboxId};
use dsec_proto::rest::{CreateSandboxRequest, Exec, ExecRequest, Sandbox, UpdateSandboxRequest};
use futures_util::future::try_join_all;

use super::create::succeeded;
use super::numbers::{self, Summary, ms};
use super::{Load, Report, Samples};
use crate::commands::Context;
use crate::commands::progress;
use crate::failure::Failure;
use crate::parse;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench qos
  dsec bench qos --count 20 --phase 5s --load 0.5 --json

A sandbox does a piece of work every 10 ms, and how late each is done is measured. One sandbox for each core of its node works
beside it for a share of the time: not at all, as best effort, and as latency-sensitive as itself, in turns. The image must have python3.";

/// Rounds when `--count` is not given.
const COUNT: u64 = 8;
/// What a phase's commands may take beside the phase.
const SPARE: Duration = Duration::from_secs(60);

/// Every 10 ms, so many turns of a loop: some 2 ms of a core. Prints how late each piece was done, microseconds.
const WORK: &str = "\
import sys, time
clock = time.perf_counter
def work(turns):
    x = 0
    for i in range(turns): x += i
turns = 1000
while True:
    began = clock(); work(turns); took = clock() - began
    if took >= 0.002: break
    turns = int(turns * max(1.1, min(4, 0.0022 / took)))
due, end, late = clock(), clock() + float(sys.argv[1]), []
while due < end:
    due += 0.01
    time.sleep(max(0, due - clock()))
    work(turns)
    late.append(int((clock() - due) * 1e6))
print(*late)
";
/// Works for a share of each 20 ms, as a clock on the wall has them.
const DISTURB: &str = "\
import sys, time
clock = time.perf_counter
end, share = clock() + float(sys.argv[1]), float(sys.argv[2])
while clock() < end:
    until = clock() + 0.02 * share
    while clock() < until: pass
    time.sleep(0.02 * (1 - share))
";

/// `dsec bench qos`.
#[derive(Debug, Args)]
pub(crate) struct QosBench {
    /// Image to use; it must have python3 [default: the only one there is]
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
    /// Rounds of three phases each
    #[arg(long, short = 'n', value_name = "N", default_value_t = COUNT, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    count: u64,
    /// How long a phase lasts
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = parse::duration)]
    phase: Duration,
    /// Share of each core's time that the others want
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    load: f64,
}

/// Phases by name, and of what class the others are that work in it.
const PHASES: [(&str, Option<CpuClass>); 3] = [
    ("alone", None),
    ("best_effort", Some(CpuClass::BestEffort)),
    ("unprotected", Some(CpuClass::LatencySensitive)),
];

struct Bench<'a> {
    context: &'a Context,
    args: &'a QosBench,
    worker: Sandbox,
    others: Vec<SandboxId>,
    cores: u64,
}

/// Measures.
pub(super) async fn run(context: &Context, args: QosBench) -> Result<Report, Failure> {
    if !(0.0..=1.0).contains(&args.load) {
        return Err(Failure::new(format!("--load is {}; it is a share of time, 0 to 1", args.load)));
    }
    let load = Load { image: args.image.clone(), count: Some(args.count), concurrency: 1, ..Load::default() };
    let mut request = load.request(context).await?;
    request.cpu_class = Some(CpuClass::LatencySensitive);
    request.cpu_cores_limit = Some(1.0);
    let worker = context.client.create(&request).await?;
    let mut bench = Bench { context, args: &args, worker, others: Vec::new(), cores: 1 };
    let measured = bench.measure(&request).await;
    for id in bench.others.iter().chain([&bench.worker.id]) {
        super::end(context, id).await;
    }
    let (late, used, wall) = measured?;
    let samples = Samples { good: late[1].clone(), failed: 0, first_error: None, wall };
    let mut report = Report::new("qos", &load, &samples, |late| *late);
    report.add("load", args.load);
    report.add("cores", bench.cores);
    let wall_of_kind = args.phase * u32::try_from(args.count).unwrap_or(u32::MAX);
    for (at, (name, _)) in PHASES.iter().enumerate() {
        report.add(&format!("{name}_mean_ms"), ms(mean(&late[at])));
        report.add(&format!("{name}_p99_ms"), Summary::of(late[at].iter().copied()).p99_ms);
        report.add(&format!("{name}_load"), numbers::rate(used[at] / bench.cores as f64, wall_of_kind));
    }
    for at in [1, 2] {
        report.add(&format!("{}_rise_percent", PHASES[at].0), rise(mean(&late[at]), mean(&late[0])));
    }
    Ok(report)
}

/// How late the work was done in each kind of phase, the CPU seconds of the others in it, and how long all took.
type Measured = ([Vec<Duration>; 3], [f64; 3], Duration);

impl Bench<'_> {
    async fn measure(&mut self, request: &CreateSandboxRequest) -> Result<Measured, Failure> {
        self.add_others(request).await?;
        self.rounds().await
    }

    /// Makes one for each core of its node beside the sandbox that is measured.
    async fn add_others(&mut self, request: &CreateSandboxRequest) -> Result<(), Failure> {
        let nodes = self.context.client.nodes().await?;
        let node = nodes.iter().find(|node| node.node == self.worker.node);
        self.cores = node.map_or(1, |node| (node.capacity.cpu_millis / 1000).max(1));
        for _ in 0..self.cores {
            let made = self.context.client.create(request).await?;
            let message = format!("{} went to node {} and not beside the other", made.id, made.node);
            self.others.push(made.id);
            if made.node != self.worker.node {
                return Err(Failure::new(message).hint("run it on a cluster of one node"));
            }
        }
        Ok(())
    }

    async fn rounds(&self) -> Result<Measured, Failure> {
        let (mut late, mut used) = <([Vec<Duration>; 3], [f64; 3])>::default();
        let bar =
            progress::things("measuring", self.args.count * PHASES.len() as u64, self.context.global.json);
        let start = Instant::now();
        for round in 0..self.args.count as usize {
            // Each kind is the first one, the second and the third equally often.
            for step in 0..PHASES.len() {
                let at = (round + step) % PHASES.len();
                let (of_phase, cpu) = self.phase(PHASES[at].1).await?;
                late[at].extend(of_phase);
                used[at] += cpu;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok((late, used, start.elapsed()))
    }

    async fn phase(&self, beside: Option<CpuClass>) -> Result<(Vec<Duration>, f64), Failure> {
        let Some(class) = beside else { return Ok((self.work().await?, 0.0)) };
        let update = UpdateSandboxRequest { cpu_class: Some(class), cpu_weight: None };
        try_join_all(self.others.iter().map(|id| self.context.client.update(id, &update))).await?;
        let before = self.used().await?;
        let disturb = try_join_all(self.others.iter().map(|id| self.disturb(id)));
        let (late, _) = tokio::try_join!(self.work(), disturb)?;
        Ok((late, self.used().await? - before))
    }

    async fn work(&self) -> Result<Vec<Duration>, Failure> {
        let exec = self.python(&self.worker.id, WORK, &[]).await?;
        let text = exec.stdout.unwrap_or_default();
        let late = text.split_whitespace().map(|us| us.parse().map(Duration::from_micros));
        late.collect::<Result<_, _>>().map_err(|_| Failure::new(format!("the work printed {text:?}")))
    }

    async fn disturb(&self, id: &SandboxId) -> Result<Exec, Failure> {
        self.python(id, DISTURB, &[self.args.load.to_string()]).await
    }

    async fn python(&self, id: &SandboxId, program: &str, more: &[String]) -> Result<Exec, Failure> {
        let phase = self.args.phase.as_secs_f64().to_string();
        let argv = ["python3", "-c", program, &phase].map(str::to_owned);
        let limit = self.args.phase + SPARE;
        let request = ExecRequest {
            argv: argv.into_iter().chain(more.iter().cloned()).collect(),
            wait: true,
            timeout_ms: u64::try_from(limit.as_millis()).ok(),
            ..ExecRequest::default()
        };
        let exec = self.context.client.exec(id, &request).await?;
        succeeded(&exec).map_err(|failure| match &exec.stderr {
            Some(stderr) if !stderr.is_empty() => failure.hint(stderr.trim()),
            _ => failure,
        })?;
        Ok(exec)
    }

    /// CPU seconds of the others so far.
    async fn used(&self) -> Result<f64, Failure> {
        let others = try_join_all(self.others.iter().map(|id| self.context.client.sandbox(id))).await?;
        Ok(others.iter().filter_map(|sandbox| sandbox.usage.as_ref()).map(|usage| usage.cpu_seconds).sum())
    }
}

fn mean(samples: &[Duration]) -> Duration {
    samples.iter().sum::<Duration>() / u32::try_from(samples.len().max(1)).unwrap_or(u32::MAX)
}

/// By how much one is more than the other, percent, to a hundredth.
fn rise(with: Duration, without: Duration) -> f64 {
    let without = without.as_secs_f64();
    if without > 0.0 { ((with.as_secs_f64() / without - 1.0) * 1e4).round() / 1e2 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_and_means_are_of_what_they_say() {
        let (ten, eleven) = (Duration::from_millis(10), Duration::from_millis(11));
        assert_eq!(rise(eleven, ten), 10.0);
        assert_eq!(rise(ten, Duration::ZERO), 0.0);
        assert_eq!(mean(&[ten, Duration::from_millis(12)]), eleven);
        assert_eq!(mean(&[]), Duration::ZERO);
        assert_eq!(numbers::rate(3.0 / 2.0, Duration::from_secs(3)), 0.5);
    }
}
