//! The configured nodes and what is known of them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::{ErrorKind, NodeId};
use dsec_proto::rest::ErrorBody;
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::NodeConfig;
use crate::failure::Failure;
use crate::forward;
use crate::upstream::{self, Answer, Pool, SendError};
use crate::watcher::Watched;

/// How long a node may take to answer a question of ours (not a caller's request).
pub const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer to such a question, bytes: 1,000 sandboxes of a few KiB, with room.
const ANSWER_MAX: usize = 64 << 20;
/// One node.
pub struct Node {
    name: NodeId,
    pool: Arc<Pool>,
}

impl Node {
    fn new(config: &NodeConfig) -> Self {
        Self { name: config.name.clone(), pool: Arc::new(Pool::new(config.socket.clone())) }
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.name
    }

    /// Its edge's socket.
    pub fn socket(&self) -> &Path {
        self.pool.socket()
    }

    /// Sends it a request.
    ///
    /// # Errors
    /// See [`SendError`].
    pub async fn send(&self, request: &mut Request) -> Result<Answer, SendError> {
        upstream::send(&self.pool, request).await
    }

    /// Asks a question whose answer is JSON.
    ///
    /// # Errors
    /// No answer, none in time, the node's own error, or an answer of another shape.
    pub async fn ask<T: DeserializeOwned>(&self, path: &str, headers: &HeaderMap) -> Result<T, Failure> {
        self.exchange(Method::GET, path, headers, Bytes::new()).await
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
        self.exchange(Method::POST, path, headers, body.into()).await
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<T, Failure> {
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = method;
        *request.uri_mut() =
            path.parse().map_err(|_| Failure::new(ErrorKind::InvalidArgument, "the query is malformed"))?;
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("dsec"));
        let (status, body) = self.whole_answer(request).await?;
        if !status.is_success() {
            return Err(match serde_json::from_slice::<ErrorBody>(&body) {
                Ok(error) => Failure(dsec_proto::rest::ApiError(Box::new(error))),
                Err(_) => self.odd(format!("answered {status} without saying why")),
            });
        }
        serde_json::from_slice(&body)
            .map_err(|error| self.odd(format!("gave an answer that is not understood: {error}")))
    }

    async fn whole_answer(&self, mut request: Request) -> Result<(StatusCode, Bytes), Failure> {
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
    /// What they said of themselves.
    pub watched: Watched,
}

impl NodeSet {
    /// The nodes of a configuration.
    pub fn new(configs: &[NodeConfig]) -> Self {
        let all: Vec<Arc<Node>> = configs.iter().map(|config| Arc::new(Node::new(config))).collect();
        let by_name = all.iter().map(|node| (node.name.as_str().to_owned(), Arc::clone(node))).collect();
        let watched = Watched::new(all.iter().map(|node| node.name.clone()));
        Self { all, by_name, turn: AtomicUsize::new(0), watched }
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
        self.watched.gathered().await;
        let mut stores: BTreeMap<String, Vec<(bool, &Arc<Node>)>> = BTreeMap::new();
        for node in nodes {
            if let Some((store, answers)) = self.watched.store(node.name()) {
                stores.entry(store).or_default().push((answers, node));
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
        sharing.sort_by_key(|(answers, _)| !answers);
        Ok(sharing.into_iter().map(|(_, node)| Arc::clone(node)).collect())
    }

    /// Watches the nodes until it is dropped. With one node there is nothing to choose, and it returns at once.
    pub async fn watch(&self) {
        if self.all.len() > 1 {
            join_all(self.all.iter().enumerate().map(|(at, node)| self.watched.watch(at, node))).await;
        }
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
