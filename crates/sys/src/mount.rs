//! Mounts without paths: the file-descriptor mount API, so that nothing shows in a mount table that
//! others read, and nothing stays when a process dies half-way.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

/// One setting of a file system that is about to be made.
#[derive(Debug, Clone, Copy)]
pub enum FsSetting<'a> {
    /// `key`
    Flag(&'a str),
    /// `key=value`
    Text(&'a str, &'a str),
}

/// What a mount forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr(MountAttrFlags);

impl Attr {
    /// Nothing forbidden.
    pub const NONE: Self = Self(MountAttrFlags::empty());
    /// No setuid, no devices.
    pub const NOSUID_NODEV: Self =
        Self(MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV));
    /// No devices.
    pub const NODEV: Self = Self(MountAttrFlags::MOUNT_ATTR_NODEV);
    /// No setuid, no devices, no programs.
    pub const DATA_ONLY: Self = Self(Self::NOSUID_NODEV.0.union(MountAttrFlags::MOUNT_ATTR_NOEXEC));
    /// No setuid, no programs, no writes; devices work.
    pub const DEVICES: Self = Self(
        MountAttrFlags::MOUNT_ATTR_NOSUID
            .union(MountAttrFlags::MOUNT_ATTR_NOEXEC)
            .union(MountAttrFlags::MOUNT_ATTR_RDONLY),
    );
    /// Nothing but reading of data.
    pub const READ_ONLY_DATA: Self = Self(Self::DATA_ONLY.0.union(MountAttrFlags::MOUNT_ATTR_RDONLY));
    /// No writes.
    pub const READ_ONLY: Self = Self(MountAttrFlags::MOUNT_ATTR_RDONLY);
}

/// Makes a file system of `kind` and returns a detached mount of it: it is nowhere in the tree, and
/// gone when the descriptor and all that was cloned from it are closed.
///
/// # Errors
/// The kernel's. For overlayfs and EROFS the reason is in the kernel log, as it is for mount(8).
pub fn new_mount(kind: &str, settings: &[FsSetting<'_>], attr: Attr) -> io::Result<OwnedFd> {
    let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for setting in settings {
        match *setting {
            FsSetting::Flag(key) => fsconfig_set_flag(fs.as_fd(), key)?,
            FsSetting::Text(key, value) => fsconfig_set_string(fs.as_fd(), key, value)?,
        }
    }
    fsconfig_create(fs.as_fd())?;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attr.0)?)
}

/// Clones the mount that `at` stands on as a detached one (a bind mount of that directory or file).
/// `at` must belong to the caller's mount namespace or to a detached mount (Linux 6.15).
///
/// # Errors
/// `EINVAL`: the mount belongs to another namespace.
pub fn clone_mount(at: BorrowedFd<'_>, path: &str, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(open_tree(at, path, flags)?)
}

/// Attaches a detached mount at `path` under `at`; an empty path is `at` itself.
///
/// # Errors
/// The kernel's.
pub fn attach(mount: BorrowedFd<'_>, at: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    Ok(move_mount(mount, "", at, path, flags)?)
}

/// `struct mount_attr` of mount_setattr(2), version 0.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

fn setattr(mount: BorrowedFd<'_>, recursive: bool, attr: &MountAttr) -> io::Result<()> {
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the path is a NUL-terminated constant and `attr` is a whole mount_attr of the size that is passed.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Maps the ids of a detached mount through a user namespace's map; it forbids what `attr` says and nothing else of
/// [`Attr::DATA_ONLY`], whatever the mount it was cloned from did. Files keep the ids they have on disk; through this
/// mount they appear as the namespace's host ids.
///
/// # Errors
/// `EINVAL`: the file system cannot be id-mapped, or the mount is attached.
pub fn id_map(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>, attr: Attr) -> io::Result<()> {
    const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
    let attr = MountAttr {
        set: u64::from(attr.0.bits()) | MOUNT_ATTR_IDMAP,
        clear: u64::from(Attr::DATA_ONLY.0.difference(attr.0).bits()),
        propagation: 0,
        userns_fd: userns.as_raw_fd() as u64,
    };
    setattr(mount, false, &attr)
}

/// Adds `attr` to a mount.
///
/// # Errors
/// The kernel's.
pub fn restrict(mount: BorrowedFd<'_>, attr: Attr) -> io::Result<()> {
    replace_attr(mount, attr, Attr::NONE)
}

/// Adds `set` to a mount and takes `clear` away from it.
///
/// # Errors
/// `EPERM`: a less privileged namespace took the mount over, which locks what it forbids.
pub fn replace_attr(mount: BorrowedFd<'_>, set: Attr, clear: Attr) -> io::Result<()> {
    let attr = MountAttr {
        set: u64::from(set.0.bits()),
        clear: u64::from(clear.0.bits()),
        propagation: 0,
        userns_fd: 0,
    };
    setattr(mount, false, &attr)
}

/// Makes the whole tree below `/` private to this mount namespace: nothing propagates in or out.
///
/// # Errors
/// The kernel's.
pub fn make_all_private() -> io::Result<()> {
    use rustix::mount::{MountPropagationFlags, mount_change};
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Unmounts what is on `path`, at once or when its last user is gone.
///
/// # Errors
/// `EBUSY` when not lazy and in use.
pub fn unmount(path: &CStr, lazy: bool) -> io::Result<()> {
    use rustix::mount::{UnmountFlags, unmount};
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::NOFOLLOW };
    Ok(unmount(path, flags)?)
}

/// pivot_root(2) of the calling mount namespace onto the current directory, then drops the old tree.
/// The caller stands in the new root afterwards.
///
/// # Errors
/// The kernel's.
pub fn pivot_into_cwd() -> io::Result<()> {
    rustix::process::pivot_root(".", ".")?;
    unmount(c".", true)?;
    rustix::process::chdir("/")?;
    Ok(())
}
