//! `dsec-sim`: control against simulated nodes. See the library for what is simulated and what is not.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use dsec_model::ErrorKind;
use dsec_proto::rest::ApiError;
use dsec_sim::cluster::{Cluster, Fault, Mechanisms, Plan, spread};
use dsec_sim::node::Shape;
use dsec_sim::place;
use dsec_sim::workload::Workload;
use tokio::signal::unix::{SignalKind, signal};

/// Control's own code against nodes that are simulated.
#[derive(Debug, Parser)]
#[command(name = "dsec-sim", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure placement, and the whole way through dsec-control, on a simulated cluster
    Place {
        #[command(flatten)]
        options: place::Options,
        /// Write JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Run jobs while nodes die, are cut off, slow, refuse or start again, and check what must hold
    Faults(FaultArgs),
}

#[derive(Debug, Args)]
struct FaultArgs {
    /// Simulated nodes
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=1024))]
    nodes: u64,
    /// Replicas of control
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=64))]
    replicas: u64,
    /// Sandboxes of each job
    #[arg(long, value_name = "N", default_value_t = 3000)]
    burst: u64,
    /// Courses of events, each of a seed of its own
    #[arg(long, value_name = "N", default_value_t = 10)]
    rounds: u64,
    /// The first one's seed; the others count on from it [default: a new one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// Seeds below this are numbers that JSON's readers keep exact.
const SEED_MAX: u64 = 1 << 53;
/// Faults of a course of events, and the time over which they happen, ms.
const FAULTS: u64 = 12;
const FAULTS_WITHIN_MS: u64 = 30_000;
/// Creates a second of a job: it lasts as long as the faults at the usual size.
const A_SECOND: u64 = 100;

fn main() -> ExitCode {
    let (done, json) = match Cli::parse().command {
        Command::Place { options, json } => (placed(&options, json), json),
        Command::Faults(args) => (faults(&args), false),
    };
    done.unwrap_or_else(|error| {
        failed(&format!("{error:#}"), json);
        ExitCode::FAILURE
    })
}

/// Tells of a failure, in the API's shape for a program.
fn failed(message: &str, json: bool) {
    if json {
        let body = ApiError::new(ErrorKind::Internal, message).0;
        note(&serde_json::to_string(&*body).unwrap_or_default());
    } else {
        note(&format!("dsec-sim: {message}"));
    }
}

fn placed(options: &place::Options, json: bool) -> anyhow::Result<ExitCode> {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(measured(options, json))
}

async fn measured(options: &place::Options, json: bool) -> anyhow::Result<ExitCode> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..SEED_MAX));
    if !json {
        // Before anything can go wrong.
        note(&format!("seed {seed}"));
    }
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let report = tokio::select! {
        report = place::run(options, seed) => report.with_context(|| format!("with seed {seed}"))?,
        // What was made goes with the future: sockets, control, their directory.
        _ = term.recv() => return Ok(ExitCode::from(128 + 15)),
        _ = int.recv() => return Ok(ExitCode::from(128 + 2)),
    };
    if json {
        say(&serde_json::to_string(&report)?)?;
    } else {
        report.lines().iter().try_for_each(|line| say(line.trim_end()))?;
    }
    if let Some(error) = report.first_error() {
        failed(&format!("{} creates failed; the first: {error}", report.failed()), json);
    }
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn faults(args: &FaultArgs) -> anyhow::Result<ExitCode> {
    let first = args.seed.unwrap_or_else(|| fastrand::u64(..SEED_MAX));
    let mut code = ExitCode::SUCCESS;
    for seed in first..first + args.rounds {
        let count = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let (nodes, replicas) = (count(args.nodes), count(args.replicas));
        let mechanisms = Mechanisms::default();
        let mut cluster = Cluster::new(Plan { seed, nodes, replicas, shape: Shape::default(), mechanisms });
        let begun_ms = cluster.now_ms();
        for _ in 0..FAULTS {
            let at_ms = begun_ms + cluster.chance().u64(..FAULTS_WITHIN_MS);
            let fault = Fault::draw(nodes, cluster.chance());
            cluster.fault_at(at_ms, fault);
        }
        cluster.burst(args.burst, A_SECOND, &mut Workload::containers());
        let findings = cluster.settle();
        say(&format!(
            "seed {seed}: {} s, spread {:.3}, {:?}",
            cluster.now_ms() / 1000,
            spread(cluster.nodes()),
            cluster.counts()
        ))?;
        for finding in &findings {
            say(&format!("  {finding}"))?;
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Each node is a socket, and each of control's connections to it another.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        note(&format!("dsec-sim: the limit of open files cannot be raised: {error}"));
    }
}

fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to stdout")
}

/// A note beside the result; that it cannot be written is no reason to fail.
fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
