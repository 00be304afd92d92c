//! Frames between an edge and the agent (aether) of one sandbox.
//!
//! A stream of frames each way: `u32` length, little endian, then that many bytes of protobuf
//! ([`ToGuest`] down, [`FromGuest`] up). On a Unix socket descriptors ride along: a frame with
//! `fds = n` owns the next `n` descriptors that `recvmsg` delivered; they are attached to the
//! frame's first bytes. A transport without descriptors (a VM) carries what they would carry in
//! frames of its own, which are added when that backend comes.
//!
//! The agent keeps everything that must outlive an edge: the table of execs with their exit
//! codes, the first [`HEAD_MAX`] bytes of each stream, and the position in its spool file. A new
//! connection replaces the old one; it starts with [`Hello`], and the agent answers with all that it
//! holds, so an edge that was killed misses nothing.
//!
//! Compatibility: fields are added, never changed. [`GENERATION`] grows when one side could not
//! guess from missing fields that the other is older; each side speaks the lower of the two.

use prost::{Message, Oneof};

/// Generation of this protocol.
pub const GENERATION: u32 = 3;
/// From this generation on a written file may come as a pipe, and calls of [`Request::File`] and
/// [`Request::Check`] may bring a cgroup directory for their child, after the socket.
pub const FILE_PIPES_GENERATION: u32 = 2;
/// From this generation on an agent knows [`Request::StandStill`] and [`Request::GoOn`].
pub const CLOCK_GENERATION: u32 = 3;
/// Largest frame, bytes: an environment of the kernel's limit (2 MiB) and its command fit.
pub const FRAME_MAX: usize = 4 << 20;
/// Most descriptors with one frame; `SCM_MAX_FD` is 253.
pub const FRAME_FDS_MAX: usize = 16;
/// Bytes of a stream that stay in the agent's memory and travel in frames. A stream that grows
/// past it goes to its spool file whole. Sized so that the usual short output costs no file.
pub const HEAD_MAX: usize = 4096;
/// Bytes kept of a stream when the request does not say.
pub const OUTPUT_LIMIT_DEFAULT: u64 = 64 << 20;
/// Output of a terminal that stays readable for a later attach, bytes.
pub const PTY_WINDOW: u64 = 4 << 20;
/// Ended execs that the agent remembers until it is told to forget them.
pub const ENDED_EXECS_MAX: usize = 256;
/// Lines that may wait in one session.
pub const SESSION_QUEUE_MAX: usize = 64;
/// After a command's process has ended: how long the end is held back for output that something it
/// started still holds open, ms.
pub const OUTPUT_LINGER_MS: u64 = 200;

/// Descriptors that the launcher leaves open for the agent, by number.
pub mod boot_fd {
    /// Listening Unix stream socket, bound outside the sandbox.
    pub const LISTEN: i32 = 3;
    /// The users' user namespace.
    pub const USER_NS: i32 = 4;
    /// Spool directory, the root of a detached mount: nothing above it can be reached.
    pub const SPOOL: i32 = 5;
    /// Sealed memfd with a [`super::Boot`].
    pub const CONFIG: i32 = 6;
    /// First of [`super::Boot::tasks_fds`] cgroup v1 `tasks` files that a child writes `0` to.
    pub const TASKS: i32 = 7;
}

/// What the agent is told at birth.
#[derive(Clone, PartialEq, Message)]
pub struct Boot {
    /// Protocol generation of the launcher.
    #[prost(uint32, tag = "1")]
    pub generation: u32,
    /// Environment of every command, `K=V`.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub env: Vec<Vec<u8>>,
    /// User of commands that name none: name, `uid` or `uid:gid`.
    #[prost(string, tag = "3")]
    pub user: String,
    /// Working directory of commands that name none.
    #[prost(bytes = "vec", tag = "4")]
    pub cwd: Vec<u8>,
    /// Set `no_new_privs` in every command.
    #[prost(bool, tag = "5")]
    pub no_new_privs: bool,
    /// Capabilities that root in the sandbox keeps, a bit mask by capability number.
    #[prost(uint64, tag = "6")]
    pub capabilities: u64,
    /// `RLIMIT_NOFILE` of every command, soft and hard.
    #[prost(uint64, tag = "7")]
    pub nofile: u64,
    /// Seccomp program for every command: `struct sock_filter`s as the kernel takes them.
    #[prost(bytes = "vec", tag = "8")]
    pub seccomp: Vec<u8>,
    /// How many cgroup v1 `tasks` descriptors follow from [`boot_fd::TASKS`] on.
    #[prost(uint32, tag = "9")]
    pub tasks_fds: u32,
}

/// Edge to agent.
#[derive(Clone, PartialEq, Message)]
pub struct ToGuest {
    /// Answered in [`FromGuest::reply_to`]; 0 wants no answer.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Descriptors that belong to this frame.
    #[prost(uint32, tag = "2")]
    pub fds: u32,
    /// What is wanted.
    #[prost(oneof = "Request", tags = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16")]
    pub request: Option<Request>,
}

/// What an edge wants.
#[derive(Clone, PartialEq, Oneof)]
pub enum Request {
    /// First frame of a connection; answered by [`Reply::Hello`].
    #[prost(message, tag = "3")]
    Hello(Hello),
    /// Starts a command; answered by [`Reply::ExecStarted`] or an error. Descriptors: the exec's
    /// cgroup v2 directory and its `cgroup.kill`, where the host has them (2 or none).
    #[prost(message, tag = "4")]
    ExecStart(ExecStart),
    /// Sends a signal to the exec's process group, or kills its whole tree. Answer: [`Reply::Done`].
    #[prost(message, tag = "5")]
    ExecSignal(ExecSignal),
    /// Asks for another descriptor of a streamed stdin (or of the terminal). Answer:
    /// [`Reply::Done`] with one descriptor.
    #[prost(message, tag = "6")]
    StdinOpen(ExecRef),
    /// The agent closes its own end of a streamed stdin. Answer: [`Reply::Done`].
    #[prost(message, tag = "7")]
    StdinClose(ExecRef),
    /// Drops an ended exec and its spool files. Answer: [`Reply::Done`].
    #[prost(message, tag = "8")]
    ExecForget(ExecRef),
    /// Opens a session. Descriptors as [`Request::ExecStart`]. Answer: [`Reply::Session`].
    #[prost(message, tag = "9")]
    SessionOpen(SessionOpen),
    /// Ends a session and all that it started. Answer: [`Reply::Done`].
    #[prost(message, tag = "10")]
    SessionClose(SessionRef),
    /// A file operation, done by a short-lived child with the user's rights. One descriptor: a
    /// socket on which the child answers with [`FileReply`] frames. Answer here:
    /// [`Reply::Done`] when the child was started.
    #[prost(message, tag = "11")]
    File(FileCall),
    /// Connects to a TCP port on the sandbox's loopback. Answer: [`Reply::Done`] with one
    /// descriptor, non-blocking.
    #[prost(message, tag = "12")]
    Dial(Dial),
    /// SIGTERM to every process but the agent; nothing new is started. Answer: [`Reply::Done`].
    #[prost(message, tag = "13")]
    Terminate(Empty),
    /// Checks that a user, and a directory for it, exist. Answer: [`Reply::Done`] or an error.
    #[prost(message, tag = "14")]
    Check(Check),
    /// The agent's clock stands still from now on: no time limit runs. The sandbox is about to be paused. Answer: [`Reply::Done`].
    #[prost(message, tag = "15")]
    StandStill(Empty),
    /// The agent's clock goes on from where it stood. So it does at a [`Request::Hello`]. Answer: [`Reply::Done`].
    #[prost(message, tag = "16")]
    GoOn(Empty),
}

/// Nothing.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

/// First frame of an edge.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Hello {
    /// The edge's generation.
    #[prost(uint32, tag = "1")]
    pub generation: u32,
}

/// Names an exec.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ExecRef {
    /// The exec.
    #[prost(string, tag = "1")]
    pub exec: String,
}

/// Names a session.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SessionRef {
    /// The session.
    #[prost(string, tag = "1")]
    pub session: String,
}

/// Checks names before they are relied on.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Check {
    /// User; empty is the sandbox's.
    #[prost(string, tag = "1")]
    pub user: String,
    /// Directory; empty is not checked.
    #[prost(bytes = "vec", tag = "2")]
    pub cwd: Vec<u8>,
}

/// A terminal's size.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Pty {
    /// Lines.
    #[prost(uint32, tag = "1")]
    pub rows: u32,
    /// Columns.
    #[prost(uint32, tag = "2")]
    pub cols: u32,
}

/// Where standard input comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Stdin {
    /// `/dev/null`.
    Null = 0,
    /// [`ExecStart::stdin`], then end of file. At most [`STDIN_INLINE_MAX`].
    Given = 1,
    /// A pipe; its write end comes back with [`Reply::ExecStarted`].
    Pipe = 2,
}

/// Most bytes of [`Stdin::Given`]: what a pipe takes without a reader. More goes through a pipe.
pub const STDIN_INLINE_MAX: usize = 64 * 1024;

/// A command to start.
#[derive(Clone, PartialEq, Message)]
pub struct ExecStart {
    /// Its id, made by the edge.
    #[prost(string, tag = "1")]
    pub exec: String,
    /// Program and arguments.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub argv: Vec<Vec<u8>>,
    /// A line for `/bin/sh -c`, or for the session's shell; then `argv` is empty.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub shell: Option<Vec<u8>>,
    /// Environment over [`Boot::env`], `K=V`.
    #[prost(bytes = "vec", repeated, tag = "4")]
    pub env: Vec<Vec<u8>>,
    /// Working directory; empty is [`Boot::cwd`].
    #[prost(bytes = "vec", tag = "5")]
    pub cwd: Vec<u8>,
    /// User; empty is [`Boot::user`].
    #[prost(string, tag = "6")]
    pub user: String,
    /// Standard input.
    #[prost(enumeration = "Stdin", tag = "7")]
    pub stdin_mode: i32,
    /// Of [`Stdin::Given`].
    #[prost(bytes = "vec", tag = "8")]
    pub stdin: Vec<u8>,
    /// Milliseconds until its tree is killed; 0 never.
    #[prost(uint64, tag = "9")]
    pub timeout_ms: u64,
    /// Bytes kept of each stream; 0 is [`OUTPUT_LIMIT_DEFAULT`].
    #[prost(uint64, tag = "10")]
    pub output_limit: u64,
    /// Session whose shell runs the line; empty: none.
    #[prost(string, tag = "11")]
    pub session: String,
    /// Terminal; then there is no stderr, and stdin is the terminal.
    #[prost(message, optional, tag = "12")]
    pub pty: Option<Pty>,
}

/// A session to open.
#[derive(Clone, PartialEq, Message)]
pub struct SessionOpen {
    /// Its name.
    #[prost(string, tag = "1")]
    pub session: String,
    /// Shell program; empty: `/bin/bash`, else `/bin/sh`.
    #[prost(bytes = "vec", tag = "2")]
    pub shell: Vec<u8>,
    /// User; empty is the sandbox's.
    #[prost(string, tag = "3")]
    pub user: String,
    /// First working directory; empty is the sandbox's.
    #[prost(bytes = "vec", tag = "4")]
    pub cwd: Vec<u8>,
    /// Environment over the sandbox's, `K=V`.
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub env: Vec<Vec<u8>>,
    /// Interactive, on a terminal, as the exec named in `pty_exec`.
    #[prost(message, optional, tag = "6")]
    pub pty: Option<Pty>,
    /// Id for the exec that is a terminal session's shell.
    #[prost(string, tag = "7")]
    pub pty_exec: String,
}

/// A signal for an exec.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ExecSignal {
    /// The exec.
    #[prost(string, tag = "1")]
    pub exec: String,
    /// Signal number.
    #[prost(int32, tag = "2")]
    pub signal: i32,
    /// To every process in the exec's cgroup instead of its process group.
    #[prost(bool, tag = "3")]
    pub tree: bool,
}

/// A port to connect to.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Dial {
    /// TCP port.
    #[prost(uint32, tag = "1")]
    pub port: u32,
}

/// Agent to edge.
#[derive(Clone, PartialEq, Message)]
pub struct FromGuest {
    /// The request this answers; 0: an event.
    #[prost(uint64, tag = "1")]
    pub reply_to: u64,
    /// Descriptors that belong to this frame.
    #[prost(uint32, tag = "2")]
    pub fds: u32,
    /// What is said.
    #[prost(oneof = "Reply", tags = "3, 4, 5, 6, 7, 8, 9, 10")]
    pub reply: Option<Reply>,
}

/// Answers and events of an agent.
#[derive(Clone, PartialEq, Oneof)]
pub enum Reply {
    /// Everything the agent holds.
    #[prost(message, tag = "3")]
    Hello(HelloReply),
    /// Done.
    #[prost(message, tag = "4")]
    Done(Empty),
    /// It could not be done; nothing was changed.
    #[prost(message, tag = "5")]
    Error(GuestError),
    /// The program was executed. One descriptor with [`Stdin::Pipe`] (the pipe's write end) or a
    /// terminal (its master side); else none.
    #[prost(message, tag = "6")]
    ExecStarted(ExecStarted),
    /// The session is open (or was).
    #[prost(message, tag = "7")]
    Session(SessionInfo),
    /// Event: a stream of an exec has grown. At most one waits for the socket for each stream, so a slow edge
    /// costs the agent nothing.
    #[prost(message, tag = "8")]
    Output(Output),
    /// Event: an exec ended. Comes after the `Output` that covers all that came before.
    #[prost(message, tag = "9")]
    Exited(ExecInfo),
    /// Event: a session's shell is gone.
    #[prost(message, tag = "10")]
    SessionEnded(SessionRef),
}

/// What an agent holds.
#[derive(Clone, PartialEq, Message)]
pub struct HelloReply {
    /// The agent's generation.
    #[prost(uint32, tag = "1")]
    pub generation: u32,
    /// Execs that run, and ended ones that were not forgotten.
    #[prost(message, repeated, tag = "2")]
    pub execs: Vec<ExecInfo>,
    /// Open sessions.
    #[prost(message, repeated, tag = "3")]
    pub sessions: Vec<SessionInfo>,
}

/// Why something could not be done.
#[derive(Clone, PartialEq, Message)]
pub struct GuestError {
    /// What kind.
    #[prost(enumeration = "GuestErrorKind", tag = "1")]
    pub kind: i32,
    /// What was asked and what was found, for a person.
    #[prost(string, tag = "2")]
    pub message: String,
    /// What to do; may be empty.
    #[prost(string, tag = "3")]
    pub hint: String,
    /// What a program branches on where the kind alone does not say it: [`PROGRAM_NOT_FOUND`],
    /// [`PROGRAM_NOT_EXECUTABLE`], else empty.
    #[prost(string, tag = "4")]
    pub reason: String,
}

/// [`GuestError::reason`] of a command whose program is not there: shells and docker make it 127.
pub const PROGRAM_NOT_FOUND: &str = "program_not_found";
/// [`GuestError::reason`] of a command whose program is there and cannot be run: 126.
pub const PROGRAM_NOT_EXECUTABLE: &str = "program_not_executable";

/// Kinds of [`GuestError`]; they map one to one to the API's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum GuestErrorKind {
    /// A defect, or a failing host.
    Internal = 0,
    /// Malformed or out of range.
    InvalidArgument = 1,
    /// Not there.
    NotFound = 2,
    /// There already.
    AlreadyExists = 3,
    /// Wrong state.
    Conflict = 4,
    /// The user may not.
    PermissionDenied = 5,
    /// A limit of the sandbox is reached: processes, disk, memory.
    ResourceExhausted = 6,
    /// Over a limit of the platform.
    TooLarge = 7,
    /// Nobody listens there.
    Unavailable = 8,
}

/// A started exec.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ExecStarted {
    /// Process id inside the sandbox; of a session's line the shell's; 0 while it waits in a queue.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

/// Growth of a stream.
#[derive(Clone, PartialEq, Message)]
pub struct Output {
    /// The exec.
    #[prost(string, tag = "1")]
    pub exec: String,
    /// Standard output.
    #[prost(message, optional, tag = "2")]
    pub stdout: Option<Stream>,
    /// Standard error.
    #[prost(message, optional, tag = "3")]
    pub stderr: Option<Stream>,
}

/// A stream of an exec. Its bytes are `head` while `spooled` is false, else the file
/// `<exec>.out` or `<exec>.err` in the spool directory from offset 0 on.
#[derive(Clone, PartialEq, Message)]
pub struct Stream {
    /// Bytes written by the command so far, kept or not.
    #[prost(uint64, tag = "1")]
    pub total: u64,
    /// Bytes kept: readable from `start` to `start + kept`... for a command `start` is 0.
    #[prost(uint64, tag = "2")]
    pub kept: u64,
    /// First offset that is still kept: more than 0 only for a terminal, whose oldest output goes.
    #[prost(uint64, tag = "3")]
    pub start: u64,
    /// The bytes are in the spool file.
    #[prost(bool, tag = "4")]
    pub spooled: bool,
    /// The bytes, while they are few ([`HEAD_MAX`]): in an event those from `head_offset` on, in a [`HelloReply`] all.
    #[prost(bytes = "vec", tag = "5")]
    pub head: Vec<u8>,
    /// Offset of the first byte of `head`.
    #[prost(uint64, tag = "6")]
    pub head_offset: u64,
}

/// All that is known of an exec.
#[derive(Clone, PartialEq, Message)]
pub struct ExecInfo {
    /// The exec.
    #[prost(string, tag = "1")]
    pub exec: String,
    /// Its session; empty: none.
    #[prost(string, tag = "2")]
    pub session: String,
    /// Command line for people, at most 1 KiB.
    #[prost(string, tag = "3")]
    pub command: String,
    /// Process id inside the sandbox; 0 while it waits.
    #[prost(uint32, tag = "4")]
    pub pid: u32,
    /// It has ended.
    #[prost(bool, tag = "5")]
    pub ended: bool,
    /// Exit code when it ended by itself.
    #[prost(int32, tag = "6")]
    pub code: i32,
    /// Signal that ended it; 0: none.
    #[prost(int32, tag = "7")]
    pub signal: i32,
    /// The time limit ended it.
    #[prost(bool, tag = "8")]
    pub timed_out: bool,
    /// It ended its session's shell.
    #[prost(bool, tag = "9")]
    pub session_ended: bool,
    /// When it was started, Unix ms.
    #[prost(uint64, tag = "10")]
    pub started_ms: u64,
    /// When it ended, Unix ms.
    #[prost(uint64, tag = "11")]
    pub ended_ms: u64,
    /// CPU time of its process and the children it waited for, microseconds.
    #[prost(uint64, tag = "12")]
    pub cpu_us: u64,
    /// Standard output.
    #[prost(message, optional, tag = "13")]
    pub stdout: Option<Stream>,
    /// Standard error.
    #[prost(message, optional, tag = "14")]
    pub stderr: Option<Stream>,
    /// It has a terminal.
    #[prost(bool, tag = "15")]
    pub pty: bool,
    /// Its stdin is streamed and still open.
    #[prost(bool, tag = "16")]
    pub stdin_open: bool,
}

/// An open session.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SessionInfo {
    /// Its name.
    #[prost(string, tag = "1")]
    pub session: String,
    /// Its shell's process id.
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    /// Its user, as given.
    #[prost(string, tag = "3")]
    pub user: String,
    /// Exec of a terminal session; empty: none.
    #[prost(string, tag = "4")]
    pub pty_exec: String,
    /// Lines that run or wait.
    #[prost(uint32, tag = "5")]
    pub pending: u32,
    /// When it was opened, Unix ms.
    #[prost(uint64, tag = "6")]
    pub created_ms: u64,
    /// It was there before this request.
    #[prost(bool, tag = "7")]
    pub existed: bool,
}

/// A file operation. Paths are absolute or relative to the sandbox's working directory; the
/// kernel resolves them inside the sandbox's own root, with the user's rights.
#[derive(Clone, PartialEq, Message)]
pub struct FileCall {
    /// User; empty is the sandbox's.
    #[prost(string, tag = "1")]
    pub user: String,
    /// The file.
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    /// What to do with it.
    #[prost(oneof = "FileOp", tags = "3, 4, 5, 6, 7, 8, 9, 10, 11")]
    pub op: Option<FileOp>,
}

/// File operations.
#[derive(Clone, PartialEq, Oneof)]
pub enum FileOp {
    /// Opens a regular file for reading: [`FileReply`] with its info and one descriptor.
    #[prost(message, tag = "3")]
    Read(Empty),
    /// Opens for writing: [`FileReply`] with one descriptor; then the edge writes and sends one byte
    /// `1` on the socket to commit; the child answers with the file's info. A socket that closes
    /// without it leaves everything as it was (with an offset: what was written stays).
    #[prost(message, tag = "4")]
    Write(FileWrite),
    /// The file's info.
    #[prost(message, tag = "5")]
    Stat(Empty),
    /// A directory's entries: [`FileReply`] frames with up to 512 entries each; the last has `last`.
    #[prost(message, tag = "6")]
    List(FileListOp),
    /// Makes a directory; the info.
    #[prost(message, tag = "7")]
    MakeDir(FileMakeDir),
    /// Moves it; the info of the new one.
    #[prost(message, tag = "8")]
    Move(FileMove),
    /// Removes it.
    #[prost(message, tag = "9")]
    Remove(FileRemove),
    /// Reports changes until the socket closes: `ready` first, then [`FileReply`] frames with events.
    #[prost(message, tag = "10")]
    Watch(FileWatch),
    /// Tar of a directory's content or of one file ([`FileTar::unpack`] false: one descriptor, a pipe to read; then the
    /// end), or unpacks one (one descriptor, a pipe to write; then the end with counts).
    #[prost(message, tag = "11")]
    Tar(FileTar),
}

/// Of [`FileOp::Write`].
#[derive(Clone, PartialEq, Message)]
pub struct FileWrite {
    /// In place from here; missing: whole and atomic.
    #[prost(uint64, optional, tag = "1")]
    pub offset: Option<u64>,
    /// Permission bits; missing: those of the file that is replaced, else 0644.
    #[prost(uint32, optional, tag = "2")]
    pub mode: Option<u32>,
    /// `user[:group]`; empty: the acting user.
    #[prost(string, tag = "3")]
    pub owner: String,
    /// Makes parent directories.
    #[prost(bool, tag = "4")]
    pub parents: bool,
}

/// Of [`FileOp::List`].
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileListOp {
    /// Levels below; at least 1.
    #[prost(uint32, tag = "1")]
    pub depth: u32,
    /// Most entries.
    #[prost(uint64, tag = "2")]
    pub limit: u64,
}

/// Of [`FileOp::MakeDir`].
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileMakeDir {
    /// Its parents too; content when it is there.
    #[prost(bool, tag = "1")]
    pub parents: bool,
    /// Permission bits.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
}

/// Of [`FileOp::Move`].
#[derive(Clone, PartialEq, Message)]
pub struct FileMove {
    /// The new path.
    #[prost(bytes = "vec", tag = "1")]
    pub to: Vec<u8>,
    /// Replaces what is there.
    #[prost(bool, tag = "2")]
    pub overwrite: bool,
}

/// Of [`FileOp::Remove`].
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileRemove {
    /// A directory with all below it.
    #[prost(bool, tag = "1")]
    pub recursive: bool,
}

/// Of [`FileOp::Watch`].
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileWatch {
    /// All directories below too, new ones included.
    #[prost(bool, tag = "1")]
    pub recursive: bool,
}

/// Of [`FileOp::Tar`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FileTar {
    /// Unpack instead of pack.
    #[prost(bool, tag = "1")]
    pub unpack: bool,
    /// Whose all that is unpacked becomes: `user[:group]`; empty: as the archive has it.
    #[prost(string, tag = "2")]
    pub owner: String,
}

/// Answers of a file child, on its own socket, framed as everything here.
#[derive(Clone, PartialEq, Message)]
pub struct FileReply {
    /// Descriptors that belong to this frame.
    #[prost(uint32, tag = "1")]
    pub fds: u32,
    /// It failed; nothing else is set.
    #[prost(message, optional, tag = "2")]
    pub error: Option<GuestError>,
    /// Files.
    #[prost(message, repeated, tag = "3")]
    pub files: Vec<FileInfo>,
    /// Changes.
    #[prost(message, repeated, tag = "4")]
    pub events: Vec<FileEvent>,
    /// No more frames come.
    #[prost(bool, tag = "5")]
    pub last: bool,
    /// There were more entries than the limit.
    #[prost(bool, tag = "6")]
    pub truncated: bool,
    /// Of an unpacked tar: files, and bytes of content.
    #[prost(uint64, tag = "7")]
    pub count: u64,
    /// Likewise.
    #[prost(uint64, tag = "8")]
    pub bytes: u64,
}

/// One file.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FileInfo {
    /// Its path: as asked, or relative to the listed directory.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// `st_mode` with the file type.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    /// Bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// Owner inside the sandbox.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Group inside the sandbox.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Last change of the content, Unix ms.
    #[prost(int64, tag = "6")]
    pub modified_ms: i64,
    /// Of a symbolic link.
    #[prost(bytes = "vec", optional, tag = "7")]
    pub target: Option<Vec<u8>>,
}

/// One change below a watched path.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FileEvent {
    /// What happened.
    #[prost(enumeration = "FileEventKind", tag = "1")]
    pub kind: i32,
    /// Relative to the watched path.
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    /// Old path of a rename.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub from: Option<Vec<u8>>,
}

/// Kinds of [`FileEvent`], as the REST type of the same name has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum FileEventKind {
    /// The watch is in place.
    Ready = 0,
    /// Made or moved in.
    Created = 1,
    /// Written and closed.
    Modified = 2,
    /// Attributes changed.
    Attributes = 3,
    /// Removed or moved out.
    Removed = 4,
    /// Moved within.
    Renamed = 5,
    /// Events were lost.
    Overflow = 6,
}

/// Appends a frame to `out`.
pub fn encode<M: Message>(message: &M, out: &mut Vec<u8>) {
    let len = message.encoded_len();
    out.reserve(4 + len);
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    message.encode_raw(out);
}

/// Why bytes are not a frame. The connection cannot go on after it.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Longer than [`FRAME_MAX`].
    #[error("a frame of {0} bytes; the most is {FRAME_MAX}")]
    TooLong(usize),
    /// Not the protobuf that was expected.
    #[error("a frame does not decode")]
    Decode(#[from] prost::DecodeError),
}

/// Takes the first whole frame off `buffer`: the message and how many bytes it took. `None`: more
/// bytes are needed.
///
/// # Errors
/// The bytes are no frame.
pub fn decode<M: Message + Default>(buffer: &[u8]) -> Result<Option<(M, usize)>, FrameError> {
    let Some((head, rest)) = buffer.split_first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*head) as usize;
    if len > FRAME_MAX {
        return Err(FrameError::TooLong(len));
    }
    match rest.get(..len) {
        None => Ok(None),
        Some(body) => Ok(Some((M::decode(body)?, 4 + len))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_whole_and_only_when_all_of_it_is_there() {
        let frame = ToGuest { id: 7, fds: 2, request: Some(Request::Dial(Dial { port: 80 })) };
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes);
        for cut in 0..bytes.len() {
            assert!(decode::<ToGuest>(&bytes[..cut]).unwrap().is_none());
        }
        bytes.push(0xff);
        let (back, used) = decode::<ToGuest>(&bytes).unwrap().unwrap();
        assert_eq!((back, used), (frame, bytes.len() - 1));
    }

    #[test]
    fn an_absurd_length_is_refused_before_anything_is_allocated() {
        assert!(matches!(decode::<ToGuest>(&[0xff; 8]), Err(FrameError::TooLong(_))));
    }

    #[test]
    fn a_newer_peer_with_unknown_fields_is_understood() {
        let mut bytes = Hello { generation: 9 }.encode_to_vec();
        bytes.extend([0xf8, 0x06, 0x01]); // field 111, varint 1
        assert_eq!(Hello::decode(&bytes[..]).unwrap().generation, 9);
    }
}
