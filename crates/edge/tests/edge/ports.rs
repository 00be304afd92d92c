//! Servers inside a sandbox.

use std::io::{Read, Write};
use std::net::TcpListener;

use futures_util::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::Message;

use crate::support::World;

/// A server that answers one connection with what `answer` makes of what it reads.
fn server(answer: impl FnOnce(std::net::TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || answer(listener.accept().unwrap().0));
    port
}

fn read_head(stream: &mut std::net::TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() > 0 {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_passed_on_with_its_body_and_without_the_callers_key() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let (sender, head) = std::sync::mpsc::channel();
    let port = server(move |mut stream| {
        sender.send(read_head(&mut stream)).unwrap();
        let mut body = [0; 4];
        stream.read_exact(&mut body).unwrap();
        stream.write_all(b"HTTP/1.1 418 Teapot\r\nx-from: inside\r\ncontent-length: 4\r\n\r\n").unwrap();
        stream.write_all(&body).unwrap();
    });
    let headers =
        [("authorization", "Bearer key"), ("x-dsec-forward-authorization", "Basic inner"), ("x-own", "1")];
    let path = format!("/v1/sandboxes/{id}/ports/{port}/http/a%2Fb?q=1");
    let answer = edge.client.send("POST", &path, &headers, "ping").await;
    assert_eq!((answer.status, answer.text().as_str()), (418, "ping"));
    assert_eq!(answer.headers["x-from"], "inside");
    let head = head.recv().unwrap().to_lowercase();
    assert!(head.starts_with("post /a%2fb?q=1 http/1.1\r\n"), "{head}");
    assert!(
        head.contains("authorization: basic inner")
            && head.contains("x-own: 1")
            && head.contains("host: edge"),
        "{head}"
    );
    assert!(!head.contains("bearer") && !head.contains("x-dsec"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_and_cookies_of_the_server_stay_below_its_path() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let (sender, head) = std::sync::mpsc::channel();
    let port = server(move |mut stream| {
        sender.send(read_head(&mut stream).to_lowercase()).unwrap();
        let answer = "HTTP/1.1 302 Found\r\nlocation: http://edge/login?next=/\r\nset-cookie: a=1; Path=/; HttpOnly\r\n\
            set-cookie: b=2\r\nkeep-alive: 5\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let prefix = format!("/v1/sandboxes/{id}/ports/{port}/http");
    let answer = edge.client.get(&format!("{prefix}/")).await;
    assert_eq!(answer.status, 302);
    assert_eq!(answer.headers["location"], format!("{prefix}/login?next=/").as_str());
    let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().collect();
    assert_eq!(cookies, [format!("a=1; Path={prefix}/; HttpOnly").as_str(), "b=2"]);
    assert!(!answer.headers.contains_key("keep-alive"));
    let head = head.recv().unwrap();
    assert!(head.contains(&format!("x-forwarded-prefix: {prefix}\r\n")), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_a_body_without_reading_it_is_heard() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let port = server(move |mut stream| {
        read_head(&mut stream);
        stream.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").unwrap();
    });
    let path = format!("/v1/sandboxes/{id}/ports/{port}/http/");
    assert_eq!(edge.client.send("POST", &path, &[], vec![0; 64 << 20]).await.status, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_becomes_a_tunnel() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let port = server(|mut stream| {
        let head = read_head(&mut stream);
        let key = head.lines().find_map(|l| {
            l.to_lowercase().starts_with("sec-websocket-key:").then(|| l[18..].trim().to_owned())
        });
        let accept = tokio_tungstenite::tungstenite::handshake::derive_accept_key(key.unwrap().as_bytes());
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: {accept}\r\n\r\n"
        );
        stream.write_all(answer.as_bytes()).unwrap();
        stream.write_all(b"\x82\x02hi").unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    let mut ws = edge.client.ws(&format!("/v1/sandboxes/{id}/ports/{port}/http/ws")).await;
    assert_eq!(ws.next().await.unwrap().unwrap().into_data().as_ref(), b"hi");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tcp_stream_goes_both_ways_and_ends() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let port = server(|mut stream| {
        let mut word = [0; 4];
        stream.read_exact(&mut word).unwrap();
        stream.write_all(&word.map(|b| b.to_ascii_uppercase())).unwrap();
    });
    let mut ws = edge.client.ws(&format!("/v1/sandboxes/{id}/ports/{port}/tcp")).await;
    ws.send(Message::Binary(b"abcd".to_vec().into())).await.unwrap();
    assert_eq!(ws.next().await.unwrap().unwrap().into_data().as_ref(), b"ABCD");
    assert!(matches!(ws.next().await, Some(Ok(Message::Close(_))) | None));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_callers_side_leaves_the_servers() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let port = server(|mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    });
    let mut ws = edge.client.ws(&format!("/v1/sandboxes/{id}/ports/{port}/tcp")).await;
    ws.send(Message::Binary(b"abcd".to_vec().into())).await.unwrap();
    ws.send(Message::Binary(Vec::new().into())).await.unwrap();
    assert_eq!(ws.next().await.unwrap().unwrap().into_data().as_ref(), b"abcd");
    assert!(matches!(ws.next().await, Some(Ok(Message::Close(_))) | None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_where_nobody_listens_is_unavailable() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    edge.client.get(&format!("/v1/sandboxes/{id}/ports/1/http/")).await.refused(503, "unavailable");
    edge.client.get(&format!("/v1/sandboxes/{id}/ports/0/http/")).await.refused(400, "invalid_argument");
    edge.client.get(&format!("/v1/sandboxes/{id}/ports/99999/http/")).await.refused(400, "invalid_argument");
    let port = server(|mut stream| {
        let _ = stream.write_all(b"SSH-2.0-nope\r\n");
    });
    edge.client.get(&format!("/v1/sandboxes/{id}/ports/{port}/http/")).await.refused(503, "unavailable");
}
