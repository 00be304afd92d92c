//! Joining a cluster by a token.

use dsec_pki::files::{make_private_dir, read, write_private};
use dsec_pki::tls::pinned_client;
use dsec_pki::{Certificate, Fingerprint, JoinToken, Key, PkiError, Role};
use dsec_proto::rest::{JoinRequest, Joined};

use super::MemberError;
use super::kept::{Kept, address, joining_key, listen};
use super::talk::Control;
use crate::config::Config;

/// What a node joins by.
pub struct Joining {
    /// The token.
    pub token: JoinToken,
    /// Where: `https://HOST:PORT`.
    pub control: String,
}

/// Joins. A node that has joined by this very token already is left as it is.
///
/// # Errors
/// The server is not of the token's cluster, cannot be reached, or refuses.
pub async fn join(config: &Config, joining: &Joining) -> Result<(), MemberError> {
    let kept = joining.token.kept();
    if Kept::load(&config.state_dir)?
        .is_some_and(|member| member.token == kept && member.node == config.node.as_str())
    {
        return Ok(());
    }
    let control = Control::parse(&joining.control)?;
    let key = key_of(config)?;
    let line = control.connect(pinned_client(joining.token.authority)?).await?;
    let request = JoinRequest {
        secret: joining.token.secret(),
        node: config.node.to_string(),
        request: key.request()?,
        address: address(config, listen(config), line.local),
    };
    let joined: Joined = control.post(line, "/v1/cluster/join", &request).await?;
    check(&joined, joining, config.node.as_str())?;
    let member = Kept {
        node: config.node.to_string(),
        control: control.url().to_owned(),
        token: kept,
        authority: joined.authority,
        certificate: joined.certificate,
        key: key.to_pem(),
    };
    member.save(&config.state_dir)?;
    let _ = std::fs::remove_file(joining_key(&config.state_dir));
    tracing::info!(node_id = member.node, control = member.control, "joined the cluster");
    Ok(())
}

/// The key of a join that was begun, else a new one.
fn key_of(config: &Config) -> Result<Key, MemberError> {
    let path = joining_key(&config.state_dir);
    if path.exists() {
        return Ok(Key::from_pem(&read(&path)?)?);
    }
    let key = Key::make()?;
    make_private_dir(&config.state_dir)?;
    write_private(&path, key.to_pem().as_bytes())?;
    Ok(key)
}

/// Looks whether it is what was asked for.
fn check(joined: &Joined, joining: &Joining, node: &str) -> Result<(), PkiError> {
    let authority = Certificate::parse_pem(&joined.authority)?;
    let own = Certificate::parse_pem(&joined.certificate)?;
    let is_right = |authority: Fingerprint| authority == joining.token.authority;
    if !is_right(authority.fingerprint) || own.role != Some(Role::Node(node.to_owned())) {
        return Err(PkiError::Certificate("it is not for this node, or of another authority".to_owned()));
    }
    Ok(())
}
