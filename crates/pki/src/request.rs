//! Keys, and requests for certificates of them.

use std::fmt;

use rcgen::{CertificateParams, CertificateSigningRequestParams, KeyPair, PublicKeyData as _};

use crate::{Fingerprint, PkiError};

/// A private key (ECDSA on P-256). It is never shown by accident: its debug form says nothing of it.
pub struct Key(pub(crate) KeyPair);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Makes one.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn make() -> Result<Self, PkiError> {
        Ok(Self(KeyPair::generate()?))
    }

    /// Reads one.
    ///
    /// # Errors
    /// The text is no private key.
    pub fn from_pem(pem: &str) -> Result<Self, PkiError> {
        let key = KeyPair::from_pem(pem);
        Ok(Self(key.map_err(|error| PkiError::Pem { what: "private key", why: error.to_string() })?))
    }

    /// The key itself, as PEM: for a file that nobody else reads.
    pub fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// A request for a certificate of it, as PEM. It asks for no name: who issues says which.
    ///
    /// # Errors
    /// It cannot be signed.
    pub fn request(&self) -> Result<String, PkiError> {
        Ok(CertificateParams::default().serialize_request(&self.0)?.pem()?)
    }
}

/// A request for a certificate, whose sender has the private key. Names and uses that it asks for are not looked at.
pub struct Request {
    pub(crate) params: CertificateSigningRequestParams,
}

impl Request {
    /// Longest request that is looked at, bytes: ours have 400.
    pub const BYTES_MAX: usize = 8 << 10;

    /// Reads one, and checks that it is signed with the key that it is for.
    ///
    /// # Errors
    /// It is none, or somebody else's.
    pub fn from_pem(pem: &str) -> Result<Self, PkiError> {
        if pem.len() > Self::BYTES_MAX {
            return Err(PkiError::Request(format!("it is longer than {} bytes", Self::BYTES_MAX)));
        }
        let params = CertificateSigningRequestParams::from_pem(pem)
            .map_err(|error| PkiError::Request(error.to_string()))?;
        Ok(Self { params })
    }

    /// SHA-256 of the public key.
    pub fn key(&self) -> Fingerprint {
        Fingerprint::of(&self.params.public_key.subject_public_key_info())
    }
}
