//! A platform of nothing but its API, so that the program can be tested as people run it: as a
//! process. What a "command" does is decided by its first word, see [`play`].

#![allow(dead_code, reason = "each test file uses its part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc};

pub(crate) const KEY: &str = "dsec_test";
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct FakeApi {
    pub(crate) url: String,
    pub(crate) home: tempfile::TempDir,
    world: Arc<World>,
}

#[derive(Default)]
struct World {
    facts: Mutex<Facts>,
    changed: Condvar,
}

#[derive(Default)]
pub(crate) struct Facts {
    /// `METHOD /path?query BODY` of every request but file bodies.
    pub(crate) seen: Vec<String>,
    /// State by sandbox.
    pub(crate) sandboxes: BTreeMap<String, &'static str>,
    /// Files by path: bytes and mode.
    pub(crate) files: HashMap<String, (Vec<u8>, String)>,
    /// Directories by path: the tar put there.
    pub(crate) directories: HashMap<String, Vec<u8>>,
    /// Body of the last import.
    pub(crate) imported: Vec<u8>,
    pub(crate) attached: u32,
    /// Archives stop half way.
    pub(crate) stalled: bool,
    /// Archives that stopped.
    pub(crate) stalls: u32,
    execs: HashMap<String, Exec>,
    by_key: HashMap<String, String>,
}

#[derive(Clone)]
struct Exec {
    argv: Vec<String>,
    signals: broadcast::Sender<String>,
    /// `None` in it is the end of the input.
    stdin: mpsc::UnboundedSender<Option<Vec<u8>>>,
    typed: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<Vec<u8>>>>>,
}

impl Exec {
    fn new(argv: &[String]) -> Self {
        let (stdin, typed) = mpsc::unbounded_channel();
        let typed = Arc::new(tokio::sync::Mutex::new(typed));
        Self { argv: argv.to_vec(), signals: broadcast::channel(8).0, stdin, typed }
    }
}

type World_ = State<Arc<World>>;
type Pairs = Query<Vec<(String, String)>>;

impl FakeApi {
    pub(crate) fn start() -> Self {
        Self::start_on("127.0.0.1:0")
    }

    pub(crate) fn start_on(address: &str) -> Self {
        let world = Arc::new(World::default());
        let app = router(Arc::clone(&world));
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, app).await.unwrap();
            });
        });
        Self { url, home: tempfile::tempdir().unwrap(), world }
    }

    /// The program, set to talk to this platform.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec"));
        command.args(args);
        command.env("DSEC_URL", &self.url).env("DSEC_API_KEY", KEY);
        command.env("DSEC_CONFIG", self.home.path().join("none.toml")).env("NO_COLOR", "1");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    pub(crate) fn facts<T>(&self, read: impl FnOnce(&mut Facts) -> T) -> T {
        read(&mut self.world.facts.lock().unwrap())
    }

    /// Waits until `what` is so, and panics with what was seen when it never is.
    pub(crate) fn until(&self, name: &str, what: impl Fn(&Facts) -> bool) {
        let facts = self.world.facts.lock().unwrap();
        let (facts, timeout) =
            self.world.changed.wait_timeout_while(facts, PATIENCE, |facts| !what(facts)).unwrap();
        assert!(!timeout.timed_out(), "never {name}; seen: {:#?}", facts.seen);
    }

    pub(crate) fn saw(&self, text: &str) -> bool {
        self.facts(|facts| facts.seen.iter().any(|line| line.contains(text)))
    }
}

impl World {
    fn change<T>(&self, change: impl FnOnce(&mut Facts) -> T) -> T {
        let result = change(&mut self.facts.lock().unwrap());
        self.changed.notify_all();
        result
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn parsed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {:?} {:?}", text(&output.stdout), text(&output.stderr)))
}

fn router(world: Arc<World>) -> Router {
    let sandbox = Router::new()
        .route("/", get(sandbox_get))
        .route("/stop", post(stop))
        .route("/logs", get(logs))
        .route("/execs", post(exec).get(execs))
        .route("/execs/{eid}", get(exec_get))
        .route("/execs/{eid}/attach", get(attach))
        .route("/execs/{eid}/stdout", get(stdout))
        .route("/execs/{eid}/stdin", put(stdin))
        .route("/execs/{eid}/signal", post(signal))
        .route("/execs/{eid}/resize", post(resize))
        .route("/sessions", post(session).get(sessions))
        .route("/sessions/{sid}", delete(session_delete))
        .route("/ports/{port}/tcp", get(tcp))
        .route("/files", get(file_get).put(file_put).delete(file_delete))
        .route("/files/move", post(file_move))
        .route("/files/stat", get(stat))
        .route("/archive", get(archive_get).put(archive_put));
    let v1 = Router::new()
        .route("/sandboxes", post(create).get(list))
        .nest("/sandboxes/{id}", sandbox)
        .route("/images", get(images))
        .route("/images/{name}", get(image_get).put(image_put).delete(image_delete))
        .route("/images/{name}/pull", post(image_pull))
        .route("/nodes", get(nodes))
        .route("/counts", get(counts))
        .layer(axum::middleware::from_fn(authenticate));
    Router::new()
        .nest("/v1", v1)
        .route("/healthz", get(|| async { axum::Json(json!({ "status": "ok" })) }))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&world), note))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .with_state(world)
}

fn refuse(status: u16, code: &str, message: &str, hint: &str) -> Response {
    let body = json!({ "code": code, "message": message, "detail": {}, "hint": hint });
    (StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
}

async fn authenticate(headers: HeaderMap, request: Request, next: Next) -> Response {
    match headers.get("authorization") {
        Some(value) if value.as_bytes() == format!("Bearer {KEY}").as_bytes() => next.run(request).await,
        // Of a platform that `dsec up` started; the length of a key that it makes.
        Some(value) if value.len() > "Bearer dsec_".len() + 16 => next.run(request).await,
        _ => refuse(401, "unauthenticated", "no such key", ""),
    }
}

async fn note(State(world): World_, request: Request, next: Next) -> Response {
    let line = format!("{} {}", request.method(), request.uri());
    world.change(|facts| facts.seen.push(line));
    next.run(request).await
}

fn sandbox(id: &str, state: &str) -> Value {
    json!({
        "id": id, "state": state, "backend": "container", "image": "debian", "image_digest": "sha256:ab",
        "node": "n1", "init_user": "root", "created_ms": 1000, "running_ms": 1004, "last_active_ms": 2000,
        "limits": { "memory_limit_mb": 512, "cpu_cores_limit": 1.5, "cpu_weight": 100, "pids_limit": 64,
            "open_files_limit": 1024, "disk_limit_mb": 1024, "disk_files_limit": 1000,
            "ttl_running_stop": 300, "max_lifetime": 3600 },
        "labels": { "step": "3" },
        "usage": { "cpu_seconds": 0.5, "memory_bytes": 1048576, "memory_peak_bytes": 2097152, "disk_bytes": 4096,
            "pids": 3, "bytes_in": 1, "bytes_out": 2, "oom_kills": 0 },
        "launch_phases": [{ "name": "mounts", "us": 400 }, { "name": "agent", "us": 900 }],
    })
}

async fn create(State(world): World_, headers: HeaderMap, body: String) -> Response {
    let request: Value = serde_json::from_str(&body).unwrap();
    let key = headers.get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
    if let Some(id) = world.change(|facts| facts.by_key.get(key.as_ref()?).cloned()) {
        return axum::Json(sandbox(&id, "running")).into_response();
    }
    if request["container_image"] == "none" {
        return refuse(404, "not_found", "no image \"none\"", "see `dsec image ls`");
    }
    let id = world.change(|facts| {
        let id = format!("sb-n1-f{}", facts.sandboxes.len());
        facts.sandboxes.insert(id.clone(), "running");
        facts.seen.push(format!("CREATE {body}"));
        facts.by_key.extend(key.map(|key| (key, id.clone())));
        id
    });
    if request["container_image"] == "lost" {
        // The sandbox is there, and the connection breaks before its record is.
        let broken = futures_util::stream::iter([Err::<Bytes, _>(std::io::Error::other("broken"))]);
        return Body::from_stream(broken).into_response();
    }
    let mut answer = sandbox(&id, "running");
    if request["exec"].is_object() {
        answer["first_exec"] = exited("ex-0", 0, "");
    }
    (StatusCode::CREATED, axum::Json(answer)).into_response()
}

async fn list(State(world): World_, Query(query): Pairs) -> Response {
    let wanted: Vec<&str> = query.iter().filter(|(k, _)| k == "state").map(|(_, v)| v.as_str()).collect();
    let cursor = query.iter().find(|(k, _)| k == "cursor").map_or(0, |(_, v)| v.parse().unwrap());
    let all = world.change(|facts| facts.sandboxes.clone());
    let matching = all.iter().filter(|(_, state)| wanted.is_empty() || wanted.contains(*state));
    // Pages of two, so that a client that reads one page alone is found out.
    let page: Vec<Value> =
        matching.clone().skip(cursor).take(2).map(|(id, state)| sandbox(id, state)).collect();
    let mut answer = json!({ "sandboxes": page });
    if matching.count() > cursor + 2 {
        answer["next_cursor"] = (cursor + 2).to_string().into();
    }
    axum::Json(answer).into_response()
}

async fn sandbox_get(State(world): World_, Path(id): Path<String>) -> Response {
    match world.change(|facts| facts.sandboxes.get(&id).copied()) {
        Some(state) => axum::Json(sandbox(&id, state)).into_response(),
        None => refuse(404, "not_found", &format!("no sandbox {id}"), "see `dsec ps`"),
    }
}

async fn stop(State(world): World_, Path(id): Path<String>, body: String) -> Response {
    let known = world.change(|facts| {
        facts.seen.push(format!("STOP {id} {body}"));
        facts.sandboxes.get_mut(&id).map(|state| *state = "stopped")
    });
    match known {
        Some(()) => axum::Json(sandbox(&id, "stopped")).into_response(),
        None => refuse(404, "not_found", &format!("no sandbox {id}"), "see `dsec ps`"),
    }
}

async fn logs() -> String {
    "{\"time_ms\":1000,\"event\":\"created\"}\n{\"time_ms\":1004,\"event\":\"running\",\"pid\":7}\n".into()
}

fn exited(id: &str, code: i32, stdout: &str) -> Value {
    json!({ "id": id, "state": "exited", "command": "x", "exit_code": code, "started_ms": 1, "ended_ms": 2,
        "stdout_bytes": stdout.len(), "stderr_bytes": 0, "stdout": stdout, "stderr": "" })
}

async fn exec(State(world): World_, body: String) -> Response {
    let request: Value = serde_json::from_str(&body).unwrap();
    let mut argv: Vec<String> = serde_json::from_value(request["argv"].clone()).unwrap_or_default();
    if let Some(line) = request["shell"].as_str() {
        argv = vec!["shell".into(), line.into()];
    }
    if let Some(reason) = ["not_found", "not_executable"].into_iter().find(|reason| *reason == argv[0]) {
        let body = json!({ "code": "invalid_argument", "message": "no program \"missing\" in PATH",
            "detail": { "reason": format!("program_{reason}") }, "hint": "" });
        return (StatusCode::BAD_REQUEST, axum::Json(body)).into_response();
    }
    let id = world.change(|facts| {
        facts.seen.push(format!("EXEC {body}"));
        let id = format!("ex-{}", facts.execs.len());
        facts.execs.insert(id.clone(), Exec::new(&argv));
        id
    });
    if request["wait"] == true {
        return axum::Json(exited(&id, i32::from(argv[0] != "/bin/true"), "")).into_response();
    }
    let running = json!({ "id": id, "state": "running", "command": "x", "started_ms": 1,
        "stdout_bytes": 0, "stderr_bytes": 0 });
    axum::Json(running).into_response()
}

fn find(world: &World, id: &str) -> Exec {
    world.change(|facts| facts.execs[id].clone())
}

async fn exec_get(State(world): World_, Path((_, eid)): Path<(String, String)>) -> Response {
    let exec = find(&world, &eid);
    let code = if exec.argv[0] == "exit" { exec.argv[1].parse().unwrap() } else { 0 };
    axum::Json(exited(&eid, code, "its output\n")).into_response()
}

async fn execs() -> Response {
    axum::Json(json!({ "execs": [exited("ex-1", 3, "abc"), { "id": "ex-0", "state": "running",
        "command": "sleep\n9", "started_ms": 1, "stdout_bytes": 0, "stderr_bytes": 0 }] }))
    .into_response()
}

async fn stdin(
    State(world): World_,
    Path((_, eid)): Path<(String, String)>,
    Query(query): Pairs,
    body: Bytes,
) -> Response {
    let exec = find(&world, &eid);
    if exec.argv[0] == "closed" {
        return refuse(409, "conflict", "command has closed its standard input", "");
    }
    if exec.argv[0] == "deaf" {
        // Its pipe is full for ever.
        std::future::pending::<()>().await;
    }
    let _ = exec.stdin.send(Some(body.to_vec()));
    if param(&query, "close") != "false" {
        let _ = exec.stdin.send(None);
    }
    StatusCode::NO_CONTENT.into_response()
}

async fn sessions() -> Response {
    axum::Json(
        json!({ "sessions": [{ "id": "build", "pid": 5, "user": "root", "pending": 1, "created_ms": 1 }] }),
    )
    .into_response()
}

async fn session_delete(Path((_, sid)): Path<(String, String)>) -> Response {
    match sid.as_str() {
        "build" => StatusCode::NO_CONTENT.into_response(),
        _ => refuse(404, "not_found", &format!("no session {sid}"), ""),
    }
}

/// A server that answers with all it was sent, once it was sent all.
async fn tcp(upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async move |mut socket| {
        let mut all = Vec::new();
        while let Some(Ok(Message::Binary(bytes))) = socket.recv().await {
            if bytes.is_empty() {
                break;
            }
            all.extend_from_slice(&bytes);
        }
        let _ = socket.send(Message::Binary(all.into())).await;
        let _ = socket.send(Message::Close(None)).await;
    })
}

async fn file_delete(State(world): World_, Query(query): Pairs) -> Response {
    let path = param(&query, "path");
    world.change(|facts| facts.seen.push(format!("REMOVE {path}")));
    match world.change(|facts| facts.directories.remove(&path)) {
        Some(_) => StatusCode::NO_CONTENT.into_response(),
        None => refuse(404, "not_found", "not there", ""),
    }
}

async fn file_move(State(world): World_, body: String) -> Response {
    let request: Value = serde_json::from_str(&body).unwrap();
    let (from, to) = (request["from"].as_str().unwrap(), request["to"].as_str().unwrap().to_owned());
    world.change(|facts| {
        facts.seen.push(format!("MOVE {from} {to}"));
        let tree = facts.directories.remove(from).unwrap();
        facts.directories.insert(to.clone(), tree);
    });
    axum::Json(info(&to, "directory", 0, "0755")).into_response()
}

async fn signal(State(world): World_, Path((_, eid)): Path<(String, String)>, body: String) -> Response {
    let name = serde_json::from_str::<Value>(&body).unwrap()["signal"].as_str().unwrap().to_owned();
    let exec = find(&world, &eid);
    let _ = exec.signals.send(name);
    world.change(|facts| facts.seen.push(format!("SIGNAL {body}")));
    axum::Json(exited(&eid, 0, "")).into_response()
}

async fn resize(State(world): World_, body: String) -> StatusCode {
    world.change(|facts| facts.seen.push(format!("RESIZE {body}")));
    StatusCode::NO_CONTENT
}

async fn session(State(world): World_, body: String) -> Response {
    let request: Value = serde_json::from_str(&body).unwrap();
    world.change(|facts| {
        facts.execs.insert("ex-pty".into(), Exec::new(&["cat".to_owned()]));
    });
    let session = json!({ "id": request["id"], "pid": 5, "user": "root", "pty_exec_id": "ex-pty",
        "pending": 0, "created_ms": 1 });
    (StatusCode::CREATED, axum::Json(session)).into_response()
}

async fn stdout(State(world): World_, Path((_, eid)): Path<(String, String)>) -> Vec<u8> {
    vec![0; find(&world, &eid).argv[2].parse().unwrap()]
}

async fn attach(
    State(world): World_,
    Path((_, eid)): Path<(String, String)>,
    Query(query): Pairs,
    upgrade: WebSocketUpgrade,
) -> Response {
    let exec = find(&world, &eid);
    let from = query.iter().find(|(k, _)| k == "stdout_offset").map_or(0, |(_, v)| v.parse().unwrap());
    upgrade.on_upgrade(async move |mut socket| {
        let signals = exec.signals.subscribe();
        world.change(|facts| facts.attached += 1);
        if let Some(code) = play(&world, &mut socket, &exec, from, signals).await {
            let mut record = exited(&eid, code, "");
            match exec.argv[0].as_str() {
                "cut" => record["stdout_truncated"] = true.into(),
                "leaves" => {
                    record["session_ended"] = true.into();
                    record["session_id"] = "s1".into();
                }
                _ => {}
            }
            let event = json!({ "event": "exited", "exec": record });
            send(&mut socket, 3, event.to_string().as_bytes()).await;
            // Closed by the client, so that nothing that was sent is cut off.
            while let Some(Ok(_)) = socket.recv().await {}
        }
    })
}

async fn send(socket: &mut WebSocket, kind: u8, payload: &[u8]) {
    let mut frame = vec![kind];
    frame.extend_from_slice(payload);
    let _ = socket.send(Message::Binary(frame.into())).await;
}

/// What a command does; its exit code, or `None` where the connection breaks first.
async fn play(
    world: &World,
    socket: &mut WebSocket,
    exec: &Exec,
    from: u64,
    mut signals: broadcast::Receiver<String>,
) -> Option<i32> {
    let argv = &exec.argv;
    match argv[0].as_str() {
        "cut" | "leaves" => Some(0),
        "deaf" | "closed" => {
            send(socket, 1, b"never read\n").await;
            Some(9)
        }
        "exit" => Some(argv[1].parse().unwrap()),
        "both" => {
            send(socket, 1, b"one\n").await;
            send(socket, 2, b"two\n").await;
            send(socket, 1, b"three\n").await;
            Some(0)
        }
        "head" => {
            let mut left: usize = argv[2].parse().unwrap();
            while left > 0 {
                let n = left.min(256 * 1024);
                send(socket, 1, &vec![0; n]).await;
                left -= n;
            }
            Some(0)
        }
        "breaks" if from == 0 => {
            send(socket, 1, b"first\n").await;
            None
        }
        "breaks" => {
            assert_eq!(from, 6, "it goes on where it was");
            send(socket, 1, b"second\n").await;
            Some(0)
        }
        "endless" => loop {
            let mut frame = vec![1];
            frame.resize(65_536, b'y');
            tokio::select! {
                sent = socket.send(Message::Binary(frame.into())) => sent.ok()?,
                _ = signals.recv() => return Some(137),
            }
        },
        "hang" => loop {
            let name = signals.recv().await.unwrap();
            send(socket, 1, format!("got {name}\n").as_bytes()).await;
            if name == "SIGTERM" {
                return Some(143);
            }
        },
        "cat" | "shell" => {
            let mut typed = exec.typed.lock().await;
            loop {
                let message = tokio::select! {
                    message = socket.recv() => message?.ok()?,
                    piped = typed.recv() => {
                        let Some(bytes) = piped? else { return Some(0) };
                        send(socket, 1, &bytes).await;
                        continue;
                    }
                };
                match message {
                    Message::Binary(frame) if frame[0] == 0x10 => {
                        world.change(|facts| facts.seen.push(format!("STDIN {}", text(&frame[1..]))));
                        send(socket, 1, &frame[1..]).await;
                        if frame[1..].contains(&4) {
                            return Some(7);
                        }
                    }
                    Message::Binary(frame) if frame[0] == 0x11 => return Some(0),
                    _ => {}
                }
            }
        }
        other => panic!("no such command in the fake: {other}"),
    }
}

fn param(query: &[(String, String)], name: &str) -> String {
    query.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()).unwrap_or_default()
}

async fn stat(State(world): World_, Query(query): Pairs) -> Response {
    let path = param(&query, "path");
    let trimmed = path.trim_end_matches('/').to_owned();
    let (file, directory) =
        world.change(|facts| (facts.files.get(&path).cloned(), facts.directories.contains_key(&trimmed)));
    match (file, directory) {
        (Some((bytes, mode)), _) => axum::Json(info(&path, "file", bytes.len(), &mode)).into_response(),
        (None, true) => axum::Json(info(&path, "directory", 0, "0755")).into_response(),
        (None, false) => refuse(404, "not_found", &format!("{path} is not there"), ""),
    }
}

fn info(path: &str, kind: &str, size: usize, mode: &str) -> Value {
    let mode = u32::from_str_radix(mode, 8).unwrap_or(0o644);
    json!({ "path": path, "kind": kind, "size": size, "mode": mode, "uid": 0, "gid": 0, "modified_ms": 0 })
}

async fn file_get(State(world): World_, Query(query): Pairs) -> Response {
    match world.change(|facts| facts.files.get(&param(&query, "path")).cloned()) {
        Some((bytes, _)) => bytes.into_response(),
        None => refuse(404, "not_found", "no such file", ""),
    }
}

async fn file_put(State(world): World_, Query(query): Pairs, headers: HeaderMap, body: Bytes) -> Response {
    let (path, mode) = (param(&query, "path"), param(&query, "mode"));
    let answer = info(&path, "file", body.len(), &mode);
    world.change(|facts| {
        facts.seen.push(format!("LENGTH {:?}", headers.get("content-length")));
        facts.files.insert(path, (body.to_vec(), mode));
    });
    axum::Json(answer).into_response()
}

async fn archive_get(State(world): World_, Query(query): Pairs) -> Response {
    let path = param(&query, "path");
    if world.change(|facts| facts.stalled) {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1000);
        tar.append_data(&mut header, "whole", &[7; 1000][..]).unwrap();
        let start = Ok::<_, std::io::Error>(Bytes::from(tar.into_inner().unwrap()).slice(..700));
        world.change(|facts| facts.stalls += 1);
        let never = futures_util::stream::pending();
        return Body::from_stream(futures_util::StreamExt::chain(futures_util::stream::iter([start]), never))
            .into_response();
    }
    world.change(|facts| facts.directories[path.trim_end_matches('/')].clone()).into_response()
}

async fn archive_put(State(world): World_, Query(query): Pairs, body: Bytes) -> Response {
    if world.change(|facts| facts.stalled) {
        world.change(|facts| {
            facts.directories.insert(param(&query, "path"), body.to_vec());
            facts.stalls += 1;
        });
        std::future::pending::<()>().await;
    }
    let (mut files, mut bytes) = (0, 0);
    for entry in tar::Archive::new(&body[..]).entries().unwrap() {
        files += 1;
        bytes += entry.unwrap().size();
    }
    world.change(|facts| facts.directories.insert(param(&query, "path"), body.to_vec()));
    axum::Json(json!({ "files": files, "bytes": bytes })).into_response()
}

fn image(name: &str) -> Value {
    json!({ "name": name, "digest": "sha256:0123456789abcdef", "size_bytes": 1048576, "content_bytes": 3145728,
        "files": 42, "created_ms": 1000, "source": "x", "architecture": "amd64", "env": [], "used_by": ["sb-n1-a"] })
}

async fn images() -> Response {
    axum::Json(json!({ "images": [image("debian")] })).into_response()
}

async fn image_get(Path(name): Path<String>) -> Response {
    axum::Json(image(&name)).into_response()
}

async fn image_put(State(world): World_, Path(name): Path<String>, body: Body) -> Response {
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    world.change(|facts| facts.imported = body.to_vec());
    let last = match name.as_str() {
        "bad" => json!({ "event": "error", "error": { "code": "invalid_argument",
            "message": "it is no image", "detail": {}, "hint": "give a tar" } }),
        "cut" => return "{\"event\":\"progress\",\"files\":1,\"bytes\":2}\n".into_response(),
        _ => json!({ "event": "done", "image": image(&name) }),
    };
    format!("{}\n{last}\n", json!({ "event": "progress", "files": 1, "bytes": 2 })).into_response()
}

/// A registry that wants credentials of the image `private`.
async fn image_pull(State(world): World_, Path(name): Path<String>, body: Body) -> Response {
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let asked: serde_json::Value = serde_json::from_slice(&body).unwrap();
    world.change(|facts| facts.imported = body.to_vec());
    let last = match name == "private" && asked.get("credentials").is_none() {
        true => json!({ "event": "error", "error": { "code": "permission_denied", "message": "who are you?",
            "detail": { "reason": "registry_unauthorized" }, "hint": "" } }),
        false => json!({ "event": "done", "image": image(&name) }),
    };
    let progress =
        json!({ "event": "progress", "files": 1, "bytes": 2, "fetched_bytes": 1, "fetch_bytes_total": 3 });
    format!("{progress}\n{last}\n").into_response()
}

async fn image_delete(Path(name): Path<String>) -> Response {
    match name.as_str() {
        "busy" => refuse(409, "conflict", "image busy is used by sb-n1-a", "stop it first"),
        _ => StatusCode::NO_CONTENT.into_response(),
    }
}

async fn counts() -> Response {
    let node =
        json!({ "health": "well", "known": "counted", "heard_ms": 1000, "sandboxes": { "running": 2 } });
    axum::Json(
        json!({ "gathering": false, "sandboxes": { "running": 2, "lost": 1 }, "nodes": { "n1": node } }),
    )
    .into_response()
}

async fn nodes() -> Response {
    let node = json!({ "node": "n1", "version": "0.1.0", "pid": 9, "started_ms": 1000,
        "capacity": { "memory_mib": 24000, "cpu_millis": 2000, "disk_mib": 80000 },
        "usage": { "creating": 0, "running": 2, "stopping": 0, "memory_promised_mib": 1024,
            "memory_available_mib": 20000, "disk_free_mib": 70000 },
        "backends": ["container"],
        "features": [{ "name": "process ids", "purpose": "enough for all", "state": "degraded", "found": "32768", "remedy": "raise it" }] });
    axum::Json(json!({ "nodes": [node] })).into_response()
}
