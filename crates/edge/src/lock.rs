//! One edge for one state directory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// The held lock; the kernel gives it back when the process ends, however it ends.
#[derive(Debug)]
pub struct StateLock {
    file: File,
}

/// Why the lock was not had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another edge has it.
    #[error("{path} is held by a running edge (pid {pid}); stop that one first, or use another state_dir")]
    Held {
        /// The lock file.
        path: PathBuf,
        /// What the holder wrote in it.
        pid: String,
    },
    /// The file cannot be used.
    #[error("the lock file {path} cannot be used")]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl StateLock {
    /// Takes `STATE/run/edge.lock` and writes the pid into it.
    ///
    /// # Errors
    /// Another process holds it, or the directory cannot be written.
    pub fn take(state_dir: &Path) -> Result<Self, LockError> {
        let path = state_dir.join("run/edge.lock");
        let io = |source| LockError::Io { path: path.clone(), source };
        std::fs::create_dir_all(state_dir.join("run")).map_err(io)?;
        let mut file =
            File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(io)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let _ = file.take(32).read_to_string(&mut pid);
                return Err(LockError::Held { path, pid: pid.trim().to_owned() });
            }
            Err(errno) => return Err(io(errno.into())),
        }
        file.set_len(0).map_err(io)?;
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(Self { file })
    }

    /// Gives it back now, though a forked process may have the file open still for a moment.
    pub fn give_back(self) {
        // Closing it does the same as soon as that process ends.
        let _given_back_by_closing = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_refused_and_told_the_pid() {
        let dir = tempfile::tempdir().unwrap();
        let held = StateLock::take(dir.path()).unwrap();
        let error = StateLock::take(dir.path()).unwrap_err();
        assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
        drop(held);
        StateLock::take(dir.path()).unwrap();
    }
}
