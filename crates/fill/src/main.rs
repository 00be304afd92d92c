//! `dsec-fill`: see the library.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use dsec_fill::config::Config;
use dsec_fill::{holder, worker};

/// Gives a node the content of its layers on demand.
#[derive(Parser)]
#[command(name = "dsec-fill", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mounts the device and keeps a worker serving it. SIGTERM unmounts and ends; SIGHUP replaces the worker.
    Hold {
        /// The configuration.
        #[arg(long)]
        config: PathBuf,
        /// Writes "ready" and a line end to this descriptor when the device and the socket are there.
        #[arg(long)]
        ready_fd: Option<i32>,
        /// What workers are started from, looked up anew each time, so that a link that leads to another program has the next
        /// worker be that one. Default: this program.
        #[arg(long)]
        program: Option<PathBuf>,
    },
    /// Serves what a holder hands over; started by it.
    #[command(hide = true)]
    Work {
        #[arg(long)]
        config: PathBuf,
        #[arg(long, value_delimiter = ',')]
        devices: Vec<i32>,
        #[arg(long)]
        control: i32,
        #[arg(long)]
        ready: i32,
        #[arg(long)]
        holder: i32,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("DSEC_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours).init();
    let done = match cli.command {
        Command::Hold { config, ready_fd, program } => hold(&config, ready_fd, program),
        Command::Work { config, devices, control, ready, holder } => {
            worker::inherit(&devices, control, ready, holder)
                .and_then(|inherited| worker::main(&config, inherited))
                .map(drop)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "dsec-fill: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn hold(file: &Path, ready_fd: Option<i32>, program: Option<PathBuf>) -> anyhow::Result<()> {
    let config = Config::load(file)?;
    let file = std::path::absolute(file).context("the configuration's path")?;
    let program = match program {
        Some(program) => std::path::absolute(program).context("the program's path")?,
        // As it is called now: after an upgrade the new program is there.
        None => std::env::current_exe().context("this program's path is unknown")?,
    };
    let ready = match ready_fd {
        Some(number) => Some(
            dsec_sys::process::inherited(number)
                .with_context(|| format!("--ready-fd {number} is not open"))?,
        ),
        None => None,
    };
    holder::run(&config, &file, &program, || match ready {
        Some(fd) => std::fs::File::from(fd).write_all(b"ready\n"),
        None => Ok(()),
    })
}
