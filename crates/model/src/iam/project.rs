//! Names of projects.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The project that all others are in.
const ROOT: &str = "root";
/// Longest path, bytes: it is a header of every request between control and edges.
const PATH_MAX: usize = 1024;
/// Longest name of one project, bytes.
const NAME_MAX: usize = 63;

/// Why a text is not a project.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a project: {rule}")]
pub struct ProjectError {
    /// The text as it was given, shortened to 80 characters.
    pub given: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

/// A project, by its way from the root: `root/rl/job-42`. Any depth.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProjectPath(String);

impl ProjectPath {
    /// The one that all others are in.
    pub fn root() -> Self {
        Self(ROOT.to_owned())
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The one it is in; none of the root.
    pub fn parent(&self) -> Option<Self> {
        self.0.rsplit_once('/').map(|(parent, _)| Self(parent.to_owned()))
    }

    /// Itself, the one it is in, and so on to the root.
    pub fn upwards(&self) -> impl Iterator<Item = Self> {
        std::iter::successors(Some(self.clone()), Self::parent)
    }

    /// Whether it is `other` or somewhere in it.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.strip_prefix(&other.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl FromStr for ProjectPath {
    type Err = ProjectError;

    fn from_str(text: &str) -> Result<Self, ProjectError> {
        let fail = |rule| Err(ProjectError { given: text.chars().take(80).collect(), rule });
        if text.len() > PATH_MAX {
            return fail("it must have at most 1,024 characters");
        }
        let mut names = text.split('/');
        if names.next() != Some(ROOT) {
            return fail("it must begin with root, such as root/team/job-7");
        }
        let is_name = |name: &str| {
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
            (1..=NAME_MAX).contains(&name.len())
                && name.bytes().all(|b| plain(b) || matches!(b, b'-' | b'_' | b'.'))
                && name.bytes().next().is_some_and(plain)
        };
        if !names.all(is_name) {
            return fail(
                "each name in it must be 1 to 63 lower-case letters, digits, '-', '_' and '.', and begin with a letter or digit",
            );
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for ProjectPath {
    type Error = ProjectError;
    fn try_from(text: String) -> Result<Self, ProjectError> {
        text.parse()
    }
}

impl From<ProjectPath> for String {
    fn from(path: ProjectPath) -> String {
        path.0
    }
}

impl fmt::Display for ProjectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> ProjectPath {
        text.parse().unwrap()
    }

    #[test]
    fn only_what_is_one_is_taken() {
        for good in ["root", "root/rl", "root/rl/job-42/agent_7.b", "root/0"] {
            assert_eq!(path(good).as_str(), good);
        }
        let long = format!("root/{}", "a/".repeat(600));
        for bad in [
            "", "rl", "rooted", "root/", "/root", "root//a", "root/A", "root/..", "root/-a", "root/a b",
            &long,
        ] {
            assert!(bad.parse::<ProjectPath>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_that_begin_alike_are_not_within_each_other() {
        assert!(path("root/rl/job").is_within(&path("root/rl")));
        assert!(path("root/rl").is_within(&path("root/rl")));
        assert!(!path("root/rl-2").is_within(&path("root/rl")));
        assert!(!path("root").is_within(&path("root/rl")));
        let up: Vec<String> = path("root/a/b").upwards().map(String::from).collect();
        assert_eq!(up, ["root/a/b", "root/a", "root"]);
    }
}
