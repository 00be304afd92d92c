//! `dsec shell`: a terminal in a sandbox.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{ExecId, SandboxId, SessionId};
use dsec_proto::rest::{ExecRequest, SessionRequest, StdinMode};

use super::exec::{exit_code, explain};
use super::input::Input;
use super::signals::Signals;
use super::stream::{Ending, Followed, follow, send_signal};
use super::{Context, completion};
use crate::client::Offsets;
use crate::failure::{EXIT_PIPE, Failure, Outcome};
use crate::{parse, render, terminal};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec shell sb-n1-abc
  dsec shell sb-n1-abc --user nobody --cwd /tmp
  dsec shell sb-n1-abc --session work     a shell that lives on: leave it with ~. and come back

Enter ~ . leaves the terminal. Without --session the shell ends then.";

/// bash where there is one.
const SHELL: &str = "if [ -x /bin/bash ]; then exec /bin/bash -i; else exec /bin/sh -i; fi";

/// `dsec shell`.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// A terminal session to make or come back to
    #[arg(long, short = 's', value_name = "NAME")]
    session: Option<SessionId>,
    /// User: a name, or uid[:gid]
    #[arg(long, short = 'u', value_name = "USER")]
    user: Option<String>,
    /// Working directory
    #[arg(long, short = 'w', value_name = "DIR")]
    cwd: Option<String>,
    /// A variable; KEY alone takes its value from here. May be repeated
    #[arg(long, short = 'e', value_name = "KEY[=VALUE]", value_parser = parse::env_value)]
    env: Vec<(String, String)>,
}

/// Opens a terminal and ends with its shell's code.
pub(crate) async fn shell(context: &Context, args: ShellArgs) -> Outcome {
    let mut signals = Signals::new()?;
    // First the terminal: without one, nothing is started.
    let input = Input::terminal(true)?;
    let stays = args.session.is_some();
    let id = args.id.clone();
    let exec = start(context, args).await?;
    let followed =
        Followed { client: &context.client, sandbox: &id, exec: &exec, from: Offsets::default(), stays };
    let ending = follow(&followed, input, &mut signals).await?;
    match ending {
        Ending::Exited(exec) => {
            explain(&exec);
            exit_code(&exec)
        }
        Ending::Left if stays => {
            render::note("\ndsec: left; the session lives on");
            Ok(0)
        }
        Ending::Left => {
            send_signal(&followed, "SIGHUP", true).await;
            render::note("\ndsec: left");
            Ok(0)
        }
        Ending::Told(asked) => Ok(asked.exit_code()),
        Ending::ReaderGone => Ok(EXIT_PIPE),
    }
}

async fn start(context: &Context, args: ShellArgs) -> Result<ExecId, Failure> {
    let mut env: std::collections::BTreeMap<_, _> = args.env.into_iter().collect();
    if let Ok(term) = std::env::var("TERM") {
        env.entry("TERM".to_owned()).or_insert(term);
    }
    let pty = Some(terminal::size());
    let Some(name) = args.session else {
        let request = ExecRequest {
            shell: Some(SHELL.to_owned()),
            env,
            cwd: args.cwd,
            user: args.user,
            stdin_mode: StdinMode::Stream,
            pty,
            ..ExecRequest::default()
        };
        return Ok(context.client.exec(&args.id, &request).await?.id);
    };
    let request = SessionRequest { id: Some(name), shell: None, user: args.user, cwd: args.cwd, env, pty };
    let session = context.client.session(&args.id, &request).await?;
    session.pty_exec_id.ok_or_else(|| {
        Failure::new(format!("the session {} has no terminal", session.id))
            .hint("it was made for lines; use `dsec exec --session`, or another name here")
    })
}
