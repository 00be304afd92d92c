//! How an edge is reached: over its socket on this machine, or by TLS where both sides say who they are.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use dsec_model::NodeId;
use dsec_pki::{Certificate, Role};
use futures_util::future::BoxFuture;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// How long a full backlog of the edge is waited for. A Unix socket refuses at once where TCP
/// would wait, so a burst of connects needs our patience; longer than this, the edge is stuck.
pub(super) const BACKLOG_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two connects to a full backlog.
const BACKLOG_PAUSE: Duration = Duration::from_millis(2);
/// How long a connection over the network may take to come about, TLS included: an edge that needs longer is as good as away.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Says whether a certificate is the one that its node has now.
pub trait Voucher: Send + Sync + 'static {
    /// # Errors
    /// It is not; the text says why.
    fn vouch<'a>(
        &'a self,
        node: &'a NodeId,
        certificate: &'a Certificate,
    ) -> BoxFuture<'a, Result<(), String>>;
}

/// A way to an edge.
#[derive(Clone)]
pub enum Way {
    /// Over its Unix socket.
    Socket(PathBuf),
    /// Over the network.
    Tls(Arc<TlsWay>),
}

/// A way over the network.
pub struct TlsWay {
    /// Whom we mean to reach.
    pub node: NodeId,
    /// Where, `host:port`.
    pub address: String,
    /// How we show who we are, and whom we trust.
    pub config: Arc<ClientConfig>,
    /// Looks at the certificate that is shown, once its chain and name are right.
    pub voucher: Arc<dyn Voucher>,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Tls(way) => f.write_str(&way.address),
        }
    }
}

impl Way {
    /// Makes a connection.
    ///
    /// # Errors
    /// Nobody is there, or somebody else.
    pub(super) async fn connect(&self) -> io::Result<Stream> {
        match self {
            Self::Socket(path) => {
                let started = Instant::now();
                loop {
                    match UnixStream::connect(path).await {
                        Err(error)
                            if error.kind() == io::ErrorKind::WouldBlock
                                && started.elapsed() < BACKLOG_PATIENCE =>
                        {
                            tokio::time::sleep(BACKLOG_PAUSE).await;
                        }
                        other => return other.map(Stream::Unix),
                    }
                }
            }
            Self::Tls(way) => match tokio::time::timeout(CONNECT_MAX, way.connect()).await {
                Ok(connected) => connected,
                Err(_) => Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no connection within {} s", CONNECT_MAX.as_secs()),
                )),
            },
        }
    }
}

impl TlsWay {
    async fn connect(&self) -> io::Result<Stream> {
        let name = Role::Node(self.node.to_string()).server_name().map_err(io::Error::other)?;
        let stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        crate::server::keep_alive(&stream)?;
        let stream = TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let shown = shown.ok_or_else(|| io::Error::other("it showed no certificate"))?;
        let shown = Certificate::parse(shown).map_err(io::Error::other)?;
        self.voucher.vouch(&self.node, &shown).await.map_err(io::Error::other)?;
        Ok(Stream::Tls(Box::new(stream)))
    }
}

/// A connection to an edge.
pub(super) enum Stream {
    /// Over its Unix socket.
    Unix(UnixStream),
    /// Over the network.
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, into),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Unix(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
