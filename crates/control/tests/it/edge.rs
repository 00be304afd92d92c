//! A node that does as the caller's `x-fake` header says.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{FromRequestParts, Query, Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use bytes::Bytes;
use dsec_model::{ErrorKind, Journal, SandboxId, State, TaskId};
use dsec_proto::rest::{
    ApiError, BlobContent, CHANGES_MAX, FenceRequest, Fenced, HeldLayer, Image, ImageList, LayerContent,
    LayerOnNode, NodeStatus, NodeUsage, Position, PrefetchEvent, Sandbox, SandboxChange, SandboxChanges,
    SandboxFilter, SandboxForgotten, SandboxList, SandboxOwner, SandboxShape, SandboxesById, Task, TaskList,
};
use futures_util::{StreamExt, stream};
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

pub(crate) const BEHAVIOUR: &str = "x-fake";

/// What a node notes and is told.
pub(crate) struct Notes {
    pub(crate) name: String,
    /// Connections taken so far.
    pub(crate) accepted: AtomicUsize,
    /// Requests answered or begun, health checks and watchers' questions aside.
    pub(crate) requests: AtomicUsize,
    /// Answers 429 to creates and pulls.
    pub(crate) full: AtomicBool,
    /// Cuts the connection of every request that it has read.
    pub(crate) cut: AtomicBool,
    /// Its layer store.
    pub(crate) store: Mutex<String>,
    /// What it says of a prefetch, a line each.
    pub(crate) prefetch: Mutex<Vec<PrefetchEvent>>,
    /// A permit for each request with `x-fake: gate`.
    pub(crate) gate: Semaphore,
    /// A permit for each request with `x-fake: gate` or `hang` that has arrived.
    pub(crate) arrived: Semaphore,
    /// A permit for each such request whose caller has gone.
    pub(crate) abandoned: Semaphore,
    /// Idempotency keys of creates that it took.
    pub(crate) keys: Mutex<BTreeSet<String>>,
    /// Memory that it says is in use, of 100,000 MiB.
    pub(crate) memory_used_mib: AtomicU64,
    /// What it says it is short of when it is full.
    pub(crate) short: Mutex<Option<&'static str>>,
    /// Names of layers that it says are at hand.
    pub(crate) layers: Mutex<Vec<String>>,
    /// The pool that it says it is of.
    pub(crate) pool: Mutex<&'static str>,
    /// Images by name, with their bytes, whose content it can be asked to bring in; those of which it says that it cannot, and those
    /// that it has.
    pub(crate) images: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) unreadable: Mutex<BTreeSet<&'static str>>,
    pub(crate) brought: Mutex<BTreeSet<String>>,
    /// What it lists, newest first.
    pub(crate) sandboxes: Mutex<Vec<Sandbox>>,
    /// It is of a version that does not tell of its sandboxes.
    pub(crate) old: AtomicBool,
    /// It takes requests and answers none.
    pub(crate) hung: AtomicBool,
    /// Which start of it counts.
    pub(crate) epoch: AtomicUsize,
    /// What of its sandboxes it told.
    journal: Mutex<Journal<SandboxId, (u64, State)>>,
    /// Changes of one answer.
    pub(crate) changes_max: AtomicUsize,
    /// Sandboxes that it was asked for by their ids.
    pub(crate) asked_by_id: AtomicUsize,
}

/// A node on a Unix socket.
pub(crate) struct FakeEdge {
    pub(crate) socket: PathBuf,
    pub(crate) notes: Arc<Notes>,
    task: JoinHandle<()>,
}

impl FakeEdge {
    pub(crate) fn start(dir: &Path, name: &str) -> Self {
        let notes = Arc::new(Notes {
            name: name.to_owned(),
            accepted: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            store: Mutex::new("one".to_owned()),
            prefetch: Mutex::default(),
            gate: Semaphore::new(0),
            arrived: Semaphore::new(0),
            abandoned: Semaphore::new(0),
            keys: Mutex::default(),
            memory_used_mib: AtomicU64::new(0),
            short: Mutex::default(),
            layers: Mutex::default(),
            pool: Mutex::new("onprem"),
            images: Mutex::default(),
            unreadable: Mutex::default(),
            brought: Mutex::default(),
            sandboxes: Mutex::new(Vec::new()),
            old: AtomicBool::new(false),
            hung: AtomicBool::new(false),
            epoch: AtomicUsize::new(0),
            journal: Mutex::default(),
            changes_max: AtomicUsize::new(CHANGES_MAX),
            asked_by_id: AtomicUsize::new(0),
        });
        let socket = dir.join(format!("{name}.sock"));
        let task = serve(&socket, Arc::clone(&notes));
        Self { socket, notes, task }
    }

    /// Ends it as a kill would: every connection is cut, the socket's file stays.
    pub(crate) async fn kill(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Starts it again on the same socket.
    pub(crate) fn restart(&mut self) {
        self.notes.epoch.fetch_add(1, Ordering::SeqCst);
        *self.notes.journal.lock().unwrap() = Journal::default();
        self.task = serve(&self.socket, Arc::clone(&self.notes));
    }

    pub(crate) fn accepted(&self) -> usize {
        self.notes.accepted.load(Ordering::SeqCst)
    }

    pub(crate) fn requests(&self) -> usize {
        self.notes.requests.load(Ordering::SeqCst)
    }
}

impl Drop for FakeEdge {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn serve(socket: &Path, notes: Arc<Notes>) -> JoinHandle<()> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    let router = Router::new().fallback(handle).with_state(Arc::clone(&notes));
    tokio::spawn(async move {
        // Dropped with the task, and every connection with it.
        let mut connections = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            notes.accepted.fetch_add(1, Ordering::SeqCst);
            let service = TowerToHyperService::new(router.clone());
            connections.spawn(
                http1::Builder::new()
                    .max_buf_size(1 << 20)
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades(),
            );
            while connections.try_join_next().is_some() {}
        }
    })
}

/// Notes that the caller has gone, unless it is disarmed.
struct Abandoned(Option<Arc<Notes>>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(notes) = self.0.take() {
            notes.abandoned.add_permits(1);
        }
    }
}

async fn handle(Shared(notes): Shared<Arc<Notes>>, request: Request) -> Response {
    if notes.hung.load(Ordering::SeqCst) {
        pending::<()>().await;
    }
    let is_old = notes.old.load(Ordering::SeqCst);
    match request.uri().path() {
        "/internal/sandboxes/changes" if !is_old => return changes(&notes, &request),
        "/internal/sandboxes/get" if !is_old => return by_id(&notes, request).await,
        "/internal/sandboxes/changes" | "/internal/sandboxes/get" => return no_path(),
        "/v1/tasks" => return tasks(&notes),
        "/healthz" => return Json(json!({ "status": "ok" })).into_response(),
        "/v1/nodes" => return Json(json!({ "nodes": [status(&notes)] })).into_response(),
        "/internal/keys/fence" => return fence(&notes, request).await,
        "/internal/layers" => return Json([held(&notes)]).into_response(),
        "/internal/layers/d1" => return Json(held(&notes)).into_response(),
        path => {
            if let Some(answer) = stored(&notes, path) {
                return answer;
            }
        }
    }
    notes.requests.fetch_add(1, Ordering::SeqCst);
    if notes.cut.load(Ordering::SeqCst) {
        let _read = request.into_body().collect().await;
        // The connection goes with the task.
        std::panic::resume_unwind(Box::new("cut"));
    }
    let behaviour = request.headers().get(BEHAVIOUR).map(|value| value.to_str().unwrap().to_owned());
    match behaviour.as_deref() {
        Some("echo") => Response::new(Body::new(request.into_body())),
        Some("hang") => {
            let _abandoned = Abandoned(Some(Arc::clone(&notes)));
            notes.arrived.add_permits(1);
            pending().await
        }
        Some("gate") => {
            let mut abandoned = Abandoned(Some(Arc::clone(&notes)));
            notes.arrived.add_permits(1);
            notes.gate.acquire().await.unwrap().forget();
            abandoned.0 = None;
            report(&notes, request).await
        }
        Some("half") => half(),
        // The body stays unread, and the connection is closed under whoever sends it.
        Some("refuse") => refuse(),
        Some("quick") => Json(json!({ "id": "ex-1", "state": "exited", "exit_code": 0 })).into_response(),
        Some("fill") => fill(),
        Some("drain") => drain(request).await,
        Some("websocket") => websocket(request).await,
        _ if request.uri().path() == "/v1/sandboxes" => sandboxes(&notes, request).await,
        _ if request.method() == "GET" && request.uri().path() == "/v1/images" => {
            let stored = notes.images.lock().unwrap().clone().into_keys();
            let digest = |name: &str| format!("digest-of-{name}");
            let stored =
                stored.map(|name| Image { name: name.to_owned(), digest: digest(name), ..image(&notes) });
            let images = [image(&notes)].into_iter().chain(stored).collect();
            Json(ImageList { images }).into_response()
        }
        _ if request.method() == "GET" && request.uri().path() == "/v1/layers/toolkit/t" => {
            Json(image(&notes)).into_response()
        }
        _ if request.uri().path().ends_with("/prefetch") => prefetch(&notes),
        _ if request.uri().path().ends_with("/pull") && notes.full.load(Ordering::SeqCst) => full(&notes),
        _ => report(&notes, request).await,
    }
}

/// Says what arrived.
async fn report(notes: &Notes, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let headers: Vec<(String, String)> = parts
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    Json(json!({
        "node": notes.name,
        "method": parts.method.as_str(),
        "uri": parts.uri.to_string(),
        "headers": headers,
        "length": body.len(),
        "sha256": format!("{:x}", Sha256::digest(&body)),
    }))
    .into_response()
}

async fn fence(notes: &Notes, request: Request) -> Response {
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let asked: FenceRequest = serde_json::from_slice(&body).unwrap();
    Json(Fenced { known: notes.keys.lock().unwrap().contains(&asked.key) }).into_response()
}

fn refuse() -> Response {
    let body = json!({ "code": "conflict", "message": "it is stopped", "detail": {}, "hint": "" });
    (StatusCode::CONFLICT, Json(body)).into_response()
}

/// Sends half of what its length promises, then nothing.
fn half() -> Response {
    let first = stream::once(async { Ok::<_, Infallible>(Bytes::from_static(&[7; 500])) });
    let mut response = Response::new(Body::from_stream(first.chain(stream::pending())));
    response.headers_mut().insert("content-length", "1000".parse().unwrap());
    response
}

/// Bytes of [`fill`]'s answer.
pub(crate) const FILL: usize = 1 << 30;

fn fill() -> Response {
    const CHUNK: usize = 256 << 10;
    let chunk = Bytes::from_static(&[7; CHUNK]);
    let chunks = (0..FILL / CHUNK).map(move |_| Ok::<_, Infallible>(chunk.clone()));
    let mut response = Response::new(Body::from_stream(stream::iter(chunks)));
    response.headers_mut().insert("content-length", FILL.into());
    response
}

async fn drain(request: Request) -> Response {
    let (mut body, mut length) = (request.into_body(), 0);
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().into_data().map(|data| data.len()).unwrap_or_default();
    }
    Json(json!({ "length": length })).into_response()
}

async fn websocket(request: Request) -> Response {
    let (mut parts, _) = request.into_parts();
    let upgrade = WebSocketUpgrade::from_request_parts(&mut parts, &()).await.unwrap();
    upgrade.on_upgrade(|mut socket| async move {
        while let Some(Ok(message)) = socket.recv().await {
            if socket.send(message).await.is_err() {
                break;
            }
        }
    })
}

fn full(notes: &Notes) -> Response {
    let detail = notes.short.lock().unwrap().map_or_else(|| json!({}), |short| json!({ "short": short }));
    let body = json!({ "code": "resource_exhausted", "message": notes.name, "detail": detail, "hint": "" });
    (StatusCode::TOO_MANY_REQUESTS, Json(body)).into_response()
}

/// What is asked of an image that it has been told of.
fn stored(notes: &Notes, path: &str) -> Option<Response> {
    let (by_name, by_digest) = ("/v1/layers/base/", "/internal/layers/digest-of-");
    let rest = path.strip_prefix(by_name).or_else(|| path.strip_prefix(by_digest))?;
    let (name, is_prefetch) = rest.strip_suffix("/prefetch").map_or((rest, false), |name| (name, true));
    let size_bytes = *notes.images.lock().unwrap().get(name)?;
    if is_prefetch && notes.unreadable.lock().unwrap().contains(name) {
        let error = ApiError::new(ErrorKind::Unavailable, "the store is away");
        return Some(Json(PrefetchEvent::Error { error: *error.0 }).into_response());
    }
    if is_prefetch {
        notes.brought.lock().unwrap().insert(name.to_owned());
        return Some(Json(PrefetchEvent::Done { nodes: Vec::new() }).into_response());
    }
    let here_bytes = if notes.brought.lock().unwrap().contains(name) { size_bytes } else { 0 };
    let blob =
        BlobContent { id: format!("blob-of-{name}"), size_bytes, here_bytes, ..BlobContent::default() };
    let content = LayerContent { size_bytes, here_bytes, blobs: vec![blob], ..LayerContent::default() };
    let here = LayerOnNode { node: notes.name.clone(), mounted: false, content: Some(content) };
    let digest = format!("digest-of-{name}");
    if path.starts_with(by_digest) {
        return Some(Json(HeldLayer { id: digest, used_by: Vec::new(), here }).into_response());
    }
    let image = Image { name: name.to_owned(), digest, nodes: vec![here], ..image(notes) };
    Some(Json(image).into_response())
}

/// The one layer there is, as this node has it.
fn held(notes: &Notes) -> HeldLayer {
    let here = LayerOnNode { node: notes.name.clone(), mounted: true, content: None };
    HeldLayer { id: "d1".to_owned(), used_by: vec![format!("sb-{}-a", notes.name)], here }
}

fn image(notes: &Notes) -> Image {
    let held = held(notes);
    let image = json!({
        "name": "debian", "digest": held.id, "size_bytes": 1, "content_bytes": 1, "files": 1, "created_ms": 1,
        "source": notes.name, "architecture": "amd64", "env": [], "used_by": held.used_by, "nodes": [held.here],
    });
    serde_json::from_value(image).unwrap()
}

fn prefetch(notes: &Notes) -> Response {
    let said = notes.prefetch.lock().unwrap();
    let lines = said.iter().map(|event| serde_json::to_string(event).unwrap() + "\n");
    Response::new(Body::from(lines.collect::<String>()))
}

async fn sandboxes(notes: &Notes, request: Request) -> Response {
    if request.method() == "POST" {
        if notes.full.load(Ordering::SeqCst) {
            return full(notes);
        }
        if let Some(key) = request.headers().get("idempotency-key") {
            notes.keys.lock().unwrap().insert(key.to_str().unwrap().to_owned());
        }
        let mut response = report(notes, request).await;
        *response.status_mut() = StatusCode::CREATED;
        return response;
    }
    let uri = request.uri().clone();
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(&uri).unwrap();
    let filter = match SandboxFilter::of(pairs.0) {
        Ok(filter) => filter,
        Err(error) => return (StatusCode::BAD_REQUEST, Json(*error.0)).into_response(),
    };
    let mut all = notes.sandboxes.lock().unwrap().clone();
    all.retain(|sandbox| filter.takes_after_cursor(sandbox));
    all.sort_by_key(Position::of);
    let more = all.len() > filter.limit();
    all.truncate(filter.limit());
    let next_cursor = all.last().filter(|_| more).map(|last| Position::of(last).to_string());
    Json(SandboxList { sandboxes: all, next_cursor }).into_response()
}

fn no_path() -> Response {
    let body = json!({ "code": "not_found", "message": "no such path", "detail": {}, "hint": "" });
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

/// Tells of its sandboxes as an edge does, each with an owner and a shape of its own.
fn changes(notes: &Notes, request: &Request) -> Response {
    let query = Query::<BTreeMap<String, String>>::try_from_uri(request.uri()).unwrap().0;
    let epoch = format!("e{}", notes.epoch.load(Ordering::SeqCst));
    let since = if query["epoch"] == epoch { query["since"].parse().unwrap() } else { 0 };
    let sandboxes = notes.sandboxes.lock().unwrap();
    let mut journal = notes.journal.lock().unwrap();
    journal.compare(sandboxes.iter().map(|it| (&it.id, (it.created_ms, it.state))));
    let page = journal.after(since, notes.changes_max.load(Ordering::SeqCst));
    let mut told = SandboxChanges {
        epoch,
        seq: page.upto,
        more: page.more,
        whole: page.whole,
        forgotten: page
            .gone
            .into_iter()
            .map(|(id, (created_ms, _))| SandboxForgotten { id, created_ms })
            .collect(),
        ..SandboxChanges::default()
    };
    for (number, id) in page.changed.iter().enumerate() {
        let it = sandboxes.iter().find(|it| it.id == *id).unwrap();
        told.owners.push(SandboxOwner {
            project: it.project.clone(),
            task_id: it.task_id.clone(),
            backend: it.backend.clone(),
        });
        told.shapes.push(SandboxShape {
            image: it.image.clone(),
            image_digest: it.image_digest.clone(),
            limits: it.limits.clone(),
            init_user: it.init_user.clone(),
        });
        told.changed.push(SandboxChange {
            id: it.id.clone(),
            owner: number,
            shape: number,
            labels: Some(it.labels.clone()),
            state: it.state,
            reason: it.reason.clone(),
            created_ms: it.created_ms,
            running_ms: it.running_ms,
            ended_ms: it.ended_ms,
        });
    }
    Json(told).into_response()
}

fn tasks(notes: &Notes) -> Response {
    let mut tasks: BTreeMap<TaskId, Task> = BTreeMap::new();
    for it in notes.sandboxes.lock().unwrap().iter() {
        let Some(task_id) = &it.task_id else { continue };
        let task = tasks.entry(task_id.clone()).or_insert_with(|| Task::new(task_id.clone(), it.created_ms));
        task.count(&it.node, &it.project, it.state, it.created_ms);
    }
    Json(TaskList { tasks: tasks.into_values().collect() }).into_response()
}

async fn by_id(notes: &Notes, request: Request) -> Response {
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let asked: SandboxesById = serde_json::from_slice(&body).unwrap();
    notes.asked_by_id.fetch_add(asked.ids.len(), Ordering::SeqCst);
    let all = notes.sandboxes.lock().unwrap();
    let found = asked.ids.iter().filter_map(|id| all.iter().find(|it| it.id == *id)).cloned().collect();
    Json(SandboxList { sandboxes: found, next_cursor: None }).into_response()
}

fn status(notes: &Notes) -> NodeStatus {
    NodeStatus {
        node: notes.name.clone(),
        version: "0".to_owned(),
        pid: 1,
        started_ms: 0,
        capacity: dsec_model::Capacity { memory_mib: 100_000, cpu_millis: 64_000, disk_mib: 1, processes: 0 },
        usage: NodeUsage {
            memory_available_mib: 100_000 - notes.memory_used_mib.load(Ordering::SeqCst),
            ..NodeUsage::default()
        },
        backends: vec!["container".to_owned()],
        architecture: "x86_64".to_owned(),
        sandboxes_max: 100,
        pool: notes.pool.lock().unwrap().parse().unwrap(),
        labels: BTreeMap::new(),
        store: notes.store.lock().unwrap().clone(),
        features: Vec::new(),
        scheduling: Default::default(),
        charged: Vec::new(),
        arrived: Vec::new(),
        defaults: None,
        layers: notes.layers.lock().unwrap().clone(),
    }
}
