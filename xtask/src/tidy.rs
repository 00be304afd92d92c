//! The rules of the repository that no compiler holds. Each has its reason, which is printed with
//! every finding; a rule nobody can give a reason for does not belong here.

mod code;
mod dependencies;
mod documents;
mod lexer;

use std::fmt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

use crate::say;

/// A rule and why it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rule {
    name: &'static str,
    reason: &'static str,
}

/// A place where a rule is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    file: String,
    line: usize,
    rule: Rule,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, rule, what } = self;
        write!(f, "{file}:{line}: {}: {what}\n    because {}", rule.name, rule.reason)
    }
}

/// Findings so far.
#[derive(Default)]
pub(crate) struct Report {
    findings: Vec<Finding>,
    notes: Vec<String>,
}

impl Report {
    fn add(&mut self, rule: Rule, file: &str, line: usize, what: impl Into<String>) {
        self.findings.push(Finding { file: file.to_owned(), line, rule, what: what.into() });
    }

    fn note(&mut self, note: String) {
        self.notes.push(note);
    }
}

/// A text file of the repository.
pub(crate) struct File {
    /// Relative to the repository, with slashes.
    path: String,
    text: String,
}

impl File {
    /// Its crate's directory name, `xtask` included.
    fn krate(&self) -> Option<&str> {
        match self.path.strip_prefix("crates/") {
            Some(rest) => rest.split('/').next(),
            None => self.path.starts_with("xtask/").then_some("xtask"),
        }
    }

    fn has_extension(&self, extensions: &[&str]) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, extension)| extensions.contains(&extension))
    }

    /// Lines with their numbers from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.split('\n').enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Every rule on the repository at `root`.
pub(crate) fn check(root: &Path) -> anyhow::Result<Report> {
    let files = files(root)?;
    let mut report = Report::default();
    code::check(&files, &mut report);
    documents::check(&files, &mut report);
    dependencies::check(root, &files, &mut report)?;
    report.findings.sort_by(|a, b| (&a.file, a.line, a.rule.name).cmp(&(&b.file, b.line, b.rule.name)));
    Ok(report)
}

/// Checks and prints.
pub(crate) fn run(root: &Path) -> anyhow::Result<ExitCode> {
    let report = check(root)?;
    for note in &report.notes {
        say(&format!("note: {note}"));
    }
    for finding in &report.findings {
        say(&finding.to_string());
    }
    if report.findings.is_empty() {
        say("tidy");
        return Ok(ExitCode::SUCCESS);
    }
    say(&format!("{} findings", report.findings.len()));
    Ok(ExitCode::FAILURE)
}

/// Text files that are or will be committed: what git tracks or would take in.
fn files(root: &Path) -> anyhow::Result<Vec<File>> {
    let output = Command::new("git")
        .current_dir(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("cannot run git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file's name is not UTF-8")?;
    let mut files = Vec::new();
    for path in names.split('\0').filter(|path| !path.is_empty()) {
        // Removed and not yet committed, or not text: neither is for us.
        let Ok(bytes) = std::fs::read(root.join(path)) else { continue };
        let Ok(text) = String::from_utf8(bytes) else { continue };
        files.push(File { path: path.to_owned(), text });
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files.dedup_by(|a, b| a.path == b.path);
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        let report = check(&crate::root().unwrap()).unwrap();
        let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
    }

    /// Findings of one check on files given as (path, text): `path:line rule`.
    pub(super) fn found(check: impl Fn(&[File], &mut Report), files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<File> = files
            .iter()
            .map(|(path, text)| File { path: (*path).to_owned(), text: (*text).to_owned() })
            .collect();
        let mut report = Report::default();
        check(&files, &mut report);
        report.findings.iter().map(|f| format!("{}:{} {}", f.file, f.line, f.rule.name)).collect()
    }
}
