//! The cluster's own keys, which may do everything in their project, in a JSON file: `{"keys": [{"id", "project", "sha256", "created_ms", "name"}]}`.
//!
//! A key is `dsec_` and 32 random bytes in base64url. Because it has 256 bits of entropy, one
//! SHA-256 is enough to keep: there is nothing to guess that a slow hash would protect.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_iam::Caller;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::Principal;

/// How often the file is looked at, at most: a revoked key works this much longer, and a busy
/// server does one `stat` a second instead of one a request.
pub const RECHECK: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
struct KeyFile {
    keys: Vec<KeyEntry>,
}

/// One key as written. Fields we do not know are let through here, unlike in configuration: the
/// file is written by `dsec`, which may be newer.
#[derive(Deserialize)]
struct KeyEntry {
    id: String,
    project: String,
    sha256: String,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the key file {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not JSON of the right shape.
    #[error("the key file {path} is not valid")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A key's entry cannot be used.
    #[error("key {id:?} of the key file {path}: {what}")]
    Entry {
        /// Which file.
        path: PathBuf,
        /// The entry's id.
        id: String,
        /// What is wrong with it.
        what: &'static str,
    },
}

struct Key {
    sha256: [u8; 32],
    owner: Arc<Principal>,
}

/// What tells one version of the file from another. The inode catches a file that was renamed
/// over the old one within the clock's grain.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

struct Loaded {
    keys: Arc<Vec<Key>>,
    version: Option<Version>,
    looked: Instant,
}

/// Keys of a file, read again when it changes.
pub struct FileKeys {
    path: PathBuf,
    recheck: Duration,
    loaded: Mutex<Loaded>,
}

impl FileKeys {
    /// Reads the file. `recheck` is [`RECHECK`] outside tests.
    ///
    /// # Errors
    /// The file is missing, unreadable or malformed: at the start that is a mistake to show, not
    /// to run with.
    pub fn open(path: &Path, recheck: Duration) -> Result<Self, KeyFileError> {
        let version =
            version_of(path).map_err(|source| KeyFileError::Read { path: path.to_owned(), source })?;
        let keys = Arc::new(read(path)?);
        let loaded = Loaded { keys, version: Some(version), looked: Instant::now() };
        Ok(Self { path: path.to_owned(), recheck, loaded: Mutex::new(loaded) })
    }

    /// The keys in force. Blocks for a `stat` at most once per `recheck`, and for reading a small
    /// file when it has changed.
    ///
    /// A file that is gone means no keys: who deletes it wants nobody in. A file that is malformed
    /// keeps the keys of before: it is a slip, or half of a write, and must not lock everyone out.
    fn current(&self) -> Arc<Vec<Key>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.looked.elapsed() < self.recheck {
            return Arc::clone(&loaded.keys);
        }
        loaded.looked = Instant::now();
        let version = version_of(&self.path).ok();
        if version == loaded.version {
            return Arc::clone(&loaded.keys);
        }
        loaded.version = version;
        let read = if version.is_some() { read(&self.path) } else { Ok(Vec::new()) };
        match read {
            Ok(keys) => {
                tracing::info!(path = %self.path.display(), keys = keys.len(), "key file read again");
                loaded.keys = Arc::new(keys);
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::error!(%error, cause, "key file not taken; the keys of before stay in force");
            }
        }
        Arc::clone(&loaded.keys)
    }
}

impl FileKeys {
    /// The owner of a key; none when nobody issued it or it was revoked.
    pub fn find(&self, key: &str) -> Option<Arc<Principal>> {
        find_in(&self.current(), key)
    }
}

/// Compares with every key, each in constant time, so that the time taken says nothing about how
/// close a guess came.
fn find_in(keys: &[Key], key: &str) -> Option<Arc<Principal>> {
    let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
    let mut found = None;
    for candidate in keys {
        if same(&candidate.sha256, &given) {
            found = Some(&candidate.owner);
        }
    }
    found.cloned()
}

fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0, |seen, (x, y)| seen | (x ^ y));
    std::hint::black_box(difference) == 0
}

fn version_of(path: &Path) -> io::Result<Version> {
    let meta = std::fs::metadata(path)?;
    Ok(Version { inode: meta.ino(), size: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) })
}

fn read(path: &Path) -> Result<Vec<Key>, KeyFileError> {
    let bytes = std::fs::read(path).map_err(|source| KeyFileError::Read { path: path.to_owned(), source })?;
    let file: KeyFile = serde_json::from_slice(&bytes)
        .map_err(|source| KeyFileError::Parse { path: path.to_owned(), source })?;
    let entry = |entry: KeyEntry| {
        let bad = |what| KeyFileError::Entry { path: path.to_owned(), id: entry.id.clone(), what };
        let sha256 = hex(&entry.sha256).ok_or_else(|| bad("sha256 is not 64 hex digits"))?;
        let is_visible =
            (1..=128).contains(&entry.id.len()) && entry.id.bytes().all(|b| b.is_ascii_graphic());
        if !is_visible {
            return Err(bad("id is not 1-128 visible ASCII characters"));
        }
        let project = entry.project.parse().map_err(|_| bad("project is none, such as root or root/team"))?;
        Ok(Key { sha256, owner: Arc::new(Principal::new(Caller::cluster(&entry.id, project))) })
    };
    file.keys.into_iter().map(entry).collect()
}

fn hex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, key: &str) -> String {
        let digest = Sha256::digest(key.as_bytes());
        let sha256: String = digest.iter().map(|b| format!("{b:02x}")).collect();
        format!(r#"{{"id":"{id}","project":"root","sha256":"{sha256}","created_ms":1,"name":"n"}}"#)
    }

    fn file(lines: &[String]) -> String {
        format!(r#"{{"keys":[{}]}}"#, lines.join(","))
    }

    fn owner(keys: &FileKeys, key: &str) -> Option<String> {
        keys.find(key).map(|owner| owner.caller.key_id.clone())
    }

    #[test]
    fn a_change_of_the_file_takes_keys_in_and_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        std::fs::write(&path, file(&[line("k1", "dsec_a"), line("k2", "dsec_b")])).unwrap();
        let keys = FileKeys::open(&path, Duration::ZERO).unwrap();
        assert_eq!(owner(&keys, "dsec_a").unwrap(), "k1");
        assert_eq!(owner(&keys, "dsec_b").unwrap(), "k2");
        assert_eq!(owner(&keys, "dsec_c"), None);

        std::fs::write(&path, file(&[line("k2", "dsec_b"), line("k3", "dsec_c"), line("k4", "x")])).unwrap();
        assert_eq!(owner(&keys, "dsec_a"), None);
        assert_eq!(owner(&keys, "dsec_c").unwrap(), "k3");

        std::fs::write(&path, "{").unwrap();
        assert_eq!(owner(&keys, "dsec_c").unwrap(), "k3", "a malformed file took the keys away");

        std::fs::remove_file(&path).unwrap();
        assert_eq!(owner(&keys, "dsec_c"), None, "a key outlived its file");
    }

    #[test]
    fn between_two_looks_the_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        std::fs::write(&path, file(&[line("k1", "dsec_a")])).unwrap();
        let keys = FileKeys::open(&path, Duration::from_secs(3600)).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(owner(&keys, "dsec_a").is_some());
    }

    #[test]
    fn a_file_that_cannot_be_used_is_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        assert!(matches!(FileKeys::open(&path, RECHECK), Err(KeyFileError::Read { .. })));
        for (text, says) in [
            ("{}".to_owned(), "not valid"),
            (file(&[line("k1", "a").replace("sha256\":\"", "sha256\":\"z")]), "64 hex"),
            (file(&[line("k 1", "a")]), "visible"),
            (file(&[line("k1", "a").replace("root", "rl")]), "project is none"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = FileKeys::open(&path, RECHECK).err().unwrap().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
