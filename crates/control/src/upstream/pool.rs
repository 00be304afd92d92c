//! Idle connections of one node, the last used first.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_http::HearsOut;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::Link;

/// Idle connections kept for a node. A connect costs about 30 us, so a burst beyond this pays
/// little, and descriptors do not pile up after one.
pub(super) const IDLE_MAX: usize = 256;
/// An idle connection older than this is not used: below the 30 s after which a hyper server may
/// close one, so that a request does not meet the close half-way.
pub(super) const IDLE_AGE_MAX: Duration = Duration::from_secs(15);
/// How long a full backlog of the edge is waited for. A Unix socket refuses at once where TCP
/// would wait, so a burst of connects needs our patience; longer than this, the edge is stuck.
pub(super) const BACKLOG_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two connects to a full backlog.
const BACKLOG_PAUSE: Duration = Duration::from_millis(2);
/// Read and write buffer of a connection, bytes: large bodies then move in few system calls.
/// Buffers grow to it only when they are filled.
pub(super) const BUFFER_MAX: usize = 1 << 20;

/// The idle connections of one node.
pub struct Pool {
    socket: PathBuf,
    idle: Mutex<Vec<(Instant, Link)>>,
}

impl Pool {
    /// An empty pool; connects to nothing yet.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, idle: Mutex::new(Vec::new()) }
    }

    /// The edge's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A connection that was open a moment ago, if there is one.
    pub(super) fn checkout(&self) -> Option<Link> {
        loop {
            let (since, mut link) = self.lock().pop()?;
            if since.elapsed() > IDLE_AGE_MAX {
                // Those below it have been idle even longer.
                let stale = std::mem::take(&mut *self.lock());
                drop(stale);
                return None;
            }
            if link.is_usable() {
                return Some(link);
            }
        }
    }

    /// Takes a connection back, if it can be used again.
    pub(super) fn give_back(&self, mut link: Link) {
        if !link.is_usable() {
            return;
        }
        let mut idle = self.lock();
        if idle.len() < IDLE_MAX {
            idle.push((Instant::now(), link));
        }
    }

    /// Makes a connection.
    pub(super) async fn connect(&self) -> io::Result<Link> {
        let started = Instant::now();
        let stream = loop {
            match UnixStream::connect(&self.socket).await {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && started.elapsed() < BACKLOG_PATIENCE =>
                {
                    tokio::time::sleep(BACKLOG_PAUSE).await;
                }
                other => break other?,
            }
        };
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(BUFFER_MAX)
            .handshake(TokioIo::new(HearsOut::new(stream)))
            .await
            .map_err(io::Error::other)?;
        Ok(Link { sender, connection })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Instant, Link)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
