//! The one error shape, and the one table from kinds to HTTP.

use std::fmt;

use dsec_model::ErrorKind;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What every failed request answers with, on every path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What a program branches on.
    #[schema(value_type = String, example = "not_found")]
    pub code: ErrorKind,
    /// What was asked and what was found, for a person.
    #[schema(example = "no sandbox sb-n1-abc on this node")]
    pub message: String,
    /// Facts for a program: the field, the bounds, the id. An object, possibly empty.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub detail: serde_json::Value,
    /// What to do about it. May be empty.
    #[serde(default)]
    pub hint: String,
}

/// An [`ErrorBody`] as a Rust error.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError(pub Box<ErrorBody>);

impl ApiError {
    /// An error of a kind with its message; add the rest with [`Self::hint`] and [`Self::detail`].
    pub fn new(code: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorBody {
            code,
            message: message.into(),
            detail: serde_json::Value::Object(serde_json::Map::new()),
            hint: String::new(),
        }))
    }

    /// Says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = hint.into();
        self
    }

    /// Adds facts: a JSON object.
    #[must_use]
    pub fn detail(mut self, detail: serde_json::Value) -> Self {
        self.0.detail = detail;
        self
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.code
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if !self.0.hint.is_empty() {
            write!(f, " ({})", self.0.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for ApiError {}

/// The HTTP status of a kind.
pub fn status_of(kind: ErrorKind) -> u16 {
    match kind {
        ErrorKind::InvalidArgument => 400,
        ErrorKind::Unauthenticated => 401,
        ErrorKind::PermissionDenied => 403,
        ErrorKind::NotFound => 404,
        ErrorKind::MethodNotAllowed => 405,
        ErrorKind::RangeNotSatisfiable => 416,
        ErrorKind::AlreadyExists | ErrorKind::Conflict => 409,
        ErrorKind::TooLarge => 413,
        ErrorKind::ResourceExhausted => 429,
        ErrorKind::Unsupported => 501,
        ErrorKind::Unavailable => 503,
        ErrorKind::DeadlineExceeded => 504,
        ErrorKind::Internal => 500,
    }
}
