//! Talking to a running edge from another process: what `down` does.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::lock::{LockError, StateLock};
use crate::shutdown::Progress;

/// How long an edge that said "done" may take to end.
const END_MAX: Duration = Duration::from_secs(10);
const END_POLL: Duration = Duration::from_millis(20);

/// Asks the edge on `socket` to go down and shows how far it is. True: nothing is left.
///
/// # Errors
/// It cannot be reached, or breaks off.
pub async fn shut_down(socket: &Path, mut show: impl FnMut(&Progress) -> bool) -> anyhow::Result<bool> {
    let stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("an edge runs and does not answer on {}", socket.display()))?;
    let (mut client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request =
        http::Request::post("/internal/shutdown").header("host", "edge").body(Empty::<Bytes>::new())?;
    let mut response = client.send_request(request).await?;
    if !response.status().is_success() {
        bail!("the edge refused: {}", response.status());
    }
    let (mut pending, mut done) = (Vec::new(), false);
    while let Some(frame) = response.frame().await {
        let Ok(bytes) = frame.context("the edge broke off")?.into_data() else { continue };
        pending.extend_from_slice(&bytes);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            done = show(&serde_json::from_slice(&line)?);
        }
    }
    Ok(done)
}

/// Waits until the edge has given its lock back: it has ended.
///
/// # Errors
/// It does not end.
pub fn wait_for_lock(state_dir: &Path) -> anyhow::Result<()> {
    let until = Instant::now() + END_MAX;
    loop {
        match StateLock::take(state_dir) {
            Ok(_) => return Ok(()),
            Err(LockError::Held { pid, .. }) if Instant::now() > until => {
                bail!("the edge (pid {pid}) said it was done and still runs after {} s", END_MAX.as_secs())
            }
            Err(LockError::Held { .. }) => std::thread::sleep(END_POLL),
            Err(error) => return Err(error.into()),
        }
    }
}
