//! Starting a command: the request checked, its cgroup, its stdin, its start, and its result.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dsec_model::{ErrorKind, ExecId, SessionId};
use dsec_proto::guest::{self, ExecStart, Reply, Request, STDIN_INLINE_MAX, SessionOpen, Stdin};
use dsec_proto::rest::{self, ApiError, ExecRequest, INLINE_MAX, PtySize, StdinMode};
use tokio::time::Instant;

use super::plan::{check_path, check_user};
use super::{Entered, Live};
use crate::error::{agent_gone, invalid, invalid_field};
use crate::guest::CallError;
use crate::guest::exec::{Exec, Facts, Which};
use crate::guest::read::first_bytes;
use crate::ids;

/// Bytes of arguments and environment together: what the kernel takes with the usual 8 MiB stack
/// limit. Source: execve(2).
pub const ARG_BYTES_MAX: usize = 2 << 20;
/// Bytes of one argument or variable with its NUL. Source: `MAX_ARG_STRLEN` of Linux.
pub const ARG_STRING_MAX: usize = 131_072;
/// Longest time limit of a command, ms: the longest life of a sandbox.
const TIMEOUT_MS_MAX: u64 = 30 * 86_400 * 1000;
/// Bytes of each stream inline when the request does not say.
pub const INLINE_DEFAULT: u64 = 1 << 20;
/// How long a line waits for the end of its session's last shell, which is then opened anew.
const SESSION_END_MAX: Duration = Duration::from_secs(5);
const SESSION_END_POLL: Duration = Duration::from_millis(5);
/// Bytes of a command line that records show.
const COMMAND_SHOWN_MAX: usize = 1024;

/// Checks names of environment variables and their values.
///
/// # Errors
/// The first that cannot be one.
pub fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    for (key, value) in env {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(invalid_field("env", format!("{key:?} cannot name an environment variable")));
        }
        if value.contains('\0') {
            return Err(invalid_field("env", format!("the value of {key:?} in env contains a NUL byte")));
        }
        string_fits("env", key.len() + 1 + value.len())?;
    }
    Ok(())
}

fn string_fits(field: &str, bytes: usize) -> Result<(), ApiError> {
    if bytes < ARG_STRING_MAX {
        return Ok(());
    }
    Err(invalid_field(
        field,
        format!(
            "a string in {field} has {bytes} bytes; {} is the most that the kernel takes",
            ARG_STRING_MAX - 1
        ),
    )
    .hint("write it to a file, or give it as stdin"))
}

/// Checks all that can be checked outside the sandbox.
///
/// # Errors
/// The first field that cannot be.
pub fn check(request: &ExecRequest) -> Result<(), ApiError> {
    match (request.argv.is_empty(), &request.shell) {
        (true, None) => {
            return Err(invalid_field("argv", "neither argv nor shell is given; give one of them"));
        }
        (false, Some(_)) => {
            return Err(invalid_field("shell", "both argv and shell are given; give one of them"));
        }
        _ => {}
    }
    if request.argv.first().is_some_and(String::is_empty) {
        return Err(invalid_field("argv", "argv[0] is empty; it must name a program"));
    }
    for (field, text) in
        request.argv.iter().map(|a| ("argv", a)).chain(request.shell.iter().map(|s| ("shell", s)))
    {
        if text.contains('\0') {
            return Err(invalid_field(field, format!("{field} contains a NUL byte")));
        }
        // A session's line is typed into a shell and is no argument of anything.
        if request.session_id.is_none() {
            string_fits(field, text.len())?;
        }
    }
    check_env(&request.env)?;
    let bytes: usize = request.argv.iter().map(|a| a.len() + 1).sum::<usize>()
        + request.shell.as_ref().map_or(0, String::len)
        + request.env.iter().map(|(k, v)| k.len() + v.len() + 2).sum::<usize>();
    if bytes > ARG_BYTES_MAX {
        return Err(invalid_field(
            if request.argv.is_empty() { "shell" } else { "argv" },
            format!(
                "arguments and environment have {bytes} bytes; {ARG_BYTES_MAX} is the most that the kernel takes"
            ),
        ));
    }
    if let Some(cwd) = &request.cwd {
        check_path("cwd", cwd)?;
    }
    if let Some(user) = &request.user {
        check_user("user", user)?;
    }
    if request.timeout_ms.is_some_and(|ms| ms > TIMEOUT_MS_MAX) {
        return Err(invalid_field("timeout_ms", format!("timeout_ms is above {TIMEOUT_MS_MAX} (30 days)")));
    }
    if request.inline_limit_bytes.is_some_and(|bytes| bytes > INLINE_MAX) {
        return Err(invalid_field("inline_limit_bytes", format!("inline_limit_bytes is above {INLINE_MAX}"))
            .hint("read the rest from .../stdout"));
    }
    check_stdin(request)?;
    check_pty("pty", request.pty)?;
    if request.session_id.is_some() { check_line(request) } else { Ok(()) }
}

fn check_stdin(request: &ExecRequest) -> Result<(), ApiError> {
    let given = request.stdin.is_some() || request.stdin_base64.is_some();
    if request.stdin.is_some() && request.stdin_base64.is_some() {
        return Err(invalid_field("stdin", "both stdin and stdin_base64 are given; give one of them"));
    }
    if given && request.stdin_mode == StdinMode::Stream {
        return Err(invalid_field(
            "stdin",
            "stdin is given and stdin_mode is \"stream\"; it is one or the other",
        ));
    }
    if given && request.pty.is_some() {
        return Err(invalid_field(
            "stdin",
            "a command with a pty reads its terminal; type into it through /attach",
        ));
    }
    Ok(())
}

/// Checks a terminal's size.
///
/// # Errors
/// It has no lines or no columns.
pub fn check_pty(field: &str, size: Option<PtySize>) -> Result<(), ApiError> {
    match size {
        Some(PtySize { rows: 0, .. } | PtySize { cols: 0, .. }) => {
            Err(invalid_field(field, format!("{field} has no rows or no cols; both are at least 1")))
        }
        _ => Ok(()),
    }
}

/// Rules for a line of a session. Source: `docs/reference/http-api.md`.
fn check_line(request: &ExecRequest) -> Result<(), ApiError> {
    let with = |field: &str| {
        invalid_field(
            field,
            format!("{field} cannot go with session_id: a session's line runs in its shell as it is"),
        )
    };
    if request.shell.is_none() {
        return Err(with("argv"));
    }
    for (field, set) in [
        ("user", request.user.is_some()),
        ("cwd", request.cwd.is_some()),
        ("env", !request.env.is_empty()),
        ("stdin", request.stdin.is_some()),
        ("stdin_base64", request.stdin_base64.is_some()),
        ("stdin_mode", request.stdin_mode == StdinMode::Stream),
        ("pty", request.pty.is_some()),
    ] {
        if set {
            return Err(with(field));
        }
    }
    Ok(())
}

/// The command line as records show it until the agent tells its own.
fn shown(request: &ExecRequest) -> String {
    let mut text = request.shell.clone().unwrap_or_else(|| request.argv.join(" "));
    if text.len() > COMMAND_SHOWN_MAX {
        let cut = (0..=COMMAND_SHOWN_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
    }
    text
}

/// `K=V` lines of an environment.
pub fn env_lines(env: &BTreeMap<String, String>) -> Vec<Vec<u8>> {
    env.iter().map(|(key, value)| format!("{key}={value}").into_bytes()).collect()
}

/// A fresh cgroup for an exec or a session: its number and descriptors, none where the host has none.
///
/// # Errors
/// The kernel refuses one.
pub fn cgroup(live: &Live) -> Result<(Option<u32>, Vec<OwnedFd>), ApiError> {
    match live.grip.with(|instance| instance.exec_cgroup()) {
        Some(Ok(Some(cgroup))) => Ok((Some(cgroup.number), vec![cgroup.dir, cgroup.kill])),
        Some(Ok(None)) => Ok((None, Vec::new())),
        Some(Err(error)) => Err(crate::error::internal("no cgroup could be made for the command", &error)),
        None => Err(agent_gone("the sandbox has ended")),
    }
}

/// Starts a command that was checked. It starts whole or not at all, also when the caller is
/// dropped while it waits.
///
/// # Errors
/// It cannot be run; nothing was.
pub async fn start(entered: &Entered, request: ExecRequest) -> Result<Arc<Exec>, ApiError> {
    start_as(entered, request, ids::exec()?).await
}

/// The same, under a given id.
///
/// # Errors
/// It cannot be run; nothing was.
pub async fn start_as(entered: &Entered, request: ExecRequest, id: ExecId) -> Result<Arc<Exec>, ApiError> {
    let stdin = given_stdin(&request)?;
    let session = request.session_id.clone();
    if let Some(session) = &session {
        open_if_missing(entered, session).await?;
    }
    match try_start(entered, &id, &request, stdin.clone()).await {
        // Its shell ended between the look and the line.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let Some(session) = session else { return Err(error) };
            reopen(entered, &session).await?;
            try_start(entered, &id, &request, stdin).await
        }
        other => other,
    }
}

/// Opens a session whose last shell may still be ending.
async fn reopen(entered: &Entered, session: &SessionId) -> Result<(), ApiError> {
    let until = Instant::now() + SESSION_END_MAX;
    loop {
        match open_session(entered, named(session), None).await {
            Err(error) if error.kind() == ErrorKind::Conflict && Instant::now() < until => {
                tokio::time::sleep(SESSION_END_POLL).await;
            }
            other => return other.map(|_| ()),
        }
    }
}

fn named(session: &SessionId) -> SessionOpen {
    SessionOpen { session: session.to_string(), ..SessionOpen::default() }
}

fn given_stdin(request: &ExecRequest) -> Result<Option<Bytes>, ApiError> {
    match (&request.stdin, &request.stdin_base64) {
        (Some(text), _) => Ok(Some(Bytes::from(text.clone()))),
        (None, Some(text)) => match STANDARD.decode(text) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) => Err(invalid_field("stdin_base64", format!("stdin_base64 is no base64: {error}"))),
        },
        (None, None) => Ok(None),
    }
}

async fn try_start(
    entered: &Entered,
    id: &ExecId,
    request: &ExecRequest,
    stdin: Option<Bytes>,
) -> Result<Arc<Exec>, ApiError> {
    let live = &entered.live;
    // A session's line runs in the session's cgroup.
    let (number, fds) = if request.session_id.is_some() { (None, Vec::new()) } else { cgroup(live)? };
    if let Some(bytes) = &stdin {
        entered.handle.traffic.count_in(bytes.len());
    }
    let (mode, inline, fed) = match stdin {
        _ if request.stdin_mode == StdinMode::Stream && request.pty.is_none() => {
            (Stdin::Pipe, Vec::new(), None)
        }
        Some(bytes) if bytes.len() > STDIN_INLINE_MAX => (Stdin::Pipe, Vec::new(), Some(bytes)),
        Some(bytes) => (Stdin::Given, bytes.into(), None),
        None => (Stdin::Null, Vec::new(), None),
    };
    let facts = Facts {
        command: shown(request),
        session: request.session_id.clone(),
        pty: request.pty.is_some(),
        stdin_open: mode == Stdin::Pipe,
        stdin_given: fed,
        cgroup: number,
        ..Facts::default()
    };
    let frame = ExecStart {
        exec: id.to_string(),
        argv: request.argv.iter().map(|a| a.clone().into_bytes()).collect(),
        shell: request.shell.clone().map(String::into_bytes),
        env: env_lines(&request.env),
        cwd: request.cwd.clone().unwrap_or_default().into_bytes(),
        user: request.user.clone().unwrap_or_default(),
        stdin_mode: mode as i32,
        stdin: inline,
        timeout_ms: request.timeout_ms.unwrap_or(0),
        output_limit: request.output_limit_bytes.unwrap_or(0),
        session: request.session_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        pty: request.pty.map(|size| guest::Pty { rows: size.rows.into(), cols: size.cols.into() }),
    };
    let exec = live.guest.execs.enter(id.clone(), facts).inspect_err(|_| live.grip.release_cgroup(number))?;
    match live.guest.start(id, Request::ExecStart(frame), fds).await? {
        Reply::ExecStarted(_) => Ok(exec),
        _ => Err(CallError::Unexpected.into()),
    }
}

async fn open_if_missing(entered: &Entered, session: &SessionId) -> Result<(), ApiError> {
    match entered.guest().execs.session(session.as_str()) {
        Some(info) if info.pty_exec.is_empty() => Ok(()),
        Some(_) => Err(ApiError::new(
            ErrorKind::Conflict,
            format!("session {session} is a terminal; it takes no lines"),
        )
        .hint("attach to its pty_exec_id and type, or use another session")),
        None => reopen(entered, session).await,
    }
}

/// Opens a session, or finds it. `shell_exec`: facts of the exec that a terminal session's shell is.
///
/// # Errors
/// The agent cannot open it.
pub async fn open_session(
    entered: &Entered,
    open: SessionOpen,
    shell_exec: Option<Facts>,
) -> Result<guest::SessionInfo, ApiError> {
    let live = &entered.live;
    let (number, fds) = cgroup(live)?;
    let answer = match shell_exec {
        None => live.guest.call(Request::SessionOpen(open), fds).await.map(|(reply, _)| reply),
        Some(facts) => {
            let id: ExecId = open.pty_exec.parse().map_err(|e| crate::error::bad_id(&e))?;
            if let Err(error) = live.guest.execs.enter(id.clone(), facts) {
                live.grip.release_cgroup(number);
                return Err(error);
            }
            live.guest.start(&id, Request::SessionOpen(open), fds).await
        }
    };
    match answer {
        Ok(Reply::Session(info)) => {
            live.guest.execs.session_opened(info.clone(), number);
            Ok(info)
        }
        Ok(_) => {
            live.grip.release_cgroup(number);
            Err(CallError::Unexpected.into())
        }
        Err(error) => {
            live.grip.release_cgroup(number);
            Err(error.into())
        }
    }
}

/// Waits for a command's end and gives its record with output.
///
/// # Errors
/// The agent went before the command's end was known.
pub async fn finish(entered: &Entered, exec: &Arc<Exec>, inline_limit: u64) -> Result<rest::Exec, ApiError> {
    exec.ended().await;
    if let Some(why) = exec.lost() {
        return Err(gone_during(entered, &why));
    }
    with_output(entered, exec, inline_limit).await
}

/// Says why a command's end will never be known: the sandbox was stopped, or its agent is gone.
pub fn gone_during(entered: &Entered, why: &str) -> ApiError {
    let record = entered.handle.record();
    match record.reason {
        Some(_) => crate::error::not_running(&record),
        None => agent_gone(why),
    }
}

/// A command's record with the first bytes of its output.
///
/// # Errors
/// The output cannot be read.
pub async fn with_output(entered: &Entered, exec: &Arc<Exec>, limit: u64) -> Result<rest::Exec, ApiError> {
    let mut record = exec.record();
    if limit > 0 {
        let stdout = first_bytes(exec, Which::Stdout, limit).await?;
        let stderr = first_bytes(exec, Which::Stderr, limit).await?;
        entered.handle.traffic.count_out(stdout.len() + stderr.len());
        (record.stdout, record.stdout_base64) = as_text(stdout);
        (record.stderr, record.stderr_base64) = as_text(stderr);
    }
    Ok(record)
}

/// Bytes as text, and exactly beside it where they are not UTF-8. A character that the limit cut
/// in two is such a place.
fn as_text(bytes: Vec<u8>) -> (Option<String>, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => {
            let bytes = error.as_bytes();
            (Some(String::from_utf8_lossy(bytes).into_owned()), Some(STANDARD.encode(bytes)))
        }
    }
}

/// Checks an inline limit of a query.
///
/// # Errors
/// It is above [`INLINE_MAX`].
pub fn inline_limit(asked: Option<u64>, default: u64) -> Result<u64, ApiError> {
    match asked.unwrap_or(default) {
        bytes if bytes > INLINE_MAX => {
            Err(invalid(format!("inline_limit_bytes is {bytes}; {INLINE_MAX} is the most")))
        }
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec(change: impl FnOnce(&mut ExecRequest)) -> ExecRequest {
        let mut request = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
        change(&mut request);
        request
    }

    fn field(request: &ExecRequest) -> String {
        check(request).unwrap_err().0.detail["field"].as_str().unwrap_or_default().to_owned()
    }

    #[test]
    fn what_no_kernel_or_shell_can_run_is_refused_by_field() {
        assert_eq!(field(&exec(|r| r.argv.clear())), "argv");
        assert_eq!(field(&exec(|r| r.shell = Some("x".into()))), "shell");
        assert_eq!(field(&exec(|r| r.argv.push("a\0".into()))), "argv");
        assert_eq!(field(&exec(|r| r.argv.push("a".repeat(ARG_STRING_MAX)))), "argv");
        assert_eq!(field(&exec(|r| r.argv.extend(vec!["a".repeat(100_000); 21]))), "argv");
        assert_eq!(field(&exec(|r| drop(r.env.insert(String::new(), "v".into())))), "env");
        assert_eq!(field(&exec(|r| r.timeout_ms = Some(u64::MAX))), "timeout_ms");
        assert_eq!(field(&exec(|r| r.pty = Some(PtySize { rows: 0, cols: 80 }))), "pty");
        let both = exec(|r| (r.stdin, r.stdin_base64) = (Some(String::new()), Some(String::new())));
        assert_eq!(field(&both), "stdin");
    }

    #[test]
    fn the_longest_string_that_the_kernel_takes_is_taken() {
        check(&exec(|r| r.argv.push("a".repeat(ARG_STRING_MAX - 1)))).unwrap();
    }

    #[test]
    fn a_sessions_line_takes_nothing_but_its_text() {
        let line = |change: fn(&mut ExecRequest)| {
            let mut request = exec(|r| {
                r.argv.clear();
                r.shell = Some("ls".into());
                r.session_id = Some("s".parse().unwrap());
            });
            change(&mut request);
            request
        };
        check(&line(|_| ())).unwrap();
        assert_eq!(field(&line(|r| r.user = Some("root".into()))), "user");
        assert_eq!(field(&line(|r| r.stdin_mode = StdinMode::Stream)), "stdin_mode");
        assert_eq!(field(&line(|r| (r.argv, r.shell) = (vec!["ls".into()], None))), "argv");
    }

    #[test]
    fn bytes_that_are_no_text_come_twice() {
        assert_eq!(as_text(b"hi".to_vec()), (Some("hi".into()), None));
        assert_eq!(as_text(vec![0xff]), (Some("\u{fffd}".into()), Some("/w==".into())));
    }
}
