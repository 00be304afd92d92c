//! Requests that are being answered: when an edge is about to become another, it does not cut them off, nor those that are on their
//! way on a connection that control keeps for later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::node::Node;

/// How long no request must have come on a connection until what is left of them is taken to be idle.
const QUIET: Duration = Duration::from_millis(200);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// The requests of a node.
#[derive(Debug)]
pub struct Traffic {
    began: Instant,
    under_way: AtomicUsize,
    /// When the last one came or was answered, ms after `began`.
    last_ms: AtomicU64,
    /// Each answer is its connection's last.
    is_leaving: AtomicBool,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            under_way: AtomicUsize::new(0),
            last_ms: AtomicU64::new(0),
            is_leaving: AtomicBool::new(false),
        }
    }
}

/// A request that is being answered.
struct UnderWay<'a>(&'a Traffic);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.note();
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Traffic {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn note(&self) {
        self.last_ms.store(self.now_ms(), Ordering::Release);
    }

    fn begin(&self) -> UnderWay<'_> {
        self.under_way.fetch_add(1, Ordering::AcqRel);
        self.note();
        UnderWay(self)
    }

    /// From here on each answer is its connection's last. Returns when none is being answered and none has come for a moment, or
    /// after `limit`.
    pub async fn leave(&self, limit: Duration) {
        self.is_leaving.store(true, Ordering::Release);
        self.note();
        let until = Instant::now() + limit;
        let is_quiet = || {
            let since_ms = self.now_ms().saturating_sub(self.last_ms.load(Ordering::Acquire));
            self.under_way.load(Ordering::Acquire) == 0 && u128::from(since_ms) >= QUIET.as_millis()
        };
        while !is_quiet() && Instant::now() < until {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// The middleware that counts them.
pub async fn counted(State(node): State<Arc<Node>>, request: Request, next: Next) -> Response {
    let _under_way = node.traffic.begin();
    let mut response = next.run(request).await;
    let is_last = node.traffic.is_leaving.load(Ordering::Acquire);
    if is_last && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn leaving_waits_for_what_is_under_way_and_for_a_moment_after_it_but_not_for_ever() {
        let traffic = Traffic::default();
        traffic.leave(Duration::from_secs(5)).await;
        let under_way = traffic.begin();
        let left = traffic.leave(Duration::from_secs(60));
        tokio::pin!(left);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut left).await.is_err());
        drop(under_way);
        left.await;
        let _never_answered = traffic.begin();
        traffic.leave(Duration::from_millis(20)).await;
    }
}
