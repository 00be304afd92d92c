//! An upgraded connection (WebSocket or any other protocol): bytes both ways until either ends.

use std::future::poll_fn;
use std::io;

use bytes::Bytes;
use hyper::upgrade::{OnUpgrade, Parts};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::{FarEnd, Stream};

/// Buffer of each direction, bytes: one whole frame of the platform's WebSockets. Its pages are
/// touched only as far as they are used.
pub(super) const TUNNEL_BUFFER: usize = dsec_proto::frames::PAYLOAD_MAX;

/// Joins the caller's end with the edge's, after the caller has got the 101. Returns when both
/// directions have ended; dropping it closes both ends.
///
/// # Errors
/// Either upgrade did not come about, or a connection broke.
pub async fn join(caller: OnUpgrade, far: FarEnd) -> io::Result<()> {
    let (far, from_far) = leave_http(far).await?;
    let caller = caller.await.map_err(io::Error::other)?;
    // The socket itself, past hyper's boxed layer, when it is what we expect.
    let caller = match caller.downcast::<TokioIo<TcpStream>>() {
        Ok(Parts { io, read_buf, .. }) => return meet(io.into_inner(), read_buf, far, from_far).await,
        Err(caller) => caller,
    };
    match caller.downcast::<TokioIo<TlsStream<TcpStream>>>() {
        Ok(Parts { io, read_buf, .. }) => meet(io.into_inner(), read_buf, far, from_far).await,
        Err(caller) => meet(TokioIo::new(caller), Bytes::new(), far, from_far).await,
    }
}

/// Gives each end what was read of the other's already, then copies.
async fn meet<C, F>(mut caller: C, from_caller: Bytes, mut far: F, from_far: Bytes) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    caller.write_all(&from_far).await?;
    far.write_all(&from_caller).await?;
    copy(&mut caller, &mut far).await
}

async fn copy<A, B>(a: &mut A, b: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(a, b, TUNNEL_BUFFER, TUNNEL_BUFFER).await.map(|_| ())
}

/// Drives the connection until hyper is done with it, and takes out what is below: the socket, and
/// the bytes of the new protocol that came with the head.
async fn leave_http(FarEnd(mut link): FarEnd) -> io::Result<(Stream, Bytes)> {
    poll_fn(|cx| link.connection.poll_without_shutdown(cx)).await.map_err(io::Error::other)?;
    let parts = link.connection.into_parts();
    Ok((parts.io.into_inner().into_inner(), parts.read_buf))
}
