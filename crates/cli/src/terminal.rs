//! Our own terminal: raw mode that is always left again, its size, and the way out of a shell.

use std::io::{IsTerminal, Write as _};

use dsec_proto::rest::PtySize;
use rustix::termios::{self, LocalModes, OptionalActions, Termios};

use crate::failure::Failure;

/// Standard input in raw mode. Dropping it restores the terminal, on every way out.
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Switches standard input to raw mode: keys go to the command, Ctrl-C too.
    ///
    /// # Errors
    /// Standard input is no terminal.
    pub(crate) fn enter() -> Result<Self, Failure> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Err(Failure::new("standard input is not a terminal")
                .hint("leave out -t, or run this from a terminal"));
        }
        let failed = |errno: rustix::io::Errno| Failure::io("cannot set up the terminal", &errno.into());
        let before = termios::tcgetattr(&stdin).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(&stdin, OptionalActions::Drain, &raw).map_err(failed)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Asks for a line that is not shown while it is typed.
///
/// # Errors
/// Standard input is no terminal, or it ended.
pub(crate) fn secret(question: &str) -> Result<String, Failure> {
    struct Shown(Termios);
    impl Drop for Shown {
        fn drop(&mut self) {
            let _ = termios::tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
            let _ = writeln!(std::io::stderr());
        }
    }
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(Failure::usage(format!(
            "{question} cannot be asked for: standard input is not a terminal"
        )));
    }
    let failed = |errno: rustix::io::Errno| Failure::io("cannot set up the terminal", &errno.into());
    let before = termios::tcgetattr(&stdin).map_err(failed)?;
    let mut hidden = before.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    let _ = write!(std::io::stderr(), "{question}: ");
    termios::tcsetattr(&stdin, OptionalActions::Flush, &hidden).map_err(failed)?;
    let _shown = Shown(before);
    let mut line = String::new();
    let read =
        stdin.read_line(&mut line).map_err(|error| Failure::io("cannot read standard input", &error))?;
    if read == 0 {
        Err(Failure::usage(format!("{question} was not given")))
    } else {
        Ok(line.trim_end().to_owned())
    }
}

/// Size of our terminal; 24 x 80 where it has none.
pub(crate) fn size() -> PtySize {
    let of = |fd: &dyn std::os::fd::AsFd| termios::tcgetwinsize(fd.as_fd()).ok().filter(|s| s.ws_row > 0);
    match of(&std::io::stdout()).or_else(|| of(&std::io::stdin())) {
        Some(size) => PtySize { rows: size.ws_row, cols: size.ws_col },
        None => PtySize { rows: 24, cols: 80 },
    }
}

/// Finds `~.` at the start of a line, which leaves a shell, as with ssh. `~~` there is one `~`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Escape {
    line_start: bool,
    tilde: bool,
}

impl Escape {
    /// At the start of a line.
    pub(crate) fn new() -> Self {
        Self { line_start: true, tilde: false }
    }

    /// What to pass on of `keys`, and whether the way out was typed (what follows it is dropped).
    pub(crate) fn filter(&mut self, keys: &[u8]) -> (Vec<u8>, bool) {
        let mut pass = Vec::with_capacity(keys.len() + 1);
        for &key in keys {
            if std::mem::take(&mut self.tilde) {
                match key {
                    b'.' => return (pass, true),
                    b'~' => {}
                    _ => pass.push(b'~'),
                }
                pass.push(key);
            } else if self.line_start && key == b'~' {
                self.tilde = true;
            } else {
                pass.push(key);
            }
            self.line_start = matches!(key, b'\r' | b'\n');
        }
        (pass, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_out_is_found_at_the_start_of_a_line_only() {
        let mut escape = Escape::new();
        assert_eq!(escape.filter(b"ls ~.\r"), (b"ls ~.\r".to_vec(), false));
        assert_eq!(escape.filter(b"~"), (Vec::new(), false));
        assert_eq!(escape.filter(b"."), (Vec::new(), true));
        assert_eq!(Escape::new().filter(b"~~x\r~y"), (b"~x\r~y".to_vec(), false));
        assert_eq!(Escape::new().filter(b"a\r~.rest"), (b"a\r".to_vec(), true));
    }
}
