//! Connections: each is to an address that [`Places`] admits, whoever named the host.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tower::Service;

use crate::error::PullError;
use crate::places::{Places, Refused};

/// How long looking up a name and connecting to one address may take, each.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Addresses of one name that are tried: enough for two families of a name with two servers.
const ADDRESSES_MAX: usize = 4;

/// HTTP over vetted connections.
pub(crate) type Http = Client<HttpsConnector<Vetted>, Full<bytes::Bytes>>;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the name {0} is not known")]
    NoName(String, #[source] io::Error),
    #[error("{0} does not take the connection")]
    NotTaken(SocketAddr, #[source] io::Error),
    #[error("{0} did not answer within {limit} s", limit = CONNECT_MAX.as_secs())]
    Silent(String),
}

/// Connects to where [`Places`] says.
#[derive(Debug, Clone)]
pub(crate) struct Vetted(Arc<Places>);

impl Service<Uri> for Vetted {
    type Response = TokioIo<TcpStream>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let places = Arc::clone(&self.0);
        Box::pin(async move { connect(&places, &uri).await.map(TokioIo::new) })
    }
}

async fn connect(places: &Places, uri: &Uri) -> Result<TcpStream, ConnectError> {
    let host = uri.host().unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_tls = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let addresses = look_up(host).await?;
    let admitted = places.admit(host, port, &addresses)?;
    let mut last = None;
    for address in admitted.into_iter().take(ADDRESSES_MAX) {
        let address = SocketAddr::new(address, port);
        match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = Some(ConnectError::NotTaken(address, error)),
            Err(_) => last = Some(ConnectError::Silent(address.to_string())),
        }
    }
    let nothing = || ConnectError::NoName(host.to_owned(), io::ErrorKind::NotFound.into());
    Err(last.unwrap_or_else(nothing))
}

async fn look_up(host: &str) -> Result<Vec<IpAddr>, ConnectError> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let found = tokio::time::timeout(CONNECT_MAX, tokio::net::lookup_host((host, 0))).await;
    let found = found.map_err(|_| ConnectError::Silent(format!("the name server, asked for {host},")))?;
    let found = found.map_err(|error| ConnectError::NoName(host.to_owned(), error))?;
    Ok(found.map(|address| address.ip()).collect())
}

/// A client that trusts the system's roots, and the certificates in `ca_pem`. Blocks for the milliseconds that the system's take
/// to load: also a registry without TLS may refer to what has it.
///
/// # Errors
/// `ca_pem` holds no certificates; or the registry has TLS and nothing is trusted here.
pub(crate) fn client(places: Arc<Places>, tls: bool, ca_pem: Option<&str>) -> Result<Http, PullError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(pem) = ca_pem {
        add(&mut roots, pem).map_err(|why| PullError::BadCertificates { why })?;
    }
    if tls && roots.is_empty() {
        let why =
            "no certificates are trusted on the node; install ca-certificates there, or give some".to_owned();
        return Err(PullError::BadCertificates { why });
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| PullError::BadCertificates { why: error.to_string() })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(Vetted(places));
    Ok(Client::builder(TokioExecutor::new()).build(connector))
}

fn add(roots: &mut RootCertStore, pem: &str) -> Result<(), String> {
    let mut found = false;
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("they are no PEM ({error})"))?;
        roots.add(certificate).map_err(|error| format!("one of them cannot be used ({error})"))?;
        found = true;
    }
    if found { Ok(()) } else { Err("there is none in what was given".to_owned()) }
}
