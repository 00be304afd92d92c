use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::StatusCode;

use crate::harness::{Control, get, post, until, with};

fn set_full(control: &Control, full: &[bool]) {
    for (edge, full) in control.edges.iter().zip(full) {
        edge.notes.full.store(*full, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_node_without_room_passes_the_create_on() {
    let control = Control::start(3).await;
    set_full(&control, &[true, false, true]);
    for _ in 0..20 {
        let answer = control.ask(post("/v1/sandboxes", r#"{"container_image":"debian"}"#)).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!((&answer.json()["node"], &answer.json()["length"]), (&"n2".into(), &28.into()));
    }
}

#[tokio::test]
async fn refused_node_is_not_retried_within_one_placement() {
    let control = Control::start(3).await;
    set_full(&control, &[true, true, true]);
    let answer = control.ask(post("/v1/sandboxes", "{}")).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.error(), "resource_exhausted");
    for edge in &control.edges {
        assert_eq!(edge.requests(), 1);
    }
}

#[tokio::test]
async fn what_all_nodes_said_is_counted_in_one_error() {
    let mut control = Control::start(4).await;
    set_full(&control, &[true, false, true, false]);
    control.edges[1].kill().await;
    control.edges[3].kill().await;
    let error = control.ask(post("/v1/sandboxes", "{}")).await.json();
    assert_eq!(error["message"], "no node takes the sandbox: 2 unreachable, 2 without room");
    assert_eq!(error["detail"]["refusals"], serde_json::json!({ "unreachable": 2, "without room": 2 }));
    let error = control.ask(post("/v1/sandboxes", r#"{"backend":"microvm"}"#)).await.json();
    assert_eq!(error["message"], "no node takes the sandbox: 4 without the backend");
}

#[tokio::test]
async fn a_node_that_says_what_it_is_short_of_is_counted_by_it() {
    let control = Control::start(3).await;
    set_full(&control, &[true, true, true]);
    for (edge, short) in control.edges.iter().zip(["memory", "cordoned", "memory"]) {
        *edge.notes.short.lock().unwrap() = Some(short);
    }
    let answer = control.ask(post("/v1/sandboxes", "{}")).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.json()["message"], "no node takes the sandbox: 2 without free memory, 1 cordoned");
    // Room that an operator keeps is none that somebody else will give back.
    for edge in &control.edges {
        *edge.notes.short.lock().unwrap() = Some("cordoned");
    }
    let answer = control.ask(post("/v1/sandboxes", "{}")).await;
    assert_eq!((answer.status, answer.error().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
}

#[tokio::test]
async fn what_no_node_has_is_told_at_once_and_for_good() {
    let control = Control::start(2).await;
    let answer = control.ask(post("/v1/sandboxes", r#"{"node_labels":{"zone":"a"}}"#)).await;
    assert_eq!((answer.status, answer.error().as_str()), (StatusCode::NOT_IMPLEMENTED, "unsupported"));
    assert_eq!(answer.json()["message"], "no node takes the sandbox: 2 without the labels");
    let answer = control.ask(post("/v1/sandboxes", r#"{"architecture":"aarch64"}"#)).await;
    assert_eq!((answer.status, answer.error().as_str()), (StatusCode::NOT_IMPLEMENTED, "unsupported"));
    assert_eq!(answer.json()["message"], "no node takes the sandbox: 2 of another architecture");
    assert!(control.edges.iter().all(|edge| edge.requests() == 0));
}

#[tokio::test]
async fn of_nodes_as_full_the_one_that_has_the_layers_is_taken() {
    let control = Control::start(3).await;
    for edge in &control.edges {
        edge.notes.memory_used_mib.store(80_000, Ordering::SeqCst);
    }
    *control.edges[1].notes.layers.lock().unwrap() = vec!["debian".to_owned(), "click".to_owned()];
    *control.edges[2].notes.layers.lock().unwrap() = vec!["debian".to_owned()];
    // Until each has said so: reports come once a second.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    for body in [
        r#"{"container_image":"debian","workspace":"click"}"#,
        r#"{"container_image":"alpine","toolkits":["click"]}"#,
    ] {
        for _ in 0..5 {
            assert_eq!(control.ask(post("/v1/sandboxes", body)).await.json()["node"], "n2", "{body}");
        }
    }
    let mut others = BTreeSet::new();
    for _ in 0..12 {
        let answer = control.ask(post("/v1/sandboxes", r#"{"container_image":"alpine"}"#)).await.json();
        others.insert(answer["node"].to_string());
    }
    assert!(others.len() > 1, "{others:?}");
}

#[tokio::test]
async fn the_emptier_node_is_taken_also_by_the_first_attempt_of_a_key() {
    let control = Control::start(2).await;
    control.edges[0].notes.memory_used_mib.store(90_000, Ordering::SeqCst);
    let mut in_a_row = 0;
    until("n1 says how full it is", async || {
        let node = control.ask(post("/v1/sandboxes", "{}")).await.json()["node"].clone();
        in_a_row = if node == "n2" { in_a_row + 1 } else { 0 };
        if in_a_row >= 20 { Ok(()) } else { Err(node) }
    })
    .await;
    for number in 0..20 {
        let plain = post("/v1/sandboxes", "{}");
        let keyed = with(post("/v1/sandboxes", "{}"), "idempotency-key", &format!("key-{number}"));
        let counted = with(keyed, "idempotency-attempt", "1");
        for create in [plain, counted] {
            assert_eq!(control.ask(create).await.json()["node"], "n2");
        }
    }
}

#[tokio::test]
async fn a_later_attempt_meets_the_node_that_took_the_first() {
    let mut control = Control::start(3).await;
    let create = |key: &str, attempt: u32| {
        let keyed = with(post("/v1/sandboxes", "{}"), "idempotency-key", key);
        with(keyed, "idempotency-attempt", &attempt.to_string())
    };
    for number in 0..12 {
        let key = format!("key-{number}");
        let first = control.ask(create(&key, 1)).await.json()["node"].clone();
        for attempt in 2..5 {
            assert_eq!(control.ask(create(&key, attempt)).await.json()["node"], first);
        }
    }
    assert_eq!(control.ask(create("new", 2)).await.status, StatusCode::CREATED, "the first never came");
    control.edges[1].kill().await;
    let silent = control.ask(create("newer", 2)).await;
    assert_eq!(
        (silent.error(), &silent.json()["detail"]["nodes"]),
        ("unavailable".into(), &serde_json::json!(["n2"]))
    );
    for bad in ["0", "-1", "x"] {
        let create = with(post("/v1/sandboxes", "{}"), "idempotency-attempt", bad);
        assert_eq!(control.ask(create).await.error(), "invalid_argument");
    }
}

#[tokio::test]
async fn a_node_that_is_down_is_passed_over_and_one_without_room_says_more() {
    let mut control = Control::start(2).await;
    control.edges[0].kill().await;
    for _ in 0..10 {
        let answer = control.ask(post("/v1/sandboxes", "{}")).await;
        assert_eq!(answer.json()["node"], "n2");
    }
    set_full(&control, &[false, true]);
    for _ in 0..10 {
        assert_eq!(control.ask(post("/v1/sandboxes", "{}")).await.error(), "resource_exhausted");
    }
    control.edges[1].kill().await;
    assert_eq!(control.ask(post("/v1/sandboxes", "{}")).await.error(), "unavailable");
}

#[tokio::test]
async fn creates_spread_over_the_nodes() {
    let control = Control::start(3).await;
    for _ in 0..60 {
        control.ask(post("/v1/sandboxes", "{}")).await;
    }
    for edge in &control.edges {
        assert!((10..30).contains(&edge.requests()), "{} creates went to one of three", edge.requests());
    }
}

#[tokio::test]
async fn a_repeated_create_meets_the_same_node() {
    let control = Control::start(3).await;
    let mut used = BTreeSet::new();
    for key in 0..12 {
        let create = || with(post("/v1/sandboxes", "{}"), "idempotency-key", &format!("key-{key}"));
        let first = control.ask(create()).await.json()["node"].clone();
        for _ in 0..3 {
            assert_eq!(control.ask(create()).await.json()["node"], first);
        }
        used.insert(first.to_string());
    }
    assert_eq!(used.len(), 3, "every key went to {used:?}");
}

#[tokio::test]
async fn a_sandbox_is_asked_of_its_own_node() {
    let control = Control::start(3).await;
    for node in ["n1", "n2", "n3"] {
        let answer = control.ask(get(&format!("/v1/sandboxes/sb-{node}-abc/execs"))).await;
        assert_eq!(answer.json()["node"], node);
    }
}
