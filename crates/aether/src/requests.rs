//! What an edge asks, and what it is told.

use std::os::fd::{AsFd, OwnedFd};

use dsec_proto::guest::{
    ENDED_EXECS_MAX, Empty, ExecInfo, FILE_PIPES_GENERATION, FRAME_MAX, FileCall, GENERATION, GuestError,
    GuestErrorKind as Kind, HEAD_MAX, HelloReply, Reply, Request, SessionRef,
};
use rustix::event::epoll::EventFlags;

use crate::agent::{Agent, Check, On};
use crate::child::{self, Plan, Work};
use crate::conn::{Ack, Broken, Incoming, OUT_EVENTS};
use crate::exec::State;
use crate::fail::{fail, invalid, no_nul, os};
use crate::report::{self, Report};
use crate::slab::Key;
use crate::start::RUNNING_EXECS_MAX;
use crate::{files, sys};

/// File operations at once.
const FILE_CHILDREN_MAX: usize = 256;
/// Checks at once.
const CHECKS_MAX: usize = 64;
/// Output in one [`HelloReply`]; what is more follows in events.
const HELLO_HEADS_MAX: usize = 1 << 20;
/// An exec's facts in it: ids, command line, numbers.
const INFO_MAX: usize = 2048;
const _: () =
    assert!((RUNNING_EXECS_MAX + ENDED_EXECS_MAX) * INFO_MAX + HELLO_HEADS_MAX + 2 * HEAD_MAX < FRAME_MAX);

type Answer = Result<(Reply, Vec<OwnedFd>), GuestError>;

fn done() -> Answer {
    Ok((Reply::Done(Empty {}), Vec::new()))
}

impl Agent {
    /// Answers a request, if who asked is still there.
    pub(crate) fn answer(&mut self, ack: Ack, answer: Answer) {
        if let Some(conn) = &mut self.conn
            && conn.number == ack.connection
        {
            conn.answer(ack.id, answer);
        }
    }

    /// Reads and serves requests.
    pub(crate) fn requests(&mut self) {
        let Some(conn) = &mut self.conn else { return };
        // A closed socket is acted on after the frames that came before the close.
        let closed = conn.read().is_err();
        self.serve_frames();
        if closed {
            self.hang_up();
        }
    }

    /// Lets go of the edge. Out of epoll first: a child that was just forked may still have a copy.
    pub(crate) fn hang_up(&mut self) {
        if let Some(conn) = self.conn.take() {
            self.poll.remove(&conn.socket);
        }
    }

    fn serve_frames(&mut self) {
        while let Some(conn) = &mut self.conn {
            match conn.next() {
                Ok(Some(incoming)) => {
                    if self.serve(incoming).is_err() {
                        self.hang_up();
                    }
                }
                Ok(None) => return,
                Err(Broken) => self.hang_up(),
            }
        }
    }

    fn serve(&mut self, incoming: Incoming) -> Result<(), Broken> {
        let Incoming { frame, fds } = incoming;
        let conn = self.conn.as_ref().ok_or(Broken)?;
        let ack = Ack { connection: conn.number, id: frame.id };
        let greeted = conn.greeted;
        let request = match frame.request {
            Some(Request::Hello(theirs)) => {
                if let Some(conn) = &mut self.conn {
                    conn.generation = theirs.generation;
                }
                // Whoever comes to use the sandbox may know nothing of a pause that the edge before had begun.
                self.clock.go_on();
                let hello = self.hello();
                self.answer(ack, Ok((Reply::Hello(hello), Vec::new())));
                return Ok(());
            }
            _ if !greeted => return Err(Broken),
            Some(request) => request,
            None => {
                let newer = invalid("a request that this agent does not know");
                self.answer(ack, Err(newer));
                return Ok(());
            }
        };
        // `None`: the answer comes later.
        let answer = match request {
            Request::Hello(_) => None,
            Request::ExecStart(r) => self.exec_start(ack, &r, fds).err().map(Err),
            Request::SessionOpen(r) => self.session_open(ack, &r, fds).err().map(Err),
            Request::SessionClose(r) => self.session_close(ack, &r.session).err().map(Err),
            Request::Dial(r) => self.dial(ack, r.port).err().map(Err),
            Request::Check(r) => self.check(ack, &r.user, &r.cwd, &fds).err().map(Err),
            Request::ExecSignal(r) => Some(self.exec_signal(&r).and_then(|()| done())),
            Request::StdinOpen(r) => Some(self.stdin_open(&r.exec)),
            Request::StdinClose(r) => Some(self.stdin_close(&r.exec)),
            Request::ExecForget(r) => Some(self.forget(&r.exec)),
            Request::File(call) => Some(self.file(&call, fds)),
            Request::Terminate(_) => Some(self.terminate()),
            Request::StandStill(_) => {
                self.clock.stand_still();
                Some(done())
            }
            Request::GoOn(_) => {
                self.clock.go_on();
                Some(done())
            }
        };
        if let Some(answer) = answer {
            self.answer(ack, answer);
        }
        Ok(())
    }

    /// Everything that is held; from here on only news are told.
    fn hello(&mut self) -> HelloReply {
        let mut heads = 0;
        let mut later = Vec::new();
        let mut execs: Vec<ExecInfo> = Vec::new();
        for (key, exec) in self.execs.iter_mut() {
            if exec.state == State::Starting {
                continue;
            }
            heads += exec.head_len();
            exec.mark_told();
            if heads > HELLO_HEADS_MAX {
                execs.push(exec.info_without_heads());
                later.push(key);
            } else {
                execs.push(exec.info());
            }
        }
        let sessions = self.sessions.iter().filter(|(_, s)| s.is_open()).map(|(_, s)| s.info()).collect();
        self.news.clear();
        self.ended_sessions.clear();
        if let Some(conn) = &mut self.conn {
            conn.greeted = true;
        }
        for key in later {
            self.note(key);
        }
        HelloReply { generation: GENERATION, execs, sessions }
    }

    /// Says what is new, as far as the socket takes it.
    pub(crate) fn tell(&mut self) {
        let greeted = self.conn.as_ref().is_some_and(|c| c.greeted);
        loop {
            // Requests that were left while too many answers waited.
            self.serve_frames();
            self.make_events(greeted);
            let Some(conn) = &mut self.conn else { return };
            let before = conn.waiting();
            if conn.flush().is_err() {
                self.hang_up();
                return;
            }
            if conn.waiting() > 0 || before == 0 {
                break;
            }
        }
        let Some(conn) = &mut self.conn else { return };
        let wants = conn.wants();
        if wants != conn.watching {
            conn.watching = wants;
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::IN, wants.0);
            flags.set(EventFlags::OUT, wants.1);
            self.poll.change(&conn.socket, On::Conn, None, flags);
        }
    }

    fn make_events(&mut self, greeted: bool) {
        let Some(conn) = self.conn.as_mut().filter(|_| greeted) else { return };
        while conn.waiting() < OUT_EVENTS
            && let Some(key) = self.news.pop_front()
        {
            let Some(exec) = self.execs.get_mut(key) else { continue };
            let (output, end) = exec.take_news();
            if let Some(output) = output {
                conn.push(0, Reply::Output(output), Vec::new());
            }
            if let Some(end) = end {
                conn.push(0, Reply::Exited(end), Vec::new());
            }
        }
        if self.news.is_empty() {
            for session in self.ended_sessions.drain(..) {
                conn.push(0, Reply::SessionEnded(SessionRef { session }), Vec::new());
            }
        }
    }

    fn stdin_open(&mut self, id: &str) -> Answer {
        let key = self.find_exec(id)?;
        let stdin = self.execs.get(key).and_then(|e| e.stdin.as_ref());
        let Some(stdin) = stdin else {
            return Err(fail(Kind::Conflict, format!("exec {id} has no standard input that is open")));
        };
        let copy = stdin.try_clone().map_err(|e| {
            os(
                "cannot copy the descriptor",
                rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO),
            )
        })?;
        Ok((Reply::Done(Empty {}), vec![copy]))
    }

    /// A terminal has no end to close: it is sent its end-of-file character.
    fn stdin_close(&mut self, id: &str) -> Answer {
        let key = self.find_exec(id)?;
        if let Some(exec) = self.execs.get_mut(key) {
            match &exec.stdin {
                Some(master) if exec.pty => {
                    let eof = rustix::termios::tcgetattr(master)
                        .map_or(4, |t| t.special_codes[rustix::termios::SpecialCodeIndex::VEOF]);
                    let _ = rustix::io::write(master, &[eof]);
                }
                _ => exec.stdin = None,
            }
        }
        done()
    }

    fn forget(&mut self, id: &str) -> Answer {
        let key = self.find_exec(id)?;
        if self.execs.get(key).is_some_and(|e| e.state != State::Ended) {
            return Err(fail(Kind::Conflict, format!("exec {id} has not ended")));
        }
        self.drop_exec(key);
        done()
    }

    fn terminate(&mut self) -> Answer {
        self.terminating = true;
        // To everybody but us: we are pid 1 of the namespace. Stopped ones are woken to take it.
        let _ = sys::kill(-1, libc::SIGTERM);
        let _ = sys::kill(-1, libc::SIGCONT);
        done()
    }

    fn file(&mut self, call: &FileCall, fds: Vec<OwnedFd>) -> Answer {
        self.may_start()?;
        let count = fds.len();
        let mut fds = fds.into_iter();
        let (Some(socket), cgroup, None) = (fds.next(), fds.next(), fds.next()) else {
            return Err(invalid(format!("{count} descriptors came; a file operation has 1 or 2")));
        };
        no_nul("the path", &call.path)?;
        no_nul("the user", call.user.as_bytes())?;
        if self.file_children.len() >= FILE_CHILDREN_MAX {
            let message =
                format!("{FILE_CHILDREN_MAX} file operations run in this sandbox, the most there can be");
            return Err(fail(Kind::ResourceExhausted, message));
        }
        let pipes = self.conn.as_ref().is_some_and(|conn| conn.generation >= FILE_PIPES_GENERATION);
        let request = files::Request { call, socket: socket.as_fd(), pipes };
        let plan = Plan { user: &call.user, cwd: b"", work: Work::Files(request) };
        let child = child::spawn(&self.host, cgroup.as_ref().map(AsFd::as_fd), &plan)?;
        self.watch_file(child.pid, socket);
        done()
    }

    fn check(&mut self, ack: Ack, user: &str, cwd: &[u8], cgroup: &[OwnedFd]) -> Result<(), GuestError> {
        self.may_start()?;
        no_nul("the working directory", cwd)?;
        if self.checks.len() >= CHECKS_MAX {
            return Err(fail(Kind::ResourceExhausted, "too many checks at once"));
        }
        let plan = Plan { user, cwd, work: Work::Check };
        let child = child::spawn(&self.host, cgroup.first().map(AsFd::as_fd), &plan)?;
        let until = self.clock.now() + report::START_MAX;
        let key = self.checks.insert(Check { pid: child.pid, until, report: child.report, ack });
        if let Some(check) = self.checks.get(key) {
            self.poll.read(&check.report, On::Check, Some(key)).map_err(|e| os("epoll", e))?;
        }
        Ok(())
    }

    /// A checking child has ended.
    pub(crate) fn check_report(&mut self, key: Key) {
        let Some(check) = self.checks.get(key) else { return };
        let (ack, answer) = match report::read(&check.report, 0, &mut None) {
            Report::Wait => return,
            Report::Checked => (check.ack, done()),
            Report::Done => {
                (check.ack, Err(fail(Kind::Unavailable, "the check was killed before it was done")))
            }
            Report::Failed(error) => (check.ack, Err(error)),
        };
        self.check_over(key, ack, answer);
    }

    /// A checking child that is held up.
    pub(crate) fn check_due(&mut self, key: Key) {
        let Some(check) = self.checks.get(key) else { return };
        let _ = sys::kill(check.pid, libc::SIGKILL);
        self.check_over(key, check.ack, Err(report::not_started()));
    }

    fn check_over(&mut self, key: Key, ack: Ack, answer: Answer) {
        if let Some(check) = self.checks.remove(key) {
            self.poll.remove(&check.report);
        }
        self.answer(ack, answer);
    }
}
