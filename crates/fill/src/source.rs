//! Where packs and blob indexes come from. The engine knows nothing else of the store.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bytes::Bytes;
use dsec_image::layer::{BlobId, PackId};

/// Why something could not be fetched.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FetchError {
    /// The store answers and does not have it.
    #[error("the store has no {what}")]
    Missing {
        /// What was asked for.
        what: String,
    },
    /// The store did not answer, or not with what was asked for; it may the next time.
    #[error("{what} cannot be fetched: {why}")]
    Unreachable {
        /// What was asked for.
        what: String,
        /// What came instead.
        why: String,
    },
}

/// A fetch under way.
pub type Fetching<'a> = Pin<Box<dyn Future<Output = Result<Bytes, FetchError>> + Send + 'a>>;

/// A store, as the engine sees it. Nothing it gives is trusted: the engine checks every byte. One call is one
/// try; the engine repeats, and may drop a call that takes too long.
pub trait PackSource: Send + Sync + 'static {
    /// These bytes of a pack, all of them.
    fn fetch(&self, pack: &PackId, range: Range<u64>) -> Fetching<'_>;

    /// A blob's encoded index.
    fn index(&self, blob: &BlobId) -> Fetching<'_>;
}

/// A store that is a directory, with the layer store's names: `packs/AA/ID`, where AA begins the ID, and `blobs/ID`.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// The store in this directory.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    fn read(
        &self,
        file: PathBuf,
        read: impl FnOnce(&Path) -> io::Result<Vec<u8>> + Send + 'static,
    ) -> Fetching<'_> {
        Box::pin(async move {
            let what = file.display().to_string();
            let done = tokio::task::spawn_blocking(move || read(&file)).await;
            match done.unwrap_or_else(|panicked| Err(io::Error::other(panicked))) {
                Ok(bytes) => Ok(bytes.into()),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Err(FetchError::Missing { what }),
                Err(e) => Err(FetchError::Unreachable { what, why: e.to_string() }),
            }
        })
    }
}

impl PackSource for Directory {
    fn fetch(&self, pack: &PackId, range: Range<u64>) -> Fetching<'_> {
        let id = pack.to_string();
        self.read(self.path.join("packs").join(&id[..2]).join(id), move |file| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            std::fs::File::open(file)?.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        })
    }

    fn index(&self, blob: &BlobId) -> Fetching<'_> {
        self.read(self.path.join("blobs").join(blob.to_string()), |file| std::fs::read(file))
    }
}
