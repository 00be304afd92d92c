//! Content of layers without a device: blobs are plain files that stay where they are handed over to.

use std::path::{Path, PathBuf};

use dsec_edge::layers::{Calling, Content};
use dsec_fill::client::{ClientError, Opened};
use dsec_fill::protocol::Stats;
use dsec_fill::trace::Trace;
use dsec_image::layer::BlobId;

pub struct FakeContent {
    dir: PathBuf,
}

impl FakeContent {
    pub fn new(dir: &Path) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        Self { dir: dir.to_owned() }
    }

    fn path(&self, blob: BlobId) -> PathBuf {
        self.dir.join(blob.to_string())
    }
}

impl Content for FakeContent {
    fn open(&self, blob: BlobId) -> Calling<'_, Opened> {
        let path = self.path(blob);
        Box::pin(async move {
            let size_bytes = path.metadata().map(|meta| meta.len()).map_err(|error| {
                ClientError::Refused { message: format!("no content of {blob}: {error}"), again: false }
            })?;
            Ok(Opened { path, direct: true, size_bytes })
        })
    }

    fn close(&self, _: BlobId) -> Calling<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool> {
        Box::pin(async move {
            std::fs::rename(file, self.path(blob)).unwrap();
            Ok(true)
        })
    }

    fn prefetch<'a>(&'a self, _: BlobId, _: Option<&'a Trace>) -> Calling<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn trace(&self, _: BlobId) -> Calling<'_, Trace> {
        Box::pin(async { Ok(Trace::default()) })
    }

    fn stats(&self) -> Calling<'_, Stats> {
        let stats = Stats { worker_pid: 1, used_bytes: 0, known_blobs: 0, blobs: Vec::new() };
        Box::pin(async { Ok(stats) })
    }

    fn shut_down(&self) -> Calling<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}
