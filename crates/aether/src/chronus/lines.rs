//! Lines of a session: queue, run, report, time limit.

use std::time::{Duration, Instant};

use dsec_proto::guest::{
    ExecStart, ExecStarted, GuestError, GuestErrorKind as Kind, Reply, SESSION_QUEUE_MAX,
};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::output::STDERR;
use super::{LOOK, LOOK_SHARE, Phase, Session, script};
use crate::agent::{Agent, On};
use crate::conn::Ack;
use crate::exec::{Exec, Outcome, State, now_ms};
use crate::fail::{fail, invalid};
use crate::slab::Key;
use crate::sys::{self, Reaped};
use crate::tree;

/// Longest line.
const LINE_MAX: usize = 1 << 20;
/// Bytes of lines that wait in one session.
const QUEUE_BYTES_MAX: usize = 4 << 20;
/// After a line's processes were killed at its time limit: how long its shell has to report.
const KILL_WAIT: Duration = Duration::from_millis(500);
/// Longest report: two numbers. More than that without a line end is no report.
const REPORT_MAX: usize = 256;
/// Reads of one session's reports in a turn of the loop: a real shell fills one.
const REPORTS_TURN: usize = 4;

impl Agent {
    /// Queues a line; it runs at once when the session is idle.
    pub(crate) fn session_line(&mut self, ack: Ack, request: &ExecStart) -> Result<(), GuestError> {
        let line = check_line(request)?;
        let name = &request.session;
        let found = self.find_session(name).and_then(|key| Some((key, self.sessions.get_mut(key)?)));
        let Some((key, session)) = found.filter(|(_, s)| s.phase != Phase::Closing) else {
            return Err(fail(Kind::NotFound, format!("there is no session {name}")));
        };
        if session.pty_exec.is_some() {
            let message = format!("session {name} has a terminal; it is attached, and takes no lines");
            return Err(fail(Kind::Conflict, message));
        }
        if line.len() > LINE_MAX {
            let message = format!("a line of {} bytes; a session takes {LINE_MAX}", line.len());
            return Err(fail(Kind::TooLarge, message));
        }
        if session.queue.len() >= SESSION_QUEUE_MAX || session.queue_bytes + line.len() > QUEUE_BYTES_MAX {
            let message = format!("{} lines wait in session {name}, the most that can", session.queue.len());
            return Err(fail(Kind::ResourceExhausted, message));
        }
        let mut exec = Exec::new(&request.exec, request, ack, self.clock.now());
        exec.line = true;
        exec.state = State::Queued;
        let exec = self.execs.insert(exec);
        session.queue.push_back((exec, line.to_vec()));
        session.queue_bytes += line.len();
        self.next_line(key);
        let pid = self.execs.get(exec).map_or(0, |e| e.pid.max(0) as u32);
        self.answer(ack, Ok((Reply::ExecStarted(ExecStarted { pid }), Vec::new())));
        Ok(())
    }

    /// Starts the next line if none runs.
    pub(super) fn next_line(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        if session.phase != Phase::Open || session.line.is_some() {
            return;
        }
        let Some((line, text)) = session.queue.pop_front() else { return };
        session.queue_bytes -= text.len();
        let Some(exec) = self.execs.get_mut(line) else { return };
        exec.state = State::Running;
        exec.pid = session.shown_pid;
        exec.started_ms = now_ms();
        exec.deadline = exec.time_limit(self.clock.now());
        for which in 0..2 {
            let file = exec.file(which);
            let mut between = std::mem::take(&mut session.between[which]);
            if which == STDERR {
                between = session.messages.pass(&between);
            }
            exec.streams[which].push(&between, &self.host, &file);
        }
        session.line = Some(line);
        session.line_number += 1;
        session.line_cpu = tree::cpu_us(session.pid);
        session.line_found =
            session.cgroup.as_ref().map_or_else(|| tree::descendants(session.pid), tree::members);
        let number = session.line_number;
        script::line_text(&text, number, session.status, &mut session.feed.0);
        self.note(line);
        self.session_feed(key);
    }

    /// The script pipe can be written to; or, when nothing waits for that, its reader is gone: the
    /// shell was replaced (`exec`) or is ending. That is no end yet, but nothing to watch either.
    pub(crate) fn session_script(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        if session.feed.1 < session.feed.0.len() {
            return self.session_feed(key);
        }
        if let Some(pipe) = session.script.take() {
            self.poll.remove(&pipe);
        }
    }

    /// Writes to the script pipe what it takes.
    pub(crate) fn session_feed(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let Some(pipe) = &session.script else { return };
        let (text, written) = &mut session.feed;
        while *written < text.len() {
            match rustix::io::write(pipe, &text[*written..]) {
                Ok(n) => *written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.poll.change(pipe, On::SessionScript, Some(key), EventFlags::OUT);
                    return;
                }
                // The shell has closed its script: it is ending, or was told to by a line (`exec`).
                Err(_) => {
                    self.poll.remove(pipe);
                    session.script = None;
                    return;
                }
            }
        }
        if *written > 0 {
            session.feed = (Vec::new(), 0);
            self.poll.change(pipe, On::SessionScript, Some(key), EventFlags::empty());
        }
    }

    /// The shell reports.
    pub(crate) fn session_control(&mut self, key: Key) {
        let mut chunk = [0; REPORT_MAX];
        // Whoever has the shell's end can write without end; the others' turn comes all the same.
        for _ in 0..REPORTS_TURN {
            let Some(session) = self.sessions.get_mut(key) else { return };
            let Some(control) = &session.control else { return };
            match rustix::io::read(control, &mut chunk) {
                Ok(n @ 1..) => {
                    session.control_text.extend_from_slice(&chunk[..n]);
                    self.take_reports(key);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // Nobody can report any more. With its shell alive that is a shell without use
                // (`exec`ed away, or the line closed our descriptor): its end is waited for.
                _ => {
                    self.poll.remove(control);
                    session.control = None;
                    return;
                }
            }
        }
    }

    fn take_reports(&mut self, key: Key) {
        while let Some(session) = self.sessions.get_mut(key) {
            let text = &mut session.control_text;
            let Some(end) = text.iter().position(|b| *b == b'\n') else {
                if text.len() > REPORT_MAX {
                    text.clear();
                }
                return;
            };
            let report = script::parse_report(&text[..end]);
            text.drain(..=end);
            if let Some((number, status)) = report
                && session.line.is_some()
                && number == session.line_number
            {
                self.line_reported(key, status);
            }
        }
    }

    fn line_reported(&mut self, key: Key, status: i32) {
        for which in 0..2 {
            self.drain_session(key, which);
        }
        self.end_messages(key);
        let Some(session) = self.sessions.get_mut(key) else { return };
        session.status = status;
        session.line_kill = None;
        session.line_found = Vec::new();
        let used = tree::cpu_us(session.pid).saturating_sub(session.line_cpu);
        if let Some(line) = session.line.take() {
            self.line_over(line, Outcome { code: status, signal: 0 }, used);
        }
        self.next_line(key);
    }

    fn line_over(&mut self, line: Key, outcome: Outcome, cpu_us: u64) {
        if let Some(exec) = self.execs.get_mut(line) {
            exec.outcome = Some(outcome);
            exec.cpu_us = cpu_us;
            exec.streams.iter_mut().for_each(crate::stream::Stream::close);
        }
        self.exec_over(line);
    }

    /// The line's shell has ended under it.
    pub(super) fn line_ended_shell(&mut self, line: Key, reaped: &Reaped) {
        if let Some(exec) = self.execs.get_mut(line) {
            exec.session_ended = true;
        }
        self.line_over(line, Outcome { code: reaped.code, signal: reaped.signal }, reaped.cpu_us);
    }

    /// The line never ran, since its session ended.
    pub(super) fn line_lost(&mut self, line: Key) {
        if let Some(exec) = self.execs.get_mut(line) {
            exec.session_ended = true;
        }
        self.line_over(line, Outcome { code: 0, signal: libc::SIGKILL }, 0);
    }

    /// Its time is over: what it started is killed, and the shell goes on.
    pub(crate) fn line_timed_out(&mut self, session: &str, now: Instant) {
        let Some(key) = self.find_session(session) else { return };
        if let Some(session) = self.sessions.get_mut(key) {
            session.line_kill = Some(now + KILL_WAIT);
        }
        self.line_look(key, now);
    }

    /// Kills what a line past its time has started; then, if that was not it, the session.
    pub(super) fn line_look(&mut self, key: Key, now: Instant) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let Some(until) = session.line_kill else { return };
        if until <= now {
            self.begin_close(key);
            return;
        }
        for pid in started_by_line(session) {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        // A look at thousands of processes takes its time; the loop has other work.
        let then = self.clock.now();
        session.look_at = Some(then + LOOK.max(then.saturating_duration_since(now) * LOOK_SHARE));
    }

    /// A signal for a line goes to what it has started; the shell gets it only when it is alone.
    pub(crate) fn line_signal(&mut self, line: Key, signal: i32) -> Result<(), GuestError> {
        let Some(exec) = self.execs.get(line) else { return Ok(()) };
        let Some(key) = self.find_session(&exec.session) else { return Ok(()) };
        let Some(session) = self.sessions.get_mut(key) else { return Ok(()) };
        if exec.state == State::Queued {
            let fatal = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGKILL];
            if fatal.contains(&signal) {
                if let Some(at) = session.queue.iter().position(|(key, _)| *key == line)
                    && let Some((_, text)) = session.queue.remove(at)
                {
                    session.queue_bytes -= text.len();
                }
                self.line_over(line, Outcome { code: 0, signal }, 0);
            }
            return Ok(());
        }
        let started = started_by_line(session);
        for pid in &started {
            let _ = sys::kill(*pid, signal);
        }
        if started.is_empty() && session.pid > 0 {
            let _ = sys::kill(session.pid, signal);
        }
        Ok(())
    }
}

/// Processes that were not there when the line began, and are not children of those (a background
/// job of an earlier line goes on), and not the shell.
fn started_by_line(session: &Session) -> Vec<i32> {
    let now = match &session.cgroup {
        Some(cgroup) => tree::members(cgroup),
        None => tree::descendants(session.pid),
    };
    let before: Vec<i32> = session.line_found.iter().copied().filter(|p| *p != session.pid).collect();
    tree::apart_from(&before, now.into_iter().filter(|pid| *pid != session.pid).collect())
}

/// Fields that a session's line cannot have.
fn check_line(request: &ExecStart) -> Result<&[u8], GuestError> {
    let line = request.shell.as_deref();
    let line = line.ok_or_else(|| invalid("a session runs lines (shell), not programs (argv)"))?;
    let plain = request.argv.is_empty()
        && request.env.is_empty()
        && request.cwd.is_empty()
        && request.user.is_empty()
        && request.pty.is_none()
        && request.stdin_mode == dsec_proto::guest::Stdin::Null as i32;
    if !plain {
        return Err(invalid("argv, user, cwd, env, stdin and pty are the session's; a line cannot set them"));
    }
    Ok(line)
}
