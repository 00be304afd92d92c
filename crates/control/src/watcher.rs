//! What the nodes say of themselves, as this server last heard it, and what it sent there since.
//!
//! Each node is asked by a task of its own, so that a slow one delays no other. Nothing is kept: after a start all is known
//! again when every node has answered, or has not answered, once.

mod overflow;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_model::placement::{self, Expected, Health, Refusals, Report, Tries, Wanted};
use dsec_model::{ErrorKind, NodeId, State};
use dsec_proto::rest::{
    Arrived, Charged, FeatureState, Lost, NodeHealth, NodeStatus, Sandbox, SandboxLimits, SchedulingState,
};
use http::HeaderMap;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;

use crate::behalf::Behalf;
use crate::failure::Failure;
use crate::nodes::Node;
pub use overflow::PoolView;

/// How often a node is asked.
const PERIOD: Duration = Duration::from_secs(1);
const PERIOD_MS: u64 = PERIOD.as_millis() as u64;
/// How long a node may take to answer: longer is as good as no answer, since what it says is old by then.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// Reports in a row that a node may miss before it is avoided, and before nothing is sent there any more.
const SUSPECT_AFTER: u32 = 2;
const LOST_AFTER: u32 = 15;
/// Sandboxes of a node whose edge does not say how many it takes: what edges took before they said.
const SANDBOXES_MAX_UNSAID: u64 = 4000;

/// What an edge answers to `GET /v1/nodes`.
#[derive(Debug, Deserialize)]
pub struct Nodes {
    /// Its node, alone.
    pub nodes: Vec<NodeStatus>,
}

/// Where the time comes from.
pub trait Clock: Send + Sync + 'static {
    /// Milliseconds since a moment that stays the same.
    fn now_ms(&self) -> u64;
}

/// The machine's clock, from the moment at which it was made.
struct Monotonic(Instant);

impl Clock for Monotonic {
    fn now_ms(&self) -> u64 {
        // 0 is before anything was asked.
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }
}

/// All that is known of the nodes, by their places.
pub struct Watched {
    known: Mutex<Known>,
    /// Whether every node was heard of, or was not when it was asked. A node that comes after that is not waited for.
    gathered: watch::Sender<bool>,
    /// How often a node was heard of for the first time, or was found lost.
    turns: watch::Sender<u64>,
    clock: Box<dyn Clock>,
    /// At which millisecond of every period nodes are asked: drawn, so that servers that started together do not ask together.
    phase_ms: u64,
}

struct Known {
    nodes: Vec<placement::Node>,
    more: Vec<More>,
    /// Draws the nodes that a create looks at. Seeded once: a system call a draw would cost more than the rest of a placement.
    chance: fastrand::Rng,
    /// How full the pools are that one takes over from.
    home: overflow::Home,
}

/// What a node last said that its sandboxes may use.
#[derive(Debug, Clone, Default)]
pub struct Charges {
    /// When it was asked, by this server's clock; 0: never.
    pub asked_ms: u64,
    /// By project, backend and server.
    pub charged: Vec<Charged>,
    /// Creates that are in it, whether they are answered or not.
    pub arrived: Vec<Arrived>,
}

/// Whether a node answers, and when it last did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Whether it answers. One that was not heard of yet is suspect, until it has missed as many reports as make it lost.
    pub health: NodeHealth,
    /// When it was last heard of, Unix ms; none: not since this server started.
    pub heard_ms: Option<u64>,
}

impl Standing {
    /// Whether it has been silent for so long that nothing is sent there.
    pub fn is_lost(self) -> bool {
        self.health == NodeHealth::Lost
    }

    /// The state of a sandbox on it, which was this when it was last heard of.
    pub fn shown(self, state: State) -> State {
        if self.is_lost() && !state.is_final() { State::Lost } else { state }
    }

    /// A record that was this when it was last heard of.
    #[must_use]
    pub fn seen(self, sandbox: Sandbox) -> Sandbox {
        let (last_state, state) = (sandbox.state, self.shown(sandbox.state));
        let lost = Lost { last_state, heard_ms: self.heard_ms.unwrap_or_default() };
        Sandbox { state, lost: (state == State::Lost).then_some(lost), ..sandbox }
    }

    /// What is told of a call to something on it, when it is lost. `maybe_done`: the call was sent before that was known.
    pub fn failure(self, node: &NodeId, maybe_done: bool) -> Failure {
        let silent_s = self.heard_ms.map(|heard_ms| unix_ms().saturating_sub(heard_ms) / 1000);
        let since = match silent_s {
            Some(seconds) => format!("it was last heard of {seconds} s ago"),
            None => "it was not heard of since this server started".to_owned(),
        };
        let done = if maybe_done { "what was asked may have been done" } else { "nothing was done" };
        Failure::new(ErrorKind::Unavailable, format!("node {node} is lost: {since}"))
            .hint(format!("{done}; its sandboxes may still run, and can be used again once it answers"))
            .detail(json!({ "node": node, "lost": true, "heard_ms": self.heard_ms }))
    }
}

/// Now, Unix ms.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// What is known of a node beside what placement looks at.
#[derive(Default)]
struct More {
    /// Reports in a row that did not come.
    missed: u32,
    /// When one last came, Unix ms.
    heard_ms: Option<u64>,
    /// Id of its layer store, once it has reported one.
    store: Option<String>,
    /// It was asked, and answered or did not.
    is_heard: bool,
    /// It has left.
    is_gone: bool,
    /// What it last said that its sandboxes may use, and when it was asked.
    charged: Arc<Charges>,
    /// Limits of sandboxes that do not say which they want.
    defaults: Option<SandboxLimits>,
}

impl Default for Watched {
    fn default() -> Self {
        let seed = getrandom::u64().unwrap_or_else(|_| fastrand::u64(..));
        Self::driven(std::iter::empty(), Box::new(Monotonic(Instant::now())), seed)
    }
}

impl Watched {
    /// Nodes under a clock and with draws of the caller's: who gives it the same answers at the same times gets the same
    /// placements.
    pub fn driven(names: impl Iterator<Item = NodeId>, clock: Box<dyn Clock>, seed: u64) -> Self {
        let mut chance = fastrand::Rng::with_seed(seed);
        let phase_ms = chance.u64(..PERIOD_MS);
        let known = Known { nodes: Vec::new(), more: Vec::new(), chance, home: overflow::Home::default() };
        let (gathered, turns) = (watch::Sender::new(false), watch::Sender::new(0));
        let watched = Self { known: Mutex::new(known), gathered, turns, clock, phase_ms };
        names.for_each(|name| watched.add(name));
        watched
    }

    /// A node at the next place.
    pub(crate) fn add(&self, name: NodeId) {
        let mut known = self.known();
        known.nodes.push(placement::Node::new(name));
        known.more.push(More { is_heard: *self.gathered.borrow(), ..More::default() });
    }

    /// The node at this place has left: nothing is placed there.
    pub(crate) fn is_gone(&self, at: usize) {
        let now_ms = self.now_ms();
        let mut known = self.known();
        known.more[at] = More { is_heard: true, is_gone: true, ..More::default() };
        known.nodes[at].missed(Health::Lost, now_ms);
        self.count(&known);
    }

    /// A node that had left has its place again.
    pub(crate) fn is_back(&self, at: usize) {
        self.known().more[at].is_gone = false;
    }

    fn count(&self, known: &Known) {
        if known.more.iter().all(|more| more.is_heard) {
            self.gathered.send_replace(true);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds of this server's own clock, which all that is said of nodes is told by.
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// What placement knows of each node now.
    pub fn nodes(&self) -> Vec<placement::Node> {
        self.known().nodes.clone()
    }

    /// Resolves when every node has answered, or failed to, once.
    pub async fn gathered(&self) {
        let mut gathered = self.gathered.subscribe();
        // Where there is none, none is waited for.
        if !self.known().nodes.is_empty() {
            let _ = gathered.wait_for(|gathered| *gathered).await;
        }
    }

    /// Asks the node that is at a place again and again how it is, until it is dropped.
    pub(crate) async fn watch(&self, at: usize, node: impl Fn() -> Option<Arc<Node>>) {
        loop {
            if let Some(node) = node() {
                self.ask(at, &node).await;
                self.heard(at);
            }
            tokio::time::sleep(self.pause()).await;
        }
    }

    fn heard(&self, at: usize) {
        let mut known = self.known();
        if !std::mem::replace(&mut known.more[at].is_heard, true) {
            self.count(&known);
        }
    }

    /// Asks a node how it is, once.
    pub(crate) async fn ask(&self, at: usize, node: &Node) {
        let mut headers = HeaderMap::new();
        Behalf::server().write(&mut headers);
        let asked_ms = self.now_ms();
        let answer =
            tokio::time::timeout(ANSWER_WITHIN, node.ask::<Nodes>("/v1/nodes?layers=true", &headers)).await;
        self.note(at, asked_ms, answer.ok().and_then(|answer: Result<Nodes, Failure>| answer.ok()));
    }

    /// How long until nodes are asked again: all at one moment, so that what is known of them is equally old. Otherwise those that
    /// were heard of longest ago would look emptiest, by all that other servers have sent there since.
    pub fn pause(&self) -> Duration {
        let since_ms = (self.now_ms() + PERIOD_MS - self.phase_ms) % PERIOD_MS;
        Duration::from_millis(PERIOD_MS - since_ms)
    }

    /// Takes down what the node at this place answered to a question of then; none: it did not.
    pub fn note(&self, at: usize, asked_ms: u64, answer: Option<Nodes>) {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let Known { nodes, more, .. } = &mut *known;
        let (node, more) = (&mut nodes[at], &mut more[at]);
        if more.is_gone {
            return;
        }
        match answer.and_then(|answer| answer.nodes.into_iter().next()) {
            Some(mut status) => {
                if node.health() != Health::Well {
                    tracing::info!(node_id = %node.name(), "node answers");
                }
                more.missed = 0;
                if more.heard_ms.replace(unix_ms()).is_none() {
                    self.turns.send_modify(|turns| *turns += 1);
                }
                // It does not know while its store is away: then it is the one of before.
                if !status.store.is_empty() {
                    more.store = Some(status.store.clone());
                }
                more.defaults.clone_from(&status.defaults);
                // Answers may overtake each other; an older one has not counted what a newer one has.
                if asked_ms > more.charged.asked_ms {
                    let charged = std::mem::take(&mut status.charged);
                    let arrived = std::mem::take(&mut status.arrived);
                    more.charged = Arc::new(Charges { asked_ms, charged, arrived });
                }
                node.reported(report_of(status), asked_ms);
            }
            None => {
                more.missed = more.missed.saturating_add(1);
                let health = match (node.health(), more.missed) {
                    (Health::Lost, _) | (_, LOST_AFTER..) => Health::Lost,
                    (Health::Suspect, _) | (_, SUSPECT_AFTER..) => Health::Suspect,
                    _ => Health::Well,
                };
                if health != node.health() {
                    tracing::warn!(node_id = %node.name(), ?health, missed = more.missed, "node does not answer");
                }
                node.missed(health, now_ms);
                if more.missed == LOST_AFTER {
                    self.turns.send_modify(|turns| *turns += 1);
                }
            }
        }
    }

    /// What each node last said that its sandboxes may use.
    pub fn charged(&self) -> Vec<Arc<Charges>> {
        let now_ms = self.now_ms();
        // Of one that has left nothing counts any more.
        let left = || Arc::new(Charges { asked_ms: now_ms, ..Charges::default() });
        let of = |more: &More| if more.is_gone { left() } else { Arc::clone(&more.charged) };
        self.known().more.iter().map(of).collect()
    }

    /// Limits of sandboxes on a node that do not say which they want, once it has said.
    pub fn defaults(&self, at: usize) -> Option<SandboxLimits> {
        self.known().more.get(at)?.defaults.clone()
    }

    /// The node to try next for a create, and when that was.
    pub fn place(&self, wanted: &Wanted<'_>, tries: &mut Tries) -> Option<(usize, u64)> {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let Known { nodes, chance, home, .. } = &mut *known;
        let at = placement::choose(nodes, wanted, tries, |below| chance.usize(..below))?;
        nodes[at].placed(now_ms, Expected::START);
        home.placed(&nodes[at], Expected::START);
        Some((at, now_ms))
    }

    /// A create goes to this node whatever its load. Returns when that was.
    pub fn placed(&self, at: usize) -> u64 {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let Known { nodes, home, .. } = &mut *known;
        nodes[at].placed(now_ms, Expected::START);
        home.placed(&nodes[at], Expected::START);
        now_ms
    }

    /// It did not take the create that was sent then.
    pub fn refused(&self, at: usize, sent_ms: u64) {
        self.known().nodes[at].refused(sent_ms);
    }

    /// It could not be reached: it is avoided until it answers.
    pub fn unreachable(&self, at: usize) {
        let now_ms = self.now_ms();
        let mut known = self.known();
        if known.nodes[at].health() == Health::Well {
            known.nodes[at].missed(Health::Suspect, now_ms);
        }
    }

    /// Whether it has been silent for so long that nothing is sent there.
    pub fn is_lost(&self, name: &NodeId) -> bool {
        self.known().nodes.iter().any(|node| node.name() == name && node.health() == Health::Lost)
    }

    /// Whether the node at a place answers, and when it last did.
    pub fn standing(&self, at: usize) -> Standing {
        let known = self.known();
        let Some((node, more)) = known.nodes.get(at).zip(known.more.get(at)) else {
            return Standing { health: NodeHealth::Suspect, heard_ms: None };
        };
        let health = match node.health() {
            Health::Well => NodeHealth::Well,
            Health::Lost if more.is_gone || more.missed >= LOST_AFTER => NodeHealth::Lost,
            Health::Suspect | Health::Lost => NodeHealth::Suspect,
        };
        Standing { health, heard_ms: more.heard_ms }
    }

    /// Resolves when the node at a place is lost.
    pub async fn lost(&self, at: usize) {
        self.until(at, Standing::is_lost).await;
    }

    /// Resolves when the node at a place was heard of.
    pub async fn heard_of(&self, at: usize) {
        self.until(at, |standing| standing.heard_ms.is_some()).await;
    }

    async fn until(&self, at: usize, is_so: impl Fn(Standing) -> bool) {
        let mut turns = self.turns.subscribe();
        // Its sender lives in `self`, so waiting cannot fail.
        while !is_so(self.standing(at)) && turns.changed().await.is_ok() {}
    }

    /// The nodes that will never take this, being what they are.
    pub fn never(&self, wanted: &Wanted<'_>) -> Vec<usize> {
        let known = self.known();
        let never = |node: &placement::Node| node.unfit(wanted).is_some_and(|unfit| unfit.is_lasting());
        (0..known.nodes.len()).filter(|at| never(&known.nodes[*at])).collect()
    }

    /// Adds the nodes that could not be asked for this to the refusals. Returns whether none of them will ever take it.
    pub fn add_unfit(&self, wanted: &Wanted<'_>, tries: &Tries, refusals: &mut Refusals) -> bool {
        let known = self.known();
        let mut tries = tries.clone();
        // Those that have left are nobody's refusal.
        known.more.iter().enumerate().filter(|(_, more)| more.is_gone).for_each(|(at, _)| tries.tried(at));
        refusals.add_unfit(&known.nodes, wanted, &tries)
    }

    /// A node's layer store, once it has said which, and whether it answers.
    pub fn store(&self, name: &NodeId) -> Option<(String, bool)> {
        let known = self.known();
        let at = known.nodes.iter().position(|node| node.name() == name)?;
        let store = known.more[at].store.clone()?;
        Some((store, known.nodes[at].health() == Health::Well))
    }
}

/// What placement looks at, of all that a node says.
fn report_of(status: NodeStatus) -> Report {
    let NodeStatus {
        capacity,
        usage,
        backends,
        architecture,
        sandboxes_max,
        pool,
        labels,
        features,
        scheduling,
        layers,
        ..
    } = status;
    let works = features.into_iter().filter(|feature| feature.state == FeatureState::Works);
    Report {
        pool,
        cordoned: scheduling.state == SchedulingState::Cordoned,
        draining: scheduling.state == SchedulingState::Draining,
        backends: backends.into_iter().collect(),
        features: works.map(|feature| feature.name).collect(),
        architecture,
        labels,
        gpus_free: 0,
        memory_mib: capacity.memory_mib,
        memory_available_mib: usage.memory_available_mib,
        cpu_millis: capacity.cpu_millis,
        cpu_pressure: usage.cpu_pressure,
        sandboxes: usage.sandboxes(),
        sandboxes_max: if sandboxes_max == 0 { SANDBOXES_MAX_UNSAID } else { sandboxes_max },
        layers: layers.iter().map(|name| placement::layer_number(name)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A clock that is set by hand.
    #[derive(Clone, Default)]
    pub(super) struct Hand(pub(super) Arc<AtomicU64>);

    impl Clock for Hand {
        fn now_ms(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn watched(clock: &Hand, seed: u64) -> Watched {
        let names = ["n1", "n2"].into_iter().filter_map(|name| name.parse().ok());
        Watched::driven(names, Box::new(clock.clone()), seed)
    }

    #[test]
    fn every_pause_of_a_server_ends_at_its_moment_of_the_period() {
        let clock = Hand::default();
        let moment = |watched: &Watched, now_ms: u64| {
            clock.0.store(now_ms, Ordering::Relaxed);
            let pause_ms = watched.pause().as_millis() as u64;
            assert!((1..=PERIOD_MS).contains(&pause_ms), "{pause_ms} ms at {now_ms}");
            (now_ms + pause_ms) % PERIOD_MS
        };
        let first = watched(&clock, 1);
        let at = moment(&first, 0);
        for now_ms in [1, 7, 999, 1000, 1001, 123_456] {
            assert_eq!(moment(&first, now_ms), at);
        }
        assert_ne!(moment(&watched(&clock, 2), 0), at, "two servers ask at one moment");
    }

    #[test]
    fn one_seed_and_one_clock_give_the_same_placements() {
        let (clock, status) = (Hand::default(), |node: &str| {
            let text = format!(
                r#"{{"node":"{node}","version":"0","pid":1,"started_ms":0,"backends":["container"],
                    "capacity":{{"memory_mib":1000,"cpu_millis":1000,"disk_mib":1}},
                    "usage":{{"creating":0,"running":0,"stopping":0,"memory_promised_mib":0,
                              "memory_available_mib":900,"disk_free_mib":1}}}}"#
            );
            Nodes { nodes: vec![serde_json::from_str(&text).unwrap()] }
        });
        let placed = |seed: u64| {
            let watched = watched(&clock, seed);
            watched.note(0, 0, Some(status("n1")));
            watched.note(1, 0, Some(status("n2")));
            let wanted = Wanted { backend: "container", ..Wanted::default() };
            let place = |_| watched.place(&wanted, &mut Tries::default()).unwrap();
            (0..12).map(place).collect::<Vec<_>>()
        };
        assert_eq!(placed(4), placed(4));
    }
}
