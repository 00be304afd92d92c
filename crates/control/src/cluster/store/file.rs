//! Files of one server.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsec_pki::AuthorityPem;
use dsec_pki::files::{make_private_dir, read, write_private};

use super::{Change, ClusterStore, StoreError, Storing};
use crate::cluster::Known;

/// What is in a directory that nobody else reads: `ca.pem`, `ca.key`, `cluster.json`. Calls block.
struct Files {
    dir: PathBuf,
}

/// Keeps what a cluster knows in files of one server.
pub struct FileStore {
    files: Arc<Files>,
}

impl Files {
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

    fn known(&self) -> Result<Known, StoreError> {
        let path = self.path("cluster.json");
        if !path.exists() {
            return Ok(Known::default());
        }
        serde_json::from_str(&read(&path)?).map_err(|source| bad(&path, source))
    }

    fn change(&self, change: Change) -> Result<Known, StoreError> {
        let _lock = self.lock()?;
        let before = self.known()?;
        let mut known = before.clone();
        change(&mut known);
        if known != before {
            let path = self.path("cluster.json");
            let text = serde_json::to_string_pretty(&known).map_err(|source| bad(&path, source))?;
            write_private(&path, text.as_bytes())?;
        }
        Ok(known)
    }

    fn version(&self) -> String {
        let Ok(file) = std::fs::metadata(self.path("cluster.json")) else { return String::new() };
        format!("{} {} {}.{}", file.ino(), file.size(), file.mtime(), file.mtime_nsec())
    }
}

fn bad(path: &Path, source: serde_json::Error) -> StoreError {
    StoreError::Parse { place: path.display().to_string(), source: Arc::new(source) }
}

impl FileStore {
    /// A store in this directory; nothing is made yet.
    pub fn new(dir: &Path) -> Self {
        Self { files: Arc::new(Files { dir: dir.to_owned() }) }
    }

    fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, StoreError> + Send + 'static,
    ) -> Storing<'_, T> {
        let files = Arc::clone(&self.files);
        Box::pin(async move {
            let done = tokio::task::spawn_blocking(move || work(&files)).await;
            done.unwrap_or(Err(StoreError::BrokenOff))
        })
    }
}

impl ClusterStore for FileStore {
    fn authority(&self) -> Storing<'_, Option<AuthorityPem>> {
        self.blocking(Files::authority)
    }

    fn found(&self, made: AuthorityPem) -> Storing<'_, bool> {
        self.blocking(move |files| files.found(&made))
    }

    fn read(&self) -> Storing<'_, Known> {
        self.blocking(Files::known)
    }

    fn change(&self, change: Change) -> Storing<'_, Known> {
        self.blocking(move |files| files.change(change))
    }

    fn version(&self) -> Storing<'_, String> {
        self.blocking(|files| Ok(files.version()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use dsec_pki::Authority;

    use super::*;
    use crate::cluster::TokenRecord;

    fn add(number: u64) -> Change {
        let record = TokenRecord { node: None, expires_ms: number, used: None };
        Box::new(move |known| drop(known.tokens.insert(number.to_string(), record)))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn changes_of_several_servers_do_not_undo_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let servers = (0..4).map(|server| {
            let store = FileStore::new(dir.path());
            tokio::spawn(async move {
                for number in 0..25 {
                    store.change(add(server * 100 + number)).await.unwrap();
                }
            })
        });
        for server in servers.collect::<Vec<_>>() {
            server.await.unwrap();
        }
        assert_eq!(FileStore::new(dir.path()).read().await.unwrap().tokens.len(), 100);
    }

    #[tokio::test]
    async fn a_store_has_one_authority_and_shows_its_files_to_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cluster");
        let store = FileStore::new(&root);
        assert!(store.authority().await.unwrap().is_none());
        let (one, two) = (Authority::make("one").unwrap(), Authority::make("two").unwrap());
        assert!(store.found(one.clone()).await.unwrap());
        assert!(!store.found(two).await.unwrap());
        assert_eq!(store.authority().await.unwrap().unwrap().certificate, one.certificate);
        let before = store.version().await.unwrap();
        store.change(add(1)).await.unwrap();
        let after = store.version().await.unwrap();
        assert_ne!(before, after);
        store.change(Box::new(|_| {})).await.unwrap();
        assert_eq!(store.version().await.unwrap(), after, "what did not change was written");
        assert_eq!(root.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        for name in ["ca.key", "ca.pem", "cluster.json"] {
            assert_eq!(root.join(name).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
    }

    #[tokio::test]
    async fn a_file_that_is_not_ours_is_named_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cluster.json"), "{\"nodes\": 7}").unwrap();
        let store = FileStore::new(dir.path());
        assert!(store.read().await.unwrap_err().to_string().contains("cluster.json"));
        assert!(store.change(Box::new(|known| known.nodes.clear())).await.is_err());
        assert_eq!(std::fs::read_to_string(dir.path().join("cluster.json")).unwrap(), "{\"nodes\": 7}");
    }
}
