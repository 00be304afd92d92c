//! The socket and its connections.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::task::TaskTracker;

use crate::api;
use crate::node::Node;

/// Largest read buffer of a connection, bytes. It grows to this under a large body and no idle
/// connection has it.
const READ_BUFFER_MAX: usize = 1 << 20;
/// After a failed accept, which means too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// After a shutdown: how long its last answer may take to leave.
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

/// Serves until the node is over.
pub async fn serve(node: Arc<Node>, socket: Socket) {
    let router = api::router(Arc::clone(&node));
    let connections = TaskTracker::new();
    let stop = tokio_util::sync::CancellationToken::new();
    let mut over = std::pin::pin!(node.over());
    loop {
        let accepted = tokio::select! {
            accepted = socket.listener.accept() => accepted,
            () = &mut over => break,
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
    }
    drop(socket);
    stop.cancel();
    connections.close();
    let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
}

async fn connection(stream: UnixStream, router: axum::Router, stop: tokio_util::sync::CancellationToken) {
    let service = TowerToHyperService::new(router);
    let mut server = http1::Builder::new();
    // No limit on the wait for a request's head: it would close control's idle connections under it, and
    // only root can reach this socket.
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
