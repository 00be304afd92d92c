//! How layers are called: `team/name`, `name:tag`, `name@version`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest name without tag or version, in bytes: well below the 255 of a file name.
const NAME_MAX: usize = 128;
/// The tag that a name alone means.
const DEFAULT_TAG: &str = "latest";
/// Longest tag or version, in bytes: with the number that the store puts behind it it stays below the 255 of a file name.
const LABEL_MAX: usize = 128;

/// Why a text is no name, tag or version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not an image name: {rule}")]
pub struct NameError {
    /// The text as it was given, shortened to 160 characters.
    pub given: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

fn check_path(path: &str) -> Result<(), &'static str> {
    for component in path.split('/') {
        if !component.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
            return Err("each part between slashes must begin with a lower-case letter or a digit");
        }
        if !component.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-')) {
            return Err("only lower-case letters, digits and . _ - / may stand before the tag");
        }
    }
    Ok(())
}

fn check_label(label: &str) -> Result<(), &'static str> {
    let good = label.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if good { Ok(()) } else { Err("a tag has letters, digits and . _ - only and begins with none of . -") }
}

fn fail<T>(given: &str, rule: &'static str) -> Result<T, NameError> {
    Err(NameError { given: given.chars().take(160).collect(), rule })
}

macro_rules! text {
    ($(#[$doc:meta])* $name:ident, $max:expr, $too_long:literal, $check:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// It as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                if text.is_empty() || text.len() > $max {
                    return fail(text, $too_long);
                }
                match $check(text) {
                    Ok(()) => Ok(Self(text.to_owned())),
                    Err(rule) => fail(text, rule),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text! {
    /// A layer's name without tag or version, such as `team/swe-base`: lower-case path components of letters, digits and
    /// `. _ -`, up to 128 bytes.
    LayerName, NAME_MAX, "it must have 1 to 128 characters", check_path
}
text! {
    /// A tag or a version: letters, digits and `. _ -`, up to 128 bytes.
    Label, LABEL_MAX, "a tag or a version must have 1 to 128 characters", check_label
}

impl Label {
    /// The tag that a name alone means: `latest`.
    pub fn latest() -> Self {
        Self(DEFAULT_TAG.to_owned())
    }
}

/// Which of a name's layers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Select {
    /// `name:tag`, and `name` alone for the tag `latest`: what the tag is on now.
    Tag(Label),
    /// `name@version`: always the same layer.
    Version(Label),
}

/// A layer by name, as a person gives it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayerRef {
    /// Its name.
    pub name: LayerName,
    /// Which of the name's layers.
    pub select: Select,
}

impl FromStr for LayerRef {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let (name, select) = if let Some((name, version)) = text.split_once('@') {
            (name, Select::Version(version.parse()?))
        } else if let Some((name, tag)) = text.split_once(':') {
            (name, Select::Tag(tag.parse()?))
        } else {
            (text, Select::Tag(Label::latest()))
        };
        Ok(Self { name: name.parse()?, select })
    }
}

impl fmt::Display for LayerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.select {
            Select::Tag(tag) => write!(f, "{}:{tag}", self.name),
            Select::Version(version) => write!(f, "{}@{version}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_a_name_with_a_tag_or_a_version() {
        for (text, shown) in [
            ("debian", "debian:latest"),
            ("team/swe-base:V1.2", "team/swe-base:V1.2"),
            ("debian@2024-06", "debian@2024-06"),
            ("0/1..2/a_", "0/1..2/a_:latest"),
        ] {
            assert_eq!(text.parse::<LayerRef>().unwrap().to_string(), shown);
        }
        let long = "a".repeat(129);
        let long_tag = format!("a:{long}");
        for bad in [
            "", "a@", "a:", "a:b@c", "a@b:c", "a@b@c", "a:b:c", "A", "/a", "a/", "a//b", "a/../b", "a/./b",
            ".a", "-a", "a b", "ä", "a+b", "a\0", "a:b/c", "a/@v", "a@../b", "a:.b", &long, &long_tag,
        ] {
            let error = bad.parse::<LayerRef>().unwrap_err();
            assert!(!error.rule.is_empty(), "{bad}");
        }
    }
}
