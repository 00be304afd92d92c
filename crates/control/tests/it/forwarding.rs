use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::edge::BEHAVIOUR;
use crate::harness::{Answer, Control, KEY, SANDBOX, get, patiently, post, with};

/// A body whose chunks are sent one by one.
fn piecewise() -> (mpsc::Sender<Bytes>, Body) {
    let (sender, receiver) = mpsc::channel::<Bytes>(1);
    let chunks = futures_util::stream::unfold(receiver, |mut receiver| async {
        let chunk = receiver.recv().await?;
        Some((Ok::<_, std::io::Error>(Frame::data(chunk)), receiver))
    });
    (sender, Body::new(StreamBody::new(chunks)))
}

#[tokio::test]
async fn method_path_query_and_headers_arrive_as_they_were_sent() {
    let control = Control::start(1).await;
    let path = "/v1/sandboxes/sb-n1-abc/ports/8080/http/a%2Fb/c;d=1?x=%20&y=+&x=2&=";
    for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("x-own", "1")
            .header("x-own", "2")
            .header("cookie", "a=b; c=d")
            .header("accept-encoding", "br")
            .header("connection", "x-hop")
            .header("x-hop", "1")
            .body(Body::from("text"))
            .unwrap();
        let answer = control.ask(request).await;
        let seen = answer.json();
        assert_eq!((&seen["method"], &seen["uri"]), (&method.into(), &path.into()));
        assert_eq!(answer.seen("x-own"), ["1", "2"]);
        assert_eq!(answer.seen("cookie"), ["a=b; c=d"]);
        assert_eq!(answer.seen("accept-encoding"), ["br"]);
        assert_eq!(answer.seen("host"), ["control.test"]);
        assert_eq!(answer.seen("content-length"), ["4"]);
        assert_eq!(answer.seen("x-hop"), Vec::<String>::new());
        assert_eq!(seen["length"], 4);
    }
    for path in ["/http", "/http/", "/http/?q"] {
        let path = format!("/v1/sandboxes/sb-n1-abc/ports/8080{path}");
        assert_eq!(control.ask(get(&path)).await.json()["uri"], path);
    }
}

#[tokio::test]
async fn a_body_streams_both_ways_at_once() {
    let control = Control::start(1).await;
    let (sender, body) = piecewise();
    let request = Request::put(format!("{SANDBOX}/files?path=/x")).body(body).unwrap();
    let mut caller = control.connect().await;
    let mut response = caller.send(with(request, BEHAVIOUR, "echo")).await;
    // The echo of the first chunk is here before the second is sent.
    for text in ["first", "second", "third"] {
        sender.send(Bytes::from(text)).await.unwrap();
        let frame = patiently(response.frame()).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), text);
    }
    drop(sender);
    assert!(patiently(response.frame()).await.is_none());
}

#[tokio::test]
async fn large_bodies_arrive_whole() {
    const CHUNK: usize = 256 << 10;
    const CHUNKS: usize = (64 << 20) / CHUNK;
    let control = Control::start(1).await;
    let (sender, body) = piecewise();
    let request = Request::put(format!("{SANDBOX}/files?path=/x")).body(body).unwrap();
    let sending = tokio::spawn(async move {
        let mut sent = Sha256::new();
        for number in 0..CHUNKS {
            let chunk = Bytes::from(vec![(number * 31 % 251) as u8; CHUNK]);
            sent.update(&chunk);
            sender.send(chunk).await.unwrap();
        }
        sent.finalize()
    });
    let mut caller = control.connect().await;
    let mut response = caller.send(with(request, BEHAVIOUR, "echo")).await;
    let (mut received, mut length) = (Sha256::new(), 0);
    while let Some(frame) = patiently(response.frame()).await {
        let data = frame.unwrap().into_data().unwrap();
        length += data.len();
        received.update(&data);
    }
    assert_eq!(length, CHUNK * CHUNKS);
    assert_eq!(received.finalize(), sending.await.unwrap());
}

#[tokio::test]
async fn head_and_empty_answers_have_no_body_and_keep_the_connection() {
    let control = Control::start(1).await;
    let mut caller = control.connect().await;
    for _ in 0..3 {
        let request = Request::head(format!("{SANDBOX}/files?path=/x")).body(Body::empty()).unwrap();
        let answer = caller.ask(request).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert!(answer.body.is_empty());
        assert_ne!(answer.headers["content-length"], "0");
        let answer = caller.ask(with(post(&format!("{SANDBOX}/stop"), ""), BEHAVIOUR, "echo")).await;
        assert!(answer.body.is_empty());
    }
    assert_eq!(control.edges[0].accepted(), 1, "connections to the node are not used again");
}

#[tokio::test]
async fn a_websocket_goes_through() {
    let control = Control::start(1).await;
    for path in ["/execs/ex-1/attach", "/files/watch?path=/x", "/ports/80/tcp", "/ports/80/http/ws"] {
        let mut request = format!("ws://{}{SANDBOX}{path}", control.address).into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {KEY}").parse().unwrap());
        request.headers_mut().insert(BEHAVIOUR, "websocket".parse().unwrap());
        let stream = TcpStream::connect(control.address).await.unwrap();
        let (mut socket, response) =
            patiently(tokio_tungstenite::client_async(request, stream)).await.unwrap();
        assert!(response.headers().contains_key("x-request-id"));
        for size in [0, 1, 5, 256 << 10] {
            let message = Message::binary(vec![size as u8; size]);
            patiently(socket.send(message.clone())).await.unwrap();
            assert_eq!(patiently(socket.next()).await.unwrap().unwrap(), message);
        }
        patiently(socket.close(None)).await.unwrap();
        while patiently(socket.next()).await.is_some_and(|message| message.is_ok()) {}
    }
}

#[tokio::test]
async fn a_node_that_refuses_the_upgrade_is_heard() {
    let control = Control::start(1).await;
    let mut request =
        format!("ws://{}{SANDBOX}/ports/80/tcp", control.address).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {KEY}").parse().unwrap());
    let stream = TcpStream::connect(control.address).await.unwrap();
    let refusal = patiently(tokio_tungstenite::client_async(request, stream)).await.unwrap_err();
    assert!(refusal.to_string().contains("200"), "{refusal}");
}

#[tokio::test]
async fn a_caller_that_hangs_up_is_gone_for_the_node_too() {
    let control = Control::start(1).await;
    let notes = std::sync::Arc::clone(&control.edges[0].notes);
    // Before the answer has begun.
    let mut caller = control.connect().await;
    let waiting = tokio::spawn(async move {
        let _ = tokio::time::timeout(Duration::from_secs(60), async {
            tokio::select! {
                answer = caller.send(with(get(SANDBOX), BEHAVIOUR, "hang")) => panic!("{answer:?}"),
                permit = notes.arrived.acquire() => permit.unwrap().forget(),
            }
        })
        .await;
        caller.hang_up();
    });
    patiently(waiting).await.unwrap();
    patiently(control.edges[0].notes.abandoned.acquire()).await.unwrap().forget();
}

#[tokio::test]
async fn many_callers_at_once_get_their_own_answers() {
    const CALLERS: usize = 300;
    const EACH: usize = 10;
    let control = std::sync::Arc::new(Control::start(1).await);
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let control = std::sync::Arc::clone(&control);
            tokio::spawn(async move {
                let mut caller = control.connect().await;
                for round in 0..EACH {
                    let path = format!("{SANDBOX}/execs/ex-{number}/signal?round={round}");
                    let answer: Answer = caller.ask(post(&path, format!("{number}"))).await;
                    assert_eq!(answer.json()["uri"], path);
                }
            })
        })
        .collect();
    for caller in callers {
        patiently(caller).await.unwrap();
    }
    assert_eq!(control.edges[0].requests(), CALLERS * EACH);
}
