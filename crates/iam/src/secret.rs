//! Keys: random text that is shown once, and its digest, which is kept.
//!
//! A key has 256 random bits, so one SHA-256 is enough to keep: there is nothing to guess that a slow hash would protect.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::error::IamError;

/// What every key begins with, so that scanners of leaked secrets find it.
pub const PREFIX: &str = "dsec_";
/// Random bytes of a key.
const KEY_BYTES: usize = 32;
/// Random bytes of an id.
const ID_BYTES: usize = 6;

/// A new key.
pub(crate) fn key() -> Result<String, IamError> {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes)))
}

/// A new id: a letter that says of what, and random digits.
pub(crate) fn id(of: char) -> Result<String, IamError> {
    let mut bytes = [0; ID_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{of}-{}", hex(&bytes)))
}

/// What is kept of a key.
pub fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub(crate) fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 2 * bytes.len() || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_digests_are_texts() {
        let (one, other) = (key().unwrap(), key().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.len(), PREFIX.len() + 43);
        assert_eq!(unhex(&hex(&digest(&one))), Some(digest(&one)));
        assert!(unhex("zz").is_none() && unhex(&"g".repeat(64)).is_none());
        assert!(id('k').unwrap().starts_with("k-"));
    }
}
