//! Prefetching on several nodes: each brings the content to itself, and their lines are told as one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, ErrorBody, LayerOnNode, PrefetchEvent};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::{BoxStream, SelectAll, select_all};
use http::request::Parts;
use http_body_util::{BodyExt, Limited};
use serde_json::json;
use tokio::io::AsyncBufReadExt;
use tokio_util::io::StreamReader;
use tokio_util::task::TaskTracker;

use super::{Call, store, system};
use crate::behalf::Behalf;
use crate::failure::{Failure, Reply};
use crate::forward::{self, BodyKind, Outgoing};
use crate::nodes::{ASK_TIMEOUT, Node};

/// Least time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);
/// Longest refusal of a node that is read, bytes.
const REFUSAL_MAX: usize = 64 << 10;

/// What a node says next; an error if it is its last word and no good one.
pub(super) type Said = Result<PrefetchEvent, ErrorBody>;

/// Brings content to the nodes that the call names, or to all.
pub(super) async fn prefetch(mut call: Call) -> Reply {
    let named = store::take_nodes(&mut call)?;
    let nodes = match named.is_empty() {
        true => call.app.nodes.all(),
        false => named,
    };
    if let [node] = &nodes[..] {
        return call.forward(node, BodyKind::Raw).await;
    }
    // In another store the name may be another layer's.
    call.app.nodes.of_one_store(&nodes).await?;
    let Call { app, behalf, request } = call;
    let (head, body) = request.into_parts();
    let body = forward::whole(body).await?;
    let begin = |node| begin(node, &head, &body, &behalf, &app.tunnels);
    let begun = join_all(nodes.iter().map(begin)).await;
    if begun.iter().all(Result::is_err) {
        // None has begun: it is the call that is wrong, or there is nobody to carry it out.
        let first = begun.into_iter().find_map(Result::err);
        return Err(first.unwrap_or_else(|| Failure::new(ErrorKind::Unavailable, "there is no node")));
    }
    let (mut together, mut lines) = (Together::default(), Vec::new());
    for (node, begun) in nodes.iter().zip(begun) {
        let node = node.name().to_string();
        match begun {
            Ok(body) => lines.push(events(node, body)),
            Err(failure) => drop(together.failed.insert(node, *failure.0.0)),
        }
    }
    Ok(system::text("application/x-ndjson", Body::from_stream(told(together, select_all(lines)))))
}

/// Has a node begin.
///
/// # Errors
/// It does not answer, or not with success.
pub(super) async fn begin(
    node: &Arc<Node>,
    head: &Parts,
    body: &Bytes,
    behalf: &Behalf,
    tunnels: &TaskTracker,
) -> Result<Body, Failure> {
    let request = Request::from_parts(head.clone(), Body::from(body.clone()));
    let outgoing = Outgoing::new(request, behalf, BodyKind::Json).await?;
    let late = || Failure::new(ErrorKind::Unavailable, format!("node {} does not answer", node.name()));
    let answer = tokio::time::timeout(ASK_TIMEOUT, outgoing.send(node, tunnels)).await;
    let answer = answer.map_err(|_| late())??;
    if answer.status().is_success() {
        return Ok(answer.into_body());
    }
    let refusal = Limited::new(answer.into_body(), REFUSAL_MAX).collect().await.map_err(|_| late())?;
    let refusal = serde_json::from_slice(&refusal.to_bytes()).map_err(|_| late())?;
    Err(Failure(ApiError(Box::new(refusal))))
}

/// The events of a node, with its name.
pub(super) fn events(node: String, body: Body) -> BoxStream<'static, (String, Said)> {
    let lines =
        StreamReader::new(body.into_data_stream().map(|piece| piece.map_err(std::io::Error::other))).lines();
    let events = futures_util::stream::unfold(Some(lines), |lines| async move {
        let mut lines = lines?;
        let said = loop {
            let Ok(Some(line)) = lines.next_line().await else {
                let message = "it broke off without saying how it went";
                break Err(*ApiError::new(ErrorKind::Unavailable, message).0);
            };
            match serde_json::from_str(&line) {
                Ok(PrefetchEvent::Error { error }) => break Err(error),
                Ok(event) => break Ok(event),
                // An event of a newer node is passed over.
                Err(_) => {}
            }
        };
        let goes_on = matches!(said, Ok(PrefetchEvent::Progress { .. }));
        Some((said, goes_on.then_some(lines)))
    });
    events.map(move |said| (node.clone(), said)).boxed()
}

/// What was heard of the nodes so far.
#[derive(Default)]
struct Together {
    /// Bytes wanted and left.
    progress: BTreeMap<String, (u64, u64)>,
    done: Vec<LayerOnNode>,
    failed: BTreeMap<String, ErrorBody>,
    told: Option<Instant>,
}

impl Together {
    /// Takes in what a node says, and gives what is to be told of it, if anything.
    fn hear(&mut self, node: String, said: Said) -> Option<PrefetchEvent> {
        match said {
            Ok(PrefetchEvent::Progress { wanted_bytes, left_bytes }) => {
                self.progress.insert(node, (wanted_bytes, left_bytes));
                if self.told.is_some_and(|told| told.elapsed() < PROGRESS_EVERY) {
                    return None;
                }
                self.told = Some(Instant::now());
                let (wanted_bytes, left_bytes) =
                    self.progress.values().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
                Some(PrefetchEvent::Progress { wanted_bytes, left_bytes })
            }
            Ok(PrefetchEvent::Done { nodes }) => {
                self.done.extend(nodes);
                None
            }
            Ok(PrefetchEvent::Error { error }) | Err(error) => {
                self.failed.insert(node, error);
                None
            }
        }
    }

    /// How it went.
    fn outcome(mut self) -> PrefetchEvent {
        let Some((first, error)) = self.failed.first_key_value() else {
            self.done.sort_by(|a, b| a.node.cmp(&b.node));
            return PrefetchEvent::Done { nodes: self.done };
        };
        let (failed, all) = (self.failed.len(), self.failed.len() + self.done.len());
        let message = format!("{failed} of {all} nodes do not have all of it; {first}: {}", error.message);
        let error = ApiError::new(error.code, message)
            .hint("the others have it, and what came to these stays: try again with node=NAME")
            .detail(json!({ "nodes": self.failed }));
        PrefetchEvent::Error { error: *error.0 }
    }
}

/// One line for what the nodes say together, now and then, and one for how it went.
fn told(
    together: Together,
    events: SelectAll<BoxStream<'static, (String, Said)>>,
) -> impl futures_util::Stream<Item = Result<Bytes, std::convert::Infallible>> {
    futures_util::stream::unfold(Some((together, events)), |going| async move {
        let (mut together, mut events) = going?;
        while let Some((node, said)) = events.next().await {
            if let Some(event) = together.hear(node, said) {
                return Some((Ok(system::line(&event)), Some((together, events))));
            }
        }
        Some((Ok(system::line(&together.outcome())), None))
    })
}
