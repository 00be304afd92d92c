//! Where a cluster's authority, its tokens and its nodes are kept.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsec_pki::files::{make_private_dir, read, write_private};
use dsec_pki::{AuthorityPem, PkiError};

use super::known::Known;

/// Why what is kept cannot be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// A file.
    #[error("what the cluster knows cannot be read or written")]
    File(#[source] Arc<PkiError>),
    /// The lock.
    #[error("{path} cannot be locked")]
    Lock {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Arc<io::Error>,
    },
    /// It is not what was written.
    #[error("{path} is not what control writes there")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Arc<serde_json::Error>,
    },
}

impl From<PkiError> for StoreError {
    fn from(error: PkiError) -> Self {
        Self::File(Arc::new(error))
    }
}

/// Keeps what a cluster knows. Several servers may share one; calls block.
pub trait ClusterStore: Send + Sync + 'static {
    /// The authority, once it is made.
    ///
    /// # Errors
    /// It cannot be read.
    fn authority(&self) -> Result<Option<AuthorityPem>, StoreError>;

    /// Keeps an authority, unless there is one. True: it is this one now.
    ///
    /// # Errors
    /// It cannot be written.
    fn found(&self, made: &AuthorityPem) -> Result<bool, StoreError>;

    /// What is known.
    ///
    /// # Errors
    /// It cannot be read.
    fn read(&self) -> Result<Known, StoreError>;

    /// Changes what is known: no two changes at a time, and it is kept when this returns. What the change leaves as it was is not written.
    ///
    /// # Errors
    /// It cannot be read or written; then nothing has changed.
    fn change(&self, change: &mut dyn FnMut(&mut Known)) -> Result<Known, StoreError>;

    /// What differs after every change.
    fn version(&self) -> Option<String>;
}

/// Files of a directory that nobody else reads: `ca.pem`, `ca.key`, `cluster.json`.
pub struct FileStore {
    dir: PathBuf,
}

impl FileStore {
    /// A store in this directory; nothing is made yet.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// One at a time, over all processes.
    fn lock(&self) -> Result<File, StoreError> {
        make_private_dir(&self.dir)?;
        let path = self.path("lock");
        let failed = |source: io::Error| StoreError::Lock { path: path.clone(), source: Arc::new(source) };
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        file.lock().map_err(failed)?;
        Ok(file)
    }
}

impl ClusterStore for FileStore {
    fn authority(&self) -> Result<Option<AuthorityPem>, StoreError> {
        if !self.path("ca.pem").exists() {
            return Ok(None);
        }
        Ok(Some(AuthorityPem { certificate: read(&self.path("ca.pem"))?, key: read(&self.path("ca.key"))? }))
    }

    fn found(&self, made: &AuthorityPem) -> Result<bool, StoreError> {
        let _lock = self.lock()?;
        if self.path("ca.pem").exists() {
            return Ok(false);
        }
        // The certificate last: where it is, the key is.
        write_private(&self.path("ca.key"), made.key.as_bytes())?;
        write_private(&self.path("ca.pem"), made.certificate.as_bytes())?;
        Ok(true)
    }

    fn read(&self) -> Result<Known, StoreError> {
        let path = self.path("cluster.json");
        if !path.exists() {
            return Ok(Known::default());
        }
        serde_json::from_str(&read(&path)?)
            .map_err(|source| StoreError::Parse { path, source: Arc::new(source) })
    }

    fn change(&self, change: &mut dyn FnMut(&mut Known)) -> Result<Known, StoreError> {
        let _lock = self.lock()?;
        let before = self.read()?;
        let mut known = before.clone();
        change(&mut known);
        if known != before {
            let path = self.path("cluster.json");
            let text = serde_json::to_string_pretty(&known)
                .map_err(|source| StoreError::Parse { path: path.clone(), source: Arc::new(source) })?;
            write_private(&path, text.as_bytes())?;
        }
        Ok(known)
    }

    fn version(&self) -> Option<String> {
        let file = std::fs::metadata(self.path("cluster.json")).ok()?;
        Some(format!("{} {} {}.{}", file.ino(), file.size(), file.mtime(), file.mtime_nsec()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use dsec_pki::Authority;

    use super::super::known::TokenRecord;
    use super::*;

    fn token(number: u64) -> (String, TokenRecord) {
        (number.to_string(), TokenRecord { node: None, expires_ms: number, used: None })
    }

    #[test]
    fn changes_of_several_servers_do_not_undo_each_other() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for server in 0..4 {
                let store = FileStore::new(dir.path());
                scope.spawn(move || {
                    for number in 0..25 {
                        let (name, record) = token(server * 100 + number);
                        store
                            .change(&mut |known| drop(known.tokens.insert(name.clone(), record.clone())))
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(FileStore::new(dir.path()).read().unwrap().tokens.len(), 100);
    }

    #[test]
    fn a_store_has_one_authority_and_shows_its_files_to_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cluster");
        let store = FileStore::new(&root);
        assert!(store.authority().unwrap().is_none());
        let (one, two) = (Authority::make("one").unwrap(), Authority::make("two").unwrap());
        assert!(store.found(&one).unwrap());
        assert!(!store.found(&two).unwrap());
        assert_eq!(store.authority().unwrap().unwrap().certificate, one.certificate);
        let before = store.version();
        let (name, record) = token(1);
        store.change(&mut |known| drop(known.tokens.insert(name.clone(), record.clone()))).unwrap();
        let after = store.version();
        assert_ne!(before, after);
        store.change(&mut |_| {}).unwrap();
        assert_eq!(store.version(), after, "what did not change was written");
        assert_eq!(root.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        for name in ["ca.key", "ca.pem", "cluster.json"] {
            assert_eq!(root.join(name).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn a_file_that_is_not_ours_is_named_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cluster.json"), "{\"nodes\": 7}").unwrap();
        let store = FileStore::new(dir.path());
        assert!(store.read().unwrap_err().to_string().contains("cluster.json"));
        assert!(store.change(&mut |known| known.nodes.clear()).is_err());
        assert_eq!(std::fs::read_to_string(dir.path().join("cluster.json")).unwrap(), "{\"nodes\": 7}");
    }
}
