//! `/dev/fuse`: opening it, mounting what it serves, and more descriptors of one session.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mount::{FsOpenFlags, fsopen};

use crate::mount::{Attr, FsSetting, new_mount};

/// A new, not yet mounted session. Where FUSE is a module that is not loaded yet and nobody made the device's node, asking for
/// the file system by name loads it.
///
/// # Errors
/// `ENOENT`: the kernel has no FUSE.
pub fn open_device() -> io::Result<OwnedFd> {
    let open = || OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let device = open().or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound || fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).is_err() {
            return Err(error);
        }
        open()
    })?;
    Ok(device.into())
}

/// A detached, read-only mount of the file system that `device` serves, whose root is a directory. Every process may
/// look into it; the kernel checks modes. The `FUSE_INIT` request waits on the device afterwards.
///
/// # Errors
/// The kernel's.
pub fn mount(device: &OwnedFd, source: &str) -> io::Result<OwnedFd> {
    let fd = device.as_raw_fd().to_string();
    let settings = [
        FsSetting::Text("source", source),
        FsSetting::Text("fd", &fd),
        FsSetting::Text("rootmode", "40555"),
        FsSetting::Text("user_id", "0"),
        FsSetting::Text("group_id", "0"),
        FsSetting::Flag("allow_other"),
        FsSetting::Flag("default_permissions"),
        FsSetting::Flag("ro"),
    ];
    new_mount("fuse", &settings, Attr::READ_ONLY_DATA)
}

/// One more descriptor of a mounted session, with a queue of requests in progress of its own. Closing it fails the
/// requests that were read through it and not answered.
///
/// # Errors
/// The kernel's.
pub fn clone_device(device: &OwnedFd) -> io::Result<OwnedFd> {
    /// `_IOR(229, 0, uint32_t)`
    const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_E500;
    let new = File::from(open_device()?);
    let of = device.as_raw_fd() as u32;
    // SAFETY: the ioctl reads one u32, which lives through the call.
    if unsafe { libc::ioctl(new.as_raw_fd(), FUSE_DEV_IOC_CLONE, &raw const of) } == 0 {
        Ok(new.into())
    } else {
        Err(io::Error::last_os_error())
    }
}
