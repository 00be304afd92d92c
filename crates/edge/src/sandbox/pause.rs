//! A pause in progress, and the memory that comes back after one.

use std::sync::Arc;

use dsec_backend::Paused;
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, Pauses};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Grip;
use crate::clock::now_ms;
use crate::error::{internal, pause_failed};
use crate::guest::Connection;
use crate::node::Node;

/// A sandbox on its way to a pause.
#[derive(Debug)]
pub struct Pausing {
    task: JoinHandle<Result<Paused, ApiError>>,
    given_up: CancellationToken,
}

impl Pausing {
    /// Begins to pause a sandbox.
    pub fn begin(node: &Arc<Node>, grip: &Arc<Grip>, guest: &Arc<Connection>) -> Self {
        let given_up = CancellationToken::new();
        let way = Way {
            node: Arc::clone(node),
            grip: Arc::clone(grip),
            guest: Arc::clone(guest),
            given_up: given_up.clone(),
        };
        Self { task: tokio::spawn(way.go()), given_up }
    }

    /// What it came to. Cancel-safe.
    ///
    /// # Errors
    /// The sandbox cannot be paused; it runs on.
    pub async fn done(&mut self) -> Result<Paused, ApiError> {
        let done = (&mut self.task).await;
        done.unwrap_or_else(|error| Err(internal("the pause met a defect in the edge", &error)))
    }

    /// Gives it up, and waits until nothing of it goes on. The sandbox may stand still then.
    pub async fn break_off(self) {
        self.given_up.cancel();
        let _whatever_it_came_to = self.task.await;
    }
}

struct Way {
    node: Arc<Node>,
    grip: Arc<Grip>,
    guest: Arc<Connection>,
    given_up: CancellationToken,
}

impl Way {
    async fn go(self) -> Result<Paused, ApiError> {
        if !self.guest.can_stand_still() {
            return Err(started_by_older());
        }
        let given_up = self.given_up.clone();
        let (node, guest) = (Arc::clone(&self.node), Arc::clone(&self.guest));
        let begun = async {
            let turn = node.pauses.acquire().await;
            guest.stand_still().await.map(|()| turn).map_err(ApiError::from)
        };
        let _turn = tokio::select! {
            begun = begun => begun?,
            () = given_up.cancelled() => return Err(resumed_first()),
        };
        let paused = tokio::task::spawn_blocking(move || self.stop_and_give_back());
        paused.await.unwrap_or_else(|error| Err(internal("the pause met a defect in the edge", &error)))
    }

    /// Blocks for as long as it takes to give the memory back.
    fn stop_and_give_back(self) -> Result<Paused, ApiError> {
        let go_on = || !self.given_up.is_cancelled();
        let paused = self.grip.with(|instance| {
            let paused = instance.pause(&go_on);
            if paused.is_err() {
                instance.thaw();
            }
            paused
        });
        match paused {
            Some(Ok(paused)) => Ok(paused),
            Some(Err(error)) => {
                self.guest.go_on();
                Err(if go_on() { pause_failed(&error) } else { resumed_first() })
            }
            None => Err(resumed_first()),
        }
    }
}

/// Somebody used it, or it is being ended.
pub fn resumed_first() -> ApiError {
    ApiError::new(ErrorKind::Conflict, "the sandbox was used before it was paused")
        .hint("pause it when nobody uses it")
}

/// Its time limits would run on while it stands still.
fn started_by_older() -> ApiError {
    let message = "the sandbox was started by an older release, whose agent cannot let its clock stand still";
    ApiError::new(ErrorKind::Unsupported, message).hint("sandboxes that are created now can be paused")
}

/// Brings the memory of a sandbox back in the background, until all was asked for or this is dropped.
pub fn prefetch(grip: &Arc<Grip>) -> DropGuard {
    let given_up = CancellationToken::new();
    let (grip, wanted) = (Arc::clone(grip), given_up.clone());
    tokio::task::spawn_blocking(move || {
        grip.with(|instance| instance.prefetch(&|| !wanted.is_cancelled()));
    });
    given_up.drop_guard()
}

/// Notes that a pause has begun.
pub fn note_begin(pauses: &mut Option<Pauses>, paused: &Paused) {
    let pauses = pauses.get_or_insert_default();
    pauses.count += 1;
    pauses.since_ms = Some(now_ms());
    pauses.resident_bytes = paused.resident_bytes;
    pauses.returned_bytes = paused.returned_bytes;
}

/// Notes that the pause is over, if there is one. How long it was, ms.
pub fn note_end(pauses: &mut Option<Pauses>) -> u64 {
    let Some(pauses) = pauses else { return 0 };
    let took = pauses.since_ms.take().map_or(0, |since| now_ms().saturating_sub(since));
    pauses.total_ms += took;
    took
}
