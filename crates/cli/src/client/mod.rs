//! A typed client of the public API: requests, errors, output streams.

mod attach;
mod calls;
mod error;
mod fleet;
mod iam;
mod tls;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dsec_proto::rest::{PROJECT, UNREACHABLE_NODES, UNTOLD_SERVERS};
use futures_util::{Stream, StreamExt};
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;

pub(crate) use attach::{AttachReader, AttachWriter, Frame, Offsets, PING_AFTER, Socket};
pub(crate) use calls::{CREATE_PAUSE, CREATE_TRIES, ListQuery, Transfer, new_key};
pub(crate) use error::ClientError;

use crate::config::Target;

/// Longest wait for a connection: a host that does not answer by then is down.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a plain answer when `--timeout` is not given. A burst of thousands of creates
/// queues on a node for tens of seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A client of one platform. Connections are kept and shared by its clones.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    tls: Arc<rustls::ClientConfig>,
    target: Target,
    timeout: Option<Duration>,
    /// Nodes that calls about layers are meant for; none: the platform chooses.
    nodes: Vec<String>,
}

impl Client {
    /// A client; nothing is connected yet.
    ///
    /// # Errors
    /// The address is none.
    pub(crate) fn new(target: Target, timeout: Option<Duration>) -> Result<Self, ClientError> {
        let bad = |cause: String| ClientError::BadUrl { url: target.url.clone(), cause };
        let url = reqwest::Url::parse(&target.url).map_err(|error| bad(error.to_string()))?;
        let tls =
            tls::config(url.scheme() == "https", target.ca_file.as_deref()).map_err(ClientError::Trust)?;
        let http = reqwest::Client::builder()
            // A proxy of the environment is for the internet, and the WebSockets would bypass it.
            .no_proxy()
            .tls_backend_preconfigured(rustls::ClientConfig::clone(&tls))
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .pool_idle_timeout(Duration::from_secs(20))
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| bad(error.to_string()))?;
        Ok(Self { http, tls, target, timeout, nodes: Vec::new() })
    }

    /// Address of the API.
    pub(crate) fn url(&self) -> &str {
        &self.target.url
    }

    /// A request on a path below `/v1`, with the key; no time limit yet.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}/v1{path}", self.target.url));
        let request = match &self.target.project {
            Some(project) => request.header(PROJECT, project.as_str()),
            None => request,
        };
        match &self.target.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// The same client, whose calls about layers are meant for these nodes.
    #[must_use]
    pub(crate) fn on(self, nodes: Vec<String>) -> Self {
        Self { nodes, ..self }
    }

    /// A request about layers or their store.
    fn layer_request(&self, method: Method, path: &str) -> RequestBuilder {
        let nodes: Vec<_> = self.nodes.iter().map(|node| ("node", node)).collect();
        self.request(method, path).query(&nodes)
    }

    /// A request on a path of the server itself, without a key.
    pub(crate) fn bare_request(&self, path: &str) -> RequestBuilder {
        self.http.get(format!("{}{path}", self.target.url)).timeout(self.answer_timeout())
    }

    fn answer_timeout(&self) -> Duration {
        self.timeout.unwrap_or(ANSWER_TIMEOUT)
    }

    /// Sends, and turns every answer but a success into an error.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|error| self.wire(&error))?;
        if response.status().is_success() {
            if let Some(away) =
                response.headers().get(UNREACHABLE_NODES).and_then(|names| names.to_str().ok())
            {
                crate::render::note(&format!(
                    "warning: nodes that do not answer: {away}; what they have is shown as last heard of, or not at all"
                ));
            }
            if let Some(untold) = response.headers().get(UNTOLD_SERVERS).and_then(|it| it.to_str().ok()) {
                crate::render::note(&format!(
                    "warning: {untold} servers do not answer and may not know of the change for a while"
                ));
            }
            return Ok(response);
        }
        let status = response.status().as_u16();
        let body = response.bytes().await.unwrap_or_default();
        Err(ClientError::from_answer(&self.target.url, status, &body))
    }

    /// Sends with the time limit of a plain request, and reads the answer as JSON.
    pub(crate) async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ClientError> {
        self.json_within(request, self.answer_timeout()).await
    }

    /// Like [`Self::json`] for a request that waits on the server: its limit is added to ours.
    pub(crate) async fn json_within<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let response = self.send(request.timeout(limit)).await?;
        let body = response.bytes().await.map_err(|error| self.wire(&error))?;
        serde_json::from_slice(&body).map_err(|error| ClientError::Strange {
            url: self.target.url.clone(),
            what: format!("JSON of another shape ({error})"),
        })
    }

    /// Sends with the time limit of a plain request; the answer has no body.
    pub(crate) async fn done(&self, request: RequestBuilder) -> Result<(), ClientError> {
        self.send(request.timeout(self.answer_timeout())).await.map(drop)
    }

    /// The body of an answer, piece by piece.
    pub(crate) fn body(&self, response: Response) -> impl Stream<Item = Result<Bytes, ClientError>> + use<> {
        let client = self.clone();
        response.bytes_stream().map(move |piece| piece.map_err(|error| client.wire(&error)))
    }

    /// Names a failure below HTTP.
    fn wire(&self, error: &reqwest::Error) -> ClientError {
        let url = self.target.url.clone();
        let cause = root_cause(error);
        if error.is_connect() {
            ClientError::Unreachable { url, cause }
        } else if error.is_timeout() {
            ClientError::TimedOut { url }
        } else if error.is_builder() {
            ClientError::BadUrl { url, cause }
        } else {
            ClientError::Broken { url, cause }
        }
    }
}

/// The innermost cause, which alone says something to a person.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    match cause.downcast_ref::<std::io::Error>() {
        Some(error) => crate::failure::plain(error),
        None => cause.to_string(),
    }
}

/// Splits a stream of bytes into lines and reads each as JSON.
pub(crate) struct JsonLines<S> {
    pieces: S,
    held: Vec<u8>,
}

impl<S: Stream<Item = Result<Bytes, ClientError>> + Unpin> JsonLines<S> {
    /// Longest line that is taken: an image's record with its environment is a few KiB.
    const LINE_MAX: usize = 4 << 20;

    /// Lines of a body.
    pub(crate) fn new(pieces: S) -> Self {
        Self { pieces, held: Vec::new() }
    }

    /// The next line, without its end. `None` at the end of the body.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, ClientError> {
        loop {
            if let Some(end) = self.held.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.held.drain(..=end).collect();
                line.pop();
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(line));
                }
                continue;
            }
            if self.held.len() > Self::LINE_MAX {
                return Err(ClientError::Strange {
                    url: "the server".into(),
                    what: "an endless line".into(),
                });
            }
            match self.pieces.next().await {
                Some(piece) => self.held.extend_from_slice(&piece?),
                None if self.held.trim_ascii().is_empty() => return Ok(None),
                None => return Ok(Some(std::mem::take(&mut self.held))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_found_wherever_the_pieces_break() {
        let pieces = ["{\"a\":", "1}\n\n{\"b\"", ":2}", "\n{\"c\":3}"].map(|p| Ok(Bytes::from(p)));
        let mut lines = JsonLines::new(futures_util::stream::iter(pieces));
        let mut seen = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            seen.push(String::from_utf8(line).unwrap());
        }
        assert_eq!(seen, ["{\"a\":1}", "{\"b\":2}", "{\"c\":3}"]);
    }

    #[test]
    fn an_address_that_is_none_is_named() {
        for url in ["http://", "http://h:99999"] {
            let target = Target { url: url.into(), ..Target::default() };
            let error = Client::new(target, None).unwrap_err().to_string();
            assert!(error.contains(url), "{error}");
        }
    }
}
