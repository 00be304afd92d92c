//! One command: what is known of it, and the word that something changed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_model::{ExecId, SessionId};
use dsec_proto::guest::{ExecInfo, Stream};
use dsec_proto::rest;
use tokio::sync::watch;

use super::stdin::StdinPipe;
use crate::clock::now_ms;

/// One of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Standard output, or a terminal's output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Which {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Stdout => "out",
            Self::Stderr => "err",
        }
    }
}

/// A stream as the agent last told it.
#[derive(Debug, Default, Clone)]
pub struct StreamState {
    /// Bytes written by the command.
    pub total: u64,
    /// Bytes kept, from `start` on.
    pub kept: u64,
    /// First offset kept.
    pub start: u64,
    /// They are in the spool file.
    pub spooled: bool,
    /// They are here.
    pub head: Vec<u8>,
}

impl StreamState {
    /// First offset that cannot be read yet, or ever.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.kept)
    }

    fn apply(&mut self, news: &Stream) {
        self.total = self.total.max(news.total);
        self.kept = news.kept.max(if news.start == self.start { self.kept } else { 0 });
        self.start = self.start.max(news.start);
        self.spooled |= news.spooled;
        if self.spooled {
            self.head = Vec::new();
        } else if !news.head.is_empty() {
            let Ok(at) = usize::try_from(news.head_offset) else { return };
            if at <= self.head.len() {
                self.head.truncate(at);
                self.head.extend_from_slice(&news.head);
            }
        }
        if !self.spooled {
            // Never promise bytes that are not here, whatever the agent says.
            self.kept = self.kept.min(self.head.len() as u64);
        }
    }
}

/// Facts of a command.
#[derive(Debug, Default)]
pub struct Facts {
    /// Line for people.
    pub command: String,
    /// Its session.
    pub session: Option<SessionId>,
    /// The agent said that it started.
    pub started: bool,
    /// Process id inside; 0 while queued.
    pub pid: u32,
    /// It has ended.
    pub ended: bool,
    /// The channel to its agent closed before its end was known.
    pub lost: Option<String>,
    pub(crate) code: i32,
    pub(crate) signal: i32,
    pub(crate) timed_out: bool,
    pub(crate) session_ended: bool,
    pub(crate) started_ms: u64,
    pub(crate) ended_ms: u64,
    pub(crate) cpu_us: u64,
    /// It has a terminal.
    pub pty: bool,
    /// Its stdin is streamed and was not closed.
    pub stdin_open: bool,
    /// Our end of that.
    pub stdin: Option<Arc<StdinPipe>>,
    /// Given stdin that waits for the pipe to come with the start.
    pub stdin_given: Option<bytes::Bytes>,
    /// Kills for memory while it ran.
    pub oom_kills: Vec<rest::OomKill>,
    /// Its cgroup's number.
    pub cgroup: Option<u32>,
    /// Kills of the sandbox when it started.
    pub oom_before: u64,
    pub(crate) stdout: StreamState,
    pub(crate) stderr: StreamState,
}

impl Facts {
    /// A stream.
    pub fn stream(&self, which: Which) -> &StreamState {
        match which {
            Which::Stdout => &self.stdout,
            Which::Stderr => &self.stderr,
        }
    }

    /// Bytes in spool files.
    pub fn spooled(&self) -> u64 {
        [&self.stdout, &self.stderr].iter().filter(|s| s.spooled).map(|s| s.kept).sum()
    }

    /// Takes in growth.
    pub fn grow(&mut self, stdout: Option<&Stream>, stderr: Option<&Stream>) {
        if let Some(news) = stdout {
            self.stdout.apply(news);
        }
        if let Some(news) = stderr {
            self.stderr.apply(news);
        }
    }

    /// Takes in all that the agent knows.
    pub fn learn(&mut self, info: &ExecInfo) {
        self.grow(info.stdout.as_ref(), info.stderr.as_ref());
        self.started = true;
        if info.pid != 0 {
            self.pid = info.pid;
        }
        if !info.command.is_empty() {
            self.command.clone_from(&info.command);
        }
        if self.session.is_none() && !info.session.is_empty() {
            self.session = info.session.parse().ok();
        }
        self.pty |= info.pty;
        if info.started_ms != 0 {
            self.started_ms = info.started_ms;
        }
        self.stdin_open = info.stdin_open && !info.ended;
        if info.ended {
            self.ended = true;
            self.ended_ms = if info.ended_ms == 0 { now_ms() } else { info.ended_ms };
            self.code = info.code;
            self.signal = info.signal;
            self.timed_out = info.timed_out;
            self.session_ended = info.session_ended;
            self.cpu_us = info.cpu_us;
            self.stdin = None;
        }
    }
}

/// One command.
#[derive(Debug)]
pub struct Exec {
    /// Its id.
    pub id: ExecId,
    facts: Mutex<Facts>,
    changed: watch::Sender<()>,
    readers: AtomicUsize,
    spool: Arc<Path>,
}

/// Keeps an exec and its output from being forgotten.
#[derive(Debug)]
pub struct Reading(Arc<Exec>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Exec {
    /// A command that starts now.
    pub fn new(id: ExecId, spool: Arc<Path>, mut facts: Facts) -> Self {
        if facts.started_ms == 0 {
            facts.started_ms = now_ms();
        }
        Self {
            id,
            facts: Mutex::new(facts),
            changed: watch::Sender::new(()),
            readers: AtomicUsize::new(0),
            spool,
        }
    }

    /// What is known now. Held for instants only.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is known and says so to everyone who waits.
    pub fn change<T>(&self, f: impl FnOnce(&mut Facts) -> T) -> T {
        let result = f(&mut self.facts());
        self.changed.send_replace(());
        result
    }

    /// Tells of every change from now on.
    pub fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Keeps it while it is read.
    pub fn reading(self: &Arc<Self>) -> Reading {
        self.readers.fetch_add(1, Ordering::Relaxed);
        Reading(Arc::clone(self))
    }

    /// Somebody reads it.
    pub fn is_read(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }

    /// Spool file of a stream.
    pub fn spool_file(&self, which: Which) -> PathBuf {
        self.spool.join(format!("{}.{}", self.id, which.suffix()))
    }

    /// Why its end will never be known, when that is so.
    pub fn lost(&self) -> Option<String> {
        let facts = self.facts();
        facts.lost.clone().filter(|_| !facts.ended)
    }

    /// Waits until it has ended or its agent is gone. Cancel-safe.
    pub async fn ended(&self) {
        let mut changed = self.watch();
        loop {
            {
                let facts = self.facts();
                if facts.ended || facts.lost.is_some() {
                    return;
                }
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// The record, without output.
    pub fn record(&self) -> rest::Exec {
        let facts = self.facts();
        let state = match (facts.ended, facts.pid) {
            (true, _) => rest::ExecState::Exited,
            (false, 0) if facts.session.is_some() && facts.started => rest::ExecState::Queued,
            (false, _) => rest::ExecState::Running,
        };
        let (out, err) = (&facts.stdout, &facts.stderr);
        rest::Exec {
            id: self.id.clone(),
            state,
            command: facts.command.clone(),
            session_id: facts.session.clone(),
            pid: (facts.pid != 0).then_some(facts.pid),
            exit_code: facts.ended.then(|| if facts.signal == 0 { facts.code } else { 128 + facts.signal }),
            signal: (facts.ended && facts.signal != 0).then(|| super::stdin::signal_name(facts.signal)),
            timed_out: facts.timed_out,
            oom_kills: facts.oom_kills.clone(),
            session_ended: facts.session_ended,
            started_ms: facts.started_ms,
            ended_ms: facts.ended.then_some(facts.ended_ms),
            stdout_bytes: out.total,
            stderr_bytes: err.total,
            stdout_truncated: out.kept < out.total,
            stderr_truncated: err.kept < err.total,
            stdout: None,
            stderr: None,
            stdout_base64: None,
            stderr_base64: None,
            cpu_us: facts.cpu_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(total: u64, offset: u64, head: &[u8]) -> Stream {
        Stream { total, kept: total, start: 0, spooled: false, head: head.to_vec(), head_offset: offset }
    }

    #[test]
    fn pieces_join_and_a_repeated_or_empty_one_changes_nothing() {
        let mut stream = StreamState::default();
        stream.apply(&piece(3, 0, b"abc"));
        stream.apply(&piece(5, 3, b"de"));
        stream.apply(&piece(5, 3, b"de"));
        stream.apply(&piece(5, 0, b""));
        assert_eq!((stream.head.as_slice(), stream.end()), (&b"abcde"[..], 5));
    }

    #[test]
    fn a_stream_never_promises_more_than_it_has() {
        let mut stream = StreamState::default();
        stream.apply(&piece(10, 7, b"xyz"));
        assert_eq!((stream.kept, stream.total), (0, 10));
    }

    #[test]
    fn once_in_the_file_the_head_is_given_back() {
        let mut stream = StreamState::default();
        stream.apply(&piece(3, 0, b"abc"));
        stream.apply(&Stream { total: 9000, kept: 9000, spooled: true, ..Stream::default() });
        assert_eq!((stream.head.len(), stream.end()), (0, 9000));
    }
}
