//! The whole way: HTTP to the real control, key check, placement, HTTP to simulated nodes.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use dsec_proto::rest::{PAGE_MAX, SandboxList, TaskOutcome};
use fastrand::Rng;
use http::Method;
use serde_json::json;

use super::{Options, report};
use crate::caller::{Caller, Creates, Samples, Server};
use crate::cluster::{fill, image_name, names};
use crate::control::Control;
use crate::edges::Edges;
use crate::node::{Create, Node, Shape};
use crate::workload::Workload;

/// What was found.
pub(super) struct Found {
    /// Creates that were sent at their times.
    pub(super) creates: Samples,
    /// Creates a second when each connection sends as soon as it can.
    pub(super) creates_per_s: f64,
    /// Processor time of control for each of those, us.
    pub(super) control_cpu_us: f64,
    /// Until all sandboxes of a task were paused, and ended.
    pub(super) pause: Duration,
    pub(super) stop: Duration,
    /// Median of a create at a node, and through control.
    pub(super) direct: Duration,
    pub(super) through: Duration,
    /// The most that control held, MiB, before and after a list.
    pub(super) memory_mib: f64,
    pub(super) memory_after_list_mib: f64,
}

/// Creates of each kind that are compared, in turns of so many.
const COMPARED: u64 = 2000;
const TURN: u64 = 100;
/// Creates before the measuring, for each connection.
const WARM_UP: u64 = 20;
/// The task that is paused and stopped as one.
const TASK: &str = "fan-out";

/// How long a sandbox lives that is made here, seconds: a long run then fills no node.
const LIFETIME_S: u64 = 5;
/// Seconds' worth of creates that are sent as fast as it goes, and bodies that are made, at most: a long run sends them in turn.
const FAST_SECONDS_MAX: u64 = 10;
const BODIES_MAX: u64 = 100_000;

/// The body of a create.
pub(super) fn body(image: &str) -> Bytes {
    let body = json!({
        "container_image": image, "task_id": "made", "memory_limit_mb": 2048, "cpu_cores_limit": 1.0,
        "max_lifetime": LIFETIME_S, "ttl_running_stop": 300, "labels": { "run": "place" },
    });
    body.to_string().into()
}

/// Starts everything in a directory that is removed at the end, and measures.
pub(super) async fn measure(options: &Options, seed: u64, program: &Path) -> anyhow::Result<Found> {
    let mut chance = Rng::with_seed(seed);
    let mut workload = Workload::containers();
    let dir = tempfile::Builder::new().prefix("dsec-sim-").tempdir().context("no temporary directory")?;
    let edges = Edges::start(dir.path(), nodes(options, &mut workload, &mut chance), options.paces())
        .context("cannot serve the simulated nodes")?;
    let control = Control::start(program, dir.path(), &edges).await?;
    let server = Server::Control { address: control.address().to_owned(), key: control.key().to_owned() };
    let measuring = Measuring { options, control: &control, edges: &edges, server, seed };
    let found = measuring.all(&mut workload, &mut chance).await;
    control.end().await?;
    drop(edges);
    dir.close().context("cannot remove the temporary directory")?;
    found
}

/// Nodes with the sandboxes that live already, and each with its part of the task.
fn nodes(options: &Options, workload: &mut Workload, chance: &mut Rng) -> Vec<Node> {
    let now_ms = crate::edges::unix_ms();
    let mut nodes: Vec<Node> =
        names(Options::count(options.nodes)).map(|name| Node::new(name, Shape::default())).collect();
    for node in &mut nodes {
        fill(node, options.live_each(), now_ms, workload, chance);
    }
    for (number, image) in workload.job_of(options.burst, chance).images.into_iter().enumerate() {
        let mut load = workload.load(chance);
        // So that as many are there when the task is stopped.
        load.lifetime_ms = u64::from(u32::MAX);
        let (task, image) = (Some(TASK.into()), image_name(image).into());
        let at = number % nodes.len();
        nodes[at].add(now_ms, Create { key: None, attempt: None, task, image, load });
    }
    nodes
}

struct Measuring<'a> {
    options: &'a Options,
    control: &'a Control,
    edges: &'a Edges,
    server: Server,
    seed: u64,
}

impl Measuring<'_> {
    async fn all(&self, workload: &mut Workload, chance: &mut Rng) -> anyhow::Result<Found> {
        let Options { rate, seconds, concurrency, .. } = *self.options;
        let count = rate * seconds;
        let images = workload.job_of(count.min(BODIES_MAX), chance).images;
        let bodies: Vec<Bytes> = images.iter().map(|image| body(&image_name(*image))).collect();
        let warm_up = self.creates("warm-up", WARM_UP * concurrency, None);
        enough(&warm_up.run(&self.server, given(&bodies)).await?)?;
        let (direct, through) = self.compared(&bodies).await?;

        let cpu_before = self.control.cpu()?;
        let fast_count = rate * seconds.min(FAST_SECONDS_MAX);
        let fast = self.creates("fast", fast_count, None).run(&self.server, given(&bodies)).await?;
        enough(&fast)?;
        let cpu = self.control.cpu()? - cpu_before;
        let creates =
            self.creates("timed", count, Some(rate as f64)).run(&self.server, given(&bodies)).await?;

        let pause = self.whole_task("pause").await?;
        let stop = self.whole_task("stop").await?;
        let memory_mib = self.control.memory_peak_mib()?;
        self.list().await?;
        Ok(Found {
            creates,
            creates_per_s: report::rate(fast.good.len() as u64, fast.wall),
            control_cpu_us: cpu.as_secs_f64() * 1e6 / fast_count as f64,
            pause,
            stop,
            direct,
            through,
            memory_mib,
            memory_after_list_mib: self.control.memory_peak_mib()?,
        })
    }

    fn creates(&self, what: &str, count: u64, a_second: Option<f64>) -> Creates {
        let name = format!("{what}-{}", self.seed);
        Creates { name, count, concurrency: self.options.concurrency, a_second }
    }

    /// Medians of a create at a node and through control, one at a time, in turns.
    async fn compared(&self, bodies: &[Bytes]) -> anyhow::Result<(Duration, Duration)> {
        let mut times = [Vec::new(), Vec::new()];
        let nodes = self.edges.all().iter().cycle();
        for (turn, node) in (0..COMPARED / TURN).zip(nodes) {
            let servers = [Server::Node(node.socket().to_owned()), self.server.clone()];
            for (kind, server) in servers.iter().enumerate() {
                let name = format!("compared-{kind}-{turn}-{}", self.seed);
                let creates = Creates { name, count: TURN, concurrency: 1, a_second: None };
                let samples = creates.run(server, given(bodies)).await?;
                enough(&samples)?;
                // The first makes the connection's buffers.
                times[kind].extend(samples.good.into_iter().skip(1));
            }
        }
        let [direct, through] = times.map(|mut times| {
            times.sort_unstable();
            report::percentile(&times, 50.0)
        });
        Ok((direct, through))
    }

    /// Does something with all sandboxes of the task, and checks that it was done with all.
    async fn whole_task(&self, what: &str) -> anyhow::Result<Duration> {
        let mut caller = Caller::connect(&self.server).await?;
        let began = Instant::now();
        let path = format!("/v1/tasks/{TASK}/{what}");
        let answer = caller.must(Method::POST, &path, &[], Bytes::new()).await?;
        let took = began.elapsed();
        let TaskOutcome { done, failed, failures, .. } = serde_json::from_slice(&answer)?;
        if let Some(failure) = failures.first() {
            bail!("{path} failed {failed} times, the first on {}: {}", failure.node, failure.error.message);
        }
        if done != self.options.burst {
            bail!("{path} was done with {done} of {}", self.options.burst);
        }
        Ok(took)
    }

    /// The largest page of a list over all nodes.
    async fn list(&self) -> anyhow::Result<()> {
        let mut caller = Caller::connect(&self.server).await?;
        let answer =
            caller.must(Method::GET, &format!("/v1/sandboxes?limit={PAGE_MAX}"), &[], Bytes::new()).await?;
        let page: SandboxList = serde_json::from_slice(&answer)?;
        if page.sandboxes.is_empty() && self.options.live > 0 {
            bail!("a list of {} sandboxes was empty", self.options.live);
        }
        Ok(())
    }
}

/// The bodies in turn.
fn given(bodies: &[Bytes]) -> impl Fn(u64) -> Bytes + Clone + Send + 'static {
    let bodies = bodies.to_vec();
    move |number| {
        let at = usize::try_from(number).unwrap_or_default() % bodies.len().max(1);
        bodies.get(at).cloned().unwrap_or_default()
    }
}

/// Nothing may fail where a figure stands for requests that succeed.
fn enough(samples: &Samples) -> anyhow::Result<()> {
    match &samples.first_error {
        Some(error) => bail!("{} creates failed; the first: {error}", samples.failed),
        None => Ok(()),
    }
}
