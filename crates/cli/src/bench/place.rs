//! `dsec bench place`: control's own code against a cluster of simulated nodes, which `dsec-sim` has.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;

use crate::failure::{Failure, Outcome};
use crate::up::locate;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench place
  dsec bench place --nodes 160 --live 380000 --rate 5000 --json
  dsec bench place --nodes 20 --live 2000 --rate 200 --burst 1000 --seed 7

It needs no platform: it makes nodes that answer as edges do and have no sandboxes, one Unix socket each,
and starts a dsec-control of its own in front of them, in a temporary directory that it removes.
  placements_per_s         what one core places in a second in which it also takes in a report of each node
  spread                   the fullest node over the mean, after a job that is asked for within one second
  spread_without_overlay   the same without counting what was sent since the last report
  creates_per_s            through control as fast as the connections can; nodes and caller share the machine
  rate_per_s, p50_ms ...   creates that are sent at their times, --rate a second
  added_p50_ms             a create through control less one at a node
  fanout_s, pause_s        until a task of --burst sandboxes has ended, or is paused
  control_memory_mib       the most that dsec-control held";

/// `dsec bench place`.
#[derive(Debug, Args)]
pub(crate) struct PlaceBench {
    /// Simulated nodes [default: 160]
    #[arg(long, value_name = "N")]
    nodes: Option<u64>,
    /// Sandboxes that live on them when the measuring begins [default: 380000]
    #[arg(long, value_name = "N")]
    live: Option<u64>,
    /// Creates a second that are sent to control [default: 5000]
    #[arg(long, value_name = "N")]
    rate: Option<u64>,
    /// Seconds for which they are sent [default: 10]
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Connections that they are sent over [default: 64]
    #[arg(long, short = 'c', value_name = "N")]
    concurrency: Option<u64>,
    /// Sandboxes of the job that is spread, and of the task that is paused and stopped [default: 32000]
    #[arg(long, value_name = "N")]
    burst: Option<u64>,
    /// Replicas of control that the job is spread by [default: 3]
    #[arg(long, value_name = "N")]
    replicas: Option<u64>,
    /// How long a simulated node takes to start a sandbox, ms [default: 0]
    #[arg(long, value_name = "MS")]
    start_ms: Option<u64>,
    /// How long it takes to end or pause one of a task, ms, one after the other [default: 2]
    #[arg(long, value_name = "MS")]
    stop_ms: Option<u64>,
    /// Gives the same cluster, jobs and draws again [default: a new one, which is printed]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// Becomes `dsec-sim`: what ends this program then ends the measuring.
pub(super) fn run(args: &PlaceBench, json: bool) -> Outcome {
    let sim = locate::program(locate::SIM)?;
    let mut command = Command::new(&sim);
    command.arg("place").arg("--control").arg(locate::program(locate::CONTROL)?).args(args.words());
    if json {
        command.arg("--json");
    }
    Err(Failure::io(format!("cannot start {}", sim.display()), &command.exec()))
}

impl PlaceBench {
    fn words(&self) -> impl Iterator<Item = OsString> {
        [
            ("--nodes", self.nodes),
            ("--live", self.live),
            ("--rate", self.rate),
            ("--seconds", self.seconds),
            ("--concurrency", self.concurrency),
            ("--burst", self.burst),
            ("--replicas", self.replicas),
            ("--start-ms", self.start_ms),
            ("--stop-ms", self.stop_ms),
            ("--seed", self.seed),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some([name.into(), value?.to_string().into()]))
        .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: PlaceBench,
    }

    #[test]
    fn what_is_given_is_passed_on_and_nothing_else() {
        let words = |line: &[&str]| Line::try_parse_from(line).unwrap().args.words().collect::<Vec<_>>();
        assert_eq!(words(&["place"]), [""; 0]);
        let all = [
            "place",
            "--nodes",
            "1",
            "--live",
            "2",
            "--rate",
            "3",
            "--seconds",
            "4",
            "--concurrency",
            "5",
            "--burst",
            "6",
            "--replicas",
            "7",
            "--start-ms",
            "8",
            "--stop-ms",
            "9",
            "--seed",
            "10",
        ];
        assert_eq!(words(&all), all[1..]);
    }
}
