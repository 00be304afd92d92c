//! Turns at work that keeps a blocking thread, and a bounded queue for them. Such work waits for calls that need threads of the same
//! pool: without a limit, enough of it at once would wait for ever.

use std::sync::Arc;

use dsec_model::ErrorKind;
use dsec_proto::rest::ApiError;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;

/// Work of one sort.
pub struct Turns {
    what: &'static str,
    at_once: Arc<Semaphore>,
    /// Of those at work and those that wait.
    places: Arc<Semaphore>,
    places_max: usize,
}

/// A place in the queue, until it is dropped.
pub struct Place {
    at_once: Arc<Semaphore>,
    place: OwnedSemaphorePermit,
}

/// A turn at work, until it is dropped.
pub struct Turn {
    _turn: Option<OwnedSemaphorePermit>,
    _place: OwnedSemaphorePermit,
}

impl Turns {
    pub(super) fn new(what: &'static str, at_once: usize, waiting: usize) -> Self {
        let places_max = at_once + waiting;
        let (at_once, places) = (Arc::new(Semaphore::new(at_once)), Arc::new(Semaphore::new(places_max)));
        Self { what, at_once, places, places_max }
    }

    /// A place in the queue.
    ///
    /// # Errors
    /// There is none.
    pub fn enter(&self) -> Result<Place, ApiError> {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let (what, most) = (self.what, self.places_max);
            let message =
                format!("{most} {what} are under way or wait on this node already, which is the most");
            return Err(ApiError::new(ErrorKind::ResourceExhausted, message)
                .detail(json!({ "max": most }))
                .hint("try again when some have ended"));
        };
        Ok(Place { at_once: Arc::clone(&self.at_once), place })
    }
}

impl Place {
    /// Waits for a turn; those who wait get theirs in order.
    pub async fn turn(self) -> Turn {
        // The semaphore is never closed.
        let _turn = self.at_once.acquire_owned().await.ok();
        Turn { _turn, _place: self.place }
    }

    /// Waits for a turn and blocks a thread with the work for as long as that lasts.
    ///
    /// # Errors
    /// The work panicked.
    pub async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = self.turn().await;
        tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        })
        .await
    }
}
