//! What all containers of a node share, and how one is removed from it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_sys::cgroup::Tree;
use dsec_sys::mount::{Attr, clone_mount, restrict};
use dsec_sys::{fdpass, process};

use super::failed;
use super::oom::OomLog;
use super::storage::Storage;
use super::wire::ToLauncher;
use crate::BackendError;
use crate::shelf::Shelf;

/// What every container of the node uses.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: PathBuf,
    pub(super) tree: Tree,
    pub(super) storage: Storage,
    pub(super) oom: OomLog,
    /// Directory of the agents' sockets, open: a socket's path must be short, and this makes it so.
    pub(super) sockets: OwnedFd,
    pub(super) spools: Shelf,
    pub(super) launcher: Mutex<OwnedFd>,
}

impl Shared {
    pub(super) fn tell_launcher(
        &self,
        message: &ToLauncher,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), BackendError> {
        let bytes = serde_json::to_vec(message).map_err(|e| BackendError::new("encode a launch", e))?;
        let socket = self.launcher.lock().unwrap_or_else(PoisonError::into_inner);
        fdpass::send(socket.as_fd(), &bytes, fds).map_err(failed("reach the launcher"))
    }

    /// Gives an id range back.
    pub(super) fn release(&self, id_base: u32) {
        // Without a launcher nobody hands ranges out.
        let _launcher_gone = self.tell_launcher(&ToLauncher::Release(id_base), &[]);
    }

    pub(super) fn spool_dir(&self, name: &str) -> PathBuf {
        self.state.join("spool").join(name)
    }

    /// The directory for output of execs, and a detached mount of it: whoever holds that can reach nothing above.
    /// The agent writes there under an id that is not known yet, so the directory takes everyone; the one
    /// above it lets only root pass.
    pub(super) fn make_spool(&self, name: &str) -> Result<(PathBuf, OwnedFd), BackendError> {
        let path = self.spool_dir(name);
        let make = || {
            if !self.spools.take(&path) {
                fs::create_dir(&path)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o777))?;
            }
            let dir = fs::OpenOptions::new().read(true).custom_flags(o_directory()).open(&path)?;
            let mount = clone_mount(dir.as_fd(), "", false)?;
            restrict(mount.as_fd(), Attr::DATA_ONLY)?;
            // Opened once more through the mount: an open_tree descriptor takes no `*at` calls that write.
            let inside = rustix::fs::openat(
                &mount,
                ".",
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?;
            Ok(inside)
        };
        let mount = make().map_err(failed(format!("make {}", path.display())))?;
        Ok((path, mount))
    }

    pub(super) fn listen(&self, name: &str) -> Result<OwnedFd, BackendError> {
        let path = format!("/proc/self/fd/{}/{name}", self.sockets.as_raw_fd());
        UnixListener::bind(path).map(Into::into).map_err(failed(format!("make the agent socket of {name}")))
    }

    /// Removes what a container has on the host, whose processes have ended. Tries all of it before it fails.
    pub(super) fn remove(&self, name: &str) -> Result<(), BackendError> {
        let not_found_is_fine = |result: io::Result<()>| match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        let results = [
            ("remove the cgroups", self.remove_groups(name)),
            ("remove the writable layer", self.storage.destroy(name)),
            ("remove the spool directory", not_found_is_fine(self.remove_spool(name))),
            (
                "remove the agent socket",
                not_found_is_fine(fs::remove_file(self.state.join("run/agents").join(name))),
            ),
        ];
        results
            .into_iter()
            .find_map(|(what, result)| Some(BackendError::new(format!("{what} of {name}"), result.err()?)))
            .map_or(Ok(()), Err)
    }

    fn remove_spool(&self, name: &str) -> io::Result<()> {
        let path = self.spool_dir(name);
        let is_empty = fs::read_dir(&path)?.next().is_none();
        if is_empty && self.spools.put(&path, |_| Ok(()))? {
            return Ok(());
        }
        fs::remove_dir_all(path)
    }

    /// A process that has just ended may still count in its cgroup for a moment.
    fn remove_groups(&self, name: &str) -> io::Result<()> {
        const LIMIT: Duration = Duration::from_secs(10);
        let group = self.tree.group(name);
        let started = Instant::now();
        let mut pause = Duration::from_micros(100);
        loop {
            match group.remove() {
                Ok(()) => return Ok(()),
                Err(error) if started.elapsed() > LIMIT => return Err(error),
                Err(_) => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
            }
        }
    }

    pub(super) fn end_and_remove(&self, name: &str) -> Result<(), BackendError> {
        let group = self.tree.group(name);
        group.kill();
        for number in group.run_numbers() {
            for pid in group.run_pids(number) {
                if let Ok(pidfd) = process::open_pidfd(pid) {
                    process::kill(pidfd.as_fd());
                }
            }
        }
        self.remove(name)
    }
}

fn o_directory() -> i32 {
    rustix::fs::OFlags::DIRECTORY.bits() as i32
}

pub(super) fn private_dir(path: &Path) -> Result<OwnedFd, BackendError> {
    let make = || {
        fs::create_dir_all(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
        Ok(fs::File::open(path)?.into())
    };
    make().map_err(failed(format!("make {}", path.display())))
}
