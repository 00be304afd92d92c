//! One question to control over TLS, where it shows the cluster's certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dsec_pki::Role;
use dsec_proto::rest::{ApiError, ErrorBody};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::MemberError;

/// How long a question may take: control may have to look whether another edge answers.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// Largest answer, bytes: two certificates.
const ANSWER_MAX: usize = 64 << 10;
const HTTPS: &str = "https://";
const HTTPS_PORT: u16 = 443;

/// A server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Control {
    url: String,
    /// `host:port`.
    place: String,
}

impl Control {
    /// # Errors
    /// It is no address.
    pub(super) fn parse(url: &str) -> Result<Self, MemberError> {
        let bad = || MemberError::Control { given: url.to_owned() };
        let place = url.trim().strip_prefix(HTTPS).ok_or_else(bad)?.trim_end_matches('/');
        if place.is_empty() || place.contains(['/', '?', '#', '@', ' ']) {
            return Err(bad());
        }
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| bad())?),
            _ => (place, HTTPS_PORT),
        };
        if host.is_empty() || (host.contains(':') && !host.starts_with('[')) {
            return Err(bad());
        }
        Ok(Self { url: format!("{HTTPS}{host}:{port}"), place: format!("{host}:{port}") })
    }

    /// Its address.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    fn unreachable(&self, why: impl std::fmt::Display) -> MemberError {
        MemberError::Unreachable { control: self.url.clone(), why: why.to_string() }
    }

    /// Connects to it.
    ///
    /// # Errors
    /// Nobody answers, or somebody else.
    pub(super) async fn connect(&self, tls: Arc<ClientConfig>) -> Result<Line, MemberError> {
        let connect = async {
            let stream = TcpStream::connect(&self.place).await?;
            stream.set_nodelay(true)?;
            let local = stream.local_addr()?;
            let name = Role::Control.server_name().map_err(std::io::Error::other)?;
            Ok(Line { local, stream: TlsConnector::from(tls).connect(name, stream).await? })
        };
        let connected: std::io::Result<Line> = self.in_time(connect).await?;
        connected.map_err(|error| self.unreachable(error))
    }

    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T, MemberError> {
        let within = ANSWER_WITHIN.as_secs();
        let done = tokio::time::timeout(ANSWER_WITHIN, work).await;
        done.map_err(|_| self.unreachable(format!("nothing within {within} s")))
    }

    /// Tells it something, and takes its answer.
    ///
    /// # Errors
    /// It does not answer, or refuses.
    pub(super) async fn post<T: DeserializeOwned>(
        &self,
        line: Line,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, MemberError> {
        let body = serde_json::to_vec(body).map_err(|error| self.unreachable(error))?;
        let exchange = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(line.stream)).await?;
            let driven = tokio::spawn(connection);
            let request = http::Request::post(path)
                .header("host", &self.place)
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(body)));
            let response = sender.send_request(request?).await?;
            let status = response.status();
            let answer = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
            driven.abort();
            let answer = answer.map_err(std::io::Error::other)?.to_bytes();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((status, answer))
        };
        let (status, answer) = self.in_time(exchange).await?.map_err(|error| self.unreachable(error))?;
        if status.is_success() {
            return serde_json::from_slice(&answer)
                .map_err(|error| self.unreachable(format!("an answer that is not understood: {error}")));
        }
        match serde_json::from_slice::<ErrorBody>(&answer) {
            Ok(error) => {
                Err(MemberError::Refused { control: self.url.clone(), error: ApiError(Box::new(error)) })
            }
            Err(_) => Err(self.unreachable(format!("{status} without saying why"))),
        }
    }
}

/// A connection to control.
pub(super) struct Line {
    /// Our end of it.
    pub(super) local: SocketAddr,
    stream: TlsStream<TcpStream>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (given, place) in [
            ("https://10.0.0.1:7420", "10.0.0.1:7420"),
            ("https://dsec.example.com/", "dsec.example.com:443"),
            (" https://[fd00::1]:7420 ", "[fd00::1]:7420"),
            ("https://[fd00::1]", "[fd00::1]:443"),
        ] {
            assert_eq!(Control::parse(given).unwrap().place, place);
        }
        for bad in ["", "http://h:1", "https://", "https://h:x", "https://h/v1", "https://fd00::1:7", "h:1"] {
            assert!(Control::parse(bad).is_err(), "{bad}");
        }
    }
}
