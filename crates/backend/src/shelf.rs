//! Directories that have served and are used again.
//!
//! Making files costs where many were removed lately: ext4 without a journal passes over every inode that was freed in the
//! last minutes before it takes one. A sandbox would make and remove four on the state disk; from here it takes the
//! directories of one that has ended, with the files in them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Directories that are kept: as many as may end before as many start.
const KEPT_MAX: usize = 128;

/// Directories of one kind, none of which has anything left of who used it.
#[derive(Debug)]
pub struct Shelf {
    root: PathBuf,
    next: AtomicU64,
    kept: Mutex<Vec<PathBuf>>,
}

impl Shelf {
    /// An empty one at `root`. What an earlier process left there is removed, since it may not have come to empty it.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(root: PathBuf) -> io::Result<Self> {
        let shelf = Self { root, next: AtomicU64::new(0), kept: Mutex::default() };
        shelf.remove()?;
        fs::create_dir_all(&shelf.root)?;
        Ok(shelf)
    }

    /// Moves a directory to `to`, where there is nothing. Returns whether there was one to move.
    pub fn take(&self, to: &Path) -> bool {
        let spare = self.kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.is_some_and(|spare| fs::rename(spare, to).is_ok())
    }

    /// Takes a directory away from where it is, has it emptied and keeps it. Returns whether it did: where enough are kept
    /// already, it stays as it is.
    ///
    /// # Errors
    /// The disk's, and those of `empty`. The directory is then gone from its place, and not used again.
    pub fn put(&self, from: &Path, empty: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<bool> {
        if self.kept.lock().unwrap_or_else(PoisonError::into_inner).len() >= KEPT_MAX {
            return Ok(false);
        }
        let place = self.root.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        fs::rename(from, &place)?;
        empty(&place)?;
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        Ok(true)
    }

    /// Removes all that is kept, and the shelf.
    ///
    /// # Errors
    /// The disk's.
    pub fn remove(&self) -> io::Result<()> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        match fs::remove_dir_all(&self.root) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_serves_again_without_what_was_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let shelf = Shelf::open(dir.path().join("shelf")).unwrap();
        assert!(!shelf.take(&first), "nothing is kept yet");
        fs::create_dir(&first).unwrap();
        fs::write(first.join("file"), "of the first").unwrap();
        let inode = inode(&first.join("file"));
        assert!(shelf.put(&first, |at| fs::write(at.join("file"), "")).unwrap());
        assert!(!first.exists());
        assert!(shelf.take(&second));
        assert_eq!(
            (fs::read(second.join("file")).unwrap(), self::inode(&second.join("file"))),
            (Vec::new(), inode)
        );
        assert!(!shelf.take(&first), "it is in use");
    }

    #[test]
    fn what_could_not_be_emptied_is_never_given_out() {
        let dir = tempfile::tempdir().unwrap();
        let used = dir.path().join("used");
        let shelf = Shelf::open(dir.path().join("shelf")).unwrap();
        fs::create_dir(&used).unwrap();
        let error = shelf.put(&used, |_| Err(io::Error::other("no"))).unwrap_err();
        assert_eq!((error.to_string().as_str(), used.exists()), ("no", false));
        assert!(!shelf.take(&used));
        // A process that was killed in the midst of it leaves the same.
        let next = Shelf::open(dir.path().join("shelf")).unwrap();
        assert_eq!(fs::read_dir(dir.path().join("shelf")).unwrap().count(), 0);
        next.remove().unwrap();
        assert!(!dir.path().join("shelf").exists());
    }

    #[test]
    fn it_keeps_no_more_than_its_most() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(dir.path().join("shelf")).unwrap();
        let kept = (0..KEPT_MAX + 2).filter(|number| {
            let used = dir.path().join(number.to_string());
            fs::create_dir(&used).unwrap();
            let kept = shelf.put(&used, |_| Ok(())).unwrap();
            assert_ne!(kept, used.exists());
            kept
        });
        assert_eq!(kept.count(), KEPT_MAX);
    }

    fn inode(path: &Path) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
    }
}
