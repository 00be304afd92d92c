//! The kinds of failure a caller can meet, free of any transport. The HTTP status of each is in
//! one table in `proto`.

use serde::{Deserialize, Serialize};

/// What kind of failure this is: what a program branches on. The text of it is the wire's `code`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is malformed or a value is out of its range. Sending it again fails again.
    InvalidArgument,
    /// No key, or a key nobody issued.
    Unauthenticated,
    /// The key is good and may not do this.
    PermissionDenied,
    /// What the request names is not there.
    NotFound,
    /// The path does not take the request's method.
    MethodNotAllowed,
    /// The range of the file that is asked for begins after its end.
    RangeNotSatisfiable,
    /// It is there already, with other content.
    AlreadyExists,
    /// The thing is in a state in which this cannot be done: a stopped sandbox, an image in use.
    Conflict,
    /// Bigger than a limit of the platform.
    TooLarge,
    /// The node has no room for it now. Trying elsewhere or later may work.
    ResourceExhausted,
    /// A time limit that the caller set ran out.
    DeadlineExceeded,
    /// The node, the agent or a needed service cannot be reached now. Trying later may work.
    Unavailable,
    /// This host's kernel or tools cannot do it; `dsec doctor` says why.
    Unsupported,
    /// A defect or a failure of the host.
    Internal,
}

impl ErrorKind {
    /// The wire's word for the kind.
    pub fn code(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::RangeNotSatisfiable => "range_not_satisfiable",
            Self::AlreadyExists => "already_exists",
            Self::Conflict => "conflict",
            Self::TooLarge => "too_large",
            Self::ResourceExhausted => "resource_exhausted",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
        }
    }
}
