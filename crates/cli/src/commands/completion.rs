//! `dsec completion`: the script of a shell. The script asks this program, so that ids of sandboxes
//! are completed as well.

use dsec_proto::rest::LAYER_BASE;
use std::ffi::OsStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use clap_complete::engine::{CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::Shells;

use super::ps;
use crate::client::{Client, ListQuery};
use crate::config::Given;
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  source <(dsec completion bash)                               # in ~/.bashrc
  source <(dsec completion zsh)                                # in ~/.zshrc
  dsec completion fish > ~/.config/fish/completions/dsec.fish";

/// Longest wait for an answer while somebody waits at the keyboard.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

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

/// Ids of the sandboxes that live, for the shell.
pub(crate) fn sandbox_ids() -> Vec<CompletionCandidate> {
    asked(async |client| {
        let query = ListQuery { states: ps::live_states(), ..ListQuery::default() };
        Some(client.sandboxes(&query).await.ok()?.into_iter().map(|sandbox| sandbox.id.to_string()).collect())
    })
}

/// Names of the images, for the shell.
pub(crate) fn image_names() -> Vec<CompletionCandidate> {
    asked(async |client| {
        Some(client.layers(LAYER_BASE).await.ok()?.into_iter().map(|image| image.name).collect())
    })
}

/// Names of the tasks, for the shell.
pub(crate) fn task_names() -> Vec<CompletionCandidate> {
    asked(async |client| {
        Some(client.tasks().await.ok()?.into_iter().map(|task| task.task_id.to_string()).collect())
    })
}

/// Projects, for the shell.
pub(crate) fn project_names() -> Vec<CompletionCandidate> {
    asked(async |client| {
        Some(client.projects().await.ok()?.into_iter().map(|it| it.project.to_string()).collect())
    })
}

/// Numbers of the identities, for the shell.
pub(crate) fn identities() -> Vec<CompletionCandidate> {
    asked(async |client| {
        Some(client.identities().await.ok()?.into_iter().map(|it| it.identity.to_string()).collect())
    })
}

/// Names of the nodes, for the shell.
pub(crate) fn node_names() -> Vec<CompletionCandidate> {
    asked(async |client| Some(client.nodes().await.ok()?.into_iter().map(|node| node.node).collect()))
}

/// Sides of a copy, for the shell: paths here, and sandboxes with the colon after their ids.
pub(crate) fn places(current: &OsStr) -> Vec<CompletionCandidate> {
    let mut places = PathCompleter::any().complete(current);
    if current.as_encoded_bytes().contains(&b'/') {
        return places;
    }
    let ids = sandbox_ids().into_iter().map(|id| {
        let mut place = id.get_value().to_owned();
        place.push(":");
        place
    });
    let typed = current.as_encoded_bytes();
    places.extend(ids.filter(|id| id.as_encoded_bytes().starts_with(typed)).map(CompletionCandidate::new));
    places
}

/// What the platform answers at once; nothing, and no word, where it does not.
fn asked(question: impl AsyncFnOnce(Client) -> Option<Vec<String>>) -> Vec<CompletionCandidate> {
    let answer = || {
        let file = crate::config::read(&crate::config::path().ok()?).ok()?;
        let target = crate::config::resolve(Given::from_environment(), &file).ok()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let client = Client::new(target, Some(ANSWER_TIMEOUT)).ok()?;
        let answer = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, question(client)).await });
        // A look-up of a name that is under way is not waited for.
        runtime.shutdown_background();
        answer.ok()?
    };
    answer().unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}
