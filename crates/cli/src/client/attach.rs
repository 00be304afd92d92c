//! The output stream of a command: a WebSocket of binary frames, see `dsec_proto::frames`.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use dsec_model::{ExecId, SandboxId};
use dsec_proto::frames;
use dsec_proto::rest::AttachEvent;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message, http};

use super::{CONNECT_TIMEOUT, Client, ClientError};

/// Largest message taken: a frame of output with its kind byte, and room for an event's JSON.
const MESSAGE_MAX: usize = frames::PAYLOAD_MAX * 4;
/// Silence after which the server is asked whether it is there.
pub(crate) const PING_AFTER: Duration = Duration::from_secs(15);

/// How far each output has been read: where a new connection goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Offsets {
    /// Bytes of standard output.
    pub(crate) stdout: u64,
    /// Bytes of standard error.
    pub(crate) stderr: u64,
}

/// What the server sends.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    /// Standard output, or a terminal's output.
    Stdout(Bytes),
    /// Standard error.
    Stderr(Bytes),
    /// An event.
    Event(AttachEvent),
}

/// A connection to the platform, plain or by TLS.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// A WebSocket to the platform.
pub(crate) type Socket = WebSocketStream<Box<dyn Wire>>;

/// An attached command.
pub(crate) struct Attach {
    socket: Socket,
    url: String,
}

/// The receiving half.
pub(crate) struct AttachReader {
    stream: SplitStream<Socket>,
    url: String,
    heard: bool,
}

/// The sending half.
pub(crate) struct AttachWriter {
    sink: SplitSink<Socket, Message>,
}

impl Client {
    /// Attaches to a command, from these offsets on.
    pub(crate) async fn attach(
        &self,
        sandbox: &SandboxId,
        exec: &ExecId,
        from: Offsets,
    ) -> Result<Attach, ClientError> {
        let path = format!(
            "/v1/sandboxes/{sandbox}/execs/{exec}/attach?stdout_offset={}&stderr_offset={}",
            from.stdout, from.stderr
        );
        Ok(Attach { socket: self.websocket(&path).await?, url: self.target.url.clone() })
    }

    /// Opens a WebSocket on a path of the server.
    pub(crate) async fn websocket(&self, path: &str) -> Result<Socket, ClientError> {
        let url = self.target.url.clone();
        let connect = async {
            let stream = self.connect().await?;
            // "ws" or "wss" out of "http" or "https".
            let mut request = format!("{}{path}", url.replacen("http", "ws", 1))
                .into_client_request()
                .map_err(|error| self.socket_error(error))?;
            if let Some(key) = &self.target.api_key {
                let value = http::HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                    ClientError::BadUrl { url: url.clone(), cause: "the key is no text".into() }
                })?;
                request.headers_mut().insert(http::header::AUTHORIZATION, value);
            }
            let config = WebSocketConfig::default()
                .read_buffer_size(frames::PAYLOAD_MAX + 64)
                .max_message_size(Some(MESSAGE_MAX))
                .max_frame_size(Some(MESSAGE_MAX));
            let (socket, _) = tokio_tungstenite::client_async_with_config(request, stream, Some(config))
                .await
                .map_err(|error| self.socket_error(error))?;
            Ok(socket)
        };
        match tokio::time::timeout(CONNECT_TIMEOUT + PING_AFTER, connect).await {
            Ok(socket) => socket,
            Err(_) => Err(ClientError::TimedOut { url: url.clone() }),
        }
    }

    async fn connect(&self) -> Result<Box<dyn Wire>, ClientError> {
        let unreachable = |cause: String| ClientError::Unreachable { url: self.target.url.clone(), cause };
        let url = reqwest::Url::parse(&self.target.url).map_err(|e| unreachable(e.to_string()))?;
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default().unwrap_or(80);
        let stream =
            match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((host.as_str(), port))).await {
                Ok(stream) => stream.map_err(|error| unreachable(crate::failure::plain(&error)))?,
                Err(_) => return Err(unreachable("no answer in 5 s".into())),
            };
        // Keystrokes must not wait for one another.
        let _ = stream.set_nodelay(true);
        if url.scheme() != "https" {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(host).map_err(|error| unreachable(error.to_string()))?;
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&self.tls));
        match connector.connect(name, stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => Err(unreachable(crate::failure::plain(&error))),
        }
    }

    fn socket_error(&self, error: WsError) -> ClientError {
        match error {
            WsError::Http(response) => {
                let body = response.body().as_deref().unwrap_or_default();
                ClientError::from_answer(&self.target.url, response.status().as_u16(), body)
            }
            other => ClientError::Broken { url: self.target.url.clone(), cause: other.to_string() },
        }
    }
}

impl Attach {
    /// Both directions, each on its own: a full one must not hold up the other.
    pub(crate) fn split(self) -> (AttachReader, AttachWriter) {
        let (sink, stream) = self.socket.split();
        (AttachReader { stream, url: self.url, heard: true }, AttachWriter { sink })
    }
}

impl AttachReader {
    /// Whether anything came since this was last asked.
    pub(crate) fn heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// The next frame. Cancel-safe.
    ///
    /// # Errors
    /// The connection ended before the command's last event.
    pub(crate) async fn next(&mut self) -> Result<Frame, ClientError> {
        loop {
            let broken = |cause: String| ClientError::Broken { url: self.url.clone(), cause };
            let message = self.stream.next().await;
            self.heard = true;
            match message {
                Some(Ok(Message::Binary(bytes))) => {
                    if let Some(frame) = decode(bytes).map_err(broken)? {
                        return Ok(frame);
                    }
                }
                Some(Ok(Message::Close(_))) | None => return Err(broken("the stream was closed".into())),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(broken(error.to_string())),
            }
        }
    }
}

impl AttachWriter {
    /// Sends one frame; a large payload goes in several.
    pub(crate) async fn send(&mut self, kind: u8, payload: &[u8]) -> Result<(), WsError> {
        let mut pieces = payload.chunks(frames::PAYLOAD_MAX);
        let mut piece = pieces.next().unwrap_or_default();
        loop {
            let mut bytes = BytesMut::with_capacity(1 + piece.len());
            bytes.put_u8(kind);
            bytes.put_slice(piece);
            self.sink.send(Message::Binary(bytes.freeze())).await?;
            match pieces.next() {
                Some(next) => piece = next,
                None => return Ok(()),
            }
        }
    }

    /// Asks whether the server is there: without it, a host that vanished looks like a quiet command.
    pub(crate) async fn ping(&mut self) -> Result<(), WsError> {
        self.sink.send(Message::Ping(Bytes::new())).await
    }
}

/// A frame out of a message. `None`: of a kind that a newer server sends.
fn decode(mut bytes: Bytes) -> Result<Option<Frame>, String> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let kind = bytes.split_to(1)[0];
    match kind {
        frames::STDOUT => Ok(Some(Frame::Stdout(bytes))),
        frames::STDERR => Ok(Some(Frame::Stderr(bytes))),
        frames::EVENT => match serde_json::from_slice(&bytes) {
            Ok(event) => Ok(Some(Frame::Event(event))),
            Err(_) if is_new_event(&bytes) => Ok(None),
            Err(error) => Err(format!("an event of another shape ({error})")),
        },
        _ => Ok(None),
    }
}

/// An event that a newer server sends and this program does not know.
fn is_new_event(json: &[u8]) -> bool {
    let name = serde_json::from_slice::<serde_json::Value>(json)
        .ok()
        .and_then(|value| value.get("event")?.as_str().map(str::to_owned));
    name.is_some_and(|name| !["exited", "skipped", "error"].contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_told_apart_and_unknown_ones_are_passed_over() {
        assert_eq!(decode(Bytes::from_static(b"\x01hi")), Ok(Some(Frame::Stdout(Bytes::from_static(b"hi")))));
        assert_eq!(decode(Bytes::from_static(b"\x02")), Ok(Some(Frame::Stderr(Bytes::new()))));
        assert_eq!(decode(Bytes::from_static(b"\x7fnew")), Ok(None));
        assert_eq!(decode(Bytes::new()), Ok(None));
        assert_eq!(decode(Bytes::from_static(b"\x03{\"event\":\"paused\"}")), Ok(None));
        assert!(decode(Bytes::from_static(b"\x03{}")).is_err());
        assert!(decode(Bytes::from_static(b"\x03{\"event\":\"exited\"}")).is_err());
    }
}
