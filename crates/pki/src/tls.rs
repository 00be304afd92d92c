//! TLS: of the public API, and between our own processes, where both ends say who they are.
//!
//! Between our own it is TLS 1.3 alone, and no session is taken up again: each connection is made with the certificate that
//! its maker has now, and whoever is on the other side looks at that one.

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};

use crate::{Certificate, Fingerprint, PkiError, Role};

/// What we speak inside TLS.
const HTTP_1_1: &[u8] = b"http/1.1";

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| Arc::new(rustls::crypto::ring::default_provider())))
}

/// A certificate with its key, which can be replaced under those who use it: connections that there are stay.
pub struct Identity {
    now: RwLock<Arc<CertifiedKey>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

impl Identity {
    /// A chain of certificates and the key of the first, as PEM.
    ///
    /// # Errors
    /// They are none, or do not belong together.
    pub fn from_pem(chain: &str, key: &str) -> Result<Self, PkiError> {
        Ok(Self { now: RwLock::new(certified(chain, key)?) })
    }

    /// Replaces both. What is made from now on has these.
    ///
    /// # Errors
    /// They are none, or do not belong together; those of before stay.
    pub fn replace(&self, chain: &str, key: &str) -> Result<(), PkiError> {
        let new = certified(chain, key)?;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// What its certificate says.
    ///
    /// # Errors
    /// It is no X.509 certificate.
    pub fn certificate(&self) -> Result<Certificate, PkiError> {
        Certificate::parse(self.get().cert.first().map_or(&[], |der| der.as_ref()))
    }

    fn get(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn certified(chain: &str, key: &str) -> Result<Arc<CertifiedKey>, PkiError> {
    let pem =
        |what| move |error: rustls::pki_types::pem::Error| PkiError::Pem { what, why: error.to_string() };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(pem("certificate"))?;
    if chain.is_empty() {
        return Err(PkiError::Pem { what: "certificate", why: "there is none in it".to_owned() });
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(pem("private key"))?;
    Ok(Arc::new(CertifiedKey::from_der(chain, key, &provider())?))
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Whose certificates a server of ours takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// Control's alone: what a node takes.
    Control,
    /// A node's, or none: what control takes of those who join and those who have.
    NodesOrNone,
}

/// The server of the public API.
///
/// # Errors
/// Never: the provider has both versions.
pub fn public_server(identity: Arc<Identity>) -> Result<Arc<ServerConfig>, PkiError> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(identity);
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Arc::new(config))
}

/// A server for our own processes.
///
/// # Errors
/// The authority's certificate is none.
pub fn cluster_server(
    identity: Arc<Identity>,
    authority: &CertificateDer<'_>,
    callers: Callers,
) -> Result<Arc<ServerConfig>, PkiError> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(authority)?), provider());
    let builder = match callers {
        Callers::Control => builder,
        Callers::NodesOrNone => builder.allow_unauthenticated(),
    };
    let chain = builder.build().map_err(|error| PkiError::Certificate(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(OfRole { chain, callers }))
        .with_cert_resolver(identity);
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A client of our own processes, with a certificate of its own where it has one.
///
/// # Errors
/// The authority's certificate is none.
pub fn cluster_client(
    identity: Option<Arc<Identity>>,
    authority: &CertificateDer<'_>,
) -> Result<Arc<ClientConfig>, PkiError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots(authority)?);
    Ok(finished(match identity {
        Some(identity) => builder.with_client_cert_resolver(identity),
        None => builder.with_no_client_auth(),
    }))
}

/// A client that trusts the one authority of this fingerprint, whose certificate the server must show along with its own.
///
/// # Errors
/// Never: the provider has the version.
pub fn pinned_client(authority: Fingerprint) -> Result<Arc<ClientConfig>, PkiError> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { authority }))
        .with_no_client_auth();
    Ok(finished(config))
}

fn finished(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

fn roots(authority: &CertificateDer<'_>) -> Result<RootCertStore, PkiError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone().into_owned())?;
    Ok(roots)
}

/// Takes certificates of the authority, of one role alone: that a node could show its own where control's is asked for
/// would let one node give orders to another.
#[derive(Debug)]
struct OfRole {
    chain: Arc<dyn ClientCertVerifier>,
    callers: Callers,
}

impl ClientCertVerifier for OfRole {
    fn offer_client_auth(&self) -> bool {
        self.chain.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let role = Certificate::parse(end_entity).ok().and_then(|certificate| certificate.role);
        match (self.callers, role) {
            (Callers::Control, Some(Role::Control)) | (Callers::NodesOrNone, Some(Role::Node(_))) => {
                Ok(verified)
            }
            _ => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Trusts the authority of one fingerprint.
#[derive(Debug)]
struct Pinned {
    authority: Fingerprint,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let authority = intermediates
            .iter()
            .find(|shown| Fingerprint::of(shown) == self.authority)
            .ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        chain.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
