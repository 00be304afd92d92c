//! Listening, serving connections, and ending well.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use dsec_pki::Certificate;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::api::cluster::NodeCertificate;
use crate::app::App;
use crate::cluster::Cluster;
use crate::tls::{Accepted, PublicTls, accept};

/// How long requests in flight get at the end.
pub const DRAIN: Duration = Duration::from_secs(5);
/// How long a connection may be idle or take for its headers. Above the idle times of common
/// clients' pools (90 s), so that they close first and never send into a close.
pub const IDLE: Duration = Duration::from_secs(120);
/// Read and write buffer of a connection, bytes; see `upstream::pool`.
pub const BUFFER_MAX: usize = 1 << 20;
/// Connections that wait to be accepted: one burst of a large job. The kernel caps it at
/// `net.core.somaxconn`.
const BACKLOG: u32 = 4096;
/// Pause when no connection can be accepted, which is when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Seconds until a silent peer is asked whether it is there, and between two questions: a stream
/// whose reader's machine is gone ends after about two minutes.
const KEEPALIVE_S: u32 = 30;

/// Where callers come in.
pub struct Door {
    listener: TcpListener,
    tls: Option<Arc<PublicTls>>,
}

impl From<TcpListener> for Door {
    /// For plain HTTP.
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

impl Door {
    /// The same, which speaks TLS if there is a certificate.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<PublicTls>>) -> Self {
        Self { tls, ..self }
    }
}

/// Binds `listen` (`host:port`). What is accepted inherits keep-alive probes.
///
/// # Errors
/// The name does not resolve, or no address of it can be bound.
pub async fn bind(listen: &str) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the host has no address");
    for address in tokio::net::lookup_host(listen).await? {
        match bind_one(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    keep_alive(&socket)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Has the kernel find out when the other side is gone without a word.
pub(crate) fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &KEEPALIVE_S)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &KEEPALIVE_S)?;
    setsockopt(socket, sockopt::TcpKeepCount, &3)?;
    Ok(())
}

/// Serves until `stop` is cancelled, then lets requests in flight end for up to [`DRAIN`]. Idle
/// connections are closed at once.
pub async fn serve(door: impl Into<Door>, app: Arc<App>, router: Router, stop: CancellationToken) {
    let Door { listener, tls } = door.into();
    let door = Inside { tls, cluster: app.cluster.clone(), router };
    let connections = TaskTracker::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        connections.spawn(connection(stream, door.clone(), stop.clone()));
    }
    drop(listener);
    connections.close();
    app.tunnels.close();
    let all = async { tokio::join!(connections.wait(), app.tunnels.wait()) };
    if tokio::time::timeout(DRAIN, all).await.is_err() {
        tracing::info!(
            connections = connections.len(),
            tunnels = app.tunnels.len(),
            "ending with requests in flight"
        );
    }
}

/// What every connection needs.
#[derive(Clone)]
struct Inside {
    tls: Option<Arc<PublicTls>>,
    cluster: Option<Arc<Cluster>>,
    router: Router,
}

async fn connection(stream: TcpStream, inside: Inside, stop: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let Inside { tls, cluster, router } = inside;
    let cluster = cluster.and_then(|cluster| cluster.server());
    if tls.is_none() && cluster.is_none() {
        return http(stream, router, None, stop).await;
    }
    let accepted = tokio::select! {
        accepted = accept(stream, tls.as_deref(), cluster) => accepted,
        () = stop.cancelled() => return,
    };
    match accepted {
        Some(Accepted::Plain(stream)) => http(stream, router, None, stop).await,
        Some(Accepted::Tls(stream, shown)) => http(*stream, router, shown, stop).await,
        None => {}
    }
}

async fn http<S>(stream: S, router: Router, shown: Option<Arc<Certificate>>, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = router.map_request(move |mut request: Request<Incoming>| {
        if let Some(shown) = &shown {
            request.extensions_mut().insert(NodeCertificate(Arc::clone(shown)));
        }
        request
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(BUFFER_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
        .with_upgrades();
    let mut serving = pin!(serving);
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = result {
        // Callers that hang up are an everyday thing.
        tracing::debug!(%error, "connection ended");
    }
}
