//! Simulated nodes behind the edge's HTTP surface: a Unix socket each, all in one process. Of that surface there is what control
//! needs: creates, records, lists, ends, tasks, reports and fences. No sandbox runs; commands and files have no path.

mod answers;

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dsec_model::Journal;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::UnixListener;
use tokio::task::JoinSet;

use crate::node::Node;

/// How long things take on a simulated node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pace {
    /// A create.
    pub start: Duration,
    /// The end, or the pause, of one of a task's sandboxes, one after the other.
    pub stop: Duration,
}

/// A node behind its socket.
pub struct Edge {
    socket: PathBuf,
    node: Mutex<Node>,
    /// What of its sandboxes control is told, by their serial numbers: when each was created.
    journal: Mutex<Journal<u64, u64>>,
    pace: Pace,
}

impl Edge {
    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The node, for as long as the guard is held.
    pub fn node(&self) -> MutexGuard<'_, Node> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes that answer, until they are dropped.
pub struct Edges {
    all: Vec<Arc<Edge>>,
    /// Ended when it is dropped, and every connection with it.
    _serving: JoinSet<()>,
}

impl Edges {
    /// Binds a socket for each node in `dir` and begins to answer.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub fn start(dir: &Path, nodes: Vec<Node>, pace: Pace) -> io::Result<Self> {
        let mut serving = JoinSet::new();
        let mut all = Vec::with_capacity(nodes.len());
        for node in nodes {
            let socket = dir.join(format!("{}.sock", node.name()));
            let listener = UnixListener::bind(&socket)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))?;
            let edge = Arc::new(Edge { socket, node: Mutex::new(node), journal: Mutex::default(), pace });
            serving.spawn(serve(listener, Arc::clone(&edge)));
            all.push(edge);
        }
        Ok(Self { all, _serving: serving })
    }

    /// All of them.
    pub fn all(&self) -> &[Arc<Edge>] {
        &self.all
    }
}

/// Pause when no connection can be accepted, which is when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

async fn serve(listener: UnixListener, edge: Arc<Edge>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let edge = Arc::clone(&edge);
        let service = service_fn(move |request| {
            let edge = Arc::clone(&edge);
            async move { Ok::<_, Infallible>(answers::answer(&edge, request).await) }
        });
        // A caller that hangs up ends it, which is nothing to tell.
        connections.spawn(async move {
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await)
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Now, Unix ms.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
