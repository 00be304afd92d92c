//! Calls about layers and their store: which node carries one out, and what is shown of several (ADR 11).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::rest::{HeldLayer, Image, ImageList};
use futures_util::future::join_all;
use http::{HeaderMap, Method, StatusCode, Uri};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Call;
use super::lists::{identity, partial};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::forward::{self, BodyKind, Outgoing};
use crate::nodes::Node;
use crate::upstream::SendError;

/// How long a node may take to say what it has at hand, which it knows without looking anywhere.
const HELD_TIMEOUT: Duration = Duration::from_secs(3);

/// Where a call goes.
enum Target {
    /// To this node: it is named, or there is no other.
    One(Arc<Node>),
    /// To one of these, the first that can be reached.
    Any(Vec<Arc<Node>>),
}

/// Carries a call out on the node it names, or on any.
pub(super) async fn on_one_node(mut call: Call, body: BodyKind) -> Reply {
    let nodes = match target(&mut call).await? {
        Target::One(node) => vec![node],
        Target::Any(nodes) => nodes,
    };
    let changes_nothing = call.request.method() == Method::GET;
    let mut next = Some(Outgoing::new(call.request, &call.behalf, body).await?);
    let mut refusal: Option<Reply> = None;
    for node in &nodes {
        let Some(mut outgoing) = next.take() else { break };
        let again = outgoing.again();
        match outgoing.try_send(node, &call.app.tunnels).await {
            // It has no room for one more, and did nothing.
            Ok(answer) if answer.status() == StatusCode::TOO_MANY_REQUESTS && again.is_some() => {
                (refusal, next) = (Some(Ok(answer)), again);
            }
            Ok(answer) => return Ok(answer),
            Err(error) => {
                next = match error {
                    SendError::Unreachable(_) => Some(outgoing),
                    SendError::Broken(_) if changes_nothing => again,
                    error => return Err(forward::failure_of(node, error)),
                };
                // A node without room says more than one that is down.
                refusal.get_or_insert_with(|| Err(forward::failure_of(node, error)));
            }
        }
    }
    refusal.unwrap_or_else(|| Err(Failure::new(ErrorKind::Unavailable, "there is no node")))
}

/// The layers of a kind: their names from one node, where they are from all.
pub(super) async fn list(mut call: Call) -> Reply {
    let nodes = match target(&mut call).await? {
        Target::One(node) => return call.forward(&node, BodyKind::Raw).await,
        Target::Any(nodes) => nodes,
    };
    let headers = identity(&call);
    let mut list: ImageList = ask_any(&nodes, call.request.uri().path(), &headers).await?;
    let (held, down) = held::<Vec<HeldLayer>>(&call.app, "/internal/layers", &headers).await;
    let mut by_id: HashMap<String, Vec<HeldLayer>> = HashMap::new();
    for one in held.into_iter().flatten() {
        by_id.entry(one.id.clone()).or_default().push(one);
    }
    for image in &mut list.images {
        show(image, by_id.get(&image.digest).map_or(&[], Vec::as_slice));
    }
    partial(&list, &down)
}

/// One layer: what it is from one node, how it is there from all.
pub(super) async fn get(mut call: Call) -> Reply {
    let nodes = match target(&mut call).await? {
        Target::One(node) => return call.forward(&node, BodyKind::Raw).await,
        Target::Any(nodes) => nodes,
    };
    let headers = identity(&call);
    let mut image: Image = ask_any(&nodes, call.request.uri().path(), &headers).await?;
    let path = format!("/internal/layers/{}", image.digest);
    let (held, down) = held::<HeldLayer>(&call.app, &path, &headers).await;
    show(&mut image, &held);
    partial(&image, &down)
}

fn show(image: &mut Image, held: &[HeldLayer]) {
    image.used_by = held.iter().flat_map(|held| held.used_by.iter().cloned()).collect();
    image.nodes = held.iter().map(|held| held.here.clone()).collect();
}

/// The nodes that a call names with `node=`, which is taken out of it: nodes do not know of it. Empty: it names none.
pub(super) fn take_nodes(call: &mut Call) -> Result<Vec<Arc<Node>>, Failure> {
    let Some((path, query)) =
        call.request.uri().path_and_query().and_then(|all| all.as_str().split_once('?'))
    else {
        return Ok(Vec::new());
    };
    let (mut nodes, mut rest): (Vec<Arc<Node>>, Vec<&str>) = (Vec::new(), Vec::new());
    for pair in query.split('&') {
        match pair.strip_prefix("node=") {
            Some(name) => {
                let node = call.app.nodes.get(name).ok_or_else(|| no_node(&call.app, name))?;
                if !nodes.iter().any(|known| known.name() == node.name()) {
                    nodes.push(node);
                }
            }
            None => rest.push(pair),
        }
    }
    let rest = rest.join("&");
    let separator = if rest.is_empty() { "" } else { "?" };
    let uri: Uri = format!("{path}{separator}{rest}")
        .parse()
        .map_err(|_| Failure::new(ErrorKind::InvalidArgument, "the query is malformed"))?;
    *call.request.uri_mut() = uri;
    Ok(nodes)
}

async fn target(call: &mut Call) -> Result<Target, Failure> {
    let mut named = take_nodes(call)?;
    match (named.pop(), call.app.nodes.only()) {
        (Some(node), _) if named.is_empty() => Ok(Target::One(node)),
        (Some(_), _) => {
            let message = format!("node is given {} times; this is done on one node", named.len() + 1);
            Err(Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": "node" })))
        }
        (None, Some(only)) => Ok(Target::One(only)),
        (None, None) => Ok(Target::Any(call.app.nodes.of_one_store(&call.app.nodes.all()).await?)),
    }
}

fn no_node(app: &App, name: &str) -> Failure {
    let name: String = name.chars().take(80).collect();
    let known: Vec<String> = app.nodes.all().iter().map(|node| node.name().to_string()).collect();
    Failure::new(ErrorKind::InvalidArgument, format!("there is no node {name:?}"))
        .hint(format!("there are: {}", known.join(", ")))
        .detail(json!({ "field": "node", "nodes": known }))
}

/// Asks the nodes one after the other until one answers.
pub(super) async fn ask_any<T: DeserializeOwned>(
    nodes: &[Arc<Node>],
    path: &str,
    headers: &HeaderMap,
) -> Result<T, Failure> {
    let mut failure = None;
    for node in nodes {
        match node.ask(path, headers).await {
            Err(away) if away.0.kind() == ErrorKind::Unavailable => failure = Some(away),
            other => return other,
        }
    }
    Err(failure.unwrap_or_else(|| Failure::new(ErrorKind::Unavailable, "there is no node")))
}

/// What every node has at hand, and the names of those that do not say.
async fn held<T: DeserializeOwned>(app: &App, path: &str, headers: &HeaderMap) -> (Vec<T>, Vec<String>) {
    let nodes = app.nodes.all();
    let asked = nodes.iter().map(|node| tokio::time::timeout(HELD_TIMEOUT, node.ask(path, headers)));
    let (mut held, mut down) = (Vec::new(), Vec::new());
    for (node, answer) in nodes.iter().zip(join_all(asked).await) {
        match answer {
            Ok(Ok(answer)) => held.push(answer),
            _ => down.push(node.name().to_string()),
        }
    }
    (held, down)
}
