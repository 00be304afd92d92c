//! `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`, as Dockerfiles have them.

use std::collections::BTreeMap;

/// Words in words in words.
const DEPTH_MAX: usize = 8;

/// Replaces variables; one that is not set is nothing. `\$` is a dollar.
///
/// # Errors
/// A brace without its other, or another form.
pub(crate) fn substitute(text: &str, vars: &BTreeMap<String, String>) -> Result<String, String> {
    replaced(text, vars, DEPTH_MAX)
}

fn replaced(text: &str, vars: &BTreeMap<String, String>, depth: usize) -> Result<String, String> {
    let wrong =
        || format!("{text:?} has a variable in a form that is not understood; write $NAME or ${{NAME}}");
    let depth = depth.checked_sub(1).ok_or_else(wrong)?;
    let is_name = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix('\\') {
            if !after.starts_with('$') {
                out.push('\\');
            }
            let first = after.chars().next();
            out.extend(first);
            rest = &after[first.map_or(0, char::len_utf8)..];
            continue;
        }
        let after = &rest[1..];
        let Some(inner) = after.strip_prefix('{') else {
            let name: String = after.chars().take_while(is_name).collect();
            if name.is_empty() {
                out.push('$');
            } else {
                out.push_str(vars.get(&name).map_or("", String::as_str));
            }
            rest = &after[name.len()..];
            continue;
        };
        let end = closing(inner).ok_or_else(wrong)?;
        let (expression, name) = (&inner[..end], inner.chars().take_while(is_name).collect::<String>());
        let value = vars.get(&name).map(String::as_str).filter(|value| !value.is_empty());
        match &expression[name.len()..] {
            _ if name.is_empty() => return Err(wrong()),
            "" => out.push_str(value.unwrap_or_default()),
            word => match (word.strip_prefix(":-"), word.strip_prefix(":+"), value) {
                (Some(_), _, Some(value)) => out.push_str(value),
                (Some(word), _, None) | (_, Some(word), Some(_)) => {
                    out.push_str(&replaced(word, vars, depth)?)
                }
                (_, Some(_), None) => {}
                _ => return Err(wrong()),
            },
        }
        rest = &inner[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the brace that is open ends.
fn closing(text: &str) -> Option<usize> {
    let mut open = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => open += 1,
            '}' if open == 0 => return Some(at),
            '}' => open -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vars() -> BTreeMap<String, String> {
        [("A", "one"), ("B", ""), ("C_1", "two")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn variables_are_replaced_in_every_form() {
        for (text, wanted) in [
            ("$A/$C_1-$B.$NONE", "one/two-."),
            ("${A}x${C_1}", "onextwo"),
            ("${NONE:-d} ${B:-d} ${A:-d}", "d d one"),
            ("${NONE:+d}${B:+d}${A:+d}", "d"),
            ("${NONE:-${A:+$C_1}}", "two"),
            (r"\$A \n $ 5$", r"$A \n $ 5$"),
            ("ä$A", "äone"),
        ] {
            assert_eq!(substitute(text, &vars()).as_deref(), Ok(wanted), "{text}");
        }
        for text in ["${A", "${}", "${A:?x}", "${A%x}", "${-}"] {
            assert!(substitute(text, &vars()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in "[${}A:+\\-ä\\\\]{0,40}") {
            let _ = substitute(&text, &vars());
        }
    }
}
