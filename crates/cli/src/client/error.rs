//! What can go wrong between a request and its answer.

use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, ErrorBody};

use crate::failure::Failure;

/// A request that did not get its answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No connection.
    #[error("cannot reach {url}: is it up? ({cause})")]
    Unreachable {
        /// Address of the API.
        url: String,
        /// What the kernel said.
        cause: String,
    },
    /// The address itself is wrong.
    #[error("{url:?} is not an address of the API: {cause}")]
    BadUrl {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The certificates to trust cannot be had.
    #[error("cannot trust anybody: {0}")]
    Trust(String),
    /// The API said no.
    #[error("{}", .0.0.message)]
    Api(ApiError),
    /// An answer that no dsec gives.
    #[error("{url} answered {what}")]
    Strange {
        /// Address of the API.
        url: String,
        /// What came.
        what: String,
    },
    /// No answer in time.
    #[error("{url} did not answer in time")]
    TimedOut {
        /// Address of the API.
        url: String,
    },
    /// The connection broke on the way.
    #[error("the connection to {url} broke: {cause}")]
    Broken {
        /// Address of the API.
        url: String,
        /// What was seen.
        cause: String,
    },
}

impl ClientError {
    /// The kind of an answer that said no.
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Api(error) => Some(error.kind()),
            _ => None,
        }
    }

    /// True when the same request may succeed a moment later: the node's edge starts again, say.
    pub(crate) fn passes(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } | Self::TimedOut { .. } => true,
            Self::Api(error) => error.kind() == ErrorKind::Unavailable,
            Self::BadUrl { .. } | Self::Trust(_) | Self::Strange { .. } => false,
        }
    }

    /// Out of an HTTP answer that is not a success.
    pub(crate) fn from_answer(url: &str, status: u16, body: &[u8]) -> Self {
        if let Ok(error) = serde_json::from_slice::<ErrorBody>(body) {
            return Self::Api(ApiError(Box::new(error)));
        }
        let text: String = String::from_utf8_lossy(body).trim().chars().take(200).collect();
        // A newer server may know more kinds than this program: its words still count.
        let said = serde_json::from_str::<serde_json::Value>(&text)
            .ok()
            .and_then(|value| value.get("message")?.as_str().map(str::to_owned));
        let what = match said {
            Some(message) => format!("HTTP {status}: {message}"),
            None if text.is_empty() => format!("HTTP {status}"),
            None => format!("HTTP {status}: {text}"),
        };
        Self::Strange { url: url.to_owned(), what }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let hint = match &error {
            ClientError::Unreachable { .. } => {
                "start it with `dsec up`, or say where it is with --url or DSEC_URL".to_owned()
            }
            ClientError::BadUrl { .. } => "it looks like http://127.0.0.1:7420".to_owned(),
            ClientError::Api(api) if !api.0.hint.is_empty() => api.0.hint.clone(),
            ClientError::Api(api) if api.kind() == ErrorKind::Unauthenticated => {
                "give a key with --api-key or DSEC_API_KEY; `dsec up` writes one to the config file"
                    .to_owned()
            }
            ClientError::Strange { .. } => "is that the address of a dsec platform?".to_owned(),
            ClientError::TimedOut { .. } => "give it longer with --timeout".to_owned(),
            ClientError::Trust(_) | ClientError::Api(_) | ClientError::Broken { .. } => String::new(),
        };
        let kind = match &error {
            ClientError::Api(api) => api.kind(),
            ClientError::Unreachable { .. } | ClientError::Broken { .. } => ErrorKind::Unavailable,
            ClientError::TimedOut { .. } => ErrorKind::DeadlineExceeded,
            ClientError::BadUrl { .. } | ClientError::Trust(_) => ErrorKind::InvalidArgument,
            ClientError::Strange { .. } => ErrorKind::Internal,
        };
        let detail = match &error {
            ClientError::Api(api) => api.0.detail.clone(),
            _ => serde_json::json!({}),
        };
        Self { kind, detail, ..Self::new(error.to_string()).hint(hint) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_api_keeps_its_words_and_its_hint() {
        let body =
            br#"{"code":"not_found","message":"no sandbox sb-n1-a","detail":{},"hint":"see `dsec ps`"}"#;
        let error = ClientError::from_answer("http://h", 404, body);
        assert_eq!(error.kind(), Some(ErrorKind::NotFound));
        let failure = Failure::from(error);
        assert_eq!(
            (failure.message.as_str(), failure.hint.as_str()),
            ("no sandbox sb-n1-a", "see `dsec ps`")
        );
    }

    #[test]
    fn a_kind_of_a_newer_server_still_shows_its_message() {
        let body = br#"{"code":"out_of_cheese","message":"no cheese"}"#;
        let error = ClientError::from_answer("http://h", 418, body);
        assert_eq!(error.to_string(), "http://h answered HTTP 418: no cheese");
        let page = ClientError::from_answer("http://h", 502, b"<html>Bad gateway</html>");
        assert!(page.to_string().contains("HTTP 502: <html>"));
    }
}
