//! What a member keeps: `member.json` of the state directory, readable by root alone.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use dsec_pki::Certificate;
use dsec_pki::files::{make_private_dir, read, write_private};
use serde::{Deserialize, Serialize};

use super::MemberError;
use crate::config::Config;

/// Where a member listens for its cluster when nothing is said: on every address of the machine, at this port.
pub const PORT_DEFAULT: u16 = 7421;

/// Who a member is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its name.
    pub node: String,
    /// The server that it joined at, and says there that it is there.
    pub control: String,
    /// What is kept of the token that it joined by.
    pub token: String,
    /// The authority's certificate, PEM.
    pub authority: String,
    /// Its own, PEM.
    pub certificate: String,
    /// The private key of that, PEM.
    pub key: String,
}

pub(super) fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("member.json")
}

/// The key that a join was begun with: one whose answer was lost is asked for again with the same.
pub(super) fn joining_key(state_dir: &Path) -> PathBuf {
    state_dir.join("joining.key")
}

impl Kept {
    /// What there is.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn load(state_dir: &Path) -> Result<Option<Self>, MemberError> {
        let path = path(state_dir);
        if !path.exists() {
            return Ok(None);
        }
        let text = read(&path)?;
        serde_json::from_str(&text).map(Some).map_err(|source| MemberError::Parse { path, source })
    }

    /// Keeps it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&self, state_dir: &Path) -> Result<(), MemberError> {
        make_private_dir(state_dir)?;
        let path = path(state_dir);
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| MemberError::Parse { path: path.clone(), source })?;
        Ok(write_private(&path, text.as_bytes())?)
    }
}

/// Who this node is in its cluster; `None`: it is of none. Nothing is asked of anybody.
///
/// # Errors
/// It is somebody else, or its certificate has ended, or it should be of a cluster and is not.
pub fn check(config: &Config) -> Result<Option<Kept>, MemberError> {
    let Some(kept) = Kept::load(&config.state_dir)? else {
        return if config.listen.is_some() { Err(MemberError::NoMember) } else { Ok(None) };
    };
    if kept.node != config.node.as_str() {
        return Err(MemberError::Renamed {
            member: kept.node,
            configured: config.node.to_string(),
            path: path(&config.state_dir),
        });
    }
    let certificate = Certificate::parse_pem(&kept.certificate)?;
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if certificate.not_after_s <= now_s {
        return Err(MemberError::Expired { node: kept.node });
    }
    Ok(Some(kept))
}

/// Where a member listens.
pub(super) fn listen(config: &Config) -> SocketAddr {
    config.listen.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], PORT_DEFAULT)))
}

/// Where others reach it: what is said, else where it listens, else the address by which it reaches the server itself.
pub(super) fn address(config: &Config, bound: SocketAddr, local: SocketAddr) -> String {
    match &config.advertise {
        Some(address) => address.clone(),
        None if bound.ip().is_unspecified() => SocketAddr::new(local.ip(), bound.port()).to_string(),
        None => bound.to_string(),
    }
}
