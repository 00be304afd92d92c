//! Machines that join a cluster over the network, and stay in it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How long a token is good when nothing is said, seconds.
pub const TOKEN_TTL_DEFAULT_S: u64 = 3600;
/// Longest time that a token may be good, seconds: a week.
pub const TOKEN_TTL_MAX_S: u64 = 7 * 24 * 3600;

/// A cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// SHA-256 of its authority's certificate, hexadecimal.
    pub authority: String,
    /// When that ends, Unix ms.
    pub authority_until_ms: u64,
    /// Whether this call made it.
    pub made: bool,
}

/// What a token is to be good for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// The only name that a machine may join by with it. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Seconds until it is good for nothing: at most a week. Default: an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u64>,
}

/// A token for one machine to join by, shown once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// What the machine is given.
    pub token: String,
    /// The only name that it is good for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// When it is good for nothing, Unix ms.
    pub expires_ms: u64,
}

/// A machine asks to join.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The secret part of its token.
    pub secret: String,
    /// Its name.
    pub node: String,
    /// A certificate request (PKCS #10), PEM.
    pub request: String,
    /// Where its edge listens, `host:port`.
    pub address: String,
}

/// It has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Joined {
    /// Its certificate, PEM.
    pub certificate: String,
    /// The authority's, PEM.
    pub authority: String,
}

/// A node says that it is there. It has shown its certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnnounceRequest {
    /// What it believes to be called.
    pub node: String,
    /// Drawn anew at each start of its edge.
    pub instance: String,
    /// Where its edge listens, `host:port`.
    pub address: String,
    /// A certificate request (PKCS #10), PEM, when its certificate is to be renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

/// It was heard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Announced {
    /// The new certificate, PEM, where one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    /// When to say it again, ms from now.
    pub again_ms: u64,
}

/// A node that has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its name.
    pub node: String,
    /// Where its edge listens, `host:port`.
    pub address: String,
    /// SHA-256 of its public key, hexadecimal.
    pub key: String,
    /// When it joined, Unix ms.
    pub joined_ms: u64,
    /// When its certificate ends, Unix ms.
    pub certificate_until_ms: u64,
    /// When it last said that it is there, Unix ms; none: not since this server started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_ms: Option<u64>,
}

/// The nodes that have joined.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberList {
    /// By name.
    pub nodes: Vec<Member>,
}

/// Which edge answers: what control asks where two might be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EdgeInstance {
    /// Its node.
    pub node: String,
    /// Drawn anew at each start.
    pub instance: String,
}

/// Why a machine is refused, as `detail.reason` says it: what an edge branches on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusedFor {
    /// No token has this secret.
    UnknownToken,
    /// The token's time is over.
    ExpiredToken,
    /// Another machine has joined by it.
    UsedToken,
    /// The token is for another name.
    OtherName,
    /// There is a node of this name.
    NameTaken,
    /// The cluster has as many nodes as it may have.
    Full,
    /// No certificate was shown.
    NoCertificate,
    /// It does not believe to be called as its certificate says.
    Renamed,
    /// Another edge that lives has its identity.
    Cloned,
    /// Its certificate was replaced by a newer one.
    Replayed,
    /// It was forgotten.
    Forgotten,
}
