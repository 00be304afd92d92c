//! A connection whose last words are heard.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream on which a write that the other side does not take any more is no failure.
///
/// A server may refuse a request before it has read all of its body, and close. Its answer is there
/// to be read, but an HTTP client that meets the failed write first gives up without reading it. Here
/// such writes are dropped; what follows is the answer, or an end of file without one.
#[derive(Debug)]
pub struct HearsOut<S> {
    stream: S,
    refused: bool,
}

impl<S> HearsOut<S> {
    /// Wraps a stream.
    pub fn new(stream: S) -> Self {
        Self { stream, refused: false }
    }

    /// The stream.
    pub fn into_inner(self) -> S {
        self.stream
    }

    /// `written`, or `all` when the other side is known to take no more.
    fn judge(&mut self, written: Poll<io::Result<usize>>, all: usize) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Err(error))
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                self.refused = true;
                Poll::Ready(Ok(all))
            }
            other => other,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HearsOut<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HearsOut<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.refused {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(written, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = slices.iter().map(|slice| slice.len()).sum();
        if self.refused {
            return Poll::Ready(Ok(all));
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.judge(written, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn what_was_said_before_a_close_is_heard_after_failed_writes() {
        let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
        far.write_all(b"413").await.unwrap();
        drop(far);
        let mut near = HearsOut::new(near);
        near.write_all(&[0; 1 << 20]).await.unwrap();
        let mut heard = String::new();
        near.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "413");
    }
}
