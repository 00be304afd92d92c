//! Who is asking: bearer keys. [`KeyStore`] is the seam behind which the identity service's
//! tables will stand; today a JSON file that `dsec up` writes ([`FileKeys`]).

mod file;

use std::sync::Arc;

use dsec_model::ErrorKind;
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderValue, header};

use crate::failure::Failure;

pub use file::{FileKeys, KeyFileError, RECHECK};

/// Longest key that is looked at, bytes. Ours have 48; the bound keeps hashing cheap.
pub const KEY_LEN_MAX: usize = 512;

/// Who a key belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// The key's id: what logs and nodes see instead of the key.
    pub key_id: HeaderValue,
    /// The project that the request acts in.
    pub project: HeaderValue,
}

/// Finds who a key belongs to.
pub trait KeyStore: Send + Sync + 'static {
    /// The owner of `key`, or `None` when nobody issued it or it was revoked.
    ///
    /// # Errors
    /// The store cannot be read now, which is not the same as a bad key.
    fn find<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Arc<Principal>>, Failure>>;
}

/// Authenticates a request by its `authorization` header.
///
/// # Errors
/// No key, a malformed header, an unknown key, or a store that cannot be read.
pub async fn authenticate(keys: &dyn KeyStore, headers: &HeaderMap) -> Result<Arc<Principal>, Failure> {
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
    match keys.find(key).await? {
        Some(principal) => Ok(principal),
        None => refuse("nobody issued this key, or it was revoked"),
    }
}
