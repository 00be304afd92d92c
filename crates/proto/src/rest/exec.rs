//! Commands in a sandbox.

use std::collections::BTreeMap;

use dsec_model::{ExecId, SessionId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most bytes of each stream in a JSON answer: both, as base64 beside text, stay far below a JSON parser's pain. The
/// rest of a longer stream is at `.../stdout` and `.../stderr`.
pub const INLINE_MAX: u64 = 16 << 20;

/// Where a command's standard input comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StdinMode {
    /// `stdin` or `stdin_base64` of the request, or nothing: then it reads end of file.
    #[default]
    Given,
    /// Streamed over `/attach` or `PUT .../stdin` after the start, until it is closed.
    Stream,
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PtySize {
    /// Lines.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// Runs a command: `argv`, or `shell` (a line for `/bin/sh -c`, or for the session's shell), not both.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments; the program is looked up in the command's `PATH`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub argv: Vec<String>,
    /// A shell line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Environment, over the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory. Default: the sandbox's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User by name or `uid[:gid]`. Default: the sandbox's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whole standard input as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Whole standard input as base64, for bytes that are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// Whole or streamed.
    #[serde(default)]
    pub stdin_mode: StdinMode,
    /// Milliseconds until the command's whole process tree is killed. Missing or 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Bytes kept of each stream. Default 64 MiB. Past it the command goes on and `truncated` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_limit_bytes: Option<u64>,
    /// Runs the line in this session's shell, which is made when it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub session_id: Option<SessionId>,
    /// Gives the command a terminal of this size; its output is all on stdout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
    /// True: answer when the command has ended. False: answer when it has started.
    #[serde(default)]
    pub wait: bool,
    /// Bytes of each stream in the answer at most; the rest is at `.../stdout`. Default 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inline_limit_bytes: Option<u64>,
}

/// Where a command is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecState {
    /// Waiting for the session's shell to finish an earlier line.
    Queued,
    /// Running.
    Running,
    /// Ended.
    Exited,
}

/// A process that the kernel killed because the sandbox's memory was full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OomKill {
    /// Its command name, as the kernel keeps it (15 bytes).
    pub process: String,
    /// Its process id inside the sandbox when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its resident memory when it was killed, bytes, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rss_bytes: Option<u64>,
}

/// A command and how it went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Exec {
    /// Unique in its sandbox.
    #[schema(value_type = String, example = "ex-1a")]
    pub id: ExecId,
    /// Where it is in its life.
    pub state: ExecState,
    /// The command line as one text, for people.
    pub command: String,
    /// The session that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub session_id: Option<SessionId>,
    /// Its process id inside the sandbox (of a session's line: the shell's).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Exit code; of a command that a signal ended 128 + the signal, as shells have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Name of the signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Its time limit ended it.
    #[serde(default)]
    pub timed_out: bool,
    /// Processes of the sandbox that the kernel killed for memory while it ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub oom_kills: Vec<OomKill>,
    /// The line ended its session's shell (`exit`, or a time limit in a builtin).
    #[serde(default)]
    pub session_ended: bool,
    /// When it started, Unix ms.
    pub started_ms: u64,
    /// When it ended, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Bytes written to stdout so far, kept or not.
    pub stdout_bytes: u64,
    /// Bytes written to stderr so far, kept or not.
    pub stderr_bytes: u64,
    /// Some of stdout was not kept.
    #[serde(default)]
    pub stdout_truncated: bool,
    /// Some of stderr was not kept.
    #[serde(default)]
    pub stderr_truncated: bool,
    /// Start of stdout as text, up to the inline limit, where the answer carries output. Bytes that are not UTF-8 are replaced; then `stdout_base64` has them exactly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<String>,
    /// Start of stderr, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    /// The same bytes as `stdout`, only where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// The same bytes as `stderr`, only where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// CPU time of the command and its reaped children, microseconds, once it has ended.
    #[serde(default)]
    pub cpu_us: u64,
}

/// The commands of a sandbox, newest first: those that run and the last ones that ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExecList {
    /// The commands.
    pub execs: Vec<Exec>,
}

/// Sends a signal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// By name (`SIGINT`, `INT`) or number.
    #[schema(example = "SIGINT")]
    pub signal: String,
    /// To every process the command started and that still runs, not to its process group alone.
    #[serde(default)]
    pub tree: bool,
}

/// JSON events of an attached stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum AttachEvent {
    /// The command ended; every kept byte of output came before. The output fields are left out.
    Exited {
        /// Its record.
        exec: Box<Exec>,
    },
    /// Bytes between `from` and `to` of a stream were not kept.
    Skipped {
        /// `stdout` or `stderr`.
        stream: String,
        /// First byte that is missing.
        from: u64,
        /// First byte after the gap.
        to: u64,
    },
    /// The stream cannot go on.
    Error {
        /// Why.
        error: super::ErrorBody,
    },
}
