//! https: the same commands through a server that ends TLS in front of the platform.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

mod fake;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use fake::{FakeApi, text};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate of 127.0.0.1 that signs itself, and its key.
fn certificate(dir: &Path) {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]);
    command.args([
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-addext",
        "basicConstraints=CA:FALSE",
    ]);
    command.arg("-keyout").arg(dir.join("key.pem")).arg("-out").arg(dir.join("cert.pem"));
    assert!(command.stderr(Stdio::null()).status().expect("openssl is needed").success());
}

/// Ends TLS in front of `plain`; its address.
fn front(dir: &Path, plain: String) -> String {
    let certificates = vec![CertificateDer::from_pem_file(dir.join("cert.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, plain) = (acceptor.clone(), plain.clone());
                tokio::spawn(async move {
                    let Ok(mut caller) = acceptor.accept(stream).await else { return };
                    let mut server = tokio::net::TcpStream::connect(plain).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut caller, &mut server).await;
                });
            }
        });
    });
    address
}

#[test]
fn https_is_by_certificates_that_are_trusted() {
    let api = FakeApi::start();
    certificate(api.home.path());
    let url = format!("https://{}/v1", front(api.home.path(), api.url.replace("http://", "")));
    let (url, ca) = (url.as_str(), api.path("cert.pem"));
    let ca = ca.to_str().unwrap();
    // Requests and WebSockets.
    let ran = api.run(&["exec", "sb-n1-a", "--url", url, "--ca-file", ca, "both"]);
    assert_eq!(
        (ran.status.code(), text(&ran.stdout)),
        (Some(0), "one\nthree\n".into()),
        "{}",
        text(&ran.stderr)
    );
    let by_variable = api.command(&["ps", "--url", url]).env("DSEC_CA_FILE", ca).output().unwrap();
    assert!(by_variable.status.success(), "{}", text(&by_variable.stderr));
    // An empty variable is none, as everywhere.
    assert!(api.command(&["ps"]).env("DSEC_CA_FILE", "").status().unwrap().success());
    let stranger = api.run(&["ps", "--url", url]);
    assert_eq!(stranger.status.code(), Some(1));
    assert!(text(&stranger.stderr).contains("certificate"), "{}", text(&stranger.stderr));
    let none = api.run(&["ps", "--url", url, "--ca-file", api.path("key.pem").to_str().unwrap()]);
    assert!(text(&none.stderr).contains("it holds no certificate"), "{}", text(&none.stderr));
}
