//! A response's body that drives the connection it arrives on.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;

use super::{Link, Pool};

struct Driven {
    incoming: Incoming,
    /// Taken when the connection has failed or is given back.
    link: Option<Link>,
    pool: Arc<Pool>,
    ended: bool,
}

/// Wraps a body. When it has been read to its end the connection goes back to the pool; when it is
/// dropped before that the connection is closed, which tells the edge to stop.
pub(super) fn driven(incoming: Incoming, link: Link, pool: &Arc<Pool>) -> Body {
    let driven = Driven { incoming, link: Some(link), pool: Arc::clone(pool), ended: false };
    if driven.is_end_stream() {
        // Dropping it gives the connection back now and not after the caller has read the head.
        return Body::empty();
    }
    Body::new(driven)
}

impl Driven {
    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        if let Poll::Ready(None) = polled {
            self.ended = true;
        }
        polled
    }
}

impl http_body::Body for Driven {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = this.poll_incoming(cx) {
            return Poll::Ready(frame);
        }
        let Some(link) = &mut this.link else {
            return Poll::Pending;
        };
        if link.connection.poll_without_shutdown(cx).is_ready() {
            // Over, well or badly: what it leaves in `incoming` says which.
            this.link = None;
        }
        this.poll_incoming(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        if self.is_end_stream()
            && let Some(link) = self.link.take()
        {
            self.pool.give_back(link);
        }
    }
}
