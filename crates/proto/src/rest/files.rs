//! Files in a sandbox. Paths are as its processes see them; a relative one starts at the sandbox's
//! working directory. Names that are not UTF-8 come with `�` in `path` and exact in `path_base64`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A block or character device.
    Device,
}

/// One file. Of a symbolic link: the link's own facts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    /// Path: as asked in a stat, relative to the listed directory in a list.
    pub path: String,
    /// The exact bytes of `path`, only where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Its kind.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits with setuid, setgid and sticky (as a number: 0o644 is 420).
    pub mode: u32,
    /// Owner inside the sandbox.
    pub uid: u32,
    /// Group inside the sandbox.
    pub gid: u32,
    /// Last change of its content, Unix ms.
    pub modified_ms: i64,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// A directory's content, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    /// The entries.
    pub entries: Vec<FileInfo>,
    /// There are more than were asked for.
    #[serde(default)]
    pub truncated: bool,
}

/// Makes a directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeDirRequest {
    /// Its path.
    pub path: String,
    /// Makes its parents too, and is content when it is there.
    #[serde(default)]
    pub parents: bool,
    /// Permission bits. Default 0o755.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Acts as this user. Default: the sandbox's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Moves a file or directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// What.
    pub from: String,
    /// Where to: the new path itself, not a directory to put it in.
    pub to: String,
    /// Replaces a file that is there.
    #[serde(default)]
    pub overwrite: bool,
    /// Acts as this user. Default: the sandbox's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// What happened to a watched file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileEventKind {
    /// The watch is in place; comes first, once.
    Ready,
    /// Made, or moved in.
    Created,
    /// Written and closed, or truncated.
    Modified,
    /// Mode, owner or times changed.
    Attributes,
    /// Removed, or moved out.
    Removed,
    /// Moved within the watched tree: `path` is the new one, `from` the old.
    Renamed,
    /// Events were lost because nobody read them; look again.
    Overflow,
}

/// One message of a watch's WebSocket, as JSON text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileEvent {
    /// What happened.
    pub kind: FileEventKind,
    /// Path relative to the watched one; empty for the watched one itself.
    pub path: String,
    /// Old path of a rename.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}
