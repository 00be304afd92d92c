//! Why a machine is refused, and what it is told.

use dsec_model::{ErrorKind, NodeId};
use dsec_proto::rest::RefusedFor;
use serde_json::json;

use crate::failure::Failure;

/// Why a machine is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// No token has this secret.
    UnknownToken,
    /// The token's time is over.
    ExpiredToken {
        /// Since when, Unix ms.
        at_ms: u64,
    },
    /// Another machine has joined by it.
    UsedToken {
        /// As what.
        node: NodeId,
        /// When, Unix ms.
        at_ms: u64,
    },
    /// The token is for another name.
    OtherName {
        /// For this one.
        node: NodeId,
        /// What was asked for.
        given: NodeId,
    },
    /// There is a node of this name.
    NameTaken {
        /// Which.
        node: NodeId,
        /// It is one of the server's configuration.
        is_configured: bool,
    },
    /// The cluster has as many nodes as it may have.
    Full(usize),
    /// There are as many tokens as there may be.
    TooManyTokens(usize),
    /// No certificate was shown.
    NoCertificate,
    /// It does not believe to be called as its certificate says.
    Renamed {
        /// By its certificate.
        node: NodeId,
        /// By its configuration.
        given: String,
    },
    /// Another edge that lives has its identity.
    Cloned {
        /// Whose.
        node: NodeId,
        /// Where the one that is refused listens.
        address: String,
        /// Where the other does.
        other: String,
    },
    /// Its certificate was replaced by a newer one.
    Replayed {
        /// Whose it was.
        node: NodeId,
    },
    /// It was forgotten.
    Forgotten {
        /// Which.
        node: NodeId,
    },
}

const NEW_TOKEN: &str = "make a token with `dsec cluster token`, and join with it";

impl Refusal {
    /// Its word.
    pub fn reason(&self) -> RefusedFor {
        match self {
            Self::UnknownToken => RefusedFor::UnknownToken,
            Self::ExpiredToken { .. } => RefusedFor::ExpiredToken,
            Self::UsedToken { .. } => RefusedFor::UsedToken,
            Self::OtherName { .. } => RefusedFor::OtherName,
            Self::NameTaken { .. } => RefusedFor::NameTaken,
            Self::Full(_) | Self::TooManyTokens(_) => RefusedFor::Full,
            Self::NoCertificate => RefusedFor::NoCertificate,
            Self::Renamed { .. } => RefusedFor::Renamed,
            Self::Cloned { .. } => RefusedFor::Cloned,
            Self::Replayed { .. } => RefusedFor::Replayed,
            Self::Forgotten { .. } => RefusedFor::Forgotten,
        }
    }

    /// What was found.
    pub fn message(&self) -> String {
        match self {
            Self::UnknownToken => "this cluster has made no such token, or it ended long ago".to_owned(),
            Self::ExpiredToken { at_ms } => format!("the token's time was over at {at_ms} (Unix ms)"),
            Self::UsedToken { node, at_ms } => {
                format!("the token was used already: node {node} joined by it at {at_ms} (Unix ms)")
            }
            Self::OtherName { node, given } => {
                format!("the token is for a node {node}, and this one is called {given}")
            }
            Self::NameTaken { node, .. } => format!("the cluster has a node {node} already"),
            Self::Full(most) => format!("the cluster has {most} nodes, as many as it may have"),
            Self::TooManyTokens(most) => format!("there are {most} tokens, as many as there may be"),
            Self::NoCertificate => "this is asked with a node's certificate, and none was shown".to_owned(),
            Self::Renamed { node, given } => {
                format!("the certificate is node {node}'s, and the edge that shows it is called {given}")
            }
            Self::Cloned { node, address, other } => format!(
                "two edges that live have the identity of node {node}: this one at {address}, and another at {other}"
            ),
            Self::Replayed { node } => {
                format!(
                    "the certificate of node {node} is an old one: a newer was issued, and has been in use"
                )
            }
            Self::Forgotten { node } => format!("node {node} is not of this cluster: it was forgotten"),
        }
    }

    fn hint(&self) -> String {
        match self {
            Self::UnknownToken | Self::ExpiredToken { .. } | Self::UsedToken { .. } => NEW_TOKEN.to_owned(),
            Self::OtherName { node, .. } => {
                format!("set node = \"{node}\" in edge.toml (`dsec up --node {node}`), or make a token for its name")
            }
            Self::NameTaken { is_configured: true, .. } => {
                "choose another name: the server is configured with that one".to_owned()
            }
            Self::NameTaken { node, .. } => format!(
                "choose another name; if it is the same machine, or the other is gone for good, `dsec cluster forget {node}` first"
            ),
            Self::Full(_) => "forget nodes that are gone: `dsec cluster nodes` shows them".to_owned(),
            Self::TooManyTokens(_) => "wait until some of them have expired".to_owned(),
            Self::NoCertificate => "it is not for people: edges ask it".to_owned(),
            Self::Renamed { node, given } => format!(
                "set node = \"{node}\" in edge.toml; or, to have {given} instead, `dsec cluster forget {node}`, and join anew"
            ),
            Self::Cloned { .. } => "end one of them. If its state directory was copied, remove member.json there, choose another name, \
                 and join with a token of its own (`dsec cluster token`)"
                .to_owned(),
            Self::Replayed { node } => format!(
                "its state directory is older than the node, from a backup or a copy: `dsec cluster forget {node}`, and join anew"
            ),
            Self::Forgotten { .. } => NEW_TOKEN.to_owned(),
        }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownToken | Self::ExpiredToken { .. } | Self::UsedToken { .. } | Self::NoCertificate => {
                ErrorKind::Unauthenticated
            }
            Self::NameTaken { .. } => ErrorKind::AlreadyExists,
            Self::Full(_) | Self::TooManyTokens(_) => ErrorKind::ResourceExhausted,
            Self::Cloned { .. } => ErrorKind::Conflict,
            Self::OtherName { .. }
            | Self::Renamed { .. }
            | Self::Replayed { .. }
            | Self::Forgotten { .. } => ErrorKind::PermissionDenied,
        }
    }

    /// Writes it into the log.
    pub fn log(&self) {
        let reason = serde_json::to_value(self.reason()).unwrap_or_default();
        let reason = reason.as_str().unwrap_or_default();
        tracing::warn!(reason, message = self.message(), "a machine was refused");
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.kind(), refusal.message())
            .hint(refusal.hint())
            .detail(json!({ "reason": refusal.reason() }))
    }
}
