//! Loop devices: a file as a block device, for as long as somebody uses it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` (Linux 5.8).
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// A loop device and the descriptor that keeps it while nothing is mounted from it yet.
#[derive(Debug)]
pub struct Loop {
    /// `/dev/loopN`.
    pub path: PathBuf,
    _open: File,
}

/// The device whose backing file is `file` now, if there is one.
///
/// # Errors
/// `/sys/block` cannot be read.
pub fn find(file: &Path) -> io::Result<Option<PathBuf>> {
    let wanted = fs::canonicalize(file)?;
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        if !name.as_bytes().starts_with(b"loop") {
            continue;
        }
        let backing = Path::new("/sys/block").join(&name).join("loop/backing_file");
        if fs::read_to_string(backing).is_ok_and(|text| Path::new(text.trim_end()) == wanted) {
            return Ok(Some(Path::new("/dev").join(name)));
        }
    }
    Ok(None)
}

/// Makes a device of `file`. The kernel takes it away when the last mount or descriptor of it is gone.
///
/// # Errors
/// `ENOENT` without loop support; the kernel's.
pub fn create(file: &File) -> io::Result<Loop> {
    const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
    const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
    const AUTOCLEAR: u32 = 4;
    /// Another process may take the free device between the two calls; it cannot win for ever.
    const TRIES: usize = 64;
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..TRIES {
        // SAFETY: takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: an all-zero loop_config is valid: plain integers.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = file.as_raw_fd() as u32;
        config.info.flags = AUTOCLEAR;
        // SAFETY: `config` is a whole loop_config that lives through the call.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw mut config) } == 0 {
            return Ok(Loop { path, _open: device });
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(io::Error::other("every free loop device was taken by somebody else"))
}
