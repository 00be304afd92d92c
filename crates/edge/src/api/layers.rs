//! What is done with layers beyond their names: traces, prefetching, tags, exports; and the care of their store.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use dsec_image::layer::LayerKind;
use dsec_model::ErrorKind;
use dsec_proto::rest::{
    ApiError, CollectEvent, Collected, Finding, PrefetchEvent, PrefetchRequest, VerifyEvent,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{Answer, Caller, OptionalJson, Params, PathOf, Shared, json, ndjson};
use crate::error::{internal, invalid_field};
use crate::layers::{Exported, parse_kind, parse_name, parse_step};
use crate::node::Node;

/// Lines that may wait for the caller; a full queue drops progress, never the result.
const LINES: usize = 16;
/// Least time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// How often a caller hears that a collection goes on: connections on the way stay open.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Pieces of an export that may wait for its reader.
const PIECES: usize = 8;
/// Bytes of one piece.
const PIECE: usize = 256 << 10;

pub(super) async fn trace(State(node): Shared, PathOf((kind, name)): PathOf<(String, String)>) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.trace(parse_kind(&kind)?, &name).await?))
}

/// The layers at hand, for control.
pub(super) async fn held(State(node): Shared, caller: Caller) -> Answer {
    let mut held = node.layers.held_layers();
    for layer in &mut held {
        caller.leave_seen(&node, &mut layer.used_by);
    }
    Ok(json(StatusCode::OK, &held))
}

/// One layer as it is here, for control.
pub(super) async fn held_layer(State(node): Shared, caller: Caller, PathOf(id): PathOf<String>) -> Answer {
    let id = id.parse().map_err(|_| invalid_field("id", format!("{id:?} is no id of a layer")))?;
    let mut held = node.layers.held_with_content(&id).await;
    caller.leave_seen(&node, &mut held.used_by);
    Ok(json(StatusCode::OK, &held))
}

pub(super) async fn tag(
    State(node): Shared,
    PathOf((kind, name, tag)): PathOf<(String, String, String)>,
) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.tag(parse_kind(&kind)?, &name, &tag).await?))
}

pub(super) async fn prefetch(
    State(node): Shared,
    PathOf((kind, name)): PathOf<(String, String)>,
    OptionalJson(request): OptionalJson<PrefetchRequest>,
) -> Answer {
    let kind = parse_kind(&kind)?;
    takes_work(&node)?;
    // A name that is none fails at once.
    node.layers.get(kind, &name).await?;
    let (lines, receiver) = mpsc::channel(LINES);
    tokio::spawn(async move {
        let tell = |wanted_bytes, left_bytes| {
            let _ = lines.try_send(PrefetchEvent::Progress { wanted_bytes, left_bytes });
            !lines.is_closed()
        };
        let event = match node.layers.prefetch(kind, &name, request.what, tell).await {
            Ok(here) => PrefetchEvent::Done { nodes: vec![here] },
            Err(error) => PrefetchEvent::Error { error: *error.0 },
        };
        let _ = lines.send(event).await;
    });
    Ok(told(receiver))
}

pub(super) async fn verify_layer(
    State(node): Shared,
    PathOf((kind, name)): PathOf<(String, String)>,
) -> Answer {
    let kind = parse_kind(&kind)?;
    node.layers.get(kind, &name).await?;
    verify(node, Some((kind, name)))
}

pub(super) async fn verify_store(State(node): Shared) -> Answer {
    verify(node, None)
}

fn verify(node: Arc<Node>, layer: Option<(LayerKind, String)>) -> Answer {
    takes_work(&node)?;
    let place = node.layers.care.enter()?;
    let (lines, receiver) = mpsc::channel(LINES);
    let verifying = move || {
        let mut last = Instant::now();
        let mut tell = |seen: &dsec_store::Verified| {
            if last.elapsed() >= PROGRESS_EVERY {
                last = Instant::now();
                let (layers, packs, pack_bytes) = (seen.layers, seen.packs, seen.pack_bytes);
                let _ = lines.try_send(VerifyEvent::Progress { layers, packs, pack_bytes });
            }
            !lines.is_closed()
        };
        let event = match node.layers.verify(layer, &mut tell) {
            Ok(dsec_store::Verified { layers, packs, pack_bytes, findings }) => {
                let shown = |finding: dsec_store::Finding| Finding {
                    object: finding.object,
                    problem: finding.problem.to_string(),
                };
                let findings = findings.into_iter().map(shown).collect();
                VerifyEvent::Done { layers, packs, pack_bytes, findings }
            }
            Err(error) => VerifyEvent::Error { error: *error.0 },
        };
        let _ = lines.blocking_send(event);
    };
    tokio::spawn(place.run(verifying));
    Ok(told(receiver))
}

pub(super) async fn step(State(node): Shared, PathOf(key): PathOf<String>) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.step(&parse_step(&key)?).await?))
}

pub(super) async fn name_step(State(node): Shared, PathOf((key, name)): PathOf<(String, String)>) -> Answer {
    Ok(json(StatusCode::OK, &node.layers.name_step(&parse_step(&key)?, &parse_name(&name)?).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CollectParams {
    /// What is younger stays, seconds.
    grace_s: Option<u64>,
    /// Steps of recipes that were used since stay, seconds.
    step_age_s: Option<u64>,
}

pub(super) async fn collect(State(node): Shared, Params(params): Params<CollectParams>) -> Answer {
    takes_work(&node)?;
    let place = node.layers.care.enter()?;
    let (lines, receiver) = mpsc::channel(LINES);
    tokio::spawn(async move {
        let begun = Instant::now();
        let (grace, step_age) =
            (params.grace_s.map(Duration::from_secs), params.step_age_s.map(Duration::from_secs));
        let mut collecting = std::pin::pin!(place.run(move || node.layers.collect_now(grace, step_age)));
        let ended = loop {
            let _ = lines.try_send(CollectEvent::Progress { elapsed_ms: begun.elapsed().as_millis() as u64 });
            if let Ok(ended) = tokio::time::timeout(SIGN_OF_LIFE, &mut collecting).await {
                break ended;
            }
        };
        let ended = ended.unwrap_or_else(|e| Err(internal("the collection met a defect in the edge", &e)));
        let event = match ended {
            Ok(done) => CollectEvent::Done {
                collected: Collected {
                    layers: done.layers,
                    indexes: done.indexes,
                    packs: done.packs,
                    pack_bytes: done.pack_bytes,
                    leftovers: done.leftovers,
                },
            },
            Err(error) => CollectEvent::Error { error: *error.0 },
        };
        let _ = lines.send(event).await;
    });
    Ok(told(receiver))
}

pub(super) async fn export(State(node): Shared, PathOf((kind, name)): PathOf<(String, String)>) -> Answer {
    let kind = parse_kind(&kind)?;
    takes_work(&node)?;
    let turn = node.layers.care.enter()?.turn().await;
    let exported = node.layers.export(kind, &name).await?;
    let (pieces, receiver) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        if let Err(error) = write_tar(&exported, Pieces { pieces: pieces.clone(), held: Vec::new() }) {
            // The reader sees that the archive does not end.
            tracing::warn!(%error, "an export was not sent whole");
            let _ = pieces.blocking_send(Err(error));
        }
    });
    let pieces = futures_util::stream::unfold(receiver, |mut receiver| async move {
        Some((receiver.recv().await?, receiver))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(response)
}

fn write_tar(exported: &Exported, out: Pieces) -> io::Result<()> {
    let mut tar = tar::Builder::new(out);
    tar.append_dir_all(".", exported.layout())?;
    tar.into_inner()?.flush()
}

/// Hands bytes over to whoever reads the answer.
struct Pieces {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    held: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE - self.held.len());
        self.held.extend_from_slice(&bytes[..taken]);
        if self.held.len() == PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = Bytes::from(std::mem::take(&mut self.held));
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the reader hung up");
        if piece.is_empty() { Ok(()) } else { self.pieces.blocking_send(Ok(piece)).map_err(gone) }
    }
}

fn takes_work(node: &Node) -> Result<(), ApiError> {
    match node.is_draining() {
        true => Err(ApiError::new(ErrorKind::Unavailable, "the node is going down and begins nothing more")),
        false => Ok(()),
    }
}

/// Events as lines.
fn told<E: Serialize + Send + 'static>(receiver: mpsc::Receiver<E>) -> Response {
    ndjson(Body::from_stream(futures_util::stream::unfold(receiver, |mut receiver| async move {
        let mut line = serde_json::to_vec(&receiver.recv().await?).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), receiver))
    })))
}
