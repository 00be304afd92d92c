//! `cargo xtask`: the repository's chores. `tidy` holds the rules that compilers do not;
//! `openapi` keeps `openapi/dsec.json` equal to what the code says.

mod openapi;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Repository chores")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Checks the rules that compilers do not; exit code 1 on any finding
    Tidy,
    /// Writes openapi/dsec.json from the code
    Openapi {
        /// Writes nothing; exit code 1 when the file is stale
        #[arg(long)]
        check: bool,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let root = root()?;
    match Args::parse().chore {
        Chore::Tidy => tidy::run(&root),
        Chore::Openapi { check } => openapi::run(&root, check),
    }
}

/// The repository, wherever in it one stands.
fn root() -> anyhow::Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_owned)
        .context("xtask has no parent directory")
}

/// Lines for people. The workspace's lints keep printing out of the platform; here it is the product.
#[expect(clippy::print_stdout, reason = "the report is what this program is for")]
fn say(line: &str) {
    println!("{line}");
}
