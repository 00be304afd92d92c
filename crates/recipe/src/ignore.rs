//! `.dockerignore`: what of a recipe's directory is not there for its steps.
//!
//! One pattern a line, from the directory on: `*` and `?` match no slash, `[a-z]` and `[^a-z]` one character, `**` any number of
//! directories, a backslash takes the next character as it is. With `!` before it a pattern takes back what the ones above left out. The
//! last that matches a path or a directory above it counts.

/// The patterns of a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ignore {
    patterns: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Pattern {
    line: usize,
    takes_back: bool,
    parts: Vec<String>,
}

/// Why a text is no list of patterns.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {pattern:?} is no pattern: {what}")]
pub struct IgnoreError {
    /// The line, from 1.
    pub line: usize,
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub what: &'static str,
}

impl Ignore {
    /// Reads a list of patterns.
    ///
    /// # Errors
    /// One of them is none; its line is named.
    pub fn parse(text: &str) -> Result<Self, IgnoreError> {
        let mut patterns = Vec::new();
        for (number, written) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            if written.starts_with('#') || written.trim().is_empty() {
                continue;
            }
            let (takes_back, pattern) = match written.trim().strip_prefix('!') {
                Some(rest) => (true, rest.trim()),
                None => (false, written.trim()),
            };
            let parts: Vec<String> =
                pattern.split('/').filter(|part| !matches!(*part, "" | ".")).map(str::to_owned).collect();
            let wrong = |what| IgnoreError { line: number + 1, pattern: pattern.to_owned(), what };
            if parts.iter().any(|part| part == "..") {
                return Err(wrong("it leads out of the directory"));
            }
            if let Some(what) = parts.iter().find_map(|part| problem(part)) {
                return Err(wrong(what));
            }
            // The directory itself is always there.
            if !parts.is_empty() {
                patterns.push(Pattern { line: number + 1, takes_back, parts });
            }
        }
        Ok(Self { patterns })
    }

    /// The line of the pattern that leaves a path out, if it is left out. `path` is relative to the directory.
    pub fn leaves_out(&self, path: &str) -> Option<usize> {
        let names: Vec<&str> = path.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
        let covers = |pattern: &&Pattern| (1..=names.len()).any(|end| fits(&pattern.parts, &names[..end]));
        let last = self.patterns.iter().rev().find(covers)?;
        (!last.takes_back).then_some(last.line)
    }

    /// Whether something may be there below a directory that is left out.
    pub fn may_take_back(&self) -> bool {
        self.patterns.iter().any(|pattern| pattern.takes_back)
    }
}

/// What is wrong with a part of a pattern between two slashes.
fn problem(part: &str) -> Option<&'static str> {
    let mut rest = part.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' if rest.next().is_none() => return Some("nothing follows the backslash"),
            '[' => match class(rest.as_str()) {
                Some((_, after)) => rest = after.chars(),
                None => return Some("a bracket has no other"),
            },
            _ => {}
        }
    }
    None
}

fn fits(parts: &[String], names: &[&str]) -> bool {
    let Some((first, rest)) = parts.split_first() else { return names.is_empty() };
    if first == "**" {
        return (0..=names.len()).any(|skipped| fits(rest, &names[skipped..]));
    }
    match names.split_first() {
        Some((name, below)) => part_fits(first, name) && fits(rest, below),
        None => false,
    }
}

/// One name against a part. What a star has taken is given back one character at a time, of the last star alone.
fn part_fits(part: &str, name: &str) -> bool {
    let (mut part, mut name) = (part, name);
    let mut star: Option<(&str, &str)> = None;
    loop {
        if let Some(after) = part.strip_prefix('*') {
            star = Some((after, name));
            part = after;
            continue;
        }
        if part.is_empty() && name.is_empty() {
            return true;
        }
        if let Some((part_after, name_after)) = one_fits(part, name) {
            (part, name) = (part_after, name_after);
            continue;
        }
        let Some((after, taken)) = star else { return false };
        let mut longer = taken.chars();
        if longer.next().is_none() {
            return false;
        }
        star = Some((after, longer.as_str()));
        (part, name) = (after, longer.as_str());
    }
}

/// One character of a name against what begins a part; both without it.
fn one_fits<'a>(part: &'a str, name: &'a str) -> Option<(&'a str, &'a str)> {
    let (mut wanted, mut found) = (part.chars(), name.chars());
    let c = found.next()?;
    let does = match wanted.next()? {
        '?' => true,
        '[' => {
            let (class, after) = class(wanted.as_str())?;
            wanted = after.chars();
            class.has(c)
        }
        '\\' => wanted.next() == Some(c),
        other => other == c,
    };
    does.then_some((wanted.as_str(), found.as_str()))
}

struct Class {
    is_other: bool,
    ranges: Vec<(char, char)>,
}

impl Class {
    fn has(&self, c: char) -> bool {
        self.ranges.iter().any(|(from, to)| (*from..=*to).contains(&c)) != self.is_other
    }
}

/// The class behind a bracket, and what follows it.
fn class(text: &str) -> Option<(Class, &str)> {
    let (is_other, mut rest) = match text.strip_prefix('^') {
        Some(after) => (true, after),
        None => (false, text),
    };
    let mut ranges = Vec::new();
    loop {
        if let Some(after) = rest.strip_prefix(']').filter(|_| !ranges.is_empty()) {
            return Some((Class { is_other, ranges }, after));
        }
        let (from, after) = literal(rest)?;
        rest = after;
        let mut to = from;
        if let Some(after) = rest.strip_prefix('-') {
            (to, rest) = literal(after)?;
        }
        ranges.push((from, to));
    }
}

fn literal(text: &str) -> Option<(char, &str)> {
    let mut rest = text.chars();
    let c = match rest.next()? {
        '\\' => rest.next()?,
        c => c,
    };
    Some((c, rest.as_str()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn left_out(text: &str, path: &str) -> bool {
        Ignore::parse(text).unwrap().leaves_out(path).is_some()
    }

    #[test]
    fn patterns_match_from_the_directory_on_and_with_all_below() {
        for (text, path, wanted) in [
            ("a", "a", true),
            ("a", "a/b/c", true),
            ("a", "b/a", false),
            ("/a/", "a", true),
            ("./a", "a", true),
            ("**/a", "x/y/a/z", true),
            ("**/a", "a", true),
            ("a/**", "a", true),
            ("a/**/z", "a/z", true),
            ("a/**/z", "a/b/c/z", true),
            ("a/**/z", "a/b", false),
            ("*.py", "a.py", true),
            ("*.py", "d/a.py", false),
            ("*/*.py", "d/a.py", true),
            ("a*b*c", "aXbXbc", true),
            ("a*b*c", "aXbX", false),
            ("a?c", "abc", true),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[]]x", "]x", true),
            (r"\*", "*", true),
            (r"\*", "a", false),
            ("# a\n\n  \nb", "# a", false),
            ("*\n!keep\n!d/keep", "keep", false),
            ("*\n!keep\n!d/keep", "d/keep/below", false),
            ("*\n!keep\n!d/keep", "d/other", true),
            ("!a\na", "a", true),
            (".", "a", false),
        ] {
            assert_eq!(left_out(text, path), wanted, "{text:?} {path}");
        }
        assert_eq!(Ignore::parse("# x\na\n*.o").unwrap().leaves_out("m.o"), Some(3));
    }

    #[test]
    fn what_is_no_pattern_is_named_with_its_line() {
        for (text, line) in [("a\n[b", 2), ("a\\", 1), ("../a", 1), ("x\n\na/../b", 3), ("[", 1), ("[a-", 1)]
        {
            assert_eq!(Ignore::parse(text).unwrap_err().line, line, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in "[ab*?\\[\\]^\\\\/!#. -]{0,24}", path in "[ab/]{0,12}") {
            if let Ok(ignore) = Ignore::parse(&text) {
                ignore.leaves_out(&path);
            }
        }
    }
}
