//! The authority that says who is who.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;

use crate::certificate::{der_of, pem_of};
use crate::{Certificate, Fingerprint, Key, PkiError, Request, Role};

/// How long an authority lives: longer than machines do, and there is no way to replace it but to join anew.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long a self-made certificate of the public API lives; some clients refuse those of more than 398 days.
pub const PUBLIC_LIFETIME: Duration = Duration::from_secs(90 * 24 * 3600);
/// How far clocks of the machines of a cluster may differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(10 * 60);

/// When a certificate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// From then on.
    pub from: SystemTime,
    /// Until then.
    pub until: SystemTime,
}

impl Validity {
    /// From now on for so long. It begins a little earlier, for machines whose clock is late.
    pub fn now_for(lifetime: Duration) -> Self {
        let now = SystemTime::now();
        // The renewal, at two thirds of it all, must not be due at once where lifetimes are short.
        Self { from: now - CLOCKS_DIFFER.min(lifetime), until: now + lifetime }
    }
}

/// An authority as it is kept.
#[derive(Clone)]
pub struct AuthorityPem {
    /// Its certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// What was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// The certificate, as PEM.
    pub pem: String,
    /// What it says.
    pub certificate: Certificate,
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
}

impl Authority {
    /// Makes one, named so.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn make(name: &str) -> Result<AuthorityPem, PkiError> {
        let key = Key::make()?;
        let mut params = params(Validity::now_for(AUTHORITY_LIFETIME))?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key.0)?.pem();
        Ok(AuthorityPem { certificate, key: key.to_pem() })
    }

    /// Reads one.
    ///
    /// # Errors
    /// Certificate or key are none.
    pub fn from_pem(pem: &AuthorityPem) -> Result<Self, PkiError> {
        let der = der_of(&pem.certificate)?;
        let issuer = Issuer::from_ca_cert_der(&der, Key::from_pem(&pem.key)?.0)?;
        Ok(Self { issuer, der })
    }

    /// Its certificate.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// The same as PEM.
    pub fn pem(&self) -> String {
        pem_of(&self.der)
    }

    /// SHA-256 of its certificate.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.der)
    }

    /// Issues a certificate to whoever has the key of a request.
    ///
    /// # Errors
    /// It cannot be signed.
    pub fn issue(&self, request: &Request, role: &Role, validity: Validity) -> Result<Issued, PkiError> {
        let name = role.dns_name();
        let mut params = of_server(params(validity)?);
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        params.distinguished_name.push(DnType::CommonName, name.as_str());
        params.subject_alt_names = vec![SanType::DnsName(name.as_str().try_into()?)];
        let made = params.signed_by(&request.params.public_key, &self.issuer)?;
        Ok(Issued { pem: made.pem(), certificate: Certificate::parse(made.der())? })
    }

    /// Issues a certificate for a server of these names and addresses, which is of no role.
    ///
    /// # Errors
    /// A name is none, or it cannot be signed.
    fn issue_public(
        &self,
        key: &Key,
        names: &[String],
        addresses: &[IpAddr],
        validity: Validity,
    ) -> Result<String, PkiError> {
        let mut params = of_server(params(validity)?);
        params.distinguished_name.push(DnType::CommonName, "dsec-control");
        for name in names {
            params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into()?));
        }
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        Ok(params.signed_by(&key.0, &self.issuer)?.pem())
    }
}

/// A certificate of the public API and its key, by an authority of ours, for development: certificate and key as PEM.
///
/// # Errors
/// A name is none, or it cannot be signed.
pub fn self_made(
    authority: &Authority,
    names: &[String],
    addresses: &[IpAddr],
) -> Result<(String, String), PkiError> {
    let key = Key::make()?;
    let certificate = authority.issue_public(&key, names, addresses, Validity::now_for(PUBLIC_LIFETIME))?;
    Ok((certificate, key.to_pem()))
}

fn of_server(mut params: CertificateParams) -> CertificateParams {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    params
}

fn params(validity: Validity) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    params.not_before = epoch + since(validity.from);
    params.not_after = epoch + since(validity.until);
    let mut serial = [0; 16];
    getrandom::fill(&mut serial)?;
    // A positive number of full length.
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_issued_says_who_until_when_and_for_which_key() {
        let authority = Authority::from_pem(&Authority::make("test").unwrap()).unwrap();
        let key = Key::make().unwrap();
        let request = Request::from_pem(&key.request().unwrap()).unwrap();
        let role = Role::Node("n1".to_owned());
        let validity = Validity::now_for(Duration::from_secs(3600));
        let issued = authority.issue(&request, &role, validity).unwrap();
        let certificate = Certificate::parse_pem(&issued.pem).unwrap();
        assert_eq!(certificate, issued.certificate);
        assert_eq!((certificate.role.clone(), certificate.key), (Some(role), request.key()));
        let until = validity.until.duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert_eq!(certificate.not_after_s, until);
        assert!(certificate.renew_at_s() > certificate.not_before_s + 600);
        assert!(certificate.renew_at_s() < until - 600);
        let again = Authority::from_pem(&AuthorityPem { certificate: authority.pem(), key: String::new() });
        assert!(again.is_err());
    }

    #[test]
    fn a_request_that_another_key_signed_is_refused() {
        let (one, other) = (Key::make().unwrap(), Key::make().unwrap());
        let [a, b] = [&one, &other].map(|key| key.request().unwrap());
        // The head, with the key, of one; the end, with the signature, of the other.
        let body = |pem: &str| pem.lines().filter(|line| !line.starts_with('-')).collect::<String>();
        let (a, b) = (body(&a), body(&b));
        let mixed = format!("{}{}", &a[..a.len() / 2], &b[b.len() / 2..]);
        let mixed =
            format!("-----BEGIN CERTIFICATE REQUEST-----\n{mixed}\n-----END CERTIFICATE REQUEST-----\n");
        assert!(Request::from_pem(&mixed).is_err());
        assert!(Request::from_pem(&"x".repeat(Request::BYTES_MAX + 1)).is_err());
    }
}
