//! What a pack leaves out of a layer, and what it refuses to have in one.
//!
//! ```text
//! exclude   as though the sandbox had never touched it: what lies below shows
//! scrub     residue of work: its content is left out; that something was removed stays known
//! deny      fails the pack
//! ```
//! They are asked in this order, and the first that matches an entry decides. A directory that matches is taken with all
//! that is in it.

use std::str::FromStr;

use crate::erofs::{Content, InodeId, LayerTree};
use crate::error::printable;
use crate::overlay;

use super::glob::{Glob, GlobError, Places};
use super::walk;

/// Most rules of one pack.
pub const RULES_MAX: usize = 1024;
/// Paths that a report names for each rule.
const PATHS_MAX: usize = 10;

/// What becomes of what a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Left out, removals too.
    Exclude,
    /// Content is left out.
    Scrub,
    /// The pack fails.
    Deny,
}

/// Which kinds of entry a rule of ours matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Only {
    Everything,
    /// Regular files, sockets and the like; no directory, so that programs find the place they write to.
    Files,
}

#[derive(Debug, Clone)]
struct Rule {
    name: String,
    glob: Glob,
    only: Only,
    effect: Effect,
}

/// The rules of one pack.
#[derive(Debug, Clone, Default)]
pub struct Rules(Vec<Rule>);

/// What one rule left out of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// What it did.
    pub effect: Effect,
    /// The rule.
    pub rule: String,
    /// Files, directories and links, those in directories that were taken whole too.
    pub files: u64,
    /// Sum of the sizes of its regular files.
    pub bytes: u64,
    /// The first paths it matched, not those in directories that were taken whole.
    pub paths: Vec<String>,
}

/// An entry that must not be in the layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{path}` matches the deny rule `{rule}`; remove it, exclude it, or drop the rule")]
pub struct Denied {
    /// The rule.
    pub rule: String,
    /// The entry, from the root.
    pub path: String,
}

/// What is residue of work: a name for the rule, its pattern, and whether it spares directories.
///
/// Dependencies that work offline are not residue: a build's own output, `node_modules`, `~/.m2`, `~/.cargo/registry/src`.
const RESIDUE: &[(&str, Only, &[&str])] = &[
    (
        "caches/python",
        Only::Everything,
        &["__pycache__/", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/"],
    ),
    (
        "caches/pip",
        Only::Everything,
        &[".cache/pip/", ".cache/uv/", ".cache/pypoetry/cache/", ".cache/pipenv/"],
    ),
    (
        "caches/npm",
        Only::Everything,
        &[
            ".npm/_cacache/",
            ".npm/_logs/",
            ".npm/_npx/",
            ".cache/yarn/",
            ".yarn/cache/",
            ".cache/node-gyp/",
            ".eslintcache",
        ],
    ),
    ("caches/cargo", Only::Everything, &[".cargo/registry/cache/", "/usr/local/cargo/registry/cache/"]),
    ("caches/go", Only::Everything, &[".cache/go-build/"]),
    (
        "caches/apt",
        Only::Files,
        &["/var/cache/apt/**", "/var/lib/apt/lists/**", "/var/cache/debconf/*-old", "/var/lib/dpkg/*-old"],
    ),
    (
        "caches/packages",
        Only::Files,
        &[
            "/var/cache/dnf/**",
            "/var/cache/yum/**",
            "/var/cache/apk/**",
            "/var/cache/pacman/pkg/**",
            "/var/cache/man/**",
        ],
    ),
    (
        "history",
        Only::Files,
        &[
            ".bash_history",
            ".sh_history",
            ".ash_history",
            ".zsh_history",
            ".zhistory",
            ".python_history",
            ".node_repl_history",
            ".irb_history",
            ".psql_history",
            ".mysql_history",
            ".sqlite_history",
            ".rediscli_history",
            ".ipython/profile_*/history.sqlite",
            "fish/fish_history",
            ".lesshst",
            ".viminfo",
            ".wget-hsts",
        ],
    ),
    (
        "keys",
        Only::Files,
        &[
            ".ssh/**",
            "/etc/ssh/ssh_host_*_key",
            "/etc/ssh/ssh_host_*_key.pub",
            ".gnupg/**",
            ".aws/**",
            ".azure/**",
            ".config/gcloud/**",
            ".config/gh/hosts.yml",
            ".config/git/credentials",
            ".docker/config.json",
            ".kube/config",
            ".netrc",
            ".git-credentials",
            ".pypirc",
            "/root/.npmrc",
            "/home/*/.npmrc",
            ".cargo/credentials",
            ".cargo/credentials.toml",
            ".gem/credentials",
            ".huggingface/token",
            ".cache/huggingface/token",
            ".pgpass",
            ".vault-token",
        ],
    ),
    (
        "logs",
        Only::Files,
        &["/var/log/**", "npm-debug.log", "npm-debug.log.*", "yarn-error.log", "pip-log.txt", "nohup.out"],
    ),
    ("temp", Only::Everything, &["/tmp/*", "/var/tmp/*", ".*.sw[a-p]", "/var/crash/*"]),
    ("temp", Only::Files, &["/run/**"]),
];

/// The name of the rule for paths that a caller declares to be answers.
pub const ANSWERS: &str = "answers";

impl Rules {
    /// The names of the rules for residue of work, once each.
    pub fn residue_names() -> Vec<&'static str> {
        let mut names: Vec<_> = RESIDUE.iter().map(|(name, ..)| *name).collect();
        names.dedup();
        names
    }

    /// Adds the rules for residue of work called `name`, or whose name goes on behind `name/`. False: there are none.
    #[must_use]
    pub fn scrub(&mut self, name: &str) -> bool {
        let mut found = false;
        for (rule, only, patterns) in RESIDUE {
            let goes_on =
                rule.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
            for pattern in patterns.iter().filter(|_| goes_on) {
                found = true;
                // Those of ours are patterns; a test says so.
                if let Ok(glob) = Glob::from_str(pattern) {
                    self.push(Rule { name: (*rule).to_owned(), glob, only: *only, effect: Effect::Scrub });
                }
            }
        }
        found
    }

    /// Adds a pattern of a caller's. `name` is what a report calls it.
    ///
    /// # Errors
    /// It is none.
    pub fn add(&mut self, effect: Effect, name: &str, pattern: &str) -> Result<(), GlobError> {
        let glob = pattern.parse()?;
        self.push(Rule { name: name.to_owned(), glob, only: Only::Everything, effect });
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether any can fail the pack.
    pub fn denies(&self) -> bool {
        self.0.iter().any(|rule| rule.effect == Effect::Deny)
    }

    /// Those with one of these effects.
    #[must_use]
    pub fn of(&self, effects: &[Effect]) -> Self {
        Self(self.0.iter().filter(|rule| effects.contains(&rule.effect)).cloned().collect())
    }

    /// Kept in the order they are asked in.
    fn push(&mut self, rule: Rule) {
        let at = self.0.partition_point(|known| known.effect <= rule.effect);
        self.0.insert(at, rule);
    }

    /// The places of the root directory.
    pub(super) fn start(&self) -> Here {
        Here(self.0.iter().map(|rule| rule.glob.start()).collect())
    }

    /// The places of an entry, and the rule that decides on it.
    pub(super) fn look(&self, here: &Here, name: &[u8], kind: Kind) -> (Here, Option<usize>) {
        let mut found = None;
        let places = self.0.iter().zip(&here.0).enumerate().map(|(at, (rule, places))| {
            if places.is_dead() {
                return *places;
            }
            let (places, is_match) = rule.glob.step(*places, name);
            if is_match && found.is_none() && rule.fits(kind) {
                found = Some(at);
            }
            places
        });
        (Here(places.collect()), found)
    }

    /// What a rule does.
    pub(super) fn effect(&self, rule: usize) -> Effect {
        self.0[rule].effect
    }

    /// What a rule is called.
    pub(super) fn name(&self, rule: usize) -> &str {
        &self.0[rule].name
    }
}

impl Rule {
    fn fits(&self, kind: Kind) -> bool {
        match kind {
            Kind::Whiteout => self.effect == Effect::Exclude && !self.glob.is_directory,
            Kind::Directory => self.only == Only::Everything,
            Kind::Other => !self.glob.is_directory,
        }
    }
}

/// What rules distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Directory,
    /// It says that something below was removed.
    Whiteout,
    Other,
}

/// Where each rule's pattern has come to in one directory.
#[derive(Debug, Clone, Default)]
pub(super) struct Here(Box<[Places]>);

/// Counts what rules take.
#[derive(Debug, Default)]
pub(super) struct Tally(Vec<LeftOut>);

impl Tally {
    /// Counts an entry; `path` is that of one which matched itself.
    pub(super) fn count(
        &mut self,
        rules: &Rules,
        rule: usize,
        path: Option<&dyn Fn() -> String>,
        (files, bytes): (u64, u64),
    ) {
        let (effect, name) = (rules.effect(rule), rules.name(rule));
        let at = self.0.iter().position(|known| known.effect == effect && known.rule == name);
        let at = at.unwrap_or_else(|| {
            self.0.push(LeftOut { effect, rule: name.to_owned(), files: 0, bytes: 0, paths: Vec::new() });
            self.0.len() - 1
        });
        let left_out = &mut self.0[at];
        left_out.files += files;
        left_out.bytes = left_out.bytes.saturating_add(bytes);
        if let Some(path) = path.filter(|_| left_out.paths.len() < PATHS_MAX) {
            left_out.paths.push(path());
        }
    }

    /// What was left out, in the order of its rules' effects and names.
    pub(super) fn finish(mut self) -> Vec<LeftOut> {
        self.0.sort_by(|a, b| (a.effect, &a.rule).cmp(&(b.effect, &b.rule)));
        self.0
    }
}

/// Adds what one report says to another.
pub fn add_up(all: &mut Vec<LeftOut>, more: Vec<LeftOut>) {
    for new in more {
        match all.iter_mut().find(|known| known.effect == new.effect && known.rule == new.rule) {
            Some(known) => {
                known.files += new.files;
                known.bytes = known.bytes.saturating_add(new.bytes);
                let room = PATHS_MAX.saturating_sub(known.paths.len());
                known.paths.extend(new.paths.into_iter().take(room));
            }
            None => all.push(new),
        }
    }
}

/// Takes out of a layer what rules leave out, and looks for what they deny. What the layer hides stays hidden, but for what is
/// excluded.
///
/// # Errors
/// [`Denied`]
pub fn sift(layer: &mut LayerTree, rules: &Rules) -> Result<Vec<LeftOut>, Denied> {
    let mut tally = Tally::default();
    if rules.is_empty() {
        return Ok(tally.finish());
    }
    let mut todo = vec![(layer.tree.root(), rules.start(), Vec::new())];
    while let Some((dir, here, path)) = todo.pop() {
        let entries: Vec<_> = walk::entries(&layer.tree, dir)
            .into_iter()
            .flatten()
            .map(|(name, id)| (name.clone(), *id))
            .collect();
        let first = todo.len();
        for (name, id) in entries {
            let Some(inode) = layer.tree.get(id) else { continue };
            let kind = match &inode.content {
                Content::Directory(_) => Kind::Directory,
                content if overlay::is_whiteout(content) => Kind::Whiteout,
                _ => Kind::Other,
            };
            let (below, rule) = rules.look(&here, &name, kind);
            let full = || [path.as_slice(), b"/", &name].concat();
            match rule {
                Some(rule) if rules.effect(rule) == Effect::Deny => {
                    return Err(Denied { rule: rules.name(rule).to_owned(), path: printable(&full()) });
                }
                Some(rule) => {
                    tally.count(rules, rule, Some(&|| printable(&full())), weigh(layer, id));
                    layer.tree.remove(dir, &name);
                }
                None if kind == Kind::Directory => todo.push((id, below, full())),
                None => {}
            }
        }
        // The first comes off the list first.
        todo[first..].reverse();
    }
    Ok(tally.finish())
}

/// Entries and bytes of all that is at an inode and below it.
fn weigh(layer: &LayerTree, id: InodeId) -> (u64, u64) {
    let (mut files, mut bytes) = (0, 0u64);
    let mut todo = vec![id];
    while let Some(id) = todo.pop() {
        files += 1;
        match layer.tree.get(id).map(|inode| &inode.content) {
            Some(Content::Directory(entries)) => todo.extend(entries.values()),
            Some(Content::File(data)) => bytes = bytes.saturating_add(data.size()),
            _ => {}
        }
    }
    (files, bytes)
}

#[cfg(test)]
#[path = "rules/tests.rs"]
mod tests;
