//! One method for each request of the API that a command makes.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dsec_model::{ExecId, PoolName, SandboxId, SessionId, TaskId};
use dsec_proto::rest::{
    Cluster, Counts, CreateManyRequest, CreateSandboxRequest, Exec, ExecList, ExecRequest, FileInfo,
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY, INLINE_MAX, Image, ImageList, LAYER_BASE, LayerTrace, Member,
    MemberList, MoveRequest, NodeStatus, PackRequest, Packed, Pool, PoolList, PoolSyncRequest,
    PrefetchRequest, PtySize, PullRequest, Sandbox, SandboxList, Session, SessionList, SessionRequest,
    SignalRequest, StopRequest, Task, TaskList, TaskOutcome, TaskWaitRequest, TaskWaited, Token,
    TokenRequest, UpdateSandboxRequest,
};
use reqwest::{Method, RequestBuilder, Response, header};
use serde::{Deserialize, Serialize};

use super::{Client, ClientError};
use crate::parse::segment;

/// Entries of one page of a list: the most the API gives.
const PAGE: &str = "1000";
/// Room for the way there and back on top of a wait on the server.
pub(super) const WAIT_MARGIN: Duration = Duration::from_secs(30);

/// Tries of a create whose answer was lost: together they outlast a server that starts again.
pub(crate) const CREATE_TRIES: u32 = 20;
/// Pause between them.
pub(crate) const CREATE_PAUSE: Duration = Duration::from_millis(200);

/// Which sandboxes a list is of.
#[derive(Debug, Clone, Default)]
pub(crate) struct ListQuery {
    /// Any of these states. Empty: every state.
    pub(crate) states: Vec<String>,
    /// Of this task.
    pub(crate) task: Option<String>,
    /// With all of these labels.
    pub(crate) labels: Vec<(String, String)>,
    /// With what they use.
    pub(crate) usage: bool,
    /// With what of their layers' content is on the node.
    pub(crate) content: bool,
}

/// An idempotency key that nobody else has; none without randomness.
pub(crate) fn new_key() -> Option<String> {
    let mut key = [0u8; 16];
    getrandom::fill(&mut key).ok()?;
    Some(format!("dsec-{:032x}", u128::from_be_bytes(key)))
}

/// A create with its idempotency key, if it has one.
fn keyed(http: RequestBuilder, key: Option<&str>, attempt: u32) -> RequestBuilder {
    match key {
        Some(key) => http.header(IDEMPOTENCY_KEY, key).header(IDEMPOTENCY_ATTEMPT, attempt),
        None => http,
    }
}

fn task_path(task: &TaskId, what: &str) -> String {
    format!("/tasks/{}{what}", segment(task.as_str()))
}

/// The nodes of a platform.
#[derive(Debug, Deserialize)]
struct NodeList {
    nodes: Vec<NodeStatus>,
}

impl Client {
    /// Whether the platform answers: its word for it, or why not.
    pub(crate) async fn health(&self) -> Result<(), ClientError> {
        self.send(self.bare_request("/healthz")).await.map(drop)
    }

    /// The nodes.
    pub(crate) async fn nodes(&self) -> Result<Vec<NodeStatus>, ClientError> {
        self.json::<NodeList>(self.request(Method::GET, "/nodes")).await.map(|list| list.nodes)
    }

    /// The pools of nodes.
    pub(crate) async fn pools(&self) -> Result<Vec<Pool>, ClientError> {
        self.json::<PoolList>(self.request(Method::GET, "/pools")).await.map(|list| list.pools)
    }

    /// Brings to a pool what creates asked for; the answer's body is one `PoolSyncEvent` a line.
    pub(crate) async fn sync_pool(
        &self,
        pool: &PoolName,
        request: &PoolSyncRequest,
    ) -> Result<Response, ClientError> {
        self.send(self.request(Method::POST, &format!("/pools/{pool}/sync")).json(request)).await
    }

    /// One node.
    pub(crate) async fn node(&self, node: &str) -> Result<NodeStatus, ClientError> {
        self.json(self.request(Method::GET, &format!("/nodes/{}", segment(node)))).await
    }

    /// Says whether a node takes new sandboxes: `cordon`, `uncordon` or `drain`.
    pub(crate) async fn schedule_node(
        &self,
        node: &str,
        what: &str,
        request: &impl Serialize,
    ) -> Result<NodeStatus, ClientError> {
        let path = format!("/nodes/{}/{what}", segment(node));
        self.json(self.request(Method::POST, &path).json(request)).await
    }

    /// Makes the cluster that machines may join, unless there is one.
    pub(crate) async fn make_cluster(&self) -> Result<Cluster, ClientError> {
        self.json(self.request(Method::POST, "/cluster")).await
    }

    /// Makes a token by which a machine can join.
    pub(crate) async fn join_token(&self, request: &TokenRequest) -> Result<Token, ClientError> {
        self.json(self.request(Method::POST, "/cluster/tokens").json(request)).await
    }

    /// The nodes that have joined.
    pub(crate) async fn members(&self) -> Result<Vec<Member>, ClientError> {
        self.json::<MemberList>(self.request(Method::GET, "/cluster/nodes")).await.map(|list| list.nodes)
    }

    /// Has a node be none of the cluster's any more.
    pub(crate) async fn forget_member(&self, node: &str) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &format!("/cluster/nodes/{}", segment(node)))).await
    }

    /// Makes a sandbox. Where the answer is lost on the way it is asked for again, by a key that makes
    /// the second request find the first one's sandbox: else it would stay there with nobody's name.
    pub(crate) async fn create(&self, request: &CreateSandboxRequest) -> Result<Sandbox, ClientError> {
        let key = new_key();
        let tries = if key.is_some() { CREATE_TRIES } else { 1 };
        let mut attempt = 0;
        loop {
            attempt += 1;
            let http = keyed(self.request(Method::POST, "/sandboxes").json(request), key.as_deref(), attempt);
            match self.json(http).await {
                Err(ClientError::Broken { .. }) if attempt < tries => {}
                // After a lost answer, a server that starts again is waited for as well.
                Err(ClientError::Unreachable { .. }) if (2..tries).contains(&attempt) => {}
                result => return result,
            }
            tokio::time::sleep(CREATE_PAUSE).await;
        }
    }

    /// One sandbox with its usage.
    pub(crate) async fn sandbox(&self, id: &SandboxId) -> Result<Sandbox, ClientError> {
        self.json(self.request(Method::GET, &format!("/sandboxes/{id}"))).await
    }

    /// One sandbox with its usage, and what of its layers' content is on the node.
    pub(crate) async fn sandbox_with_content(&self, id: &SandboxId) -> Result<Sandbox, ClientError> {
        self.json(self.request(Method::GET, &format!("/sandboxes/{id}")).query(&[("content", "true")])).await
    }

    /// All sandboxes that match, page after page, newest first.
    pub(crate) async fn sandboxes(&self, query: &ListQuery) -> Result<Vec<Sandbox>, ClientError> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut pairs = vec![("limit", PAGE.to_owned())];
            pairs.extend(query.states.iter().map(|state| ("state", state.clone())));
            pairs.extend(query.task.iter().map(|task| ("task_id", task.clone())));
            pairs.extend(query.labels.iter().map(|(k, v)| ("label", format!("{k}={v}"))));
            if query.usage {
                pairs.push(("usage", "true".to_owned()));
            }
            if query.content {
                pairs.push(("content", "true".to_owned()));
            }
            pairs.extend(cursor.take().map(|cursor| ("cursor", cursor)));
            let page: SandboxList = self.json(self.request(Method::GET, "/sandboxes").query(&pairs)).await?;
            all.extend(page.sandboxes);
            match page.next_cursor {
                Some(next) => cursor = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Ends a sandbox and waits until nothing is left of it.
    pub(crate) async fn stop(&self, id: &SandboxId, grace_ms: u64) -> Result<Sandbox, ClientError> {
        let request =
            self.request(Method::POST, &format!("/sandboxes/{id}/stop")).json(&StopRequest { grace_ms });
        self.json_within(request, self.answer_timeout() + Duration::from_millis(grace_ms)).await
    }

    /// Gives a sandbox other limits.
    pub(crate) async fn update(
        &self,
        id: &SandboxId,
        request: &UpdateSandboxRequest,
    ) -> Result<Sandbox, ClientError> {
        self.json(self.request(Method::PATCH, &format!("/sandboxes/{id}")).json(request)).await
    }

    /// How many sandboxes there are, as the server knows.
    pub(crate) async fn counts(&self) -> Result<Counts, ClientError> {
        self.json(self.request(Method::GET, "/counts")).await
    }

    /// The tasks.
    pub(crate) async fn tasks(&self) -> Result<Vec<Task>, ClientError> {
        self.json::<TaskList>(self.request(Method::GET, "/tasks")).await.map(|list| list.tasks)
    }

    /// One task.
    pub(crate) async fn task(&self, task: &TaskId) -> Result<Task, ClientError> {
        self.json(self.request(Method::GET, &task_path(task, ""))).await
    }

    /// Ends all sandboxes of a task.
    pub(crate) async fn stop_task(&self, task: &TaskId, grace_ms: u64) -> Result<TaskOutcome, ClientError> {
        let request = self.request(Method::POST, &task_path(task, "/stop")).json(&StopRequest { grace_ms });
        self.json_within(request, self.answer_timeout() + Duration::from_millis(grace_ms)).await
    }

    /// Pauses all sandboxes of a task, or resumes them.
    pub(crate) async fn set_task_paused(
        &self,
        task: &TaskId,
        paused: bool,
    ) -> Result<TaskOutcome, ClientError> {
        let what = if paused { "/pause" } else { "/resume" };
        self.json_within(self.request(Method::POST, &task_path(task, what)), self.answer_timeout()).await
    }

    /// Pauses a sandbox, or resumes it.
    pub(crate) async fn set_paused(&self, id: &SandboxId, paused: bool) -> Result<Sandbox, ClientError> {
        let what = if paused { "pause" } else { "resume" };
        self.json(self.request(Method::POST, &format!("/sandboxes/{id}/{what}"))).await
    }

    /// Waits until no sandbox of a task is known to live.
    pub(crate) async fn wait_task(&self, task: &TaskId, limit: Duration) -> Result<TaskWaited, ClientError> {
        let timeout_ms = Some(limit.as_millis().try_into().unwrap_or(u64::MAX));
        let request =
            self.request(Method::POST, &task_path(task, "/wait")).json(&TaskWaitRequest { timeout_ms });
        self.json_within(request, limit + WAIT_MARGIN).await
    }

    /// Makes many sandboxes; the answer's body is one `CreateManyEvent` a line. The same key at a later attempt finds what an earlier one
    /// made.
    pub(crate) async fn create_many(
        &self,
        request: &CreateManyRequest,
        key: Option<&str>,
        attempt: u32,
    ) -> Result<Response, ClientError> {
        self.send(keyed(self.request(Method::POST, "/sandboxes/batch").json(request), key, attempt)).await
    }

    /// Makes a layer of what a sandbox wrote, within `limit`.
    pub(crate) async fn pack(
        &self,
        id: &SandboxId,
        request: &PackRequest,
        limit: Duration,
    ) -> Result<Packed, ClientError> {
        let http = self.request(Method::POST, &format!("/sandboxes/{id}/pack")).json(request);
        self.json_within(http, limit).await
    }

    /// What happened to a sandbox, one JSON object a line.
    pub(crate) async fn logs(&self, id: &SandboxId) -> Result<Response, ClientError> {
        self.send(self.request(Method::GET, &format!("/sandboxes/{id}/logs"))).await
    }

    /// Starts a command; with `wait`, answers at its end, however long that takes.
    pub(crate) async fn exec(&self, id: &SandboxId, request: &ExecRequest) -> Result<Exec, ClientError> {
        let http = self.request(Method::POST, &format!("/sandboxes/{id}/execs")).json(request);
        let command =
            request.timeout_ms.filter(|_| request.wait).map_or(Duration::ZERO, Duration::from_millis);
        self.json_within(http, self.answer_timeout() + command).await
    }

    /// Waits up to `wait` for a command's end, then answers as it stands, with up to `inline` bytes
    /// of each output.
    pub(crate) async fn exec_wait(
        &self,
        id: &SandboxId,
        exec: &ExecId,
        wait: Duration,
        inline: u64,
    ) -> Result<Exec, ClientError> {
        let query = [("wait_ms", wait.as_millis().to_string()), ("inline_limit_bytes", inline.to_string())];
        let request = self.request(Method::GET, &format!("/sandboxes/{id}/execs/{exec}")).query(&query);
        self.json_within(request, wait + WAIT_MARGIN).await
    }

    /// An ended command's record with all of its output that was kept, where the answer had its start alone.
    pub(crate) async fn with_whole_output(
        &self,
        id: &SandboxId,
        mut exec: Exec,
    ) -> Result<Exec, ClientError> {
        for (name, text, base64) in [
            ("stdout", &mut exec.stdout, &mut exec.stdout_base64),
            ("stderr", &mut exec.stderr, &mut exec.stderr_base64),
        ] {
            let start = match (&base64, &text) {
                (Some(exact), _) => STANDARD.decode(exact).unwrap_or_default(),
                (None, Some(text)) => text.clone().into_bytes(),
                (None, None) => continue,
            };
            if (start.len() as u64) < INLINE_MAX {
                continue;
            }
            let path = format!("/sandboxes/{id}/execs/{}/{name}?offset={}", exec.id, start.len());
            let rest = self.send(self.request(Method::GET, &path)).await?.bytes().await;
            let whole = [start, rest.map_err(|error| self.wire(&error))?.into()].concat();
            *base64 = std::str::from_utf8(&whole).is_err().then(|| STANDARD.encode(&whole));
            *text = Some(String::from_utf8_lossy(&whole).into_owned());
        }
        Ok(exec)
    }

    /// Puts bytes into a command's standard input, and ends it after them with `close`. Answers when the
    /// command's pipe has taken them, however long that takes.
    pub(crate) async fn stdin(
        &self,
        id: &SandboxId,
        exec: &ExecId,
        bytes: Bytes,
        close: bool,
    ) -> Result<(), ClientError> {
        let path = format!("/sandboxes/{id}/execs/{exec}/stdin?close={close}");
        self.send(self.request(Method::PUT, &path).body(bytes)).await.map(drop)
    }

    /// A command's standard output as it comes, until the command ends.
    pub(crate) async fn stdout(&self, id: &SandboxId, exec: &ExecId) -> Result<Response, ClientError> {
        let path = format!("/sandboxes/{id}/execs/{exec}/stdout?follow=true");
        self.send(self.request(Method::GET, &path)).await
    }

    /// Sends a signal to a command.
    pub(crate) async fn signal(
        &self,
        id: &SandboxId,
        exec: &ExecId,
        signal: &str,
        tree: bool,
    ) -> Result<Exec, ClientError> {
        let request = self
            .request(Method::POST, &format!("/sandboxes/{id}/execs/{exec}/signal"))
            .json(&SignalRequest { signal: signal.to_owned(), tree });
        self.json(request).await
    }

    /// Tells a command its terminal's new size.
    pub(crate) async fn resize(
        &self,
        id: &SandboxId,
        exec: &ExecId,
        size: PtySize,
    ) -> Result<(), ClientError> {
        let path = format!("/sandboxes/{id}/execs/{exec}/resize");
        self.done(self.request(Method::POST, &path).json(&size)).await
    }

    /// Makes a session or finds it.
    pub(crate) async fn session(
        &self,
        id: &SandboxId,
        request: &SessionRequest,
    ) -> Result<Session, ClientError> {
        self.json(self.request(Method::POST, &format!("/sandboxes/{id}/sessions")).json(request)).await
    }

    /// The open sessions of a sandbox.
    pub(crate) async fn sessions(&self, id: &SandboxId) -> Result<Vec<Session>, ClientError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{id}/sessions"));
        self.json::<SessionList>(request).await.map(|list| list.sessions)
    }

    /// Closes a session.
    pub(crate) async fn close_session(&self, id: &SandboxId, session: &SessionId) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &format!("/sandboxes/{id}/sessions/{session}"))).await
    }

    /// The commands of a sandbox, newest first.
    pub(crate) async fn execs(&self, id: &SandboxId) -> Result<Vec<Exec>, ClientError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{id}/execs"));
        self.json::<ExecList>(request).await.map(|list| list.execs)
    }

    /// Removes a file, or a directory with all in it.
    pub(crate) async fn remove(
        &self,
        id: &SandboxId,
        path: &str,
        user: Option<&str>,
    ) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, &format!("/sandboxes/{id}/files"));
        self.done(request.query(&file_query(path, user)).query(&[("recursive", "true")])).await
    }

    /// Gives a file or directory another path where nothing is yet.
    pub(crate) async fn rename(
        &self,
        id: &SandboxId,
        request: &MoveRequest,
    ) -> Result<FileInfo, ClientError> {
        self.json(self.request(Method::POST, &format!("/sandboxes/{id}/files/move")).json(request)).await
    }

    /// Facts of a file in a sandbox.
    pub(crate) async fn stat(
        &self,
        id: &SandboxId,
        path: &str,
        user: Option<&str>,
    ) -> Result<FileInfo, ClientError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{id}/files/stat"));
        self.json(request.query(&file_query(path, user))).await
    }

    /// A file's bytes, or a directory's content as a tar.
    pub(crate) async fn read(
        &self,
        id: &SandboxId,
        what: Transfer,
        path: &str,
        user: Option<&str>,
    ) -> Result<Response, ClientError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{id}/{}", what.path()));
        self.send(request.query(&file_query(path, user))).await
    }

    /// Writes a file, or unpacks a tar into a directory. `length` is sent where it is known.
    pub(crate) async fn write(
        &self,
        id: &SandboxId,
        what: Transfer,
        query: &[(&str, String)],
        body: reqwest::Body,
        length: Option<u64>,
    ) -> Result<Response, ClientError> {
        let mut request =
            self.request(Method::PUT, &format!("/sandboxes/{id}/{}", what.path())).query(query).body(body);
        if let Some(length) = length {
            request = request.header(header::CONTENT_LENGTH, length);
        }
        self.send(request).await
    }

    /// The layers of a kind.
    pub(crate) async fn layers(&self, kind: &str) -> Result<Vec<Image>, ClientError> {
        self.json::<ImageList>(self.layer_request(Method::GET, &layers_path(kind)))
            .await
            .map(|list| list.images)
    }

    /// One layer.
    pub(crate) async fn layer(&self, kind: &str, name: &str) -> Result<Image, ClientError> {
        self.json(self.layer_request(Method::GET, &format!("{}/{}", layers_path(kind), segment(name)))).await
    }

    /// Takes a layer in; the answer's body is one `ImportEvent` a line.
    pub(crate) async fn import(
        &self,
        kind: &str,
        name: &str,
        source: &str,
        body: reqwest::Body,
        length: Option<u64>,
    ) -> Result<Response, ClientError> {
        let mut request = self
            .layer_request(Method::PUT, &format!("{}/{}", layers_path(kind), segment(name)))
            .query(&[("source", source)])
            .body(body);
        if let Some(length) = length {
            request = request.header(header::CONTENT_LENGTH, length);
        }
        self.send(request).await
    }

    /// What first runs read of a layer.
    pub(crate) async fn layer_trace(&self, kind: &str, name: &str) -> Result<LayerTrace, ClientError> {
        self.json(self.layer_request(Method::GET, &layer_path(kind, name, "trace"))).await
    }

    /// Brings a layer's content to the node; the answer's body is one `PrefetchEvent` a line.
    pub(crate) async fn prefetch(
        &self,
        kind: &str,
        name: &str,
        request: &PrefetchRequest,
    ) -> Result<Response, ClientError> {
        self.send(self.layer_request(Method::POST, &layer_path(kind, name, "prefetch")).json(request)).await
    }

    /// Puts a tag on a layer.
    pub(crate) async fn tag_layer(&self, kind: &str, name: &str, tag: &str) -> Result<Image, ClientError> {
        self.json(self.layer_request(Method::PUT, &layer_path(kind, name, &format!("tags/{}", segment(tag)))))
            .await
    }

    /// A layer as a tar of an OCI layout.
    pub(crate) async fn export_layer(&self, kind: &str, name: &str) -> Result<Response, ClientError> {
        self.send(self.layer_request(Method::GET, &layer_path(kind, name, "export"))).await
    }

    /// Reads a layer, or all, whole from the store; the answer's body is one `VerifyEvent` a line.
    pub(crate) async fn verify(&self, layer: Option<(&str, &str)>) -> Result<Response, ClientError> {
        let path =
            layer.map_or_else(|| "/store/verify".to_owned(), |(kind, name)| layer_path(kind, name, "verify"));
        self.send(self.layer_request(Method::POST, &path)).await
    }

    /// Clears the store; the answer's body is one `CollectEvent` a line.
    pub(crate) async fn collect(
        &self,
        grace_s: Option<u64>,
        step_age_s: Option<u64>,
    ) -> Result<Response, ClientError> {
        let query = [("grace_s", grace_s), ("step_age_s", step_age_s)];
        self.send(self.layer_request(Method::POST, "/store/collect").query(&query)).await
    }

    /// What a step of a recipe came to.
    pub(crate) async fn step(&self, key: &str) -> Result<Image, ClientError> {
        self.json(self.layer_request(Method::GET, &format!("/steps/{key}"))).await
    }

    /// Gives what a step came to a name.
    pub(crate) async fn name_step(&self, key: &str, name: &str) -> Result<Image, ClientError> {
        self.json(self.layer_request(Method::PUT, &format!("/steps/{key}/names/{}", segment(name)))).await
    }

    /// Has the node get a layer from a registry; the answer is an import's.
    pub(crate) async fn pull(
        &self,
        kind: &str,
        name: &str,
        request: &PullRequest,
    ) -> Result<Response, ClientError> {
        let path = format!("{}/{}/pull", layers_path(kind), segment(name));
        self.send(self.layer_request(Method::POST, &path).json(request)).await
    }

    /// Removes a layer's name.
    pub(crate) async fn remove_layer(&self, kind: &str, name: &str) -> Result<(), ClientError> {
        self.done(self.layer_request(Method::DELETE, &format!("{}/{}", layers_path(kind), segment(name))))
            .await
    }
}

/// Where the layers of a kind are.
fn layers_path(kind: &str) -> String {
    if kind == LAYER_BASE { "/images".to_owned() } else { format!("/layers/{kind}") }
}

/// What is done with one layer beyond its name.
fn layer_path(kind: &str, name: &str, what: &str) -> String {
    format!("/layers/{kind}/{}/{what}", segment(name))
}

/// Which of the two ways bytes go in or out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// One file, as its bytes.
    File,
    /// A directory, as a tar.
    Archive,
}

impl Transfer {
    fn path(self) -> &'static str {
        match self {
            Self::File => "files",
            Self::Archive => "archive",
        }
    }
}

fn file_query<'a>(path: &'a str, user: Option<&'a str>) -> Vec<(&'static str, &'a str)> {
    let mut query = vec![("path", path)];
    query.extend(user.map(|user| ("user", user)));
    query
}
