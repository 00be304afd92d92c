//! Names of images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest name, in bytes: with `.json` it stays well below the 255 bytes of a file name.
pub(crate) const NAME_MAX: usize = 128;

/// Why a text is not an image name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not an image name: {rule}")]
pub struct ImageNameError {
    /// The text as it was given, shortened to 160 characters.
    pub given: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

/// An image's name on a node, such as `debian`, `team/swe-base:2024-06`: lower-case path
/// components and at most one `:tag`, up to 128 bytes. `debian` and `debian:latest` are two names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as a file name without extension. `+` and `@` are in no name, so two names never
    /// share a file, and `/` cannot leave the directory.
    pub(crate) fn file_stem(&self) -> String {
        self.0.replace('/', "+").replace(':', "@")
    }
}

fn check(text: &str) -> Result<(), &'static str> {
    if text.is_empty() || text.len() > NAME_MAX {
        return Err("it must have 1 to 128 characters");
    }
    match text.split_once(':') {
        Some((path, tag)) => check_path(path).and_then(|()| check_label(tag)),
        None => check_path(text),
    }
}

/// Checks what stands before the tag.
pub(crate) fn check_path(path: &str) -> Result<(), &'static str> {
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

/// Checks a tag.
pub(crate) fn check_label(tag: &str) -> Result<(), &'static str> {
    let good = tag.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if good { Ok(()) } else { Err("a tag has letters, digits and . _ - only and begins with none of . -") }
}

impl FromStr for ImageName {
    type Err = ImageNameError;
    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        match check(text) {
            Ok(()) => Ok(Self(text.to_owned())),
            Err(rule) => Err(ImageNameError { given: text.chars().take(160).collect(), rule }),
        }
    }
}

impl TryFrom<String> for ImageName {
    type Error = ImageNameError;
    fn try_from(text: String) -> Result<Self, ImageNameError> {
        text.parse()
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> String {
        name.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn good_names_parse_and_bad_ones_say_why() {
        for good in ["a", "debian:12", "team/swe-base:V1.2_x", "0/1/2", "a..b", &"a".repeat(128)] {
            assert_eq!(good.parse::<ImageName>().unwrap().as_str(), good);
        }
        let long = "a".repeat(129);
        for bad in [
            "",
            "A",
            "/a",
            "a/",
            "a//b",
            "a/../b",
            "a/./b",
            ".a",
            "-a",
            "a:",
            "a:b:c",
            "a:.b",
            "a b",
            "ä",
            "a+b",
            "a@b",
            "a:b/c",
            "a\0",
            long.as_str(),
        ] {
            let error = bad.parse::<ImageName>().unwrap_err();
            assert!(!error.rule.is_empty(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn two_names_never_share_a_file(a in "[a-z0-9][a-z0-9._/-]{0,12}(:[A-Za-z0-9_.-]{1,4})?", b in "[a-z0-9][a-z0-9._/-]{0,12}(:[A-Za-z0-9_.-]{1,4})?") {
            if let (Ok(a), Ok(b)) = (a.parse::<ImageName>(), b.parse::<ImageName>()) {
                prop_assert_eq!(a == b, a.file_stem() == b.file_stem());
                prop_assert!(!a.file_stem().contains('/') && !a.file_stem().starts_with('.'));
            }
        }
    }
}
