//! Commands in a sandbox.

use dsec_proto::rest::{Exec, ExecList, ExecRequest, PtySize, SignalRequest};
use utoipa::IntoParams;

use super::SandboxCall;
use crate::failure::Reply;

/// Query of a get.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct GetQuery {
    /// Waits this long for its end, ms, then answers as it stands.
    #[param(maximum = 600000, default = 0)]
    wait_ms: Option<u64>,
    /// Bytes of each stream in the answer at most.
    #[param(default = 0)]
    inline_limit_bytes: Option<u64>,
}

/// Query of an output stream.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct OutputQuery {
    /// First byte.
    #[param(default = 0)]
    offset: Option<u64>,
    /// At most this many bytes.
    length: Option<u64>,
    /// Goes on until the command ends.
    #[param(default = false)]
    follow: Option<bool>,
}

/// Query of an attach.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct AttachQuery {
    /// First byte of stdout.
    #[param(default = 0)]
    stdout_offset: Option<u64>,
    /// First byte of stderr.
    #[param(default = 0)]
    stderr_offset: Option<u64>,
}

/// Query of a write to stdin.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct StdinQuery {
    /// Ends stdin after these bytes.
    #[param(default = true)]
    close: Option<bool>,
}

/// Runs a command.
///
/// With `wait` it answers when the command has ended; a caller that hangs up does not end it. A program that is missing
/// or not executable, a missing cwd or an unknown user is `invalid_argument` and nothing was run.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs", operation_id = "start_exec", tag = "commands",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = ExecRequest,
    responses((status = 200, description = "It has started, or with `wait` ended.", body = Exec)))]
pub async fn start(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Lists the commands of a sandbox, newest first.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs", operation_id = "list_execs", tag = "commands",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, description = "The commands.", body = ExecList)))]
pub async fn list(call: SandboxCall) -> Reply {
    call.forward().await
}

/// One command; waits for its end if asked to.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{eid}", operation_id = "get_exec", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command."), GetQuery),
    responses((status = 200, description = "The command as it stands.", body = Exec)))]
pub async fn get(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Bytes of a command's standard output.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{eid}/stdout", operation_id = "read_stdout", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command."), OutputQuery),
    responses((status = 200, description = "The bytes.", body = Vec<u8>, content_type = "application/octet-stream",
        headers(("x-dsec-stream-bytes" = u64, description = "Bytes written so far."),
            ("x-dsec-truncated" = bool, description = "Whether some were not kept.")))))]
pub async fn stdout(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Bytes of a command's standard error.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{eid}/stderr", operation_id = "read_stderr", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command."), OutputQuery),
    responses((status = 200, description = "The bytes.", body = Vec<u8>, content_type = "application/octet-stream",
        headers(("x-dsec-stream-bytes" = u64, description = "Bytes written so far."),
            ("x-dsec-truncated" = bool, description = "Whether some were not kept.")))))]
pub async fn stderr(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Follows a command over a WebSocket, and writes to it.
///
/// Binary messages, one kind byte then payload of at most 256 KiB. From the server: `0x01` stdout, `0x02` stderr,
/// `0x03` JSON `AttachEvent` (the last is `exited` or `error`). To the server: `0x10` stdin, `0x11` end of stdin,
/// `0x12` resize (u16 rows, u16 columns, big endian), `0x13` signal name.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{eid}/attach", operation_id = "attach_exec", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command."), AttachQuery),
    responses((status = 101, description = "A WebSocket.")))]
pub async fn attach(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Writes to a streamed standard input.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/execs/{eid}/stdin", operation_id = "write_stdin", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command."), StdinQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 204, description = "Written.")))]
pub async fn stdin(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Sends a signal to a command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs/{eid}/signal", operation_id = "signal_exec", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command.")),
    request_body = SignalRequest,
    responses((status = 200, description = "Sent.", body = Exec)))]
pub async fn signal(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Changes the size of a command's terminal.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs/{eid}/resize", operation_id = "resize_exec", tag = "commands",
    params(("id" = String, Path, description = "The sandbox."), ("eid" = String, Path, description = "The command.")),
    request_body = PtySize,
    responses((status = 204, description = "Resized.")))]
pub async fn resize(call: SandboxCall) -> Reply {
    call.forward_json().await
}
