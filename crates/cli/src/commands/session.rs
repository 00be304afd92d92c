//! `dsec session`: the shells that a sandbox keeps.

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{SandboxId, SessionId};

use super::{Context, completion};
use crate::failure::Outcome;
use crate::render;

/// `dsec session ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// List a sandbox's sessions
    #[command(after_help = "Examples:\n  dsec session ls sb-n1-abc\n  dsec session ls sb-n1-abc --json")]
    Ls(LsArgs),
    /// Close sessions, with all that runs in them
    #[command(
        after_help = "Examples:\n  dsec session close sb-n1-abc build\n  dsec session close sb-n1-abc a b"
    )]
    Close(CloseArgs),
}

/// `dsec session ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
}

/// `dsec session close`.
#[derive(Debug, Args)]
pub(crate) struct CloseArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// Their names
    #[arg(required = true)]
    sessions: Vec<SessionId>,
}

/// Runs one of the commands.
pub(crate) async fn session(context: &Context, command: SessionCommand) -> Outcome {
    match command {
        SessionCommand::Ls(args) => list(context, &args).await,
        SessionCommand::Close(args) => close(context, &args).await,
    }
}

async fn list(context: &Context, args: &LsArgs) -> Outcome {
    let sessions = context.client.sessions(&args.id).await?;
    if context.global.json {
        render::json(&sessions)?;
        return Ok(0);
    }
    let now = render::now_ms();
    let rows = sessions.iter().map(|session| {
        vec![
            session.id.to_string(),
            if session.pty_exec_id.is_some() { "terminal" } else { "lines" }.to_owned(),
            session.pid.to_string(),
            session.user.clone(),
            session.pending.to_string(),
            render::age(session.created_ms, now),
        ]
    });
    render::table(&["NAME", "KIND", "PID", "USER", "PENDING", "AGE"], rows.collect())?;
    Ok(0)
}

async fn close(context: &Context, args: &CloseArgs) -> Outcome {
    let (mut closed, mut code) = (Vec::new(), 0);
    for session in &args.sessions {
        match context.client.close_session(&args.id, session).await {
            Ok(()) => closed.push(session),
            Err(error) => {
                render::failure(&error.into(), context.global.json);
                code = 1;
            }
        }
    }
    if context.global.json {
        render::json(&serde_json::json!({ "closed": closed }))?;
    } else {
        closed.iter().try_for_each(|session| render::line(session.as_str()))?;
    }
    Ok(code)
}
