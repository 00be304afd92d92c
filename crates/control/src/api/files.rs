//! Files in a sandbox.

use dsec_proto::rest::{FileInfo, FileList, MakeDirRequest, MoveRequest};
use utoipa::IntoParams;

use super::SandboxCall;
use crate::failure::Reply;

/// Query that names a file.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct PathQuery {
    /// The path; a relative one starts at the sandbox's working directory.
    path: String,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Query of an unpacking.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct UnpackQuery {
    /// The path; a relative one starts at the sandbox's working directory.
    path: String,
    /// Whose all that is unpacked becomes, `user[:group]`. Default: as the archive has it.
    owner: Option<String>,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Query of a read.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct ReadQuery {
    /// The path; a relative one starts at the sandbox's working directory.
    path: String,
    /// First byte.
    #[param(default = 0)]
    offset: Option<u64>,
    /// At most this many bytes.
    length: Option<u64>,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Query of a write.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct WriteQuery {
    /// The path; a relative one starts at the sandbox's working directory.
    path: String,
    /// Permission bits as octal text.
    #[param(example = "644")]
    mode: Option<String>,
    /// `user[:group]`.
    owner: Option<String>,
    /// Makes its parents too.
    #[param(default = false)]
    parents: Option<bool>,
    /// Writes there in the file as it is, instead of replacing it whole.
    offset: Option<u64>,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Query of a removal or a watch.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct TreeQuery {
    /// The path; a relative one starts at the sandbox's working directory.
    path: String,
    /// With everything below it.
    #[param(default = false)]
    recursive: Option<bool>,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Query of a list.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct ListQuery {
    /// The directory.
    path: String,
    /// Levels; 1 is the directory alone.
    #[param(minimum = 1, default = 1)]
    depth: Option<u32>,
    /// At most this many entries.
    #[param(maximum = 1000000, default = 10000)]
    limit: Option<u32>,
    /// Acts with this user's rights. Default: the sandbox's user.
    user: Option<String>,
}

/// Reads a regular file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", operation_id = "read_file", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), ReadQuery,
        ("range" = Option<String>, Header, description = "`bytes=a-b`, instead of offset and length.")),
    responses((status = 200, description = "The bytes.", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, description = "The bytes of `range`.", body = Vec<u8>, content_type = "application/octet-stream")))]
pub async fn read(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Writes a file.
///
/// Without `offset` the file is replaced whole and atomically: a caller that hangs up changes nothing.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", operation_id = "write_file", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), WriteQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "Written.", body = FileInfo)))]
pub async fn write(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Removes a file or a directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", operation_id = "remove_file", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), TreeQuery),
    responses((status = 204, description = "Removed.")))]
pub async fn remove(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Facts about a file; of a symbolic link, about the link itself.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", operation_id = "stat_file", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), PathQuery),
    responses((status = 200, description = "The facts.", body = FileInfo)))]
pub async fn stat(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Lists a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", operation_id = "list_files", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), ListQuery),
    responses((status = 200, description = "The entries.", body = FileList)))]
pub async fn list(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Makes a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", operation_id = "make_dir", tag = "files",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = MakeDirRequest,
    responses((status = 200, description = "It is there.", body = FileInfo)))]
pub async fn mkdir(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Moves a file or a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/move", operation_id = "move_file", tag = "files",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = MoveRequest,
    responses((status = 200, description = "Moved.", body = FileInfo)))]
pub async fn rename(call: SandboxCall) -> Reply {
    call.forward_json().await
}

/// Watches a file or a directory over a WebSocket: `FileEvent` as JSON text messages, `ready` first.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", operation_id = "watch_files", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), TreeQuery),
    responses((status = 101, description = "A WebSocket.")))]
pub async fn watch(call: SandboxCall) -> Reply {
    call.forward().await
}

/// A directory's content (or one file) as an uncompressed tar.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", operation_id = "read_archive", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), PathQuery),
    responses((status = 200, description = "The tar.", body = Vec<u8>, content_type = "application/x-tar")))]
pub async fn pack(call: SandboxCall) -> Reply {
    call.forward().await
}

/// Unpacks a tar (gzip and zstd are recognised) into a directory, which is made when missing.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/archive", operation_id = "write_archive", tag = "files",
    params(("id" = String, Path, description = "The sandbox."), UnpackQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 200, description = "Unpacked: how many files and bytes.", body = Object, example = json!({"files": 3, "bytes": 4096}))))]
pub async fn unpack(call: SandboxCall) -> Reply {
    call.forward().await
}
