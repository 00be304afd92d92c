//! Answers to requests.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dsec_image::layer::BlobId;
use rustix::io::Errno;
use tokio::runtime::Handle;

use super::READ_MAX;
use super::protocol::*;
use crate::cache::number_of;
use crate::engine::{Blob, Engine, FillError};

/// Pause when the machine has no memory for a request, before trying again.
const NO_MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// What all descriptors of a session share.
pub struct Shared {
    /// Fills what is read.
    pub engine: Arc<Engine>,
    /// Where reads wait for what is not in the cache.
    pub runtime: Handle,
}

/// One descriptor of the session. Several threads may serve, each with its own.
pub struct Device {
    fd: Arc<OwnedFd>,
    shared: Arc<Shared>,
    /// Content on its way from the cache to the kernel.
    buffer: Vec<u8>,
}

/// What a request is answered with.
enum Answer {
    Body(Vec<u8>),
    Error(Errno),
    /// The kernel waits for none, or a task gives it later.
    NotNow,
}

impl Device {
    /// A descriptor that is to be served.
    pub fn new(fd: OwnedFd, shared: Arc<Shared>) -> Self {
        // Written, so that every page of it is there: see the module.
        Self { fd: Arc::new(fd), shared, buffer: vec![1; READ_MAX] }
    }

    /// Answers until the file system is unmounted.
    ///
    /// # Errors
    /// The device fails.
    pub fn serve(mut self) -> io::Result<()> {
        let mut requests = vec![1; FUSE_MIN_READ_BUFFER];
        loop {
            match rustix::io::read(&self.fd, &mut requests) {
                Ok(length) => match Request::parse(&requests[..length]) {
                    Some(request) => self.handle(&request),
                    None => tracing::error!(length, "the FUSE device gave something that is not a request"),
                },
                // Interrupted, nothing there, or the request was taken back while it was being read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(Errno::NODEV) => return Ok(()),
                Err(Errno::NOMEM) => std::thread::sleep(NO_MEMORY_PAUSE),
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn handle(&mut self, request: &Request<'_>) {
        let answer = match request.opcode {
            FUSE_READ => self.read(request),
            FUSE_LOOKUP => self.lookup(request),
            FUSE_GETATTR if request.nodeid == FUSE_ROOT_ID => Answer::Body(Node::ROOT.attr_out()),
            FUSE_GETATTR => match self.blob(request.nodeid) {
                Ok(blob) => Answer::Body(node_of(&blob).attr_out()),
                Err(errno) => Answer::Error(errno),
            },
            FUSE_OPEN => Answer::Body(open_out(FOPEN_DIRECT_IO | FOPEN_NOFLUSH)),
            FUSE_OPENDIR => Answer::Body(open_out(0)),
            FUSE_READDIR => self.list(request),
            FUSE_STATFS => {
                let cache = self.shared.engine.cache();
                Answer::Body(statfs_out(cache.used_bytes() / 4096, cache.known().len() as u64))
            }
            FUSE_RELEASE | FUSE_RELEASEDIR | FUSE_FLUSH | FUSE_DESTROY => Answer::Body(Vec::new()),
            // Forgotten numbers mean what they meant. An interrupted read must not answer EINTR, which no reader of a
            // regular file expects: it is answered when it can be.
            FUSE_FORGET | FUSE_BATCH_FORGET | FUSE_INTERRUPT => Answer::NotNow,
            _ => Answer::Error(Errno::NOSYS),
        };
        match answer {
            Answer::Body(body) => reply(&self.fd, request.unique, Ok(&body)),
            Answer::Error(errno) => reply(&self.fd, request.unique, Err(errno)),
            Answer::NotNow => {}
        }
    }

    fn blob(&self, number: u64) -> Result<Arc<Blob>, Errno> {
        match self.shared.engine.by_number(number) {
            Ok(Some(blob)) => Ok(blob),
            Ok(None) => Err(Errno::STALE),
            Err(error) => {
                tracing::error!(number, error = &error as &dyn std::error::Error, "a blob cannot be used");
                Err(Errno::IO)
            }
        }
    }

    fn lookup(&self, request: &Request<'_>) -> Answer {
        let id = match request.name().map(str::parse::<BlobId>) {
            Some(Ok(id)) if request.nodeid == FUSE_ROOT_ID => id,
            _ => return Answer::Error(Errno::NOENT),
        };
        match self.blob(number_of(&id)) {
            Ok(blob) if blob.cached().id() == id => Answer::Body(node_of(&blob).entry_out()),
            Ok(_) | Err(Errno::STALE) => Answer::Error(Errno::NOENT),
            Err(errno) => Answer::Error(errno),
        }
    }

    fn list(&self, request: &Request<'_>) -> Answer {
        let Some((after, size)) = request.read_in() else { return Answer::Error(Errno::INVAL) };
        let mut known = self.shared.engine.cache().known();
        known.retain(|(number, _)| *number > after);
        known.sort_unstable();
        let mut out = Vec::new();
        for (number, id) in known {
            let fits = out.len();
            dirent(number, &id.to_string(), &mut out);
            if out.len() > size as usize {
                out.truncate(fits);
                break;
            }
        }
        Answer::Body(out)
    }

    /// From the cache at once; else a task waits, and this thread goes on.
    fn read(&mut self, request: &Request<'_>) -> Answer {
        let Some((offset, size)) = request.read_in() else { return Answer::Error(Errno::INVAL) };
        let blob = match self.blob(request.nodeid) {
            Ok(blob) => blob,
            Err(errno) => return Answer::Error(errno),
        };
        let end = blob.cached().index().size().min(offset.saturating_add(u64::from(size)));
        let length = end.saturating_sub(offset) as usize;
        if length <= self.buffer.len() {
            let out = &mut self.buffer[..length];
            if self.shared.engine.read_cached(&blob, offset, out) {
                reply(&self.fd, request.unique, Ok(out));
                return Answer::NotNow;
            }
        }
        let (fd, unique, engine) = (self.fd.clone(), request.unique, self.shared.engine.clone());
        self.shared.runtime.spawn(async move {
            match engine.read(&blob, offset..end).await {
                Ok(bytes) => reply(&fd, unique, Ok(&bytes)),
                Err(error) => {
                    log_failed_read(offset, &error);
                    reply(&fd, unique, Err(Errno::IO));
                }
            }
        });
        Answer::NotNow
    }
}

fn log_failed_read(offset: u64, error: &FillError) {
    tracing::error!(offset, error = error as &dyn std::error::Error, "a read fails");
}

fn node_of(blob: &Blob) -> Node {
    Node { nodeid: number_of(&blob.cached().id()), size: blob.cached().index().size(), directory: false }
}

fn reply(fd: &OwnedFd, unique: u64, answer: Result<&[u8], Errno>) {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(errno) => (errno.raw_os_error(), &[][..]),
    };
    let header = out_header(unique, error, body.len());
    loop {
        match rustix::io::writev(fd, &[IoSlice::new(&header), IoSlice::new(body)]) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Nobody waits for it any more, or there is no file system any more.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => return,
            Err(Errno::NOMEM) => std::thread::sleep(NO_MEMORY_PAUSE),
            Err(error) => {
                tracing::error!(%error, "an answer cannot be given to the kernel");
                return;
            }
        }
    }
}
