//! The public API over TLS.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use dsec_control::config::Tls;
use dsec_control::tls::HANDSHAKE_MAX;
use dsec_pki::{Authority, Certificate, self_made};
use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::edge::BEHAVIOUR;
use crate::harness::{Caller, Control, KEY, PATIENCE, SANDBOX, get, patiently, until};

/// Connects to `host` as whoever trusts this authority.
async fn connect(address: SocketAddr, host: &str, ca: &Path) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    let host = ServerName::try_from(host.to_owned()).unwrap();
    patiently(TlsConnector::from(Arc::new(config)).connect(host, stream)).await
}

/// The certificate that is shown now.
async fn shown(address: SocketAddr, ca: &Path) -> Result<Certificate, String> {
    let stream = connect(address, "localhost", ca).await.map_err(|error| error.to_string())?;
    Ok(Certificate::parse(&stream.get_ref().1.peer_certificates().unwrap()[0]).unwrap())
}

fn self_made_in(dir: &Path) -> Option<Tls> {
    Some(Tls::SelfMade { dir: dir.join("tls") })
}

#[tokio::test]
async fn requests_and_websockets_go_over_tls_with_a_certificate_made_here() {
    let control = Control::start_with(1, self_made_in).await;
    let ca = control.dir.path().join("tls/ca.pem");
    for host in ["localhost", "127.0.0.1", "::1"] {
        let mut caller = Caller::over(connect(control.address, host, &ca).await.unwrap()).await;
        for _ in 0..3 {
            assert_eq!(caller.ask(get(SANDBOX)).await.status, StatusCode::OK);
        }
    }
    assert!(connect(control.address, "dsec.example", &ca).await.is_err(), "a name that is not its own");

    let url = format!("wss://localhost{SANDBOX}/ports/80/tcp");
    let mut request = url.into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {KEY}").parse().unwrap());
    request.headers_mut().insert(BEHAVIOUR, "websocket".parse().unwrap());
    let stream = connect(control.address, "localhost", &ca).await.unwrap();
    let (mut socket, _) = patiently(tokio_tungstenite::client_async(request, stream)).await.unwrap();
    for size in [0, 1, 256 << 10] {
        let message = Message::binary(vec![size as u8; size]);
        patiently(socket.send(message.clone())).await.unwrap();
        assert_eq!(patiently(socket.next()).await.unwrap().unwrap(), message);
    }
    for name in ["ca.pem", "ca.key"] {
        let mode = control.dir.path().join("tls").join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "others can read {name}");
    }
}

#[tokio::test]
async fn a_plain_request_is_told_that_https_is_spoken() {
    let control = Control::start_with(1, self_made_in).await;
    let mut caller = control.connect().await;
    let answer = caller.ask(get(SANDBOX)).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["code"], "invalid_argument");
    assert!(answer.json()["hint"].as_str().unwrap().contains("https://"));
    assert_eq!(control.edges[0].requests(), 0);
}

#[tokio::test]
async fn a_caller_that_does_not_finish_its_handshake_is_gone_after_a_while() {
    assert!(HANDSHAKE_MAX < PATIENCE);
    let control = Control::start_with(1, self_made_in).await;
    let begun = Instant::now();
    let silent = TcpStream::connect(control.address).await.unwrap();
    let mut slow = TcpStream::connect(control.address).await.unwrap();
    // The head of a record that says more than follows.
    slow.write_all(&[0x16, 3, 1, 2, 0, 1]).await.unwrap();
    for mut stream in [silent, slow] {
        let mut rest = Vec::new();
        // An end or a reset: the server has let go.
        let _ = patiently(stream.read_to_end(&mut rest)).await;
    }
    assert!(begun.elapsed() >= HANDSHAKE_MAX / 2, "it was not waited for at all");
    let ca = control.dir.path().join("tls/ca.pem");
    connect(control.address, "localhost", &ca).await.unwrap();
}

#[tokio::test]
async fn a_certificate_is_replaced_when_its_files_are_and_half_of_one_is_not_taken() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    let authority = Authority::from_pem(&Authority::make("test").unwrap()).unwrap();
    std::fs::write(path("ca"), authority.pem()).unwrap();
    let make = || self_made(&authority, &["localhost".to_owned()], &[]).unwrap();
    let put = |name: &str, text: &str| {
        let part: PathBuf = path("part");
        std::fs::write(&part, text).unwrap();
        std::fs::rename(part, path(name)).unwrap();
    };
    let (cert, key) = make();
    put("cert", &cert);
    put("key", &key);
    let files = Tls::Files { cert: path("cert"), key: path("key") };
    let control = Control::start_with(1, |_| Some(files)).await;
    let first = shown(control.address, &path("ca")).await.unwrap();
    let mut before = Caller::over(connect(control.address, "localhost", &path("ca")).await.unwrap()).await;

    let (cert, key) = make();
    put("cert", &cert);
    // The new certificate does not go with the old key: seen, and not taken.
    for _ in 0..3 {
        assert_eq!(shown(control.address, &path("ca")).await.unwrap(), first);
    }
    put("key", &key);
    until("the new certificate", async || match shown(control.address, &path("ca")).await {
        Ok(now) if now != first => Ok(()),
        other => Err(other),
    })
    .await;
    assert_eq!(before.ask(get(SANDBOX)).await.status, StatusCode::OK, "a connection was cut");
}
