//! A cluster under a virtual clock: simulated nodes, and replicas of control whose watcher and placement are the real ones. One
//! seed gives one course of events.
//!
//! ```text
//! caller ──► replica: place ──► on its way ──► node: admission ──► on its way back ──► made
//!               ▲  ▲                │ dead, cut off, starting again      │ refused: the next node
//!               │  └── reports ─────┴────────────────────────────────────┘
//!               └───── a later attempt asks every node whether it has the key
//! ```
//!
//! What HTTP does (connecting, reading, waiting) is a delay here. The order of calls to the watcher is that of `control/src/create.rs`.

mod audit;
mod faults;

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use dsec_control::watcher::{self, Nodes, Watched};
use dsec_model::NodeId;
use dsec_model::placement::{self, Tries, Wanted};
use dsec_proto::rest::{BACKEND_CONTAINER, NodeStatus};
use fastrand::Rng;

use crate::clock::VirtualClock;
use crate::node::{Create, Made, Node, Refusal, Shape};
use crate::workload::{Load, Workload};

pub use audit::{Finding, spread};
pub use faults::{Fault, Link};

/// One way between control and a node, and what a start takes there, ms.
const HOP_MS: u64 = 1;
const START_MS: u64 = 5;
/// How long a caller waits for an answer, and until it tries again, ms.
const PATIENCE_MS: u64 = 10_000;
const AGAIN_AFTER_MS: u64 = 500;
/// Attempts of one create. With the pauses between them they last longer than it takes until a node counts as lost.
const ATTEMPTS_MAX: u32 = 240;

/// What can be switched off, to see what it is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mechanisms {
    /// A replica counts what it placed itself since the last report.
    pub overlay: bool,
    /// A later attempt asks every node for the key before it is sent anywhere.
    pub fence: bool,
    /// An edge that starts again finds its sandboxes.
    pub records: bool,
}

impl Default for Mechanisms {
    fn default() -> Self {
        Self { overlay: true, fence: true, records: true }
    }
}

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Gives the same course of events when it is the same.
    pub seed: u64,
    /// Nodes.
    pub nodes: usize,
    /// Replicas of control.
    pub replicas: usize,
    /// What each node has.
    pub shape: Shape,
    /// What works.
    pub mechanisms: Mechanisms,
}

/// One replica of control.
struct Replica {
    watched: Watched,
}

/// A create of a caller.
#[derive(Debug, Clone)]
struct Call {
    key: Arc<str>,
    task: Arc<str>,
    image: Arc<str>,
    layers: [u64; 1],
    load: Load,
    began_ms: u64,
    attempt: u32,
    /// The last attempt that came to nothing.
    failed: u32,
    replica: usize,
    tries: Tries,
    outcome: Option<Outcome>,
}

/// What a caller was told in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// This node has it, under this number.
    Made { node: usize, serial: u64 },
    /// Nothing, after all attempts.
    GaveUp,
}

/// What comes back from a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reply {
    Made(Made),
    Refused,
    /// No answer: the connection broke, or nothing came for so long that the caller stopped waiting.
    None,
}

#[derive(Debug, Clone)]
enum Event {
    /// A replica asks a node how it is.
    Ask { replica: usize, node: usize },
    /// It has the answer, or waits no longer.
    Heard { replica: usize, node: usize, asked_ms: u64, status: Option<Box<NodeStatus>> },
    /// A caller sends an attempt.
    Attempt { call: usize },
    /// A create reaches a node.
    Arrives { call: usize, attempt: u32, node: usize, sent_ms: u64 },
    /// What came of it reaches the replica.
    Returns { call: usize, attempt: u32, node: usize, sent_ms: u64, reply: Reply },
    /// Something goes wrong.
    Fault(Fault),
    /// It is over.
    Heals { node: usize },
}

struct Due {
    at_ms: u64,
    /// Of events of one moment, the one that was planned first comes first.
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at_ms, self.number).cmp(&(other.at_ms, other.number))
    }
}

/// The cluster.
pub struct Cluster {
    plan: Plan,
    clock: VirtualClock,
    now_ms: u64,
    chance: Rng,
    nodes: Vec<Node>,
    links: Vec<Link>,
    /// When what is wrong with a node is over.
    heals_ms: Vec<u64>,
    /// When the last thing that is known to go wrong is over.
    troubled_until_ms: u64,
    replicas: Vec<Replica>,
    calls: Vec<Call>,
    due: BinaryHeap<Reverse<Due>>,
    planned: u64,
    /// Calls whose earlier attempt may be on a node that was lost when a later one was placed: they may have two sandboxes.
    forsaken: BTreeSet<Arc<str>>,
    /// What happened so far, as one number.
    digest: u64,
    counts: BTreeMap<&'static str, u64>,
}

impl Cluster {
    /// All nodes up, known to every replica, and empty.
    ///
    /// # Panics
    /// Never: nodes are called `n1`, `n2` and so on, which are names.
    pub fn new(plan: Plan) -> Self {
        let mut chance = Rng::with_seed(plan.seed);
        let clock = VirtualClock::default();
        let names: Vec<NodeId> = names(plan.nodes).collect();
        let nodes = names.iter().map(|name| Node::new(name.clone(), plan.shape.clone())).collect();
        let replica =
            |seed| Replica { watched: Watched::driven(names.iter().cloned(), Box::new(clock.clone()), seed) };
        let replicas = (0..plan.replicas).map(|_| replica(chance.u64(..))).collect();
        let mut cluster = Self {
            clock,
            now_ms: 0,
            chance,
            nodes,
            links: vec![Link::Up; plan.nodes],
            heals_ms: vec![0; plan.nodes],
            troubled_until_ms: 0,
            replicas,
            calls: Vec::new(),
            due: BinaryHeap::new(),
            planned: 0,
            forsaken: BTreeSet::new(),
            digest: 0,
            counts: BTreeMap::new(),
            plan,
        };
        for replica in 0..cluster.replicas.len() {
            for node in 0..cluster.nodes.len() {
                cluster.plan_at(0, Event::Ask { replica, node });
            }
        }
        cluster.run_until(2 * HOP_MS);
        cluster
    }

    /// The moment, ms.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// How a node is reached now.
    pub fn link(&self, node: usize) -> Link {
        self.links[node]
    }

    /// How often each thing happened.
    pub fn counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.counts
    }

    /// All that happened, as one number: equal for equal seeds.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Draws that belong to this run.
    pub fn chance(&mut self) -> &mut Rng {
        &mut self.chance
    }

    /// Makes every node start with so many sandboxes that live already.
    pub fn fill(&mut self, each: u64, workload: &Workload) {
        for node in 0..self.nodes.len() {
            fill(&mut self.nodes[node], each, self.now_ms, workload, &mut self.chance);
        }
    }

    /// A job asks for all its sandboxes, so many a second, from now on.
    pub fn burst(&mut self, count: u64, a_second: u64, workload: &mut Workload) {
        let job = workload.job_of(count, &mut self.chance);
        let task: Arc<str> = format!("job-{}", self.calls.len()).into();
        for (number, image) in job.images.into_iter().enumerate() {
            let image: Arc<str> = image_name(image).into();
            let call = Call {
                key: format!("{task}/{number}").into(),
                task: Arc::clone(&task),
                layers: [placement::layer_number(&image)],
                image,
                load: workload.load(&mut self.chance),
                began_ms: self.now_ms + number as u64 * 1000 / a_second.max(1),
                attempt: 0,
                failed: 0,
                replica: 0,
                tries: Tries::default(),
                outcome: None,
            };
            let at_ms = call.began_ms;
            self.calls.push(call);
            self.plan_at(at_ms, Event::Attempt { call: self.calls.len() - 1 });
        }
    }

    /// Something goes wrong at a moment.
    pub fn fault_at(&mut self, at_ms: u64, fault: Fault) {
        self.troubled_until_ms = self.troubled_until_ms.max(at_ms + fault.lasts_ms());
        self.plan_at(at_ms, Event::Fault(fault));
    }

    /// Everything until a moment, that moment included.
    pub fn run_until(&mut self, until_ms: u64) {
        while let Some(Reverse(due)) = self.due.peek()
            && due.at_ms <= until_ms
        {
            let Some(Reverse(due)) = self.due.pop() else { break };
            self.now_ms = due.at_ms;
            self.clock.set(due.at_ms);
            self.happens(due.event);
        }
        self.now_ms = until_ms;
        self.clock.set(until_ms);
    }

    /// Until every call has its outcome.
    pub fn run_until_answered(&mut self) {
        while self.calls.iter().any(|call| call.outcome.is_none()) {
            self.run_until(self.now_ms + 1000);
        }
    }

    fn plan_at(&mut self, at_ms: u64, event: Event) {
        self.planned += 1;
        self.due.push(Reverse(Due { at_ms, number: self.planned, event }));
    }

    fn plan_after(&mut self, after_ms: u64, event: Event) {
        self.plan_at(self.now_ms + after_ms, event);
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Adds to the digest (FNV-1a over 64-bit words).
    fn note(&mut self, words: [u64; 3]) {
        for word in [self.now_ms].into_iter().chain(words) {
            self.digest = (self.digest ^ word).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Ask { replica, node } => self.ask(replica, node),
            Event::Heard { replica, node, asked_ms, status } => self.heard(replica, node, asked_ms, status),
            Event::Attempt { call } => self.attempt(call),
            Event::Arrives { call, attempt, node, sent_ms } => self.arrives(call, attempt, node, sent_ms),
            Event::Returns { call, attempt, node, sent_ms, reply } => {
                self.returns(call, attempt, node, sent_ms, reply);
            }
            Event::Fault(fault) => self.breaks(fault),
            Event::Heals { node } => self.heals(node),
        }
    }

    fn ask(&mut self, replica: usize, node: usize) {
        let asked_ms = self.now_ms;
        let patience_ms = u64::try_from(watcher::ANSWER_WITHIN.as_millis()).unwrap_or(u64::MAX);
        let (after_ms, status) = match self.links[node] {
            Link::Up => (2 * HOP_MS, true),
            Link::Slow { by_ms } if 2 * HOP_MS + by_ms < patience_ms => (2 * HOP_MS + by_ms, true),
            Link::Down | Link::Dead => (0, false),
            Link::Slow { .. } | Link::Cut => (patience_ms, false),
        };
        let status = status.then(|| Box::new(self.nodes[node].status(self.now_ms)));
        self.plan_after(after_ms, Event::Heard { replica, node, asked_ms, status });
    }

    fn heard(&mut self, replica: usize, node: usize, asked_ms: u64, status: Option<Box<NodeStatus>>) {
        self.note([1, node as u64, status.as_ref().map_or(0, |status| status.usage.running)]);
        // An answer that was on its way when the node was cut off does not come.
        let status = status.filter(|_| self.links[node].answers());
        let answer = status.map(|status| Nodes { nodes: vec![*status] });
        self.replicas[replica].watched.note(node, asked_ms, answer);
        let pause = self.replicas[replica].watched.pause();
        self.plan_after(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX), Event::Ask { replica, node });
    }

    /// A caller sends an attempt, to a replica that it happens to meet.
    fn attempt(&mut self, at: usize) {
        let replica = self.chance.usize(..self.replicas.len());
        let call = &mut self.calls[at];
        call.attempt += 1;
        (call.replica, call.tries) = (replica, Tries::default());
        if call.attempt > ATTEMPTS_MAX {
            call.outcome = Some(Outcome::GaveUp);
            self.count("gave up");
            return;
        }
        match self.found(at) {
            Found::Nowhere => self.place(at),
            Found::At(node) => {
                self.count("met the first");
                let sent_ms = self.replicas[replica].watched.placed(node);
                self.send(at, node, sent_ms);
            }
            Found::MayBe => {
                self.count("waits for a silent node");
                self.plan_after(AGAIN_AFTER_MS, Event::Attempt { call: at });
            }
        }
    }

    /// What the nodes say of an earlier attempt.
    fn found(&mut self, at: usize) -> Found {
        let Call { key, attempt, replica, .. } = self.calls[at].clone();
        if attempt == 1 || !self.plan.mechanisms.fence {
            return Found::Nowhere;
        }
        let (mut silent, mut lost) = (false, false);
        for node in 0..self.nodes.len() {
            if self.links[node].answers() {
                if self.nodes[node].fence(&key, attempt) {
                    return Found::At(node);
                }
            } else if self.replicas[replica].watched.is_lost(self.nodes[node].name()) {
                lost = true;
            } else {
                silent = true;
            }
        }
        if silent {
            return Found::MayBe;
        }
        if lost {
            self.forsaken.insert(key);
        }
        Found::Nowhere
    }

    /// Sends it to the node that placement chooses.
    fn place(&mut self, at: usize) {
        let Call { replica, layers, .. } = self.calls[at];
        let wanted = Wanted { backend: BACKEND_CONTAINER, layers: &layers, ..Wanted::default() };
        let watched = &self.replicas[replica].watched;
        match watched.place(&wanted, &mut self.calls[at].tries) {
            Some((node, sent_ms)) => {
                if !self.plan.mechanisms.overlay {
                    watched.refused(node, sent_ms);
                }
                self.send(at, node, sent_ms);
            }
            None => {
                self.count("no node took it");
                self.plan_after(AGAIN_AFTER_MS, Event::Attempt { call: at });
            }
        }
    }

    fn send(&mut self, at: usize, node: usize, sent_ms: u64) {
        let Call { attempt, replica, .. } = self.calls[at];
        self.note([2, at as u64, node as u64]);
        let arrives = Event::Arrives { call: at, attempt, node, sent_ms };
        match self.links[node] {
            Link::Up => self.plan_after(HOP_MS, arrives),
            Link::Slow { by_ms } => self.plan_after(HOP_MS + by_ms, arrives),
            Link::Cut => self.is_held_up(at, attempt, node, sent_ms),
            Link::Down | Link::Dead => {
                self.count("unreachable");
                self.replicas[replica].watched.refused(node, sent_ms);
                self.replicas[replica].watched.unreachable(node);
                self.place(at);
            }
        }
    }

    /// The way is cut: it arrives when it is not any more, as what TCP sends again does. By then its caller may have gone.
    fn is_held_up(&mut self, at: usize, attempt: u32, node: usize, sent_ms: u64) {
        self.silence(at, attempt, node, sent_ms);
        let arrives = Event::Arrives { call: at, attempt, node, sent_ms };
        self.plan_at(self.heals_ms[node] + HOP_MS, arrives);
    }

    /// Nothing comes back, and the caller stops waiting some time.
    fn silence(&mut self, at: usize, attempt: u32, node: usize, sent_ms: u64) {
        let reply = Reply::None;
        self.plan_after(PATIENCE_MS, Event::Returns { call: at, attempt, node, sent_ms, reply });
    }

    fn arrives(&mut self, at: usize, attempt: u32, node: usize, sent_ms: u64) {
        let returns = |reply| Event::Returns { call: at, attempt, node, sent_ms, reply };
        match self.links[node] {
            Link::Cut => return self.is_held_up(at, attempt, node, sent_ms),
            Link::Down | Link::Dead => return self.plan_after(0, returns(Reply::None)),
            Link::Up | Link::Slow { .. } => {}
        }
        let call = &self.calls[at];
        let create = Create {
            key: Some(Arc::clone(&call.key)),
            attempt: Some(attempt),
            task: Some(Arc::clone(&call.task)),
            image: Arc::clone(&call.image),
            load: call.load,
        };
        match self.nodes[node].create(self.now_ms, create) {
            Ok(made) => self.plan_after(START_MS + HOP_MS, returns(Reply::Made(made))),
            Err(Refusal::Short(_)) => self.plan_after(HOP_MS, returns(Reply::Refused)),
            Err(Refusal::Fenced { .. }) => {
                self.count("fenced");
                self.plan_after(HOP_MS, returns(Reply::None));
            }
        }
    }

    fn returns(&mut self, at: usize, attempt: u32, node: usize, sent_ms: u64, reply: Reply) {
        let call = &self.calls[at];
        if call.outcome.is_some() || call.attempt != attempt || call.failed == attempt {
            return;
        }
        let replica = call.replica;
        let reply = match (reply, self.links[node]) {
            (Reply::Made(_) | Reply::Refused, Link::Cut) => return self.silence(at, attempt, node, sent_ms),
            (Reply::Made(_) | Reply::Refused, Link::Down | Link::Dead) => Reply::None,
            (reply, _) => reply,
        };
        match reply {
            Reply::Made(made) => {
                self.note([3, at as u64, node as u64]);
                self.calls[at].outcome = Some(Outcome::Made { node, serial: made.serial });
                self.count("made");
            }
            Reply::Refused => {
                self.count("refused");
                self.replicas[replica].watched.refused(node, sent_ms);
                self.place(at);
            }
            Reply::None => {
                self.count("unanswered");
                self.calls[at].failed = attempt;
                self.plan_after(AGAIN_AFTER_MS, Event::Attempt { call: at });
            }
        }
    }
}

enum Found {
    /// No node has the key, and none will make an earlier attempt any more.
    Nowhere,
    /// This one has.
    At(usize),
    /// One that does not answer may have it.
    MayBe,
}

/// The names of so many nodes.
pub fn names(count: usize) -> impl Iterator<Item = NodeId> {
    (1..=count).filter_map(|number| format!("n{number}").parse().ok())
}

/// What the simulation calls an image.
pub fn image_name(number: u64) -> String {
    format!("swe-env-{number}")
}

/// Gives a node so many sandboxes that live at this moment already.
pub fn fill(node: &mut Node, count: u64, now_ms: u64, workload: &Workload, chance: &mut Rng) {
    let mut there: Vec<(Load, u64)> = (0..count).map(|_| workload.one_there(chance)).collect();
    // The oldest first, as serial numbers are.
    there.sort_by_key(|(_, age_ms)| Reverse(*age_ms));
    for (load, age_ms) in there {
        // What began before the clock did began with it, and has as much left.
        let born_ms = now_ms.saturating_sub(age_ms);
        let left_ms = load.lifetime_ms - age_ms;
        let load = Load { lifetime_ms: now_ms - born_ms + left_ms, ..load };
        // Images of their own mostly, so that a report has as many names as it may.
        let image: Arc<str> = image_name(u64::MAX - chance.u64(..u64::from(u32::MAX))).into();
        let task: Arc<str> = format!("earlier-{}", chance.u64(..64)).into();
        node.add(born_ms, Create { key: None, attempt: None, task: Some(task), image, load });
    }
}
