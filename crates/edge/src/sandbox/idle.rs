//! When a sandbox was used last. A request in progress, an attached stream, a watch and a forwarded
//! connection are use; a command that runs with nobody waiting for it is not, so that a trainer that
//! went away does not keep its sandboxes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::now_ms;

/// Use of one sandbox.
#[derive(Debug)]
pub struct Activity {
    base: Instant,
    base_ms: u64,
    busy: AtomicUsize,
    /// Last end of a use, milliseconds after `base`.
    last: AtomicU64,
}

/// Held while a request is in progress.
#[derive(Debug)]
pub struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
        self.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a look at the clock says.
#[derive(Debug, PartialEq, Eq)]
pub enum Idle {
    /// It was not used for the whole time.
    Over,
    /// It cannot be over before then.
    NotBefore(Instant),
}

impl Activity {
    /// Last used at this Unix time.
    pub fn new(last_active_ms: u64) -> Self {
        let ago = Duration::from_millis(now_ms().saturating_sub(last_active_ms));
        let now = Instant::now();
        // Just after boot the clock may not reach back that far; then it counts from now.
        let base = now.checked_sub(ago).unwrap_or(now);
        Self { base, base_ms: last_active_ms, busy: AtomicUsize::new(0), last: AtomicU64::new(0) }
    }

    fn since_base(&self) -> u64 {
        u64::try_from(self.base.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// It is used now, for an instant.
    pub fn touch(&self) {
        self.last.fetch_max(self.since_base(), Ordering::AcqRel);
    }

    /// It is used until this is dropped.
    pub fn busy(self: &Arc<Self>) -> Busy {
        // In one order with the publishing of a pause: either this use sees the pause, or the pause sees this use.
        self.busy.fetch_add(1, Ordering::SeqCst);
        self.touch();
        Busy(Arc::clone(self))
    }

    /// Whether it is being used now.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Last use, Unix ms.
    pub fn last_active_ms(&self) -> u64 {
        if self.busy.load(Ordering::Acquire) > 0 {
            self.touch();
        }
        self.base_ms + self.last.load(Ordering::Acquire)
    }

    /// Whether it has been idle for `ttl`.
    pub fn look(&self, ttl: Duration) -> Idle {
        let now = Instant::now();
        if self.busy.load(Ordering::Acquire) > 0 {
            return Idle::NotBefore(now + ttl);
        }
        let over = self.base + Duration::from_millis(self.last.load(Ordering::Acquire)) + ttl;
        if over <= now { Idle::Over } else { Idle::NotBefore(over) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn idle_counts_from_the_end_of_the_last_use() {
        let activity = Arc::new(Activity::new(now_ms()));
        let busy = activity.busy();
        tokio::time::advance(TTL * 3).await;
        assert!(matches!(activity.look(TTL), Idle::NotBefore(_)), "it was in use");
        drop(busy);
        let until = Instant::now() + TTL;
        let Idle::NotBefore(over) = activity.look(TTL) else { panic!("over at once") };
        assert!(until - over < Duration::from_millis(2));
        tokio::time::advance(TTL - Duration::from_millis(100)).await;
        assert!(matches!(activity.look(TTL), Idle::NotBefore(_)));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(activity.look(TTL), Idle::Over);
    }
}
