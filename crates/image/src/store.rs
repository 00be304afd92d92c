//! The node's images: one directory, shared by all processes that open it.
//!
//! ```text
//! lock                        flock: held while names or blobs change, never while importing
//! blobs/<sha256>.erofs        images, by content
//! images/<name>.json          records, by name
//! tmp/import-<random>/        one per running import; its own `lock` tells a live one from a dead
//! ```
//!
//! A record is visible only after its blob is on disk, and a blob goes only after its last record,
//! so a record always has its blob. What a killed process leaves behind is at most a directory in
//! `tmp` and a blob without a record; [`ImageStore::open`] clears both.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::error::{ImportError, StoreError};
use crate::intake::{self, Imported, Meter};
use crate::limits::{ImportLimits, ImportPhase, ImportProgress};
use crate::name::ImageName;
use crate::record::{ImageRecord, Removed};

/// Bytes hashed at a time.
const HASH_BUFFER: usize = 1 << 20;

/// The images of a node. Cheap to open; safe to use from several threads and processes at once.
///
/// The directory must lie on a plain file system (ext4, XFS): file-backed EROFS mounts refuse
/// files of overlayfs and of EROFS itself.
#[derive(Debug)]
pub struct ImageStore {
    dir: PathBuf,
}

impl ImageStore {
    /// Opens the store in `dir`, making it if needed, and clears what dead imports left there.
    ///
    /// # Errors
    /// [`StoreError`] when the directory cannot be made, read or cleared.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let store = Self { dir: dir.into() };
        for dir in [store.blobs(), store.images(), store.tmp()] {
            fs::create_dir_all(&dir).map_err(|e| StoreError::io("create", &dir, e))?;
        }
        let _lock = store.lock()?;
        store.clear_tmp()?;
        store.clear_blobs()?;
        Ok(store)
    }

    /// Imports the archive `source` under `name`, in place of any image that has the name.
    /// Blocks until the image is on disk; `progress` is called every few megabytes.
    ///
    /// A running sandbox keeps the blob it has mounted, also when this import unlinks it.
    ///
    /// # Errors
    /// [`ImportError`]; the store is then as it was before.
    pub fn import(
        &self,
        name: &ImageName,
        source: &Path,
        limits: &ImportLimits,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<ImageRecord, ImportError> {
        let started = std::time::Instant::now();
        let work = self.work_dir().map_err(ImportError::Store)?;
        let mut meter = Meter::new(progress);
        let imported = intake::import(source, work.dir.path(), limits, &mut meter)?;
        meter.phase(ImportPhase::Sealing);
        let digest = seal(&imported).map_err(|e| ImportError::write(&imported.path, e))?;
        let Imported { path, summary, content_bytes, config, .. } = imported;
        let record = ImageRecord {
            name: name.clone(),
            digest,
            size_bytes: summary.size_bytes,
            content_bytes,
            files: summary.inodes,
            created_unix_ms: now_unix_ms(),
            source: source.display().to_string(),
            config,
        };
        self.publish(&record, &path, &work).map_err(ImportError::Store)?;
        tracing::info!(
            image = %record.name,
            digest = record.digest,
            size_bytes = record.size_bytes,
            elapsed_ms = started.elapsed().as_millis() as u64,
            "image imported"
        );
        Ok(record)
    }

    /// All images, by name.
    ///
    /// # Errors
    /// [`StoreError`] when a record cannot be read.
    pub fn list(&self) -> Result<Vec<ImageRecord>, StoreError> {
        let dir = self.images();
        let mut records = Vec::new();
        for path in entries(&dir)? {
            if path.extension().is_some_and(|extension| extension == "json") {
                records.extend(read_record(&path)?);
            }
        }
        records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(records)
    }

    /// The image of that name, if there is one.
    ///
    /// # Errors
    /// [`StoreError`] when its record cannot be read.
    pub fn get(&self, name: &ImageName) -> Result<Option<ImageRecord>, StoreError> {
        read_record(&self.record_path(name))
    }

    /// Removes a name, and its blob if no other name has it. The caller makes sure that nobody is
    /// about to mount the blob; who has mounted it keeps it.
    ///
    /// # Errors
    /// [`StoreError`]. A name that does not exist is no error.
    pub fn remove(&self, name: &ImageName) -> Result<Removed, StoreError> {
        let _lock = self.lock()?;
        let path = self.record_path(name);
        let Some(record) = read_record(&path)? else {
            return Ok(Removed { record: None, blob_deleted: false });
        };
        fs::remove_file(&path).map_err(|e| StoreError::io("delete", &path, e))?;
        sync_dir(&self.images())?;
        let blob_deleted = self.delete_if_unused(&record.digest)?;
        Ok(Removed { record: Some(record), blob_deleted })
    }

    /// Where the blob with this digest is, or would be.
    pub fn blob_path(&self, digest: &str) -> PathBuf {
        self.blobs().join(format!("{digest}.erofs"))
    }

    fn record_path(&self, name: &ImageName) -> PathBuf {
        self.images().join(format!("{}.json", name.file_stem()))
    }

    fn blobs(&self) -> PathBuf {
        self.dir.join("blobs")
    }

    fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    fn tmp(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// Keeps other threads and processes from changing names and blobs until dropped.
    fn lock(&self) -> Result<File, StoreError> {
        let path = self.dir.join("lock");
        let failed = |e| StoreError::io("lock", &path, e);
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        file.lock().map_err(failed)?;
        Ok(file)
    }

    /// A directory for one import. Made under the store's lock, so that nobody takes it for a dead
    /// one before its own lock is held.
    fn work_dir(&self) -> Result<WorkDir, StoreError> {
        let _lock = self.lock()?;
        let tmp = self.tmp();
        let dir = tempfile::Builder::new()
            .prefix("import-")
            .tempdir_in(&tmp)
            .map_err(|e| StoreError::io("create a directory in", &tmp, e))?;
        let path = dir.path().join("lock");
        let lock = File::create(&path).map_err(|e| StoreError::io("create", &path, e))?;
        lock.lock().map_err(|e| StoreError::io("lock", &path, e))?;
        Ok(WorkDir { dir, _lock: lock })
    }

    /// Makes a sealed image visible. Blob first, record second: a crash between the two leaves a
    /// blob without a record, which the next start clears.
    fn publish(&self, record: &ImageRecord, image: &Path, work: &WorkDir) -> Result<(), StoreError> {
        let draft = work.dir.path().join("record.json");
        write_record(record, &draft)?;
        let blob = self.blob_path(&record.digest);
        let path = self.record_path(&record.name);
        let _lock = self.lock()?;
        let replaced = match read_record(&path) {
            Ok(old) => old,
            // A damaged record is mended by importing again, which is what its error says.
            Err(StoreError::BadRecord { .. }) => None,
            Err(e) => return Err(e),
        };
        // One of another length is none that this store wrote; the new one takes its place.
        let is_new = fs::metadata(&blob).map_or(true, |found| found.len() != record.size_bytes);
        if is_new {
            fs::rename(image, &blob).map_err(|e| StoreError::io("publish", &blob, e))?;
            sync_dir(&self.blobs())?;
        }
        let published = fs::rename(&draft, &path).map_err(|e| StoreError::io("publish", &path, e));
        if let Err(e) = published {
            if is_new {
                let _ = fs::remove_file(&blob);
            }
            return Err(e);
        }
        sync_dir(&self.images())?;
        if let Some(old) = replaced.filter(|old| old.digest != record.digest) {
            self.delete_if_unused(&old.digest)?;
        }
        Ok(())
    }

    /// Deletes a blob that no record has. With the lock held.
    fn delete_if_unused(&self, digest: &str) -> Result<bool, StoreError> {
        if self.list()?.iter().any(|record| record.digest == digest) {
            return Ok(false);
        }
        let blob = self.blob_path(digest);
        match fs::remove_file(&blob) {
            Ok(()) => {
                sync_dir(&self.blobs())?;
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(StoreError::io("delete", &blob, e)),
        }
    }

    fn clear_tmp(&self) -> Result<(), StoreError> {
        for path in entries(&self.tmp())? {
            let alive = match File::open(path.join("lock")) {
                Ok(lock) => matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock)),
                Err(_) => false,
            };
            if !alive {
                let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|e| StoreError::io("clear", &path, e))?;
                tracing::info!(path = %path.display(), "leftover of a dead import cleared");
            }
        }
        Ok(())
    }

    fn clear_blobs(&self) -> Result<(), StoreError> {
        let used: Vec<PathBuf> = match self.list() {
            Ok(records) => records.iter().map(|record| self.blob_path(&record.digest)).collect(),
            Err(StoreError::BadRecord { path, .. }) => {
                // Its blob cannot be told from one without a record, so all stay.
                tracing::warn!(path = %path.display(), "image record is damaged, unused blobs are kept");
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        for path in entries(&self.blobs())? {
            if !used.contains(&path) {
                fs::remove_file(&path).map_err(|e| StoreError::io("clear", &path, e))?;
                tracing::info!(path = %path.display(), "blob without a record cleared");
            }
        }
        Ok(())
    }
}

/// The directory of a running import; gone with it.
struct WorkDir {
    dir: TempDir,
    _lock: File,
}

/// Brings the image to disk and hashes it, at the same time: one waits for the disk, the other
/// computes.
fn seal(imported: &Imported) -> io::Result<String> {
    std::thread::scope(|scope| {
        let synced = scope.spawn(|| imported.file.sync_all());
        let digest = hash_file(&imported.path);
        synced.join().unwrap_or_else(|_| Err(io::Error::other("the syncing thread panicked")))?;
        digest
    })
}

fn hash_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; HASH_BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(intake::hex(&hash.finalize())),
            got => hash.update(&buffer[..got]),
        }
    }
}

fn write_record(record: &ImageRecord, path: &Path) -> Result<(), StoreError> {
    let write = || -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(&serde_json::to_vec_pretty(record).map_err(io::Error::other)?)?;
        file.sync_all()
    };
    write().map_err(|e| StoreError::io("write", path, e))
}

fn read_record(path: &Path) -> Result<Option<ImageRecord>, StoreError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|source| StoreError::BadRecord { path: path.to_owned(), source }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(StoreError::io("read", path, e)),
    }
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let failed = |e| StoreError::io("list", dir, e);
    fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()).map_err(failed)).collect()
}

fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| StoreError::io("sync", dir, e))
}

fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
