//! Limits that hold on every hop, so that no hop refuses what the one before has let through.

/// Largest JSON body, bytes: an exec's inline stdin of some MiB as base64, with what is around it.
pub const JSON_BODY_MAX: usize = 8 << 20;
/// Longest request id that is taken from a caller, bytes.
pub const REQUEST_ID_MAX: usize = 128;
/// Longest idempotency key, bytes of visible ASCII.
pub const IDEMPOTENCY_KEY_MAX: usize = 128;
/// Sandboxes of a page when nothing is said.
pub const PAGE_DEFAULT: usize = 100;
/// Most sandboxes of a page.
pub const PAGE_MAX: usize = 1000;
/// How long a wait for a state, or for a task, is when nothing is said, ms.
pub const WAIT_DEFAULT_MS: u64 = 60_000;
/// Longest such wait, ms; what is longer is lowered to it.
pub const WAIT_MAX_MS: u64 = 3_600_000;
/// Longest grace of a stop, ms; what is longer is lowered to it.
pub const GRACE_MAX_MS: u64 = 3_600_000;
/// Most sandboxes that one call makes: three times the largest job that the field tells of.
pub const CREATE_MANY_MAX: u32 = 100_000;
/// Creates of such a call under way at once, at most: what a large cluster takes at a time.
pub const CREATE_AT_ONCE_MAX: u32 = 1024;
/// Longest path of a Unix socket, bytes: `sun_path` has 108 with its NUL. Source: unix(7).
pub const SOCKET_PATH_MAX: usize = 107;
