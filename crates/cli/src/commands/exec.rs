//! `dsec exec`, and what `run` and `shell` share with it: starting a command and ending with its code.

use std::io::Read;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{SandboxId, SessionId};
use dsec_proto::rest::{Exec, ExecRequest, ExecState, INLINE_MAX, StdinMode};

use super::input::Input;
use super::signals::{Asked, Signals};
use super::stream::{Ending, Followed, follow, send_signal};
use super::{Context, completion};
use crate::client::Offsets;
use crate::failure::{EXIT_PIPE, Failure, Outcome};
use crate::{parse, render, terminal};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec exec sb-n1-abc -- ls -l /
  echo hello | dsec exec sb-n1-abc -i -- tee /tmp/greeting
  dsec exec sb-n1-abc -it -- top
  dsec exec sb-n1-abc --session build -- 'cd /src && make'    one line in a shell that is kept
  dsec exec sb-n1-abc --json -- uname -a                      record and output, as JSON, at its end
  dsec exec sb-n1-abc --detach -- make                        prints its id for attach, execs, kill

Ctrl-C is passed to the command; a second one kills it.";

/// Heading of the options about input and output.
pub(crate) const STREAMS: &str = "Input and output";
/// Bytes kept of each output of a command that is followed: far more than anybody reads, and little
/// enough that a command gone wild does not fill the node's disk.
pub(crate) const FOLLOWED_OUTPUT_MAX: u64 = 4 << 30;

/// One wait for a command's end; it is asked again until then.
pub(crate) const WAIT: Duration = Duration::from_secs(60);

/// `dsec exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    pub(crate) id: SandboxId,
    /// Run the line in this session's shell, which is made when it is not there
    #[arg(long, short = 's', value_name = "NAME", conflicts_with_all = ["interactive", "tty", "user", "cwd", "env"])]
    pub(crate) session: Option<SessionId>,
    /// Print its id once it runs, and leave it running; with -i its standard input stays open
    #[arg(long, short = 'd', conflicts_with = "tty")]
    pub(crate) detach: bool,
    /// Pass standard input on
    #[arg(long, short = 'i', help_heading = STREAMS)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(long, short = 't', help_heading = STREAMS)]
    pub(crate) tty: bool,
    /// User: a name, or uid[:gid]
    #[arg(long, short = 'u', value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Working directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// A variable; KEY alone takes its value from here. May be repeated
    #[arg(long, short = 'e', value_name = "KEY[=VALUE]", value_parser = parse::env_value)]
    pub(crate) env: Vec<(String, String)>,
    /// Bytes kept of each output; more is cut without a failure [default: 4 GiB; 64 MiB with --detach, --json]
    #[arg(long, value_name = "SIZE", value_parser = parse::size, help_heading = STREAMS)]
    pub(crate) output_limit: Option<u64>,
    /// The command and its arguments; with --session, a shell line
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// Runs a command in a sandbox and ends with its code.
pub(crate) async fn exec(context: &Context, args: ExecArgs) -> Outcome {
    let (interactive, tty) = (args.interactive, args.tty);
    let mut request = ExecRequest {
        env: args.env.into_iter().collect(),
        cwd: args.cwd,
        user: args.user,
        output_limit_bytes: args.output_limit,
        timeout_ms: context.global.timeout.map(millis),
        ..ExecRequest::default()
    };
    match args.session {
        Some(session) => {
            request.shell = Some(parse::shell_line(&args.command));
            request.session_id = Some(session);
        }
        None => request.argv = args.command,
    }
    if args.detach {
        return detached(context, &args.id, request, interactive).await;
    }
    let mut signals = Signals::new()?;
    let ran = run_in(context, &args.id, request, interactive, tty, &mut signals).await?;
    Ok(ran.code())
}

async fn detached(context: &Context, id: &SandboxId, mut request: ExecRequest, interactive: bool) -> Outcome {
    if interactive {
        request.stdin_mode = StdinMode::Stream;
    }
    let started = context.client.exec(id, &request).await?;
    if context.global.json {
        render::json(&started)?;
    } else {
        render::line(started.id.as_str())?;
    }
    Ok(0)
}

/// How a command in a sandbox went.
pub(crate) enum Ran {
    /// It ended.
    Exited(Box<Exec>, u8),
    /// We were told to end.
    Told(Asked),
    /// Nobody reads our output.
    ReaderGone,
}

impl Ran {
    /// Our exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Exited(_, code) => *code,
            Self::Told(asked) => asked.exit_code(),
            Self::ReaderGone => EXIT_PIPE,
        }
    }
}

/// Starts a command and follows it, or with `--json` waits for it and prints its record.
pub(crate) async fn run_in(
    context: &Context,
    id: &SandboxId,
    mut request: ExecRequest,
    interactive: bool,
    tty: bool,
    signals: &mut Signals,
) -> Result<Ran, Failure> {
    if context.global.json {
        if interactive {
            request.stdin_base64 = Some(STANDARD.encode(read_stdin()?));
        }
        let ran = run_for_json(context, id, &request, signals).await?;
        if let Ran::Exited(exec, _) = &ran {
            render::json(exec)?;
        }
        return Ok(ran);
    }
    // A terminal's output is a window that moves.
    let cut_is_asked = request.output_limit_bytes.is_some() || tty;
    request.output_limit_bytes.get_or_insert(FOLLOWED_OUTPUT_MAX);
    if tty {
        request.pty = Some(terminal::size());
        if let Ok(term) = std::env::var("TERM") {
            request.env.entry("TERM".to_owned()).or_insert(term);
        }
    }
    if interactive {
        request.stdin_mode = StdinMode::Stream;
    }
    let input = match (interactive, tty) {
        (true, true) => Input::terminal(false)?,
        (true, false) => Input::plain(),
        (false, _) => Input::None,
    };
    let started = context.client.exec(id, &request).await?;
    let followed = Followed {
        client: &context.client,
        sandbox: id,
        exec: &started.id,
        from: Offsets::default(),
        stays: false,
    };
    match follow(&followed, input, signals).await? {
        Ending::Exited(exec) => {
            explain(&exec);
            let code = finished(&exec, cut_is_asked)?;
            Ok(Ran::Exited(exec, code))
        }
        Ending::Told(asked) => Ok(Ran::Told(asked)),
        Ending::ReaderGone => Ok(Ran::ReaderGone),
        Ending::Left => Err(Failure::new("the terminal was left")),
    }
}

async fn run_for_json(
    context: &Context,
    id: &SandboxId,
    request: &ExecRequest,
    signals: &mut Signals,
) -> Result<Ran, Failure> {
    let started = context.client.exec(id, request).await?;
    let followed = Followed {
        client: &context.client,
        sandbox: id,
        exec: &started.id,
        from: Offsets::default(),
        stays: false,
    };
    let mut asked_before = false;
    loop {
        tokio::select! {
            exec = context.client.exec_wait(id, &started.id, WAIT, INLINE_MAX) => {
                let exec = exec?;
                if exec.state == ExecState::Exited {
                    let code = exit_code(&exec)?;
                    let exec = context.client.with_whole_output(id, exec).await?;
                    return Ok(Ran::Exited(Box::new(exec), code));
                }
            }
            asked = signals.next() => {
                let name = if asked_before { "SIGKILL" } else { asked.name() };
                send_signal(&followed, name, asked_before).await;
                if std::mem::replace(&mut asked_before, true) {
                    return Ok(Ran::Told(asked));
                }
            }
        }
    }
}

/// Says on standard error what an exit code alone does not.
pub(crate) fn explain(exec: &Exec) {
    if exec.timed_out {
        render::note("dsec: the command's time limit ended it");
    }
    for kill in &exec.oom_kills {
        render::note(&format!("dsec: the sandbox's memory was full: the kernel killed {}", kill.process));
    }
    if exec.session_ended {
        let session = exec.session_id.as_ref().map(ToString::to_string).unwrap_or_default();
        render::note(&format!(
            "dsec: the session {session} has ended with this line; its directory, variables and jobs are gone"
        ));
    }
    for (stream, written) in cut(exec) {
        let written = render::bytes(written);
        render::note(&format!("dsec: the command wrote {written} to {stream}; not all of it was kept"));
    }
}

/// The outputs of which not all was kept, and how much was written.
fn cut(exec: &Exec) -> impl Iterator<Item = (&'static str, u64)> {
    let both = [
        ("stdout", exec.stdout_truncated, exec.stdout_bytes),
        ("stderr", exec.stderr_truncated, exec.stderr_bytes),
    ];
    both.into_iter().filter(|(_, truncated, _)| *truncated).map(|(stream, _, bytes)| (stream, bytes))
}

/// Our exit code at the end of a command that was followed: its own, unless its output was cut where
/// nobody asked for that.
fn finished(exec: &Exec, cut_is_asked: bool) -> Outcome {
    let code = exit_code(exec)?;
    if cut_is_asked || cut(exec).next().is_none() {
        return Ok(code);
    }
    Err(Failure::new(format!("the command ended with {code}, and its output is not whole"))
        .hint("let it write to a file and copy that, or take the cut with --output-limit"))
}

/// Our exit code out of a command's record.
pub(crate) fn exit_code(exec: &Exec) -> Result<u8, Failure> {
    match exec.exit_code {
        Some(code) => Ok(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        None => Err(Failure::new(format!("the platform does not know how {} ended", exec.id))),
    }
}

/// A duration for the API: at least one millisecond, since 0 means no limit.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn read_stdin() -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::io("cannot read standard input", &error))?;
    Ok(bytes)
}
