//! Certificates as we look at them.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use sha2::{Digest as _, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::{PkiError, Role};

/// SHA-256 of a certificate, or of a public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Of these bytes.
    pub fn of(der: &[u8]) -> Self {
        Self(Sha256::digest(der).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        let bad = || PkiError::Certificate("a fingerprint has 64 hexadecimal digits".to_owned());
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(bad());
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

/// What a certificate says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// SHA-256 of it.
    pub fingerprint: Fingerprint,
    /// SHA-256 of its public key.
    pub key: Fingerprint,
    /// What its owner is, if it is one of ours.
    pub role: Option<Role>,
    /// When it begins to count, Unix seconds.
    pub not_before_s: u64,
    /// When it ends, Unix seconds.
    pub not_after_s: u64,
}

impl Certificate {
    /// Reads one.
    ///
    /// # Errors
    /// It is no X.509 certificate.
    pub fn parse(der: &[u8]) -> Result<Self, PkiError> {
        let (_, parsed) =
            X509Certificate::from_der(der).map_err(|error| PkiError::Certificate(error.to_string()))?;
        let names = parsed.subject_alternative_name().ok().flatten();
        let mut names = names.iter().flat_map(|names| &names.value.general_names);
        let role = match (names.next(), names.next()) {
            (Some(GeneralName::DNSName(name)), None) => Role::of(name),
            _ => None,
        };
        let seconds = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        Ok(Self {
            fingerprint: Fingerprint::of(der),
            key: Fingerprint::of(parsed.public_key().raw),
            role,
            not_before_s: seconds(parsed.validity().not_before),
            not_after_s: seconds(parsed.validity().not_after),
        })
    }

    /// Reads the first one of a PEM text.
    ///
    /// # Errors
    /// There is none in it.
    pub fn parse_pem(pem: &str) -> Result<Self, PkiError> {
        Self::parse(&der_of(pem)?)
    }

    /// When it is to be renewed: at two thirds of its life, Unix seconds.
    pub fn renew_at_s(&self) -> u64 {
        self.not_before_s + self.not_after_s.saturating_sub(self.not_before_s) * 2 / 3
    }
}

/// The first certificate of a PEM text.
pub(crate) fn der_of(pem: &str) -> Result<CertificateDer<'static>, PkiError> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| PkiError::Pem { what: "certificate", why: error.to_string() })
}

/// A certificate as PEM.
pub(crate) fn pem_of(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).filter_map(|line| str::from_utf8(line).ok()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_read_as_they_are_written() {
        let fingerprint = Fingerprint::of(b"x");
        assert_eq!(fingerprint.to_string().parse::<Fingerprint>().unwrap(), fingerprint);
        for bad in ["", "ab", &"é".repeat(32), &"g".repeat(64)] {
            assert!(bad.parse::<Fingerprint>().is_err(), "{bad}");
        }
    }
}
