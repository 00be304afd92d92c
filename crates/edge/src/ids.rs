//! Random parts of ids.

use dsec_model::{ExecId, NodeId, SandboxId, SessionId};
use dsec_proto::rest::ApiError;

use crate::error::internal;

/// Characters of a sandbox's random part: 62 bits, so that a node never draws one twice.
const SANDBOX_CHARS: usize = 12;
/// Characters of an exec's random part: unique among the hundreds of one sandbox.
const EXEC_CHARS: usize = 8;

/// `count` random characters of `a-z0-9`, each equally likely.
fn base36(count: usize) -> Result<String, ApiError> {
    const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut text = String::with_capacity(count);
    let mut bytes = [0u8; 32];
    while text.len() < count {
        getrandom::fill(&mut bytes).map_err(|e| internal("the kernel's random source fails", &e))?;
        // 252 is the largest multiple of 36 in a byte: what is above would favour the first letters.
        let fair = bytes.iter().filter(|b| **b < 252).map(|b| char::from(ALPHABET[usize::from(b % 36)]));
        text.extend(fair.take(count - text.len()));
    }
    Ok(text)
}

/// A new sandbox id of this node.
///
/// # Errors
/// The random source fails.
pub fn sandbox(node: &NodeId) -> Result<SandboxId, ApiError> {
    SandboxId::new(node, &base36(SANDBOX_CHARS)?).map_err(|e| internal("an id was drawn that is none", &e))
}

/// A new exec id.
///
/// # Errors
/// The random source fails.
pub fn exec() -> Result<ExecId, ApiError> {
    format!("ex-{}", base36(EXEC_CHARS)?).parse().map_err(|e| internal("an id was drawn that is none", &e))
}

/// The id of the command that a create brings along: told by the sandbox's own, so that a create that is sent
/// again finds it.
///
/// # Errors
/// Never: a part of a sandbox's id is one of an exec's.
pub fn first_exec(sandbox: &SandboxId) -> Result<ExecId, ApiError> {
    let random: String = sandbox.random().chars().take(EXEC_CHARS).collect();
    format!("ex-{random}").parse().map_err(|e| internal("an id was made that is none", &e))
}

/// A name for a session whose caller gave none.
///
/// # Errors
/// The random source fails.
pub fn session() -> Result<SessionId, ApiError> {
    format!("s-{}", base36(EXEC_CHARS)?).parse().map_err(|e| internal("an id was drawn that is none", &e))
}

/// What this start of an edge is told from any other by.
///
/// # Errors
/// The random source fails.
pub fn instance() -> Result<String, ApiError> {
    base36(24)
}

/// A name for a request that came without one.
pub fn request() -> String {
    base36(16).unwrap_or_else(|_| "unnamed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_ids_parse_and_differ() {
        let node: NodeId = "n1".parse().unwrap();
        let (a, b) = (sandbox(&node).unwrap(), sandbox(&node).unwrap());
        assert_ne!(a, b);
        assert_eq!(a.random().len(), 12);
        exec().unwrap();
        session().unwrap();
    }
}
