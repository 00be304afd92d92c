use axum::body::Body;
use http::{Request, StatusCode};

use crate::edge::BEHAVIOUR;
use crate::harness::{Control, KEY, SANDBOX, get, key_line, until, with, write_keys};

#[tokio::test]
async fn only_a_key_that_was_issued_gets_in() {
    let control = Control::start(1).await;
    for (authorization, status) in [
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic ZHNlY19nb29k", 401),
        ("Bearer dsec_bad", 401),
        (KEY, 401),
        ("Bearer dsec_good", 200),
        ("bearer  dsec_good", 200),
    ] {
        let answer = control.ask(with(get(SANDBOX), "authorization", authorization)).await;
        assert_eq!(answer.status.as_u16(), status, "{authorization:?}");
        if status == 401 {
            assert_eq!(answer.error(), "unauthenticated");
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
        }
    }
    assert_eq!(control.edges[0].requests(), 2, "a request without a good key reached the node");
}

#[tokio::test]
async fn health_and_the_document_need_no_key_and_everything_else_does() {
    let control = Control::start(1).await;
    for path in ["/healthz", "/v1/openapi.json"] {
        let answer = control.ask(with(get(path), "authorization", "")).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
    }
    for route in dsec_control::api::ROUTES {
        if matches!(route, "/healthz" | "/v1/openapi.json") {
            continue;
        }
        // A token and a certificate open these; there is no cluster here that they could be of.
        let is_of_machines = matches!(route, "/v1/cluster/join" | "/v1/cluster/announce");
        let path = route
            .replace("{id}", "sb-n1-abc")
            .replace("{eid}", "ex-1")
            .replace("{port}", "80")
            .replace(['{', '}', '*'], "");
        for method in ["GET", "POST", "PUT", "DELETE"] {
            let request = Request::builder().method(method).uri(&path).body(Body::empty()).unwrap();
            let answer = control.ask(with(request, "authorization", "")).await;
            let refused = match answer.status.as_u16() {
                404 => is_of_machines,
                status => matches!(status, 401 | 405),
            };
            assert!(refused, "{method} {path} answered {}", answer.status);
        }
    }
    assert_eq!(control.edges[0].requests(), 0);
}

#[tokio::test]
async fn a_key_taken_out_of_the_file_stops_working() {
    let control = Control::start(1).await;
    assert_eq!(control.ask(get(SANDBOX)).await.status, StatusCode::OK);
    write_keys(&control.keys_file(), &[key_line("key-2", "dsec_other_key")]);
    until("a refusal", async || {
        let status = control.ask(get(SANDBOX)).await.status;
        if status == StatusCode::UNAUTHORIZED { Ok(()) } else { Err(status) }
    })
    .await;
    let other = with(get(SANDBOX), "authorization", "Bearer dsec_other_key");
    assert_eq!(control.ask(other).await.status, StatusCode::OK);
}

#[tokio::test]
async fn the_node_is_told_who_asks_and_never_the_key() {
    let control = Control::start(1).await;
    let request = with(get(SANDBOX), "x-dsec-project", "root/other");
    let request = with(with(request, "x-dsec-key-id", "somebody"), "x-dsec-sees", "root/theirs");
    let answer = control.ask(with(request, BEHAVIOUR, "report")).await;
    assert_eq!(answer.seen("x-dsec-project"), ["root/other"], "the cluster's key acts where it likes");
    assert_eq!(answer.seen("x-dsec-sees"), ["root"]);
    assert_eq!(answer.seen("x-dsec-key-id"), ["key-1"]);
    assert_eq!(answer.seen("authorization"), Vec::<String>::new());
}
