//! How many placements one core makes, reports of all nodes taken in once a second.

use std::time::Duration;

use bytes::Bytes;
use dsec_control::create::Needs;
use dsec_control::watcher::{Nodes, Watched};
use dsec_model::placement::Tries;
use fastrand::Rng;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::{Options, path};
use crate::clock::VirtualClock;
use crate::cluster::{fill, image_name, names};
use crate::node::{Create, Node, Shape};
use crate::workload::Workload;

/// What one core does.
pub(super) struct Placements {
    /// Placements in a second in which it also takes in a report of each node.
    pub(super) per_s: f64,
    /// One placement, the request's body read, us.
    pub(super) placement_us: f64,
    /// One report, from its JSON, us.
    pub(super) report_us: f64,
}

/// Virtual seconds that are placed for.
const SECONDS: u64 = 10;
const SECOND_MS: u64 = 1000;

/// A create on its way.
struct Call {
    body: Bytes,
    image: String,
    tries: Tries,
    chosen: Option<(usize, u64)>,
}

/// What control's work took.
#[derive(Default)]
struct Spent {
    time: Duration,
    times: u32,
}

impl Spent {
    /// Does something so many times over, and counts what it took of this thread's processor time: others on the machine are
    /// not counted.
    fn on(&mut self, times: usize, work: impl FnOnce()) {
        let before = cpu_time();
        work();
        self.time += cpu_time().saturating_sub(before);
        self.times += u32::try_from(times).unwrap_or(u32::MAX);
    }

    fn each_s(&self) -> f64 {
        self.time.as_secs_f64() / f64::from(self.times.max(1))
    }
}

/// Processor time of this thread so far.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// Places `rate` creates a second onto nodes with sandboxes, under a virtual clock. Control's work alone is timed: the body is
/// read for what it needs, a node is chosen, reports are parsed and taken down.
pub(super) fn measure(options: &Options, seed: u64) -> Placements {
    let mut chance = Rng::with_seed(seed);
    let mut workload = Workload::containers();
    let mut nodes: Vec<Node> =
        names(Options::count(options.nodes)).map(|name| Node::new(name, Shape::default())).collect();
    for node in &mut nodes {
        fill(node, options.live_each(), 0, &workload, &mut chance);
    }
    let clock = VirtualClock::default();
    let names = nodes.iter().map(|node| node.name().clone());
    let watched = Watched::driven(names, Box::new(clock.clone()), chance.u64(..));
    let (mut reports, mut placements) = (Spent::default(), Spent::default());
    let mut images = workload.job_of(options.rate * SECONDS, &mut chance).images.into_iter();
    for now_ms in 0..SECONDS * SECOND_MS {
        clock.set(now_ms);
        if now_ms.is_multiple_of(SECOND_MS) {
            let body = |node: &mut Node| serde_json::to_vec(&json!({ "nodes": [node.status(now_ms)] }));
            let bodies: Vec<Vec<u8>> = nodes.iter_mut().filter_map(|node| body(node).ok()).collect();
            reports.on(bodies.len(), || {
                for (at, body) in bodies.iter().enumerate() {
                    watched.note(at, now_ms, serde_json::from_slice::<Nodes>(body).ok());
                }
            });
        }
        let due = (now_ms + 1) * options.rate / SECOND_MS - now_ms * options.rate / SECOND_MS;
        let mut calls: Vec<Call> =
            images.by_ref().take(Options::count(due)).map(|image| Call::new(image_name(image))).collect();
        while !calls.is_empty() {
            placements.on(calls.len(), || calls.iter_mut().for_each(|call| call.place(&watched)));
            calls.retain(|call| {
                let Some((at, sent_ms)) = call.chosen else { return false };
                let image = call.image.as_str().into();
                let load = workload.load(&mut chance);
                let refused = nodes[at]
                    .create(now_ms, Create { key: None, attempt: None, task: None, image, load })
                    .is_err();
                if refused {
                    watched.refused(at, sent_ms);
                }
                refused
            });
        }
    }
    let left = (1.0 - options.nodes as f64 * reports.each_s()).max(0.0);
    Placements {
        per_s: left / placements.each_s(),
        placement_us: placements.each_s() * 1e6,
        report_us: reports.each_s() * 1e6,
    }
}

impl Call {
    fn new(image: String) -> Self {
        Self { body: path::body(&image), image, tries: Tries::default(), chosen: None }
    }

    /// The part that is control's.
    fn place(&mut self, watched: &Watched) {
        let needs = Needs::of(&self.body);
        self.chosen = watched.place(&needs.wanted(), &mut self.tries);
    }
}
