//! Being a member: what control is answered by, and telling it that we are there.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_pki::tls::{Callers, Identity, cluster_client, cluster_server};
use dsec_pki::{Key, PkiError};
use dsec_proto::rest::{AnnounceRequest, Announced};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, ServerConfig};

use super::MemberError;
use super::kept::{Kept, address, listen};
use super::talk::Control;
use crate::config::Config;
use crate::error::chain;

/// Pause before control is tried again that did not answer.
const RETRY: Duration = Duration::from_secs(5);
/// Least pause between two announcements, whatever control says.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Time between two lines of the log about the same trouble.
const REMIND: Duration = Duration::from_secs(60);

/// This node as a member of its cluster.
pub struct Member {
    config: Config,
    control: Control,
    kept: Mutex<Kept>,
    identity: Arc<Identity>,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl Member {
    /// What was kept, made ready for use.
    ///
    /// # Errors
    /// A key or certificate of it cannot be used.
    pub fn new(config: &Config, kept: Kept) -> Result<Self, MemberError> {
        let authority = CertificateDer::from_pem_slice(kept.authority.as_bytes())
            .map_err(|error| PkiError::Pem { what: "certificate", why: error.to_string() })?;
        let identity = Arc::new(Identity::from_pem(&kept.certificate, &kept.key)?);
        let server = cluster_server(Arc::clone(&identity), &authority, Callers::Control)?;
        let client = cluster_client(Some(Arc::clone(&identity)), &authority)?;
        let control = Control::parse(&kept.control)?;
        Ok(Self { config: config.clone(), control, kept: Mutex::new(kept), identity, server, client })
    }

    /// How control is answered.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// Where to listen for it.
    pub fn listen(&self) -> SocketAddr {
        listen(&self.config)
    }

    fn state_dir(&self) -> PathBuf {
        self.config.state_dir.clone()
    }

    /// Tells control once that this edge is there, listening at `bound`. Returns when to do so again.
    ///
    /// # Errors
    /// Control cannot be reached, or refuses us.
    pub async fn announce(&self, instance: &str, bound: SocketAddr) -> Result<Duration, MemberError> {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let renewal =
            if self.identity.certificate()?.renew_at_s() <= now_s { Some(Key::make()?) } else { None };
        let line = self.control.connect(Arc::clone(&self.client)).await?;
        let request = AnnounceRequest {
            node: self.config.node.to_string(),
            instance: instance.to_owned(),
            address: address(&self.config, bound, line.local),
            request: renewal.as_ref().map(Key::request).transpose()?,
        };
        let heard: Announced = self.control.post(line, "/v1/cluster/announce", &request).await?;
        if let (Some(key), Some(certificate)) = (renewal, heard.certificate) {
            self.renew(certificate, &key)?;
            // At once, by the new certificate: from then on the old one is good for nothing.
            return Ok(Duration::ZERO);
        }
        Ok(Duration::from_millis(heard.again_ms))
    }

    /// Keeps a new certificate, then shows it. Connections that there are stay.
    fn renew(&self, certificate: String, key: &Key) -> Result<(), MemberError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Kept { certificate, key: key.to_pem(), ..kept.clone() };
        // First on disk: one that is shown must outlive this process.
        Identity::from_pem(&new.certificate, &new.key)?;
        new.save(&self.state_dir())?;
        self.identity.replace(&new.certificate, &new.key)?;
        *kept = new;
        tracing::info!("this node's certificate was renewed");
        Ok(())
    }

    /// Tells control again and again, until it is dropped. The first time is after `pause`.
    pub async fn keep(self: Arc<Self>, instance: String, bound: SocketAddr, mut pause: Duration) {
        let mut said: Option<(String, Instant)> = None;
        loop {
            tokio::time::sleep(pause.max(PAUSE_MIN)).await;
            pause = match self.announce(&instance, bound).await {
                Ok(pause) => {
                    if said.take().is_some() {
                        tracing::info!("the cluster hears this node again");
                    }
                    pause
                }
                Err(error) => {
                    let text = chain(&error);
                    let is_new =
                        said.as_ref().is_none_or(|(last, at)| *last != text || at.elapsed() > REMIND);
                    if is_new && error.is_final() {
                        tracing::error!(error = text, "the cluster refuses this node");
                    } else if is_new {
                        tracing::warn!(error = text, "the cluster does not hear this node");
                    }
                    if is_new {
                        said = Some((text, Instant::now()));
                    }
                    RETRY
                }
            };
        }
    }
}
