//! Idle connections of one node, the last used first.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_http::HearsOut;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::{Link, Way};

/// Idle connections kept for a node. A connect costs about 30 us, so a burst beyond this pays
/// little, and descriptors do not pile up after one.
pub(super) const IDLE_MAX: usize = 256;
/// An idle connection older than this is not used: below the 30 s after which a hyper server may
/// close one, so that a request does not meet the close half-way.
pub(super) const IDLE_AGE_MAX: Duration = Duration::from_secs(15);
/// Read and write buffer of a connection, bytes: large bodies then move in few system calls.
/// Buffers grow to it only when they are filled.
pub(super) const BUFFER_MAX: usize = 1 << 20;

/// The idle connections of one node.
pub struct Pool {
    way: Way,
    idle: Mutex<Vec<(Instant, Link)>>,
}

impl Pool {
    /// An empty pool; connects to nothing yet.
    pub fn new(way: Way) -> Self {
        Self { way, idle: Mutex::new(Vec::new()) }
    }

    /// How the edge is reached.
    pub fn way(&self) -> &Way {
        &self.way
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
        let stream = self.way.connect().await?;
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
