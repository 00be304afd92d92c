//! What a machine joins by.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

use crate::{Fingerprint, PkiError};

const PREFIX: &str = "dsecjoin_";

/// A token: whom to trust, and a secret to show there. 256 random bits, so that one SHA-256 is enough to keep.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The cluster's authority.
    pub authority: Fingerprint,
    secret: [u8; 32],
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl JoinToken {
    /// Makes one.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn make(authority: Fingerprint) -> Result<Self, PkiError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)?;
        Ok(Self { authority, secret })
    }

    /// The token's text.
    pub fn text(&self) -> String {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&self.authority.0);
        bytes[32..].copy_from_slice(&self.secret);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The secret, as it is shown to the server.
    pub fn secret(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.secret)
    }

    /// What is kept of it: SHA-256 of the secret as it is shown, in hexadecimal digits.
    pub fn kept(&self) -> String {
        Self::kept_of(&self.secret())
    }

    /// What is kept of a secret that was shown.
    pub fn kept_of(secret: &str) -> String {
        Fingerprint(Sha256::digest(secret.as_bytes()).into()).to_string()
    }
}

impl FromStr for JoinToken {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        let coded =
            text.trim().strip_prefix(PREFIX).ok_or(PkiError::Token("it does not begin with dsecjoin_"))?;
        let bytes = URL_SAFE_NO_PAD.decode(coded).map_err(|_| PkiError::Token("it is damaged"))?;
        let bytes: [u8; 64] = bytes.try_into().map_err(|_| PkiError::Token("a part of it is missing"))?;
        let (mut authority, mut secret) = ([0; 32], [0; 32]);
        authority.copy_from_slice(&bytes[..32]);
        secret.copy_from_slice(&bytes[32..]);
        Ok(Self { authority: Fingerprint(authority), secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_is_written_and_a_damaged_one_is_named() {
        let token = JoinToken::make(Fingerprint([7; 32])).unwrap();
        assert_eq!(format!(" {}\n", token.text()).parse::<JoinToken>().unwrap(), token);
        assert_eq!(JoinToken::kept_of(&token.secret()), token.kept());
        assert!(!format!("{token:?}").contains(&token.secret()));
        for bad in ["", "dsec_abc", "dsecjoin_abc", &token.text()[..80], &format!("{}!", token.text())] {
            assert!(bad.parse::<JoinToken>().is_err(), "{bad}");
        }
    }
}
