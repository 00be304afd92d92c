//! One create on its way to a node: which are tried, in which order, and why none took it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use dsec_model::limits::cores_to_millis;
use dsec_model::placement::{self, Pools, Refusals, TRIES_MAX, Tries, Wanted};
use dsec_model::{ErrorKind, Limits, PoolName, Shortage};
use dsec_proto::rest::{
    BACKEND_CONTAINER, ErrorBody, FenceRequest, Fenced, IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY,
    IDEMPOTENCY_KEY_MAX, SandboxLimits,
};
use futures_util::future::join_all;
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::json;

use crate::app::App;
use crate::behalf::{self, Behalf};
use crate::failure::{Failure, Reply};
use crate::forward::{self, BodyKind, Outgoing};
use crate::nodes::Node;
use crate::pools::Route;
use crate::upstream::SendError;

/// A create, as it is sent to whichever node takes it.
pub struct Create {
    /// Its head.
    pub head: Parts,
    /// Its body, a `CreateSandboxRequest`.
    pub body: Bytes,
    /// What of the body decides where it can go.
    pub needs: Arc<Needs>,
    /// Its idempotency key.
    pub key: Option<String>,
    /// Which attempt of the caller's it is.
    pub attempt: Option<u32>,
}

impl Create {
    /// Sends it to one node after the other until one takes it. `identity` says on whose behalf nodes are asked.
    ///
    /// # Errors
    /// None did, or one did not say whether.
    pub async fn place(self, app: &App, behalf: &Behalf, identity: &HeaderMap) -> Reply {
        let answer = self.on_some_node(app, behalf, identity).await?;
        if answer.status().is_success() {
            app.pools.accessed(&self.needs);
        }
        Ok(answer)
    }

    async fn on_some_node(&self, app: &App, behalf: &Behalf, identity: &HeaderMap) -> Reply {
        if let Some((at, node)) = app.nodes.only_placed() {
            let sent = self.send(app, behalf, at, &node, true).await?;
            return sent.map_err(|error| forward::failure_of(&node, error));
        }
        if app.nodes.is_empty() {
            return Err(Failure::new(ErrorKind::Unavailable, "there is no node to run a sandbox on")
                .hint("`dsec cluster token` lets one join"));
        }
        app.nodes.watched.gathered().await;
        let mut placement = Placement::new(app, behalf, self);
        let mut is_first = true;
        if let (Some(key), Some(attempt @ 2..)) = (&self.key, self.attempt) {
            placement.order = find(app, identity, key, attempt).await?.map(|at| vec![at]);
        }
        while let Some((at, sent_ms)) = placement.next(app) {
            let Some(node) = app.nodes.at(at) else {
                app.nodes.watched.refused(at, sent_ms);
                continue;
            };
            let sent = self.send(app, behalf, at, &node, std::mem::take(&mut is_first)).await;
            match sent.inspect_err(|_| app.nodes.watched.refused(at, sent_ms))? {
                Ok(answer) if answer.status() == StatusCode::TOO_MANY_REQUESTS => {
                    app.nodes.watched.refused(at, sent_ms);
                    placement.refused(short_of(answer).await);
                }
                Err(SendError::Unreachable(_)) => {
                    app.nodes.watched.refused(at, sent_ms);
                    app.nodes.watched.unreachable(at);
                    placement.refusals.add("unreachable");
                }
                Ok(answer) => {
                    placement.answered(app, answer.status());
                    return Ok(answer);
                }
                Err(error) => return Err(forward::failure_of(&node, error)),
            }
        }
        Err(placement.failure(app))
    }

    /// Sends it to one node, counted in the quotas of its project.
    async fn send(
        &self,
        app: &App,
        behalf: &Behalf,
        at: usize,
        node: &Arc<Node>,
        is_first: bool,
    ) -> Result<Result<Response, SendError>, Failure> {
        let counting = app.quotas.charge(app, behalf, at, &self.needs, is_first).await?;
        let request = Request::from_parts(self.head.clone(), Body::from(self.body.clone()));
        let mut outgoing = Outgoing::new(request, behalf, BodyKind::Json).await?;
        behalf::write_charge(outgoing.headers_mut(), &counting.charge)?;
        let sent = outgoing.try_send(node, &app.tunnels).await;
        match &sent {
            Ok(answer) if answer.status() == StatusCode::TOO_MANY_REQUESTS => counting.refused(),
            Ok(_) => counting.answered(),
            Err(SendError::Unreachable(_)) => counting.refused(),
            Err(_) => drop(counting),
        }
        Ok(sent)
    }
}

/// What a node that refuses is counted as when it does not say what it is short of.
const WITHOUT_ROOM: &str = "without room";
/// Labels, features or toolkits of a request that are looked at: what nodes take of any.
const NEEDS_MAX: usize = 128;
/// Longest refusal that is read, bytes.
const REFUSAL_MAX: usize = 64 << 10;

/// What a node that refused said it is short of.
async fn short_of(answer: Response) -> Option<Shortage> {
    let body = Limited::new(answer.into_body(), REFUSAL_MAX).collect().await.ok()?;
    let refusal: ErrorBody = serde_json::from_slice(&body.to_bytes()).ok()?;
    Shortage::deserialize(refusal.detail.get("short")?).ok()
}

/// What of a request decides where it can go.
#[derive(Default)]
pub struct Needs {
    pool: Option<PoolName>,
    architecture: Option<String>,
    backend: Option<String>,
    labels: BTreeMap<String, String>,
    features: Vec<String>,
    /// Names of its layers with their kinds, in order, with a space between them.
    layers: String,
    numbers: Vec<u64>,
    cpu_millis: Option<u64>,
    memory_mib: Option<u64>,
    disk_mib: Option<u64>,
}

impl Needs {
    /// Reads it out of a request. One that is malformed, or has more of anything than nodes take, goes anywhere, and the node says why.
    pub fn of(body: &[u8]) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Said {
            pool: Option<String>,
            architecture: Option<String>,
            backend: Option<String>,
            node_labels: BTreeMap<String, String>,
            node_features: Vec<String>,
            container_image: String,
            workspace: Option<String>,
            toolkits: Vec<String>,
            cpu_cores_limit: Option<f64>,
            memory_limit_mb: Option<u64>,
            disk_limit_mb: Option<u64>,
        }
        let said: Said = serde_json::from_slice(body).unwrap_or_default();
        let most = said.node_labels.len().max(said.node_features.len()).max(said.toolkits.len());
        let limits = Self {
            pool: said.pool.as_deref().and_then(|pool| pool.parse().ok()),
            architecture: said.architecture,
            cpu_millis: said.cpu_cores_limit.and_then(cores_to_millis),
            memory_mib: said.memory_limit_mb,
            disk_mib: said.disk_limit_mb,
            ..Self::default()
        };
        if most > NEEDS_MAX {
            return Self { backend: said.backend, ..limits };
        }
        let layers = layers_of(&said.container_image, said.workspace.as_deref(), &said.toolkits);
        let workspace = said.workspace.as_deref().map(without_kind);
        let names = [said.container_image.as_str()].into_iter().chain(workspace);
        let names = names.chain(said.toolkits.iter().map(String::as_str)).filter(|name| !name.is_empty());
        Self {
            backend: said.backend,
            labels: said.node_labels,
            features: said.node_features,
            layers,
            numbers: names.map(placement::layer_number).collect(),
            ..limits
        }
    }

    /// The pool that it asks for.
    pub fn pool(&self) -> Option<PoolName> {
        self.pool.clone()
    }

    /// Names of its layers with their kinds, each once and in order, with a space between them: `base/debian workspace/click`. Nothing
    /// where it has no image, or was not understood.
    pub fn layers(&self) -> &str {
        &self.layers
    }

    /// The backend it is for.
    pub fn backend(&self) -> &str {
        self.backend.as_deref().unwrap_or(BACKEND_CONTAINER)
    }

    /// What it may use, on a node whose sandboxes have these limits when nothing is said.
    pub fn limits(&self, defaults: Option<&SandboxLimits>) -> Limits {
        let unsaid = Limits::default();
        let cpu = defaults.and_then(|limits| cores_to_millis(limits.cpu_cores_limit));
        let (memory, disk) = (defaults.map(|it| it.memory_limit_mb), defaults.map(|it| it.disk_limit_mb));
        Limits {
            cpu_millis: self.cpu_millis.or(cpu).unwrap_or(unsaid.cpu_millis),
            memory_mib: self.memory_mib.or(memory).unwrap_or(unsaid.memory_mib),
            disk_mib: self.disk_mib.or(disk).unwrap_or(unsaid.disk_mib),
            ..unsaid
        }
    }

    /// The same as placement takes it, in any pool.
    pub fn wanted(&self) -> Wanted<'_> {
        self.wanted_in(Pools::All)
    }

    /// The same in some pools.
    pub fn wanted_in<'a>(&'a self, pools: Pools<'a>) -> Wanted<'a> {
        Wanted {
            pools,
            layers: &self.numbers,
            backend: self.backend(),
            labels: Some(&self.labels),
            features: &self.features,
            architecture: self.architecture.as_deref(),
            ..Wanted::default()
        }
    }
}

/// See [`Needs::layers`]. The layer of a recipe's step is its own: nobody starts many sandboxes of it.
fn layers_of(image: &str, workspace: Option<&str>, toolkits: &[String]) -> String {
    let is_kinded =
        |name: &str| ["workspace/", "snapshot/", "step/"].iter().any(|kind| name.starts_with(kind));
    let workspace =
        workspace.map(|name| if is_kinded(name) { name.to_owned() } else { format!("workspace/{name}") });
    let toolkits = toolkits.iter().map(|name| format!("toolkit/{name}"));
    let mut layers: Vec<String> =
        std::iter::once(format!("base/{image}")).chain(workspace).chain(toolkits).collect();
    let is_odd = |layer: &String| layer.starts_with("step/") || layer.ends_with('/') || layer.contains(' ');
    if layers.iter().any(is_odd) {
        return String::new();
    }
    layers.sort_unstable();
    layers.dedup();
    layers.join(" ")
}

/// What a workspace is called where its kind is not said with it: nodes write it down so.
fn without_kind(name: &str) -> &str {
    ["workspace/", "snapshot/"].into_iter().find_map(|kind| name.strip_prefix(kind)).unwrap_or(name)
}

/// One create on its way over the nodes: each is tried once.
struct Placement {
    needs: Arc<Needs>,
    route: Route,
    /// Where on its route it is.
    leg: usize,
    tries: Tries,
    /// The nodes still to try, the next one last, of a create that must meet an earlier one.
    order: Option<Vec<usize>>,
    refusals: Refusals,
    /// Whether a node would take it at another time.
    is_full: bool,
}

impl Placement {
    fn new(app: &App, behalf: &Behalf, create: &Create) -> Self {
        let needs = Arc::clone(&create.needs);
        let is_again = create.key.is_some() && create.attempt.is_none();
        let route = app.pools.route(app, &needs, is_again);
        // Who does not count attempts may be here for the second time.
        let order = create.key.as_ref().filter(|_| create.attempt.is_none()).map(|key| {
            let nodes = app.nodes.placed();
            let names = nodes.iter().map(|(_, node)| node.name().as_str());
            let scoped = [behalf.project.as_str().as_bytes(), b"\0", key.as_bytes()].concat();
            let mut order = placement::keyed_order(names, &scoped);
            order.iter_mut().for_each(|at| *at = nodes[*at].0);
            // What a node is does not change between two attempts, as its load does.
            let never = app.nodes.watched.never(&needs.wanted_in(route.all()));
            order.retain(|at| !never.contains(at));
            order.truncate(TRIES_MAX);
            order.reverse();
            order
        });
        let (tries, refusals) = (Tries::default(), Refusals::default());
        Self { needs, route, leg: 0, tries, order, refusals, is_full: false }
    }

    /// The node to try next, and when that was.
    fn next(&mut self, app: &App) -> Option<(usize, u64)> {
        if let Some(order) = &mut self.order {
            return order.pop().map(|at| (at, app.nodes.watched.placed(at)));
        }
        loop {
            let wanted = self.needs.wanted_in(self.route.leg(self.leg)?);
            if let Some(found) = app.nodes.watched.place(&wanted, &mut self.tries) {
                return Some(found);
            }
            if self.route.is_diverted(self.leg) {
                app.pools.refused();
            }
            self.leg += 1;
            self.tries.in_another_pool();
        }
    }

    /// A node answered, and no other is asked.
    fn answered(&self, app: &App, status: StatusCode) {
        if status.is_success() && self.order.is_none() && self.route.is_diverted(self.leg) {
            app.pools.diverted();
        }
    }

    /// A node that was asked said no.
    fn refused(&mut self, short: Option<Shortage>) {
        self.is_full |= !matches!(short, Some(Shortage::Cordoned | Shortage::Draining));
        self.refusals.add(short.map_or_else(|| WITHOUT_ROOM.to_owned(), |short| short.to_string()));
    }

    /// Why no node took it, all in one.
    fn failure(self, app: &App) -> Failure {
        let Self { needs, route, tries, order, mut refusals, is_full, .. } = self;
        let was_asked = !refusals.counts().is_empty();
        let never = (order.is_none() || !was_asked)
            && app.nodes.watched.add_unfit(&needs.wanted_in(route.all()), &tries, &mut refusals);
        let kind = match (is_full, never && !was_asked) {
            (true, _) => ErrorKind::ResourceExhausted,
            (false, true) => ErrorKind::Unsupported,
            (false, false) => ErrorKind::Unavailable,
        };
        let hint = match kind {
            ErrorKind::ResourceExhausted => {
                "stop sandboxes you do not need, ask for less, or try again later"
            }
            _ => "`dsec node ls` shows the nodes",
        };
        Failure::new(kind, format!("no node takes the sandbox: {refusals}"))
            .hint(hint)
            .detail(json!({ "refusals": refusals.counts() }))
    }
}

/// The node that took an earlier attempt of a create, or is about to. When none has, none will: each that answers takes no
/// earlier attempt from now on.
async fn find(app: &App, headers: &HeaderMap, key: &str, attempt: u32) -> Result<Option<usize>, Failure> {
    let nodes = app.nodes.placed();
    let question = FenceRequest { key: key.to_owned(), attempt };
    let answers: Vec<Result<Fenced, Failure>> =
        join_all(nodes.iter().map(|(_, node)| node.tell("/internal/keys/fence", headers, &question))).await;
    if let Some(at) = answers.iter().position(|answer| matches!(answer, Ok(Fenced { known: true }))) {
        return Ok(Some(nodes[at].0));
    }
    // An edge of before this question says that there is no such path.
    let is_silent = |answer: &Result<Fenced, Failure>| {
        answer.as_ref().is_err_and(|failure| failure.0.kind() != ErrorKind::NotFound)
    };
    let silent = nodes
        .iter()
        .zip(&answers)
        .filter(|((_, node), answer)| is_silent(answer) && !app.nodes.watched.is_lost(node.name()));
    let silent: Vec<&str> = silent.map(|((_, node), _)| node.name().as_str()).collect();
    if silent.is_empty() {
        return Ok(None);
    }
    let message = format!(
        "an earlier attempt may have made the sandbox on a node that does not answer: {}",
        silent.join(", ")
    );
    Err(Failure::new(ErrorKind::Unavailable, message)
        .hint("try again: when the node answers its sandbox is found, when it is lost another is made")
        .detail(json!({ "nodes": silent })))
}

/// Which attempt of its caller's a request is, where that is said.
///
/// # Errors
/// It is no number from 1.
pub fn attempt(headers: &HeaderMap) -> Result<Option<u32>, Failure> {
    let Some(value) = headers.get(IDEMPOTENCY_ATTEMPT) else { return Ok(None) };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(attempt @ 1..) => Ok(Some(attempt)),
        _ => Err(Failure::new(
            ErrorKind::InvalidArgument,
            format!("{IDEMPOTENCY_ATTEMPT} must be a number from 1"),
        )
        .detail(json!({ "field": IDEMPOTENCY_ATTEMPT }))),
    }
}

/// The key of a request, where it has one.
///
/// # Errors
/// It is too long, or not visible ASCII.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(text)
            if (1..=IDEMPOTENCY_KEY_MAX).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_graphic()) =>
        {
            Ok(Some(text.to_owned()))
        }
        _ => Err(Failure::new(
            ErrorKind::InvalidArgument,
            format!("{IDEMPOTENCY_KEY} must be 1 to {IDEMPOTENCY_KEY_MAX} visible ASCII characters"),
        )
        .detail(json!({ "field": IDEMPOTENCY_KEY }))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandboxs_layers_are_named_with_their_kinds_and_in_one_order() {
        for (body, layers) in [
            (r#"{"container_image":"debian:12"}"#, "base/debian:12"),
            (
                r#"{"container_image":"z","workspace":"click","toolkits":["vim","ed","vim"]}"#,
                "base/z toolkit/ed toolkit/vim workspace/click",
            ),
            (r#"{"container_image":"z","workspace":"workspace/click"}"#, "base/z workspace/click"),
            (r#"{"container_image":"z","workspace":"snapshot/click"}"#, "base/z snapshot/click"),
            (r#"{"container_image":"z","workspace":"step/12ab"}"#, ""),
            (r#"{"container_image":"z y"}"#, ""),
            (r#"{"workspace":"click"}"#, ""),
            ("no JSON", ""),
        ] {
            assert_eq!(Needs::of(body.as_bytes()).layers(), layers, "{body}");
        }
        let asks = |pool: &str| Needs::of(format!(r#"{{"pool":"{pool}"}}"#).as_bytes()).pool();
        assert_eq!(asks("cloud").map(String::from).as_deref(), Some("cloud"));
        assert_eq!(asks("The Cloud"), None, "its node says what is wrong with it");
    }
}
