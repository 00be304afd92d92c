//! The channel to one sandbox's agent.
//!
//! A request is written by its caller on the spot; only what the socket does not take at once waits
//! for the connection's task, which also reads answers and events. So a request costs no hop between
//! tasks on its way down and one on its way up.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_model::ExecId;
use dsec_proto::guest::{
    self, CLOCK_GENERATION, Empty, FILE_PIPES_GENERATION, FromGuest, GENERATION, Hello, HelloReply, Reply,
    Request, ToGuest,
};
use dsec_proto::rest::ApiError;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot, watch};

use super::codec::{self, CodecError, Incoming};
use super::execs::ExecTable;
use super::{CallError, IN_FLIGHT_MAX, REPLY_MAX};
use crate::error::chain;

/// Bytes that may wait for the socket. An agent that reads nothing costs this much and no more.
const BACKLOG_MAX: usize = 16 << 20;

type Answer = Result<(Reply, Vec<OwnedFd>), CallError>;

/// A frame that the socket did not take whole.
struct Unsent {
    bytes: Vec<u8>,
    from: usize,
    /// Empty once the first byte is out.
    fds: Vec<OwnedFd>,
}

#[derive(Default)]
struct Backlog {
    frames: VecDeque<Unsent>,
    bytes: usize,
}

struct Waiter {
    answer: oneshot::Sender<Answer>,
    /// The exec that the request starts. Its table entry follows the answer even when the caller has
    /// hung up.
    starts: Option<ExecId>,
}

/// The channel to one agent, with the table of what the agent runs.
pub struct Connection {
    socket: AsyncFd<OwnedFd>,
    backlog: Mutex<Backlog>,
    unsent: Notify,
    waiters: Mutex<HashMap<u64, Waiter>>,
    next_id: AtomicU64,
    closed: watch::Sender<Option<String>>,
    /// Generation of the agent.
    generation: AtomicU32,
    /// How often the agent was told to stand still or to go on: odd while it stands still.
    turns: AtomicU64,
    /// What the agent runs.
    pub execs: Arc<ExecTable>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("socket", &self.socket).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A waiter is forgotten with its caller, unless its request starts an exec.
struct Forget<'a> {
    connection: &'a Connection,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        let mut waiters = lock(&self.connection.waiters);
        if waiters.get(&self.id).is_some_and(|w| w.starts.is_none()) {
            waiters.remove(&self.id);
        }
    }
}

impl Connection {
    /// Says hello on a connected socket and fills the table with what the agent holds.
    ///
    /// # Errors
    /// The agent does not answer, or not as an agent does.
    pub async fn open(stream: UnixStream, execs: Arc<ExecTable>) -> Result<Arc<Self>, CallError> {
        let io = |e: std::io::Error| CallError::Closed(e.to_string());
        stream.set_nonblocking(true).map_err(io)?;
        let connection = Arc::new(Self {
            socket: codec::watched(OwnedFd::from(stream)).map_err(io)?,
            backlog: Mutex::default(),
            unsent: Notify::new(),
            waiters: Mutex::default(),
            next_id: AtomicU64::new(1),
            closed: watch::Sender::new(None),
            generation: AtomicU32::new(0),
            turns: AtomicU64::new(0),
            execs,
        });
        tokio::spawn(Arc::clone(&connection).run());
        match connection.hello().await {
            Ok(()) => Ok(connection),
            Err(error) => {
                connection.close("no hello");
                Err(error)
            }
        }
    }

    async fn hello(self: &Arc<Self>) -> Result<(), CallError> {
        let request = Request::Hello(Hello { generation: GENERATION });
        match self.call(request, Vec::new()).await? {
            (Reply::Hello(HelloReply { generation, execs, sessions }), _) => {
                self.generation.store(generation, Ordering::Relaxed);
                self.execs.restore(execs, sessions);
                Ok(())
            }
            _ => Err(CallError::Unexpected),
        }
    }

    /// Resolves with the reason when the channel has closed.
    pub async fn closed(&self) -> String {
        let mut closed = self.closed.subscribe();
        match closed.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "the connection is gone".to_owned(),
        }
    }

    /// Closes the channel; everyone who waits is told. Idempotent.
    pub fn close(&self, why: &str) {
        let first = self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            if first {
                *closed = Some(why.to_owned());
            }
            first
        });
        if !first {
            return;
        }
        // Wakes the connection's task, which then ends and drops its share of the socket.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        lock(&self.backlog).frames.clear();
        for (_, waiter) in lock(&self.waiters).drain() {
            let _ = waiter.answer.send(Err(CallError::Closed(why.to_owned())));
        }
        self.execs.lost(why);
    }

    /// Sends a request and waits for its answer. A caller that is dropped forgets the answer; the
    /// request is sent whole or not at all.
    ///
    /// # Errors
    /// The agent refused, is gone, or is late.
    pub async fn call(&self, request: Request, fds: Vec<OwnedFd>) -> Answer {
        let (id, answer) = self.begin(request, fds, None)?;
        let _forget = Forget { connection: self, id };
        self.wait(answer).await
    }

    /// [`Self::call`] for a request that is answered with nothing but `Done`; its descriptors.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn done(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Vec<OwnedFd>, CallError> {
        match self.call(request, fds).await? {
            (Reply::Done(Empty {}), fds) => Ok(fds),
            _ => Err(CallError::Unexpected),
        }
    }

    /// The cgroup that the agent shall start a file operation or a check in, for an agent that knows of it.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn file_cgroup(&self) -> Result<Option<OwnedFd>, ApiError> {
        if self.generation.load(Ordering::Relaxed) < FILE_PIPES_GENERATION {
            return Ok(None);
        }
        self.execs.file_cgroup()
    }

    /// Whether the agent's clock can stand still: one that an older release started knows nothing of that.
    pub fn can_stand_still(&self) -> bool {
        self.generation.load(Ordering::Relaxed) >= CLOCK_GENERATION
    }

    /// Has the agent's clock stand still, and everyone who waits for an answer wait for as long as it does.
    ///
    /// # Errors
    /// As [`Self::call`]; all wait no longer than usual then.
    pub async fn stand_still(&self) -> Result<(), CallError> {
        self.turn(true);
        let told = self.done(Request::StandStill(Empty {}), Vec::new()).await;
        if told.is_err() {
            self.go_on();
        }
        told.map(drop)
    }

    /// Has the agent's clock go on, if it does not.
    pub fn go_on(&self) {
        self.turn(false);
        self.tell(Request::GoOn(Empty {}));
    }

    /// Notes what the agent is told. Only its sandbox's owner tells it.
    fn turn(&self, still: bool) {
        let turns = self.turns.load(Ordering::SeqCst);
        if (turns % 2 == 1) != still {
            self.turns.store(turns + 1, Ordering::SeqCst);
        }
    }

    /// Starts an exec whose entry is in the table. The entry follows the agent's answer whether or
    /// not the caller is still there: it is removed when nothing was run.
    ///
    /// # Errors
    /// As [`Self::call`]; nothing was run then, or it is killed when the agent was merely late.
    pub async fn start(
        &self,
        exec: &ExecId,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, CallError> {
        let begun = self.begin(request, fds, Some(exec.clone()));
        let (id, answer) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.execs.abandon(exec);
                return Err(error);
            }
        };
        match self.wait(answer).await {
            Ok((reply, _)) => Ok(reply),
            Err(error) => {
                if matches!(error, CallError::TimedOut) {
                    lock(&self.waiters).remove(&id);
                    self.execs.abandon(exec);
                    let signal = guest::ExecSignal { exec: exec.to_string(), signal: 9, tree: true };
                    self.tell(Request::ExecSignal(signal));
                }
                Err(error)
            }
        }
    }

    async fn wait(&self, mut answer: oneshot::Receiver<Answer>) -> Answer {
        loop {
            let turns = self.turns.load(Ordering::SeqCst);
            match tokio::time::timeout(REPLY_MAX, &mut answer).await {
                Ok(Ok(answer)) => return answer,
                Ok(Err(_)) => return Err(CallError::Closed("the connection is gone".to_owned())),
                Err(_) if turns.is_multiple_of(2) && self.turns.load(Ordering::SeqCst) == turns => {
                    return Err(CallError::TimedOut);
                }
                // It stood still for some of that time.
                Err(_) => {}
            }
        }
    }

    fn begin(
        &self,
        request: Request,
        fds: Vec<OwnedFd>,
        starts: Option<ExecId>,
    ) -> Result<(u64, oneshot::Receiver<Answer>), CallError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, receiver) = oneshot::channel();
        {
            let mut waiters = lock(&self.waiters);
            if let Some(why) = self.closed.borrow().as_ref() {
                return Err(CallError::Closed(why.clone()));
            }
            if waiters.len() >= IN_FLIGHT_MAX {
                return Err(CallError::Busy);
            }
            waiters.insert(id, Waiter { answer, starts });
        }
        if let Err(error) = self.send(id, request, fds) {
            lock(&self.waiters).remove(&id);
            return Err(error);
        }
        Ok((id, receiver))
    }

    /// Sends a request that wants no answer. Nothing is said when it cannot be sent: the channel
    /// is closed then, and everybody learns of that otherwise.
    pub fn tell(&self, request: Request) {
        let _ = self.send(0, request, Vec::new());
    }

    fn send(&self, id: u64, request: Request, fds: Vec<OwnedFd>) -> Result<(), CallError> {
        let frame = ToGuest { id, fds: fds.len() as u32, request: Some(request) };
        let mut bytes = Vec::new();
        guest::encode(&frame, &mut bytes);
        let mut backlog = lock(&self.backlog);
        if backlog.bytes + bytes.len() > BACKLOG_MAX {
            return Err(CallError::Busy);
        }
        let mut unsent = Unsent { bytes, from: 0, fds };
        if backlog.frames.is_empty()
            && push(&self.socket, &mut unsent).map_err(|e| CallError::Closed(e.to_string()))?
        {
            return Ok(());
        }
        backlog.bytes += unsent.bytes.len();
        backlog.frames.push_back(unsent);
        drop(backlog);
        self.unsent.notify_one();
        Ok(())
    }

    /// Sends what waits, as the socket takes it.
    async fn drain(&self) -> std::io::Result<()> {
        loop {
            if lock(&self.backlog).frames.is_empty() {
                self.unsent.notified().await;
                continue;
            }
            let mut ready = self.socket.writable().await?;
            let sent = ready.try_io(|_| {
                let mut backlog = lock(&self.backlog);
                while let Some(mut frame) = backlog.frames.pop_front() {
                    let whole = match push(&self.socket, &mut frame) {
                        Ok(whole) => whole,
                        Err(error) => return Err(error),
                    };
                    if !whole {
                        backlog.frames.push_front(frame);
                        return Err(std::io::ErrorKind::WouldBlock.into());
                    }
                    backlog.bytes -= frame.bytes.len();
                }
                Ok(())
            });
            if let Ok(sent) = sent {
                sent?;
            }
        }
    }

    async fn run(self: Arc<Self>) {
        /// Whatever ends the task, a panic included, closes the channel.
        struct CloseAtEnd(Arc<Connection>);
        impl Drop for CloseAtEnd {
            fn drop(&mut self) {
                self.0.close("its connection failed inside the edge");
            }
        }
        let guard = CloseAtEnd(self);
        let this = &guard.0;
        let why = tokio::select! {
            why = this.read() => why,
            failed = this.drain() => match failed {
                Ok(()) => "nothing more to send".to_owned(),
                Err(error) => error.to_string(),
            },
        };
        this.close(&why);
    }

    async fn read(self: &Arc<Self>) -> String {
        let mut incoming = Incoming::default();
        loop {
            match incoming.next::<FromGuest>(&self.socket).await {
                Ok(Some((frame, fds))) => self.received(frame, fds),
                Ok(None) => return "the agent closed it".to_owned(),
                Err(CodecError::Io(error)) => return error.to_string(),
                Err(error) => return chain(&error),
            }
        }
    }

    fn received(self: &Arc<Self>, frame: FromGuest, mut fds: Vec<OwnedFd>) {
        // A reply of a generation that this edge does not know: its waiter is told, an event is skipped.
        let reply = frame.reply;
        if frame.reply_to == 0 {
            match reply {
                Some(Reply::Output(output)) => self.execs.output(output),
                Some(Reply::Exited(info)) => {
                    for exec in self.execs.exited(info) {
                        self.tell(Request::ExecForget(guest::ExecRef { exec: exec.into() }));
                    }
                }
                Some(Reply::SessionEnded(session)) => self.execs.session_ended(&session.session),
                _ => {}
            }
            return;
        }
        let Some(waiter) = lock(&self.waiters).remove(&frame.reply_to) else { return };
        let answer = match reply {
            Some(Reply::Error(error)) => Err(CallError::Guest(error)),
            Some(reply) => Ok(reply),
            None => Err(CallError::Unexpected),
        };
        if let Some(exec) = &waiter.starts {
            match &answer {
                Ok(Reply::ExecStarted(started)) => self.execs.started(self, exec, started.pid, fds.pop()),
                Ok(Reply::Session(info)) => self.execs.started(self, exec, info.pid, fds.pop()),
                _ => self.execs.abandon(exec),
            }
        }
        let _ = waiter.answer.send(answer.map(|reply| (reply, fds)));
    }
}

/// Sends what the socket takes of a frame; true when that is all of it.
fn push(socket: &AsyncFd<OwnedFd>, frame: &mut Unsent) -> std::io::Result<bool> {
    while frame.from < frame.bytes.len() {
        let fds: Vec<_> = frame.fds.iter().map(AsFd::as_fd).collect();
        match codec::send(socket.get_ref().as_fd(), &frame.bytes[frame.from..], &fds) {
            Ok(sent) => {
                frame.from += sent;
                frame.fds.clear();
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
