//! How a failure leaves this process: one JSON shape on every path, see `dsec_proto::rest::ErrorBody`.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, status_of};
use http::{HeaderValue, StatusCode, header};

/// What a handler answers: a response, which may be a node's own error, or a failure of ours.
pub type Reply = Result<Response, Failure>;

/// A failure of this process, on its way to the caller.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure(pub ApiError);

impl Failure {
    /// A failure of a kind with its message.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(ApiError::new(kind, message))
    }

    /// Says what to do.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self(self.0.hint(hint))
    }

    /// Adds facts for a program: a JSON object.
    #[must_use]
    pub fn detail(self, detail: serde_json::Value) -> Self {
        Self(self.0.detail(detail))
    }

    /// The body is larger than its path takes.
    pub fn body_too_large(limit: usize) -> Self {
        Self::new(ErrorKind::TooLarge, format!("the JSON body is larger than {limit} bytes"))
            .hint("write large content with PUT .../files, which takes bodies of any size")
            .detail(serde_json::json!({ "limit_bytes": limit }))
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let kind = self.0.kind();
        // The shape is strings and a JSON value, which always serialise; the fallback keeps the
        // promise of the shape without a panic path.
        let body = serde_json::to_vec(&self.0.0).unwrap_or_else(|_| {
            br#"{"code":"internal","message":"the error could not be written","detail":{},"hint":""}"#
                .to_vec()
        });
        let mut response = Response::new(Body::from(body));
        *response.status_mut() =
            StatusCode::from_u16(status_of(kind)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if kind == ErrorKind::Unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
