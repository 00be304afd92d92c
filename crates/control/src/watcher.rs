//! What the nodes say of themselves, as this server last heard it, and what it sent there since.
//!
//! Each node is asked by a task of its own, so that a slow one delays no other. Nothing is kept: after a start all is known
//! again when every node has answered, or has not answered, once.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_model::NodeId;
use dsec_model::placement::{self, Expected, Health, Refusals, Report, Tries, Wanted};
use dsec_proto::rest::{FeatureState, NodeStatus};
use http::{HeaderMap, HeaderValue};
use serde::Deserialize;
use tokio::sync::watch;

use crate::failure::Failure;
use crate::forward::{KEY_ID, PROJECT};
use crate::nodes::Node;

/// How often a node is asked. The real pause is up to a tenth shorter or longer, so that servers that started together do not ask
/// together.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a node may take to answer: longer is as good as no answer, since what it says is old by then.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
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

/// All that is known of the nodes, in the order of the configuration.
pub struct Watched {
    known: Mutex<Known>,
    /// How many nodes were heard of, or not, for the first time.
    heard: watch::Sender<usize>,
    began: Instant,
}

struct Known {
    nodes: Vec<placement::Node>,
    more: Vec<More>,
}

/// What is known of a node beside what placement looks at.
#[derive(Default)]
struct More {
    /// Reports in a row that did not come.
    missed: u32,
    /// Id of its layer store, once it has reported one.
    store: Option<String>,
}

impl Watched {
    pub(crate) fn new(names: impl Iterator<Item = NodeId>) -> Self {
        let nodes: Vec<_> = names.map(placement::Node::new).collect();
        let more = nodes.iter().map(|_| More::default()).collect();
        Self { known: Mutex::new(Known { nodes, more }), heard: watch::Sender::new(0), began: Instant::now() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Resolves when every node has answered, or failed to, once.
    pub async fn gathered(&self) {
        let all = self.known().nodes.len();
        let _ = self.heard.subscribe().wait_for(|heard| *heard >= all).await;
    }

    /// Asks a node again and again how it is, until it is dropped.
    pub(crate) async fn watch(&self, at: usize, node: &Node) {
        let mut headers = HeaderMap::new();
        headers.insert(PROJECT, HeaderValue::from_static("root"));
        headers.insert(KEY_ID, HeaderValue::from_static("dsec-control"));
        let mut is_first = true;
        loop {
            let asked_ms = self.now_ms();
            let answer = tokio::time::timeout(ANSWER_WITHIN, node.ask::<Nodes>("/v1/nodes", &headers)).await;
            self.note(at, asked_ms, answer.ok().and_then(|answer: Result<Nodes, Failure>| answer.ok()));
            if std::mem::take(&mut is_first) {
                self.heard.send_modify(|heard| *heard += 1);
            }
            tokio::time::sleep(jittered(PERIOD)).await;
        }
    }

    fn note(&self, at: usize, asked_ms: u64, answer: Option<Nodes>) {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let Known { nodes, more } = &mut *known;
        let (node, more) = (&mut nodes[at], &mut more[at]);
        match answer.and_then(|answer| answer.nodes.into_iter().next()) {
            Some(status) => {
                if node.health() != Health::Well {
                    tracing::info!(node_id = %node.name(), "node answers");
                }
                more.missed = 0;
                // It does not know while its store is away: then it is the one of before.
                if !status.store.is_empty() {
                    more.store = Some(status.store.clone());
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
            }
        }
    }

    /// The node to try next for a create, and when that was.
    pub fn place(&self, wanted: &Wanted<'_>, tries: &mut Tries) -> Option<(usize, u64)> {
        let now_ms = self.now_ms();
        let mut known = self.known();
        let at = placement::choose(&known.nodes, wanted, tries, |below| {
            // The bias of the remainder is below 2^-54 for any number of nodes we take.
            getrandom::u64().map_or(0, |draw| (draw % below as u64) as usize)
        })?;
        known.nodes[at].placed(now_ms, Expected::START);
        Some((at, now_ms))
    }

    /// A create goes to this node whatever its load. Returns when that was.
    pub fn placed(&self, at: usize) -> u64 {
        let now_ms = self.now_ms();
        self.known().nodes[at].placed(now_ms, Expected::START);
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

    /// Adds the nodes that could not be asked for this to the refusals.
    pub fn add_unfit(&self, wanted: &Wanted<'_>, refusals: &mut Refusals) {
        refusals.add_unfit(&self.known().nodes, wanted);
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
    let NodeStatus { capacity, usage, backends, architecture, sandboxes_max, labels, features, .. } = status;
    let works = features.into_iter().filter(|feature| feature.state == FeatureState::Works);
    Report {
        cordoned: false,
        draining: false,
        backends: backends.into_iter().collect(),
        features: works.map(|feature| feature.name).collect(),
        architecture,
        labels,
        gpus_free: 0,
        memory_mib: capacity.memory_mib,
        memory_available_mib: usage.memory_available_mib,
        cpu_millis: capacity.cpu_millis,
        cpu_pressure: usage.cpu_pressure,
        sandboxes: usage.creating + usage.running + usage.stopping,
        sandboxes_max: if sandboxes_max == 0 { SANDBOXES_MAX_UNSAID } else { sandboxes_max },
        layers: HashSet::new(),
    }
}

fn jittered(period: Duration) -> Duration {
    let random = f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX);
    period.mul_f64(0.9 + 0.2 * random)
}
