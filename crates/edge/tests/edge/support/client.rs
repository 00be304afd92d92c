//! A small HTTP and WebSocket client on the edge's socket.

use std::path::PathBuf;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::WebSocketStream;

pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The JSON of an answer that must have this status.
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// The error of an answer that must be this one.
    pub fn refused(self, status: u16, code: &str) -> Value {
        let error = self.expect(status);
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{error}");
        assert!(error["detail"].is_object() && error["hint"].is_string(), "{error}");
        error
    }
}

#[derive(Clone)]
pub struct Client {
    pub socket: PathBuf,
}

pub type Streaming = http::Response<hyper::body::Incoming>;

impl Client {
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Sends a request and gives the head; the body is still to be read.
    pub async fn begin<B>(&self, request: http::Request<B>) -> Result<Streaming, hyper::Error>
    where
        B: http_body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        sender.send_request(request).await
    }

    pub fn request(
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> http::Request<Full<Bytes>> {
        let mut request = http::Request::builder().method(method).uri(path).header("host", "edge");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::new(body.into())).unwrap()
    }

    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let response = self.begin(Self::request(method, path, headers, body)).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send("POST", path, &[], body.to_string()).await
    }

    pub async fn put(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.send("PUT", path, &[], body).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send("DELETE", path, &[], "").await
    }

    /// Imports a tiny image.
    pub async fn import(&self, name: &str) -> Value {
        self.import_with(name, name).await
    }

    /// Imports an image with this content in a file.
    pub async fn import_with(&self, name: &str, content: &str) -> Value {
        let name = name.replace('/', "%2F");
        let answer = self.put(&format!("/v1/images/{name}?source=test"), tiny_tar(content)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let last: Value = serde_json::from_str(answer.text().lines().last().unwrap()).unwrap();
        assert_eq!(last["event"], "done", "{last}");
        last["image"].clone()
    }

    /// Creates a sandbox of `base` and gives its id.
    pub async fn create(&self) -> String {
        self.create_with(json!({})).await["id"].as_str().unwrap().to_owned()
    }

    pub async fn create_with(&self, mut fields: Value) -> Value {
        fields["container_image"] = json!("base");
        self.post("/v1/sandboxes", fields).await.expect(201)
    }

    /// Runs a shell line to its end.
    pub async fn run(&self, id: &str, line: &str) -> Value {
        self.exec(id, json!({ "shell": line, "wait": true })).await
    }

    pub async fn exec(&self, id: &str, request: Value) -> Value {
        self.post(&format!("/v1/sandboxes/{id}/execs"), request).await.expect(200)
    }

    pub async fn ws(&self, path: &str) -> WebSocketStream<UnixStream> {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        let (ws, _) = tokio_tungstenite::client_async(format!("ws://edge{path}"), stream).await.unwrap();
        ws
    }
}

/// A tar with one program and one file.
pub fn tiny_tar(content: &str) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, text) in [("bin/sh", "#!"), ("etc/name", content)] {
        let mut header = tar::Header::new_ustar();
        header.set_size(text.len() as u64);
        header.set_mode(0o755);
        header.set_cksum();
        tar.append_data(&mut header, path, text.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}
