//! Calls about layers over several nodes.

use std::convert::Infallible;
use std::sync::atomic::Ordering;

use axum::body::Body;
use bytes::Bytes;
use dsec_proto::rest::{ApiError, LayerContent, LayerOnNode, PrefetchEvent};
use futures_util::stream;
use http::{Request, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Control, get, post, until};

fn put(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::put(path).body(body.into()).unwrap()
}

/// A body whose length nobody knows before its end.
fn streamed(pieces: usize) -> Body {
    let pieces = (0..pieces).map(|_| Ok::<_, Infallible>(Bytes::from_static(&[7; 64 << 10])));
    Body::from_stream(stream::iter(pieces))
}

#[tokio::test]
async fn what_any_node_can_do_goes_to_each_in_turn() {
    let control = Control::start(3).await;
    for _ in 0..4 {
        for path in ["/v1/images/debian", "/v1/layers/toolkit/t/tags/x"] {
            assert_eq!(control.ask(put(path, "tar")).await.status, StatusCode::OK);
        }
        let answer = control.ask(post("/v1/store/collect?grace_s=0", "")).await;
        assert_eq!(answer.json()["uri"], "/v1/store/collect?grace_s=0");
    }
    let asked: Vec<usize> = control.edges.iter().map(|edge| edge.requests()).collect();
    assert_eq!(asked, [4, 4, 4]);
}

#[tokio::test]
async fn an_import_of_which_nothing_was_sent_goes_to_another_node_with_all_its_bytes() {
    let mut control = Control::start(3).await;
    // All three have said which store they have.
    assert_eq!(control.ask(get("/v1/layers/base/debian/trace")).await.status, StatusCode::OK);
    control.edges[0].kill().await;
    control.edges[1].kill().await;
    for _ in 0..6 {
        let answer = control.ask(put("/v1/images/debian", streamed(100))).await;
        assert_eq!(
            (&answer.json()["node"], &answer.json()["length"]),
            (&"n3".into(), &(100 * (64 << 10)).into())
        );
    }
    control.edges[2].kill().await;
    let answer = control.ask(put("/v1/images/debian", streamed(100))).await;
    assert_eq!(answer.error(), "unavailable");
    assert!(answer.json()["hint"].as_str().unwrap().contains("nothing was done"));
}

#[tokio::test]
async fn what_may_have_been_done_is_not_done_again_and_what_changes_nothing_is() {
    let control = Control::start(3).await;
    for edge in &control.edges[..2] {
        edge.notes.cut.store(true, Ordering::SeqCst);
    }
    for _ in 0..6 {
        assert_eq!(control.ask(get("/v1/layers/toolkit/t/trace")).await.json()["node"], "n3");
    }
    let mut done = Vec::new();
    for _ in 0..6 {
        let before: usize = control.edges.iter().map(|edge| edge.requests()).sum();
        let answer = control.ask(put("/v1/layers/toolkit/t/tags/x", "")).await;
        let after: usize = control.edges.iter().map(|edge| edge.requests()).sum();
        assert_eq!(after - before, 1, "it went to more than one node");
        done.push(answer.status);
    }
    assert_eq!(
        done.iter().filter(|status| **status == StatusCode::SERVICE_UNAVAILABLE).count(),
        4,
        "{done:?}"
    );
}

#[tokio::test]
async fn a_pull_that_a_node_has_no_room_for_goes_to_one_that_has() {
    let control = Control::start(3).await;
    let pull = || post("/v1/images/debian/pull", r#"{"reference":"docker://localhost/x"}"#);
    for edge in &control.edges[1..] {
        edge.notes.full.store(true, Ordering::SeqCst);
    }
    for _ in 0..6 {
        let answer = control.ask(pull()).await;
        assert_eq!((&answer.json()["node"], &answer.json()["length"]), (&"n1".into(), &36.into()));
    }
    control.edges[0].notes.full.store(true, Ordering::SeqCst);
    assert_eq!(control.ask(pull()).await.error(), "resource_exhausted");
}

#[tokio::test]
async fn a_node_that_is_named_does_it_and_does_not_see_that_it_was() {
    let control = Control::start(3).await;
    for _ in 0..3 {
        let answer = control.ask(put("/v1/images/debian?node=n2&source=a%20b", "tar")).await;
        assert_eq!(
            (&answer.json()["node"], &answer.json()["uri"]),
            (&"n2".into(), &"/v1/images/debian?source=a%20b".into())
        );
        let answer = control.ask(get("/v1/layers/toolkit/t/export?node=n3")).await;
        assert_eq!(
            (&answer.json()["node"], &answer.json()["uri"]),
            (&"n3".into(), &"/v1/layers/toolkit/t/export".into())
        );
        assert_eq!(control.ask(get("/v1/images?node=n3")).await.json()["images"][0]["source"], "n3");
    }
    for (path, says) in [
        ("/v1/images/x/pull?node=n9", "there is no node"),
        ("/v1/images/x/pull?node=", "there is no node"),
        ("/v1/layers/base/x/prefetch?node=n1&node=n9", "there is no node"),
        ("/v1/images/x/pull?node=n1&node=n2", "done on one node"),
    ] {
        let answer = control.ask(post(path, "{}")).await;
        assert_eq!(answer.error(), "invalid_argument", "{path}");
        assert!(answer.json()["message"].as_str().unwrap().contains(says), "{path}: {:?}", answer.json());
        assert_eq!(answer.json()["detail"]["field"], "node");
    }
    // With one node there is nothing to choose, and its name still has to be right.
    let one = Control::start(1).await;
    assert_eq!(one.ask(put("/v1/images/debian?node=n1", "tar")).await.json()["uri"], "/v1/images/debian");
    assert_eq!(one.ask(get("/v1/images?node=n2")).await.error(), "invalid_argument");
}

#[tokio::test]
async fn nodes_with_stores_of_their_own_are_not_guessed_between() {
    let control = Control::start(3).await;
    *control.edges[1].notes.store.lock().unwrap() = "another".to_owned();
    until("n2 says which store it has", async || {
        let status = control.ask(get("/v1/images")).await.status;
        if status == StatusCode::BAD_REQUEST { Ok(()) } else { Err(status) }
    })
    .await;
    let asked = || control.edges.iter().map(|edge| edge.requests()).sum::<usize>();
    let asked_before = asked();
    for request in [
        put("/v1/images/debian", "tar"),
        get("/v1/images"),
        get("/v1/layers/toolkit/t"),
        post("/v1/layers/toolkit/t/prefetch", ""),
        post("/v1/layers/toolkit/t/prefetch?node=n1&node=n2", ""),
    ] {
        let what = request.uri().clone();
        let answer = control.ask(request).await;
        assert_eq!(answer.error(), "invalid_argument", "{what}");
        assert!(answer.json()["hint"].as_str().unwrap().contains("node=NAME"), "{what}");
    }
    let answer = control.ask(get("/v1/layers/toolkit/t/trace")).await;
    assert_eq!(answer.json()["detail"]["stores"], json!([["n1", "n3"], ["n2"]]));
    assert_eq!(asked(), asked_before);
    assert_eq!(control.ask(put("/v1/images/debian?node=n2", "tar")).await.json()["node"], "n2");
    // Those that share one have the same layers.
    for edge in &control.edges {
        *edge.notes.prefetch.lock().unwrap() = vec![done(&edge.notes.name)];
    }
    let answer = control.ask(post("/v1/layers/toolkit/t/prefetch?node=n1&node=n3", "")).await;
    assert_eq!(answer.json()["event"], "done");
}

#[tokio::test]
async fn a_layer_is_shown_with_what_every_node_has_of_it_and_a_node_that_is_down_is_named() {
    let mut control = Control::start(3).await;
    for path in ["/v1/images", "/v1/layers/toolkit/t"] {
        let answer = control.ask(get(path)).await;
        let layer = if path == "/v1/images" { answer.json()["images"][0].clone() } else { answer.json() };
        assert_eq!(layer["used_by"], json!(["sb-n1-a", "sb-n2-a", "sb-n3-a"]), "{path}");
        let nodes: Vec<&Value> = layer["nodes"].as_array().unwrap().iter().map(|on| &on["node"]).collect();
        assert_eq!(nodes, ["n1", "n2", "n3"], "{path}");
        assert!(!answer.headers.contains_key("x-dsec-unreachable-nodes"));
    }
    control.edges[1].kill().await;
    for _ in 0..3 {
        let answer = control.ask(get("/v1/images")).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.json()["images"][0]["used_by"], json!(["sb-n1-a", "sb-n3-a"]));
        assert_eq!(answer.headers["x-dsec-unreachable-nodes"], "n2");
    }
    control.edges[0].kill().await;
    control.edges[2].kill().await;
    assert_eq!(control.ask(get("/v1/images")).await.error(), "unavailable");
}

fn done(node: &str) -> PrefetchEvent {
    let content = Some(LayerContent { size_bytes: 10, here_bytes: 10, ..LayerContent::default() });
    PrefetchEvent::Done { nodes: vec![LayerOnNode { node: node.to_owned(), mounted: false, content }] }
}

fn lines(body: &[u8]) -> Vec<Value> {
    std::str::from_utf8(body).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn a_prefetch_goes_to_all_nodes_or_to_those_named_and_its_end_has_each() {
    let control = Control::start(3).await;
    for edge in &control.edges {
        *edge.notes.prefetch.lock().unwrap() =
            vec![PrefetchEvent::Progress { wanted_bytes: 10, left_bytes: 4 }, done(&edge.notes.name)];
    }
    for (query, nodes) in [
        ("", vec!["n1", "n2", "n3"]),
        ("?node=n3&node=n1&node=n3", vec!["n1", "n3"]),
        ("?node=n2", vec!["n2"]),
    ] {
        let answer =
            control.ask(post(&format!("/v1/layers/toolkit/t/prefetch{query}"), r#"{"what":"trace"}"#)).await;
        let told = lines(&answer.body);
        assert_eq!(told[0], json!({ "event": "progress", "wanted_bytes": 10, "left_bytes": 4 }), "{query}");
        let last = told.last().unwrap();
        assert_eq!(last["event"], "done", "{query}");
        let came: Vec<&Value> = last["nodes"].as_array().unwrap().iter().map(|on| &on["node"]).collect();
        assert_eq!(came, nodes, "{query}");
    }
    let asked: Vec<usize> = control.edges.iter().map(|edge| edge.requests()).collect();
    assert_eq!(asked, [2, 2, 2]);
}

#[tokio::test]
async fn a_prefetch_that_some_nodes_cannot_do_is_done_by_the_others_and_says_which() {
    let mut control = Control::start(4).await;
    let full = ApiError::new(dsec_model::ErrorKind::Unavailable, "the disk is full");
    *control.edges[0].notes.prefetch.lock().unwrap() = vec![done("n1")];
    *control.edges[1].notes.prefetch.lock().unwrap() = vec![PrefetchEvent::Error { error: *full.0 }];
    // The third breaks off, the fourth is away.
    *control.edges[2].notes.prefetch.lock().unwrap() =
        vec![PrefetchEvent::Progress { wanted_bytes: 9, left_bytes: 9 }];
    assert_eq!(control.ask(get("/v1/images")).await.status, StatusCode::OK);
    control.edges[3].kill().await;
    let answer = control.ask(post("/v1/layers/toolkit/t/prefetch", "")).await;
    assert_eq!(answer.status, StatusCode::OK);
    let told = lines(&answer.body);
    let error = &told.last().unwrap()["error"];
    assert_eq!(error["code"], "unavailable");
    assert_eq!(error["message"], "3 of 4 nodes do not have all of it; n2: the disk is full");
    let failed: Vec<&String> = error["detail"]["nodes"].as_object().unwrap().keys().collect();
    assert_eq!(failed, ["n2", "n3", "n4"]);
    // If none begins, that is the answer.
    for edge in &mut control.edges[..3] {
        edge.kill().await;
    }
    assert_eq!(control.ask(post("/v1/layers/toolkit/t/prefetch", "")).await.error(), "unavailable");
}
