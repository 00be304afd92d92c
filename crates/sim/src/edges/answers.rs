//! What a simulated node answers, in the shapes of the API.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dsec_model::admission::Demand;
use dsec_model::iam::ProjectPath;
use dsec_model::{EndReason, ErrorKind, Limits, SandboxId, State, TaskId};
use dsec_proto::rest::{
    ApiError, BACKEND_CONTAINER, CreateSandboxRequest, FenceRequest, Fenced, IDEMPOTENCY_ATTEMPT,
    IDEMPOTENCY_KEY, LAYER_BASE, LaunchPhase, PAGE_DEFAULT, PAGE_MAX, Sandbox as Record, SandboxLayer,
    SandboxLimits, SandboxList, Task, TaskList, TaskOutcome, TaskWaitRequest, WAIT_DEFAULT_MS, status_of,
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

/// The record of a sandbox, with as much in it as an edge's has.
fn record(node: &Node, serial: u64, sandbox: &Sandbox) -> Result<Record, ApiError> {
    let Sandbox { create, created_ms, .. } = sandbox;
    let asked = create.load.asked;
    let limits = Limits { memory_mib: asked.memory_mib, cpu_millis: asked.cpu_millis, ..Limits::default() };
    let id = format!("sb-{}-{serial}", node.name());
    Ok(Record {
        id: id
            .parse()
            .map_err(|error: dsec_model::IdError| ApiError::new(ErrorKind::Internal, error.to_string()))?,
        state: State::Running,
        reason: None,
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
        limits: SandboxLimits::from(&limits),
        init_user: "root".to_owned(),
        task_id: create.task.as_ref().and_then(|task| task.parse().ok()),
        labels: BTreeMap::new(),
        created_ms: *created_ms,
        running_ms: Some(*created_ms),
        ended_ms: None,
        last_active_ms: *created_ms,
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
        Edge { socket: "/nowhere".into(), node: Mutex::new(node), pace: Pace::default() }
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
}
