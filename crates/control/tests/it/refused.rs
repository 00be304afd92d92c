//! Requests that are refused before their body is read, by callers that do not look while they send.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::harness::{Control, KEY, PATIENCE, SANDBOX};

/// Far more than any socket holds.
const BODY: usize = 64 << 20;

/// A caller as simple as they come: sends all of a request, then reads the answer.
struct Simple {
    stream: BufReader<TcpStream>,
}

impl Simple {
    fn send_head(control: &Control, path: &str, headers: &[(&str, &str)]) -> Self {
        let mut stream = TcpStream::connect(control.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("PUT {path} HTTP/1.1\r\nhost: t\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    fn send_body(&mut self, chunked: bool) {
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..BODY / piece.len() {
            if chunked {
                write!(self.stream.get_mut(), "{:x}\r\n", piece.len()).unwrap();
            }
            self.stream.get_mut().write_all(&piece).expect("the connection was closed under the body");
            if chunked {
                self.stream.get_mut().write_all(b"\r\n").unwrap();
            }
        }
        if chunked {
            self.stream.get_mut().write_all(b"0\r\n\r\n").unwrap();
        }
    }

    /// The next head, in lower case.
    fn head(&mut self) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(self.stream.read_line(&mut head).expect("no answer"), 0, "no answer: {head:?}");
        }
        head.to_lowercase()
    }

    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).is_ok()
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_a_caller_that_first_sends_everything() {
    let control = std::sync::Arc::new(Control::start(1).await);
    let (bearer, length) = (format!("Bearer {KEY}"), BODY.to_string());
    let good = ("authorization", bearer.as_str());
    let (whole, chunked) = (("content-length", length.as_str()), ("transfer-encoding", "chunked"));
    let file = format!("{SANDBOX}/files?path=/x");
    for (path, headers, status) in [
        // By the node, whose connection breaks under the body.
        (file.as_str(), vec![good, whole, ("x-fake", "refuse")], "409"),
        (file.as_str(), vec![good, chunked, ("x-fake", "refuse")], "409"),
        // By this server.
        (file.as_str(), vec![("authorization", "Bearer no"), whole], "401"),
        ("/v1/sandboxes/nonsense/files?path=/x", vec![good, whole], "400"),
        ("/v1/nothing", vec![good, chunked], "404"),
        ("/v1/sandboxes", vec![good, whole], "405"),
    ] {
        let (control, asked) = (std::sync::Arc::clone(&control), path.to_owned());
        let headers: Vec<(String, String)> =
            headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let head = blocking(move || {
            let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
            let mut caller = Simple::send_head(&control, &asked, &headers);
            caller.send_body(headers.contains(&("transfer-encoding", "chunked")));
            caller.head()
        })
        .await;
        assert!(head.starts_with(&format!("http/1.1 {status} ")), "{path}: {head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_waits_to_be_told_to_go_on_is_refused_without_its_body() {
    let control = Control::start(1).await;
    blocking(move || {
        let headers =
            [("authorization", "Bearer no"), ("content-length", "1000000"), ("expect", "100-continue")];
        let mut caller = Simple::send_head(&control, &format!("{SANDBOX}/files?path=/x"), &headers);
        let head = caller.head();
        assert!(head.starts_with("http/1.1 401 ") && head.contains("connection: close"), "{head}");
        assert!(caller.is_closed());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_was_told_to_go_on_gets_the_nodes_refusal() {
    let control = Control::start(1).await;
    blocking(move || {
        let (bearer, length) = (format!("Bearer {KEY}"), BODY.to_string());
        let headers = [
            ("authorization", bearer.as_str()),
            ("content-length", length.as_str()),
            ("expect", "100-continue"),
            ("x-fake", "refuse"),
        ];
        let mut caller = Simple::send_head(&control, &format!("{SANDBOX}/files?path=/x"), &headers);
        let mut head = caller.head();
        if head.starts_with("http/1.1 100 ") {
            caller.send_body(false);
            head = caller.head();
        }
        assert!(head.starts_with("http/1.1 409 "), "{head}");
    })
    .await;
}
