//! The nodes, configured ones and those that have joined, and what is known of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::{ErrorKind, NodeId};
use dsec_proto::rest::ErrorBody;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::config::NodeConfig;
use crate::failure::Failure;
use crate::forward;
use crate::records::Records;
use crate::upstream::{self, Answer, Pool, SendError, Way};
use crate::watcher::Watched;

/// How long a node may take to answer a question of ours (not a caller's request).
pub const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer to such a question, bytes: 1,000 sandboxes of a few KiB, with room.
const ANSWER_MAX: usize = 64 << 20;
/// One node.
pub struct Node {
    name: NodeId,
    pool: Arc<Pool>,
    /// When it last answered, ms after [`BEGAN`]; 0: never.
    answered_ms: AtomicU64,
}

/// A moment that all times of answers are counted from.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Milliseconds since then, never 0.
fn since_began_ms() -> u64 {
    u64::try_from(BEGAN.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
}

impl Node {
    /// A node that is reached so.
    pub fn new(name: NodeId, way: Way) -> Self {
        Self { name, pool: Arc::new(Pool::new(way)), answered_ms: AtomicU64::new(0) }
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.name
    }

    /// How its edge is reached.
    pub fn way(&self) -> &Way {
        self.pool.way()
    }

    /// Sends it a request.
    ///
    /// # Errors
    /// See [`SendError`].
    pub async fn send(&self, request: &mut Request) -> Result<Answer, SendError> {
        let answer = upstream::send(&self.pool, request).await;
        if answer.is_ok() {
            self.answered_ms.store(since_began_ms(), Ordering::Relaxed);
        }
        answer
    }

    /// Whether it answered so short a time ago that, if it cannot be reached, its edge is being started again.
    pub fn answered_within(&self, limit: Duration) -> bool {
        let answered_ms = self.answered_ms.load(Ordering::Relaxed);
        let ago_ms = u128::from(since_began_ms().saturating_sub(answered_ms));
        answered_ms > 0 && ago_ms <= limit.as_millis()
    }

    /// Asks a question whose answer is JSON.
    ///
    /// # Errors
    /// No answer, none in time, the node's own error, or an answer of another shape.
    pub async fn ask<T: DeserializeOwned>(&self, path: &str, headers: &HeaderMap) -> Result<T, Failure> {
        self.exchange(Method::GET, path, headers, Bytes::new(), ASK_TIMEOUT).await
    }

    /// Tells it something as JSON, and takes its answer.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn tell<T: DeserializeOwned>(
        &self,
        path: &str,
        headers: &HeaderMap,
        body: &impl Serialize,
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| {
            Failure::new(ErrorKind::Internal, format!("a body cannot be written: {error}"))
        })?;
        self.post_within(path, headers, body.into(), ASK_TIMEOUT).await
    }

    /// Tells it something whose carrying out takes a while, in a body that is JSON already.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn post_within<T: DeserializeOwned>(
        &self,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
        within: Duration,
    ) -> Result<T, Failure> {
        self.exchange(Method::POST, path, headers, body, within).await
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
        within: Duration,
    ) -> Result<T, Failure> {
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = method;
        *request.uri_mut() =
            path.parse().map_err(|_| Failure::new(ErrorKind::InvalidArgument, "the query is malformed"))?;
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("dsec"));
        let (status, body) = self.whole_answer(request, within).await?;
        if !status.is_success() {
            return Err(match serde_json::from_slice::<ErrorBody>(&body) {
                Ok(error) => Failure(dsec_proto::rest::ApiError(Box::new(error))),
                Err(_) => self.odd(format!("answered {status} without saying why")),
            });
        }
        serde_json::from_slice(&body)
            .map_err(|error| self.odd(format!("gave an answer that is not understood: {error}")))
    }

    async fn whole_answer(
        &self,
        mut request: Request,
        within: Duration,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let exchange = async {
            match self.send(&mut request).await {
                Ok(Answer::Response(response)) => {
                    let status = response.status();
                    let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
                    let body = body.map_err(|error| self.odd(format!("broke off its answer: {error}")))?;
                    Ok((status, body.to_bytes()))
                }
                Ok(Answer::Upgrade(..)) => Err(self.odd("upgraded a plain request".to_owned())),
                // Who watches says when a node comes and goes; once a second would be too often.
                Err(error) => Err(forward::unanswered(self, &error)),
            }
        };
        match tokio::time::timeout(within, exchange).await {
            Ok(result) => result,
            Err(_) => Err(self.odd(format!("did not answer in {} s", within.as_secs()))),
        }
    }

    /// It answered what it should not.
    pub(crate) fn odd(&self, what: String) -> Failure {
        tracing::warn!(node_id = %self.name, what, "node answered wrongly");
        Failure::new(ErrorKind::Unavailable, format!("node {} {what}", self.name))
            .hint("see its dsec-edge's log")
            .detail(serde_json::json!({ "node": self.name.as_str() }))
    }
}

/// All nodes: the configured ones in their order, then those that have joined.
///
/// Each has a place, which is its name's for as long as this process lives: what is under way when a node leaves, or comes back
/// elsewhere, means the same node still.
pub struct NodeSet {
    places: RwLock<Places>,
    /// How many places there are.
    count: watch::Sender<usize>,
    /// Calls that any node can carry out: whose turn it is.
    turn: AtomicUsize,
    /// What they said of themselves.
    pub watched: Watched,
    /// What they said of their sandboxes.
    pub records: Records,
}

#[derive(Default)]
struct Places {
    all: Vec<Place>,
    by_name: HashMap<NodeId, usize>,
}

struct Place {
    node: Arc<Node>,
    /// It has left.
    is_gone: bool,
}

impl Places {
    fn living(&self) -> impl Iterator<Item = (usize, &Arc<Node>)> {
        self.all.iter().enumerate().filter(|(_, place)| !place.is_gone).map(|(at, place)| (at, &place.node))
    }
}

impl NodeSet {
    /// The nodes of a configuration.
    pub fn new(configs: &[NodeConfig]) -> Self {
        let (places, turn) = (RwLock::default(), AtomicUsize::new(0));
        let (watched, records) = (Watched::default(), Records::default());
        let set = Self { places, count: watch::Sender::new(0), turn, watched, records };
        for config in configs {
            set.put(Node::new(config.name.clone(), Way::Socket(config.socket.clone())));
        }
        set
    }

    fn places(&self) -> std::sync::RwLockReadGuard<'_, Places> {
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every node.
    pub fn all(&self) -> Vec<Arc<Node>> {
        self.places().living().map(|(_, node)| Arc::clone(node)).collect()
    }

    /// Every node with its place.
    pub fn placed(&self) -> Vec<(usize, Arc<Node>)> {
        self.places().living().map(|(at, node)| (at, Arc::clone(node))).collect()
    }

    /// The node at a place, unless it has left.
    pub fn at(&self, at: usize) -> Option<Arc<Node>> {
        let places = self.places();
        places.all.get(at).filter(|place| !place.is_gone).map(|place| Arc::clone(&place.node))
    }

    /// The only node, where there is one.
    pub fn only(&self) -> Option<Arc<Node>> {
        self.only_placed().map(|(_, node)| node)
    }

    /// The same, with its place.
    pub fn only_placed(&self) -> Option<(usize, Arc<Node>)> {
        let places = self.places();
        let mut living = places.living();
        match (living.next(), living.next()) {
            (Some((at, node)), None) => Some((at, Arc::clone(node))),
            _ => None,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.places().living().next().is_none()
    }

    /// A node by name.
    pub fn get(&self, name: &str) -> Option<Arc<Node>> {
        self.find(name).map(|(_, node)| node)
    }

    /// The same, with its place.
    pub fn find(&self, name: &str) -> Option<(usize, Arc<Node>)> {
        let name: NodeId = name.parse().ok()?;
        let at = *self.places().by_name.get(&name)?;
        Some((at, self.at(at)?))
    }

    /// Adds a node, or puts it into the place of the one that had its name.
    pub fn put(&self, node: Node) {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        let (name, place) = (node.name.clone(), Place { node: Arc::new(node), is_gone: false });
        match places.by_name.get(&name).copied() {
            Some(at) => {
                if std::mem::replace(&mut places.all[at], place).is_gone {
                    self.watched.is_back(at);
                }
            }
            None => {
                self.watched.add(name.clone());
                self.records.add();
                let at = places.all.len();
                places.by_name.insert(name, at);
                places.all.push(place);
                self.count.send_replace(at + 1);
            }
        }
    }

    /// Sends a node nothing any more. What is under way there goes to its end.
    pub fn remove(&self, name: &NodeId) {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = places.by_name.get(name).copied() {
            places.all[at].is_gone = true;
            self.watched.is_gone(at);
            self.records.forget(at);
        }
    }

    /// Asks every node the same question at the same time. One that is lost is not asked, and one that becomes it not waited for.
    pub async fn ask_all<T: DeserializeOwned>(
        &self,
        path: &str,
        headers: &HeaderMap,
    ) -> Vec<(usize, Arc<Node>, Result<T, Failure>)> {
        let ask = async |(at, node): (usize, Arc<Node>)| {
            let answer = self.unless_lost(at, &node, node.ask(path, headers)).await;
            (at, node, answer)
        };
        join_all(self.placed().into_iter().map(ask)).await
    }

    /// What a node answers, or that it is lost: before it was asked, or while it was waited for.
    ///
    /// # Errors
    /// It is lost; or what `asked` fails with.
    pub async fn unless_lost<T>(
        &self,
        at: usize,
        node: &Node,
        asked: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let standing = self.watched.standing(at);
        if standing.is_lost() {
            return Err(standing.failure(node.name(), false));
        }
        tokio::select! {
            biased;
            answer = asked => answer,
            () = self.watched.lost(at) => Err(self.watched.standing(at).failure(node.name(), true)),
        }
    }

    /// Nodes that share a layer store, in the order in which they are to be tried for what any of them can do: in turn, and
    /// those that did not answer last at the end.
    ///
    /// # Errors
    /// They have several stores, or none of them has said which it has.
    pub async fn of_one_store(&self, nodes: &[Arc<Node>]) -> Result<Vec<Arc<Node>>, Failure> {
        self.watched.gathered().await;
        let mut stores = self.by_store(nodes);
        if stores.is_empty() {
            // They may just have come, or not have reached their store yet when they were asked.
            self.look().await;
            stores = self.by_store(nodes);
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
        sharing.sort_by_key(|(answers, _)| !answers);
        Ok(sharing.into_iter().map(|(_, node)| Arc::clone(node)).collect())
    }

    /// Those that have said which layer store they have, by it, each with whether it answers.
    fn by_store<'a>(&self, nodes: &'a [Arc<Node>]) -> BTreeMap<String, Vec<(bool, &'a Arc<Node>)>> {
        let mut stores: BTreeMap<String, Vec<(bool, &Arc<Node>)>> = BTreeMap::new();
        for node in nodes {
            if let Some((store, answers)) = self.watched.store(node.name()) {
                stores.entry(store).or_default().push((answers, node));
            }
        }
        stores
    }

    /// Watches the nodes, and those that come, and what they say of their sandboxes, until it is dropped.
    pub async fn watch(&self) {
        let (mut count, mut watched) = (self.count.subscribe(), 0);
        let mut watching = FuturesUnordered::new();
        loop {
            let places = *count.borrow_and_update();
            for at in watched..places {
                watching.push(self.watched.watch(at, move || self.at(at)).left_future());
                watching.push(self.follow(at).right_future());
            }
            watched = places;
            tokio::select! {
                changed = count.changed() => if changed.is_err() { return },
                Some(()) = watching.next() => {}
            }
        }
    }

    /// Asks one node how it is, now.
    pub async fn look_at(&self, name: &NodeId) {
        if let Some((at, node)) = self.placed().into_iter().find(|(_, node)| node.name() == name) {
            self.watched.ask(at, &node).await;
        }
    }

    /// Keeps what is known of the sandboxes of the node at a place. Beside the reports and not after each: so reports, which all come at
    /// one moment, do not wait for it, nor all answers come at that moment too.
    async fn follow(&self, at: usize) {
        self.watched.heard_of(at).await;
        loop {
            // Of a node that is lost its reports tell when it is back.
            if let Some(node) = self.at(at).filter(|_| !self.watched.standing(at).is_lost())
                && let Err(failure) = self.records.refresh(at, &node).await
            {
                tracing::debug!(node_id = %node.name(), error = %failure.0, "node did not tell of its sandboxes");
            }
            tokio::time::sleep(Records::pause()).await;
        }
    }

    /// Asks all nodes how they are, now.
    pub async fn look(&self) {
        let placed = self.placed();
        join_all(placed.iter().map(|(at, node)| self.watched.ask(*at, node))).await;
    }
}

fn several_stores<'a>(stores: impl Iterator<Item = &'a Vec<(bool, &'a Arc<Node>)>>) -> Failure {
    let names = |nodes: &Vec<(bool, &Arc<Node>)>| {
        nodes.iter().map(|(_, node)| node.name().to_string()).collect::<Vec<_>>()
    };
    let mut stores: Vec<Vec<String>> = stores.map(names).collect();
    stores.sort_unstable();
    let listed = stores.iter().map(|nodes| nodes.join(", ")).collect::<Vec<_>>().join("; ");
    let message =
        format!("the nodes have {} layer stores, and which is meant is not said: {listed}", stores.len());
    Failure::new(ErrorKind::InvalidArgument, message)
        .hint("say node=NAME, or give all nodes of this server one store ([store] in edge.toml)")
        .detail(serde_json::json!({ "field": "node", "stores": stores }))
}
