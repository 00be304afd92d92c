//! Commands that run in the background: `dsec execs`, `dsec attach`, `dsec kill`.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{ExecId, SandboxId};
use dsec_proto::rest::{Exec, ExecState};

use super::exec::{exit_code, explain};
use super::input::Input;
use super::signals::Signals;
use super::stream::{Ending, Followed, follow};
use super::{Context, completion};
use crate::client::Offsets;
use crate::failure::{EXIT_PIPE, Failure, Outcome};
use crate::render;

pub(crate) const EXECS_EXAMPLES: &str = "\
Examples:
  dsec execs sb-n1-abc                      those that run, and the last that ended
  dsec execs sb-n1-abc --running --quiet    ids alone";
pub(crate) const ATTACH_EXAMPLES: &str = "\
Examples:
  dsec attach sb-n1-abc ex-1a               its output from the start, then as it comes
  dsec attach sb-n1-abc ex-1a --new         only what it writes from now on
  date | dsec attach sb-n1-abc ex-1a -i     standard input too, if it was started with -i

Ctrl-C leaves; the command runs on. At its end its exit code is ours.";
pub(crate) const KILL_EXAMPLES: &str = "\
Examples:
  dsec kill sb-n1-abc ex-1a                 SIGKILL to it and all it started
  dsec kill sb-n1-abc ex-1a --signal HUP    to its process group";

/// `dsec execs`.
#[derive(Debug, Args)]
pub(crate) struct ExecsArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// Those alone that run or wait
    #[arg(long, short = 'r')]
    running: bool,
    /// Ids alone
    #[arg(long, short = 'q')]
    quiet: bool,
}

/// `dsec attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// The command, as `exec --detach` and `execs` name it
    exec: ExecId,
    /// Pass standard input on
    #[arg(long, short = 'i')]
    interactive: bool,
    /// Only what it writes from now on
    #[arg(long, short = 'n')]
    new: bool,
}

/// `dsec kill`.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// The command
    exec: ExecId,
    /// Signal for its process group, by name or number [default: SIGKILL to all it started]
    #[arg(long, short = 's', value_name = "SIGNAL")]
    signal: Option<String>,
    /// The signal to every process that it started
    #[arg(long, requires = "signal")]
    tree: bool,
}

/// Lists a sandbox's commands.
pub(crate) async fn execs(context: &Context, args: ExecsArgs) -> Outcome {
    let mut execs = context.client.execs(&args.id).await?;
    execs.retain(|exec| !args.running || exec.state != ExecState::Exited);
    if context.global.json {
        render::json(&execs)?;
    } else if args.quiet {
        execs.iter().try_for_each(|exec| render::line(exec.id.as_str()))?;
    } else {
        let now = render::now_ms();
        let heading = ["ID", "STATE", "CODE", "AGE", "STDOUT", "STDERR", "SESSION", "COMMAND"];
        render::table(&heading, execs.iter().map(|exec| row(exec, now)).collect())?;
    }
    Ok(0)
}

fn row(exec: &Exec, now: u64) -> Vec<String> {
    let state = match exec.state {
        ExecState::Queued => "queued",
        ExecState::Running => "running",
        ExecState::Exited => "exited",
    };
    // One line, whatever the command's text holds.
    let command: String =
        exec.command.chars().map(|c| if c.is_control() { ' ' } else { c }).take(60).collect();
    vec![
        exec.id.to_string(),
        state.to_owned(),
        exec.exit_code.map(|code| code.to_string()).unwrap_or_default(),
        render::age(exec.started_ms, now),
        render::bytes(exec.stdout_bytes),
        render::bytes(exec.stderr_bytes),
        exec.session_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        command,
    ]
}

/// Follows a command that runs, or ran, and ends with its code.
pub(crate) async fn attach(context: &Context, args: AttachArgs) -> Outcome {
    let mut signals = Signals::new()?;
    let record = context.client.exec_wait(&args.id, &args.exec, std::time::Duration::ZERO, 0).await?;
    let from = if args.new {
        Offsets { stdout: record.stdout_bytes, stderr: record.stderr_bytes }
    } else {
        Offsets::default()
    };
    let input = if args.interactive { Input::plain() } else { Input::None };
    let followed =
        Followed { client: &context.client, sandbox: &args.id, exec: &args.exec, from, stays: true };
    match follow(&followed, input, &mut signals).await? {
        Ending::Exited(exec) => {
            explain(&exec);
            // How much is kept was said when it was started; a cut is noted.
            exit_code(&exec)
        }
        Ending::Told(asked) => {
            render::note(&format!("dsec: left; {} runs on", args.exec));
            Ok(asked.exit_code())
        }
        Ending::ReaderGone => Ok(EXIT_PIPE),
        Ending::Left => Err(Failure::new("the command was left")),
    }
}

/// Sends a signal to a command.
pub(crate) async fn kill(context: &Context, args: KillArgs) -> Outcome {
    let (signal, tree) = match args.signal {
        Some(signal) => (signal, args.tree),
        None => ("SIGKILL".to_owned(), true),
    };
    let record = context.client.signal(&args.id, &args.exec, &signal, tree).await?;
    if context.global.json {
        render::json(&record)?;
    }
    Ok(0)
}
