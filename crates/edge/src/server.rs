//! The socket and its connections.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api;
use crate::node::{Node, Over};

/// Largest read buffer of a connection, bytes. It grows to this under a large body and no idle
/// connection has it.
const READ_BUFFER_MAX: usize = 1 << 20;
/// After a failed accept, which means too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a caller over the network may take until TLS is agreed on.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Until a silent caller is asked whether it is there, and between two questions.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// When the work is done: how long the last answers may take to leave.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A listening socket that nobody but root may use.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Socket {
    /// Binds `path` with mode 0600. What an earlier edge left there is replaced: the state lock says
    /// that it does not run.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Bound aside and renamed, so that it is never there with a wider mode.
        let draft = path.with_extension("new");
        let _ = std::fs::remove_file(&draft);
        let listener = UnixListener::bind(&draft)?;
        std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&draft, path)?;
        Ok(Self { listener, path: path.to_owned() })
    }
}

/// Serves until the node's work is done, and says why it is.
pub async fn serve(node: Arc<Node>, socket: Socket) -> Over {
    let router = api::router(Arc::clone(&node));
    let connections = TaskTracker::new();
    let stop = CancellationToken::new();
    let mut over = std::pin::pin!(node.over());
    let over = loop {
        let accepted = tokio::select! {
            accepted = socket.listener.accept() => accepted,
            over = &mut over => break over,
        };
        match accepted {
            Ok((stream, _)) => {
                connections.spawn(connection(stream, router.clone(), stop.clone()));
            }
            Err(error) => {
                tracing::error!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    };
    drop(socket);
    say_last_words(&stop, &connections).await;
    over
}

/// Lets requests that are being answered come to their ends, for a moment.
async fn say_last_words(stop: &CancellationToken, connections: &TaskTracker) {
    stop.cancel();
    connections.close();
    let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
}

/// Serves control over the network, until the node's work is done. Nobody without control's certificate gets to ask anything.
pub async fn serve_cluster(node: Arc<Node>, listener: TcpListener, tls: Arc<ServerConfig>) {
    let router = api::remote_router(Arc::clone(&node));
    let (stop, acceptor) = (CancellationToken::new(), TlsAcceptor::from(tls));
    let connections = TaskTracker::new();
    let mut over = std::pin::pin!(node.over());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut over => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (acceptor, router, stop) = (acceptor.clone(), router.clone(), stop.clone());
                connections.spawn(async move {
                    if let Err(error) = keep_alive(&stream) {
                        tracing::debug!(%error, "a connection cannot be kept alive");
                    }
                    match tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => connection(stream, router, stop).await,
                        Ok(Err(error)) => tracing::warn!(%error, "a caller over the network was refused"),
                        Err(_) => tracing::debug!("a caller did not finish its TLS handshake"),
                    }
                });
            }
            Err(error) => {
                tracing::error!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    say_last_words(&stop, &connections).await;
}

/// Sends small frames at once, and has the kernel find out when the other side is gone without a word.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

async fn connection<S>(stream: S, router: axum::Router, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let mut server = http1::Builder::new();
    // No limit on the wait for a request's head: it would close control's idle connections under it, and
    // only root and control get here.
    server.max_buf_size(READ_BUFFER_MAX);
    // A caller that closes its writing half early is gone, as HTTP has it; what it began is spawned.
    let mut served = std::pin::pin!(server.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let ended = tokio::select! {
        ended = &mut served => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}
