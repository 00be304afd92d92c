//! How this machine reaches the platform that it has started.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use super::settings::{Settings, Tls};
use super::state::reach_of;
use crate::config::Target;

/// Address of the API, and what to trust there; without a key.
pub(super) fn target(settings: &Settings) -> Target {
    let reach = reach_of(settings.listen);
    let (url, ca_file) = match &settings.tls {
        Tls::Plain => (format!("http://{reach}"), None),
        Tls::Files { cert, .. } => (format!("https://{}:{}", host_of(cert, reach), reach.port()), None),
        Tls::SelfMade(dir) => (format!("https://{reach}"), Some(authority(dir))),
    };
    Target { url, ca_file, ..Target::default() }
}

/// Certificate of the authority that control makes.
fn authority(dir: &Path) -> PathBuf {
    dir.join("ca.pem")
}

/// A name of this machine that the certificate is for, else its address.
fn host_of(cert: &Path, reach: SocketAddr) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    let address = match reach {
        SocketAddr::V4(v4) => v4.ip().to_string(),
        SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
    };
    let names = [address.clone(), "localhost".to_owned(), host];
    let local = |name: &String| name != "localhost" || reach.ip().is_loopback();
    names.into_iter().filter(local).find(|name| is_for(cert, name)).unwrap_or(address)
}

fn is_for(cert: &Path, name: &str) -> bool {
    let Ok(certificate) = CertificateDer::from_pem_file(cert) else { return false };
    let Ok(name) = ServerName::try_from(name.trim_matches(['[', ']'])) else { return false };
    ParsedCertificate::try_from(&certificate)
        .is_ok_and(|certificate| verify_server_name(&certificate, &name).is_ok())
}
