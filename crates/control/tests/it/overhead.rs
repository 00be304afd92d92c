//! What the server adds. A measurement and not a test:
//! `cargo test --release -p dsec-control --test it -- --ignored --nocapture overhead`

use std::io::Read as _;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, stream};
use http::Request;
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::edge::{BEHAVIOUR, FILL};
use crate::harness::{Caller, Control, KEY, SANDBOX, get, post, with};

const ROUNDS: usize = 20_000;
const CROWD: usize = 40_000;

async fn round_trips(caller: &mut Caller) -> Vec<Duration> {
    let body = r#"{"argv":["true"],"wait":true}"#;
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let request = with(post(&format!("{SANDBOX}/execs"), body), BEHAVIOUR, "quick");
        let started = Instant::now();
        caller.ask(request).await;
        times.push(started.elapsed());
    }
    times.sort();
    times
}

fn show(what: &str, times: &[Duration]) {
    let at = |share: f64| times[(times.len() as f64 * share) as usize];
    println!("{what}: p50 {:?} p90 {:?} p99 {:?}", at(0.5), at(0.9), at(0.99));
}

fn rate(what: &str, bytes: usize, started: Instant) {
    println!("{what}: {:.0} MiB/s", bytes as f64 / 1048576.0 / started.elapsed().as_secs_f64());
}

async fn raw(what: &str, caller: &mut Caller) {
    let started = Instant::now();
    let mut response = caller.send(with(get(SANDBOX), BEHAVIOUR, "fill")).await;
    let mut length = 0;
    while let Some(frame) = response.frame().await {
        length += frame.unwrap().into_data().unwrap().len();
    }
    assert_eq!(length, FILL);
    rate(&format!("{what}, download"), FILL, started);

    let started = Instant::now();
    let chunk = Bytes::from_static(&[7; 256 << 10]);
    let count = FILL / chunk.len();
    let chunks = stream::iter((0..count).map(move |_| Ok::<_, std::io::Error>(chunk.clone())));
    let request = Request::put(format!("{SANDBOX}/files?path=/x")).body(Body::from_stream(chunks)).unwrap();
    let answer = caller.ask(with(request, BEHAVIOUR, "drain")).await;
    assert_eq!(answer.json()["length"], FILL);
    rate(&format!("{what}, upload"), FILL, started);
}

async fn websocket<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(what: &str, stream: S) {
    let mut request = format!("ws://control.test{SANDBOX}/ports/80/tcp").into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {KEY}").parse().unwrap());
    request.headers_mut().insert(BEHAVIOUR, "websocket".parse().unwrap());
    let (socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    let (mut sink, mut source) = socket.split();
    let message = Message::binary(vec![7; 256 << 10]);
    const MESSAGES: usize = 2000;
    let started = Instant::now();
    let sending = tokio::spawn(async move {
        for _ in 0..MESSAGES {
            sink.send(message.clone()).await.unwrap();
        }
        sink
    });
    for _ in 0..MESSAGES {
        source.next().await.unwrap().unwrap();
    }
    drop(sending.await.unwrap());
    rate(&format!("{what}, echoed"), MESSAGES * (256 << 10), started);
}

/// The program itself as a process of its own, in front of the same node.
fn program(control: &Control) -> (Child, SocketAddr) {
    let (keys, socket) = (control.keys_file(), &control.edges[0].socket);
    let script = format!(
        "exec {} --listen 127.0.0.1:0 --keys-file {} --node n1={} --ready-fd 3 3>&1 1>&2",
        env!("CARGO_BIN_EXE_dsec-control"),
        keys.display(),
        socket.display()
    );
    let mut child = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    child.stdout.take().unwrap().read_to_string(&mut address).unwrap();
    (child, address.trim_end().parse().unwrap())
}

async fn crowd(address: SocketAddr, callers: usize) {
    let mut all = Vec::new();
    for _ in 0..callers {
        all.push(Caller::connect(address).await);
    }
    let started = Instant::now();
    let tasks: Vec<_> = all
        .into_iter()
        .map(|mut caller| {
            tokio::spawn(async move {
                for _ in 0..CROWD / callers {
                    caller.ask(with(post(&format!("{SANDBOX}/execs"), "{}"), BEHAVIOUR, "quick")).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{callers} callers: {:.0} requests/s", CROWD as f64 / seconds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; says nothing about right or wrong"]
async fn overhead() {
    let control = Control::start(1).await;
    let (mut child, address) = program(&control);
    let mut straight = control.connect_to_node().await;
    let mut through = Caller::connect(address).await;
    for _ in 0..2 {
        show("exec straight to the node", &round_trips(&mut straight).await);
        show("exec through the server ", &round_trips(&mut through).await);
    }
    raw("raw straight", &mut straight).await;
    raw("raw through ", &mut through).await;
    websocket("websocket straight", UnixStream::connect(&control.edges[0].socket).await.unwrap()).await;
    websocket("websocket through ", TcpStream::connect(address).await.unwrap()).await;
    for callers in [1, 8, 64, 500] {
        crowd(address, callers).await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
