//! Requests that are refused before their body is read, and what errors may say.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::World;

/// Far more than any socket holds.
const BODY: usize = 64 << 20;

/// Sends all of a request, then reads the answer: its status and body.
fn send_then_read(socket: &PathBuf, path: &str) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(
        stream,
        "PUT {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\ncontent-length: {BODY}\r\n\r\n"
    )
    .unwrap();
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..BODY / piece.len() {
        stream.write_all(&piece).unwrap_or_else(|e| panic!("{path}: closed under the body: {e}"));
    }
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(stream.read_line(&mut head).unwrap(), 0, "{path}: no answer: {head:?}");
    }
    let mut body = Vec::new();
    stream.read_to_end(&mut body).unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_slice(&body).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_a_caller_that_first_sends_everything() {
    let world = World::new();
    let edge = world.ready().await;
    let (stopped, running) = (edge.client.create().await, edge.client.create().await);
    edge.client.delete(&format!("/v1/sandboxes/{stopped}")).await.expect(200);
    for (path, status) in [
        (format!("/v1/sandboxes/{stopped}/files?path=/x"), 409),
        (format!("/v1/sandboxes/{stopped}/archive?path=/x"), 409),
        (format!("/v1/sandboxes/{running}/files?path=/x&mode=9"), 400),
        (format!("/v1/sandboxes/{running}/execs/ex-99/stdin"), 404),
        (format!("/v1/sandboxes/{running}/ports/1/http/"), 503),
        ("/v1/images/Bad%20Name".to_owned(), 400),
        ("/v1/sandboxes/sb-n1-nothing/files?path=/x".to_owned(), 404),
    ] {
        let socket = edge.client.socket.clone();
        let asked = path.clone();
        let (seen, error) =
            tokio::task::spawn_blocking(move || send_then_read(&socket, &asked)).await.unwrap();
        assert_eq!(seen, status, "{path}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_method_that_a_path_does_not_take_has_its_own_code() {
    let world = World::new();
    let edge = world.ready().await;
    let answer = edge.client.send("PATCH", "/v1/sandboxes", &[], "").await;
    assert!(answer.headers.contains_key("allow"));
    answer.refused(405, "method_not_allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_filter_that_is_wrong_is_refused_by_name() {
    let world = World::new();
    let edge = world.ready().await;
    for (query, field) in [
        ("state=bogus", "state"),
        ("state=", "state"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("cursor=garbage", "cursor"),
        ("cursor=1.notasandbox", "cursor"),
        ("cursor=", "cursor"),
        ("label=novalue", "label"),
        ("usage=maybe", "usage"),
        ("task_id=", "task_id"),
        ("nope=1", "nope"),
    ] {
        let error = edge.client.get(&format!("/v1/sandboxes?{query}")).await.refused(400, "invalid_argument");
        assert_eq!(error["detail"]["field"], field, "{query}: {error}");
        assert!(
            error["message"].as_str().unwrap().replace("task id", "task_id").contains(field),
            "{query}: {error}"
        );
    }
    for query in ["wait_state=bogus", "timeout_ms=5", "wait_state=running&timeout_ms=-1", "x=1"] {
        let id = edge.client.create().await;
        edge.client.get(&format!("/v1/sandboxes/{id}?{query}")).await.refused(400, "invalid_argument");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_cannot_be_read_name_what_is_unknown() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec = edge.client.exec(&id, json!({ "shell": "sleep 30", "pty": { "rows": 2, "cols": 2 } })).await;
    let eid = exec["id"].as_str().unwrap();
    let sandbox = format!("/v1/sandboxes/{id}");
    for (path, body) in [
        (format!("{sandbox}/execs"), json!({ "shell": "x", "sneaky": 1 })),
        (format!("{sandbox}/execs"), json!({ "shell": "x", "pty": { "rows": 1, "cols": 1, "sneaky": 1 } })),
        (format!("{sandbox}/execs/{eid}/signal"), json!({ "signal": "INT", "sneaky": 1 })),
        (format!("{sandbox}/execs/{eid}/resize"), json!({ "rows": 1, "cols": 1, "sneaky": 1 })),
        (format!("{sandbox}/sessions"), json!({ "sneaky": 1 })),
        (format!("{sandbox}/sessions"), json!({ "pty": { "rows": 1, "cols": 1, "sneaky": 1 } })),
        (format!("{sandbox}/files/mkdir"), json!({ "path": "/x", "sneaky": 1 })),
        (format!("{sandbox}/files/move"), json!({ "from": "/x", "to": "/y", "sneaky": 1 })),
        (format!("{sandbox}/stop"), json!({ "sneaky": 1 })),
        ("/v1/sandboxes".to_owned(), json!({ "container_image": "base", "sneaky": 1 })),
        ("/v1/sandboxes".to_owned(), json!({ "container_image": "base", "exec": { "sneaky": 1 } })),
    ] {
        let error = edge.client.post(&path, body).await.refused(400, "invalid_argument");
        assert!(error["message"].as_str().unwrap().contains("sneaky"), "{path}: {error}");
    }
}
