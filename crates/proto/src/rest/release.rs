//! Which programs a node runs, and how it gets others: releases, their trial, and changes of `edge.toml`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The programs of a node that a release has, in the order of their names.
pub const RELEASE_PROGRAMS: [&str; 3] = ["dsec-aether", "dsec-edge", "dsec-fill"];
/// Largest archive of a release, bytes: what three programs with their symbols take, several times over.
pub const RELEASE_BYTES_MAX: u64 = 1 << 30;
/// How long a node waits to hear that a change is good when nothing is said, ms.
pub const TRIAL_MS_DEFAULT: u64 = 60_000;
/// Least and most of it, ms: an edge with thousands of sandboxes takes seconds to come back; who has not looked for an hour is gone.
pub const TRIAL_MS_RANGE: (u64, u64) = (1_000, 3_600_000);
/// What the programs are called that were installed on a node by its operator, where a release's name may stand.
pub const INSTALLED: &str = "installed";
/// Hexadecimal digits of a digest that are in a release's name.
const DIGEST_DIGITS: usize = 16;
/// Longest version, bytes.
const VERSION_MAX: usize = 40;

/// Name of a release: `VERSION-DIGEST`, where the digest is the first 16 hexadecimal digits of the SHA-256 of [`digest_text`]. So two
/// builds of one version have two names, and a name says what is in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ReleaseName(String);

/// A name that no release can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name of a release: it is a version, '-', and {DIGEST_DIGITS} hexadecimal digits")]
pub struct ReleaseNameError(pub String);

impl ReleaseName {
    /// The name of a version whose programs have this digest, hexadecimal.
    ///
    /// # Errors
    /// The version or the digest is none.
    pub fn new(version: &str, digest: &str) -> Result<Self, ReleaseNameError> {
        let short = digest.get(..DIGEST_DIGITS).unwrap_or(digest);
        format!("{version}-{short}").parse()
    }

    /// The version in it.
    pub fn version(&self) -> &str {
        &self.0[..self.0.len() - DIGEST_DIGITS - 1]
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ReleaseName {
    type Err = ReleaseNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_version = |version: &str| {
            (1..=VERSION_MAX).contains(&version.len())
                && version.starts_with(|c: char| c.is_ascii_alphanumeric())
                && version.bytes().all(|b| b.is_ascii_alphanumeric() || b".-+_".contains(&b))
        };
        let is_digest = |digest: &str| {
            digest.len() == DIGEST_DIGITS && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        match text.rsplit_once('-') {
            Some((version, digest)) if is_version(version) && is_digest(digest) => Ok(Self(text.to_owned())),
            _ => Err(ReleaseNameError(text.chars().take(80).collect())),
        }
    }
}

impl TryFrom<String> for ReleaseName {
    type Error = ReleaseNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ReleaseName> for String {
    fn from(name: ReleaseName) -> Self {
        name.0
    }
}

impl fmt::Display for ReleaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a release's digest is the SHA-256 of: a line `SHA256  PROGRAM` for each program, by their names.
pub fn digest_text(sha256_of: &BTreeMap<String, String>) -> String {
    sha256_of.iter().map(|(program, sha256)| format!("{sha256}  {program}\n")).collect()
}

/// Programs that a node may run. On the wire the name of a release, or `installed`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Programs {
    /// Those that its operator installed there.
    #[default]
    Installed,
    /// Those of a release that it was sent.
    Release(ReleaseName),
}

impl FromStr for Programs {
    type Err = ReleaseNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == INSTALLED { Ok(Self::Installed) } else { text.parse().map(Self::Release) }
    }
}

impl TryFrom<String> for Programs {
    type Error = ReleaseNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Programs> for String {
    fn from(programs: Programs) -> Self {
        programs.to_string()
    }
}

impl fmt::Display for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Installed => f.write_str(INSTALLED),
            Self::Release(name) => name.fmt(f),
        }
    }
}

/// What a node is changed in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeChange {
    /// It is to run other programs.
    #[schema(value_type = String)]
    Programs(Programs),
    /// Its `edge.toml` is to be another: the first 16 hexadecimal digits of the digest of what is the operator's in it.
    Config(String),
}

impl fmt::Display for NodeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Programs(programs) => programs.fmt(f),
            Self::Config(digest) => write!(f, "configuration {digest}"),
        }
    }
}

/// A change that a node tries: it goes back from it by itself unless it is told in time that the change is good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeTrial {
    /// To what.
    pub change: NodeChange,
    /// When it goes back, Unix ms.
    pub until_ms: u64,
    /// Sandboxes that it had when it began.
    pub sandboxes: u64,
    /// Sandboxes that were taken over; none while the edge that tries has not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<u64>,
    /// Ids of those that could not be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<String>,
}

/// A change that a node went back from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailedChange {
    /// To what.
    pub change: NodeChange,
    /// Why.
    pub why: String,
    /// When, Unix ms.
    pub at_ms: u64,
}

/// What a node runs, and how it stands with changes of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRelease {
    /// The node.
    pub node: String,
    /// Version of the edge that answers.
    pub version: String,
    /// Programs that run, on trial or not.
    #[schema(value_type = String)]
    pub running: Programs,
    /// Drawn anew at each start of the edge.
    pub instance: String,
    /// Programs that it starts with, but for a trial.
    #[schema(value_type = String)]
    pub chosen: Programs,
    /// Since when, Unix ms; none: nobody has ever chosen others than were installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Those of before, which it can go back to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub previous: Option<Programs>,
    /// Releases that lie there.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub stored: Vec<ReleaseName>,
    /// The first 16 hexadecimal digits of the digest of what is the operator's in its `edge.toml`: nodes that are configured alike
    /// have the same.
    #[serde(default)]
    pub config: String,
    /// A change under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<NodeTrial>,
    /// The last change that it went back from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedChange>,
}

/// A release that a node was sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredRelease {
    /// Its name.
    #[schema(value_type = String)]
    pub release: ReleaseName,
    /// Whether it lay there already.
    pub was_there: bool,
}

/// Has a node run other programs, on trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TryReleaseRequest {
    /// Which: a release that it was sent, or `installed`.
    #[schema(value_type = String)]
    pub programs: Programs,
    /// How long it waits to hear that they are good, ms: 1,000 to 3,600,000. Default: a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_ms: Option<u64>,
}

/// Changes a node's `edge.toml`, on trial.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TryConfigRequest {
    /// TOML whose keys are set; of tables, the keys in them. What is not named stays, comments included.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub set: String,
    /// Keys that are removed first, with dots between their parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unset: Vec<String>,
    /// As in a trial of programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_ms: Option<u64>,
    /// Say what would come of it, and change nothing.
    #[serde(default)]
    pub only_look: bool,
}

/// What came of asking for a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangeBegun {
    /// Whether there is anything to change. If not, the node is so already.
    pub changes: bool,
    /// To what.
    pub change: NodeChange,
}

/// Ends a trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EndTrialRequest {
    /// Of what: another one than is under way is refused.
    pub change: NodeChange,
    /// It is good, and stays. Otherwise the node goes back from it now.
    pub keep: bool,
    /// Why it goes back.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_version_and_a_digest_and_never_a_path() {
        let name = ReleaseName::new("0.2.0-rc.1", "0123456789abcdef0123").unwrap();
        assert_eq!((name.as_str(), name.version()), ("0.2.0-rc.1-0123456789abcdef", "0.2.0-rc.1"));
        for bad in [
            "",
            "installed",
            "0.1.0",
            "0.1.0-0123456789abcde",
            "0.1.0-0123456789ABCDEF",
            "../../x-0123456789abcdef",
            ".-0123456789abcdef",
            "a/b-0123456789abcdef",
            "-0123456789abcdef",
        ] {
            assert!(bad.parse::<ReleaseName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn programs_are_one_word_on_the_wire() {
        for word in ["installed", "0.1.0-0123456789abcdef"] {
            let programs: Programs = serde_json::from_str(&format!("{word:?}")).unwrap();
            assert_eq!(programs.to_string(), word);
            assert_eq!(serde_json::to_string(&programs).unwrap(), format!("{word:?}"));
        }
        assert!(serde_json::from_str::<Programs>("\"other\"").is_err());
    }

    #[test]
    fn what_is_hashed_is_the_same_whatever_the_order() {
        let of = |pairs: [(&str, &str); 2]| pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        let text = digest_text(&of([("dsec-fill", "bb"), ("dsec-edge", "aa")]));
        assert_eq!(text, "aa  dsec-edge\nbb  dsec-fill\n");
        assert_eq!(text, digest_text(&of([("dsec-edge", "aa"), ("dsec-fill", "bb")])));
    }
}
