use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};

use crate::harness::{Control, SANDBOX, get, post, with};

const JSON_MAX: usize = dsec_proto::rest::JSON_BODY_MAX;

fn request(method: &str, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
}

fn chunked(bytes: usize) -> Body {
    let chunks =
        (0..bytes.div_ceil(1 << 16)).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 1 << 16])));
    Body::from_stream(stream::iter(chunks))
}

#[tokio::test]
async fn every_bad_path_answers_in_the_one_shape() {
    let control = Control::start(1).await;
    let long = format!("/v1/sandboxes/sb-n1-{}", "a".repeat(100));
    for (request, status, code) in [
        (get("/"), 404, "not_found"),
        (get("/v1"), 404, "not_found"),
        (get("/v2/sandboxes"), 404, "not_found"),
        (get("/v1/sandboxes/"), 404, "not_found"),
        (get("/v1/sandboxes/sb-n1-abc/nothing"), 404, "not_found"),
        (request("PATCH", "/v1/sandboxes"), 405, "method_not_allowed"),
        (request("POST", SANDBOX), 405, "method_not_allowed"),
        (request("POST", "/healthz"), 405, "method_not_allowed"),
        (get("/v1/sandboxes/nonsense"), 400, "invalid_argument"),
        (get("/v1/sandboxes/..%2F..%2Fetc"), 400, "invalid_argument"),
        (get("/v1/sandboxes/%FF"), 400, "invalid_argument"),
        (get(&long), 400, "invalid_argument"),
        (get("/v1/sandboxes/sb-n9-abc"), 404, "not_found"),
        (get("/v1/sandboxes/sb-n9-abc/files?path=/x"), 404, "not_found"),
        (get("/v1/sandboxes/sb-n1-abc/execs/1"), 400, "invalid_argument"),
        (get("/v1/sandboxes/sb-n1-abc/sessions/a%20b"), 400, "invalid_argument"),
        (get("/v1/sandboxes/sb-n1-abc/ports/0/http/x"), 400, "invalid_argument"),
        (get("/v1/sandboxes/sb-n1-abc/ports/65536/tcp"), 400, "invalid_argument"),
        (get("/v1/sandboxes/sb-n1-abc/ports/x/tcp"), 400, "invalid_argument"),
        (post("/v1/sandboxes", vec![b' '; JSON_MAX + 1]), 413, "too_large"),
        (post("/v1/sandboxes", chunked(2 * JSON_MAX)), 413, "too_large"),
        (post("/v1/sandboxes/sb-n1-abc/execs", chunked(2 * JSON_MAX)), 413, "too_large"),
        (with(post("/v1/sandboxes", "{}"), "idempotency-key", "a b"), 400, "invalid_argument"),
        (with(post("/v1/sandboxes", "{}"), "idempotency-key", ""), 400, "invalid_argument"),
        (with(post("/v1/sandboxes", "{}"), "idempotency-key", &"k".repeat(129)), 400, "invalid_argument"),
        (with(get(SANDBOX), "authorization", "Bearer x"), 401, "unauthenticated"),
    ] {
        let what = format!("{} {}", request.method(), request.uri());
        let answer = control.ask(request).await;
        assert_eq!(answer.status.as_u16(), status, "{what}: {:?}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.error(), code, "{what}");
        if status == 405 {
            assert!(answer.headers.contains_key("allow"), "{what}");
        }
    }
}

#[tokio::test]
async fn json_up_to_the_limit_and_raw_bodies_beyond_it_pass() {
    let control = Control::start(1).await;
    let answer = control.ask(post("/v1/sandboxes/sb-n1-abc/execs", vec![b' '; JSON_MAX])).await;
    assert_eq!(answer.json()["length"], JSON_MAX);
    let put = Request::put("/v1/sandboxes/sb-n1-abc/files?path=/x").body(chunked(2 * JSON_MAX)).unwrap();
    assert_eq!(control.ask(put).await.json()["length"], 2 * JSON_MAX);
}

#[tokio::test]
async fn without_a_node_everything_is_unavailable_and_says_so() {
    let mut control = Control::start(1).await;
    control.edges[0].kill().await;
    for request in
        [get("/healthz"), get(SANDBOX), post("/v1/sandboxes", "{}"), get("/v1/nodes"), get("/v1/images")]
    {
        let what = request.uri().to_string();
        let answer = control.ask(request).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{what}");
        assert_eq!(answer.error(), "unavailable", "{what}");
        assert_ne!(answer.json()["hint"], "", "{what}");
    }
}

#[tokio::test]
async fn a_request_is_called_the_same_by_caller_server_and_node() {
    let control = Control::start(1).await;
    let answer = control.ask(with(get(SANDBOX), "x-request-id", "job-42/step-7")).await;
    assert_eq!(answer.headers["x-request-id"], "job-42/step-7");
    assert_eq!(answer.seen("x-request-id"), ["job-42/step-7"]);

    let answer = control.ask(with(get(SANDBOX), "x-request-id", "two words")).await;
    let made = answer.headers["x-request-id"].to_str().unwrap();
    assert_eq!(made.len(), 20);
    assert_eq!(answer.seen("x-request-id"), [made]);
}

#[tokio::test]
async fn metrics_count_by_template() {
    let control = Control::start(1).await;
    control.ask(get(SANDBOX)).await;
    control.ask(get("/v1/sandboxes/nonsense")).await;
    let answer = control.ask(get("/metrics")).await;
    let text = String::from_utf8(answer.body).unwrap();
    for class in ["2xx", "4xx"] {
        let line = format!(
            "dsec_control_requests_total{{route=\"/v1/sandboxes/{{id}}\",method=\"GET\",status=\"{class}\"}} 1"
        );
        assert!(text.contains(&line), "{text}");
    }
}
