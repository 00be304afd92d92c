//! The way to a node: pooled HTTP/1.1 connections over its edge's Unix socket, or over the network ([`way`]).
//!
//! A connection is not driven by a task of its own. Whoever uses it polls it: first while waiting
//! for the response's head ([`Link::send`]), then as part of the response's body ([`body`]). That
//! saves two wake-ups of another thread per request, which is most of what a proxy adds, and lets
//! [`pool`] see at checkout whether the edge has closed the connection meanwhile.

mod body;
mod pool;
mod tunnel;
mod way;

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use dsec_http::HearsOut;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

pub use pool::Pool;
pub use tunnel::join;
use way::Stream;
pub use way::{TlsWay, Voucher, Way};

type Connection = http1::Connection<TokioIo<HearsOut<Stream>>, Body>;

/// Why no response came.
#[derive(Debug)]
pub enum SendError {
    /// No connection could be made: nothing was sent, and another node may be tried with the same request.
    Unreachable(io::Error),
    /// The request was sent, at least in part, and no response came: it may have been carried out.
    Broken(hyper::Error),
    /// The request's own body failed: the caller hung up or sent more than it may.
    Request(hyper::Error),
}

/// A connection and the handle that takes requests for it.
struct Link {
    sender: http1::SendRequest<Body>,
    connection: Connection,
}

/// What came of handing a request to a connection.
enum Handed {
    Answered(Response<Incoming>),
    /// Nothing of it was sent.
    NotSent(Request<Body>, hyper::Error),
    Failed(hyper::Error),
}

impl Link {
    /// Polls the connection once, without a wake-up, and says whether it can take a request. This
    /// is where an edge that closed an idle connection is noticed.
    fn is_usable(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        self.connection.poll_without_shutdown(&mut context).is_pending() && self.sender.is_ready()
    }

    /// Sends a request and drives the connection until the response's head is there.
    async fn send(&mut self, request: Request<Body>) -> Handed {
        let connection = &mut self.connection;
        let mut connection_over = false;
        let mut answer = pin!(self.sender.try_send_request(request));
        let result = poll_fn(|cx| {
            if let Poll::Ready(result) = answer.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            if !connection_over && connection.poll_without_shutdown(cx).is_ready() {
                // The reason arrives through `answer`: the connection tells its waiting request.
                connection_over = true;
            }
            answer.as_mut().poll(cx)
        })
        .await;
        match result {
            Ok(response) => Handed::Answered(response),
            Err(mut error) => match error.take_message() {
                Some(request) => Handed::NotSent(request, error.into_error()),
                None => Handed::Failed(error.into_error()),
            },
        }
    }
}

/// A node's answer.
pub enum Answer {
    /// An ordinary response; its body drives the connection and gives it back to the pool.
    Response(Response<Body>),
    /// The edge has agreed to leave HTTP: the head to pass on, and the far end for [`join`].
    Upgrade(Response<Body>, FarEnd),
}

/// The edge's end of an upgraded connection.
pub struct FarEnd(Box<Link>);

/// Sends a request to a node. A pooled connection that turns out closed is replaced without
/// anybody noticing as long as nothing was sent on it; a GET or HEAD without a body is also sent
/// again when a pooled connection broke under it, since it changes nothing. The request is taken out of its place, and put
/// back only if the node is unreachable.
///
/// Cancel-safe in the sense that matters: dropping this future drops the connection, and the edge
/// sees its caller gone.
///
/// # Errors
/// See [`SendError`].
pub async fn send(pool: &Arc<Pool>, request: &mut Request<Body>) -> Result<Answer, SendError> {
    *request.version_mut() = Version::HTTP_11;
    while let Some(mut link) = pool.checkout() {
        let spare = repeatable(request);
        match (link.send(std::mem::take(request)).await, spare) {
            (Handed::Answered(response), _) => return Ok(answer(pool, link, response)),
            (Handed::NotSent(back, _), _) => *request = back,
            (Handed::Failed(error), Some(spare)) if !error.is_user() => *request = spare,
            (Handed::Failed(error), _) => return Err(failed(error)),
        }
    }
    let mut link = pool.connect().await.map_err(SendError::Unreachable)?;
    match link.send(std::mem::take(request)).await {
        Handed::Answered(response) => Ok(answer(pool, link, response)),
        Handed::NotSent(back, error) => {
            *request = back;
            Err(SendError::Unreachable(io::Error::other(error)))
        }
        Handed::Failed(error) => Err(failed(error)),
    }
}

fn failed(error: hyper::Error) -> SendError {
    if error.is_user() { SendError::Request(error) } else { SendError::Broken(error) }
}

fn repeatable(request: &Request<Body>) -> Option<Request<Body>> {
    let safe = matches!(*request.method(), Method::GET | Method::HEAD) && request.body().is_end_stream();
    safe.then(|| {
        let mut copy = Request::new(Body::empty());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.version_mut() = request.version();
        *copy.headers_mut() = request.headers().clone();
        copy
    })
}

fn answer(pool: &Arc<Pool>, link: Link, response: Response<Incoming>) -> Answer {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Answer::Upgrade(response.map(|_| Body::empty()), FarEnd(Box::new(link)));
    }
    Answer::Response(response.map(|incoming| body::driven(incoming, link, pool)))
}
