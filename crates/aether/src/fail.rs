//! Errors as the edge gets them: a kind, and a sentence that says what was asked and what was found.

use dsec_proto::guest::{GuestError, GuestErrorKind as Kind};
use rustix::io::Errno;

/// An error of this kind.
pub(crate) fn fail(kind: Kind, message: impl Into<String>) -> GuestError {
    GuestError { kind: kind.into(), message: message.into(), ..GuestError::default() }
}

/// An error of this kind with advice.
pub(crate) fn fail_hint(kind: Kind, message: impl Into<String>, hint: &str) -> GuestError {
    GuestError { kind: kind.into(), message: message.into(), hint: hint.to_owned(), ..GuestError::default() }
}

/// A malformed or impossible request.
pub(crate) fn invalid(message: impl Into<String>) -> GuestError {
    fail(Kind::InvalidArgument, message)
}

/// `what` (such as "cannot open /x") failed with `errno`.
pub(crate) fn os(what: impl std::fmt::Display, errno: Errno) -> GuestError {
    let kind = match errno {
        Errno::NOENT | Errno::SRCH => Kind::NotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Kind::PermissionDenied,
        Errno::EXIST => Kind::AlreadyExists,
        Errno::NOTEMPTY | Errno::BUSY | Errno::TXTBSY => Kind::Conflict,
        Errno::NOTDIR | Errno::ISDIR | Errno::INVAL | Errno::LOOP | Errno::NAMETOOLONG | Errno::XDEV => {
            Kind::InvalidArgument
        }
        Errno::NOSPC | Errno::DQUOT | Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN => {
            Kind::ResourceExhausted
        }
        Errno::FBIG | Errno::TOOBIG => Kind::TooLarge,
        _ => Kind::Internal,
    };
    fail(kind, format!("{what}: {}", reason(errno)))
}

/// The errno in words.
pub(crate) fn reason(errno: Errno) -> String {
    let known = match errno {
        Errno::NOENT => "it does not exist",
        Errno::ACCESS => "permission denied",
        Errno::PERM => "operation not permitted",
        Errno::ROFS => "it is on a read-only file system",
        Errno::EXIST => "it exists already",
        Errno::NOTEMPTY => "the directory is not empty",
        Errno::BUSY => "it is in use or a mount point",
        Errno::TXTBSY => "the program is running",
        Errno::NOTDIR => "a part of the path is not a directory",
        Errno::ISDIR => "it is a directory",
        Errno::LOOP => "too many symbolic links (a loop?)",
        Errno::NAMETOOLONG => "the name is too long",
        Errno::NOSPC => "the writable layer is full",
        Errno::DQUOT => "the writable layer is full (its quota is used up)",
        Errno::NOMEM => "out of memory",
        Errno::MFILE | Errno::NFILE => "too many open files",
        Errno::AGAIN => "the sandbox's limit of processes is reached",
        _ => return std::io::Error::from(errno).to_string(),
    };
    known.to_owned()
}

/// Bytes for a message: readable, bounded.
pub(crate) fn show(bytes: &[u8]) -> String {
    const MOST: usize = 1024;
    if bytes.len() <= MOST {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    format!("{}...", String::from_utf8_lossy(&bytes[..MOST]))
}

/// Refuses a NUL, which no path, argument or variable can have.
pub(crate) fn no_nul(what: &str, bytes: &[u8]) -> Result<(), GuestError> {
    if bytes.contains(&0) {
        return Err(invalid(format!("{what} contains a NUL byte: {}", show(bytes).replace('\0', "\\0"))));
    }
    Ok(())
}
