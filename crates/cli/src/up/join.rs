//! Joining a cluster whose servers are elsewhere.

use std::process::Stdio;

use serde::Deserialize;

use super::process::{JOIN_TOKEN, Program, describe};
use super::state::StateDir;
use crate::failure::Failure;

/// What `dsec up` needs of `member.json`.
#[derive(Deserialize)]
struct Member {
    control: String,
}

/// Where the node has joined.
pub(super) fn control_of(state: &StateDir) -> Option<String> {
    let text = std::fs::read(state.member()).ok()?;
    serde_json::from_slice::<Member>(&text).ok().map(|member| member.control)
}

/// Has the edge join. One that has joined by this token already is left as it is.
///
/// # Errors
/// It did not; the message has its own words.
pub(super) async fn join(
    edge: &Program,
    state: &StateDir,
    token: &str,
    control: &str,
) -> Result<(), Failure> {
    let failed = |error| Failure::io(format!("cannot run {} join", edge.exe.display()), &error);
    let output = tokio::process::Command::new(&edge.exe)
        .arg("join")
        .arg("--config")
        .arg(state.edge_config())
        .args(["--control", control])
        .env(JOIN_TOKEN, token)
        .stdin(Stdio::null())
        .current_dir("/")
        .output()
        .await
        .map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let last = last.trim_start_matches("dsec-edge: ").to_owned();
    Err(Failure::new(format!("the node has not joined ({}): {last}", describe(output.status))))
}
