//! Commands: start, output, signals, time limits, end.
//!
//! ```text
//! Starting --(report at end of file: it was exec'd)--> Running --(reaped)--> Running, reaped
//!    |                                                                          |
//!    +--(report has an error)--> gone, the request answered        both streams at end of file,
//! Queued (a session's line) --(its turn)--> Running                or OUTPUT_LINGER_MS later
//!                                              |                                |
//!                                              +--(control pipe names it)-->  Ended
//! ```
//! The agent is pid 1 and alone reaps, so a process id stays its process's until the agent has
//! reaped it: no pidfd is needed to signal safely.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_proto::guest::{
    self, ENDED_EXECS_MAX, ExecInfo, ExecStarted, GuestErrorKind as Kind, OUTPUT_LIMIT_DEFAULT,
    OUTPUT_LINGER_MS, Reply,
};

use crate::agent::{Agent, On};
use crate::child::Cgroup;
use crate::conn::Ack;
use crate::fail::{fail, show};
use crate::report::{self, Report, START_MAX};
use crate::slab::Key;
use crate::stream::{Pumped, Stream, TURN_BUDGET};
use crate::sys::{self, Reaped};
use crate::tree;

/// Longest command line for people.
const COMMAND_MAX: usize = 1024;
/// How long a command that was killed may take until it is ours to reap. A killed process goes within milliseconds, unless
/// another one in the sandbox traces it.
const UNREAPED_MAX: Duration = Duration::from_secs(2);

/// Where an exec is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Forked; the program is not running yet.
    Starting,
    /// A session's line that waits.
    Queued,
    Running,
    Ended,
}

/// How its process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) signal: i32,
}

/// A command.
pub(crate) struct Exec {
    pub(crate) id: String,
    pub(crate) session: String,
    /// It is a line of that session (and not its terminal's shell).
    pub(crate) line: bool,
    pub(crate) command: String,
    pub(crate) state: State,
    /// Its process; of a line the session's shell.
    pub(crate) pid: i32,
    pub(crate) outcome: Option<Outcome>,
    /// When the end stops waiting for output.
    pub(crate) linger_until: Option<Instant>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) timed_out: bool,
    /// It was killed; its deadline is how long that may take.
    killed: bool,
    pub(crate) session_ended: bool,
    pub(crate) started_ms: u64,
    pub(crate) ended_ms: u64,
    pub(crate) cpu_us: u64,
    pub(crate) report: Option<OwnedFd>,
    pub(crate) ack: Ack,
    /// Our end of a streamed stdin, or the terminal's master.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) pty: bool,
    pub(crate) fds: [Option<OwnedFd>; 2],
    pub(crate) streams: [Stream; 2],
    pub(crate) cgroup: Option<Cgroup>,
    /// It is in the list of those with news.
    listed: bool,
    /// Its end is to be told.
    tell_end: bool,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// A command line for people.
pub(crate) fn command_text(argv: &[Vec<u8>], line: Option<&[u8]>) -> String {
    let mut text = match line {
        Some(line) => show(&line[..line.len().min(COMMAND_MAX)]),
        None => {
            let mut text = String::new();
            for argument in argv {
                if text.len() > COMMAND_MAX {
                    break;
                }
                if !text.is_empty() {
                    text.push(' ');
                }
                text.push_str(&show(&argument[..argument.len().min(COMMAND_MAX)]));
            }
            text
        }
    };
    let mut end = text.len().min(COMMAND_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.shrink_to_fit();
    text
}

impl Exec {
    /// One that is being started at `now`.
    pub(crate) fn new(id: &str, request: &guest::ExecStart, ack: Ack, now: Instant) -> Self {
        let limit = if request.output_limit == 0 { OUTPUT_LIMIT_DEFAULT } else { request.output_limit };
        let pty = request.pty.is_some();
        let out = if pty { Stream::window() } else { Stream::new(limit) };
        Self {
            id: id.to_owned(),
            session: request.session.clone(),
            line: false,
            command: command_text(&request.argv, request.shell.as_deref()),
            state: State::Starting,
            pid: 0,
            outcome: None,
            linger_until: None,
            timeout: (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms)),
            deadline: Some(now + START_MAX),
            timed_out: false,
            killed: false,
            session_ended: false,
            started_ms: now_ms(),
            ended_ms: 0,
            cpu_us: 0,
            report: None,
            ack,
            stdin: None,
            pty,
            fds: [None, None],
            streams: [out, Stream::new(limit)],
            cgroup: None,
            listed: false,
            tell_end: false,
        }
    }

    /// When a time limit that begins at `now` is over.
    pub(crate) fn time_limit(&self, now: Instant) -> Option<Instant> {
        self.timeout.and_then(|t| now.checked_add(t))
    }

    /// Name of a stream's spool file.
    pub(crate) fn file(&self, which: usize) -> String {
        format!("{}.{}", self.id, ["out", "err"][which])
    }

    /// It is this process's, which has not been reaped.
    pub(crate) fn is_process(&self, pid: i32) -> bool {
        !self.line && self.pid == pid && self.outcome.is_none() && self.state != State::Ended
    }

    /// When something is to be done for it.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Ended | State::Queued => None,
            _ => [self.linger_until, self.deadline].into_iter().flatten().min(),
        }
    }

    /// It was sent SIGKILL: it must be over soon, whoever traces it.
    pub(crate) fn was_killed(&mut self, now: Instant) {
        if self.outcome.is_none() && !self.line && self.state == State::Running && !self.killed {
            self.killed = true;
            self.deadline = Some(now + UNREAPED_MAX);
        }
    }

    /// What is known of it, without output.
    fn facts(&self) -> ExecInfo {
        let outcome = self.outcome.unwrap_or(Outcome { code: 0, signal: 0 });
        ExecInfo {
            exec: self.id.clone(),
            session: self.session.clone(),
            command: self.command.clone(),
            pid: self.pid.max(0) as u32,
            ended: self.state == State::Ended,
            code: outcome.code,
            signal: outcome.signal,
            timed_out: self.timed_out,
            session_ended: self.session_ended,
            started_ms: self.started_ms,
            ended_ms: self.ended_ms,
            cpu_us: self.cpu_us,
            pty: self.pty,
            stdin_open: self.stdin.is_some(),
            stdout: None,
            stderr: None,
        }
    }

    /// All that is known of it.
    pub(crate) fn info(&self) -> ExecInfo {
        let stderr = (!self.pty).then(|| self.streams[1].all());
        ExecInfo { stdout: Some(self.streams[0].all()), stderr, ..self.facts() }
    }

    /// Likewise; the heads follow in events.
    pub(crate) fn info_without_heads(&mut self) -> ExecInfo {
        let stdout = Some(self.streams[0].without_head());
        let stderr = if self.pty { None } else { Some(self.streams[1].without_head()) };
        ExecInfo { stdout, stderr, ..self.facts() }
    }

    /// Bytes of output in memory.
    pub(crate) fn head_len(&self) -> usize {
        self.streams[0].head_len() + self.streams[1].head_len()
    }

    /// The edge was just told everything.
    pub(crate) fn mark_told(&mut self) {
        self.streams.iter_mut().for_each(Stream::mark_told);
        self.listed = false;
        self.tell_end = false;
    }

    /// Events that tell what is new.
    pub(crate) fn take_news(&mut self) -> (Option<guest::Output>, Option<ExecInfo>) {
        self.listed = false;
        let mut output = None;
        if self.streams.iter().any(|s| s.grown) {
            let [out, err] = &mut self.streams;
            let told = |s: &mut Stream| s.grown.then(|| s.news());
            output = Some(guest::Output { exec: self.id.clone(), stdout: told(out), stderr: told(err) });
        }
        let end = std::mem::take(&mut self.tell_end).then(|| self.info());
        (output, end)
    }

    fn has_news(&self) -> bool {
        self.tell_end || self.streams.iter().any(|s| s.grown)
    }
}

impl Agent {
    /// Puts an exec on the list of those with news.
    pub(crate) fn note(&mut self, key: Key) {
        let greeted = self.conn.as_ref().is_some_and(|c| c.greeted);
        if let Some(exec) = self.execs.get_mut(key)
            && greeted
            && !exec.listed
            && exec.state != State::Starting
            && exec.has_news()
        {
            exec.listed = true;
            self.news.push_back(key);
        }
    }

    /// The child has exec'd, or has said why not.
    pub(crate) fn exec_report(&mut self, key: Key) {
        let Some(exec) = self.execs.get_mut(key) else { return };
        let Some(report) = &exec.report else { return };
        match report::read(report, exec.pid, &mut exec.stdin) {
            Report::Wait => {}
            Report::Failed(error) => self.exec_failed(key, error),
            Report::Done | Report::Checked => self.exec_started(key),
        }
    }

    fn exec_failed(&mut self, key: Key, error: guest::GuestError) {
        let Some(exec) = self.execs.get(key) else { return };
        let (ack, session) = (exec.ack, exec.session.clone());
        // The child is reaped as nobody's.
        self.drop_exec(key);
        if session.is_empty() {
            self.answer(ack, Err(error));
        } else {
            self.terminal_failed(&session, error);
        }
    }

    fn exec_started(&mut self, key: Key) {
        let Some(exec) = self.execs.get_mut(key) else { return };
        if let Some(report) = exec.report.take() {
            self.poll.remove(&report);
        }
        exec.state = State::Running;
        exec.deadline = exec.time_limit(self.clock.now());
        let mut failed = false;
        if exec.pty {
            // The master: written to by us and the edge, read here.
            let master = exec.stdin.as_ref().and_then(|m| m.try_clone().ok());
            failed = master.as_ref().is_none_or(|m| {
                set_nonblocking(m).is_err() || self.poll.read(m, On::ExecOut, Some(key)).is_err()
            });
            exec.fds[0] = master;
        }
        if failed {
            let _ = sys::kill(-exec.pid, libc::SIGKILL);
        }
        let (ack, pid) = (exec.ack, exec.pid);
        let fds: Vec<OwnedFd> = exec.stdin.iter().filter_map(|fd| fd.try_clone().ok()).collect();
        if exec.session.is_empty() {
            self.answer(ack, Ok((Reply::ExecStarted(ExecStarted { pid: pid.max(0) as u32 }), fds)));
        } else {
            let session = exec.session.clone();
            self.terminal_started(&session, pid);
        }
        self.settle(key, self.clock.now());
        self.note(key);
    }

    /// Output is there.
    pub(crate) fn exec_output(&mut self, key: Key, which: usize) {
        if self.pump(key, which, TURN_BUDGET) == Pumped::End {
            self.settle(key, self.clock.now());
        }
        self.note(key);
    }

    fn pump(&mut self, key: Key, which: usize, budget: usize) -> Pumped {
        let Some(exec) = self.execs.get_mut(key) else { return Pumped::Empty };
        let file = exec.file(which);
        let Some(fd) = &exec.fds[which] else { return Pumped::End };
        let pumped = exec.streams[which].pump(fd.as_fd(), &self.host, &file, budget);
        if pumped == Pumped::End {
            self.poll.remove(fd);
            exec.fds[which] = None;
            exec.streams[which].close();
        }
        pumped
    }

    /// Its process has ended.
    pub(crate) fn exec_reaped(&mut self, key: Key, reaped: &Reaped) {
        let now = self.clock.now();
        if let Some(exec) = self.execs.get_mut(key) {
            exec.outcome = Some(Outcome { code: reaped.code, signal: reaped.signal });
            exec.cpu_us = reaped.cpu_us;
            exec.deadline = None;
            exec.linger_until = Some(now + Duration::from_millis(OUTPUT_LINGER_MS));
        }
        // What it wrote is in the pipes now: taken here, it leaves with the end in the same turn.
        for which in 0..2 {
            self.pump(key, which, TURN_BUDGET);
        }
        self.exec_report(key);
        self.settle(key, now);
        self.note(key);
    }

    /// Ends it if it is over.
    fn settle(&mut self, key: Key, now: Instant) {
        let Some(exec) = self.execs.get(key) else { return };
        if exec.line || exec.state != State::Running || exec.outcome.is_none() {
            return;
        }
        let quiet = exec.fds.iter().all(Option::is_none);
        if quiet || exec.linger_until.is_some_and(|until| until <= now) {
            self.exec_over(key);
        }
    }

    /// It has ended: told, remembered, and the oldest that is too many forgotten.
    pub(crate) fn exec_over(&mut self, key: Key) {
        let Some(exec) = self.execs.get_mut(key) else { return };
        if exec.state == State::Ended {
            return;
        }
        exec.state = State::Ended;
        exec.ended_ms = now_ms();
        exec.stdin = None;
        exec.deadline = None;
        exec.linger_until = None;
        exec.tell_end = true;
        let terminal = (exec.pty && !exec.session.is_empty()).then(|| exec.session.clone());
        self.ended.push_back(key);
        self.note(key);
        if let Some(session) = terminal {
            self.terminal_ended(&session);
        }
        while self.ended.len() > ENDED_EXECS_MAX {
            if let Some(oldest) = self.ended.pop_front() {
                self.drop_exec(oldest);
            }
        }
    }

    /// Takes it out of the table, with its spool files.
    pub(crate) fn drop_exec(&mut self, key: Key) {
        let Some(exec) = self.execs.remove(key) else { return };
        self.ended.retain(|k| *k != key);
        for which in 0..2 {
            exec.streams[which].forget(&self.host, &exec.file(which));
        }
        if let Some(report) = &exec.report {
            self.poll.remove(report);
        }
        for fd in exec.fds.into_iter().flatten() {
            self.keep_draining(fd);
        }
    }

    /// A time limit or the wait for output has run out.
    pub(crate) fn exec_due(&mut self, key: Key, now: Instant) {
        let Some(exec) = self.execs.get_mut(key) else { return };
        if exec.state == State::Starting {
            let _ = sys::kill(exec.pid, libc::SIGKILL);
            self.exec_failed(key, report::not_started());
            return;
        }
        if exec.deadline.is_some_and(|d| d <= now) && exec.outcome.is_none() {
            exec.deadline = None;
            if exec.killed {
                // Killed, and still not ours to reap: somebody in the sandbox traces it. That must not keep it from ending.
                exec.outcome = Some(Outcome { code: 0, signal: libc::SIGKILL });
                exec.linger_until = Some(now);
                self.settle(key, now);
                return;
            }
            exec.timed_out = true;
            if exec.line {
                let session = exec.session.clone();
                self.line_timed_out(&session, now);
                return;
            }
            kill_tree(exec);
            exec.was_killed(now);
        }
        self.settle(key, now);
    }

    /// Sends a signal.
    pub(crate) fn exec_signal(&mut self, request: &guest::ExecSignal) -> Result<(), guest::GuestError> {
        if !(0..=64).contains(&request.signal) {
            return Err(crate::fail::invalid(format!("{} is no signal number", request.signal)));
        }
        let key = self.find_exec(&request.exec)?;
        let Some(exec) = self.execs.get_mut(key) else { return Ok(()) };
        if exec.line && exec.state != State::Ended {
            return self.line_signal(key, request.signal);
        }
        if request.tree {
            if request.signal == libc::SIGKILL {
                kill_tree(exec);
                exec.was_killed(self.clock.now());
            } else if let Some(cgroup) = &exec.cgroup {
                for pid in tree::members(cgroup) {
                    let _ = sys::kill(pid, request.signal);
                }
            } else if exec.outcome.is_none() {
                for pid in tree::descendants(exec.pid) {
                    let _ = sys::kill(pid, request.signal);
                }
                let _ = sys::kill(exec.pid, request.signal);
            }
            return Ok(());
        }
        // Past its reaping the number may be somebody else's.
        if exec.outcome.is_some() || exec.state == State::Ended {
            return Err(fail(Kind::Conflict, format!("exec {} has ended", request.exec)));
        }
        let _ = sys::kill(-exec.pid, request.signal);
        if request.signal == libc::SIGKILL {
            exec.was_killed(self.clock.now());
        }
        Ok(())
    }

    /// The exec of that name.
    pub(crate) fn find_exec(&self, id: &str) -> Result<Key, guest::GuestError> {
        self.execs
            .find(|e| e.id == id && e.state != State::Starting)
            .ok_or_else(|| fail(Kind::NotFound, format!("there is no exec {id}")))
    }
}

/// Kills all that it started.
fn kill_tree(exec: &Exec) {
    let by_cgroup = exec.cgroup.as_ref().is_some_and(tree::kill_cgroup);
    if exec.outcome.is_some() {
        return;
    }
    if by_cgroup {
        // Also what left the cgroup's reach before it was there: nothing, but its group costs nothing.
        let _ = sys::kill(-exec.pid, libc::SIGKILL);
    } else {
        tree::kill_descendants(exec.pid);
    }
}

/// Makes reads and writes return rather than wait.
pub(crate) fn set_nonblocking(fd: &OwnedFd) -> Result<(), rustix::io::Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
}
