//! `dsec bench create`: from create to the first successful `/bin/true`, and the stop apart.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use dsec_model::SandboxId;
use dsec_proto::rest::{CreateSandboxRequest, Exec, ExecRequest, LaunchPhase, Sandbox};
use futures_util::{StreamExt, stream};
use reqwest::{Method, header};

use super::numbers::{self, Summary, ms};
use super::{Load, Report, Samples};
use crate::commands::Context;
use crate::failure::Failure;
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench create --count 100
  dsec bench create --count 2000 --concurrency 32 --json
  dsec bench create --count 500 --concurrency 16 --hold      all of them there at once, then ended
  dsec bench create --count 100 --one-call --phases

A run is POST /v1/sandboxes, then POST .../execs of /bin/true until it has ended with 0; with
--one-call the command goes with the create. The stop that follows is timed apart. The rate counts
whole cycles, stops included; with --hold creates alone.";

/// Runs when `--count` is not given.
const COUNT: u64 = 100;

/// `dsec bench create`.
#[derive(Debug, Args)]
pub(crate) struct CreateBench {
    #[command(flatten)]
    load: Load,
    /// Send the command with the create: one request and not two
    #[arg(long)]
    one_call: bool,
    /// Medians of the phases of a launch too
    #[arg(long)]
    phases: bool,
    /// Keep every sandbox until the last is there, then end them
    #[arg(long)]
    hold: bool,
}

/// One sandbox.
pub(super) struct Sample {
    /// From the request to the end of its first command.
    pub(super) create: Duration,
    stop: Option<Duration>,
    /// Its id.
    pub(super) id: SandboxId,
    phases: Vec<LaunchPhase>,
}

/// What is sent for each sandbox.
pub(super) struct Plan<'a> {
    context: &'a Context,
    create: Bytes,
    exec: Bytes,
    one_call: bool,
}

/// Measures.
pub(super) async fn run(context: &Context, args: CreateBench) -> Result<Report, Failure> {
    let plan = Plan::new(context, args.load.request(context).await?, args.one_call)?;
    let load = args.load.clone();
    // A warm-up's sandboxes must not stand beside the ones that are measured.
    let once = |counts| plan.once(args.hold && counts);
    let mut samples = load.drive(COUNT, "creating", context.global.json, once).await;
    let mut stop_wall = None;
    if args.hold {
        let start = Instant::now();
        plan.stop_all(&mut samples, load.concurrency as usize).await;
        stop_wall = Some(start.elapsed());
    }
    let mut report = Report::new("create", &load, &samples, |sample| sample.create);
    let stops = Summary::of(samples.good.iter().filter_map(|sample| sample.stop));
    report.add("cycle", if args.hold { "create+exec" } else { "create+exec+stop" });
    report.add("one_call", args.one_call);
    report.add("stop_p50_ms", stops.p50_ms);
    report.add("stop_p99_ms", stops.p99_ms);
    if let Some(wall) = stop_wall {
        let stopped = samples.good.iter().filter(|sample| sample.stop.is_some()).count();
        report.add("stop_rate_per_s", numbers::rate(stopped as f64, wall));
    }
    if args.phases {
        let records: Vec<&[LaunchPhase]> = samples.good.iter().map(|sample| &sample.phases[..]).collect();
        report.add("phases", phase_medians(&records));
    }
    Ok(report)
}

impl<'a> Plan<'a> {
    /// Of one request for a sandbox. `one_call`: its first command goes with it.
    pub(super) fn new(
        context: &'a Context,
        mut request: CreateSandboxRequest,
        one_call: bool,
    ) -> Result<Self, Failure> {
        let exec = ExecRequest { argv: vec!["/bin/true".into()], wait: true, ..ExecRequest::default() };
        let text = |value: serde_json::Result<Vec<u8>>| {
            value.map(Bytes::from).map_err(|error| Failure::new(format!("cannot write JSON: {error}")))
        };
        let exec_text = text(serde_json::to_vec(&exec))?;
        request.exec = one_call.then_some(exec);
        let create = text(serde_json::to_vec(&request))?;
        Ok(Self { context, create, exec: exec_text, one_call })
    }

    /// Makes one, has it run a command, and ends it unless it is to be held.
    pub(super) async fn once(&self, hold: bool) -> Result<Sample, Failure> {
        let start = Instant::now();
        let sandbox: Sandbox = self.post("/sandboxes", &self.create).await?;
        let ran = self.first_exec(&sandbox).await;
        let create = start.elapsed();
        if let Err(failure) = ran {
            super::end(self.context, &sandbox.id).await;
            return Err(failure);
        }
        let mut sample = Sample { create, stop: None, id: sandbox.id, phases: sandbox.launch_phases };
        if !hold {
            sample.stop = Some(self.stop(&sample.id).await?);
        }
        Ok(sample)
    }

    async fn first_exec(&self, sandbox: &Sandbox) -> Result<(), Failure> {
        if self.one_call {
            return match &sandbox.first_exec {
                Some(exec) => succeeded(exec),
                None => Err(Failure::new("the answer has no first_exec")),
            };
        }
        self.exec(&sandbox.id).await
    }

    /// One command in it, there and back.
    pub(super) async fn exec(&self, id: &SandboxId) -> Result<(), Failure> {
        succeeded(&self.post(&format!("/sandboxes/{id}/execs"), &self.exec).await?)
    }

    async fn post<T: serde::de::DeserializeOwned>(&self, path: &str, body: &Bytes) -> Result<T, Failure> {
        let request = self.context.client.request(Method::POST, path);
        let request = request.header(header::CONTENT_TYPE, "application/json").body(body.clone());
        Ok(self.context.client.json(request).await?)
    }

    async fn stop(&self, id: &SandboxId) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.context.client.stop(id, 0).await?;
        Ok(start.elapsed())
    }

    /// Ends those that were held.
    pub(super) async fn stop_all(&self, samples: &mut Samples<Sample>, at_once: usize) {
        let stops = stream::iter(samples.good.iter_mut().map(|sample| async {
            match self.stop(&sample.id).await {
                Ok(took) => sample.stop = Some(took),
                Err(failure) => render::note(&format!("dsec: {} was not ended: {failure}", sample.id)),
            }
        }));
        stops.buffer_unordered(at_once).collect::<Vec<()>>().await;
        let lost = samples.good.iter().filter(|sample| sample.stop.is_none()).count();
        samples.failed += lost as u64;
        samples.good.retain(|sample| sample.stop.is_some());
        if lost > 0 {
            samples.first_error.get_or_insert_with(|| "a sandbox could not be ended".to_owned());
        }
    }
}

/// A command that did not end with 0 is a failed run.
pub(super) fn succeeded(exec: &Exec) -> Result<(), Failure> {
    match exec.exit_code {
        Some(0) => Ok(()),
        code => Err(Failure::new(format!("{} ended with {code:?}", exec.command))),
    }
}

/// The median of each phase, in the order in which the phases first appear.
fn phase_medians(records: &[&[LaunchPhase]]) -> Vec<serde_json::Value> {
    let mut order: Vec<&str> = Vec::new();
    let mut by_name: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for phase in records.iter().copied().flatten() {
        let times = by_name.entry(&phase.name).or_default();
        if times.is_empty() {
            order.push(&phase.name);
        }
        times.push(phase.us);
    }
    let median = |name: &str| {
        let mut times = by_name.get(name).cloned().unwrap_or_default();
        times.sort_unstable();
        let p50 = numbers::percentile(&times, 50.0).unwrap_or_default();
        serde_json::json!({ "name": name, "p50_ms": ms(Duration::from_micros(p50)) })
    };
    order.into_iter().map(median).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_keep_the_order_of_the_launch() {
        let phase = |name: &str, us| LaunchPhase { name: name.into(), us };
        let first = [phase("mounts", 300), phase("agent", 900)];
        let second = [phase("mounts", 500), phase("agent", 700)];
        let third = [phase("mounts", 400)];
        let json = serde_json::to_string(&phase_medians(&[&first, &second, &third])).unwrap();
        assert_eq!(json, r#"[{"name":"mounts","p50_ms":0.4},{"name":"agent","p50_ms":0.7}]"#);
    }
}
