//! Rules on documents.

use std::collections::BTreeSet;

use super::{File, Report, Rule};

const DEAD_LINK: Rule = Rule {
    name: "dead-link",
    reason: "a reader who follows a link that leads nowhere stops trusting the others",
};
const DECISIONS: Rule = Rule {
    name: "decisions",
    reason: "decisions are found by number and by their list, so none may be missing from either",
};
const CHANGELOG: Rule =
    Rule { name: "changelog", reason: "what changed since the last release is written down with the change" };

const ADR: &str = "docs/adr/";

/// Checks every rule of this module.
pub(crate) fn check(files: &[File], report: &mut Report) {
    let paths = paths(files);
    for file in files.iter().filter(|file| is_document(&file.path)) {
        links(file, &paths, report);
    }
    decisions(files, report);
    changelog(files, report);
}

fn is_document(path: &str) -> bool {
    path.ends_with(".md") && (path.starts_with("docs/") || !path.contains('/'))
}

/// Every file and every directory above one.
fn paths(files: &[File]) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for file in files {
        let mut path = file.path.as_str();
        paths.insert(path.to_owned());
        while let Some((parent, _)) = path.rsplit_once('/') {
            paths.insert(parent.to_owned());
            path = parent;
        }
    }
    paths
}

fn links(file: &File, paths: &BTreeSet<String>, report: &mut Report) {
    let mut fenced = false;
    for (number, line) in file.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for target in targets(line) {
            if let Some(path) = resolve(&file.path, &target)
                && !path.is_empty()
                && !paths.contains(&path)
            {
                report.add(DEAD_LINK, &file.path, number, format!("there is no {path} (linked as {target})"));
            }
        }
    }
}

/// Targets of inline links outside code spans.
fn targets(line: &str) -> Vec<String> {
    let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
    prose
        .match_indices("](")
        .filter_map(|(at, _)| prose[at + 2..].split(')').next())
        .map(|target| {
            target.split_whitespace().next().unwrap_or_default().trim_matches(['<', '>']).to_owned()
        })
        .collect()
}

/// The path in the repository that a link of `from` leads to; `None` when it leads out of it.
fn resolve(from: &str, target: &str) -> Option<String> {
    let target = target.split('#').next().unwrap_or_default();
    let outside = target.contains("://") || target.starts_with("mailto:") || target.is_empty();
    if outside {
        return None;
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    if target.starts_with('/') {
        parts.clear();
    }
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    Some(parts.join("/").replace("%20", " "))
}

fn decisions(files: &[File], report: &mut Report) {
    let list = files.iter().find(|file| file.path == format!("{ADR}README.md"));
    let mut numbers = Vec::new();
    for file in files {
        let Some(name) = file.path.strip_prefix(ADR) else { continue };
        if name == "README.md" || name.contains('/') || !name.ends_with(".md") {
            continue;
        }
        match name.split_once('-').and_then(|(number, _)| Some((number.len(), number.parse::<u32>().ok()?))) {
            Some((3, number)) => numbers.push((number, file)),
            _ => report.add(DECISIONS, &file.path, 1, "the name is not NNN-what-was-decided.md"),
        }
        if !list.is_some_and(|list| list.text.contains(&format!("({name})"))) {
            report.add(DECISIONS, &file.path, 1, format!("{ADR}README.md does not link it"));
        }
    }
    numbers.sort_by_key(|(number, _)| *number);
    for (expected, (number, file)) in (1..).zip(&numbers) {
        if *number != expected {
            report.add(DECISIONS, &file.path, 1, format!("number {number} stands where {expected} should"));
            break;
        }
    }
}

fn changelog(files: &[File], report: &mut Report) {
    const PATH: &str = "CHANGELOG.md";
    let has =
        |file: &File| file.text.lines().any(|line| line.starts_with("## ") && line.contains("Unreleased"));
    match files.iter().find(|file| file.path == PATH) {
        Some(file) if has(file) => {}
        Some(_) => report.add(CHANGELOG, PATH, 1, "there is no `## [Unreleased]`"),
        None => report.add(CHANGELOG, PATH, 1, "there is no such file"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;
    use super::check;

    const LOG: (&str, &str) = ("CHANGELOG.md", "## [Unreleased]");

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        found(check, &[files, &[LOG]].concat())
    }

    #[test]
    fn links_lead_to_files_and_directories_of_the_repository() {
        let page = "[a](../README.md) [b](guide/x.md#part) [c](https://e.org) [d](#here) [e](/crates) `[f](no)`\n\
                    ```\n[g](no)\n```\n[h](gone.md)";
        let files =
            [("docs/a.md", page), ("README.md", ""), ("docs/guide/x.md", ""), ("crates/x/src/lib.rs", "")];
        assert_eq!(findings(&files), ["docs/a.md:5 dead-link"]);
    }

    #[test]
    fn decisions_are_numbered_without_gaps_and_listed() {
        let list = ("docs/adr/README.md", "[1](001-a.md) [2](002-b.md) [4](004-d.md)");
        let (one, two, four) =
            (("docs/adr/001-a.md", ""), ("docs/adr/002-b.md", ""), ("docs/adr/004-d.md", ""));
        let all = [list, one, two, four, ("docs/adr/003-c.md", "")];
        assert_eq!(findings(&all), ["docs/adr/003-c.md:1 decisions"]);
        assert_eq!(findings(&[list, one, two, four]).last().unwrap(), "docs/adr/004-d.md:1 decisions");
        let listed = ("docs/adr/README.md", "[1](001-a.md) [2](002-b.md)");
        assert!(findings(&[listed, one, two]).is_empty());
        assert!(!findings(&[listed, one, two, ("docs/adr/notes.md", "")]).is_empty());
    }

    #[test]
    fn the_changelog_has_a_place_for_what_is_new() {
        assert_eq!(found(check, &[]), ["CHANGELOG.md:1 changelog"]);
        assert_eq!(found(check, &[("CHANGELOG.md", "## 0.1.0")]), ["CHANGELOG.md:1 changelog"]);
        assert!(found(check, &[LOG]).is_empty());
    }
}
