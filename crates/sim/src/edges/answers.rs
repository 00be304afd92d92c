//! What a simulated node answers, in the shapes of the API.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use dsec_model::admission::Demand;
use dsec_model::iam::ProjectPath;
use dsec_model::{EndReason, ErrorKind, Limits, SandboxId, State, TaskId};
use dsec_proto::rest::{
    ApiError, BACKEND_CONTAINER, CHANGES_MAX, CreateSandboxRequest, FenceRequest, Fenced,
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY, LAYER_BASE, LaunchPhase, PAGE_DEFAULT, PAGE_MAX, Sandbox as Record,
    SandboxChange, SandboxChanges, SandboxForgotten, SandboxLayer, SandboxLimits, SandboxList, SandboxOwner,
    SandboxShape, SandboxesById, Task, TaskList, TaskOutcome, TaskWaitRequest, WAIT_DEFAULT_MS, status_of,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{Edge, unix_ms};
use crate::node::{Create, Node, Refusal, Sandbox};
use crate::workload::Load;

type Answer = Result<Response<Full<Bytes>>, ApiError>;

/// Memory and cores that a sandbox of a caller uses, and how long it lives when nothing is said. Ours.
const USED_MEMORY_MIB: u64 = 160;
const USED_CPU_MILLIS: u64 = 50;
/// How often a wait for a task looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Answers one request.
pub(super) async fn answer(edge: &Edge, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let answered = match body.collect().await {
        Ok(body) => {
            let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
            let segments: Vec<&str> = path.split('/').skip(1).collect();
            let asked = Asked { headers: &parts.headers, query, body: body.to_bytes() };
            route(edge, &parts.method, &segments, asked).await
        }
        Err(_) => Err(invalid("the body ended before its length was reached")),
    };
    answered.unwrap_or_else(|error| {
        let status =
            StatusCode::from_u16(status_of(error.kind())).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        json_of(status, &*error.0)
    })
}

struct Asked<'a> {
    headers: &'a HeaderMap,
    query: &'a str,
    body: Bytes,
}

async fn route(edge: &Edge, method: &Method, path: &[&str], asked: Asked<'_>) -> Answer {
    match (method.as_str(), path) {
        ("POST", ["v1", "sandboxes"]) => create(edge, &asked).await,
        ("GET", ["v1", "sandboxes"]) => list(edge, asked.query),
        ("GET", ["internal", "sandboxes", "changes"]) => changes(edge, asked.query),
        ("POST", ["internal", "sandboxes", "get"]) => by_id(edge, &asked.body),
        ("GET", ["v1", "sandboxes", id]) => get(edge, id),
        ("POST", ["v1", "sandboxes", id, "stop"]) | ("DELETE", ["v1", "sandboxes", id]) => stop(edge, id),
        ("GET", ["v1", "nodes"]) => nodes(edge, asked.query),
        ("GET", ["v1", "tasks"]) => tasks(edge, asked.query),
        ("POST", ["v1", "tasks", task, "stop"]) => {
            of_task(edge, task, |node, serial| node.remove(serial).is_some()).await
        }
        ("POST", ["v1", "tasks", task, "pause"]) => {
            of_task(edge, task, |node, serial| node.set_paused(serial, true)).await
        }
        ("POST", ["v1", "tasks", task, "resume"]) => {
            of_task(edge, task, |node, serial| node.set_paused(serial, false)).await
        }
        ("POST", ["v1", "tasks", task, "wait"]) => wait(edge, task, &asked.body).await,
        ("POST", ["internal", "keys", "fence"]) => {
            let FenceRequest { key, attempt } = parsed(&asked.body)?;
            Ok(json_of(StatusCode::OK, &Fenced { known: edge.node().fence(&key, attempt) }))
        }
        ("GET", ["healthz"]) => Ok(json_of(StatusCode::OK, &json!({ "status": "ok" }))),
        _ => Err(ApiError::new(
            ErrorKind::NotFound,
            format!("a simulated node has no path /{}", path.join("/")),
        )
        .hint("it has what control needs to place, find, count and end sandboxes")),
    }
}

async fn create(edge: &Edge, asked: &Asked<'_>) -> Answer {
    let request: CreateSandboxRequest = parsed(&asked.body)?;
    let text = |name: &str| asked.headers.get(name).and_then(|value| value.to_str().ok());
    let defaults = Limits::default();
    let load = Load {
        lifetime_ms: request.max_lifetime.unwrap_or(defaults.max_lifetime_s).saturating_mul(1000),
        memory_mib: USED_MEMORY_MIB,
        cpu_millis: USED_CPU_MILLIS,
        asked: Demand {
            memory_mib: request.memory_limit_mb.unwrap_or(defaults.memory_mib),
            cpu_millis: request.cpu_cores_limit.map_or(defaults.cpu_millis, |cores| (cores * 1e3) as u64),
        },
    };
    let create = Create {
        key: text(IDEMPOTENCY_KEY).map(Arc::from),
        attempt: text(IDEMPOTENCY_ATTEMPT).and_then(|text| text.parse().ok()),
        task: request.task_id.as_ref().map(|task| task.as_str().into()),
        image: request.container_image.into(),
        load,
    };
    wait_for(edge.pace.start).await;
    let mut node = edge.node();
    let made = node.create(unix_ms(), create).map_err(refused)?;
    let Some(sandbox) = node.sandboxes().get(&made.serial) else {
        return Err(ApiError::new(ErrorKind::Conflict, "the sandbox of this key has ended"));
    };
    let record = record(&node, made.serial, sandbox)?;
    drop(node);
    let mut response = json_of(if made.fresh { StatusCode::CREATED } else { StatusCode::OK }, &record);
    if let Ok(location) = HeaderValue::try_from(format!("/v1/sandboxes/{}", record.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Short(short) => ApiError::new(ErrorKind::ResourceExhausted, short.found)
            .hint("try another node, or later")
            .detail(json!({ "short": short.of })),
        fenced @ Refusal::Fenced { .. } => ApiError::new(ErrorKind::Conflict, fenced.to_string()),
    }
}

/// The sandbox that an id names on this node.
fn serial(node: &Node, id: &str) -> Result<u64, ApiError> {
    let none = || ApiError::new(ErrorKind::NotFound, format!("no sandbox {id} on this simulated node"));
    let id: SandboxId = id.parse().map_err(|error: dsec_model::IdError| invalid(error.to_string()))?;
    let serial = id.as_str().rsplit('-').next().and_then(|number| number.parse().ok()).ok_or_else(none)?;
    let is_here = id.node() == node.name().as_str() && node.sandboxes().contains_key(&serial);
    if is_here { Ok(serial) } else { Err(none()) }
}

fn get(edge: &Edge, id: &str) -> Answer {
    let mut node = edge.node();
    node.advance(unix_ms());
    let serial = serial(&node, id)?;
    let found = node.sandboxes().get(&serial).map(|sandbox| record(&node, serial, sandbox)).transpose()?;
    Ok(json_of(StatusCode::OK, &found))
}

fn stop(edge: &Edge, id: &str) -> Answer {
    let mut node = edge.node();
    let serial = serial(&node, id)?;
    let ended = node.remove(serial).map(|sandbox| record(&node, serial, &sandbox)).transpose()?;
    let ended = ended.map(|record| Record {
        state: State::Stopped,
        reason: Some(EndReason::Asked),
        ended_ms: Some(unix_ms()),
        ..record
    });
    Ok(json_of(StatusCode::OK, &ended))
}

/// Newest first. The cursor is the serial number of the last one given.
fn list(edge: &Edge, query: &str) -> Answer {
    let limit = number(query, "limit").unwrap_or(PAGE_DEFAULT as u64).clamp(1, PAGE_MAX as u64);
    let before = number(query, "cursor").unwrap_or(u64::MAX);
    let task = value(query, "task_id");
    let mut node = edge.node();
    node.advance(unix_ms());
    let is_asked = |sandbox: &Sandbox| task.is_none() || sandbox.create.task.as_deref() == task;
    let mut found = node.sandboxes().range(..before).rev().filter(|(_, sandbox)| is_asked(sandbox));
    let page: Vec<(&u64, &Sandbox)> =
        found.by_ref().take(usize::try_from(limit).unwrap_or(PAGE_MAX)).collect();
    let next_cursor = found.next().and(page.last()).map(|(serial, _)| serial.to_string());
    let sandboxes = page.into_iter().map(|(serial, sandbox)| record(&node, *serial, sandbox));
    let sandboxes = sandboxes.collect::<Result<_, _>>()?;
    Ok(json_of(StatusCode::OK, &SandboxList { sandboxes, next_cursor }))
}

/// What has changed since a number. All that a simulated sandbox does is to be there and then not; its epoch is this process.
fn changes(edge: &Edge, query: &str) -> Answer {
    let epoch = std::process::id().to_string();
    let since = number(query, "since").filter(|_| value(query, "epoch") == Some(&epoch)).unwrap_or_default();
    let mut node = edge.node();
    node.advance(unix_ms());
    let page = {
        let mut journal = edge.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.compare(node.sandboxes().iter().map(|(serial, sandbox)| (serial, sandbox.created_ms)));
        journal.after(since, CHANGES_MAX)
    };
    let mut told = SandboxChanges {
        epoch,
        seq: page.upto,
        more: page.more,
        whole: page.whole,
        ..SandboxChanges::default()
    };
    for (serial, created_ms) in page.gone {
        told.forgotten.push(SandboxForgotten { id: id_of(&node, serial)?, created_ms });
    }
    let (mut owners, mut shapes) = (HashMap::new(), HashMap::new());
    for serial in page.changed {
        let Some(sandbox) = node.sandboxes().get(&serial) else { continue };
        let Create { task, image, load, .. } = &sandbox.create;
        let owner = *owners.entry(task).or_insert_with(|| {
            told.owners.push(SandboxOwner {
                project: ProjectPath::root(),
                task_id: task.as_ref().and_then(|task| task.parse().ok()),
                backend: BACKEND_CONTAINER.to_owned(),
            });
            told.owners.len() - 1
        });
        let shape =
            *shapes.entry((image, load.asked.memory_mib, load.asked.cpu_millis)).or_insert_with(|| {
                told.shapes.push(SandboxShape {
                    image: image.to_string(),
                    image_digest: "simulated".to_owned(),
                    limits: limits_of(load),
                    init_user: "root".to_owned(),
                });
                told.shapes.len() - 1
            });
        told.changed.push(SandboxChange {
            id: id_of(&node, serial)?,
            owner,
            shape,
            labels: Some(BTreeMap::new()),
            state: State::Running,
            reason: None,
            created_ms: sandbox.created_ms,
            running_ms: Some(sandbox.created_ms),
            ended_ms: None,
        });
    }
    Ok(json_of(StatusCode::OK, &told))
}

fn by_id(edge: &Edge, body: &[u8]) -> Answer {
    let SandboxesById { ids, .. } = parsed(body)?;
    let mut node = edge.node();
    node.advance(unix_ms());
    let serials = ids.iter().filter_map(|id| serial(&node, id.as_str()).ok());
    let found = serials.filter_map(|serial| Some((serial, node.sandboxes().get(&serial)?)));
    let sandboxes =
        found.map(|(serial, sandbox)| record(&node, serial, sandbox)).collect::<Result<_, _>>()?;
    Ok(json_of(StatusCode::OK, &SandboxList { sandboxes, next_cursor: None }))
}

fn nodes(edge: &Edge, query: &str) -> Answer {
    let mut status = edge.node().status(unix_ms());
    if value(query, "layers") != Some("true") {
        status.layers.clear();
    }
    Ok(json_of(StatusCode::OK, &json!({ "nodes": [status] })))
}

fn tasks(edge: &Edge, query: &str) -> Answer {
    let mut node = edge.node();
    node.advance(unix_ms());
    let (name, asked) = (node.name().to_string(), value(query, "task_id"));
    let mut tasks = Vec::new();
    for (task, of_task) in node.tasks() {
        if asked.is_some_and(|asked| asked != &*task) {
            continue;
        }
        let task_id: TaskId =
            task.parse().map_err(|error: dsec_model::IdError| invalid(error.to_string()))?;
        tasks.push(Task {
            task_id,
            projects: BTreeSet::from([ProjectPath::root()]),
            sandboxes: of_task.counts,
            nodes: BTreeMap::from([(name.clone(), of_task.counts.living())]),
            first_created_ms: of_task.first_ms,
            last_created_ms: of_task.last_ms,
        });
    }
    Ok(json_of(StatusCode::OK, &TaskList { tasks }))
}

/// Does something with each sandbox of a task, each taking its time.
async fn of_task(edge: &Edge, task: &str, act: impl Fn(&mut Node, u64) -> bool) -> Answer {
    let of_it = {
        let mut node = edge.node();
        node.advance(unix_ms());
        node.of_task(task)
    };
    wait_for(edge.pace.stop * u32::try_from(of_it.len()).unwrap_or(u32::MAX)).await;
    let mut node = edge.node();
    let matched = of_it.len() as u64;
    // One that ended by itself meanwhile is as good as ended.
    for serial in of_it {
        act(&mut node, serial);
    }
    Ok(json_of(StatusCode::OK, &TaskOutcome { matched, done: matched, ..TaskOutcome::default() }))
}

async fn wait(edge: &Edge, task: &str, body: &[u8]) -> Answer {
    let TaskWaitRequest { timeout_ms } =
        if body.is_empty() { TaskWaitRequest::default() } else { parsed(body)? };
    let patience = Duration::from_millis(timeout_ms.unwrap_or(WAIT_DEFAULT_MS));
    let living = || {
        let mut node = edge.node();
        node.advance(unix_ms());
        node.of_task(task).len()
    };
    let ended = async {
        while living() > 0 {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    if tokio::time::timeout(patience, ended).await.is_ok() {
        return Ok(json_of(StatusCode::OK, &json!({})));
    }
    let left = living();
    let message = format!("{left} sandboxes of task {task} did not end within {} ms", patience.as_millis());
    Err(ApiError::new(ErrorKind::DeadlineExceeded, message).detail(json!({ "task_id": task, "left": left })))
}

async fn wait_for(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

fn id_of(node: &Node, serial: u64) -> Result<SandboxId, ApiError> {
    let id = format!("sb-{}-{serial}", node.name());
    id.parse().map_err(|error: dsec_model::IdError| ApiError::new(ErrorKind::Internal, error.to_string()))
}

fn limits_of(load: &Load) -> SandboxLimits {
    let Demand { memory_mib, cpu_millis } = load.asked;
    SandboxLimits::from(&Limits { memory_mib, cpu_millis, ..Limits::default() })
}

/// The record of a sandbox, with as much in it as an edge's has.
fn record(node: &Node, serial: u64, sandbox: &Sandbox) -> Result<Record, ApiError> {
    let Sandbox { create, created_ms, .. } = sandbox;
    Ok(Record {
        id: id_of(node, serial)?,
        state: State::Running,
        reason: None,
        lost: None,
        backend: BACKEND_CONTAINER.to_owned(),
        image: create.image.to_string(),
        image_digest: "simulated".to_owned(),
        layers: vec![SandboxLayer {
            kind: LAYER_BASE.to_owned(),
            name: create.image.to_string(),
            id: "simulated".to_owned(),
            content: None,
        }],
        node: node.name().to_string(),
        project: ProjectPath::root(),
        limits: limits_of(&create.load),
        init_user: "root".to_owned(),
        task_id: create.task.as_ref().and_then(|task| task.parse().ok()),
        labels: BTreeMap::new(),
        created_ms: *created_ms,
        running_ms: Some(*created_ms),
        ended_ms: None,
        last_active_ms: *created_ms,
        pauses: None,
        usage: None,
        launch_phases: PHASES.map(|name| LaunchPhase { name: name.to_owned(), us: 100 }).to_vec(),
        first_exec: None,
    })
}

/// As many as a container's launch has.
const PHASES: [&str; 15] = [
    "admit", "queue", "record", "cgroups", "layer", "files", "fork", "network", "overlay", "root", "mounts",
    "masks", "names", "exec", "hello",
];

fn value<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

fn number(query: &str, name: &str) -> Option<u64> {
    value(query, name)?.parse().ok()
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| invalid(format!("the JSON body is not valid: {error}")))
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::InvalidArgument, message)
}

fn json_of(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    let (status, body) = match serde_json::to_vec(body) {
        Ok(body) => (status, body),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, Vec::new()),
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::Value;

    use super::*;
    use crate::edges::Pace;
    use crate::node::Shape;

    fn edge() -> Edge {
        let node = Node::new("n1".parse().unwrap(), Shape::default());
        Edge {
            socket: "/nowhere".into(),
            node: Mutex::new(node),
            journal: Mutex::default(),
            pace: Pace::default(),
        }
    }

    async fn ask(
        edge: &Edge,
        line: &str,
        headers: &[(&'static str, &'static str)],
        body: &str,
    ) -> (u16, Value) {
        let (method, path) = line.split_once(' ').unwrap();
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let segments: Vec<&str> = path.split('/').skip(1).collect();
        let named = headers
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), HeaderValue::from_static(value)));
        let headers = HeaderMap::from_iter(named);
        let asked = Asked { headers: &headers, query, body: Bytes::from(body.to_owned()) };
        match route(edge, &method.parse().unwrap(), &segments, asked).await {
            Ok(response) => {
                let status = response.status().as_u16();
                let body = response.into_body().collect().await.unwrap().to_bytes();
                (status, serde_json::from_slice(&body).unwrap())
            }
            Err(error) => (status_of(error.kind()), serde_json::to_value(&*error.0).unwrap()),
        }
    }

    fn attempt(number: &'static str) -> [(&'static str, &'static str); 2] {
        [("idempotency-key", "k"), ("idempotency-attempt", number)]
    }

    const CREATE: &str = r#"{"container_image":"debian","task_id":"job"}"#;

    #[tokio::test]
    async fn a_key_makes_one_sandbox_and_a_fence_keeps_earlier_attempts_out() {
        let node = edge();
        let fence = r#"{"key":"k","attempt":2}"#;
        assert_eq!(ask(&node, "POST /internal/keys/fence", &[], fence).await.1["known"], false);
        let (status, error) = ask(&node, "POST /v1/sandboxes", &attempt("1"), CREATE).await;
        assert_eq!((status, &error["code"]), (409, &"conflict".into()));
        let (status, made) = ask(&node, "POST /v1/sandboxes", &attempt("2"), CREATE).await;
        assert_eq!((status, &made["state"], &made["node"]), (201, &"running".into(), &"n1".into()));
        let (status, again) = ask(&node, "POST /v1/sandboxes", &attempt("3"), CREATE).await;
        assert_eq!((status, &again["id"]), (200, &made["id"]));
        assert_eq!(ask(&node, "POST /internal/keys/fence", &[], fence).await.1["known"], true);
        let id = made["id"].as_str().unwrap();
        assert_eq!(ask(&node, &format!("GET /v1/sandboxes/{id}"), &[], "").await.1["id"], made["id"]);
        assert_eq!(ask(&node, "GET /v1/sandboxes/sb-n1-77", &[], "").await.0, 404);
    }

    #[tokio::test]
    async fn a_node_that_refuses_says_what_is_short() {
        let node = edge();
        node.node().set_refusing(true);
        let (status, error) = ask(&node, "POST /v1/sandboxes", &[], CREATE).await;
        assert_eq!((status, &error["detail"]["short"]), (429, &"memory_pressure".into()));
    }

    #[tokio::test]
    async fn a_task_is_counted_paused_stopped_and_waited_for() {
        let node = edge();
        for _ in 0..3 {
            ask(&node, "POST /v1/sandboxes", &[], CREATE).await;
        }
        let counted = ask(&node, "GET /v1/tasks?task_id=job", &[], "").await.1;
        assert_eq!(counted["tasks"][0]["sandboxes"]["running"], 3);
        assert_eq!(ask(&node, "POST /v1/tasks/job/pause", &[], "").await.1["done"], 3);
        assert!(node.node().sandboxes().values().all(|sandbox| sandbox.paused));
        let (status, late) = ask(&node, "POST /v1/tasks/job/wait", &[], r#"{"timeout_ms":1}"#).await;
        assert_eq!((status, &late["detail"]["left"]), (504, &3.into()));
        assert_eq!(ask(&node, "POST /v1/tasks/job/stop", &[], "").await.1["done"], 3);
        assert_eq!(ask(&node, "POST /v1/tasks/job/wait", &[], "").await.0, 200);
    }

    #[tokio::test]
    async fn a_list_has_pages_newest_first_and_a_report_names_layers() {
        let node = edge();
        for _ in 0..5 {
            ask(&node, "POST /v1/sandboxes", &[], CREATE).await;
        }
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = ask(&node, &format!("GET /v1/sandboxes?limit=2{cursor}"), &[], "").await.1;
            let ids = page["sandboxes"].as_array().unwrap().iter().map(|sandbox| sandbox["id"].to_string());
            seen.extend(ids);
            let Some(next) = page["next_cursor"].as_str() else { break };
            cursor = format!("&cursor={next}");
        }
        assert_eq!(seen, [5, 4, 3, 2, 1].map(|serial| format!("\"sb-n1-{serial}\"")));
        let reports = ask(&node, "GET /v1/nodes?layers=true", &[], "").await.1;
        let report = &reports["nodes"][0];
        assert_eq!((&report["usage"]["running"], &report["layers"]), (&5.into(), &json!(["debian"])));
    }

    #[tokio::test]
    async fn what_changed_is_told_once() {
        let node = edge();
        for _ in 0..3 {
            ask(&node, "POST /v1/sandboxes", &[], CREATE).await;
        }
        let first = ask(&node, "GET /internal/sandboxes/changes?since=0&epoch=", &[], "").await.1;
        assert_eq!((&first["whole"], first["changed"].as_array().unwrap().len()), (&true.into(), 3));
        assert_eq!(first["owners"].as_array().unwrap().len(), 1);
        ask(&node, "DELETE /v1/sandboxes/sb-n1-2", &[], "").await;
        let (since, epoch) = (&first["seq"], first["epoch"].as_str().unwrap());
        let path = format!("GET /internal/sandboxes/changes?since={since}&epoch={epoch}");
        let second = ask(&node, &path, &[], "").await.1;
        assert_eq!((&second["whole"], second["changed"].as_array().unwrap().len()), (&false.into(), 0));
        assert_eq!(second["forgotten"][0]["id"], "sb-n1-2");
        let found =
            ask(&node, "POST /internal/sandboxes/get", &[], r#"{"ids":["sb-n1-3","sb-n1-2"]}"#).await.1;
        assert_eq!((&found["sandboxes"][0]["id"], &found["sandboxes"][1]), (&"sb-n1-3".into(), &Value::Null));
    }
}
