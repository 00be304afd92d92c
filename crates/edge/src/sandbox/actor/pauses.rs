//! What the owner of a sandbox does when it is paused and resumed.

use std::sync::Arc;

use dsec_backend::Paused;
use dsec_model::{EndReason, ErrorKind, Event, State};
use dsec_proto::rest::ApiError;
use serde_json::json;

use super::super::pause::{self, Pausing};
use super::Actor;
use crate::adopt::reconnect;
use crate::clock::now_ms;

impl Actor {
    pub(super) async fn idle_over(&mut self) {
        if !self.stored.spec.limits.auto_pause {
            return self.apply(Event::StopAsked { reason: EndReason::Idle, grace_ms: 0 }).await;
        }
        self.pauses_itself = true;
        self.apply(Event::PauseAsked).await;
        // Somebody came in between and saw it running still.
        if self.handle.activity.is_busy() {
            self.apply(Event::ResumeAsked).await;
        }
    }

    /// A pause has come to its end by itself.
    pub(super) async fn pause_done(&mut self, done: Result<Paused, ApiError>) {
        match done {
            Ok(paused) => {
                pause::note_begin(&mut self.stored.sandbox.pauses, &paused);
                self.apply(Event::Paused).await;
            }
            Err(error) => {
                tracing::warn!(sandbox_id = %self.handle.id, %error, "sandbox cannot be paused");
                self.handle.events.push("pause_failed", json!({ "error": error.0.message }));
                let never = self.pauses_itself && error.kind() == ErrorKind::Unsupported;
                self.pause_failure = Some(error);
                self.apply(Event::PauseFailed).await;
                // Its idle time begins anew, or it would be tried again at once.
                self.handle.activity.touch();
                if never {
                    self.apply(Event::StopAsked { reason: EndReason::Idle, grace_ms: 0 }).await;
                }
            }
        }
    }

    pub(super) fn paused_ttl_ms(&self) -> Option<u64> {
        let seconds = self.stored.spec.limits.ttl_paused_stop_s;
        (seconds > 0).then_some(seconds * 1000)
    }

    /// How long the pause that it is in has been.
    pub(super) fn paused_ms(&self) -> u64 {
        let since_ms = self.stored.sandbox.pauses.and_then(|pauses| pauses.since_ms);
        since_ms.map_or(0, |since| now_ms().saturating_sub(since))
    }

    pub(super) fn begin_pause(&mut self) {
        self.prefetch = None;
        if let (Some(grip), Some(guest)) = (&self.grip, &self.guest) {
            self.pausing = Some(Pausing::begin(&self.node, grip, guest));
        }
    }

    pub(super) async fn break_off(&mut self) {
        if let Some(pausing) = self.pausing.take() {
            pausing.break_off().await;
        }
    }

    /// Lets its processes go on, the agent's clock with them.
    pub(super) async fn thaw(&mut self) -> Event {
        let Some(grip) = self.grip.clone() else { return Event::AgentLost("it has ended".to_owned()) };
        let thawing = Arc::clone(&grip);
        let thawed = tokio::task::spawn_blocking(move || thawing.with(|instance| instance.thaw())).await;
        if let Err(error) = thawed {
            return Event::AgentLost(format!("letting it go on broke off inside the edge: {error}"));
        }
        match &self.guest {
            Some(guest) => guest.go_on(),
            None => match reconnect(&self.handle, &grip).await {
                Ok(guest) => self.guest = Some(guest),
                Err(why) => return Event::AgentLost(why),
            },
        }
        self.prefetch = Some(pause::prefetch(&grip));
        Event::Resumed
    }

    /// Tells those who wait for a pause what became of it.
    pub(super) fn answer_pausers(&mut self) {
        if self.state == State::Pausing {
            return;
        }
        self.pauses_itself = false;
        let failure = self.pause_failure.take();
        for pauser in self.pausers.drain(..) {
            let answer = match (self.state, &failure) {
                (State::Paused, _) => Ok(()),
                (State::Running, Some(error)) => Err(error.clone()),
                (State::Running, None) => Err(pause::resumed_first()),
                _ => Err(crate::error::not_running(&self.handle.record())),
            };
            let _gone = pauser.send(answer);
        }
    }
}
