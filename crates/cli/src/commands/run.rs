//! `dsec run`: a sandbox for one command. Whatever happens, the sandbox is ended before we are.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use dsec_proto::rest::ExecRequest;

use super::create::SandboxOptions;
use super::exec::{Ran, STREAMS, millis, run_in};
use super::signals::Signals;
use super::{Context, completion};
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec run debian -- cat /etc/os-release
  dsec run debian --memory 1g --cpus 2 -- make -j2
  tar c . | dsec run debian -i -- tar tv
  dsec run -it debian                       a shell
  dsec run --keep debian -- make            leave the sandbox there; its id is on standard error

Ctrl-C is passed to the command; a second one kills it and ends the sandbox.";

/// `dsec run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Name of an imported image
    #[arg(add = ArgValueCandidates::new(completion::image_names))]
    image: String,
    /// Pass standard input on
    #[arg(long, short = 'i', help_heading = STREAMS)]
    interactive: bool,
    /// Give the command a terminal
    #[arg(long, short = 't', help_heading = STREAMS)]
    tty: bool,
    /// Leave the sandbox there; its id goes to standard error
    #[arg(long)]
    keep: bool,
    /// Bytes kept of each output; more is cut without a failure [default: 4 GiB; 64 MiB with --json]
    #[arg(long, value_name = "SIZE", value_parser = parse::size, help_heading = STREAMS)]
    output_limit: Option<u64>,
    #[command(flatten)]
    sandbox: SandboxOptions,
    /// The command and its arguments; with -t, a shell when left out
    #[arg(trailing_var_arg = true, required_unless_present = "tty", value_name = "CMD")]
    command: Vec<String>,
}

/// Makes a sandbox, runs the command, ends the sandbox, and ends with the command's code.
pub(crate) async fn run(context: &Context, args: RunArgs) -> Outcome {
    let mut signals = Signals::new()?;
    // A create that is under way runs to its end on the node whatever we do: only by waiting for it
    // do we learn which sandbox to end.
    let sandbox = context.client.create(&args.sandbox.request(args.image)).await?;
    let request = ExecRequest {
        argv: if args.command.is_empty() { vec!["/bin/sh".to_owned()] } else { args.command },
        output_limit_bytes: args.output_limit,
        timeout_ms: context.global.timeout.map(millis),
        ..ExecRequest::default()
    };
    let ran = run_in(context, &sandbox.id, request, args.interactive, args.tty, &mut signals).await;
    if args.keep {
        render::note(&format!("dsec: {} is kept; end it with `dsec stop {0}`", sandbox.id));
        return ran.map(|ran: Ran| ran.code());
    }
    let stopped = stop(context, &sandbox.id).await;
    let code = ran?.code();
    stopped.map(|()| code)
}

async fn stop(context: &Context, id: &SandboxId) -> Result<(), Failure> {
    match context.client.stop(id, 0).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == Some(dsec_model::ErrorKind::NotFound) => Ok(()),
        Err(error) => Err(Failure::new(format!("the sandbox {id} could not be ended: {error}"))
            .hint(format!("end it with `dsec stop {id}`; its idle time limit ends it otherwise"))),
    }
}
