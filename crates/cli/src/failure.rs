//! What a command ends with when it does not succeed, and how a person is told.

use std::fmt;

use dsec_model::ErrorKind;
use dsec_proto::guest;
use serde_json::{Value, json};

/// Exit code of dsec's own failures in `run`, `exec` and `shell`, where every other code belongs to
/// the command inside. Docker and podman use the same one.
pub(crate) const EXIT_OWN_FAILURE: u8 = 125;
/// Exit code of a command whose program is there and cannot be run.
pub(crate) const EXIT_NOT_EXECUTABLE: u8 = 126;
/// Exit code of a command whose program is not there.
pub(crate) const EXIT_NOT_FOUND: u8 = 127;
/// Exit code of every other command that was called wrongly.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code of a reader that went away (128 + SIGPIPE), as shells have it.
pub(crate) const EXIT_PIPE: u8 = 141;
/// Exit code of a command that was interrupted (128 + SIGINT).
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// A failure: what was asked and what was found, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What was asked and found. One line, no trailing stop.
    pub(crate) message: String,
    /// What to do. May be empty.
    pub(crate) hint: String,
    /// What kind, in the API's words.
    pub(crate) kind: ErrorKind,
    /// Facts for a program: the API's own where it said no, else empty.
    pub(crate) detail: Value,
    /// Nobody reads our output any more: end without a word.
    pub(crate) reader_gone: bool,
}

impl Failure {
    /// A failure with its message.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: String::new(),
            kind: ErrorKind::Internal,
            detail: json!({}),
            reader_gone: false,
        }
    }

    /// A failure of what the caller gave.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::InvalidArgument, ..Self::new(message) }
    }

    /// In the API's shape, for a program.
    pub(crate) fn body(&self) -> Value {
        json!({ "code": self.kind, "message": self.message, "detail": self.detail, "hint": self.hint })
    }

    /// Exit code where every code but dsec's own failures belongs to the command inside: a program that
    /// could not be started has the codes that shells and docker give it.
    pub(crate) fn command_code(&self) -> u8 {
        match self.detail.get("reason").and_then(Value::as_str) {
            Some(guest::PROGRAM_NOT_FOUND) => EXIT_NOT_FOUND,
            Some(guest::PROGRAM_NOT_EXECUTABLE) => EXIT_NOT_EXECUTABLE,
            _ => EXIT_OWN_FAILURE,
        }
    }

    /// Says what to do.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// A failed system call on something that has a name.
    pub(crate) fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            std::io::ErrorKind::AlreadyExists => ErrorKind::AlreadyExists,
            std::io::ErrorKind::StorageFull => ErrorKind::ResourceExhausted,
            _ => ErrorKind::Internal,
        };
        let failure = Self { kind, ..Self::new(format!("{what}: {}", plain(error))) };
        match error.kind() {
            std::io::ErrorKind::StorageFull => {
                failure.hint("the disk is full; free some space and try again")
            }
            std::io::ErrorKind::BrokenPipe => Self { reader_gone: true, ..failure },
            _ => failure,
        }
    }
}

/// The text of an I/O error without `(os error N)`, which says nothing to a person.
pub(crate) fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// What every command answers: its exit code.
pub(crate) type Outcome = Result<u8, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_what_to_do() {
        let error = std::io::Error::from(rustix::io::Errno::NOSPC);
        let failure = Failure::io("cannot write /x", &error);
        assert_eq!(failure.message, "cannot write /x: No space left on device");
        assert!(failure.hint.contains("free some space"));
    }
}
