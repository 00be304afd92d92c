//! TLS of both ways to the platform, HTTP and WebSockets: the system's roots, and a file of more.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// What is trusted for an address. Plain http needs no roots, and their load takes milliseconds.
///
/// # Errors
/// The file holds no certificates, or there are none at all.
pub(super) fn config(tls: bool, ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    if tls {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(path) = ca_file {
            add_file(&mut roots, path).map_err(|why| format!("{}: {why}", path.display()))?;
        }
        if roots.is_empty() {
            return Err("no certificates are trusted here; install ca-certificates, or give --ca-file".into());
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

fn add_file(roots: &mut RootCertStore, path: &Path) -> Result<(), String> {
    let file = std::fs::File::open(path).map_err(|error| crate::failure::plain(&error))?;
    let mut found = false;
    for certificate in CertificateDer::pem_reader_iter(file) {
        let certificate = certificate.map_err(|error| format!("it is no PEM file ({error})"))?;
        roots.add(certificate).map_err(|error| format!("a certificate in it cannot be used ({error})"))?;
        found = true;
    }
    if found { Ok(()) } else { Err("it holds no certificate".to_owned()) }
}
