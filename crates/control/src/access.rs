//! Around every request: its id, its log line, its count, and a net for panics.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use dsec_http::drained;
use dsec_model::ErrorKind;
use dsec_proto::rest;
use futures_util::FutureExt;
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, Method, Uri};

use crate::app::App;
use crate::failure::Failure;
use crate::metrics::Route;

/// Names one request in the logs of every process.
pub const REQUEST_ID: HeaderName = HeaderName::from_static(rest::REQUEST_ID);

/// The middleware: outermost, so that nothing leaves without an id and nothing is not counted.
pub async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let _in_flight = app.metrics.begin();
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let route = Route::of(request.extensions().get::<MatchedPath>().map(MatchedPath::as_str));
    let method = request.method().clone();
    let uri = request.uri().clone();

    let (request, awaited) = drained(request, Body::new);
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let mut response = answered.unwrap_or_else(|panic| caught(&*panic));
    if awaited.is_some_and(|awaited| awaited.in_vain()) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response.headers_mut().insert(REQUEST_ID, id.clone());

    let elapsed = started.elapsed();
    app.metrics.count(route, &method, response.status(), elapsed);
    log(
        &Line { route, method: &method, uri: &uri, id: &id, response: &response },
        elapsed.as_secs_f64() * 1e3,
    );
    response
}

struct Line<'a> {
    route: Route,
    method: &'a Method,
    uri: &'a Uri,
    id: &'a HeaderValue,
    response: &'a Response,
}

/// What operators look for is on by default: failures of the platform, and what makes and ends
/// sandboxes and images. The rest is at debug, since a log line costs as much as the forwarding.
fn log(line: &Line<'_>, elapsed_ms: f64) {
    let status = line.response.status();
    // A port's answer is the server's inside.
    let failed = status.is_server_error() && !line.route.template().contains("/ports/");
    let kept = is_life_event(line.method, line.route.template());
    if !(failed || kept || tracing::enabled!(tracing::Level::DEBUG)) {
        return;
    }
    let (method, route) = (line.method.as_str(), line.route.template());
    let request_id = line.id.to_str().unwrap_or_default();
    let sandbox_id = sandbox_id(line.uri, line.response);
    let (status_code, elapsed_ms) = (status.as_u16(), (elapsed_ms * 1e3).round() / 1e3);
    if failed {
        tracing::error!(
            method,
            route,
            status = status_code,
            elapsed_ms,
            request_id,
            sandbox_id,
            "request failed"
        );
    } else if kept {
        tracing::info!(method, route, status = status_code, elapsed_ms, request_id, sandbox_id, "request");
    } else {
        tracing::debug!(method, route, status = status_code, elapsed_ms, request_id, sandbox_id, "request");
    }
}

fn is_life_event(method: &Method, route: &str) -> bool {
    match *method {
        Method::POST => matches!(
            route,
            "/v1/sandboxes"
                | "/v1/sandboxes/batch"
                | "/v1/sandboxes/{id}/stop"
                | "/v1/tasks/{task}/stop"
                | "/v1/nodes/{node}/cordon"
                | "/v1/nodes/{node}/uncordon"
                | "/v1/nodes/{node}/drain"
                | "/v1/nodes/{node}/release/try"
                | "/v1/nodes/{node}/config/try"
                | "/v1/nodes/{node}/trial/end"
                | "/v1/cluster"
                | "/v1/cluster/tokens"
                | "/v1/cluster/join"
        ),
        Method::PUT => matches!(
            route,
            "/v1/images/{name}" | "/v1/layers/{kind}/{name}" | "/v1/nodes/{node}/releases/{release}"
        ),
        Method::DELETE => {
            matches!(
                route,
                "/v1/sandboxes/{id}"
                    | "/v1/images/{name}"
                    | "/v1/layers/{kind}/{name}"
                    | "/v1/cluster/nodes/{node}"
            )
        }
        _ => false,
    }
}

/// From the path, or, of a create, from the answer's `location`.
fn sandbox_id(uri: &Uri, response: &Response) -> Option<String> {
    let in_path = |path: &str| {
        let mut parts = path.strip_prefix("/v1/sandboxes/")?.split('/');
        let id = parts.next()?;
        id.parse::<dsec_model::SandboxId>().ok().map(String::from)
    };
    in_path(uri.path()).or_else(|| in_path(response.headers().get(header::LOCATION)?.to_str().ok()?))
}

/// The caller's id when it is 1 to 128 visible ASCII characters, else a new one. A bad one is
/// replaced and not refused: an id is for finding things again, no reason to fail.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    match headers.get(REQUEST_ID) {
        Some(id)
            if (1..=rest::REQUEST_ID_MAX).contains(&id.len())
                && id.as_bytes().iter().all(u8::is_ascii_graphic) =>
        {
            id.clone()
        }
        _ => fresh_id(),
    }
}

fn fresh_id() -> HeaderValue {
    const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut bytes = [0_u8; 20];
    // Without randomness ids repeat, which is bad for finding things and no reason to fail.
    let _ = getrandom::fill(&mut bytes);
    let text = bytes.map(|byte| DIGITS[usize::from(byte & 31)]);
    HeaderValue::from_bytes(&text).unwrap_or(HeaderValue::from_static("unknown"))
}

fn caught(panic: &(dyn std::any::Any + Send)) -> Response {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    tracing::error!(message, "handler panicked");
    Failure::new(ErrorKind::Internal, "the server met a defect of its own")
        .hint("its log has the details under this request's x-request-id; please report it")
        .into_response()
}

/// Answers a path that does not exist.
pub async fn no_such_path(uri: Uri) -> Failure {
    let path: String = uri.path().chars().take(200).collect();
    Failure::new(ErrorKind::NotFound, format!("there is no path {path:?}"))
        .hint("GET /v1/openapi.json lists every path")
}

/// Answers a method that a path does not take. The router adds `allow`.
pub async fn no_such_method(method: Method) -> Failure {
    Failure::new(ErrorKind::MethodNotAllowed, format!("this path does not take {method}"))
        .hint("the `allow` header says what it takes")
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    fn taken(id: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_ID, HeaderValue::from_static(id));
        request_id(&headers) == id
    }

    #[test]
    fn a_callers_id_is_taken_when_it_is_short_and_visible() {
        assert!(taken("job-42/step 7".split(' ').next().unwrap()));
        assert!(!taken(""));
        assert!(!taken("two words"));
        const LONG: &str = concat!(
            "0123456789012345678901234567890123456789012345678901234567890123",
            "0123456789012345678901234567890123456789012345678901234567890123",
            "x"
        );
        assert!(taken(&LONG[1..]));
        assert!(!taken(LONG));
    }

    #[tokio::test]
    async fn a_panic_is_an_answer_and_not_a_hang_up() {
        use tower::ServiceExt as _;

        let dir = tempfile::tempdir().unwrap();
        let keys_file = dir.path().join("keys.json");
        std::fs::write(&keys_file, r#"{"keys":[]}"#).unwrap();
        let database = format!("sqlite:{}", dir.path().join("control.db").display());
        let config = crate::config::Config { keys_file, database, ..crate::config::Config::default() };
        let app = App::open(&config).await.unwrap();
        async fn broken() -> &'static str {
            panic!("row 7 of the table")
        }
        let router = axum::Router::new()
            .route("/broken", axum::routing::get(broken))
            .layer(axum::middleware::from_fn_with_state(app, around));
        let request = Request::get("/broken").body(axum::body::Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(response.headers().contains_key(REQUEST_ID));
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        let body: rest::ErrorBody = serde_json::from_slice(&body).unwrap();
        assert_eq!(body.code, ErrorKind::Internal);
        assert!(!body.message.contains("row 7"), "the caller is told what only the log should have");
    }

    #[test]
    fn made_ids_differ() {
        assert_ne!(fresh_id(), fresh_id());
        assert_eq!(fresh_id().len(), 20);
    }

    #[test]
    fn the_log_finds_the_sandbox_in_path_or_location() {
        let mut response = Response::new(axum::body::Body::empty());
        let find = |path: &'static str, response: &Response| sandbox_id(&Uri::from_static(path), response);
        assert_eq!(find("/v1/sandboxes/sb-n1-a/execs", &response).unwrap(), "sb-n1-a");
        assert_eq!(find("/v1/sandboxes", &response), None);
        response.headers_mut().insert("location", HeaderValue::from_static("/v1/sandboxes/sb-n1-b"));
        assert_eq!(find("/v1/sandboxes", &response).unwrap(), "sb-n1-b");
    }
}
