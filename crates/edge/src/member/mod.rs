//! This node's place in a cluster over the network: how it is joined, kept, and shown to others.
//!
//! ```text
//! join ──token──► control ──certificate──► kept (member.json)
//!                                             │
//! run ──► Member ── serves control over TLS ──┤
//!            └── announce, again and again ───┴─► control: address, instance; a new certificate at two thirds of the old one's life
//! ```
//!
//! The private key is made here and never leaves this machine.

mod join;
mod keep;
mod kept;
mod talk;

use std::path::PathBuf;

use dsec_pki::PkiError;
use dsec_proto::rest::{ApiError, RefusedFor};

pub use join::{Joining, join};
pub use keep::Member;
pub use kept::{Kept, PORT_DEFAULT, check};

/// Why this node is not, or does not become, a member of a cluster.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// It has joined none.
    #[error(
        "edge.toml says where to listen for a cluster, and this node is of none: join one with --join TOKEN --control URL, \
         or remove `listen`"
    )]
    NoMember,
    /// What it has is another node's.
    #[error(
        "the state directory is that of node {member} of a cluster ({path}), and edge.toml calls this node {configured}: \
         set node = \"{member}\" there, or join anew with a token (`dsec cluster token`) to be {configured}"
    )]
    Renamed {
        /// Who it is.
        member: String,
        /// Who it believes to be.
        configured: String,
        /// The file that says so.
        path: PathBuf,
    },
    /// Its certificate's time is over.
    #[error(
        "the certificate of node {node} has ended, since no server of its cluster could be asked for another in time: \
         `dsec cluster forget {node}` there, and join anew with a token (`dsec cluster token`)"
    )]
    Expired {
        /// Which.
        node: String,
    },
    /// The file is not what was written.
    #[error("{path} is not what this program writes there")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// An address is none.
    #[error("{given:?} is no address of a server: it must be https://HOST:PORT")]
    Control {
        /// As given.
        given: String,
    },
    /// The server cannot be talked to.
    #[error("no answer from {control}: {why}")]
    Unreachable {
        /// Which.
        control: String,
        /// Why.
        why: String,
    },
    /// The server refuses.
    #[error("{control} refuses this node")]
    Refused {
        /// Which.
        control: String,
        /// With these words.
        #[source]
        error: ApiError,
    },
    /// A key, a certificate or a file cannot be used.
    #[error("this node's identity cannot be used")]
    Identity(#[from] PkiError),
}

impl MemberError {
    /// Whether it is this node that is refused for good, and not a moment's trouble.
    pub fn is_final(&self) -> bool {
        let Self::Refused { error, .. } = self else { return false };
        let reason = error.0.detail.get("reason").cloned().unwrap_or_default();
        matches!(
            serde_json::from_value(reason),
            Ok(RefusedFor::Renamed | RefusedFor::Cloned | RefusedFor::Replayed | RefusedFor::Forgotten)
        )
    }
}
