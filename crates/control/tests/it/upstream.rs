use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt;

use crate::edge::BEHAVIOUR;
use crate::harness::{Control, PATIENCE, SANDBOX, get, patiently, post, until, with};

#[tokio::test]
async fn a_restarted_node_is_met_without_a_failure() {
    let mut control = Control::start(1).await;
    let mut caller = control.connect().await;
    let large = || Body::from(vec![0; 100_000]);
    for round in 1..=3 {
        for request in [
            get(SANDBOX),
            post(&format!("{SANDBOX}/execs"), "{}"),
            Request::put(format!("{SANDBOX}/files?path=/x")).body(large()).unwrap(),
        ] {
            let answer = caller.ask(request).await;
            assert_eq!(answer.status, StatusCode::OK, "{:?}", String::from_utf8_lossy(&answer.body));
            control.edges[0].kill().await;
            control.edges[0].restart();
        }
        assert_eq!(control.edges[0].accepted(), round * 3);
    }
}

#[tokio::test]
async fn a_node_that_dies_under_a_request_is_a_clean_failure() {
    let mut control = Control::start(1).await;
    let mut caller = control.connect().await;
    // Once on a new connection, once on one from the pool.
    for request in
        [post(&format!("{SANDBOX}/execs"), "{}"), get(SANDBOX), post(&format!("{SANDBOX}/execs"), "{}")]
    {
        let notes = std::sync::Arc::clone(&control.edges[0].notes);
        let waiting = tokio::spawn(async move {
            let answer = caller.ask(with(request, BEHAVIOUR, "hang")).await;
            (caller, answer)
        });
        patiently(notes.arrived.acquire()).await.unwrap().forget();
        control.edges[0].kill().await;
        let (back, answer) = patiently(waiting).await.unwrap();
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.error(), "unavailable");
        caller = back;
        control.edges[0].restart();
        assert_eq!(caller.ask(get(SANDBOX)).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_seen_to_be_broken() {
    let mut control = Control::start(1).await;
    let mut caller = control.connect().await;
    let mut response = caller.send(with(get(SANDBOX), BEHAVIOUR, "half")).await;
    assert_eq!(response.status(), StatusCode::OK);
    let first = patiently(response.frame()).await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap().len(), 500);
    control.edges[0].kill().await;
    assert!(patiently(response.frame()).await.unwrap().is_err(), "a broken answer looks whole");
}

#[tokio::test]
async fn a_caller_that_stops_reading_takes_its_connection_along() {
    let control = Control::start(1).await;
    let mut caller = control.connect().await;
    let response = caller.send(with(get(SANDBOX), BEHAVIOUR, "half")).await;
    drop(response);
    caller.hang_up();
    // The broken-off connection is not used for the next request.
    assert_eq!(control.ask(get(SANDBOX)).await.status, StatusCode::OK);
    assert_eq!(control.edges[0].accepted(), 2);
}

#[tokio::test]
async fn connections_are_used_again() {
    let control = Control::start(1).await;
    let mut caller = control.connect().await;
    for _ in 0..50 {
        caller.ask(get(SANDBOX)).await;
        caller.ask(post(&format!("{SANDBOX}/execs"), "{}")).await;
        caller.ask(with(post(&format!("{SANDBOX}/execs"), "{}"), BEHAVIOUR, "echo")).await;
    }
    assert_eq!(control.edges[0].accepted(), 1);
}

#[tokio::test]
async fn at_the_end_idle_connections_close_and_requests_in_flight_finish() {
    let control = Control::start(1).await;
    let mut idle = Vec::new();
    for _ in 0..50 {
        let mut caller = control.connect().await;
        caller.ask(get(SANDBOX)).await;
        idle.push(caller);
    }
    let mut busy = control.connect().await;
    let waiting = tokio::spawn(async move { busy.ask(with(get(SANDBOX), BEHAVIOUR, "gate")).await });
    let notes = &control.edges[0].notes;
    patiently(notes.arrived.acquire()).await.unwrap().forget();

    let asked = std::time::Instant::now();
    control.stop.cancel();
    until("a refused connection", async || match tokio::net::TcpStream::connect(control.address).await {
        Err(_) => Ok(()),
        Ok(_) => Err("taken"),
    })
    .await;
    assert!(!control.served.is_finished(), "it ended with a request in flight");
    notes.gate.add_permits(1);
    assert_eq!(patiently(waiting).await.unwrap().status, StatusCode::OK);
    patiently(control.served).await.unwrap();
    assert!(asked.elapsed() < dsec_control::server::DRAIN, "idle connections held it up");
    assert!(dsec_control::server::DRAIN < PATIENCE);
    drop(idle);
}
