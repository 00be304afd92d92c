//! Reading what people type: sizes, durations, `K=V`, `ID:/path`, shell words.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dsec_model::CpuClass;

/// One MiB in bytes.
pub(crate) const MIB: u64 = 1 << 20;

/// Bytes from `512m`, `1.5g`, `64KiB` or a plain number of bytes. Units are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("{unit:?} is not a unit of size; use b, k, m, g or t, as in 512m")),
    };
    let value: f64 =
        number.parse().map_err(|_| format!("{text:?} is not a size; write it as in 512m or 2g"))?;
    let bytes = value * (1u64 << shift) as f64;
    if !bytes.is_finite() || bytes >= (1u64 << 60) as f64 {
        return Err(format!("{text:?} is too large a size"));
    }
    Ok(bytes as u64)
}

/// MiB, rounded up, from a size. A plain small number is refused: it would be bytes.
pub(crate) fn size_mib(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if bytes > 0 && bytes < MIB {
        return Err(format!(
            "{text} is less than 1 MiB; did you mean {}m?",
            text.trim_end_matches(['b', 'B'])
        ));
    }
    Ok(bytes.div_ceil(MIB))
}

/// A CPU class by its name.
pub(crate) fn cpu_class() -> impl TypedValueParser<Value = CpuClass> {
    PossibleValuesParser::new(CpuClass::ALL.map(CpuClass::as_str)).try_map(|name| name.parse::<CpuClass>())
}

/// A duration from `2s`, `500ms`, `1h30m`, `1.5m` or a plain number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let wrong = || format!("{text:?} is not a duration; write it as in 500ms, 2s, 10m, 1h30m or 7d");
    if text.is_empty() {
        return Err(wrong());
    }
    let (mut rest, mut seconds) = (text, 0.0f64);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, next) = tail.split_at(letters);
        let factor = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            "" if rest.len() == text.len() && next.is_empty() => 1.0,
            _ => return Err(wrong()),
        };
        seconds += number.parse::<f64>().map_err(|_| wrong())? * factor;
        rest = next;
    }
    // Above it a number is a mistake, and arithmetic in ms stays exact below it.
    if seconds > 1e9 {
        return Err(format!("{text:?} is too long a duration"));
    }
    Ok(Duration::from_millis((seconds * 1000.0).round() as u64))
}

/// `K=V`.
pub(crate) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not KEY=VALUE")),
    }
}

/// `K=V`, or `K` alone: then its value is taken from our own environment.
pub(crate) fn env_value(text: &str) -> Result<(String, String), String> {
    if text.contains('=') {
        return key_value(text);
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(_) => Err(format!("{text} is not set here; write {text}=VALUE")),
    }
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Standard input or output.
    Stdio,
    /// A path here.
    Local(std::path::PathBuf),
    /// A path in a sandbox.
    Remote {
        /// Which sandbox.
        sandbox: dsec_model::SandboxId,
        /// Path inside; relative ones start at the sandbox's working directory.
        path: String,
    },
}

/// `-`, `ID:/path`, or a local path. `./sb-x:y` is local: only a sandbox id before the colon counts.
pub(crate) fn place(text: &str) -> Result<Place, String> {
    if text == "-" {
        return Ok(Place::Stdio);
    }
    if let Some((id, path)) = text.split_once(':')
        && let Ok(sandbox) = id.parse()
    {
        if path.is_empty() {
            return Err(format!("{text:?} has no path after the colon; write {id}:/path"));
        }
        return Ok(Place::Remote { sandbox, path: path.to_owned() });
    }
    Ok(Place::Local(text.into()))
}

/// One line for a shell out of words: a single word is taken as a line already.
pub(crate) fn shell_line(words: &[String]) -> String {
    match words {
        [line] => line.clone(),
        words => words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "),
    }
}

fn quote(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Percent-encodes one path segment of a URL.
pub(crate) fn segment(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_powers_of_1024_and_round_up_to_mib() {
        assert_eq!(size("512m"), Ok(512 * MIB));
        assert_eq!(size("1.5G"), Ok(1536 * MIB));
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size("123"), Ok(123));
        assert_eq!(size_mib("2g"), Ok(2048));
        assert_eq!(size_mib("1025k"), Ok(2));
        assert_eq!(size_mib("0"), Ok(0));
    }

    #[test]
    fn a_size_that_is_none_says_how_to_write_one() {
        for bad in ["", "m", "1.2.3m", "-5m", "5x", "999999999999t"] {
            assert!(size(bad).is_err(), "{bad:?} was taken");
        }
        assert_eq!(size_mib("512").unwrap_err(), "512 is less than 1 MiB; did you mean 512m?");
    }

    #[test]
    fn durations_add_up() {
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(604_800)));
        for bad in ["", "s", "1x", "1m30", "-1s", "1e99s", "99999999999d"] {
            assert!(duration(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn a_place_is_remote_only_with_a_sandbox_id() {
        assert_eq!(place("-"), Ok(Place::Stdio));
        assert_eq!(
            place("sb-n1-abc:/etc/hosts"),
            Ok(Place::Remote { sandbox: "sb-n1-abc".parse().unwrap(), path: "/etc/hosts".into() })
        );
        assert_eq!(place("./a:b"), Ok(Place::Local("./a:b".into())));
        assert!(place("sb-n1-abc:").is_err());
    }

    #[test]
    fn one_word_is_a_line_and_many_are_quoted() {
        assert_eq!(shell_line(&["cd /tmp && ls".into()]), "cd /tmp && ls");
        assert_eq!(shell_line(&["echo".into(), "it's $HOME".into()]), r"echo 'it'\''s $HOME'");
        assert_eq!(shell_line(&["printf".into(), String::new()]), "printf ''");
    }

    #[test]
    fn a_segment_holds_no_slash() {
        assert_eq!(segment("lib/debian:12"), "lib%2Fdebian%3A12");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC{0,24}") {
            let _ = (size(&text), size_mib(&text), duration(&text), place(&text), key_value(&text));
        }

        #[test]
        fn whole_units_survive(n in 0u64..1_000_000) {
            prop_assert_eq!(size(&format!("{n}k")), Ok(n << 10));
            prop_assert_eq!(duration(&format!("{n}ms")), Ok(Duration::from_millis(n)));
        }
    }
}
