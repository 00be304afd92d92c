//! Our end of a pipe to a file child, which may stand still for as long as the sandbox likes: nothing
//! here occupies a thread while it does, and who makes no progress is given up.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::codec::watched;

/// How long a file child may neither take nor give a byte. It works on local files: only one that is
/// starved or held up takes longer.
pub const STALL_MAX: Duration = Duration::from_secs(60);
/// Bytes that a pipe is asked to hold, so that both ends work in large pieces. The kernel's most
/// for everyone (`/proc/sys/fs/pipe-max-size`); refused, the usual 64 KiB do.
const PIPE_SIZE: usize = 1 << 20;

/// One end of a pipe.
#[derive(Debug)]
pub struct Pipe {
    fd: AsyncFd<OwnedFd>,
    stall_max: Duration,
}

impl Pipe {
    /// Takes the end that is read.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn reader(fd: &OwnedFd, stall_max: Duration) -> io::Result<Self> {
        Self::reopened(fd, OFlags::RDONLY, stall_max)
    }

    /// Takes the end that is written.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn writer(fd: &OwnedFd, stall_max: Duration) -> io::Result<Self> {
        Self::reopened(fd, OFlags::WRONLY, stall_max)
    }

    /// Opened anew: `O_NONBLOCK` is of an open file, and that of the descriptor which came is shared
    /// with whoever sent it, who could take the flag away.
    fn reopened(fd: &OwnedFd, way: OFlags, stall_max: Duration) -> io::Result<Self> {
        let flags = way | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let own = open(format!("/proc/self/fd/{}", fd.as_raw_fd()), flags, Mode::empty())?;
        let _ = rustix::pipe::fcntl_setpipe_size(&own, PIPE_SIZE);
        Ok(Self { fd: watched(own)?, stall_max })
    }

    /// Up to `max` bytes, as soon as there are some; none at the end. Cancel-safe.
    ///
    /// # Errors
    /// The kernel's; `TimedOut` when nothing came for as long as may be.
    pub async fn read(&self, max: usize) -> io::Result<Bytes> {
        let mut chunk = Vec::with_capacity(max);
        self.progress(true, || rustix::io::read(&self.fd, rustix::buffer::spare_capacity(&mut chunk)))
            .await?;
        Ok(chunk.into())
    }

    /// Writes all of it. Not cancel-safe: a dropped call may have written a part.
    ///
    /// # Errors
    /// The kernel's; `TimedOut` when nothing was taken for as long as may be.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.progress(false, || rustix::io::write(&self.fd, bytes)).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Repeats a call until it did something. First without asking: a pipe that is ready is usual.
    async fn progress(
        &self,
        reads: bool,
        mut call: impl FnMut() -> Result<usize, Errno>,
    ) -> io::Result<usize> {
        loop {
            match call() {
                Err(Errno::WOULDBLOCK) => {}
                Err(Errno::INTR) => continue,
                other => return Ok(other?),
            }
            let ready = async { if reads { self.fd.readable().await } else { self.fd.writable().await } };
            let Ok(ready) = tokio::time::timeout(self.stall_max, ready).await else {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("the file operation stood still for {} s", self.stall_max.as_secs()),
                ));
            };
            // The readiness is cleared only if the kernel says so again.
            match ready?.try_io(|_| Ok(call()?)) {
                Ok(done) => match done {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    done => return done,
                },
                Err(_not_yet) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn who_stands_still_is_given_up_both_ways() {
        let (read, _write) = io::pipe().unwrap();
        let error = Pipe::reader(&read.into(), SOON).unwrap().read(10).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let (_read, write) = io::pipe().unwrap();
        let pipe = Pipe::writer(&write.into(), SOON).unwrap();
        let error = pipe.write_all(&vec![0; 4 * PIPE_SIZE]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn the_senders_flags_do_not_make_us_wait() {
        let (read, _write) = io::pipe().unwrap();
        let theirs: OwnedFd = read.try_clone().unwrap().into();
        let pipe = Pipe::reader(&read.into(), SOON).unwrap();
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        assert_eq!(pipe.read(10).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn all_bytes_arrive_and_the_end_is_seen() {
        let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
        let (read, mut write) = io::pipe().unwrap();
        let pipe = Pipe::reader(&read.into(), STALL_MAX).unwrap();
        let bytes = sent.clone();
        let sender = std::thread::spawn(move || write.write_all(&bytes).unwrap());
        let mut got = Vec::new();
        loop {
            match pipe.read(100_000).await.unwrap() {
                chunk if chunk.is_empty() => break,
                chunk => got.extend_from_slice(&chunk),
            }
        }
        sender.join().unwrap();
        assert!(got == sent);
        let (mut read, write) = io::pipe().unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            read.read_to_end(&mut all).map(|_| all).unwrap()
        });
        let pipe = Pipe::writer(&OwnedFd::from(write), STALL_MAX).unwrap();
        pipe.write_all(&sent).await.unwrap();
        drop(pipe);
        assert!(reader.join().unwrap() == sent);
    }

    #[tokio::test]
    async fn a_pipe_that_nobody_reads_is_broken() {
        let (read, write) = io::pipe().unwrap();
        drop(read);
        let pipe = Pipe::writer(&write.into(), SOON).unwrap();
        let error = pipe.write_all(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
