//! `dsec completion`: the script of a shell. The script asks this program, so that ids of sandboxes
//! are completed as well.

use std::time::Duration;

use clap::{Args, ValueEnum};
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;

use super::ps;
use crate::client::{Client, ListQuery};
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  source <(dsec completion bash)                               # in ~/.bashrc
  source <(dsec completion zsh)                                # in ~/.zshrc
  dsec completion fish > ~/.config/fish/completions/dsec.fish";

/// Longest wait for the ids while somebody waits at the keyboard.
const IDS_TIMEOUT: Duration = Duration::from_millis(500);

/// A shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShellName {
    /// GNU bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

/// `dsec completion`.
#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// Which shell
    shell: ShellName,
}

/// Prints the script.
pub(crate) fn completion(args: &CompletionArgs) -> Outcome {
    let name = format!("{:?}", args.shell).to_lowercase();
    let failed = |why: String| Failure::new(format!("no script for {name}: {why}"));
    let shells = Shells::builtins();
    let shell = shells.completer(&name).ok_or_else(|| failed("unknown".into()))?;
    let mut script = Vec::new();
    shell
        .write_registration("COMPLETE", "dsec", "dsec", "dsec", &mut script)
        .map_err(|error| failed(error.to_string()))?;
    render::emit(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Ids of the sandboxes that live, for the shell. None where the platform does not answer at once.
pub(crate) fn sandbox_ids() -> Vec<CompletionCandidate> {
    ids().unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}

fn ids() -> Option<Vec<String>> {
    let file = crate::config::read(&crate::config::path().ok()?).ok()?;
    let variable = |name| std::env::var(name).ok();
    let target = crate::config::resolve(variable("DSEC_URL"), variable("DSEC_API_KEY"), &file);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async {
        let client = Client::new(target, Some(IDS_TIMEOUT)).ok()?;
        let query = ListQuery { states: ps::live_states(), ..ListQuery::default() };
        let list = tokio::time::timeout(IDS_TIMEOUT, client.sandboxes(&query)).await.ok()?.ok()?;
        Some(list.into_iter().map(|sandbox| sandbox.id.to_string()).collect())
    })
}
