//! One request to one node: headers made right for the next hop, bodies streamed through.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dsec_http::{connection_options, strip_hop_by_hop};
use dsec_model::ErrorKind;
use dsec_proto::rest::JSON_BODY_MAX;
use http::header;
use http::{HeaderMap, HeaderValue, Uri};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::upgrade::OnUpgrade;
use tokio_util::task::TaskTracker;

use crate::behalf::Behalf;
use crate::failure::{Failure, Reply};
use crate::nodes::Node;
use crate::upstream::{self, Answer, SendError};

/// Bodies of a known length up to this, bytes, are read whole before they are sent: head and body
/// then leave in one write, and the edge wakes once instead of twice.
pub const WHOLE_BODY_MAX: u64 = 64 << 10;

/// How long after its last answer a node that cannot be reached is waited for: an edge with hundreds of sandboxes is back within
/// that, by itself or as another release. A node that is really away is known to be so from then on.
const RESTART_MAX: Duration = Duration::from_secs(5);
/// Pause between two tries.
const RESTART_LOOK: Duration = Duration::from_millis(25);

/// What kind of body a path takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyKind {
    /// JSON, at most [`JSON_BODY_MAX`] bytes.
    Json,
    /// Bytes of any length.
    Raw,
}

/// A request made ready for a node.
pub struct Outgoing {
    request: Request,
    /// Its body, where that was read whole.
    whole: Option<Bytes>,
    upgrade: Option<OnUpgrade>,
}

impl Outgoing {
    /// Makes a caller's request ready.
    ///
    /// # Errors
    /// Its body is too large, or the caller did not send all of it.
    pub async fn new(mut request: Request, behalf: &Behalf, kind: BodyKind) -> Result<Self, Failure> {
        let upgrade = asks_for_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (parts, body) = request.into_parts();
        let (body, whole) = limited(body, kind).await?;
        let mut request = Request::new(body);
        *request.method_mut() = parts.method;
        *request.uri_mut() = below_the_host(&parts.uri);
        *request.headers_mut() = parts.headers;
        rewrite_headers(request.headers_mut(), behalf, upgrade.is_some());
        Ok(Self { request, whole, upgrade })
    }

    /// Its head, as it goes to the node.
    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        self.request.headers_mut()
    }

    /// The same once more, if its body is short enough to have been read whole.
    pub fn again(&self) -> Option<Self> {
        let whole = self.whole.clone()?;
        let mut request = Request::new(Body::from(whole.clone()));
        *request.method_mut() = self.request.method().clone();
        *request.uri_mut() = self.request.uri().clone();
        *request.headers_mut() = self.request.headers().clone();
        Some(Self { request, whole: Some(whole), upgrade: None })
    }

    /// Sends it to `node` and makes the response ready for the caller. An upgrade that the edge
    /// agrees to goes on in a task of `tunnels`. A node that answered a moment ago and cannot be reached has an edge that is being
    /// started again, and is waited for: nothing of the request has been sent.
    ///
    /// # Errors
    /// No response came; the failure says whether the request may have been carried out.
    pub async fn send(mut self, node: &Arc<Node>, tunnels: &TaskTracker) -> Reply {
        loop {
            match self.try_send(node, tunnels).await {
                Err(SendError::Unreachable(_)) if node.answered_within(RESTART_MAX) => {
                    tokio::time::sleep(RESTART_LOOK).await;
                }
                sent => return sent.map_err(|error| failure_of(node, error)),
            }
        }
    }

    /// The same, for a caller who may try another node: after [`SendError::Unreachable`] it can be sent again.
    ///
    /// # Errors
    /// No response came.
    pub async fn try_send(&mut self, node: &Arc<Node>, tunnels: &TaskTracker) -> Result<Response, SendError> {
        match node.send(&mut self.request).await? {
            Answer::Response(mut response) => {
                strip_hop_by_hop(response.headers_mut());
                Ok(response)
            }
            Answer::Upgrade(response, far) => match self.upgrade.take() {
                Some(caller) => Ok(tunnel(response, caller, far, tunnels)),
                None => {
                    let message =
                        format!("node {} upgraded a connection that nobody asked to upgrade", node.name());
                    Ok(Failure::new(ErrorKind::Internal, message).into_response())
                }
            },
        }
    }
}

fn tunnel(
    mut response: Response,
    caller: OnUpgrade,
    far: upstream::FarEnd,
    tunnels: &TaskTracker,
) -> Response {
    let protocol = response.headers().get(header::UPGRADE).cloned();
    strip_hop_by_hop(response.headers_mut());
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        headers.insert(header::UPGRADE, protocol);
    }
    tunnels.spawn(async move {
        if let Err(error) = upstream::join(caller, far).await {
            // A caller that vanishes is an everyday thing.
            tracing::debug!(%error, "tunnel broke");
        }
    });
    response
}

/// Turns the lack of a response into what the caller is told, and says so in the log.
pub fn failure_of(node: &Node, error: SendError) -> Failure {
    let name = node.name();
    match &error {
        SendError::Unreachable(error) => {
            tracing::warn!(node_id = %name, place = %node.way(), %error, "node cannot be reached");
        }
        SendError::Broken(error) => {
            tracing::warn!(node_id = %name, %error, "node closed the connection before it answered");
        }
        SendError::Request(error) => tracing::debug!(node_id = %name, %error, "request body failed"),
    }
    unanswered(node, &error)
}

/// What the lack of a response means.
pub fn unanswered(node: &Node, error: &SendError) -> Failure {
    let name = node.name();
    let detail = serde_json::json!({ "node": name.as_str() });
    match error {
        SendError::Unreachable(_) => {
            Failure::new(ErrorKind::Unavailable, format!("node {name} cannot be reached"))
                .hint("nothing was done; see that its dsec-edge runs (`dsec doctor`) and try again")
                .detail(detail)
        }
        SendError::Broken(_) => Failure::new(
            ErrorKind::Unavailable,
            format!("node {name} closed the connection before it answered"),
        )
        .hint("its dsec-edge may be restarting; the request may have been carried out, so look before you repeat it")
        .detail(detail),
        SendError::Request(error) if is_length_limit(error) => Failure::body_too_large(JSON_BODY_MAX),
        SendError::Request(_) => {
            Failure::new(ErrorKind::InvalidArgument, "the request's body ended before its length was reached")
        }
    }
}

/// The body as far as it may go, and its bytes if it was read whole.
async fn limited(body: Body, kind: BodyKind) -> Result<(Body, Option<Bytes>), Failure> {
    match (body.size_hint().exact(), kind) {
        (Some(0), _) => Ok((Body::empty(), Some(Bytes::new()))),
        (Some(length), BodyKind::Json) if length > JSON_BODY_MAX as u64 => {
            Err(Failure::body_too_large(JSON_BODY_MAX))
        }
        (Some(length), _) if length <= WHOLE_BODY_MAX => {
            let whole = whole(body).await?;
            Ok((Body::from(whole.clone()), Some(whole)))
        }
        (None, BodyKind::Json) => Ok((Body::new(Limited::new(body, JSON_BODY_MAX)), None)),
        _ => Ok((body, None)),
    }
}

/// Reads a JSON body whole.
///
/// # Errors
/// It is larger than [`JSON_BODY_MAX`], or the caller did not send all of it.
pub async fn whole(body: Body) -> Result<Bytes, Failure> {
    match Limited::new(body, JSON_BODY_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if is_length_limit(&*error) => Err(Failure::body_too_large(JSON_BODY_MAX)),
        Err(error) => {
            tracing::debug!(error = %error, "request body failed");
            Err(Failure::new(
                ErrorKind::InvalidArgument,
                "the request's body ended before its length was reached",
            ))
        }
    }
}

fn is_length_limit(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<LengthLimitError>())
}

/// Path and query as the caller wrote them, without scheme and host.
fn below_the_host(uri: &Uri) -> Uri {
    match uri.path_and_query() {
        Some(path) => Uri::from(path.clone()),
        None => Uri::from_static("/"),
    }
}

fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE) && connection_options(headers).any(|option| option == "upgrade")
}

fn rewrite_headers(headers: &mut HeaderMap, behalf: &Behalf, upgrade: bool) {
    let protocol = if upgrade { headers.get(header::UPGRADE).cloned() } else { None };
    strip_hop_by_hop(headers);
    headers.remove(header::AUTHORIZATION);
    behalf.write(headers);
    if let Some(protocol) = protocol {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
    // HTTP/1.0 callers may leave it out; HTTP/1.1, which the edge is spoken to in, wants it.
    headers.entry(header::HOST).or_insert(HeaderValue::from_static("dsec"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller() -> Behalf {
        Behalf::server()
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn identity_headers_of_a_caller_are_replaced_and_the_key_stays_here() {
        let mut sent = headers(&[
            ("authorization", "Bearer dsec_x"),
            ("x-dsec-project", "root"),
            ("x-dsec-project", "also-root"),
            ("x-dsec-key-id", "admin"),
            ("x-dsec-sees", "root/theirs"),
            ("x-dsec-may", "root/theirs"),
            ("x-dsec-charge", "c 0 0 0"),
            ("x-dsec-forward-authorization", "Basic abc"),
            ("host", "api.example"),
        ]);
        rewrite_headers(&mut sent, &caller(), false);
        let sent_as = |name: &str| sent.get_all(name).iter().cloned().collect::<Vec<HeaderValue>>();
        assert_eq!(sent_as("x-dsec-project"), ["root"]);
        assert_eq!(sent_as("x-dsec-key-id"), ["dsec-control"]);
        assert_eq!(sent_as("x-dsec-sees"), ["root"]);
        assert!(!sent.contains_key("x-dsec-may") && !sent.contains_key("x-dsec-charge"));
        assert!(!sent.contains_key("authorization"));
        assert_eq!(sent["x-dsec-forward-authorization"], "Basic abc");
        assert_eq!(sent["host"], "api.example");
    }

    #[test]
    fn headers_of_one_hop_end_here() {
        let mut sent = headers(&[
            ("connection", "close, X-Private, x-dsec-project"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("te", "trailers"),
            ("x-kept", "1"),
        ]);
        rewrite_headers(&mut sent, &caller(), false);
        let mut names: Vec<_> = sent.keys().map(header::HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["host", "x-dsec-key-id", "x-dsec-project", "x-dsec-sees", "x-kept"]);
    }

    #[test]
    fn an_upgrade_is_carried_over_the_hop() {
        let mut sent = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert!(asks_for_upgrade(&sent));
        rewrite_headers(&mut sent, &caller(), true);
        assert_eq!(sent["connection"], "upgrade");
        assert_eq!(sent["upgrade"], "websocket");
        assert!(!asks_for_upgrade(&headers(&[("upgrade", "websocket")])));
    }
}
