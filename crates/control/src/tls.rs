//! TLS of the public API: its certificate, which is read again when its files change or made anew when it grows old, and
//! the handshake with a caller.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dsec_model::ErrorKind;
use dsec_pki::files::{make_private_dir, read, write_private};
use dsec_pki::tls::{Identity, public_server};
use dsec_pki::{Authority, AuthorityPem, Certificate, PkiError, Role, self_made};
use dsec_proto::rest::ApiError;
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::Tls;
use crate::server::IDLE;

/// How long a caller may take until TLS is agreed on: two round trips over a bad line, with room. Whoever says nothing, or a byte
/// a minute, is gone then.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How often the certificate's files are looked at.
const RECHECK: Duration = Duration::from_secs(1);
/// First byte of every TLS handshake: the record type.
const HANDSHAKE_BYTE: u8 = 0x16;
/// Most bytes of a plain request that are read before its connection is closed.
const PLAIN_MAX: u64 = 64 << 10;

/// What tells one version of a file from another.
type Version = Option<(u64, u64, i64, i64)>;

/// The certificate of the public API, and what is agreed on by it.
pub struct PublicTls {
    source: Tls,
    identity: Arc<Identity>,
    config: Arc<ServerConfig>,
    /// Versions of the files that were looked at last.
    seen: Mutex<[Version; 2]>,
}

impl PublicTls {
    /// Reads the certificate, or makes it.
    ///
    /// # Errors
    /// The files cannot be read, are none, or do not belong together.
    pub fn open(source: &Tls) -> Result<Self, PkiError> {
        let seen = versions(source);
        let (chain, key) = load(source)?;
        let identity = Arc::new(Identity::from_pem(&chain, &key)?);
        let config = public_server(Arc::clone(&identity))?;
        Ok(Self { source: source.clone(), identity, config, seen: Mutex::new(seen) })
    }

    /// Keeps the certificate current, until it is dropped. One that cannot be used is reported, and that of before stays.
    pub async fn follow(&self) {
        loop {
            tokio::time::sleep(RECHECK).await;
            if self.is_due() {
                let renewed = load(&self.source).and_then(|(chain, key)| self.identity.replace(&chain, &key));
                match renewed {
                    Ok(()) => tracing::info!("the certificate of the public API was replaced"),
                    Err(error) => {
                        let cause = std::error::Error::source(&error).map(ToString::to_string);
                        tracing::error!(%error, cause, "certificate not taken; that of before stays in use");
                    }
                }
            }
        }
    }

    fn is_due(&self) -> bool {
        match &self.source {
            Tls::Files { .. } => {
                let now = versions(&self.source);
                let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::replace(&mut *seen, now) != now
            }
            Tls::SelfMade { .. } => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                self.identity.certificate().is_ok_and(|certificate| certificate.renew_at_s() <= now)
            }
        }
    }
}

/// A caller, as far as it is known before it has said anything.
pub enum Accepted {
    /// It speaks plain HTTP, and may.
    Plain(TcpStream),
    /// It speaks TLS. With the certificate of a node, if it has shown one.
    Tls(Box<TlsStream<TcpStream>>, Option<Arc<Certificate>>),
}

/// Agrees with a caller on what is spoken. Who asks for control's name in the cluster is answered as one of our own
/// processes, everybody else by the certificate of the public API. `None`: it did not come to anything, in time or at all.
pub async fn accept(
    stream: TcpStream,
    public: Option<&PublicTls>,
    cluster: Option<Arc<ServerConfig>>,
) -> Option<Accepted> {
    // Without a certificate of its own the public API is plain, and callers may connect long before they ask.
    let first_within = if public.is_some() { HANDSHAKE_MAX } else { IDLE };
    let mut first = [0];
    match tokio::time::timeout(first_within, stream.peek(&mut first)).await {
        Ok(Ok(1)) => {}
        _ => return None,
    }
    let agreed = async {
        if first[0] == HANDSHAKE_BYTE {
            return handshake(stream, public, cluster).await;
        }
        match public {
            None => Ok(Some(Accepted::Plain(stream))),
            Some(_) => refuse_plain(stream).await.map(|()| None),
        }
    };
    match tokio::time::timeout(HANDSHAKE_MAX, agreed).await {
        Ok(Ok(accepted)) => accepted,
        Ok(Err(error)) => {
            tracing::debug!(%error, "no TLS with a caller");
            None
        }
        Err(_) => {
            tracing::debug!("a caller did not finish its TLS handshake");
            None
        }
    }
}

async fn handshake(
    stream: TcpStream,
    public: Option<&PublicTls>,
    cluster: Option<Arc<ServerConfig>>,
) -> io::Result<Option<Accepted>> {
    let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
    let is_ours = start.client_hello().server_name().and_then(Role::of) == Some(Role::Control);
    let Some(config) = cluster.filter(|_| is_ours).or_else(|| public.map(|tls| Arc::clone(&tls.config)))
    else {
        return Ok(None);
    };
    let stream = start.into_stream(config).await?;
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let shown = shown.and_then(|der| Certificate::parse(der).ok()).map(Arc::new);
    Ok(Some(Accepted::Tls(Box::new(stream), shown)))
}

/// Tells a caller that speaks plain HTTP what is spoken here.
async fn refuse_plain(mut stream: TcpStream) -> io::Result<()> {
    let error = ApiError::new(
        ErrorKind::InvalidArgument,
        "this address speaks https, and the request was plain http",
    )
    .hint("use https:// in the address");
    let body = serde_json::to_string(&error.0).unwrap_or_default();
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    // A close with unread bytes would reset the connection, and the answer with it.
    tokio::io::copy(&mut stream.take(PLAIN_MAX), &mut tokio::io::sink()).await?;
    Ok(())
}

/// The chain and the key, as PEM.
fn load(source: &Tls) -> Result<(String, String), PkiError> {
    match source {
        Tls::Files { cert, key } => Ok((read(cert)?, read(key)?)),
        Tls::SelfMade { dir } => {
            let authority = own_authority(dir)?;
            let (names, addresses) = of_this_machine();
            let (certificate, key) = self_made(&authority, &names, &addresses)?;
            Ok((certificate + &authority.pem(), key))
        }
    }
}

/// The authority that is there, else a new one.
fn own_authority(dir: &Path) -> Result<Authority, PkiError> {
    make_private_dir(dir)?;
    let (certificate, key) = (dir.join("ca.pem"), dir.join("ca.key"));
    if !certificate.exists() {
        let made = Authority::make("dsec, made on this machine for its public API")?;
        // The certificate last: where it is, the key is.
        write_private(&key, made.key.as_bytes())?;
        write_private(&certificate, made.certificate.as_bytes())?;
    }
    Authority::from_pem(&AuthorityPem { certificate: read(&certificate)?, key: read(&key)? })
}

/// What this machine is called, and its addresses.
fn of_this_machine() -> (Vec<String>, Vec<IpAddr>) {
    let mut names = vec!["localhost".to_owned()];
    let host =
        std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_ascii_lowercase();
    let is_name =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    if host != "localhost" && host.len() < 254 && !host.is_empty() && host.bytes().all(is_name) {
        names.push(host);
    }
    let mut addresses: Vec<IpAddr> = nix::ifaddrs::getifaddrs()
        .into_iter()
        .flatten()
        .filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .chain([IpAddr::from([127, 0, 0, 1]), std::net::Ipv6Addr::LOCALHOST.into()])
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    (names, addresses)
}

fn versions(source: &Tls) -> [Version; 2] {
    let version = |path: &Path| {
        let file = std::fs::metadata(path).ok()?;
        Some((file.ino(), file.size(), file.mtime(), file.mtime_nsec()))
    };
    match source {
        Tls::Files { cert, key } => [version(cert), version(key)],
        Tls::SelfMade { .. } => [None, None],
    }
}
