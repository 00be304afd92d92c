//! One sandbox as the rest of the edge sees it: a handle with a mailbox, a snapshot of the record,
//! and, while it runs, the way into it.

pub mod actor;
pub mod create;
pub mod events;
pub mod idle;
pub mod pause;
pub mod plan;
pub mod record;
pub mod run;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use dsec_backend::Instance;
use dsec_model::{EndReason, ErrorKind, SandboxId, State};
use dsec_proto::rest::{ApiError, Sandbox, UpdateSandboxRequest, Usage};
use serde_json::json;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

use crate::error::{agent_gone, not_running};
use crate::guest::Connection;
use events::EventRing;
use idle::{Activity, Busy};

/// Messages that may wait for one sandbox's actor. Only stops and a rare note travel this way, and
/// stops that meet one in progress do not, so more than a few is a flood.
pub const MAILBOX: usize = 32;

/// Threads that work on one sandbox's files at once: enough for its disk, and few of the node's.
const DISK_THREADS: usize = 8;

/// What an actor is told.
#[derive(Debug)]
pub enum Message {
    /// End the sandbox.
    Stop {
        /// Why.
        reason: EndReason,
        /// Milliseconds between SIGTERM and SIGKILL.
        grace_ms: u64,
    },
    /// Give it other limits, and say when they hold.
    Update {
        /// What is to be other.
        request: UpdateSandboxRequest,
        /// Who waits.
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Pause the sandbox, and say when it is.
    Pause {
        /// Who waits.
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Write the record down again: its last use has moved.
    NoteUse,
}

/// The backend's side of a sandbox, until its clean-up takes it. Requests that outlast the sandbox hold
/// this and not the instance, so none of them can keep the backend from being taken down.
#[derive(Debug)]
pub struct Grip {
    instance: RwLock<Option<Arc<dyn Instance>>>,
}

impl Grip {
    /// Holds an instance.
    pub fn new(instance: Arc<dyn Instance>) -> Arc<Self> {
        Arc::new(Self { instance: RwLock::new(Some(instance)) })
    }

    /// Does something short with the instance, while it is there.
    pub fn with<T>(&self, f: impl FnOnce(&(dyn Instance + 'static)) -> T) -> Option<T> {
        self.instance.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(f)
    }

    /// Gives the instance to who ends it; from then on there is none here.
    pub fn let_go(&self) -> Option<Arc<dyn Instance>> {
        self.instance.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Gives the cgroup of an exec back, where it has one.
    pub fn release_cgroup(&self, number: Option<u32>) {
        if let Some(number) = number {
            self.with(|instance| instance.release_exec_cgroup(number));
        }
    }
}

/// The way into a running sandbox.
#[derive(Debug)]
pub struct Live {
    /// The backend's side.
    pub grip: Arc<Grip>,
    /// The agent's.
    pub guest: Arc<Connection>,
}

/// Bytes that callers moved.
#[derive(Debug, Default)]
pub struct Traffic {
    into: AtomicU64,
    out_of: AtomicU64,
}

impl Traffic {
    /// Bytes went into the sandbox.
    pub fn count_in(&self, bytes: usize) {
        self.into.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes came out of it.
    pub fn count_out(&self, bytes: usize) {
        self.out_of.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn restored(usage: Option<&Usage>) -> Self {
        let of = |f: fn(&Usage) -> u64| AtomicU64::new(usage.map_or(0, f));
        Self { into: of(|u| u.bytes_in), out_of: of(|u| u.bytes_out) }
    }

    /// Bytes in and out so far.
    pub fn read(&self) -> (u64, u64) {
        (self.into.load(Ordering::Relaxed), self.out_of.load(Ordering::Relaxed))
    }
}

/// One sandbox, running or remembered.
#[derive(Debug)]
pub struct Handle {
    /// Its id.
    pub id: SandboxId,
    /// When its create arrived, Unix ms.
    pub created_ms: u64,
    /// Who uses it and when last.
    pub activity: Arc<Activity>,
    /// What happened to it.
    pub events: Arc<EventRing>,
    /// Bytes in and out.
    pub traffic: Traffic,
    /// Turns of threads that read and write its files.
    pub disk_threads: Semaphore,
    /// The turn of who packs it: each pack goes on from the one before.
    pub packing: Arc<tokio::sync::Mutex<()>>,
    mailbox: mpsc::Sender<Message>,
    record: watch::Sender<Arc<Sandbox>>,
    /// Somebody wants to use it, and it is paused. However many want to, the actor is told once.
    resume_wanted: Notify,
    live: RwLock<Option<Arc<Live>>>,
    grip: OnceLock<Arc<Grip>>,
}

impl Handle {
    /// A handle and its actor's end of the mailbox.
    pub fn new(record: Sandbox) -> (Arc<Self>, mpsc::Receiver<Message>) {
        let (mailbox, receiver) = mpsc::channel(MAILBOX);
        let handle = Arc::new(Self {
            id: record.id.clone(),
            created_ms: record.created_ms,
            activity: Arc::new(Activity::new(record.last_active_ms)),
            events: Arc::new(EventRing::default()),
            traffic: Traffic::restored(record.usage.as_ref()),
            disk_threads: Semaphore::new(DISK_THREADS),
            packing: Arc::default(),
            mailbox,
            record: watch::Sender::new(Arc::new(record)),
            resume_wanted: Notify::new(),
            live: RwLock::new(None),
            grip: OnceLock::new(),
        });
        (handle, receiver)
    }

    /// A sandbox that has ended: a record and nothing else.
    pub fn ended(record: Sandbox) -> Arc<Self> {
        Self::new(record).0
    }

    /// The record now.
    pub fn record(&self) -> Arc<Sandbox> {
        let record = Arc::clone(&self.record.borrow());
        let active = self.activity.last_active_ms();
        if record.state.is_final() || record.last_active_ms == active {
            return record;
        }
        Arc::new(Sandbox { last_active_ms: active, ..Sandbox::clone(&record) })
    }

    /// Its state now.
    pub fn state(&self) -> State {
        self.record.borrow().state
    }

    /// Publishes a changed record.
    pub fn publish(&self, record: Sandbox) {
        self.record.send_replace(Arc::new(record));
    }

    /// Waits until the record is in one of `states` or a final one. Cancel-safe.
    pub async fn wait_for(&self, wanted: impl Fn(State) -> bool) -> Arc<Sandbox> {
        let mut record = self.record.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        let _ = record.wait_for(|r| r.state.is_final() || wanted(r.state)).await;
        self.record()
    }

    /// Opens or closes the way into it.
    pub fn set_live(&self, live: Option<Arc<Live>>) {
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }

    /// The way into it, whatever its state.
    pub fn peek(&self) -> Option<Arc<Live>> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The backend's side of it, from its launch to its clean-up.
    pub fn grip(&self) -> Option<&Arc<Grip>> {
        self.grip.get()
    }

    fn set_grip(&self, grip: &Arc<Grip>) {
        // It has one in its life.
        let _there = self.grip.set(Arc::clone(grip));
    }

    /// The way into it for one request, which keeps it from being idle. One that is paused is resumed first. Cancel-safe.
    ///
    /// # Errors
    /// It does not run.
    pub async fn enter(self: &Arc<Self>) -> Result<Entered, ApiError> {
        let busy = self.activity.busy();
        let live = self.awake().await?;
        Ok(Entered { handle: Arc::clone(self), live, _busy: busy })
    }

    async fn awake(&self) -> Result<Arc<Live>, ApiError> {
        let mut record = self.record.subscribe();
        loop {
            let state = record.borrow_and_update().state;
            match state {
                State::Running => return self.peek().ok_or_else(|| agent_gone("its connection is closed")),
                State::Pausing | State::Paused => self.resume_wanted.notify_one(),
                State::Resuming => {}
                _ => return Err(not_running(&self.record.borrow())),
            }
            // The sender lives in `self`, so waiting cannot fail.
            let _ = record.changed().await;
        }
    }

    /// Resumes it if it is paused, and waits until it runs. Many may ask. Cancel-safe.
    ///
    /// # Errors
    /// It has ended, or does not run yet.
    pub async fn resume(self: &Arc<Self>) -> Result<Arc<Sandbox>, ApiError> {
        self.enter().await.map(|entered| entered.handle.record())
    }

    /// Pauses it and waits until its memory was given back. Many may ask; of one that is paused nothing is changed.
    ///
    /// # Errors
    /// It does not run, cannot be paused, or somebody used it meanwhile; it runs on.
    pub async fn pause(&self) -> Result<Arc<Sandbox>, ApiError> {
        self.ask(|reply| Message::Pause { reply }).await
    }

    /// Tells its actor something that it answers, and waits for the answer.
    async fn ask(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<(), ApiError>>) -> Message,
    ) -> Result<Arc<Sandbox>, ApiError> {
        let (reply, answer) = oneshot::channel();
        match self.mailbox.try_send(message(reply)) {
            Ok(()) => match answer.await {
                Ok(answer) => answer.map(|()| self.record()),
                Err(_ended) => Err(not_running(&self.record.borrow())),
            },
            Err(mpsc::error::TrySendError::Closed(_)) => Err(not_running(&self.record.borrow())),
            Err(mpsc::error::TrySendError::Full(_)) => Err(self.flooded()),
        }
    }

    fn flooded(&self) -> ApiError {
        let message = format!("{MAILBOX} requests to end, pause or update sandbox {} wait already", self.id);
        ApiError::new(ErrorKind::Unavailable, message).hint("wait for one of them")
    }

    /// For a look at what it wrote, while it runs or stands still. Keeps it from being idle, and does not resume it.
    ///
    /// # Errors
    /// It neither runs nor is paused.
    pub fn look_into(self: &Arc<Self>) -> Result<LookedInto, ApiError> {
        let busy = self.activity.busy();
        let record = self.record.borrow();
        if !record.state.is_usable() {
            return Err(not_running(&record));
        }
        drop(record);
        let grip = self.grip().ok_or_else(|| agent_gone("it was not launched"))?;
        Ok(LookedInto { handle: Arc::clone(self), grip: Arc::clone(grip), _busy: busy })
    }

    /// Has the actor write the last use down, when it has nothing better to do.
    pub fn note_use(&self) {
        let _ = self.mailbox.try_send(Message::NoteUse);
    }

    /// Gives it other limits. If the caller hangs up, they are changed all the same.
    ///
    /// # Errors
    /// They cannot be had; it has ended or is ending. Then nothing has changed.
    pub async fn update(&self, request: UpdateSandboxRequest) -> Result<Arc<Sandbox>, ApiError> {
        self.ask(|reply| Message::Update { request, reply }).await
    }

    /// Asks for its end and waits until nothing is left of it. Many may ask; all get the one result.
    ///
    /// # Errors
    /// Its mailbox is full.
    pub async fn stop(&self, reason: EndReason, grace_ms: u64) -> Result<Arc<Sandbox>, ApiError> {
        let state = self.state();
        if !state.is_final() {
            self.events.push("stop_asked", json!({ "reason": reason, "grace_ms": grace_ms }));
            let sent = self.mailbox.try_send(Message::Stop { reason, grace_ms });
            // A full mailbox before a stop holds stops already; a closed one belongs to an end in progress.
            if matches!(sent, Err(mpsc::error::TrySendError::Full(_))) && state != State::Stopping {
                return Err(self.flooded());
            }
        }
        Ok(self.wait_for(|_| false).await)
    }
}

/// A running sandbox in one request's hands.
#[derive(Debug)]
pub struct Entered {
    /// The sandbox.
    pub handle: Arc<Handle>,
    /// The way into it.
    pub live: Arc<Live>,
    _busy: Busy,
}

impl Entered {
    /// The agent's channel.
    pub fn guest(&self) -> &Arc<Connection> {
        &self.live.guest
    }
}

/// A sandbox that runs or is paused, in the hands of a request that only looks at what it wrote.
#[derive(Debug)]
pub struct LookedInto {
    /// The sandbox.
    pub handle: Arc<Handle>,
    /// The backend's side.
    pub grip: Arc<Grip>,
    _busy: Busy,
}

/// Numbers of a sandbox: those of the host and those counted here.
pub fn usage(instance: &dyn Instance, traffic: &Traffic) -> Usage {
    let raw = instance.usage();
    let (bytes_in, bytes_out) = traffic.read();
    Usage {
        cpu_seconds: raw.cpu.as_secs_f64(),
        memory_bytes: raw.memory_bytes,
        memory_peak_bytes: raw.memory_peak_bytes,
        disk_bytes: raw.disk_bytes,
        pids: raw.pids,
        bytes_in,
        bytes_out,
        oom_kills: raw.oom_kills,
    }
}
