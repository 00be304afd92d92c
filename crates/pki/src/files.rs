//! Files with keys in them: readable by their owner alone, and never half written.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::PkiError;

/// Writes a file of mode 0600, whole or not at all, and durably.
///
/// # Errors
/// The directory cannot be written.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        // An old file of that name keeps its mode.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        // The rename is in the directory.
        path.parent().map_or(Ok(()), |dir| std::fs::File::open(dir)?.sync_all())
    };
    write().map_err(|source| {
        let _ = std::fs::remove_file(&part);
        PkiError::File { what: "write", path: path.to_owned(), source }
    })
}

/// Makes a directory of mode 0700, and those above it that are missing.
///
/// # Errors
/// It cannot be made.
pub fn make_private_dir(dir: &Path) -> Result<(), PkiError> {
    let failed = |source| PkiError::File { what: "write", path: dir.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    std::fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(failed)
}

/// Reads a text.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> Result<String, PkiError> {
    std::fs::read_to_string(path).map_err(|source| PkiError::File {
        what: "read",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_others_could_read_is_private_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        write_private(&path, b"new").unwrap();
        assert_eq!(read(&path).unwrap(), "new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1, "a part was left");
    }
}
