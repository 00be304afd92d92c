//! The text that a session's shell is fed.
//!
//! For each line:
//! ```sh
//! (exit 3) && :                                  # only when $? was 3 before
//! \command eval 'THE LINE
//! ' 9>&-
//!
//! { \command echo "17 $?" >&9; } 2>/dev/null
//! ```
//! `eval` of one quoted word runs any text in the shell itself and fails on a syntax error without
//! taking what follows with it. `command` in front lets the shell live through errors that otherwise
//! end it when a special builtin has them (dash, and bash as `sh`); the backslash keeps aliases out.
//! `9>&-` closes the control pipe for whatever the line starts; the shell keeps its own copy
//! close-on-exec. The empty line is for bash 5.2, which after an unterminated quote in `eval` takes the
//! next `{` for a word otherwise. `set -x` does not show the report, since that goes to `/dev/null`. `(exit 3) && :`
//! sets `$?` and does not trip `set -e`.

use std::os::fd::RawFd;

/// Where the shell finds its script at its start; it opens it anew by path and then closes this.
pub(crate) const SCRIPT_FD: RawFd = 8;
/// Where it reports. One digit: dash knows no others.
pub(crate) const CONTROL_FD: RawFd = 9;
const SCRIPT_PATH: &[u8] = b"/proc/self/fd/8";

/// First text: the inherited script descriptor is closed, and bash gets its name as `$0` (from 5.0
/// on; elsewhere this is a variable like any other). Its messages still begin with the script's path; see
/// [`super::messages`].
pub(super) const PRELUDE: &[u8] = b"BASH_ARGV0=bash; unset BASH_ARGV0; exec 8<&-\n";

/// How a shell is started. `real` is the file behind `shell`.
pub(crate) fn shell_argv(shell: &[u8], real: &[u8]) -> Vec<Vec<u8>> {
    let name = |path: &[u8]| path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
    let mut argv = vec![shell.to_vec()];
    match (name(shell).as_slice(), name(real).as_slice()) {
        (b"bash", _) => argv.extend([&b"--noprofile"[..], b"--norc", SCRIPT_PATH].map(<[u8]>::to_vec)),
        // dash reads a sourced pipe as it comes, and so calls itself `sh` in messages; bash would
        // read it to its end first.
        (_, b"dash") => argv.extend([&b"-c"[..], b". /proc/self/fd/8", b"sh"].map(<[u8]>::to_vec)),
        _ => argv.push(SCRIPT_PATH.to_vec()),
    }
    argv
}

/// The text that runs a line.
pub(super) fn line_text(line: &[u8], number: u64, status: i32, into: &mut Vec<u8>) {
    into.reserve(line.len() + 128);
    if status != 0 {
        into.extend_from_slice(format!("(exit {status}) && :\n").as_bytes());
    }
    into.extend_from_slice(b"\\command eval '");
    for part in line.split_inclusive(|b| *b == b'\'') {
        match part.split_last() {
            Some((b'\'', rest)) => {
                into.extend_from_slice(rest);
                into.extend_from_slice(b"'\\''");
            }
            _ => into.extend_from_slice(part),
        }
    }
    let report = format!("\n' 9>&-\n\n{{ \\command echo \"{number} $?\" >&9; }} 2>/dev/null\n");
    into.extend_from_slice(report.as_bytes());
}

/// A report: the line's number and its `$?`.
pub(super) fn parse_report(text: &[u8]) -> Option<(u64, i32)> {
    let (number, status) = std::str::from_utf8(text).ok()?.trim().split_once(' ')?;
    Some((number.parse().ok()?, status.parse::<u8>().ok()?.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_end_and_begin_again_around_a_quote() {
        let mut text = Vec::new();
        line_text(b"echo 'a b'", 4, 0, &mut text);
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("\\command eval 'echo '\\''a b'\\''\n' 9>&-\n"), "{text}");
    }

    #[test]
    fn only_whole_reports_count() {
        assert_eq!(parse_report(b"17 2"), Some((17, 2)));
        assert_eq!(parse_report(b"17"), None);
        assert_eq!(parse_report(b"17 999"), None);
        assert_eq!(parse_report(b"\xff 1"), None);
    }
}
