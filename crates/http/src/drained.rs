//! Request bodies that are read on after nobody wants them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

/// Most bytes that are read of a body nobody wants: beyond it, a caller that does not look at answers
/// while it sends meets a closed connection, with the answer before it.
pub const DRAIN_BYTES_MAX: u64 = 1 << 30;
/// Longest time that such a body is read. nginx lingers as long.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);
/// Longest silence in it: the caller has looked at the answer, or is gone.
const DRAIN_SILENCE_MAX: Duration = Duration::from_secs(5);

/// A request's body. Dropped before its end it is read on by a task, within limits, and thrown away.
///
/// Closing a connection with unread bytes resets it, and a caller that is still sending then loses
/// the answer that said why it was refused. So whoever answers early leaves the rest to this.
///
/// A caller that waits for `100 Continue` and was never told to go on has sent nothing: its body is
/// left alone, see [`Awaited`].
#[derive(Debug)]
pub struct Drained<B: Body<Data = Bytes> + Send + Unpin + 'static> {
    /// Taken when it has ended or failed, or is being thrown away.
    body: Option<B>,
    waits: bool,
    asked_for: Arc<AtomicBool>,
}

/// Knows, after the handler is done, whether its request's body was ever asked for.
#[derive(Debug, Clone)]
pub struct Awaited {
    waits: bool,
    asked_for: Arc<AtomicBool>,
}

impl Awaited {
    /// The caller waits for `100 Continue`, and will not get it: it must not use the connection again.
    pub fn in_vain(&self) -> bool {
        self.waits && !self.asked_for.load(Ordering::Acquire)
    }
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Drained<B> {
    /// Wraps the body of a request with these headers.
    pub fn new(body: B, headers: &HeaderMap) -> Self {
        let waits = headers
            .get(header::EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        Self { body: Some(body), waits, asked_for: Arc::default() }
    }

    /// What tells later whether the caller still waits for `100 Continue`.
    pub fn awaited(&self) -> Awaited {
        Awaited { waits: self.waits, asked_for: Arc::clone(&self.asked_for) }
    }
}

/// The request with a body that whoever refuses it may drop. `body` makes the server's own kind of body of it. `None`:
/// there is no body to wait for.
pub fn drained<B: Body<Data = Bytes> + Send + Unpin + 'static>(
    request: Request<B>,
    body: impl FnOnce(Drained<B>) -> B,
) -> (Request<B>, Option<Awaited>) {
    let (parts, inner) = request.into_parts();
    if inner.is_end_stream() {
        return (Request::from_parts(parts, inner), None);
    }
    let inner = Drained::new(inner, &parts.headers);
    let awaited = inner.awaited();
    (Request::from_parts(parts, body(inner)), Some(awaited))
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Body for Drained<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.asked_for.store(true, Ordering::Release);
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Drop for Drained<B> {
    fn drop(&mut self) {
        if self.is_end_stream() || self.awaited().in_vain() {
            return;
        }
        // Without a runtime the server is going down, and the connection with it.
        if let (Some(body), Ok(runtime)) = (self.body.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async {
                let _ = tokio::time::timeout(DRAIN_TIME_MAX, drain(body)).await;
            });
        }
    }
}

async fn drain<B: Body<Data = Bytes> + Unpin>(mut body: B) {
    let mut left = DRAIN_BYTES_MAX;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_SILENCE_MAX, body.frame()).await {
        let read = frame.data_ref().map_or(0, |bytes| bytes.len() as u64);
        match left.checked_sub(read) {
            Some(rest) => left = rest,
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt as _, stream};
    use http::HeaderValue;
    use http_body_util::StreamBody;
    use tokio::sync::mpsc;

    use super::*;

    /// A body of chunks, and what tells how many of them were taken.
    fn body(
        count: u64,
        chunk: usize,
    ) -> (impl Body<Data = Bytes, Error = Infallible> + Send + Unpin, mpsc::UnboundedReceiver<u64>) {
        let (sender, taken) = mpsc::unbounded_channel();
        let bytes = Bytes::from(vec![0; chunk]);
        let chunks = stream::iter(0..count).map(move |number| {
            let _ = sender.send(number);
            Ok(Frame::data(bytes.clone()))
        });
        (StreamBody::new(chunks), taken)
    }

    async fn count(mut taken: mpsc::UnboundedReceiver<u64>) -> u64 {
        let mut count = 0;
        while taken.recv().await.is_some() {
            count += 1;
        }
        count
    }

    #[tokio::test]
    async fn a_body_that_is_dropped_is_read_to_its_end() {
        let (body, taken) = body(100, 10);
        let mut wrapped = Drained::new(body, &HeaderMap::new());
        wrapped.frame().await.unwrap().unwrap();
        drop(wrapped);
        assert_eq!(count(taken).await, 100);
    }

    #[tokio::test]
    async fn a_body_without_an_end_is_left_at_the_limit() {
        let chunk = 64 << 20;
        let (body, taken) = body(u64::MAX, chunk);
        drop(Drained::new(body, &HeaderMap::new()));
        assert_eq!(count(taken).await, DRAIN_BYTES_MAX / chunk as u64 + 1);
    }

    #[tokio::test]
    async fn a_caller_that_was_not_told_to_continue_is_not_asked_for_its_body() {
        let headers = HeaderMap::from_iter([(header::EXPECT, HeaderValue::from_static("100-continue"))]);
        let (unread, taken) = body(100, 10);
        let wrapped = Drained::new(unread, &headers);
        let awaited = wrapped.awaited();
        drop(wrapped);
        assert!(awaited.in_vain());
        assert_eq!(count(taken).await, 0);
        let (begun, taken) = body(100, 10);
        let mut wrapped = Drained::new(begun, &headers);
        let awaited = wrapped.awaited();
        wrapped.frame().await.unwrap().unwrap();
        drop(wrapped);
        assert!(!awaited.in_vain());
        assert_eq!(count(taken).await, 100);
    }
}
