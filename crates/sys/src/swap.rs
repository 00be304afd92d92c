//! Swap: what the machine has, and files of our own.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Bytes of a page on every machine that this runs on.
const PAGE: u64 = 4096;
/// Source: `union swap_header` of the kernel; version 1 has its words after 1,024 bytes for a boot sector.
const VERSION_AT: usize = 1024;
const LAST_PAGE_AT: usize = 1028;
/// Ends the first page.
const MAGIC: &[u8; 10] = b"SWAPSPACE2";

/// Swap of the machine: bytes in all, bytes free.
///
/// # Errors
/// `/proc/meminfo` does not read as expected.
pub fn size() -> io::Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib: Option<u64> = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("/proc/meminfo says nothing of swap"))
    };
    Ok((field("SwapTotal:")?, field("SwapFree:")?))
}

/// Whether the kernel swaps to this file now.
///
/// # Errors
/// `/proc/swaps` cannot be read.
pub fn is_on(file: &Path) -> io::Result<bool> {
    Ok(size_of(file)?.is_some())
}

/// Bytes that the kernel swaps to this file, if it does.
///
/// # Errors
/// `/proc/swaps` cannot be read.
pub fn size_of(file: &Path) -> io::Result<Option<u64>> {
    let Ok(file) = fs::canonicalize(file) else { return Ok(None) };
    let table = fs::read_to_string("/proc/swaps")?;
    // A space in a name is written as `\040`.
    let shown = file.to_string_lossy().replace(' ', "\\040");
    let mut lines = table.lines().skip(1).map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let found = lines.find(|words| words.first() == Some(&shown.as_str()));
    Ok(found.and_then(|words| words.get(2)?.parse::<u64>().ok()).map(|kib| kib << 10))
}

/// Makes a swap file of `bytes`, which nobody but root can read, in place of what is there.
///
/// # Errors
/// The disk's: there is no room, or its file system has no files of whole blocks.
pub fn make(file: &Path, bytes: u64) -> io::Result<()> {
    let pages = bytes / PAGE;
    let last_page = u32::try_from(pages.saturating_sub(1)).map_err(io::Error::other)?;
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    fill(&made, pages * PAGE, last_page).inspect_err(|_| {
        let _half_made = fs::remove_file(file);
    })
}

fn fill(file: &File, bytes: u64, last_page: u32) -> io::Result<()> {
    // Swap has no holes: the kernel writes to its blocks past the file system.
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    let mut header = [0; PAGE as usize];
    header[VERSION_AT..LAST_PAGE_AT].copy_from_slice(&1u32.to_ne_bytes());
    header[LAST_PAGE_AT..LAST_PAGE_AT + 4].copy_from_slice(&last_page.to_ne_bytes());
    header[PAGE as usize - MAGIC.len()..].copy_from_slice(MAGIC);
    file.write_all_at(&header, 0)?;
    file.sync_all()
}

fn path_of(file: &Path) -> io::Result<CString> {
    Ok(CString::new(file.as_os_str().as_bytes())?)
}

/// Has the kernel swap to a file that [`make`] made.
///
/// # Errors
/// The kernel's: `EINVAL` where the file system cannot hold swap.
pub fn on(file: &Path) -> io::Result<()> {
    let path = path_of(file)?;
    // SAFETY: the path ends with a NUL and lives through the call.
    if unsafe { libc::swapon(path.as_ptr(), 0) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the kernel swap there no more. What was swapped there is brought back first, which takes its time.
///
/// # Errors
/// The kernel's: `ENOMEM` when there is no room for it.
pub fn off(file: &Path) -> io::Result<()> {
    let path = path_of(file)?;
    // SAFETY: the path ends with a NUL and lives through the call.
    if unsafe { libc::swapoff(path.as_ptr()) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_by_the_kernel_found_again_and_given_back() {
        let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
        let file = dir.path().join("swap file");
        make(&file, 8 << 20).unwrap();
        assert!(!is_on(&file).unwrap());
        on(&file).unwrap();
        let (seen, all) = (size_of(&file), size());
        off(&file).unwrap();
        assert_eq!(seen.unwrap(), Some((8 << 20) - PAGE));
        assert!(all.unwrap().0 >= (8 << 20) - PAGE);
        assert!(!is_on(&file).unwrap());
    }
}
