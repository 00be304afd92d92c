//! The one place that writes to the terminal: tables for people, JSON for machines, colours only
//! where a person looks.

use std::io::{IsTerminal, Write};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::failure::Failure;

/// Colours of a word, by what it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Fine.
    Good,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
    /// Less important.
    Dim,
    /// A heading.
    Bold,
}

/// Whether colours may be written to a stream of ours.
pub(crate) fn colours(stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// A word in its colour, or as it is.
pub(crate) fn paint(text: &str, tone: Tone, on: bool) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Warn => "33",
        Tone::Bad => "31",
        Tone::Dim => "2",
        Tone::Bold => "1",
    };
    if on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Colour of a sandbox's state.
pub(crate) fn state_tone(state: dsec_model::State) -> Tone {
    match state {
        dsec_model::State::Running => Tone::Good,
        dsec_model::State::Creating
        | dsec_model::State::Pausing
        | dsec_model::State::Resuming
        | dsec_model::State::Stopping => Tone::Warn,
        dsec_model::State::Paused | dsec_model::State::Stopped => Tone::Dim,
        dsec_model::State::Failed | dsec_model::State::Lost => Tone::Bad,
    }
}

/// Writes to standard output at once.
///
/// # Errors
/// Nobody reads it any more, or the disk behind it is full.
pub(crate) fn emit(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Failure::io("cannot write to standard output", &error))
}

/// Writes one line to standard output.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    emit(&format!("{text}\n"))
}

/// Writes a value as indented JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    line(&serde_json::to_string_pretty(value).map_err(|e| Failure::new(format!("cannot write JSON: {e}")))?)
}

/// Writes a value as one line of JSON.
pub(crate) fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    line(&serde_json::to_string(value).map_err(|e| Failure::new(format!("cannot write JSON: {e}")))?)
}

/// Writes a note to standard error. A note that cannot be written is dropped.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Tells a person of a failure, or with `json` a program: in the API's shape, on one line.
pub(crate) fn failure(failure: &Failure, json: bool) {
    if failure.reader_gone {
        return;
    }
    if json {
        note(&failure.body().to_string());
        return;
    }
    let on = colours(&std::io::stderr());
    let mut text = format!("{} {}", paint("error:", Tone::Bad, on), failure.message);
    if !failure.hint.is_empty() {
        text.push_str(&format!("\n{} {}", paint("hint:", Tone::Warn, on), failure.hint));
    }
    note(&text);
}

/// A table of a heading and rows, without lines, as `docker ps` has it. Cells may hold colours.
pub(crate) fn table(heading: &[&str], rows: Vec<Vec<String>>) -> Result<(), Failure> {
    emit(&table_text(heading, rows, colours(&std::io::stdout())))
}

fn table_text(heading: &[&str], rows: Vec<Vec<String>>, colour: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(heading.iter().map(|word| paint(word, Tone::Bold, colour)));
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text = String::new();
    for row in table.to_string().lines() {
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Bytes for a person: `1.5 GiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Seconds for a person: `12s`, `3m 04s`, `2h 05m`, `4d 07h`.
pub(crate) fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// How long ago a moment was.
pub(crate) fn age(then_ms: u64, now_ms: u64) -> String {
    span(now_ms.saturating_sub(then_ms) / 1000)
}

/// Now, Unix milliseconds.
pub(crate) fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// Time of day in UTC of a moment: `14:03:07.125`.
pub(crate) fn clock(ms: u64) -> String {
    let s = ms / 1000;
    format!("{:02}:{:02}:{:02}.{:03}", s / 3600 % 24, s / 60 % 60, s % 60, ms % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(200 << 20), "200 MiB");
        assert_eq!(bytes(5 << 40), "5.0 TiB");
        assert_eq!(span(59), "59s");
        assert_eq!(span(184), "3m 04s");
        assert_eq!(span(7500), "2h 05m");
        assert_eq!(span(4 * 86_400 + 7 * 3600), "4d 07h");
        assert_eq!(age(5000, 3000), "0s");
        assert_eq!(clock(3_723_004), "01:02:03.004");
    }

    #[test]
    fn a_table_has_no_trailing_blanks_and_no_colour_unless_asked() {
        let rows = vec![vec!["sb-n1-a".into(), "running".into()], vec!["sb-n1-bcd".into(), String::new()]];
        let text = table_text(&["ID", "STATE"], rows.clone(), false);
        assert_eq!(text, "ID         STATE\nsb-n1-a    running\nsb-n1-bcd\n");
        assert!(table_text(&["ID", "STATE"], rows, true).starts_with("\x1b[1mID"));
    }

    #[test]
    fn paint_is_silent_when_off() {
        assert_eq!(paint("x", Tone::Bad, false), "x");
        assert_eq!(paint("x", Tone::Bad, true), "\x1b[31mx\x1b[0m");
    }
}
