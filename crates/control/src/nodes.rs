//! The configured nodes and what is known of them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::{ErrorKind, NodeId};
use dsec_proto::rest::{ErrorBody, NodeStatus};
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::config::NodeConfig;
use crate::failure::Failure;
use crate::forward::{self, KEY_ID, PROJECT};
use crate::placement::Candidate;
use crate::upstream::{self, Answer, Pool, SendError};

/// How long a node may take to answer a question of ours (not a caller's request).
pub const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer to such a question, bytes: 1,000 sandboxes of a few KiB, with room.
const ANSWER_MAX: usize = 64 << 20;
/// How often loads are read when there is a choice of nodes.
pub const WATCH_PERIOD: Duration = Duration::from_secs(2);

/// What an edge answers to `GET /v1/nodes`.
#[derive(Debug, Deserialize)]
pub struct Nodes {
    /// Its node, alone.
    pub nodes: Vec<NodeStatus>,
}

/// One node.
pub struct Node {
    name: NodeId,
    pool: Arc<Pool>,
    healthy: AtomicBool,
    /// Sandboxes it reported last.
    reported: AtomicU64,
    /// Creates sent to it since that report: what keeps a burst from landing on one node.
    sent: AtomicU64,
    /// Id of its layer store, once it has reported one.
    store: Mutex<Option<String>>,
}

impl Node {
    fn new(config: &NodeConfig) -> Self {
        Self {
            name: config.name.clone(),
            pool: Arc::new(Pool::new(config.socket.clone())),
            healthy: AtomicBool::new(true),
            reported: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            store: Mutex::default(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.name
    }

    /// Its edge's socket.
    pub fn socket(&self) -> &Path {
        self.pool.socket()
    }

    /// Sends it a request; notes whether it could be reached.
    ///
    /// # Errors
    /// See [`SendError`].
    pub async fn send(&self, request: &mut Request) -> Result<Answer, SendError> {
        let result = upstream::send(&self.pool, request).await;
        match &result {
            Ok(_) => self.healthy.store(true, Ordering::Relaxed),
            Err(SendError::Unreachable(_)) => self.healthy.store(false, Ordering::Relaxed),
            Err(_) => {}
        }
        result
    }

    fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    fn store(&self) -> Option<String> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes over what it says of itself, or that it says nothing.
    fn note(&self, report: Result<Nodes, Failure>) {
        self.healthy.store(report.is_ok(), Ordering::Relaxed);
        let Ok(Nodes { nodes }) = report else { return };
        let load = nodes.iter().map(|node| node.usage.creating + node.usage.running).sum();
        self.reported.store(load, Ordering::Relaxed);
        // An edge of before that says none counts as one with a store of its own.
        let said = nodes.into_iter().map(|node| node.store).find(|store| !store.is_empty());
        let store = said.unwrap_or_else(|| format!("of {}", self.name));
        *self.store.lock().unwrap_or_else(PoisonError::into_inner) = Some(store);
    }

    /// What placement looks at.
    pub fn candidate(&self, refused: bool) -> Candidate {
        Candidate {
            healthy: self.is_healthy(),
            refused,
            load: self.reported.load(Ordering::Relaxed) + self.sent.load(Ordering::Relaxed),
        }
    }

    /// Notes that a create was sent.
    pub fn note_create(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Asks a question whose answer is JSON.
    ///
    /// # Errors
    /// No answer, none in time, the node's own error, or an answer of another shape.
    pub async fn ask<T: DeserializeOwned>(&self, path: &str, headers: &HeaderMap) -> Result<T, Failure> {
        let (status, body) = self.get(path, headers).await?;
        if !status.is_success() {
            return Err(match serde_json::from_slice::<ErrorBody>(&body) {
                Ok(error) => Failure(dsec_proto::rest::ApiError(Box::new(error))),
                Err(_) => self.odd(format!("answered {status} without saying why")),
            });
        }
        serde_json::from_slice(&body)
            .map_err(|error| self.odd(format!("gave an answer that is not understood: {error}")))
    }

    async fn get(&self, path: &str, headers: &HeaderMap) -> Result<(StatusCode, Bytes), Failure> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() =
            path.parse().map_err(|_| Failure::new(ErrorKind::InvalidArgument, "the query is malformed"))?;
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("dsec"));
        let exchange = async {
            match self.send(&mut request).await {
                Ok(Answer::Response(response)) => {
                    let status = response.status();
                    let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
                    let body = body.map_err(|error| self.odd(format!("broke off its answer: {error}")))?;
                    Ok((status, body.to_bytes()))
                }
                Ok(Answer::Upgrade(..)) => Err(self.odd("upgraded a plain request".to_owned())),
                Err(error) => Err(forward::failure_of(self, error)),
            }
        };
        match tokio::time::timeout(ASK_TIMEOUT, exchange).await {
            Ok(result) => result,
            Err(_) => Err(self.odd(format!("did not answer in {} s", ASK_TIMEOUT.as_secs()))),
        }
    }

    fn odd(&self, what: String) -> Failure {
        tracing::warn!(node_id = %self.name, what, "node answered wrongly");
        Failure::new(ErrorKind::Unavailable, format!("node {} {what}", self.name))
            .hint("see its dsec-edge's log")
            .detail(serde_json::json!({ "node": self.name.as_str() }))
    }
}

/// All configured nodes, in the order of the configuration.
pub struct NodeSet {
    all: Vec<Arc<Node>>,
    by_name: HashMap<String, Arc<Node>>,
    /// Calls that any node can carry out: whose turn it is.
    turn: AtomicUsize,
    /// Held while the nodes are asked how they are.
    looking: tokio::sync::Mutex<()>,
}

impl NodeSet {
    /// The nodes of a configuration.
    pub fn new(configs: &[NodeConfig]) -> Self {
        let all: Vec<Arc<Node>> = configs.iter().map(|config| Arc::new(Node::new(config))).collect();
        let by_name = all.iter().map(|node| (node.name.as_str().to_owned(), Arc::clone(node))).collect();
        Self { all, by_name, turn: AtomicUsize::new(0), looking: tokio::sync::Mutex::default() }
    }

    /// Every node.
    pub fn all(&self) -> &[Arc<Node>] {
        &self.all
    }

    /// The only node, where there is one.
    pub fn only(&self) -> Option<&Arc<Node>> {
        if let [node] = &self.all[..] { Some(node) } else { None }
    }

    /// A node by name.
    pub fn get(&self, name: &str) -> Option<&Arc<Node>> {
        self.by_name.get(name)
    }

    /// Asks every node the same question at the same time.
    pub async fn ask_all<T: DeserializeOwned>(
        &self,
        path: &str,
        headers: &HeaderMap,
    ) -> Vec<(&Arc<Node>, Result<T, Failure>)> {
        join_all(self.all.iter().map(|node| async move { (node, node.ask(path, headers).await) })).await
    }

    /// Nodes that share a layer store, in the order in which they are to be tried for what any of them can do: in turn, and
    /// those that did not answer last at the end.
    ///
    /// # Errors
    /// They have several stores, or none of them has said which it has.
    pub async fn of_one_store(&self, nodes: &[Arc<Node>]) -> Result<Vec<Arc<Node>>, Failure> {
        let is_known = || nodes.iter().all(|node| !node.is_healthy() || node.store().is_some());
        if !is_known() {
            let looking = self.looking.lock().await;
            if !is_known() {
                self.look().await;
            }
            drop(looking);
        }
        let mut stores: BTreeMap<String, Vec<&Arc<Node>>> = BTreeMap::new();
        for node in nodes {
            if let Some(store) = node.store() {
                stores.entry(store).or_default().push(node);
            }
        }
        let Some((_, mut sharing)) = stores.pop_first() else {
            return Err(Failure::new(ErrorKind::Unavailable, "no node answers")
                .hint("see that dsec-edge runs on the nodes (`dsec doctor`)"));
        };
        if !stores.is_empty() {
            return Err(several_stores(stores.values().chain([&sharing])));
        }
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % sharing.len();
        sharing.rotate_left(first);
        sharing.sort_by_key(|node| !node.is_healthy());
        Ok(sharing.into_iter().cloned().collect())
    }

    /// Asks every node how it is. One at a time does, with `looking` held: creates are counted off once.
    async fn look(&self) {
        let mut headers = HeaderMap::new();
        headers.insert(PROJECT, HeaderValue::from_static("root"));
        headers.insert(KEY_ID, HeaderValue::from_static("dsec-control"));
        let sent: Vec<u64> = self.all.iter().map(|node| node.sent.load(Ordering::Relaxed)).collect();
        let answers = self.ask_all::<Nodes>("/v1/nodes", &headers).await;
        for ((node, answer), sent) in answers.into_iter().zip(sent) {
            if answer.is_ok() {
                // Creates sent while the report was on its way may not be in it: they stay counted.
                node.sent.fetch_sub(sent, Ordering::Relaxed);
            }
            node.note(answer);
        }
    }

    /// Reads loads for placement until it is dropped. With one node there is nothing to choose,
    /// and it returns at once.
    pub async fn watch(&self) {
        if self.all.len() < 2 {
            return;
        }
        let mut ticks = tokio::time::interval(WATCH_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let _looking = self.looking.lock().await;
            self.look().await;
        }
    }
}

fn several_stores<'a>(stores: impl Iterator<Item = &'a Vec<&'a Arc<Node>>>) -> Failure {
    let names =
        |nodes: &Vec<&Arc<Node>>| nodes.iter().map(|node| node.name().to_string()).collect::<Vec<_>>();
    let mut stores: Vec<Vec<String>> = stores.map(names).collect();
    stores.sort_unstable();
    let listed = stores.iter().map(|nodes| nodes.join(", ")).collect::<Vec<_>>().join("; ");
    let message =
        format!("the nodes have {} layer stores, and which is meant is not said: {listed}", stores.len());
    Failure::new(ErrorKind::InvalidArgument, message)
        .hint("say node=NAME, or give all nodes of this server one store ([store] in edge.toml)")
        .detail(serde_json::json!({ "field": "node", "stores": stores }))
}
