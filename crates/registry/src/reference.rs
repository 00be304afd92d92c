//! Where an image is: `docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`.
//!
//! Source of the grammar: the OCI distribution specification 1.1, "Pulling manifests". Unlike the usual tools there is no
//! host that is meant when none is written, and no repository that is put before a short name: what a node connects to is
//! what its user wrote.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use crate::digest::Digest;

/// What references begin with. May be left out.
pub const SCHEME: &str = "docker://";
/// Longest name of a repository, in bytes.
const REPOSITORY_MAX: usize = 255;
/// Longest tag, in bytes.
const TAG_MAX: usize = 128;
/// Longest host name, in bytes, by DNS.
const HOST_MAX: usize = 253;

/// Which image of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Select {
    /// The one that has this tag now.
    Tag(String),
    /// The one whose manifest, or index, has this digest.
    Digest(Digest),
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

/// An image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    host: String,
    port: Option<u16>,
    repository: String,
    select: Select,
}

/// Why a text is no reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no image of a registry: {why}")]
pub struct ReferenceError {
    /// As it was written, shortened.
    pub given: String,
    /// What is wrong with it, and what to do.
    pub why: String,
}

impl Reference {
    /// The registry's host: a name in lower case, an IPv4 address, or an IPv6 address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Its port, if one is written.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Host and port as in a URL.
    pub fn authority(&self) -> String {
        authority(&self.host, self.port)
    }

    /// Name of the repository.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Which image of it.
    pub fn select(&self) -> &Select {
        &self.select
    }

    /// Whether the host is this machine by its very name: only then is HTTP without TLS spoken unasked.
    pub fn is_loopback(&self) -> bool {
        match self.host.parse::<IpAddr>() {
            Ok(address) => address.is_loopback(),
            Err(_) => self.host == "localhost" || self.host.ends_with(".localhost"),
        }
    }
}

/// Host and port as in a URL.
pub(crate) fn authority(host: &str, port: Option<u16>) -> String {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    port.map_or(host.clone(), |port| format!("{host}:{port}"))
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.authority(), self.repository)?;
        match &self.select {
            Select::Tag(tag) => write!(f, ":{tag}"),
            Select::Digest(digest) => write!(f, "@{digest}"),
        }
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        parse(text).map_err(|why| ReferenceError { given: text.chars().take(300).collect(), why })
    }
}

fn parse(text: &str) -> Result<Reference, String> {
    let rest = text.strip_prefix(SCHEME).unwrap_or(text);
    if let Some((scheme, _)) = rest.split_once("://") {
        return Err(format!("{scheme}:// is not understood; write {SCHEME}HOST/REPOSITORY:TAG"));
    }
    let no_host = || {
        format!(
            "it names no host, and there is none that is meant by default; write the registry's: \
             {SCHEME}HOST[:PORT]/{}",
            if rest.is_empty() { "REPOSITORY" } else { rest }
        )
    };
    let (site, path) = rest.split_once('/').ok_or_else(no_host)?;
    // As the usual tools tell a host from the first part of a repository's name.
    if !(site.contains(['.', ':']) || site == "localhost") {
        return Err(format!("{}; a host without a dot needs its port, such as {site}:443", no_host()));
    }
    let (host, port) = split_site(site)?;
    let (name, select) = match path.split_once('@') {
        Some((name, digest)) => {
            let digest = digest.parse().map_err(|error| format!("{error}"))?;
            // With both, the digest says all: a tag beside it is for people.
            let (name, tag) = split_tag(name);
            tag.map_or(Ok(()), check_tag)?;
            (name, Select::Digest(digest))
        }
        None => {
            let (name, tag) = split_tag(path);
            let tag = tag.unwrap_or("latest");
            check_tag(tag)?;
            (name, Select::Tag(tag.to_owned()))
        }
    };
    check_repository(name)?;
    Ok(Reference { host, port, repository: name.to_owned(), select })
}

fn split_tag(path: &str) -> (&str, Option<&str>) {
    match path.rsplit_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (path, None),
    }
}

/// Host and port of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`.
fn split_site(site: &str) -> Result<(String, Option<u16>), String> {
    let port_of = |port: &str| match port.parse::<u16>() {
        Ok(number) if number > 0 && port.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err(format!("{port:?} is no port; it is a number from 1 to 65535")),
    };
    if let Some(rest) = site.strip_prefix('[') {
        let (address, after) = rest.split_once(']').ok_or("its IPv6 address has no closing bracket")?;
        let address: Ipv6Addr = address.parse().map_err(|_| format!("{address:?} is no IPv6 address"))?;
        let port = match after.strip_prefix(':') {
            Some(port) => Some(port_of(port)?),
            None if after.is_empty() => None,
            None => return Err(format!("{after:?} follows its address; a port is written [ADDRESS]:PORT")),
        };
        return Ok((address.to_string(), port));
    }
    let (host, port) = match site.split_once(':') {
        Some((_, rest)) if rest.contains(':') => {
            return Err("an IPv6 address is written in brackets, such as [::1]:5000".to_owned());
        }
        Some((host, port)) => (host, Some(port_of(port)?)),
        None => (site, None),
    };
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let labels =
        host.strip_suffix('.').unwrap_or(host).split('.').all(|label| (1..=63).contains(&label.len()));
    if host.len() > HOST_MAX || !labels || !host.bytes().all(fits) {
        return Err(format!("{host:?} is no host name"));
    }
    Ok((host.to_ascii_lowercase(), port))
}

fn check_tag(tag: &str) -> Result<(), String> {
    let first = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let fits = |byte: u8| first(byte) || matches!(byte, b'.' | b'-');
    if tag.len() <= TAG_MAX && tag.bytes().next().is_some_and(first) && tag.bytes().all(fits) {
        return Ok(());
    }
    Err(format!("{tag:?} is no tag; it has letters, digits, `_`, `.` and `-`, at most {TAG_MAX} of them"))
}

/// Parts of lower-case letters and digits, between them `.`, `_`, `__` or any number of `-`; slashes between parts.
fn check_repository(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > REPOSITORY_MAX {
        return Err(format!("its repository has {} bytes; 1 to {REPOSITORY_MAX} are allowed", name.len()));
    }
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    for part in name.split('/') {
        let separators = part.split(|c: char| u8::try_from(c).is_ok_and(is_word));
        let between =
            |text: &str| matches!(text, "" | "." | "_" | "__") || text.bytes().all(|byte| byte == b'-');
        let ends_in_word = |byte: Option<u8>| byte.is_some_and(is_word);
        let fits = ends_in_word(part.bytes().next()) && ends_in_word(part.bytes().next_back());
        if !fits || !separators.into_iter().all(between) {
            let hint =
                if part.bytes().any(|byte| byte.is_ascii_uppercase()) { "; it is in lower case" } else { "" };
            return Err(format!("{name:?} is no repository's name{hint}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parsed(text: &str) -> Reference {
        text.parse().unwrap()
    }

    #[test]
    fn a_reference_has_host_port_repository_and_tag_or_digest() {
        let found = parsed("docker://registry.example/team/app:1.2");
        assert_eq!((found.host(), found.port(), found.repository()), ("registry.example", None, "team/app"));
        assert_eq!(found.select(), &Select::Tag("1.2".to_owned()));
        let found = parsed("localhost:5000/app");
        assert_eq!((found.port(), found.select()), (Some(5000), &Select::Tag("latest".to_owned())));
        let found = parsed(&format!("docker://Registry.Example:443/a/b:tag@{DIGEST}"));
        assert_eq!(found.select(), &Select::Digest(DIGEST.parse().unwrap()));
        assert_eq!(found.to_string(), format!("docker://registry.example:443/a/b@{DIGEST}"));
        let found = parsed("[::1]:5000/a__b.c--d/e");
        assert_eq!((found.host(), found.authority().as_str()), ("::1", "[::1]:5000"));
    }

    #[test]
    fn no_host_is_meant_by_default() {
        for text in
            ["docker://debian:12", "debian", "docker://library/debian:12", "team/app", "docker://", ""]
        {
            let error = text.parse::<Reference>().unwrap_err();
            assert!(error.why.contains("names no host"), "{text}: {}", error.why);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("docker://registry.example/App", "lower case"),
            ("docker://registry.example/", "repository"),
            ("docker://registry.example/a/../b", "no repository"),
            ("docker://registry.example/a//b", "no repository"),
            ("docker://registry.example/a_-b", "no repository"),
            ("docker://registry.example/a:b/c", "no tag"),
            ("docker://registry.example/a:-", "no tag"),
            ("docker://registry.example/a@sha512:00", "SHA-256"),
            ("docker://registry.example:0/a", "no port"),
            ("docker://registry.example:+5/a", "no port"),
            ("docker://registry.example:99999/a", "no port"),
            ("docker://user@registry.example/a", "no host name"),
            ("docker://a..example/a", "no host name"),
            ("docker://::1/a", "brackets"),
            ("docker://[::g]/a", "no IPv6"),
            ("https://registry.example/a", "https://"),
        ] {
            let error = text.parse::<Reference>().unwrap_err();
            assert!(error.why.contains(word), "{text}: {}", error.why);
        }
    }

    #[test]
    fn loopback_is_told_by_name_and_address() {
        for text in ["localhost/a", "127.0.0.1:5000/a", "127.9.9.9/a", "[::1]/a", "x.localhost:1/a"] {
            assert!(parsed(text).is_loopback(), "{text}");
        }
        for text in ["registry.example/a", "localhost.example/a", "10.0.0.1/a", "128.0.0.1:5000/a"] {
            assert!(!parsed(text).is_loopback(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in ".{0,80}") {
            let _ = text.parse::<Reference>();
        }

        #[test]
        fn what_is_shown_is_read_back(text in "docker://[a-z]{1,5}\\.example(:[1-9][0-9]{0,3})?/[a-z]{1,5}(/[a-z0-9]{1,5}){0,2}:[a-z0-9.]{1,9}") {
            if let Ok(found) = text.parse::<Reference>() {
                prop_assert_eq!(found.to_string().parse::<Reference>().unwrap(), found);
            }
        }
    }
}
