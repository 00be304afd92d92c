//! Servers that run in a sandbox.

use super::SandboxCall;
use crate::failure::Reply;

/// Passes a request to a server on a port of the sandbox's loopback, WebSocket upgrades too.
///
/// `authorization` is not passed on; what is in `x-dsec-forward-authorization` takes its place.
#[utoipa::path(method(get, post, put, delete, patch, head, options), path = "/v1/sandboxes/{id}/ports/{port}/http/{path}",
    operation_id = "port_http", tag = "ports",
    params(("id" = String, Path, description = "The sandbox."), ("port" = u16, Path, description = "The port.", minimum = 1),
        ("path" = String, Path, description = "The path on that server; may be empty and may have slashes."),
        ("x-dsec-forward-authorization" = Option<String>, Header, description = "The `authorization` that the server sees.")),
    responses((status = 200, description = "Whatever the server answers, with its own status."),
        (status = 101, description = "The server has agreed to an upgrade.")))]
pub async fn http(call: SandboxCall) -> Reply {
    call.forward().await
}

/// A stream to a port of the sandbox's loopback over a WebSocket: binary messages are its bytes both ways.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports/{port}/tcp", operation_id = "port_tcp", tag = "ports",
    params(("id" = String, Path, description = "The sandbox."), ("port" = u16, Path, description = "The port.", minimum = 1)),
    responses((status = 101, description = "A WebSocket.")))]
pub async fn tcp(call: SandboxCall) -> Reply {
    call.forward().await
}
