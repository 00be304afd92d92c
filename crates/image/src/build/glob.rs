//! Patterns of paths, matched one name at a time on the way down a tree.
//!
//! ```text
//! /a/b      that path           *   anything but a slash      [a-z] [!a]  one byte of these, of none of these
//! a/b       at any depth        ?   one byte but a slash      \           takes the next byte as it is
//! **        any number of directories, as a part of its own   /  at the end: only directories
//! ```
//!
//! Names are bytes. A match takes time in proportion to the pattern times the name, whatever both are.

use std::str::FromStr;

/// Longest pattern in bytes: half of the longest path.
const GLOB_MAX: usize = 2048;
/// Most parts between slashes: the places in a pattern are bits of one word.
const PARTS_MAX: usize = 62;

/// Why a text is not a pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a pattern of paths: {problem}")]
pub struct GlobError {
    /// The text as it was given, shortened to 160 characters.
    pub given: String,
    /// The rule it breaks.
    pub problem: &'static str,
}

/// A pattern of paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
    /// Only directories match.
    pub(super) is_directory: bool,
}

/// Which places of a pattern a path has come to: bit `n`, its first `n` parts have matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places(u64);

impl Places {
    /// Nothing below can match.
    pub(super) fn is_dead(self) -> bool {
        self.0 == 0
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// Any number of directories, none too.
    Directories,
    Literal(Box<[u8]>),
    Name(Box<[Token]>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Byte(u8),
    One,
    Star,
    Class { negated: bool, ranges: Box<[(u8, u8)]> },
}

impl FromStr for Glob {
    type Err = GlobError;

    fn from_str(text: &str) -> Result<Self, GlobError> {
        parse(text.as_bytes())
            .map_err(|problem| GlobError { given: text.chars().take(160).collect(), problem })
    }
}

fn parse(text: &[u8]) -> Result<Glob, &'static str> {
    if text.len() > GLOB_MAX {
        return Err("it must have at most 2,048 bytes");
    }
    if text.contains(&0) {
        return Err("it has a NUL byte, which no path has");
    }
    let (text, is_directory) = match text.strip_suffix(b"/") {
        Some(text) => (text, true),
        None => (text, false),
    };
    let (text, is_anchored) = match text.strip_prefix(b"/") {
        Some(text) => (text, true),
        None => (text, false),
    };
    if text.is_empty() {
        return Err("it names nothing");
    }
    let mut parts = Vec::new();
    if !is_anchored {
        parts.push(Part::Directories);
    }
    for part in text.split(|byte| *byte == b'/') {
        match part {
            b"" => return Err("it has two slashes with nothing between them"),
            b"." | b".." => {
                return Err("it has a part `.` or `..`; paths are matched from the root, without them");
            }
            b"**" if parts.last() == Some(&Part::Directories) => {}
            b"**" => parts.push(Part::Directories),
            part => parts.push(Part::parse(part)?),
        }
    }
    // At the end it stands for what is in a directory, not for the directory.
    if parts.last() == Some(&Part::Directories) {
        parts.push(Part::Name([Token::Star].into()));
    }
    if parts.len() > PARTS_MAX {
        return Err("it has more than 60 parts between slashes");
    }
    Ok(Glob { parts, is_directory })
}

impl Glob {
    /// The places of the root directory.
    pub(super) fn start(&self) -> Places {
        self.closed(1)
    }

    /// The places of an entry `name` in a directory with these places, and whether it matches.
    pub(super) fn step(&self, places: Places, name: &[u8]) -> (Places, bool) {
        let mut reached = 0;
        for (at, part) in self.parts.iter().enumerate().filter(|(at, _)| places.0 & (1 << at) != 0) {
            match part {
                Part::Directories => reached |= 1 << at,
                part if part.matches(name) => reached |= 1 << (at + 1),
                _ => {}
            }
        }
        let reached = self.closed(reached);
        (reached, reached.0 & (1 << self.parts.len()) != 0)
    }

    /// `**` may stand for nothing.
    fn closed(&self, mut places: u64) -> Places {
        for (at, part) in self.parts.iter().enumerate() {
            if *part == Part::Directories && places & (1 << at) != 0 {
                places |= 1 << (at + 1);
            }
        }
        Places(places)
    }
}

impl Part {
    fn parse(part: &[u8]) -> Result<Self, &'static str> {
        let mut tokens = Vec::new();
        let mut rest = part;
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'*' if tokens.last() == Some(&Token::Star) => {}
                b'*' => tokens.push(Token::Star),
                b'?' => tokens.push(Token::One),
                b'[' => {
                    let (class, after) = class(rest)?;
                    tokens.push(class);
                    rest = after;
                }
                b'\\' => {
                    let (byte, after) = rest.split_first().ok_or("it ends in a backslash")?;
                    tokens.push(Token::Byte(*byte));
                    rest = after;
                }
                byte => tokens.push(Token::Byte(*byte)),
            }
        }
        let bytes: Option<Box<[u8]>> = tokens
            .iter()
            .map(|token| if let Token::Byte(byte) = token { Some(*byte) } else { None })
            .collect();
        Ok(bytes.map_or_else(|| Self::Name(tokens.into()), Self::Literal))
    }

    fn matches(&self, name: &[u8]) -> bool {
        match self {
            Self::Directories => true,
            Self::Literal(literal) => **literal == *name,
            Self::Name(tokens) => matches(tokens, name),
        }
    }
}

/// What is between brackets, and what follows them.
fn class(text: &[u8]) -> Result<(Token, &[u8]), &'static str> {
    const OPEN: &str = "it has a [ without its ]; write \\[ for the character itself";
    let (negated, mut rest) = match text.first() {
        Some(b'!' | b'^') => (true, &text[1..]),
        _ => (false, text),
    };
    let mut ranges = Vec::new();
    loop {
        let (byte, after) = rest.split_first().ok_or(OPEN)?;
        // A bracket that comes first is one of the characters.
        if *byte == b']' && !ranges.is_empty() {
            return Ok((Token::Class { negated, ranges: ranges.into() }, after));
        }
        let (low, after) = match byte {
            b'\\' => after.split_first().ok_or(OPEN)?,
            byte => (byte, after),
        };
        (ranges, rest) = match after {
            [b'-', high, after @ ..] if *high != b']' => {
                if high < low {
                    return Err("it has a range whose end comes before its beginning");
                }
                ranges.push((*low, *high));
                (ranges, after)
            }
            after => {
                ranges.push((*low, *low));
                (ranges, after)
            }
        };
    }
}

/// Goes back to the last star alone, which is enough: an earlier one could take no less.
fn matches(tokens: &[Token], name: &[u8]) -> bool {
    let (mut token, mut at) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while at < name.len() {
        let fits = match tokens.get(token) {
            Some(Token::Star) => {
                star = Some((token + 1, at));
                token += 1;
                continue;
            }
            Some(Token::One) => true,
            Some(Token::Byte(byte)) => *byte == name[at],
            Some(Token::Class { negated, ranges }) => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&name[at])) != *negated
            }
            None => false,
        };
        match (fits, star) {
            (true, _) => (token, at) = (token + 1, at + 1),
            (false, Some((after, from))) => {
                (token, at) = (after, from + 1);
                star = Some((after, from + 1));
            }
            (false, None) => return false,
        }
    }
    tokens[token..].iter().all(|token| *token == Token::Star)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, path: &str) -> bool {
        let glob: Glob = pattern.parse().unwrap();
        let (mut places, mut is_match) = (glob.start(), false);
        for name in path.split('/') {
            (places, is_match) = glob.step(places, name.as_bytes());
        }
        is_match
    }

    #[test]
    fn patterns_match_the_paths_they_mean_and_no_others() {
        for (pattern, good, bad) in [
            ("/a/b", vec!["a/b"], vec!["a", "b", "a/b/c", "x/a/b"]),
            ("b", vec!["b", "a/b", "a/a/b"], vec!["a", "b/a", "bb"]),
            ("a/b", vec!["a/b", "x/y/a/b"], vec!["a/x/b", "b"]),
            ("/a/**/b", vec!["a/b", "a/x/b", "a/x/y/b"], vec!["b", "a/x", "xa/b"]),
            ("/a/**", vec!["a/b", "a/b/c"], vec!["a", "b/a/c"]),
            ("**/a/**/b/**", vec!["a/b/c", "x/a/y/b/z/w"], vec!["a/b", "b/a/c"]),
            ("/**", vec!["a", "a/b"], vec![]),
            ("*.py[co]", vec!["x.pyc", "d/x.pyo", ".pyc"], vec!["x.py", "x.pyd", "x.pyc/y"]),
            ("/a*b*c", vec!["abc", "axxbyyc", "abbcc"], vec!["ab", "acb", "abcd", "a/bc"]),
            ("?", vec!["a", "x/b"], vec!["ab"]),
            ("[!a-c]x", vec!["dx", "-x"], vec!["ax", "cx", "x"]),
            ("[]x]y", vec!["]y", "xy"], vec!["y", "ay"]),
            ("[a-]", vec!["a", "-"], vec!["b"]),
            ("\\*\\[", vec!["*["], vec!["a["]),
            ("a**b", vec!["ab", "axb"], vec!["a/b"]),
        ] {
            for path in good {
                assert!(matches(pattern, path), "{pattern} does not match {path}");
            }
            for path in bad {
                assert!(!matches(pattern, path), "{pattern} matches {path}");
            }
        }
    }

    #[test]
    fn a_name_need_not_be_text() {
        let glob: Glob = "/a?c".parse().unwrap();
        assert!(glob.step(glob.start(), b"a\xffc").1);
    }

    #[test]
    fn what_is_no_pattern_says_why() {
        let (long, deep) = ("a".repeat(2049), "a/".repeat(62));
        for bad in
            ["", "/", "//", "a//b", "a/../b", "./a", "..", "[a", "[", "[z-a]", "a\\", "a\0", &long, &deep]
        {
            let error = bad.parse::<Glob>().unwrap_err();
            assert!(!error.problem.is_empty(), "{bad}");
        }
    }

    #[test]
    fn a_hostile_pattern_is_no_slower_than_its_length_times_the_names() {
        let glob: Glob = format!("/{}b", "a*".repeat(1000)).parse().unwrap();
        assert!(!glob.step(glob.start(), &[b'a'; 255]).1);
        let glob: Glob = "**/a/**/a/**/a/**/a/**/b".parse().unwrap();
        let mut places = glob.start();
        for _ in 0..10_000 {
            places = glob.step(places, b"a").0;
        }
        assert!(!glob.step(places, b"c").1);
    }
}
