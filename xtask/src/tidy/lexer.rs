//! Just enough of Rust's lexical rules to tell code from comments and literals.

/// The source with comments and the content of string and character literals made blank; lines
/// stay where they are.
pub(crate) fn code_of(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' | 'b' | 'c' if !ends_in_word(&out) => match raw_or_byte(rest) {
                Some(length) => length,
                None => {
                    out.push(first);
                    rest = &rest[1..];
                    continue;
                }
            },
            '\'' => match character(rest) {
                Some(length) => length,
                None => {
                    out.push(first);
                    rest = &rest[1..];
                    continue;
                }
            },
            _ => {
                out.push(first);
                rest = &rest[first.len_utf8()..];
                continue;
            }
        };
        out.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[length..];
    }
    out
}

/// Whether `word` is in `code` by itself and not as part of another.
pub(crate) fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn ends_in_word(out: &str) -> bool {
    out.chars().next_back().is_some_and(is_word)
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of a literal that starts with a quote.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a literal such as `r#"..."#`, `b"..."`, `br"..."`, `c"..."` or `b'x'`.
fn raw_or_byte(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c"].into_iter().find(|prefix| {
        let rest = &text[prefix.len().min(text.len())..];
        text.starts_with(prefix) && (rest.starts_with('"') || rest.starts_with('#') || rest.starts_with('\''))
    })?;
    let rest = &text[prefix.len()..];
    if !prefix.ends_with('r') {
        let length = if rest.starts_with('"') { string(rest) } else { character(rest)? };
        return Some(prefix.len() + length);
    }
    let hashes = rest.chars().take_while(|c| *c == '#').count();
    rest[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let body = &rest[hashes + 1..];
    let end = body.find(&close).map_or(body.len(), |at| at + close.len());
    Some(prefix.len() + hashes + 1 + end)
}

/// Length of a character literal; `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        let (_, _escaped) = chars.next()?;
        return chars.find(|(_, c)| *c == '\'').map(|(at, _)| at + 1);
    }
    let (at, second) = chars.next()?;
    (second == '\'').then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blank_and_code_is_not() {
        for (source, keeps) in [
            ("let a = 1; // unsafe", "let a = 1;"),
            ("/* unsafe /* in */ unsafe */ let b;", "let b;"),
            ("let s = \"un\\\"safe\"; f()", " ; f()"),
            ("r#\"unsafe \" \"#; g()", "; g()"),
            ("let c = '\"'; h(\"x\")", "h("),
            ("fn f<'a>(x: &'a str) { unsafe {} }", "fn f<'a>(x: &'a str) { unsafe {} }"),
            ("b'\\''; unsafe", "; unsafe"),
            ("for_r\"x\"", "for_r"),
        ] {
            let code = code_of(source);
            assert!(code.contains(keeps), "{source:?} became {code:?}");
            assert_eq!(code.chars().count(), source.chars().count());
        }
        assert!(!has_word(&code_of("// unsafe\n\"unsafe\""), "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
        assert!(has_word("{unsafe{", "unsafe"));
    }
}
