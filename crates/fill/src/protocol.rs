//! What is said on the control socket: one JSON object a line, a request and then its answer. Every request may be
//! repeated: what is so already stays so.

use std::path::PathBuf;

use dsec_image::layer::BlobId;
use serde::{Deserialize, Serialize};

use crate::engine::Counts;

/// Longest line: a trace of the greatest length as base64, and room.
pub const LINE_MAX: usize = 1 << 20;
/// Blobs in one look; what is said of them fits a line.
pub const LOOK_MAX: usize = 1024;
/// Connections at once; whoever comes then waits to be accepted.
pub const CONNECTIONS_MAX: usize = 64;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Makes a blob readable and says where. A complete blob's own file, which then may be mounted without the device and
    /// keeps all its content until `close`; else the device's.
    Open {
        /// Which.
        blob: BlobId,
    },
    /// The blob is not mounted any more. Its content stays as long as there is room.
    Close {
        /// Which.
        blob: BlobId,
    },
    /// Nothing of the blob's content may be evicted.
    Pin {
        /// Which.
        blob: BlobId,
    },
    /// Takes `pin` back.
    Unpin {
        /// Which.
        blob: BlobId,
    },
    /// Brings content in ahead of demand; the answer comes at once.
    Prefetch {
        /// Which.
        blob: BlobId,
        /// An encoded trace, as base64; without it, everything in order.
        trace: Option<String>,
    },
    /// Brings content in whatever readers want, and answers when it is over, or after a while with what is left: to be
    /// asked again then.
    Fetch {
        /// Which.
        blob: BlobId,
        /// An encoded trace, as base64; without it, everything in order.
        trace: Option<String>,
        /// How long the answer may take.
        limit_ms: u64,
    },
    /// The trace of what was wanted since the worker began or the recording was begun anew.
    Trace {
        /// Which.
        blob: BlobId,
        /// Begins the recording anew.
        #[serde(default)]
        restart: bool,
    },
    /// Takes in a blob that was made on this node.
    Insert {
        /// Which.
        blob: BlobId,
        /// Its whole content.
        file: PathBuf,
        /// Whether the file may be taken over, which its maker has just hashed and nobody writes to any more: if it is on
        /// the cache's file system it becomes the cache's, unread. Else it is copied, checked, and stays where it is.
        #[serde(default)]
        take: bool,
    },
    /// Takes a blob's content out, unless it is pinned or mounted directly.
    Evict {
        /// Which.
        blob: BlobId,
    },
    /// What was done, and what is here, over all blobs.
    Stats,
    /// What was done, and what is here, of each of these blobs that is known here.
    Look {
        /// Which; at most [`LOOK_MAX`].
        blobs: Vec<BlobId>,
    },
    /// What the cache has room for. It looks at every blob.
    Room,
    /// Ends this worker for a new one of the program as it is now. Readers wait, none fails.
    Replace,
    /// Ends the worker and the holder, and unmounts. What still stands on the mount reads errors from then on.
    Shutdown,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Done; nothing to say.
    Done,
    /// To `open`.
    Opened {
        /// The file to read or mount.
        path: PathBuf,
        /// It is the cache's own file, without the device in between.
        direct: bool,
        /// Plain bytes of the blob.
        size_bytes: u64,
    },
    /// To `fetch`.
    Fetched(Fetched),
    /// To `trace`: encoded, as base64.
    Trace(String),
    /// To `insert`: whether all of it found room.
    Inserted {
        /// It is complete here now.
        complete: bool,
    },
    /// To `evict`.
    Evicted {
        /// What became free.
        freed_bytes: u64,
    },
    /// To `stats`.
    Stats(Stats),
    /// To `look`.
    Looked(Vec<BlobStats>),
    /// To `room`.
    Room(Room),
    /// It did not work.
    Error {
        /// What was asked, found, and can be done.
        message: String,
        /// The content cannot be had because the store does not answer: later it may.
        again: bool,
    },
}

/// How far a fetch is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Bytes that were wanted.
    pub wanted_bytes: u64,
    /// Of these, bytes that are not here.
    pub left_bytes: u64,
    /// Nothing more will come by itself.
    pub is_over: bool,
    /// Why the rest did not come, when it is over.
    pub problem: Option<String>,
}

/// What was done since the worker began, and what is here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The worker's process.
    pub worker_pid: u32,
    /// Content in the cache.
    pub used_bytes: u64,
    /// Blobs that are known here.
    pub known_blobs: u64,
    /// Everything else, for blobs that are gone too.
    #[serde(flatten)]
    pub counts: Counts,
}

/// The same for one blob, since it came here or the worker began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobStats {
    /// Which.
    pub blob: BlobId,
    /// Plain bytes of the blob.
    pub size_bytes: u64,
    /// Groups that are here and checked, and how many it has.
    pub groups_here: u64,
    /// Groups of the blob.
    pub groups: u64,
    /// Bytes of the groups that are here.
    pub here_bytes: u64,
    /// Everything else.
    #[serde(flatten)]
    pub counts: Counts,
}

/// What the cache has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Content that it may take.
    pub budget_bytes: u64,
    /// Content that is here.
    pub used_bytes: u64,
    /// Of this, what may not go: it is mounted directly or pinned.
    pub kept_bytes: u64,
}

#[cfg(test)]
mod tests {
    use dsec_image::layer::Digest;

    use super::*;

    #[test]
    fn what_is_said_of_the_most_blobs_fits_a_line() {
        let most = u64::MAX;
        let counts = Counts {
            asked_bytes: most,
            cached_bytes: most,
            fetched_bytes: most,
            fetches: most,
            filled_groups: most,
            uncached_groups: most,
            wrong_groups: most,
            failed_reads: most,
            waited_us: most,
        };
        let blob = BlobId(Digest::of(b""));
        let one =
            BlobStats { blob, size_bytes: most, groups_here: most, groups: most, here_bytes: most, counts };
        let line = serde_json::to_vec(&Response::Looked(vec![one; LOOK_MAX])).unwrap();
        assert!(line.len() < LINE_MAX);
    }
}
