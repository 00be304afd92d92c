//! A sandbox that is some threads: it speaks the guest protocol and runs commands as processes of
//! this host, each in a process group of its own.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use dsec_proto::guest::{
    self, Empty, ExecInfo, ExecStart, ExecStarted, FromGuest, GuestError, GuestErrorKind, HelloReply, Output,
    Reply, Request, SessionInfo, SessionRef, Stdin, ToGuest,
};
use rustix::process::{Pid, Signal};

use super::files;
use super::streams::Kept;

pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub fn refusal(kind: GuestErrorKind, message: impl Into<String>) -> GuestError {
    GuestError { kind: kind as i32, message: message.into(), ..GuestError::default() }
}

struct Exec {
    info: ExecInfo,
    out: Kept,
    err: Kept,
    stdin: Option<OwnedFd>,
}

#[derive(Default)]
struct Session {
    info: SessionInfo,
    queue: VecDeque<ExecStart>,
    busy: bool,
}

pub struct FakeGuest {
    dir: PathBuf,
    pub root: PathBuf,
    pub spool: PathBuf,
    pub exit: std::io::PipeReader,
    alive: Mutex<Option<std::io::PipeWriter>>,
    listener: UnixListener,
    conn: Mutex<Option<UnixStream>>,
    execs: Mutex<BTreeMap<String, Exec>>,
    sessions: Mutex<BTreeMap<String, Session>>,
    pub forgotten: Mutex<Vec<String>>,
    pub cgroups: AtomicU64,
    pub released: AtomicU64,
    pub ooms: AtomicU64,
    pub disk: AtomicU64,
    /// Answers nothing from now on.
    pub mute: AtomicBool,
    pub file_events: Mutex<Vec<std::sync::mpsc::Sender<guest::FileEvent>>>,
}

impl std::fmt::Debug for FakeGuest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FakeGuest({})", self.dir.display())
    }
}

type Answer = Result<(Reply, Vec<OwnedFd>), GuestError>;

fn done() -> Answer {
    Ok((Reply::Done(Empty {}), Vec::new()))
}

impl FakeGuest {
    pub fn start(host: &Path, name: &str) -> Arc<Self> {
        let dir = host.join(name);
        let (root, spool) = (dir.join("root"), dir.join("spool"));
        std::fs::create_dir_all(&root).unwrap();
        std::fs::create_dir_all(&spool).unwrap();
        let (exit, alive) = std::io::pipe().unwrap();
        let guest = Arc::new(Self {
            listener: UnixListener::bind(dir.join("agent")).unwrap(),
            dir,
            root,
            spool,
            exit,
            alive: Mutex::new(Some(alive)),
            conn: Mutex::default(),
            execs: Mutex::default(),
            sessions: Mutex::default(),
            forgotten: Mutex::default(),
            cgroups: AtomicU64::new(0),
            released: AtomicU64::new(0),
            ooms: AtomicU64::new(0),
            disk: AtomicU64::new(0),
            mute: AtomicBool::new(false),
            file_events: Mutex::default(),
        });
        let accepting = Arc::clone(&guest);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = accepting.listener.accept() {
                if accepting.is_dead() {
                    return;
                }
                *accepting.conn.lock().unwrap() = Some(stream.try_clone().unwrap());
                let serving = Arc::clone(&accepting);
                std::thread::spawn(move || serving.serve(&stream));
            }
        });
        guest
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("agent")
    }

    pub fn is_dead(&self) -> bool {
        self.alive.lock().unwrap().is_none()
    }

    /// All processes and the agent end.
    pub fn kill(&self) {
        self.signal_all(Signal::KILL);
        self.drop_agent();
        *self.alive.lock().unwrap() = None;
    }

    /// The agent alone ends, as if it had crashed.
    pub fn drop_agent(&self) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(conn) = self.conn.lock().unwrap().take() {
            let _ = conn.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Kills for memory that the kernel has counted.
    pub fn count_oom(&self) {
        self.ooms.fetch_add(1, Ordering::SeqCst);
    }

    fn signal_all(&self, signal: Signal) {
        let execs = self.execs.lock().unwrap();
        for exec in execs.values().filter(|e| !e.info.ended) {
            if let Some(pid) = Pid::from_raw(exec.info.pid as i32) {
                let _ = rustix::process::kill_process_group(pid, signal);
            }
        }
    }

    fn serve(self: &Arc<Self>, stream: &UnixStream) {
        let (mut buffer, mut fds) = (BytesMut::new(), VecDeque::new());
        loop {
            while let Some((frame, used)) = guest::decode::<ToGuest>(&buffer).unwrap() {
                let _ = buffer.split_to(used);
                let own: Vec<OwnedFd> = fds.drain(..frame.fds as usize).collect();
                if !self.mute.load(Ordering::SeqCst) {
                    self.handle(frame.id, frame.request, own);
                }
            }
            match files::receive(stream, &mut buffer, &mut fds) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn say(&self, reply_to: u64, reply: Reply, fds: &[OwnedFd]) {
        let mut bytes = Vec::new();
        guest::encode(&FromGuest { reply_to, fds: fds.len() as u32, reply: Some(reply) }, &mut bytes);
        let conn = self.conn.lock().unwrap();
        if let Some(conn) = conn.as_ref() {
            let _ = files::send_all(conn, &bytes, fds);
        }
    }

    fn event(&self, reply: Reply) {
        self.say(0, reply, &[]);
    }

    fn handle(self: &Arc<Self>, id: u64, request: Option<Request>, mut fds: Vec<OwnedFd>) {
        let answer = match request.unwrap() {
            Request::Hello(_) => self.hello(),
            Request::ExecStart(start) => return self.start_exec(id, start),
            Request::ExecSignal(s) => self.signal(&s.exec, s.signal),
            Request::StdinOpen(e) => self.stdin(&e.exec),
            Request::StdinClose(e) => {
                if let Some(exec) = self.execs.lock().unwrap().get_mut(&e.exec) {
                    exec.stdin = None;
                    exec.info.stdin_open = false;
                }
                done()
            }
            Request::ExecForget(e) => {
                self.execs.lock().unwrap().remove(&e.exec);
                self.forgotten.lock().unwrap().push(e.exec);
                done()
            }
            Request::SessionOpen(open) => return self.open_session(id, open),
            Request::SessionClose(s) => {
                self.sessions.lock().unwrap().remove(&s.session);
                self.event(Reply::SessionEnded(s));
                done()
            }
            Request::File(call) => {
                let (this, socket) = (Arc::clone(self), UnixStream::from(fds.pop().unwrap()));
                std::thread::spawn(move || files::serve(&this, &call, &socket));
                done()
            }
            Request::Dial(dial) => match std::net::TcpStream::connect(("127.0.0.1", dial.port as u16)) {
                Ok(stream) => Ok((Reply::Done(Empty {}), vec![stream.into()])),
                Err(e) => Err(refusal(GuestErrorKind::Unavailable, format!("port {}: {e}", dial.port))),
            },
            Request::Terminate(_) => {
                self.signal_all(Signal::TERM);
                done()
            }
            Request::StandStill(_) | Request::GoOn(_) => done(),
            Request::Check(check) => self.check(&check.user, &check.cwd),
        };
        if id != 0 {
            self.answer(id, answer);
        }
    }

    fn answer(&self, id: u64, answer: Answer) {
        match answer {
            Ok((reply, fds)) => self.say(id, reply, &fds),
            Err(error) => self.say(id, Reply::Error(error), &[]),
        }
    }

    fn check(&self, user: &str, cwd: &[u8]) -> Answer {
        if user == "ghost" {
            return Err(refusal(GuestErrorKind::InvalidArgument, "there is no user ghost"));
        }
        let cwd = String::from_utf8_lossy(cwd).into_owned();
        if !cwd.is_empty() && !self.root.join(cwd.trim_start_matches('/')).is_dir() {
            return Err(refusal(GuestErrorKind::NotFound, format!("there is no directory {cwd}")));
        }
        done()
    }

    fn hello(&self) -> Answer {
        let execs = self.execs.lock().unwrap();
        let execs = execs
            .values()
            .map(|e| ExecInfo { stdout: Some(e.out.whole()), stderr: Some(e.err.whole()), ..e.info.clone() })
            .collect();
        let sessions = self.sessions.lock().unwrap().values().map(|s| s.info.clone()).collect();
        Ok((Reply::Hello(HelloReply { generation: 1, execs, sessions }), Vec::new()))
    }

    fn stdin(&self, exec: &str) -> Answer {
        let execs = self.execs.lock().unwrap();
        match execs.get(exec).and_then(|e| e.stdin.as_ref()) {
            Some(fd) => Ok((Reply::Done(Empty {}), vec![fd.try_clone().unwrap()])),
            None => Err(refusal(GuestErrorKind::Conflict, "no stdin is open")),
        }
    }

    fn signal(&self, exec: &str, signal: i32) -> Answer {
        let execs = self.execs.lock().unwrap();
        let Some(exec) = execs.get(exec) else { return Err(refusal(GuestErrorKind::NotFound, "no exec")) };
        let signal = Signal::from_named_raw(signal).unwrap();
        let _ = rustix::process::kill_process_group(Pid::from_raw(exec.info.pid as i32).unwrap(), signal);
        done()
    }

    fn open_session(self: &Arc<Self>, id: u64, open: guest::SessionOpen) {
        let mut sessions = self.sessions.lock().unwrap();
        if let Some(session) = sessions.get(&open.session) {
            let info = SessionInfo { existed: true, ..session.info.clone() };
            drop(sessions);
            return self.answer(id, Ok((Reply::Session(info), Vec::new())));
        }
        let info = SessionInfo {
            session: open.session.clone(),
            pid: 7,
            user: open.user.clone(),
            pty_exec: open.pty_exec.clone(),
            created_ms: now_ms(),
            ..SessionInfo::default()
        };
        sessions.insert(open.session.clone(), Session { info: info.clone(), ..Session::default() });
        drop(sessions);
        if let Some(pty) = open.pty {
            let start = ExecStart {
                exec: open.pty_exec,
                argv: vec![b"/bin/sh".to_vec()],
                session: open.session,
                pty: Some(pty),
                ..ExecStart::default()
            };
            self.spawn(0, &start, None);
        }
        self.answer(id, Ok((Reply::Session(info), Vec::new())));
    }

    fn start_exec(self: &Arc<Self>, id: u64, start: ExecStart) {
        if start.session.is_empty() {
            return self.spawn(id, &start, None);
        }
        let mut sessions = self.sessions.lock().unwrap();
        let Some(session) = sessions.get_mut(&start.session) else {
            drop(sessions);
            return self.answer(id, Err(refusal(GuestErrorKind::NotFound, "no such session")));
        };
        if session.busy {
            let info = self.info(&start, 0);
            self.enter(&start, info, None);
            session.queue.push_back(start);
            drop(sessions);
            return self.answer(id, Ok((Reply::ExecStarted(ExecStarted { pid: 0 }), Vec::new())));
        }
        session.busy = true;
        drop(sessions);
        let session = start.session.clone();
        self.spawn(id, &start, Some(session));
    }

    fn next_line(self: &Arc<Self>, session: &str) {
        let next = {
            let mut sessions = self.sessions.lock().unwrap();
            let Some(session) = sessions.get_mut(session) else { return };
            let next = session.queue.pop_front();
            session.busy = next.is_some();
            next
        };
        if let Some(start) = next {
            self.spawn(0, &start, Some(session.to_owned()));
        }
    }

    fn info(&self, start: &ExecStart, pid: u32) -> ExecInfo {
        let line = start.shell.clone().unwrap_or_else(|| start.argv.join(&b' '));
        ExecInfo {
            exec: start.exec.clone(),
            session: start.session.clone(),
            command: String::from_utf8_lossy(&line).chars().take(1024).collect(),
            pid,
            started_ms: now_ms(),
            pty: start.pty.is_some(),
            stdin_open: start.stdin_mode == Stdin::Pipe as i32,
            ..ExecInfo::default()
        }
    }

    fn enter(&self, start: &ExecStart, info: ExecInfo, stdin: Option<OwnedFd>) {
        let limit = if start.output_limit == 0 { guest::OUTPUT_LIMIT_DEFAULT } else { start.output_limit };
        let kept = |suffix: &str| Kept::new(self.spool.join(format!("{}.{suffix}", start.exec)), limit);
        let exec = Exec { info, out: kept("out"), err: kept("err"), stdin };
        self.execs.lock().unwrap().insert(start.exec.clone(), exec);
    }

    fn command(&self, start: &ExecStart) -> Command {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut command = match &start.shell {
            Some(line) => {
                let mut command = Command::new("/bin/sh");
                command.arg("-c").arg(text(line));
                command
            }
            None => {
                let mut command = Command::new(text(&start.argv[0]));
                command.args(start.argv[1..].iter().map(|a| text(a)));
                command
            }
        };
        for line in &start.env {
            let line = text(line);
            let (key, value) = line.split_once('=').unwrap();
            command.env(key, value);
        }
        command.process_group(0).current_dir(&self.root);
        command
    }

    /// Runs it; answers `id` unless 0.
    fn spawn(self: &Arc<Self>, id: u64, start: &ExecStart, session: Option<String>) {
        if start.user == "ghost" {
            return self.answer(id, Err(refusal(GuestErrorKind::InvalidArgument, "there is no user ghost")));
        }
        let mut command = self.command(start);
        let mut given = None;
        let mut stdin = None;
        let mut terminal = None;
        if start.pty.is_some() {
            let master =
                rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)
                    .unwrap();
            rustix::pty::grantpt(&master).unwrap();
            rustix::pty::unlockpt(&master).unwrap();
            let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
            let slave = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
            command.stdin(slave()).stdout(slave()).stderr(slave());
            terminal = Some(File::from(master.try_clone().unwrap()));
            stdin = Some(master);
        } else {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            match Stdin::try_from(start.stdin_mode).unwrap() {
                Stdin::Null => drop(command.stdin(Stdio::null())),
                Stdin::Given => {
                    let (read, write) = std::io::pipe().unwrap();
                    command.stdin(read);
                    given = Some(write);
                }
                Stdin::Pipe => {
                    let (read, write) = std::io::pipe().unwrap();
                    command.stdin(read);
                    stdin = Some(write.into());
                }
            }
        }
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) => return self.answer(id, Err(refusal(GuestErrorKind::InvalidArgument, e.to_string()))),
        };
        drop(command);
        if let Some(mut given) = given {
            let _ = given.write_all(&start.stdin);
        }
        let pid = if session.is_some() { 7 } else { child.id() };
        let info = ExecInfo { pid: child.id(), ..self.info(start, pid) };
        let copy: Vec<OwnedFd> = stdin.iter().map(|fd| fd.try_clone().unwrap()).collect();
        if session.is_none() || !self.execs.lock().unwrap().contains_key(&start.exec) {
            self.enter(start, info, stdin);
        }
        if id != 0 {
            self.answer(id, Ok((Reply::ExecStarted(ExecStarted { pid }), copy)));
        }
        let readers: Vec<_> = match terminal {
            Some(master) => vec![self.read(&start.exec, Terminal(master), false)],
            None => vec![
                self.read(&start.exec, child.stdout.take().unwrap(), false),
                self.read(&start.exec, child.stderr.take().unwrap(), true),
            ],
        };
        let timed_out = Arc::new(AtomicBool::new(false));
        if start.timeout_ms > 0 {
            let (late, ms) = (Arc::clone(&timed_out), start.timeout_ms);
            let group = Pid::from_child(&child);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(ms));
                late.store(true, Ordering::SeqCst);
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            });
        }
        let (this, exec) = (Arc::clone(self), start.exec.clone());
        let quits = start.shell.as_deref() == Some(b"exit");
        std::thread::spawn(move || {
            let status = child.wait().unwrap();
            for reader in readers {
                let _ = reader.join();
            }
            this.ended(&exec, status, timed_out.load(Ordering::SeqCst), session, quits);
        });
    }

    fn ended(
        self: &Arc<Self>,
        exec: &str,
        status: std::process::ExitStatus,
        timed_out: bool,
        session: Option<String>,
        quits: bool,
    ) {
        let info = {
            let mut execs = self.execs.lock().unwrap();
            let Some(exec) = execs.get_mut(exec) else { return };
            let info = &mut exec.info;
            info.ended = true;
            info.ended_ms = now_ms();
            info.code = status.code().unwrap_or(0);
            info.signal = status.signal().unwrap_or(0);
            info.timed_out = timed_out && info.signal != 0;
            info.session_ended = quits && session.is_some();
            info.cpu_us = 42;
            exec.stdin = None;
            exec.info.clone()
        };
        match session {
            Some(session) if quits => {
                // Out of the table first: a line that comes after the end must not join its queue.
                self.sessions.lock().unwrap().remove(&session);
                self.event(Reply::Exited(info));
                self.event(Reply::SessionEnded(SessionRef { session }));
            }
            Some(session) => {
                self.event(Reply::Exited(info));
                self.next_line(&session);
            }
            None => self.event(Reply::Exited(info)),
        }
    }

    fn read(
        self: &Arc<Self>,
        exec: &str,
        mut from: impl Read + Send + 'static,
        err: bool,
    ) -> std::thread::JoinHandle<()> {
        let (this, exec) = (Arc::clone(self), exec.to_owned());
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(got @ 1..) = from.read(&mut buffer) {
                let news = {
                    let mut execs = this.execs.lock().unwrap();
                    let Some(entry) = execs.get_mut(&exec) else { return };
                    let kept = if err { &mut entry.err } else { &mut entry.out };
                    kept.take(&buffer[..got])
                };
                let (stdout, stderr) = if err { (None, Some(news)) } else { (Some(news), None) };
                this.event(Reply::Output(Output { exec: exec.clone(), stdout, stderr }));
            }
        })
    }
}

/// A terminal's master, which the edge may have made non-blocking: that is shared.
struct Terminal(File);

impl Read for Terminal {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let mut poll = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut poll, None)?;
        self.0.read(into)
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
    }
}
