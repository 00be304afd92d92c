//! Who is asking: bearer keys. The cluster's own are in a JSON file that `dsec up` writes ([`FileKeys`]); all others are in
//! the database of identities.

mod file;

use std::sync::Arc;

use dsec_iam::{Caller, Iam};
use dsec_model::ErrorKind;
use http::{HeaderMap, HeaderValue, header};

use crate::failure::Failure;

pub use file::{FileKeys, KeyFileError, RECHECK};

/// Longest key that is looked at, bytes. Ours have 48; the bound keeps hashing cheap.
pub const KEY_LEN_MAX: usize = 512;

/// Who a key belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Who, and what their key is narrowed to.
    pub caller: Caller,
    /// The key's id: what logs and nodes see instead of the key.
    pub key_id: HeaderValue,
}

impl Principal {
    /// A caller, with the id of their key as a header. One that is none is left out there.
    pub fn new(caller: Caller) -> Self {
        let key_id = HeaderValue::from_str(&caller.key_id).unwrap_or(HeaderValue::from_static("-"));
        Self { caller, key_id }
    }
}

/// Authenticates a request by its `authorization` header.
///
/// # Errors
/// No key, a malformed header, an unknown key, or a store that cannot be read.
pub fn authenticate(keys: &FileKeys, iam: &Iam, headers: &HeaderMap) -> Result<Arc<Principal>, Failure> {
    const HINT: &str = "send `Authorization: Bearer KEY`; `dsec up` wrote a key to ~/.config/dsec/config.toml of whoever ran it";
    let refuse = |message: &str| Err(Failure::new(ErrorKind::Unauthenticated, message).hint(HINT));
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return refuse("the request has no key");
    };
    let key = value.to_str().ok().and_then(|text| {
        let (scheme, key) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let Some(key) = key.filter(|key| !key.is_empty() && key.len() <= KEY_LEN_MAX) else {
        return refuse("the authorization header is not `Bearer KEY`");
    };
    if let Some(principal) = keys.find(key) {
        return Ok(principal);
    }
    match iam.caller(key)? {
        Some(caller) => Ok(Arc::new(Principal::new(caller))),
        None => refuse("nobody issued this key, or it was revoked or has expired"),
    }
}
