//! Room on the disk for what waits to become a layer: uploads and fetched archives.

use std::io;
use std::path::Path;

/// Disk that is left free, bytes: sandboxes write while it fills.
pub(super) const RESERVE: u64 = 512 << 20;

/// Whether the disk of `file`, which need not be there yet, takes so many more bytes.
///
/// # Errors
/// [`io::ErrorKind::StorageFull`] if not; the disk cannot be asked.
pub fn room_for(file: &Path, bytes: u64) -> io::Result<()> {
    let free = free_bytes(file.parent().unwrap_or(file))?;
    if free < RESERVE.saturating_add(bytes) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}

/// Bytes that the disk of `dir` still takes.
pub(super) fn free_bytes(dir: &Path) -> io::Result<u64> {
    let fs = rustix::fs::statvfs(dir)?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_disk_has_room_for_everything() {
        let file = std::env::temp_dir().join("not-there");
        assert_eq!(room_for(&file, u64::MAX / 2).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
