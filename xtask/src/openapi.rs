//! Keeps the committed OpenAPI document equal to what the code says. The document comes from
//! `dsec-control` itself, so that this crate need not build what that one does.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

use crate::say;

const PATH: &str = "openapi/dsec.json";

/// Writes the document, or says whether it is stale.
pub(crate) fn run(root: &Path, check: bool) -> anyhow::Result<ExitCode> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["run", "--release", "--quiet", "--package", "dsec-control", "--", "--print-openapi"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "dsec-control --print-openapi: {}", output.status);
    let path = root.join(PATH);
    let current = std::fs::read(&path).unwrap_or_default() == output.stdout;
    if current {
        say(&format!("{PATH} is current"));
    } else if check {
        say(&format!("{PATH} is stale: run `cargo xtask openapi` and commit it"));
        return Ok(ExitCode::FAILURE);
    } else {
        let dir = path.parent().context("the document has no directory")?;
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        std::fs::write(&path, &output.stdout).with_context(|| format!("cannot write {}", path.display()))?;
        say(&format!("{PATH} written"));
    }
    Ok(ExitCode::SUCCESS)
}
