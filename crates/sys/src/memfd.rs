//! Sealed in-memory files: what a process is given and nobody can change under it.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};

/// A sealed memfd with these bytes, mode 0111: it can be executed, and not even its owner's children
/// can open it for reading through `/proc`.
///
/// # Errors
/// The kernel's.
pub fn executable(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    make(name, bytes, MemfdFlags::from_bits_retain(0x0010), Mode::from_raw_mode(0o111))
}

/// A sealed memfd with these bytes, positioned at its start, never executable.
///
/// # Errors
/// The kernel's.
pub fn data(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    make(name, bytes, MemfdFlags::from_bits_retain(0x0008), Mode::from_raw_mode(0o444))
}

/// `exec` is `MFD_EXEC` or `MFD_NOEXEC_SEAL` (Linux 6.3); an older kernel refuses both and has neither.
fn make(name: &str, bytes: &[u8], exec: MemfdFlags, mode: Mode) -> io::Result<OwnedFd> {
    let base = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create(name, base | exec).or_else(|_| memfd_create(name, base))?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    file.rewind()?;
    fchmod(&file, mode)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}
