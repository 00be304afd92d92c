//! Listening, serving connections, and ending well.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::App;

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
    socket.set_keepalive(true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &KEEPALIVE_S)?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &KEEPALIVE_S)?;
    setsockopt(&socket, sockopt::TcpKeepCount, &3)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `stop` is cancelled, then lets requests in flight end for up to [`DRAIN`]. Idle
/// connections are closed at once.
pub async fn serve(listener: TcpListener, app: Arc<App>, router: Router, stop: CancellationToken) {
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
        connections.spawn(connection(stream, router.clone(), stop.clone()));
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

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(BUFFER_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
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
