//! Shell sessions of a sandbox.

use dsec_proto::rest::{Session, SessionList, SessionRequest};

use super::SandboxCall;
use crate::failure::Reply;

/// Makes a session, or finds it when it is there.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/sessions", operation_id = "open_session", tag = "sessions",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = SessionRequest,
    responses((status = 201, description = "Made.", body = Session),
        (status = 200, description = "It was there.", body = Session)))]
pub async fn open(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Lists the open sessions of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/sessions", operation_id = "list_sessions", tag = "sessions",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "The sessions.", body = SessionList)))]
pub async fn list(call: SandboxCall) -> Reply {
    call.forward().await
}

/// One session.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/sessions/{sid}", operation_id = "get_session", tag = "sessions",
    params(("id" = String, Path, description = "The sandbox."), ("sid" = String, Path, description = "The session.")),
    responses((status = 200, description = "The session.", body = Session)))]
pub async fn get(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Ends a session: its shell and everything it started are gone.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/sessions/{sid}", operation_id = "close_session", tag = "sessions",
    params(("id" = String, Path, description = "The sandbox."), ("sid" = String, Path, description = "The session.")),
    responses((status = 204, description = "Ended.")))]
pub async fn close(call: SandboxCall) -> Reply {
    call.forward().await
}
