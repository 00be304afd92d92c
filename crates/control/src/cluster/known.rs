//! What a cluster knows of its tokens and nodes, and the rules of it. Pure: the caller brings the time, and keeps what comes out.

use std::collections::BTreeMap;

use dsec_model::NodeId;
use dsec_pki::{Certificate, Fingerprint};
use serde::{Deserialize, Serialize};

use super::refusal::Refusal;
use crate::config::NODES_MAX;

/// Tokens that are good at the same time, at most: a script in a loop is stopped.
const TOKENS_MAX: usize = 10_000;
/// How long a token is remembered after its end, so that who comes with it is told what became of it.
const REMEMBERED_MS: u64 = 24 * 3600 * 1000;
/// Edges of a node that are remembered to have been replaced.
const REPLACED_MAX: usize = 16;

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Known {
    /// Tokens, by SHA-256 of their secrets.
    pub tokens: BTreeMap<String, TokenRecord>,
    /// Nodes that have joined.
    pub nodes: BTreeMap<NodeId, NodeRecord>,
    /// Certificates of nodes that were forgotten, until they end.
    pub forgotten: Vec<Forgotten>,
}

/// A token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The only name that it is good for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// When it is good for nothing, Unix ms.
    pub expires_ms: u64,
    /// Who joined by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
}

/// Who joined by a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// Its name.
    pub node: NodeId,
    /// SHA-256 of its public key.
    pub key: String,
    /// When, Unix ms.
    pub at_ms: u64,
}

/// What is known of a certificate that was issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedRecord {
    /// SHA-256 of it.
    pub certificate: String,
    /// SHA-256 of its public key.
    pub key: String,
    /// When it ends, Unix ms.
    pub until_ms: u64,
}

impl IssuedRecord {
    /// What is kept of a certificate.
    pub fn of(certificate: &Certificate) -> Self {
        Self {
            certificate: certificate.fingerprint.to_string(),
            key: certificate.key.to_string(),
            until_ms: certificate.not_after_s.saturating_mul(1000),
        }
    }
}

/// A node that has joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Where its edge listens, `host:port`.
    pub address: String,
    /// When it joined, Unix ms.
    pub joined_ms: u64,
    /// The certificate that counts.
    pub now: IssuedRecord,
    /// One that was issued to replace it, and was not shown yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<IssuedRecord>,
    /// The edge that was heard last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Those that it has replaced, the last one last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<String>,
}

/// A certificate of a node that was forgotten.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forgotten {
    /// Whose it was.
    pub node: NodeId,
    /// SHA-256 of it.
    pub certificate: String,
    /// When it ends, Unix ms.
    pub until_ms: u64,
}

/// Whether a certificate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is the one that does.
    Current,
    /// It is the one that was to replace it: from now on it does.
    Confirms,
}

/// Who asks to join.
pub struct Joiner<'a> {
    /// What is kept of the secret that was shown.
    pub token: &'a str,
    /// By which name.
    pub node: &'a NodeId,
    /// SHA-256 of the public key.
    pub key: Fingerprint,
    /// Where its edge listens.
    pub address: &'a str,
}

/// Who says that it is there.
pub struct Announcer<'a> {
    /// By its certificate.
    pub node: &'a NodeId,
    /// SHA-256 of that.
    pub certificate: Fingerprint,
    /// Its edge.
    pub instance: &'a str,
    /// Where that listens.
    pub address: &'a str,
}

impl Known {
    /// Keeps a token.
    ///
    /// # Errors
    /// There are too many.
    pub fn add_token(&mut self, kept: String, token: TokenRecord, now_ms: u64) -> Result<(), Refusal> {
        self.forget_old(now_ms);
        if self.tokens.len() >= TOKENS_MAX {
            return Err(Refusal::TooManyTokens(TOKENS_MAX));
        }
        self.tokens.insert(kept, token);
        Ok(())
    }

    /// Drops what nobody can come with any more.
    pub fn forget_old(&mut self, now_ms: u64) {
        self.tokens.retain(|_, token| now_ms < token.expires_ms.saturating_add(REMEMBERED_MS));
        self.forgotten.retain(|forgotten| now_ms < forgotten.until_ms);
    }

    /// Whether this one may join. `is_configured`: the name is that of a node that this server is configured with.
    ///
    /// # Errors
    /// Why not. Who has no token learns nothing else.
    pub fn may_join(&self, joiner: &Joiner<'_>, is_configured: bool, now_ms: u64) -> Result<(), Refusal> {
        let token = self.tokens.get(joiner.token).ok_or(Refusal::UnknownToken)?;
        let key = joiner.key.to_string();
        match &token.used {
            // Its answer was lost on the way.
            Some(used) if used.node == *joiner.node && used.key == key => {
                return match self.nodes.get(&used.node) {
                    Some(record) if record.now.key == key => Ok(()),
                    _ => Err(Refusal::UsedToken { node: used.node.clone(), at_ms: used.at_ms }),
                };
            }
            Some(used) => return Err(Refusal::UsedToken { node: used.node.clone(), at_ms: used.at_ms }),
            None => {}
        }
        if now_ms >= token.expires_ms {
            return Err(Refusal::ExpiredToken { at_ms: token.expires_ms });
        }
        if let Some(node) = token.node.as_ref().filter(|node| *node != joiner.node) {
            return Err(Refusal::OtherName { node: node.clone(), given: joiner.node.clone() });
        }
        if is_configured || self.nodes.contains_key(joiner.node) {
            return Err(Refusal::NameTaken { node: joiner.node.clone(), is_configured });
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(Refusal::Full(NODES_MAX));
        }
        Ok(())
    }

    /// It joins, with this certificate. The token is used from now on.
    pub fn join(&mut self, joiner: &Joiner<'_>, issued: IssuedRecord, now_ms: u64) {
        if let Some(token) = self.tokens.get_mut(joiner.token) {
            let (node, key) = (joiner.node.clone(), joiner.key.to_string());
            token.used.get_or_insert(Used { node, key, at_ms: now_ms });
        }
        let record = NodeRecord {
            address: joiner.address.to_owned(),
            joined_ms: now_ms,
            now: issued,
            next: None,
            instance: None,
            replaced: Vec::new(),
        };
        self.nodes.insert(joiner.node.clone(), record);
    }

    /// Whether a certificate of this node counts.
    ///
    /// # Errors
    /// It was replaced, or its node forgotten.
    pub fn standing(&self, node: &NodeId, certificate: Fingerprint) -> Result<Standing, Refusal> {
        let certificate = certificate.to_string();
        let is_forgotten = self.forgotten.iter().any(|forgotten| forgotten.certificate == certificate);
        match self.nodes.get(node).filter(|_| !is_forgotten) {
            None => Err(Refusal::Forgotten { node: node.clone() }),
            Some(record) if record.now.certificate == certificate => Ok(Standing::Current),
            Some(NodeRecord { next: Some(next), .. }) if next.certificate == certificate => {
                Ok(Standing::Confirms)
            }
            Some(_) => Err(Refusal::Replayed { node: node.clone() }),
        }
    }

    /// A certificate was shown: the one that was to replace another has, from now on.
    pub fn shown(&mut self, node: &NodeId, certificate: Fingerprint) {
        if self.standing(node, certificate) == Ok(Standing::Confirms)
            && let Some(record) = self.nodes.get_mut(node)
            && let Some(next) = record.next.take()
        {
            record.now = next;
        }
    }

    /// The edge that would have to be gone for this one to be the node's: its address, and which it is.
    ///
    /// # Errors
    /// It was replaced already, so that two live.
    pub fn rival(&self, announcer: &Announcer<'_>) -> Result<Option<(String, String)>, Refusal> {
        let Some(record) = self.nodes.get(announcer.node) else { return Ok(None) };
        if record.replaced.iter().any(|replaced| replaced == announcer.instance) {
            return Err(self.cloned(announcer));
        }
        let rival = record.instance.as_ref().filter(|instance| *instance != announcer.instance);
        Ok(rival.map(|instance| (record.address.clone(), instance.clone())))
    }

    /// The refusal of one whose rival lives.
    pub fn cloned(&self, announcer: &Announcer<'_>) -> Refusal {
        let other = self.nodes.get(announcer.node).map(|record| record.address.clone()).unwrap_or_default();
        Refusal::Cloned { node: announcer.node.clone(), address: announcer.address.to_owned(), other }
    }

    /// The node is this edge at this address from now on; the edge of before must be `rival`.
    ///
    /// # Errors
    /// Another came in between, or the certificate does not count any more.
    pub fn announced(&mut self, announcer: &Announcer<'_>, rival: Option<&str>) -> Result<(), Refusal> {
        self.standing(announcer.node, announcer.certificate)?;
        self.shown(announcer.node, announcer.certificate);
        let cloned = self.cloned(announcer);
        let Some(record) = self.nodes.get_mut(announcer.node) else { return Err(cloned) };
        match &record.instance {
            Some(instance) if instance != announcer.instance => {
                if rival != Some(instance) {
                    return Err(cloned);
                }
                record.replaced.push(instance.clone());
                let more = record.replaced.len().saturating_sub(REPLACED_MAX);
                record.replaced.drain(..more);
            }
            _ => {}
        }
        record.instance = Some(announcer.instance.to_owned());
        record.address = announcer.address.to_owned();
        Ok(())
    }

    /// A certificate was issued to replace the node's.
    pub fn renewed(&mut self, node: &NodeId, issued: IssuedRecord) {
        if let Some(record) = self.nodes.get_mut(node) {
            record.next = Some(issued);
        }
    }

    /// The node is none of the cluster's any more. False: it was none.
    pub fn forget(&mut self, node: &NodeId) -> bool {
        let Some(record) = self.nodes.remove(node) else { return false };
        let of = |issued: IssuedRecord| Forgotten {
            node: node.clone(),
            certificate: issued.certificate,
            until_ms: issued.until_ms,
        };
        self.forgotten.extend([Some(record.now), record.next].into_iter().flatten().map(of));
        true
    }
}

#[cfg(test)]
mod tests;
