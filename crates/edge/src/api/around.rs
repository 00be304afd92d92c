//! Around every request: its name, its log line, a body that may be left unread, and a panic of it
//! turned into an answer.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use dsec_http::drained;
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, REQUEST_ID, REQUEST_ID_MAX};
use futures_util::FutureExt;

use super::Failure;
use crate::ids;

/// The middleware: outermost, so that nothing leaves without a name and nothing is not logged.
pub(super) async fn around(mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let (request, awaited) = drained(request, Body::new);
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let mut response = answered.unwrap_or_else(|_| {
        Failure(ApiError::new(ErrorKind::Internal, "the request met a defect in the edge")).into_response()
    });
    if awaited.is_some_and(|awaited| awaited.in_vain()) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    log(&method, &path, &id, &response, began);
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| id.len() <= REQUEST_ID_MAX).cloned();
    given.unwrap_or_else(|| {
        HeaderValue::try_from(ids::request()).unwrap_or_else(|_| HeaderValue::from_static("unnamed"))
    })
}

/// What operators look for is on by default: failures of the node, and what makes and ends sandboxes and
/// images. The rest is at debug.
fn log(method: &Method, path: &str, id: &HeaderValue, response: &Response, began: Instant) {
    let status = response.status();
    // A port's answer is the server's inside.
    let failed = status.is_server_error() && !is_of_port(path);
    let kept = is_life_event(method, path);
    if !(failed || kept || tracing::enabled!(tracing::Level::DEBUG)) {
        return;
    }
    let (op, status) = (method.as_str(), status.as_u16());
    let request_id = id.to_str().unwrap_or_default();
    let sandbox_id = sandbox_id(path, response);
    let elapsed_ms = (began.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    if failed {
        tracing::error!(op, path, status, elapsed_ms, request_id, sandbox_id, "request failed");
    } else if kept {
        tracing::info!(op, path, status, elapsed_ms, request_id, sandbox_id, "request");
    } else {
        tracing::debug!(op, path, status, elapsed_ms, request_id, sandbox_id, "request");
    }
}

fn is_of_port(path: &str) -> bool {
    path.split('/').nth(4) == Some("ports")
}

fn is_life_event(method: &Method, path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').skip(1).take(5).collect();
    matches!(
        (method.as_str(), parts.as_slice()),
        ("POST", ["v1", "sandboxes"] | ["v1", "sandboxes", _, "stop"])
            | ("DELETE", ["v1", "sandboxes", _])
            | ("PUT" | "DELETE", ["v1", "images", _])
    )
}

/// From the path, or, of a create, from the answer's `location`.
fn sandbox_id(path: &str, response: &Response) -> Option<String> {
    let of = |path: &str| {
        let id = path.strip_prefix("/v1/sandboxes/")?.split('/').next()?;
        id.parse::<dsec_model::SandboxId>().ok().map(String::from)
    };
    of(path).or_else(|| of(response.headers().get(header::LOCATION)?.to_str().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_and_ends_things_is_logged_by_default() {
        for (method, path, kept) in [
            (Method::POST, "/v1/sandboxes", true),
            (Method::POST, "/v1/sandboxes/sb-n1-a/stop", true),
            (Method::DELETE, "/v1/sandboxes/sb-n1-a", true),
            (Method::PUT, "/v1/images/debian", true),
            (Method::DELETE, "/v1/images/debian", true),
            (Method::GET, "/v1/sandboxes", false),
            (Method::POST, "/v1/sandboxes/sb-n1-a/execs", false),
            (Method::POST, "/v1/sandboxes/sb-n1-a/ports/80/http/stop", false),
            (Method::DELETE, "/v1/sandboxes/sb-n1-a/files", false),
        ] {
            assert_eq!(is_life_event(&method, path), kept, "{method} {path}");
        }
    }

    #[test]
    fn the_log_finds_the_sandbox_in_path_or_location() {
        let mut response = Response::new(Body::empty());
        assert_eq!(sandbox_id("/v1/sandboxes/sb-n1-a/execs", &response).unwrap(), "sb-n1-a");
        assert_eq!(sandbox_id("/v1/sandboxes", &response), None);
        response.headers_mut().insert("location", HeaderValue::from_static("/v1/sandboxes/sb-n1-b"));
        assert_eq!(sandbox_id("/v1/sandboxes", &response).unwrap(), "sb-n1-b");
    }
}
