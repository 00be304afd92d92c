//! The task that owns one sandbox. It asks `lifecycle::step` what an event means and executes the
//! answer; it decides nothing itself.
//!
//! A final state is published, written down and logged only after everything of the sandbox is gone:
//! until then callers see `stopping` with the reason.

mod pauses;

use std::future::pending;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use dsec_backend::Instance;
use dsec_model::lifecycle::step;
use dsec_model::{Action, EndReason, Event, State};
use dsec_proto::guest::{Empty, Request};
use dsec_proto::rest::{ApiError, LaunchPhase, SandboxLimits, UpdateSandboxRequest};
use futures_util::FutureExt;
use serde_json::json;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use super::idle::Idle;
use super::pause::{self, Pausing};
use super::record::{self, Stored};
use super::{Grip, Handle, Live, Message, plan, usage};
use crate::admit::Permit;
use crate::charges::Counted;
use crate::clock::now_ms;
use crate::ended::Ended;
use crate::error::{chain, internal, not_running};
use crate::guest::Connection;
use crate::guest::codec::watched;
use crate::layers::LayerUse;
use crate::node::Node;

/// After SIGTERM: how often to look whether all processes are gone, so that grace is not waited for
/// in vain.
const QUIET_POLL: Duration = Duration::from_millis(10);
/// Longest wait for the last process after SIGKILL before the clean-up begins all the same; one in
/// an uninterruptible wait may take longer, and the clean-up waits again.
const EXIT_MAX: Duration = Duration::from_secs(10);

/// What a launch came to. Where `grip` is set, something runs and has to be ended.
#[derive(Debug)]
pub struct Launched {
    /// What runs.
    pub grip: Option<Arc<Grip>>,
    /// The way to its agent, or why the launch failed.
    pub guest: Result<Arc<Connection>, ApiError>,
    /// How long each phase took.
    pub phases: Vec<LaunchPhase>,
}

/// How a sandbox comes to its actor.
pub enum Origin {
    /// It is being launched; who asked waits for the outcome.
    Created {
        /// The launch in progress.
        launch: JoinHandle<Launched>,
        /// Who waits.
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    /// An earlier edge launched it.
    Adopted {
        /// What runs.
        grip: Arc<Grip>,
        /// The way to its agent, or why there is none. Of one that is paused it is looked for when it is resumed.
        guest: Option<Result<Arc<Connection>, String>>,
    },
}

/// What a sandbox holds of its node for as long as it lives.
pub struct Holds {
    /// Its room.
    pub permit: Permit,
    /// Its part of what it is charged to.
    pub counted: Counted,
    /// Its layers.
    pub layers: LayerUse,
}

/// The owner of one sandbox.
pub struct Actor {
    node: Arc<Node>,
    handle: Arc<Handle>,
    mailbox: mpsc::Receiver<Message>,
    stored: Stored,
    state: State,
    reason: Option<EndReason>,
    holds: Option<Holds>,
    launch: Option<JoinHandle<Launched>>,
    reply: Option<oneshot::Sender<Result<(), ApiError>>>,
    failure: Option<ApiError>,
    grip: Option<Arc<Grip>>,
    guest: Option<Arc<Connection>>,
    exit: Option<AsyncFd<OwnedFd>>,
    pausing: Option<Pausing>,
    /// It is being paused because nobody uses it.
    pauses_itself: bool,
    /// Who waits for it to be paused.
    pausers: Vec<oneshot::Sender<Result<(), ApiError>>>,
    pause_failure: Option<ApiError>,
    /// Memory comes back for as long as this is here.
    prefetch: Option<DropGuard>,
    grace_over: Option<Instant>,
    lifetime_over: Option<Instant>,
    exit_over: Option<Instant>,
}

/// Starts the task that owns a sandbox from here to its end.
pub fn spawn(
    node: &Arc<Node>,
    handle: Arc<Handle>,
    mailbox: mpsc::Receiver<Message>,
    stored: Stored,
    holds: Holds,
    origin: Origin,
) {
    let actor = Actor {
        node: Arc::clone(node),
        handle,
        mailbox,
        state: stored.sandbox.state,
        reason: stored.sandbox.reason.clone(),
        stored,
        holds: Some(holds),
        launch: None,
        reply: None,
        failure: None,
        grip: None,
        guest: None,
        exit: None,
        pausing: None,
        pauses_itself: false,
        pausers: Vec::new(),
        pause_failure: None,
        prefetch: None,
        grace_over: None,
        lifetime_over: None,
        exit_over: None,
    };
    node.tasks.spawn(actor.live(origin));
}

impl Actor {
    /// The whole life. A panic in it ends this sandbox as failed, and no other.
    async fn live(mut self, origin: Origin) {
        let lived = AssertUnwindSafe(self.run(origin)).catch_unwind().await;
        if lived.is_err() {
            tracing::error!(sandbox_id = %self.handle.id, "a sandbox's task panicked");
            let why = "a defect in the edge; its log has the place".to_owned();
            let ended = AssertUnwindSafe(self.apply(Event::AgentLost(why))).catch_unwind().await;
            if ended.is_err() {
                tracing::error!(sandbox_id = %self.handle.id, "a sandbox could not be ended after a panic");
            }
        }
    }

    async fn run(&mut self, origin: Origin) {
        match origin {
            Origin::Created { launch, reply } => {
                self.launch = Some(launch);
                self.reply = Some(reply);
            }
            Origin::Adopted { grip, guest } => self.adopted(grip, guest).await,
        }
        while !self.state.is_final() {
            self.turn().await;
        }
    }

    /// Waits for one thing to happen and does what follows from it.
    async fn turn(&mut self) {
        let timer = self.next_timer();
        tokio::select! {
            launched = async { match self.launch.as_mut() { Some(launch) => launch.await, None => pending().await } } => {
                self.launch = None;
                let launched = launched.unwrap_or_else(|error| Launched {
                    grip: None,
                    guest: Err(crate::error::internal("the launch broke off inside the edge", &error)),
                    phases: Vec::new(),
                });
                self.launched(launched).await;
            }
            Some(message) = self.mailbox.recv() => match message {
                Message::Stop { reason, grace_ms } => self.apply(Event::StopAsked { reason, grace_ms }).await,
                Message::Update { request, reply } => {
                    let _hung_up = reply.send(self.update(&request).await);
                }
                Message::Pause { reply } => {
                    self.pausers.push(reply);
                    self.apply(Event::PauseAsked).await;
                }
                Message::NoteUse => {
                    self.stored.sandbox.last_active_ms = self.handle.activity.last_active_ms();
                    self.write().await;
                }
            },
            done = async { match self.pausing.as_mut() { Some(pausing) => pausing.done().await, None => pending().await } } => {
                self.pausing = None;
                self.pause_done(done).await;
            }
            () = self.handle.resume_wanted.notified() => self.apply(Event::ResumeAsked).await,
            () = async { match &self.exit { Some(exit) => gone(exit).await, None => pending().await } } => {
                self.exit = None;
                self.apply(Event::GuestGone).await;
            }
            why = async { match &self.guest { Some(guest) => guest.closed().await, None => pending().await } } => {
                self.guest = None;
                // After SIGKILL the end of the last process is the better news; it comes at once.
                if self.state.is_usable() || self.exit.is_none() {
                    self.apply(Event::AgentLost(why)).await;
                }
            }
            () = async { match timer { Some(at) => tokio::time::sleep_until(at).await, None => pending().await } } => {
                self.timer().await;
            }
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        match self.state {
            State::Running => {
                let ttl = self.ttl().map(|ttl| match self.handle.activity.look(ttl) {
                    Idle::Over => Instant::now(),
                    Idle::NotBefore(at) => at,
                });
                [ttl, self.lifetime_over].into_iter().flatten().min()
            }
            State::Paused => {
                let left_ms = self.paused_ttl_ms()?.saturating_sub(self.paused_ms());
                Some(Instant::now() + Duration::from_millis(left_ms))
            }
            State::Stopping => {
                let poll = self.grace_over.map(|over| over.min(Instant::now() + QUIET_POLL));
                [poll, self.exit_over].into_iter().flatten().min()
            }
            _ => None,
        }
    }

    async fn timer(&mut self) {
        let now = Instant::now();
        if self.state == State::Stopping && self.exit_over.is_some_and(|over| over <= now) {
            tracing::error!(sandbox_id = %self.handle.id, "processes outlive SIGKILL");
            self.exit_over = None;
            self.apply(Event::GuestGone).await;
        } else if self.state == State::Stopping {
            let quiet = || self.guest.as_ref().is_some_and(|guest| guest.execs.is_quiet());
            if self.grace_over.is_some_and(|over| over <= now) || quiet() {
                self.grace_over = None;
                self.apply(Event::GraceOver).await;
            }
        } else if self.state == State::Paused {
            if self.paused_ttl_ms().is_some_and(|ttl| ttl <= self.paused_ms()) {
                self.apply(Event::StopAsked { reason: EndReason::PausedTooLong, grace_ms: 0 }).await;
            }
        } else if self.lifetime_over.is_some_and(|over| over <= now) {
            self.apply(Event::StopAsked { reason: EndReason::Lifetime, grace_ms: 0 }).await;
        } else if self.ttl().is_some_and(|ttl| self.handle.activity.look(ttl) == Idle::Over) {
            self.idle_over().await;
        }
    }

    async fn update(&mut self, request: &UpdateSandboxRequest) -> Result<(), ApiError> {
        let running = self.grip.clone().filter(|_| self.state.is_usable());
        let grip = running.ok_or_else(|| not_running(&self.stored.sandbox))?;
        let limits = plan::updated(&self.stored.spec.limits, request, &self.node.room.capacity())?;
        let wanted = limits.clone();
        let set = tokio::task::spawn_blocking(move || grip.with(|instance| instance.set_cpu(&wanted)));
        match set.await.map_err(|e| internal("the limits could not be set", &e))? {
            None => return Err(not_running(&self.stored.sandbox)),
            Some(set) => set.map_err(|e| internal("the limits could not be set", &e))?,
        }
        self.handle
            .events
            .push("updated", json!({ "cpu_class": limits.cpu_class, "cpu_weight": limits.cpu_weight }));
        self.stored.sandbox.limits = SandboxLimits::from(&limits);
        self.stored.spec.limits = limits;
        self.handle.publish(self.stored.sandbox.clone());
        self.write().await;
        Ok(())
    }

    fn ttl(&self) -> Option<Duration> {
        let seconds = self.stored.spec.limits.ttl_running_stop_s;
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }

    async fn launched(&mut self, launched: Launched) {
        if let Some(grip) = launched.grip {
            self.stored.anchor = grip.with(|instance| instance.anchor().clone());
            self.hold(grip);
        }
        self.stored.sandbox.launch_phases.extend(launched.phases);
        match launched.guest {
            Ok(guest) => {
                self.guest = Some(guest);
                if self.state == State::Creating {
                    self.apply(Event::Launched).await;
                } else {
                    // A stop came first; its Kill found nothing to kill then.
                    self.kill();
                }
            }
            Err(error) => {
                let message = error.0.message.clone();
                self.failure = Some(error);
                self.apply(Event::LaunchFailed(message)).await;
            }
        }
    }

    async fn adopted(&mut self, grip: Arc<Grip>, guest: Option<Result<Arc<Connection>, String>>) {
        self.hold(grip);
        self.handle.events.push("adopted", json!({}));
        match guest {
            // It is paused, and stays so.
            None => {}
            Some(Err(why)) => self.apply(Event::AgentLost(why)).await,
            Some(Ok(guest)) => {
                self.guest = Some(guest);
                match self.state {
                    State::Creating => self.apply(Event::Launched).await,
                    State::Running => self.open_for_business(),
                    // The edge died in the middle of a stop: what is left of the grace is not known.
                    _ => self.apply(Event::StopAsked { reason: EndReason::Asked, grace_ms: 0 }).await,
                }
            }
        }
    }

    fn hold(&mut self, grip: Arc<Grip>) {
        let exit = grip.with(|instance| instance.exit_fd().try_clone_to_owned().and_then(watched));
        match exit {
            Some(Ok(exit)) => self.exit = Some(exit),
            Some(Err(error)) => {
                tracing::error!(sandbox_id = %self.handle.id, %error, "a sandbox's end cannot be watched");
            }
            None => {}
        }
        self.handle.set_grip(&grip);
        self.grip = Some(grip);
    }

    /// Requests may come in, and the clocks run.
    fn open_for_business(&mut self) {
        if let (Some(grip), Some(guest)) = (&self.grip, &self.guest) {
            let live = Live { grip: Arc::clone(grip), guest: Arc::clone(guest) };
            self.handle.set_live(Some(Arc::new(live)));
        }
        let sandbox = &self.stored.sandbox;
        let paused_ms = sandbox.pauses.map_or(0, |pauses| pauses.total_ms);
        let lived_ms = now_ms().saturating_sub(sandbox.running_ms.unwrap_or_else(now_ms) + paused_ms);
        let left_ms = (self.stored.spec.limits.max_lifetime_s * 1000).saturating_sub(lived_ms);
        self.lifetime_over = Some(Instant::now() + Duration::from_millis(left_ms));
    }

    async fn apply(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let before = self.state;
            let (state, reason, actions) = step(self.state, self.reason.take(), event);
            self.state = state;
            self.reason = reason;
            self.entered(before);
            for action in actions {
                match action {
                    Action::Record => self.record(before).await,
                    Action::Pause => self.begin_pause(),
                    Action::BreakOff => self.break_off().await,
                    Action::Thaw => next = Some(self.thaw().await),
                    Action::Terminate { grace_ms } => self.terminate(grace_ms),
                    Action::Kill => self.kill(),
                    Action::CleanUp => self.clean_up().await,
                }
            }
        }
        self.answer_pausers();
    }

    /// Does what goes with a state before anybody sees it.
    fn entered(&mut self, before: State) {
        match (before, self.state) {
            (State::Creating, State::Running) => {
                self.stored.sandbox.running_ms = Some(now_ms());
                self.handle.activity.touch();
                self.open_for_business();
            }
            (State::Resuming, State::Running) => self.open_for_business(),
            (State::Paused, State::Paused) => {}
            (State::Paused, _) => {
                let paused_ms = pause::note_end(&mut self.stored.sandbox.pauses);
                self.handle.events.push("pause_over", json!({ "paused_ms": paused_ms }));
            }
            _ => {}
        }
    }

    /// Publishes the state and writes it down. A final one is shown as `stopping` until its clean-up.
    async fn record(&mut self, before: State) {
        let shown = if self.state.is_final() { State::Stopping } else { self.state };
        let sandbox = &mut self.stored.sandbox;
        sandbox.state = shown;
        sandbox.reason.clone_from(&self.reason);
        sandbox.last_active_ms = self.handle.activity.last_active_ms();
        self.handle.publish(sandbox.clone());
        let id = &self.handle.id;
        match shown {
            State::Running if before != State::Creating => {
                self.handle.events.push("resumed", json!({}));
            }
            State::Running => {
                self.handle.events.push("running", json!({ "phases": sandbox.launch_phases }));
                tracing::info!(
                    sandbox_id = %id,
                    elapsed_ms = now_ms().saturating_sub(sandbox.created_ms),
                    "sandbox runs"
                );
                if let Some(reply) = self.reply.take() {
                    let _ = reply.send(Ok(()));
                }
            }
            State::Paused => {
                self.handle.events.push("paused", json!({ "pauses": sandbox.pauses }));
            }
            State::Stopping => {
                // Nothing new goes in; what is in flight goes on until the end.
                self.handle.set_live(None);
                self.handle.events.push("stopping", json!({ "reason": self.reason }));
                tracing::info!(sandbox_id = %id, reason = ?self.reason, "sandbox ends");
            }
            _ => {}
        }
        self.write().await;
    }

    async fn write(&self) {
        let (stored, node) = (self.stored.clone(), Arc::clone(&self.node));
        let written = tokio::task::spawn_blocking(move || stored.write(&node.config.state_dir)).await;
        if let Ok(Err(error)) = written {
            tracing::error!(sandbox_id = %self.handle.id, %error, "a sandbox's record cannot be written");
        }
    }

    fn terminate(&mut self, grace_ms: u64) {
        if let Some(guest) = &self.guest {
            guest.tell(Request::Terminate(Empty {}));
        }
        self.grace_over = Some(Instant::now() + Duration::from_millis(grace_ms));
    }

    fn kill(&mut self) {
        self.grace_over = None;
        self.prefetch = None;
        if let Some(grip) = &self.grip {
            grip.with(|instance| instance.kill());
            self.exit_over = Some(Instant::now() + EXIT_MAX);
        }
    }

    /// The instance, once nobody does anything with it: a pack may be at it for half a second.
    async fn let_go(&mut self) -> Option<Arc<dyn Instance>> {
        let grip = self.grip.take()?;
        match tokio::task::spawn_blocking(move || grip.let_go()).await {
            Ok(instance) => instance,
            Err(error) => {
                tracing::error!(sandbox_id = %self.handle.id, %error, "letting go of a sandbox panicked");
                None
            }
        }
    }

    /// Ends what is left and lets go of everything, then shows the final state.
    async fn clean_up(&mut self) {
        self.prefetch = None;
        if let Some(guest) = self.guest.take() {
            guest.close("the sandbox ended");
        }
        if let Some(instance) = self.let_go().await {
            instance.kill();
            if let Some(exit) = self.exit.take() {
                let _ = tokio::time::timeout(EXIT_MAX, gone(&exit)).await;
            }
            let handle = Arc::clone(&self.handle);
            let removed = tokio::task::spawn_blocking(move || {
                let last = usage(&*instance, &handle.traffic);
                (last, instance.clean_up())
            });
            match removed.await {
                Ok((last, cleaned)) => {
                    self.stored.sandbox.usage = Some(last);
                    if let Err(error) = cleaned {
                        let error = chain(&error);
                        tracing::error!(sandbox_id = %self.handle.id, error, "something of a sandbox is left");
                        self.handle.events.push("left_behind", json!({ "error": error }));
                    }
                }
                Err(error) => tracing::error!(sandbox_id = %self.handle.id, %error, "a clean-up panicked"),
            }
        }
        self.holds = None;
        self.farewell().await;
    }

    async fn farewell(&mut self) {
        let sandbox = &mut self.stored.sandbox;
        sandbox.state = self.state;
        sandbox.reason.clone_from(&self.reason);
        sandbox.ended_ms = Some(now_ms());
        self.handle.events.push("ended", json!({ "state": self.state, "reason": self.reason }));
        self.handle.events.shorten();
        let sandbox = sandbox.clone();
        // A create that was refused for what the caller asked leaves no trace.
        let refused =
            self.failure.as_ref().is_some_and(|e| e.kind() == dsec_model::ErrorKind::InvalidArgument);
        let node = Arc::clone(&self.node);
        let ended = Ended {
            sandbox: sandbox.clone(),
            key: self.stored.key.clone().filter(|_| !refused),
            events: self.handle.events.ndjson(),
        };
        let noted = tokio::task::spawn_blocking(move || {
            let logged = if refused { Ok(()) } else { node.ended.append(&ended) };
            let random = ended.sandbox.id.random();
            logged.and(record::put_away(&node.config.state_dir, random, &node.records))
        });
        if let Ok(Err(error)) = noted.await {
            tracing::warn!(sandbox_id = %self.handle.id, %error, "the end of a sandbox is not noted in full");
        }
        tracing::info!(sandbox_id = %self.handle.id, state = self.state.as_str(), "sandbox ended");
        if refused {
            self.node.registry.remove(&self.handle.id);
        }
        self.handle.publish(sandbox);
        if let Some(reply) = self.reply.take() {
            let error =
                self.failure.take().unwrap_or_else(|| crate::error::not_running(&self.handle.record()));
            let _ = reply.send(Err(error));
        }
    }
}

/// Resolves when the descriptor is readable: the last process is gone.
async fn gone(exit: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = exit.readable().await else { return pending().await };
        // Tokio's readiness is a hint; the kernel is asked again.
        let mut polled =
            [rustix::event::PollFd::from_borrowed_fd(exit.get_ref().as_fd(), rustix::event::PollFlags::IN)];
        let instant = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut polled, Some(&instant)).is_ok_and(|n| n > 0) {
            return;
        }
        ready.clear_ready();
    }
}
