//! Servers inside a sandbox: HTTP requests passed on, TCP streams on a WebSocket.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::extract::ws::{Message, WebSocket};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use dsec_http::{HearsOut, strip_hop_by_hop};
use dsec_model::ErrorKind;
use dsec_proto::guest::{self, Request as GuestRequest};
use dsec_proto::rest::{ApiError, KEY_ID, MAY, PROJECT, REQUEST_ID, SEES};
use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::attach::Upgrade;
use super::behind::Outside;
use super::{Answer, Failure, In, PathOf};
use crate::error::{internal, invalid, invalid_field};
use crate::guest::CallError;
use crate::sandbox::Entered;

/// Bytes of one WebSocket message of a TCP stream.
const TCP_CHUNK: usize = 64 * 1024;
/// The caller's `authorization` is for dsec; this one is for the server in the sandbox.
const FORWARD_AUTHORIZATION: HeaderName = HeaderName::from_static("x-dsec-forward-authorization");
#[derive(Deserialize)]
pub(super) struct PortPath {
    port: String,
}

async fn dial(entered: &Entered, port: &str) -> Result<TcpStream, ApiError> {
    let number: u16 = port
        .parse()
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| invalid_field("port", format!("port is {port:?}; it must be 1 to 65535")))?;
    let request = GuestRequest::Dial(guest::Dial { port: number.into() });
    let fd: OwnedFd = entered.guest().done(request, Vec::new()).await?.pop().ok_or(CallError::Unexpected)?;
    let failed = |e: std::io::Error| internal("a connection into the sandbox cannot be used", &e);
    let stream = std::net::TcpStream::from(fd);
    stream.set_nonblocking(true).map_err(failed)?;
    TcpStream::from_std(stream).map_err(failed)
}

pub(super) async fn http(
    In(entered): In,
    PathOf(PortPath { port }): PathOf<PortPath>,
    axum::extract::OriginalUri(uri): axum::extract::OriginalUri,
    mut request: Request,
) -> Answer {
    let (prefix, target) = split(&uri)?;
    let entered = Arc::new(entered);
    let stream = dial(&entered, &port).await?;
    let (mut client, connection) = hyper::client::conn::http1::Builder::new()
        .preserve_header_case(true)
        .handshake::<_, Body>(TokioIo::new(HearsOut::new(stream)))
        .await
        .map_err(|e| no_http(&port, &e))?;
    tokio::spawn(connection.with_upgrades());
    let caller = request.headers().contains_key(header::UPGRADE).then(|| hyper::upgrade::on(&mut request));
    rewrite(request.headers_mut(), caller.is_some());
    let outside = Outside::tell(prefix, &port, request.headers_mut());
    *request.uri_mut() = target;
    *request.version_mut() = axum::http::Version::HTTP_11;
    let counted = Arc::clone(&entered);
    let request = request.map(|body| {
        Body::new(body.map_frame(move |frame| {
            counted.handle.traffic.count_in(frame.data_ref().map_or(0, bytes::Bytes::len));
            frame
        }))
    });
    let mut response = client.send_request(request).await.map_err(|e| no_http(&port, &e))?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let server = hyper::upgrade::on(&mut response);
        let Some(caller) = caller else {
            return Err(Failure(ApiError::new(
                ErrorKind::Unavailable,
                "the server upgraded a plain request",
            )));
        };
        tokio::spawn(async move {
            let (Ok(caller), Ok(server)) = tokio::join!(caller, server) else { return };
            let (mut caller, mut server) = (TokioIo::new(caller), TokioIo::new(server));
            if let Ok((into, out_of)) = tokio::io::copy_bidirectional(&mut caller, &mut server).await {
                entered.handle.traffic.count_in(usize::try_from(into).unwrap_or(usize::MAX));
                entered.handle.traffic.count_out(usize::try_from(out_of).unwrap_or(usize::MAX));
            }
        });
        return Ok(response.map(|_| Body::empty()));
    }
    strip_hop_by_hop(response.headers_mut());
    outside.correct(response.headers_mut());
    // The sandbox is in use until the body's end; the sender lives as long, or hyper would close.
    Ok(response
        .map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _keeps = &client;
                entered.handle.traffic.count_out(frame.data_ref().map_or(0, bytes::Bytes::len));
                frame
            }))
        })
        .into_response())
}

/// A path at its `/http`: where callers see the server's root, and what comes after it as it was sent, with
/// its query. Nothing is decoded on the way.
fn split(uri: &Uri) -> Result<(String, Uri), ApiError> {
    // /v1/sandboxes/{id}/ports/{port}/http/...
    let (path, rest) = match uri.path().match_indices('/').nth(6) {
        Some((at, _)) => uri.path().split_at(at),
        None => (uri.path(), "/"),
    };
    let text = match uri.query() {
        Some(query) => format!("{rest}?{query}"),
        None => rest.to_owned(),
    };
    let target = text.parse().map_err(|_| invalid("the path cannot be passed on"))?;
    Ok((path.to_owned(), target))
}

fn rewrite(headers: &mut HeaderMap, upgrade: bool) {
    headers.remove(header::AUTHORIZATION);
    for own in [PROJECT, KEY_ID, SEES, MAY, REQUEST_ID] {
        headers.remove(own);
    }
    if let Some(value) = headers.remove(FORWARD_AUTHORIZATION) {
        headers.insert(header::AUTHORIZATION, value);
    }
    let protocol = headers.get(header::UPGRADE).cloned();
    strip_hop_by_hop(headers);
    if let (true, Some(protocol)) = (upgrade, protocol) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
}

fn no_http(port: &str, error: &hyper::Error) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        format!("what listens on port {port} did not answer the request: {error}"),
    )
    .hint("see that it speaks HTTP/1.1; other protocols go through .../tcp")
}

pub(super) async fn tcp(
    In(entered): In,
    PathOf(PortPath { port }): PathOf<PortPath>,
    upgrade: Upgrade,
) -> Answer<Response> {
    let stream = dial(&entered, &port).await?;
    Ok(upgrade.0.on_upgrade(move |socket| join(socket, stream, entered)))
}

/// Bytes both ways until both sides have ended, or either is gone.
async fn join(socket: WebSocket, stream: TcpStream, entered: Entered) {
    let (mut sink, mut messages) = socket.split();
    let (mut read, mut write) = stream.into_split();
    let traffic = &entered.handle.traffic;
    let out_of = async {
        let mut buffer = BytesMut::with_capacity(TCP_CHUNK);
        loop {
            buffer.reserve(TCP_CHUNK);
            match read.read_buf(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(got) => {
                    traffic.count_out(got);
                    if sink.send(Message::Binary(buffer.split().freeze())).await.is_err() {
                        return;
                    }
                }
            }
        }
        let _ = sink.send(Message::Close(None)).await;
    };
    let into = async {
        while let Some(Ok(message)) = messages.next().await {
            match message {
                // The caller's end: the server may still have much to say.
                Message::Binary(bytes) if bytes.is_empty() => {
                    let _ = write.shutdown().await;
                }
                Message::Binary(bytes) => {
                    traffic.count_in(bytes.len());
                    if write.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Message::Close(_) => break,
                Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
            }
        }
        let _ = write.shutdown().await;
    };
    // The server's end ends it; a client that is gone has nobody to send to.
    tokio::select! {
        () = out_of => {}
        () = into => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_goes_on_as_it_was_sent() {
        let target = |text: &str| {
            let (prefix, target) = split(&text.parse().unwrap()).unwrap();
            assert_eq!(prefix, "/v1/sandboxes/sb-n1-a/ports/80/http");
            target.to_string()
        };
        assert_eq!(target("/v1/sandboxes/sb-n1-a/ports/80/http/a%2Fb/?x=%20"), "/a%2Fb/?x=%20");
        assert_eq!(target("/v1/sandboxes/sb-n1-a/ports/80/http"), "/");
        assert_eq!(target("/v1/sandboxes/sb-n1-a/ports/80/http/"), "/");
        assert_eq!(target("/v1/sandboxes/sb-n1-a/ports/80/http//a"), "//a");
    }

    #[test]
    fn the_callers_key_never_enters_the_sandbox() {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_static("Bearer ours"));
        headers.insert("x-dsec-forward-authorization", HeaderValue::from_static("Bearer theirs"));
        headers.insert("x-dsec-project", HeaderValue::from_static("p"));
        rewrite(&mut headers, false);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["authorization"], "Bearer theirs");
    }
}
