//! Blobs: received whole, or not at all. What is given out has the digest it was asked for by.

use std::error::Error;
use std::io::SeekFrom;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use sha2::{Digest as _, Sha256};
use tokio::fs::File;
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::client::{Client, Tries, Wanted};
use crate::digest::Digest;
use crate::error::PullError;

/// Bytes that a file's writer holds back, so that a write is a large one.
const WRITE: usize = 1 << 20;
/// Tries of one blob in all, also of a registry that gives a little each time.
const TRIES_MAX: u32 = 200;

/// A blob on its way into a file.
struct Arriving<'a> {
    digest: Digest,
    size: u64,
    what: String,
    file: File,
    hasher: Sha256,
    /// Bytes that are in the file and in the hasher.
    received: u64,
    /// Whether it was taken up again in the middle.
    is_resumed: bool,
    /// The same count for who shows it, over several blobs.
    counted: &'a AtomicU64,
}

impl Client {
    /// A small blob, whole.
    pub(crate) async fn small_blob(
        &self,
        digest: Digest,
        what: &str,
        most: u64,
    ) -> Result<Vec<u8>, PullError> {
        let path = format!("blobs/{digest}");
        let fetched = self.document(&Wanted { path: &path, what, headers: &[] }, most).await?;
        let found = Digest::of(&fetched.bytes);
        if found == digest {
            Ok(fetched.bytes)
        } else {
            Err(PullError::DigestMismatch { what: digest, found })
        }
    }

    /// Receives a blob of `size` bytes into a new file. On a failure nothing of it is left. A connection that breaks off is taken
    /// up where it was, if the registry can. `counted` grows as bytes come, and shrinks if they must come again.
    ///
    /// # Errors
    /// [`PullError`]: also if it is not what its digest and size say.
    pub async fn blob(
        &self,
        digest: Digest,
        size: u64,
        file: &Path,
        counted: &AtomicU64,
    ) -> Result<(), PullError> {
        let received = self.receive(digest, size, file, counted).await;
        if received.is_err() {
            let _not_even_made = tokio::fs::remove_file(file).await;
        }
        received
    }

    async fn receive(
        &self,
        digest: Digest,
        size: u64,
        path: &Path,
        counted: &AtomicU64,
    ) -> Result<(), PullError> {
        let mut file = File::create_new(path).await.map_err(PullError::Disk)?;
        file.set_max_buf_size(WRITE);
        let what = format!("blob {digest}");
        let (hasher, received, is_resumed) = (Sha256::new(), 0, false);
        let mut blob = Arriving { digest, size, what, file, hasher, received, is_resumed, counted };
        let mut tries = Tries::new(self.limits());
        for _ in 0..TRIES_MAX {
            let before = blob.received;
            let error = match self.arrive(&mut blob).await {
                Ok(()) => match blob.check() {
                    // A registry that joins two parts wrongly may give the whole rightly.
                    Err(_) if blob.is_resumed => {
                        blob.restart().await?;
                        blob.is_resumed = false;
                        continue;
                    }
                    checked => {
                        checked?;
                        return blob.file.flush().await.map_err(PullError::Disk);
                    }
                },
                Err(error) => error,
            };
            if blob.received >= before + self.limits().progress_bytes {
                tries.progress();
            }
            if !tries.again(&error).await {
                return Err(error);
            }
        }
        Err(blob.cut_off(self))
    }

    /// One request, and what it brings.
    async fn arrive(&self, blob: &mut Arriving<'_>) -> Result<(), PullError> {
        let path = format!("blobs/{}", blob.digest);
        let range = HeaderValue::from_str(&format!("bytes={}-", blob.received));
        let range: Vec<(HeaderName, HeaderValue)> =
            range.into_iter().filter(|_| blob.received > 0).map(|range| (header::RANGE, range)).collect();
        let what = blob.what.clone();
        let wanted = Wanted { path: &path, what: &what, headers: &range };
        let whole = Wanted { headers: &[], ..wanted };
        let mut response = match self.get(&wanted).await {
            // It cannot give what is left: from the beginning.
            Err(PullError::Status { status: 416, .. }) if blob.received > 0 => {
                blob.restart().await?;
                self.get(&whole).await?
            }
            other => other?,
        };
        if blob.received > 0 {
            if continues(&response, blob.received) {
                blob.is_resumed = true;
            } else {
                blob.restart().await?;
                if response.status() == StatusCode::PARTIAL_CONTENT {
                    response = self.get(&whole).await?;
                }
            }
        }
        if response.status() == StatusCode::PARTIAL_CONTENT && blob.received == 0 {
            let why = "it gives a part of a blob when all of it was asked for".to_owned();
            return Err(PullError::Strange { host: self.host().to_owned(), why });
        }
        let mut body = response.into_body();
        let (mut until, mut since) = (Instant::now() + self.limits().stall, 0);
        loop {
            let frame = tokio::time::timeout_at(until, body.frame()).await;
            let data = match frame.map_err(|_| self.stalled(&what))? {
                None => break,
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(error)) => {
                    tracing::debug!(error = &error as &dyn Error, "a blob's connection broke off");
                    return Err(blob.cut_off(self));
                }
            };
            blob.take(&data).await?;
            since += data.len() as u64;
            if since >= self.limits().progress_bytes {
                (until, since) = (Instant::now() + self.limits().stall, 0);
            }
        }
        if blob.received < blob.size { Err(blob.cut_off(self)) } else { Ok(()) }
    }
}

/// Whether a part begins where ours ends.
fn continues(response: &Response<Incoming>, received: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let first = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok());
    response.status() == StatusCode::PARTIAL_CONTENT && first == Some(received)
}

impl Arriving<'_> {
    async fn take(&mut self, data: &[u8]) -> Result<(), PullError> {
        let len = data.len() as u64;
        if self.received + len > self.size {
            let (what, found) = (self.what.clone(), self.received + len);
            return Err(PullError::TooLarge { what, found, max: self.size, unit: "bytes or more" });
        }
        self.file.write_all(data).await.map_err(PullError::Disk)?;
        self.hasher.update(data);
        self.received += len;
        self.counted.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    async fn restart(&mut self) -> Result<(), PullError> {
        self.file.flush().await.map_err(PullError::Disk)?;
        self.file.set_len(0).await.map_err(PullError::Disk)?;
        self.file.seek(SeekFrom::Start(0)).await.map_err(PullError::Disk)?;
        self.hasher = Sha256::new();
        self.counted.fetch_sub(self.received, Ordering::Relaxed);
        self.received = 0;
        Ok(())
    }

    fn check(&self) -> Result<(), PullError> {
        let found = Digest::finish(self.hasher.clone());
        if found == self.digest {
            return Ok(());
        }
        let error = PullError::DigestMismatch { what: self.digest, found };
        tracing::debug!(error = &error as &dyn Error, is_resumed = self.is_resumed, "a blob is damaged");
        Err(error)
    }

    fn cut_off(&self, client: &Client) -> PullError {
        let (host, what) = (client.host().to_owned(), self.what.clone());
        PullError::CutOff { host, what, received: self.received, size: self.size }
    }
}
