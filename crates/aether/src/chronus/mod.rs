//! Shell sessions: one shell each, that lives through many lines.
//!
//! The shell is not interactive. It reads its script from a pipe that we write, one line's text at a
//! time ([`script`]), and reports each line's end with `$?` on a control pipe. Everything that a
//! shell keeps (directory, variables, functions, options, background jobs) stays, since all lines
//! run in the one shell.
//!
//! Its two output pipes are the session's. When a line's end is reported, what is in them at that
//! moment is the line's; what comes later is the next line's. While no line runs, output of
//! background jobs is read (so that they never wait) and the first [`output::BETWEEN_MAX`] bytes of each
//! stream are kept for the next line; the rest is dropped.
//!
//! ```text
//! Starting --(exec'd)--> Open --(shell reaped)--> Closing --(its cgroup is empty)--> gone
//!    |                     |                        ^
//!    +--(failed)--> gone   +--(close, kill)---------+
//! ```

mod lines;
mod messages;
mod output;
mod script;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_proto::guest::{ExecStart, GuestError, GuestErrorKind as Kind, Reply, SessionInfo, SessionOpen};
use rustix::event::epoll::EventFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::agent::{Agent, On};
use crate::child::{self, Cgroup, Plan, Program, Stdio, Work};
use crate::conn::Ack;
use crate::exec::{Exec, now_ms, set_nonblocking};
use crate::fail::{fail, no_nul, os};
use crate::report::{self, Report, START_MAX};
use crate::slab::Key;
use crate::start::{cgroup_of, check_name, open_to_all, output_pipe};
use crate::sys::{self, Reaped};
use crate::tree;

use messages::Messages;
pub(crate) use script::shell_argv;

/// Sessions of one sandbox.
const SESSIONS_MAX: usize = 256;
/// How often the processes of a session that ends, or of a line past its time, are looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Looks take at most one part of so many of the loop's time.
const LOOK_SHARE: u32 = 4;
/// A killed session is over after this long even if the kernel still shows processes of it, or
/// somebody in the sandbox traces its shell, which is not ours to reap then.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Open,
    /// The shell is being killed, or is gone and its processes are.
    Closing,
}

/// A shell session.
pub(crate) struct Session {
    name: String,
    user: String,
    phase: Phase,
    /// The shell; 0 once it was reaped.
    pid: i32,
    shown_pid: i32,
    created_ms: u64,
    report: Option<OwnedFd>,
    /// Who is told that it is open: the first made it.
    openers: Vec<Ack>,
    /// Who is told that it is gone.
    closers: Vec<Ack>,
    close_until: Option<Instant>,
    /// A shell that has not started by then is given up.
    start_until: Option<Instant>,
    cgroup: Option<Cgroup>,
    /// A terminal session's exec.
    pty_exec: Option<String>,
    script: Option<OwnedFd>,
    /// Text for the script pipe, and how much of it was written.
    feed: (Vec<u8>, usize),
    control: Option<OwnedFd>,
    control_text: Vec<u8>,
    fds: [Option<OwnedFd>; 2],
    between: [Vec<u8>; 2],
    /// Standard error of the line that runs.
    messages: Messages,
    /// The line that runs.
    line: Option<Key>,
    /// Its number, which its report has to name.
    line_number: u64,
    /// CPU time of the shell and its children when it began.
    line_cpu: u64,
    /// Processes that were there when it began.
    line_found: Vec<i32>,
    /// Its time is over: its processes are killed until then, and then the session is.
    line_kill: Option<Instant>,
    /// When its processes are looked at next, while they are being killed.
    look_at: Option<Instant>,
    /// `$?` of the line before, for the next one to find.
    status: i32,
    queue: VecDeque<(Key, Vec<u8>)>,
    queue_bytes: usize,
}

impl Session {
    /// It can be listed.
    pub(crate) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// The process is its shell (of a session without a terminal; that one's is an exec's).
    pub(crate) fn is_shell(&self, pid: i32) -> bool {
        self.pty_exec.is_none() && self.pid == pid
    }

    /// What is known of it.
    pub(crate) fn info(&self) -> SessionInfo {
        SessionInfo {
            session: self.name.clone(),
            pid: self.shown_pid.max(0) as u32,
            user: self.user.clone(),
            pty_exec: self.pty_exec.clone().unwrap_or_default(),
            pending: (self.queue.len() + usize::from(self.line.is_some())) as u32,
            created_ms: self.created_ms,
            existed: false,
        }
    }

    /// When something is to be done for it.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.phase {
            // A terminal's shell is an exec, which has its own times.
            Phase::Starting => self.start_until.filter(|_| self.pty_exec.is_none()),
            Phase::Open => self.look_at.filter(|_| self.line_kill.is_some()),
            Phase::Closing if self.pid != 0 => self.close_until.filter(|_| self.pty_exec.is_none()),
            Phase::Closing => self.look_at,
        }
    }
}

impl Agent {
    fn find_session(&self, name: &str) -> Option<Key> {
        self.sessions.find(|s| s.name == name)
    }

    /// Opens a session, or finds it. The answer comes when its shell runs.
    pub(crate) fn session_open(
        &mut self,
        ack: Ack,
        request: &SessionOpen,
        fds: Vec<OwnedFd>,
    ) -> Result<(), GuestError> {
        self.may_start()?;
        check_name("session name", &request.session)?;
        if let Some(key) = self.find_session(&request.session) {
            return self.session_found(ack, key);
        }
        if self.sessions.len() >= SESSIONS_MAX {
            let message = format!("{SESSIONS_MAX} sessions are open in this sandbox, the most there can be");
            return Err(fail(Kind::ResourceExhausted, message));
        }
        no_nul("the shell", &request.shell)?;
        no_nul("the working directory", &request.cwd)?;
        no_nul("the user", request.user.as_bytes())?;
        for variable in &request.env {
            no_nul("an environment variable", variable)?;
        }
        if request.pty.is_some() {
            self.open_terminal(ack, request, fds)
        } else {
            self.open_shell(ack, request, fds)
        }
    }

    fn session_found(&mut self, ack: Ack, key: Key) -> Result<(), GuestError> {
        let Some(session) = self.sessions.get_mut(key) else { return Ok(()) };
        match session.phase {
            Phase::Starting => session.openers.push(ack),
            Phase::Closing => {
                return Err(fail(Kind::Conflict, format!("session {} is just ending", session.name)));
            }
            Phase::Open => {
                let info = SessionInfo { existed: true, ..session.info() };
                self.answer(ack, Ok((Reply::Session(info), Vec::new())));
            }
        }
        Ok(())
    }

    fn new_session(&self, ack: Ack, request: &SessionOpen, cgroup: Option<Cgroup>) -> Session {
        Session {
            name: request.session.clone(),
            user: request.user.clone(),
            phase: Phase::Starting,
            pid: 0,
            shown_pid: 0,
            created_ms: now_ms(),
            report: None,
            openers: vec![ack],
            closers: Vec::new(),
            close_until: None,
            start_until: Some(self.clock.now() + START_MAX),
            cgroup,
            pty_exec: request.pty.map(|_| request.pty_exec.clone()),
            script: None,
            feed: (Vec::new(), 0),
            control: None,
            control_text: Vec::new(),
            fds: [None, None],
            between: [Vec::new(), Vec::new()],
            messages: Messages::default(),
            line: None,
            line_number: 0,
            line_cpu: 0,
            line_found: Vec::new(),
            line_kill: None,
            look_at: None,
            status: 0,
            queue: VecDeque::new(),
            queue_bytes: 0,
        }
    }

    /// An interactive shell on a terminal: an exec like any other, which the session follows.
    fn open_terminal(
        &mut self,
        ack: Ack,
        request: &SessionOpen,
        fds: Vec<OwnedFd>,
    ) -> Result<(), GuestError> {
        check_name("exec id", &request.pty_exec)?;
        if self.execs.find(|e| e.id == request.pty_exec).is_some() {
            return Err(fail(Kind::AlreadyExists, format!("exec {} is known already", request.pty_exec)));
        }
        let shell = if request.shell.is_empty() { b"shell".to_vec() } else { request.shell.clone() };
        let start = ExecStart {
            exec: request.pty_exec.clone(),
            argv: vec![shell, b"-i".to_vec()],
            session: request.session.clone(),
            user: request.user.clone(),
            cwd: request.cwd.clone(),
            env: request.env.clone(),
            pty: request.pty,
            ..ExecStart::default()
        };
        // The exec has the cgroup; the session reaches it through the exec.
        let exec = Exec::new(&request.pty_exec, &start, ack, self.clock.now());
        let key = self.launch(exec, &start, Program::Interactive(&request.shell), fds)?;
        let mut session = self.new_session(ack, request, None);
        session.pid = self.execs.get(key).map_or(0, |e| e.pid);
        session.shown_pid = session.pid;
        self.sessions.insert(session);
        Ok(())
    }

    fn open_shell(&mut self, ack: Ack, request: &SessionOpen, fds: Vec<OwnedFd>) -> Result<(), GuestError> {
        let mut session = self.new_session(ack, request, cgroup_of(fds)?);
        let pipe = |e| os("cannot make pipes", e);
        let (out, out_theirs) = output_pipe().map_err(pipe)?;
        let (err, err_theirs) = output_pipe().map_err(pipe)?;
        let (script_theirs, script) = pipe_with(PipeFlags::CLOEXEC).map_err(pipe)?;
        let (control, control_theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(pipe)?;
        set_nonblocking(&script).and_then(|()| set_nonblocking(&control)).map_err(pipe)?;
        open_to_all(&script).map_err(pipe)?;
        let stdio = Stdio::Pipes([self.host.null.as_fd(), out_theirs.as_fd(), err_theirs.as_fd()]);
        let extra =
            [(script_theirs.as_fd(), script::SCRIPT_FD), (control_theirs.as_fd(), script::CONTROL_FD)];
        let program = Program::Session(&request.shell);
        let work = Work::Exec(child::Exec { program, env: &request.env, stdio, extra: &extra });
        let plan = Plan { user: &request.user, cwd: &request.cwd, work };
        let child = child::spawn(&self.host, session.cgroup.as_ref().map(|c| c.dir.as_fd()), &plan)?;
        session.pid = child.pid;
        session.shown_pid = child.pid;
        session.report = Some(child.report);
        session.feed.0.extend_from_slice(script::PRELUDE);
        session.script = Some(script);
        session.control = Some(control);
        session.fds = [Some(out), Some(err)];
        let key = self.sessions.insert(session);
        let Some(session) = self.sessions.get(key) else { return Ok(()) };
        let [out, err] = &session.fds;
        let watched = [
            (&session.report, On::SessionReport),
            (&session.control, On::SessionControl),
            (out, On::SessionOut),
            (err, On::SessionErr),
        ];
        for (fd, on) in watched {
            if let Some(fd) = fd {
                self.poll.read(fd, on, Some(key)).map_err(|e| os("epoll", e))?;
            }
        }
        if let Some(script) = &session.script {
            // Level-triggered for writing only while there is text; see `session_feed`.
            self.poll
                .add(script, On::SessionScript, Some(key), EventFlags::empty())
                .map_err(|e| os("epoll", e))?;
        }
        Ok(())
    }

    /// The shell runs, or could not be started.
    pub(crate) fn session_report(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        let Some(report) = &session.report else { return };
        match report::read(report, session.pid, &mut None) {
            Report::Wait => {}
            Report::Failed(error) => self.session_failed(key, error),
            Report::Done | Report::Checked => {
                self.poll.remove(report);
                session.report = None;
                self.session_opened(key);
                self.session_feed(key);
                self.next_line(key);
            }
        }
    }

    fn session_opened(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        session.phase = Phase::Open;
        let info = session.info();
        for (at, ack) in std::mem::take(&mut session.openers).into_iter().enumerate() {
            let info = SessionInfo { existed: at > 0, ..info.clone() };
            self.answer(ack, Ok((Reply::Session(info), Vec::new())));
        }
    }

    /// Out of the table, and nothing of it watched: a child that was just forked may still have
    /// copies of its descriptors, and so epoll would.
    fn take_session(&mut self, key: Key) -> Option<Session> {
        let session = self.sessions.remove(key)?;
        let [out, err] = &session.fds;
        for fd in [&session.report, &session.script, &session.control, out, err].into_iter().flatten() {
            self.poll.remove(fd);
        }
        Some(session)
    }

    fn session_failed(&mut self, key: Key, error: GuestError) {
        let Some(mut session) = self.take_session(key) else { return };
        for ack in session.openers.drain(..) {
            self.answer(ack, Err(error.clone()));
        }
        for (line, _) in session.queue.drain(..) {
            self.line_lost(line);
        }
    }

    /// A terminal session's shell runs.
    pub(crate) fn terminal_started(&mut self, name: &str, pid: i32) {
        let Some(key) = self.find_session(name) else { return };
        if let Some(session) = self.sessions.get_mut(key) {
            session.shown_pid = pid;
        }
        self.session_opened(key);
    }

    /// A terminal session's shell could not be started.
    pub(crate) fn terminal_failed(&mut self, name: &str, error: GuestError) {
        if let Some(key) = self.find_session(name) {
            self.session_failed(key, error);
        }
    }

    /// A terminal session's exec is over: so is the session.
    pub(crate) fn terminal_ended(&mut self, name: &str) {
        if let Some(key) = self.find_session(name) {
            self.begin_close(key);
            if let Some(session) = self.sessions.get_mut(key) {
                session.pid = 0;
            }
            self.session_look(key, self.clock.now());
        }
    }

    /// Ends a session; the answer comes when nothing of it is left.
    pub(crate) fn session_close(&mut self, ack: Ack, name: &str) -> Result<(), GuestError> {
        let key = self
            .find_session(name)
            .ok_or_else(|| fail(Kind::NotFound, format!("there is no session {name}")))?;
        if let Some(session) = self.sessions.get_mut(key) {
            if session.phase == Phase::Starting {
                return Err(fail(Kind::Conflict, format!("session {name} is still starting")));
            }
            session.closers.push(ack);
        }
        self.begin_close(key);
        Ok(())
    }

    /// Kills all of it.
    fn begin_close(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        session.phase = Phase::Closing;
        session.close_until.get_or_insert_with(|| self.clock.now() + CLOSE_WAIT);
        session.line_kill = None;
        let terminal = session.pty_exec.clone();
        let cgroup = match &terminal {
            None => session.cgroup.as_ref(),
            Some(id) => self.execs.iter_mut().find(|(_, e)| e.id == *id).and_then(|(_, e)| {
                e.was_killed(self.clock.now());
                e.cgroup.as_ref()
            }),
        };
        let killed = cgroup.is_some_and(tree::kill_cgroup);
        if session.pid > 0 {
            if killed {
                let _ = sys::kill(-session.pid, libc::SIGKILL);
            } else {
                tree::kill_descendants(session.pid);
            }
        }
    }

    /// The shell has ended: by itself (`exit`), or because it was killed.
    pub(crate) fn session_reaped(&mut self, key: Key, reaped: &Reaped) {
        self.session_report(key);
        for which in 0..2 {
            self.drain_session(key, which);
        }
        self.end_messages(key);
        // A report that was written before the end counts.
        self.session_control(key);
        let Some(session) = self.sessions.get_mut(key) else { return };
        let pid = std::mem::replace(&mut session.pid, 0);
        let line = session.line.take();
        let queue = std::mem::take(&mut session.queue);
        session.queue_bytes = 0;
        if let Some(script) = session.script.take() {
            self.poll.remove(&script);
        }
        if let Some(line) = line {
            self.line_ended_shell(line, reaped);
        }
        for (line, _) in queue {
            self.line_lost(line);
        }
        // By cgroup; without one the shell's group is all that can still be named.
        let _ = sys::kill(-pid, libc::SIGKILL);
        self.begin_close(key);
        self.session_look(key, self.clock.now());
    }

    /// Sees whether anything is left of a session that ends.
    fn session_look(&mut self, key: Key, now: Instant) {
        let Some(session) = self.sessions.get_mut(key) else { return };
        if session.phase != Phase::Closing || session.pid != 0 {
            return;
        }
        if let Some(cgroup) = &session.cgroup {
            let late = session.close_until.is_some_and(|until| until <= now);
            if !late && !tree::members(cgroup).is_empty() {
                // Again: what forked while it was killed.
                tree::kill_cgroup(cgroup);
                session.look_at = Some(now + LOOK);
                return;
            }
        }
        let Some(session) = self.take_session(key) else { return };
        for ack in session.closers {
            self.answer(ack, Ok((Reply::Done(dsec_proto::guest::Empty {}), Vec::new())));
        }
        if self.conn.as_ref().is_some_and(|c| c.greeted) {
            self.ended_sessions.push(session.name);
        }
    }

    /// Time to look at it again.
    pub(crate) fn session_due(&mut self, key: Key, now: Instant) {
        let Some(session) = self.sessions.get(key) else { return };
        if session.phase == Phase::Starting && session.start_until.is_some_and(|until| until <= now) {
            let _ = sys::kill(session.pid, libc::SIGKILL);
            self.session_failed(key, report::not_started());
            return;
        }
        if session.phase == Phase::Closing
            && session.pid != 0
            && session.close_until.is_some_and(|until| until <= now)
        {
            // Killed, and still not ours to reap.
            let reaped = Reaped { pid: session.pid, code: 0, signal: libc::SIGKILL, cpu_us: 0 };
            self.session_reaped(key, &reaped);
            return;
        }
        self.line_look(key, now);
        self.session_look(key, now);
    }
}
