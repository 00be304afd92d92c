//! Starting a command: what is checked before a process is made, and its descriptors.

use std::os::fd::{AsFd, OwnedFd};

use dsec_proto::guest::{ExecStart, GuestError, GuestErrorKind as Kind, STDIN_INLINE_MAX, Stdin};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::agent::{Agent, On};
use crate::child::{self, Cgroup, Plan, Program, Stdio, Work};
use crate::conn::Ack;
use crate::exec::{Exec, State, set_nonblocking};
use crate::fail::{fail, invalid, no_nul, os};

/// Execs that run or wait at once: what one `Hello` can list besides the ended ones.
pub(crate) const RUNNING_EXECS_MAX: usize = 1024;
/// Longest id of an exec and name of a session.
const NAME_MAX: usize = 128;

/// A name that is safe as a file name in the spool.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), GuestError> {
    let safe = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with('.') || !name.bytes().all(safe) {
        return Err(invalid(format!(
            "`{}` is no {what}: 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`",
            name.chars().take(NAME_MAX).collect::<String>()
        )));
    }
    Ok(())
}

/// Two descriptors are a cgroup and its `cgroup.kill`; none is none.
pub(crate) fn cgroup_of(fds: Vec<OwnedFd>) -> Result<Option<Cgroup>, GuestError> {
    let count = fds.len();
    let mut fds = fds.into_iter();
    match (count, fds.next(), fds.next()) {
        (0, ..) => Ok(None),
        (2, Some(dir), Some(kill)) => Ok(Some(Cgroup { dir, kill })),
        _ => Err(invalid(format!("{count} descriptors came; a cgroup has 2"))),
    }
}

/// Pipes of one command: the child's ends and ours.
pub(crate) struct Pipes {
    pub(crate) theirs: [OwnedFd; 3],
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) ours: [OwnedFd; 2],
}

/// An output pipe: ours does not wait, theirs does. Open to all, since a command may open
/// `/dev/stdout` by name, and the pipe's owner is the agent, which is nobody inside; only who may
/// look at a process's descriptors can get at it.
pub(crate) fn output_pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    set_nonblocking(&read)?;
    open_to_all(&read)?;
    Ok((read, write))
}

/// See [`output_pipe`].
pub(crate) fn open_to_all(pipe: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::fchmod(pipe, rustix::fs::Mode::from_raw_mode(0o666))
}

impl Agent {
    /// Starts a command. Its answer comes when it is known to run.
    pub(crate) fn exec_start(
        &mut self,
        ack: Ack,
        request: &ExecStart,
        fds: Vec<OwnedFd>,
    ) -> Result<(), GuestError> {
        self.may_start()?;
        check_name("exec id", &request.exec)?;
        if self.execs.find(|e| e.id == request.exec).is_some() {
            return Err(fail(Kind::AlreadyExists, format!("exec {} is known already", request.exec)));
        }
        check_strings(request)?;
        if !request.session.is_empty() {
            return self.session_line(ack, request);
        }
        let program = match (&request.shell, request.argv.is_empty()) {
            (Some(line), true) => Program::Line(line),
            (None, false) => Program::Argv(&request.argv),
            (None, true) => return Err(invalid("no program is named: argv is empty")),
            (Some(_), false) => return Err(invalid("argv and shell cannot go together")),
        };
        let exec = Exec::new(&request.exec, request, ack, self.clock.now());
        self.launch(exec, request, program, fds).map(drop)
    }

    /// Nothing new once the sandbox stops, and not without bound.
    pub(crate) fn may_start(&self) -> Result<(), GuestError> {
        if self.terminating {
            return Err(fail(Kind::Conflict, "the sandbox is stopping; nothing new is started"));
        }
        if self.execs.len() - self.ended.len() >= RUNNING_EXECS_MAX {
            let message =
                format!("{RUNNING_EXECS_MAX} commands run or wait in this sandbox, the most there can be");
            return Err(fail(Kind::ResourceExhausted, message));
        }
        Ok(())
    }

    /// Makes the process of an exec.
    pub(crate) fn launch(
        &mut self,
        mut exec: Exec,
        request: &ExecStart,
        program: Program<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<crate::slab::Key, GuestError> {
        exec.cgroup = cgroup_of(fds)?;
        let pipes = match request.pty {
            Some(_) => None,
            None => Some(self.pipes(request).map_err(|e| match e {
                Errno::MFILE | Errno::NFILE => {
                    fail(Kind::ResourceExhausted, "the agent has no descriptor left for another command")
                }
                e => os("cannot make pipes", e),
            })?),
        };
        let stdio = match (&pipes, request.pty) {
            (Some(p), _) => Stdio::Pipes(std::array::from_fn(|i| p.theirs[i].as_fd())),
            (None, size) => Stdio::Terminal(size.unwrap_or(dsec_proto::guest::Pty { rows: 0, cols: 0 })),
        };
        let work = Work::Exec(child::Exec { program, env: &request.env, stdio, extra: &[] });
        let plan = Plan { user: &request.user, cwd: &request.cwd, work };
        let child = child::spawn(&self.host, exec.cgroup.as_ref().map(|c| c.dir.as_fd()), &plan)?;
        exec.pid = child.pid;
        exec.report = Some(child.report);
        if let Some(pipes) = pipes {
            exec.stdin = pipes.stdin;
            exec.fds = pipes.ours.map(Some);
        }
        Ok(self.watch_exec(exec))
    }

    fn watch_exec(&mut self, exec: Exec) -> crate::slab::Key {
        let key = self.execs.insert(exec);
        let Some(exec) = self.execs.get(key) else { return key };
        exec_fds(exec).for_each(|(fd, on)| {
            // Fails without memory only; then the stream is not read and the command waits.
            let _ = self.poll.read(fd, on, Some(key));
        });
        key
    }

    fn pipes(&self, request: &ExecStart) -> Result<Pipes, Errno> {
        let (out, out_theirs) = output_pipe()?;
        let (err, err_theirs) = output_pipe()?;
        let (stdin_theirs, stdin) = match Stdin::try_from(request.stdin_mode) {
            Ok(Stdin::Pipe) => {
                let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
                set_nonblocking(&write)?;
                open_to_all(&read)?;
                (read, Some(write))
            }
            Ok(Stdin::Given) if !request.stdin.is_empty() => (given(&request.stdin)?, None),
            _ => (self.host.null.try_clone().map_err(|_| Errno::MFILE)?, None),
        };
        Ok(Pipes { theirs: [stdin_theirs, out_theirs, err_theirs], stdin, ours: [out, err] })
    }
}

fn exec_fds(exec: &Exec) -> impl Iterator<Item = (&OwnedFd, On)> {
    let starting = exec.state == State::Starting;
    let [out, err] = &exec.fds;
    [(&exec.report, On::ExecReport), (out, On::ExecOut), (err, On::ExecErr)]
        .into_iter()
        .filter(move |_| starting)
        .filter_map(|(fd, on)| fd.as_ref().map(|fd| (fd, on)))
}

/// Input that is all there: in a pipe; where the pipe is too small for it (the user's share of pipe
/// memory is used up), in a file of its own.
fn given(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    set_nonblocking(&write)?;
    open_to_all(&read)?;
    if rustix::io::write(&write, bytes) == Ok(bytes.len()) {
        return Ok(read);
    }
    let file = rustix::fs::memfd_create("stdin", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&file, &bytes[at..], at as u64)?.max(1);
    }
    Ok(file)
}

fn check_strings(request: &ExecStart) -> Result<(), GuestError> {
    if request.stdin.len() > STDIN_INLINE_MAX {
        return Err(fail(
            Kind::TooLarge,
            format!("standard input of {} bytes; at most {STDIN_INLINE_MAX} go inline", request.stdin.len()),
        ));
    }
    for argument in &request.argv {
        no_nul("an argument", argument)?;
    }
    if let Some(line) = &request.shell {
        no_nul("the command line", line)?;
    }
    for variable in &request.env {
        no_nul("an environment variable", variable)?;
    }
    no_nul("the working directory", &request.cwd)?;
    no_nul("the user", request.user.as_bytes())
}
