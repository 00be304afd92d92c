//! A running server, and callers of it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::body::Body;
use dsec_control::app::App;
use dsec_control::config::{ConfigFile, NodeEntry, Tls};
use dsec_control::keys::FileKeys;
use dsec_control::records::Meant;
use dsec_control::server::Door;
use dsec_control::tls::PublicTls;
use dsec_control::{api, server};
use dsec_model::iam::Scope;
use dsec_proto::rest::NodeKnown;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::edge::FakeEdge;

/// A key that the key file has.
pub(crate) const KEY: &str = "dsec_good";
/// A sandbox of the first node.
pub(crate) const SANDBOX: &str = "/v1/sandboxes/sb-n1-abc";
/// Nothing in these tests takes longer, on any machine, unless it is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A server with its nodes.
pub(crate) struct Control {
    pub(crate) address: SocketAddr,
    pub(crate) edges: Vec<FakeEdge>,
    pub(crate) stop: CancellationToken,
    pub(crate) served: JoinHandle<()>,
    pub(crate) dir: TempDir,
    pub(crate) app: Arc<App>,
}

pub(crate) fn key_line(id: &str, key: &str) -> String {
    let sha256 = format!("{:x}", Sha256::digest(key.as_bytes()));
    format!(r#"{{"id":"{id}","project":"root","sha256":"{sha256}","created_ms":1,"name":"test"}}"#)
}

pub(crate) fn write_keys(path: &std::path::Path, lines: &[String]) {
    std::fs::write(path, format!(r#"{{"keys":[{}]}}"#, lines.join(","))).unwrap();
}

impl Control {
    /// A server with nodes n1, n2, ...
    pub(crate) async fn start(nodes: usize) -> Self {
        Self::start_with(nodes, |_| None).await
    }

    /// The same with what the directory has for a certificate.
    pub(crate) async fn start_with(nodes: usize, tls: impl FnOnce(&Path) -> Option<Tls>) -> Self {
        Self::start_as(nodes, |_| {}, tls, |_| {}).await
    }

    /// The same with nodes made ready before they are asked anything, and more settings.
    pub(crate) async fn start_as(
        nodes: usize,
        set: impl FnOnce(&mut ConfigFile),
        tls: impl FnOnce(&Path) -> Option<Tls>,
        ready: impl FnOnce(&[FakeEdge]),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let edges: Vec<FakeEdge> =
            (1..=nodes).map(|number| FakeEdge::start(dir.path(), &format!("n{number}"))).collect();
        ready(&edges);
        let keys_file = dir.path().join("keys.json");
        write_keys(&keys_file, &[key_line("key-1", KEY)]);
        let entry =
            |edge: &FakeEdge| NodeEntry { name: edge.notes.name.clone(), socket: edge.socket.clone() };
        let mut config = ConfigFile {
            listen: Some("127.0.0.1:0".to_owned()),
            keys_file: Some(keys_file.clone()),
            database: None,
            nodes: edges.iter().map(entry).collect(),
            ..ConfigFile::default()
        };
        set(&mut config);
        let keys = FileKeys::open(&keys_file, Duration::ZERO).unwrap();
        let app = App::with_keys(&config.validate().unwrap(), keys).await.unwrap();
        let listener = server::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let watched = Arc::clone(&app);
        let _watching = tokio::spawn(async move { watched.watch().await });
        if nodes > 1 {
            app.nodes.watched.gathered().await;
        }
        // Those that answer have been asked for all there is, so that no connection is made for that later.
        for (at, edge) in edges.iter().enumerate().filter(|(_, edge)| !edge.notes.hung.load(Ordering::SeqCst))
        {
            until("what the node tells", async || match app.nodes.records.known(at) {
                NodeKnown::Gathering => Err(edge.notes.name.clone()),
                _ => Ok(()),
            })
            .await;
        }
        let router = api::router(Arc::clone(&app));
        let tls = tls(dir.path()).map(|source| Arc::new(PublicTls::open(&source).unwrap()));
        if let Some(tls) = tls.clone() {
            tokio::spawn(async move { tls.follow().await });
        }
        let door = Door::from(listener).with_tls(tls);
        let served = tokio::spawn(server::serve(door, Arc::clone(&app), router, stop.clone()));
        Self { address, edges, stop, served, dir, app }
    }

    /// Has the server miss so many reports of the node at a place, which does not answer any more, that it is lost.
    pub(crate) async fn lose(&self, at: usize) {
        let is_lost = || self.app.nodes.watched.standing(at).is_lost();
        while !is_lost() {
            while !is_lost() {
                self.app.nodes.watched.note(at, 0, None);
            }
            // A report may have been on its way.
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// Waits until the server has been told of this many sandboxes of the node at a place.
    pub(crate) async fn told(&self, at: usize, count: u64) {
        let meant = Meant { task: None, scope: Scope::everything() };
        until("what the server is told of sandboxes", async || {
            let standing = self.app.nodes.watched.standing(at);
            let counts = self.app.nodes.records.counts(at, standing, &meant);
            let all = counts.map(|counts| counts.iter().map(|(_, counts)| counts.all()).sum::<u64>());
            if all == Some(count) { Ok(()) } else { Err(all) }
        })
        .await;
    }

    pub(crate) fn keys_file(&self) -> PathBuf {
        self.dir.path().join("keys.json")
    }

    /// A connection of its own.
    pub(crate) async fn connect(&self) -> Caller {
        Caller::connect(self.address).await
    }

    /// A connection to the first node, past the server.
    pub(crate) async fn connect_to_node(&self) -> Caller {
        let stream = tokio::net::UnixStream::connect(&self.edges[0].socket).await.unwrap();
        let (sender, connection) =
            http1::Builder::new().max_buf_size(1 << 20).handshake(TokioIo::new(stream)).await.unwrap();
        let task = tokio::spawn(async move {
            let _ = connection.await;
        });
        Caller { sender, task }
    }

    /// One request with the good key on a connection of its own, read whole.
    pub(crate) async fn ask(&self, request: Request<Body>) -> Answer {
        self.connect().await.ask(request).await
    }
}

/// One client connection.
pub(crate) struct Caller {
    sender: http1::SendRequest<Body>,
    task: JoinHandle<()>,
}

impl Caller {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream).await
    }

    /// The same over a stream that there is.
    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) =
            http1::Builder::new().max_buf_size(1 << 20).handshake(TokioIo::new(stream)).await.unwrap();
        let task = tokio::spawn(async move {
            let _ = connection.await;
        });
        Caller { sender, task }
    }

    pub(crate) async fn send(&mut self, mut request: Request<Body>) -> Response<Incoming> {
        let headers = request.headers_mut();
        headers.entry("host").or_insert("control.test".parse().unwrap());
        headers.entry("authorization").or_insert(format!("Bearer {KEY}").parse().unwrap());
        patiently(async {
            self.sender.ready().await.unwrap();
            self.sender.send_request(request).await.unwrap()
        })
        .await
    }

    pub(crate) async fn ask(&mut self, request: Request<Body>) -> Answer {
        Answer::of(self.send(request).await).await
    }

    /// Hangs up.
    pub(crate) fn hang_up(self) {
        self.task.abort();
    }
}

/// A response read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) async fn of(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = patiently(body.collect()).await.unwrap().to_bytes().to_vec();
        Self { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{}: {:?}", self.status, String::from_utf8_lossy(&self.body)))
    }

    /// A header as the node saw it.
    pub(crate) fn seen(&self, name: &str) -> Vec<String> {
        let headers = self.json()["headers"].as_array().unwrap().clone();
        headers.iter().filter(|h| h[0] == name).map(|h| h[1].as_str().unwrap().to_owned()).collect()
    }

    /// Checks the one error shape, and gives its code.
    pub(crate) fn error(&self) -> String {
        let body = self.json();
        let mut fields: Vec<_> = body.as_object().unwrap().keys().cloned().collect();
        fields.sort();
        assert_eq!(fields, ["code", "detail", "hint", "message"], "{body}");
        assert!(body["detail"].is_object() && body["hint"].is_string(), "{body}");
        assert_ne!(body["message"], "");
        assert_eq!(self.headers["content-type"], "application/json");
        assert!(self.headers.contains_key("x-request-id"));
        body["code"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

pub(crate) fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

/// The same request, to a node that is to behave so.
pub(crate) fn with(mut request: Request<Body>, name: &'static str, value: &str) -> Request<Body> {
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

/// Waits, but not for ever.
pub(crate) async fn patiently<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("nothing happened")
}

/// Waits for a condition and shows its last state if it never comes.
pub(crate) async fn until<T: std::fmt::Debug>(what: &str, mut state: impl AsyncFnMut() -> Result<(), T>) {
    let started = Instant::now();
    loop {
        match state().await {
            Ok(()) => return,
            Err(last) if started.elapsed() > PATIENCE => panic!("{what} never came; last seen {last:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}
