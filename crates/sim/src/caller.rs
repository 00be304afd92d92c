//! A caller of the API that takes little of the machine itself: connections that stay, one request at a time on each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::{AbortHandle, JoinSet};

/// Whom to call.
#[derive(Debug, Clone)]
pub(crate) enum Server {
    /// Control, with a key.
    Control { address: String, key: String },
    /// A node, past control.
    Node(std::path::PathBuf),
}

/// One connection.
pub(crate) struct Caller {
    sender: http1::SendRequest<Full<Bytes>>,
    driving: AbortHandle,
    key: Option<String>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.driving.abort();
    }
}

impl Caller {
    /// Connects.
    pub(crate) async fn connect(server: &Server) -> anyhow::Result<Self> {
        match server {
            Server::Control { address, key } => {
                let stream = TcpStream::connect(address)
                    .await
                    .with_context(|| format!("cannot connect to {address}"))?;
                stream.set_nodelay(true)?;
                Self::over(stream, Some(format!("Bearer {key}"))).await
            }
            Server::Node(socket) => {
                let stream = UnixStream::connect(socket)
                    .await
                    .with_context(|| format!("cannot connect to {}", socket.display()))?;
                Self::over(stream, None).await
            }
        }
    }

    async fn over<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        stream: S,
        key: Option<String>,
    ) -> anyhow::Result<Self> {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Its end shows in the requests.
        let driving = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Self { sender, driving, key })
    }

    /// Sends a request and reads its answer whole.
    pub(crate) async fn ask(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, "dsec");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, key);
        }
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        self.sender.ready().await?;
        let response = self.sender.send_request(request.body(Full::from(body))?).await?;
        let status = response.status();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }

    /// The same, of which the answer must be a success.
    pub(crate) async fn must(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> anyhow::Result<Bytes> {
        let (status, answer) = self.ask(method, path, headers, body).await?;
        if !status.is_success() {
            bail!("{path} answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(answer)
    }
}

/// Creates to send.
#[derive(Debug, Clone)]
pub(crate) struct Creates {
    /// Told apart from other runs by their keys.
    pub(crate) name: String,
    /// How many.
    pub(crate) count: u64,
    /// Connections.
    pub(crate) concurrency: u64,
    /// So many a second, each at its time; none: each connection sends as soon as it has its answer.
    pub(crate) a_second: Option<f64>,
}

/// What came of requests.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// How long each took that succeeded.
    pub(crate) good: Vec<Duration>,
    /// How many did not.
    pub(crate) failed: u64,
    /// Why the first of them did not.
    pub(crate) first_error: Option<String>,
    /// From the first start to the last end.
    pub(crate) wall: Duration,
}

impl Creates {
    /// Sends them. Of creates that are sent at their times, the time of one begins when it was due, also where no connection was
    /// free by then.
    pub(crate) async fn run(
        &self,
        server: &Server,
        body: impl Fn(u64) -> Bytes + Clone + Send + 'static,
    ) -> anyhow::Result<Samples> {
        let next = Arc::new(AtomicU64::new(0));
        let mut callers = Vec::new();
        for _ in 0..self.concurrency.min(self.count) {
            callers.push(Caller::connect(server).await?);
        }
        let begun = Instant::now();
        let mut senders = JoinSet::new();
        for caller in callers {
            let (creates, next, body, server) =
                (self.clone(), Arc::clone(&next), body.clone(), server.clone());
            senders.spawn(async move { creates.send(caller, &server, begun, &next, body).await });
        }
        let mut all =
            Samples { good: Vec::with_capacity(usize::try_from(self.count)?), ..Samples::default() };
        while let Some(samples) = senders.join_next().await {
            let samples = samples.context("a caller broke")?;
            all.good.extend(samples.good);
            all.failed += samples.failed;
            all.first_error = all.first_error.or(samples.first_error);
        }
        all.wall = begun.elapsed();
        Ok(all)
    }

    /// What one connection sends.
    async fn send(
        &self,
        mut caller: Caller,
        server: &Server,
        begun: Instant,
        next: &AtomicU64,
        body: impl Fn(u64) -> Bytes,
    ) -> Samples {
        let mut samples = Samples::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= self.count {
                return samples;
            }
            let mut began = Instant::now();
            if let Some(a_second) = self.a_second {
                let due = begun + Duration::from_secs_f64(number as f64 / a_second);
                if due > began {
                    tokio::time::sleep_until(due.into()).await;
                    // The timer's own grain is not the server's time.
                    began = Instant::now();
                } else {
                    began = due;
                }
            }
            let key = ("idempotency-key", format!("{}-{number}", self.name));
            let headers = [key, ("idempotency-attempt", "1".to_owned())];
            match caller.must(Method::POST, "/v1/sandboxes", &headers, body(number)).await {
                Ok(_) => samples.good.push(began.elapsed()),
                Err(error) => {
                    samples.failed += 1;
                    samples.first_error.get_or_insert_with(|| format!("{error:#}"));
                    // A connection that broke is no reason for the others to fail.
                    match Caller::connect(server).await {
                        Ok(another) => caller = another,
                        Err(_) => return samples,
                    }
                }
            }
        }
    }
}
