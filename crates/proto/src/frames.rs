//! Binary WebSocket messages of `/attach`: one byte of kind, then the payload. A terminal has its
//! output on [`STDOUT`]. Text messages are not used.
//!
//! ```text
//! server to client   0x01 stdout bytes        0x02 stderr bytes
//!                    0x03 JSON AttachEvent    (the last one is `exited` or `error`, then close)
//! client to server   0x10 stdin bytes         0x11 end of stdin (no payload)
//!                    0x12 resize: u16 rows, u16 columns, big endian
//!                    0x13 signal: its name as text ("SIGINT")
//! ```

/// Standard output, or a terminal's output.
pub const STDOUT: u8 = 0x01;
/// Standard error.
pub const STDERR: u8 = 0x02;
/// A JSON `AttachEvent`.
pub const EVENT: u8 = 0x03;
/// Bytes for standard input.
pub const STDIN: u8 = 0x10;
/// Standard input ends.
pub const STDIN_CLOSE: u8 = 0x11;
/// The terminal's new size.
pub const RESIZE: u8 = 0x12;
/// A signal by name.
pub const SIGNAL: u8 = 0x13;
/// Largest payload of one message, bytes: large enough that the per-message cost vanishes, small
/// enough that a hundred readers cost tens of MiB.
pub const PAYLOAD_MAX: usize = 256 * 1024;
