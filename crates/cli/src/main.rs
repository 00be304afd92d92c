//! `dsec`: the platform from a terminal. It speaks the public API and nothing else, but for `up`,
//! `down` and `doctor`, which start the node's and the control plane's own programs.

mod bench;
mod cli;
mod client;
mod commands;
mod config;
mod failure;
mod parse;
mod render;
mod terminal;
mod up;

use std::ffi::OsString;
use std::process::exit;

use clap::{CommandFactory, Parser};

use cli::Cli;
use failure::{EXIT_PIPE, Failure};

fn main() {
    clap_complete::CompleteEnv::with_factory(Cli::command).complete();
    let args: Vec<OsString> = std::env::args_os().collect();
    let cli = Cli::try_parse_from(&args).unwrap_or_else(|error| misused(&args, &error));
    let (json, of_the_command) = (cli.global.json, cli.command.has_codes_of_its_own());
    let code = match run(cli) {
        Ok(code) => code,
        Err(failure) if failure.reader_gone => EXIT_PIPE,
        Err(failure) => {
            render::failure(&failure, json);
            if of_the_command { failure.command_code() } else { 1 }
        }
    };
    exit(i32::from(code));
}

/// Ends where the command line asks for help or is none.
fn misused(args: &[OsString], error: &clap::Error) -> ! {
    if !error.use_stderr() {
        error.exit();
    }
    let (code, json) = cli::misused(args);
    if json {
        let text = error.to_string();
        render::failure(&Failure::usage(text.trim_start_matches("error: ").trim_end()), true);
    } else {
        // A message that cannot be written is dropped.
        let _ = error.print();
    }
    exit(i32::from(code))
}

fn run(cli: Cli) -> failure::Outcome {
    // One thread: this program waits, it does not compute, and a benchmark's client must leave the
    // cores to what it measures.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::io("cannot start", &error))?;
    let outcome = runtime.block_on(commands::dispatch(cli));
    // A read from a terminal that is under way cannot be taken back; do not wait for it.
    runtime.shutdown_background();
    outcome
}
