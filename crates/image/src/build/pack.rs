//! From the plain file of a blob to packs, on threads of their own.
//!
//! ```text
//! writer ──group numbers──► threads: read back from the file, BLAKE3, zstd ──► in order ──► pack ──► sink
//! ```
//!
//! Groups are read back from the file, where they have just been written and so are in memory, instead of being passed
//! on: that way content can be taken back until it is settled, nothing is held twice, and the writer need not wait for the
//! threads. How far it may be before them is bounded unless it is in a hurry, so that what they read is still in memory. One core
//! is left to the writer, which compresses too when it is far before them, and once all is written.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::layer::{BlobIndex, Digest, GROUP_SIZE, GroupRef, PACK_SIZE_MAX, PackId, PackRef};

/// zstd's own default: beyond it, time grows faster than what is saved.
const ZSTD_LEVEL: i32 = 3;
/// Most threads that compress; more outrun what hands content over.
const THREADS_MAX: usize = 8;
/// Groups given out a thread: enough that no thread is idle, and few enough that what comes back is little.
const GROUPS_AHEAD: u64 = 4;
/// Groups that the writer may be before the threads, 256 MiB of page cache.
const GROUPS_BEHIND_MAX: u64 = 1024;

/// Bytes of packs that wait for the sink while the writer is in a hurry.
const READY_MAX: usize = 32 << 20;

/// Where finished packs go.
pub trait PackSink {
    /// Takes one pack. Called in the packs' order, on the thread that writes the blob, which waits meanwhile.
    ///
    /// # Errors
    /// Whatever storing it can meet; the blob is then not finished.
    fn pack(&mut self, id: PackId, bytes: Vec<u8>) -> io::Result<()>;

    /// How hard content is compressed for it, from 1 to 19. Asked once a blob.
    fn level(&self) -> i32 {
        ZSTD_LEVEL
    }

    /// How long packs become, at most [`PACK_SIZE_MAX`] bytes. Asked once a blob.
    fn pack_size(&self) -> u32 {
        PACK_SIZE_MAX
    }
}

/// A group on its way back.
struct Done {
    number: u64,
    result: io::Result<(Digest, Vec<u8>)>,
}

/// Makes packs of the groups of a file.
pub(crate) struct Packer<'s> {
    sink: &'s mut dyn PackSink,
    file: Arc<File>,
    /// What compresses on the writer's thread.
    own: Press,
    pack_size: usize,
    work: Option<Sender<(u64, u64)>>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
    /// Groups given out, and those that are in a pack.
    given: u64,
    packed: u64,
    /// Groups that came back before an earlier one.
    early: BTreeMap<u64, Done>,
    pack: Vec<u8>,
    /// Packs that the sink has not been given yet.
    ready: VecDeque<(PackId, Vec<u8>)>,
    is_hurried: bool,
    packs: Vec<PackRef>,
    groups: Vec<GroupRef>,
}

impl<'s> Packer<'s> {
    pub(crate) fn new(file: File, sink: &'s mut dyn PackSink) -> io::Result<Self> {
        let (work, todo) = channel();
        let (send, done) = channel();
        let (file, todo) = (Arc::new(file), Arc::new(Mutex::new(todo)));
        let (level, pack_size) = (sink.level(), sink.pack_size().min(PACK_SIZE_MAX) as usize);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = (cores - 1).clamp(1, THREADS_MAX);
        let threads = (0..count).map(|_| {
            let (file, todo, send) = (Arc::clone(&file), Arc::clone(&todo), send.clone());
            std::thread::Builder::new()
                .name("blob-pack".to_owned())
                .spawn(move || compress_all(&file, level, &todo, &send))
        });
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Self {
            sink,
            file,
            own: Press::new(level),
            pack_size,
            work: Some(work),
            done,
            threads,
            given: 0,
            packed: 0,
            early: BTreeMap::new(),
            pack: Vec::new(),
            ready: VecDeque::new(),
            is_hurried: false,
            packs: Vec::new(),
            groups: Vec::new(),
        })
    }

    /// Whether the writer must not be held up, by the sink nor by work that threads can do.
    pub(crate) fn hurry(&mut self, is_hurried: bool) {
        self.is_hurried = is_hurried;
    }

    /// Says that the first `size` bytes of the file are there and stay as they are. While the threads are far behind, their
    /// work is done here.
    pub(crate) fn settled(&mut self, size: u64) -> io::Result<()> {
        let groups = size / GROUP_SIZE;
        while self.given < groups {
            self.take_what_is_done()?;
            if !self.is_hurried {
                self.send_ready()?;
            }
            if self.ready.len() * self.pack_size >= READY_MAX {
                break;
            } else if self.given - self.packed < self.ahead() {
                self.give(GROUP_SIZE)?;
            } else if groups - self.packed >= GROUPS_BEHIND_MAX && !self.is_hurried {
                self.compress_here(GROUP_SIZE)?;
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Packs the rest of the file, which has `size` bytes.
    pub(crate) fn finish(mut self, size: u64) -> io::Result<BlobIndex> {
        while self.given * GROUP_SIZE < size {
            self.take_what_is_done()?;
            self.send_ready()?;
            let len = (size - self.given * GROUP_SIZE).min(GROUP_SIZE);
            if self.given - self.packed < self.ahead() {
                self.give(len)?;
            } else if self.early.len() as u64 > self.ahead() {
                self.take()?;
            } else {
                self.compress_here(len)?;
            }
        }
        while self.packed < self.given {
            self.take()?;
        }
        self.close_pack();
        self.send_ready()?;
        let (packs, groups) = (std::mem::take(&mut self.packs), std::mem::take(&mut self.groups));
        BlobIndex::new(size, packs, groups).map_err(io::Error::other)
    }

    /// Groups that are out at most.
    fn ahead(&self) -> u64 {
        GROUPS_AHEAD * self.threads.len() as u64
    }

    fn give(&mut self, len: u64) -> io::Result<()> {
        let sent = self.work.as_ref().is_some_and(|work| work.send((self.given, len)).is_ok());
        if !sent {
            return Err(threads_gone());
        }
        self.given += 1;
        Ok(())
    }

    /// Waits for one group, and packs what is next in order.
    fn take(&mut self) -> io::Result<()> {
        let done = self.done.recv().map_err(|_| threads_gone())?;
        self.place(done)
    }

    fn take_what_is_done(&mut self) -> io::Result<()> {
        while let Ok(done) = self.done.try_recv() {
            self.place(done)?;
        }
        Ok(())
    }

    /// Does the next group on this thread.
    fn compress_here(&mut self, len: u64) -> io::Result<()> {
        let number = self.given;
        self.given += 1;
        let result = self.own.group(&self.file, number, len);
        self.place(Done { number, result })
    }

    fn place(&mut self, done: Done) -> io::Result<()> {
        self.early.insert(done.number, done);
        while let Some(done) = self.early.remove(&self.packed) {
            let (hash, bytes) = done.result?;
            if self.pack.len() + bytes.len() > self.pack_size {
                self.close_pack();
            }
            let (pack, offset) = (self.packs.len() as u32, self.pack.len() as u32);
            self.groups.push(GroupRef { hash, pack, offset, stored: bytes.len() as u32 });
            self.pack.extend_from_slice(&bytes);
            self.packed += 1;
        }
        Ok(())
    }

    fn close_pack(&mut self) {
        if self.pack.is_empty() {
            return;
        }
        let bytes = std::mem::take(&mut self.pack);
        let id = PackId(Digest::of(&bytes));
        self.packs.push(PackRef { id, size: bytes.len() as u32 });
        self.ready.push_back((id, bytes));
    }

    fn send_ready(&mut self) -> io::Result<()> {
        while let Some((id, bytes)) = self.ready.pop_front() {
            self.sink.pack(id, bytes)?;
        }
        Ok(())
    }
}

impl Drop for Packer<'_> {
    fn drop(&mut self) {
        // Without work the threads end.
        self.work = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn threads_gone() -> io::Error {
    io::Error::other("the compressing threads ended without a word")
}

fn compress_all(file: &File, level: i32, todo: &Mutex<Receiver<(u64, u64)>>, done: &Sender<Done>) {
    let mut press = Press::new(level);
    loop {
        // Nothing panics with the lock held; were it so, the writer would learn that no thread is left.
        let Ok((number, len)) = todo.lock().map_or(Err(()), |todo| todo.recv().map_err(drop)) else { return };
        let result = press.group(file, number, len);
        if done.send(Done { number, result }).is_err() {
            return;
        }
    }
}

/// What one thread compresses with. Its memory is used for group after group: new memory costs more than the compressing of some.
struct Press {
    level: i32,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    plain: Vec<u8>,
    packed: Vec<u8>,
}

impl Press {
    fn new(level: i32) -> Self {
        Self { level, compressor: None, plain: Vec::new(), packed: Vec::new() }
    }

    /// The hash of a group and its bytes as they are stored: compressed, unless that makes them no fewer.
    fn group(&mut self, file: &File, number: u64, len: u64) -> io::Result<(Digest, Vec<u8>)> {
        let Self { level, compressor, plain, packed } = self;
        let compressor = match compressor {
            Some(compressor) => compressor,
            None => compressor.insert(zstd::bulk::Compressor::new(*level)?),
        };
        plain.resize(len as usize, 0);
        fill(plain, file, number * GROUP_SIZE)?;
        packed.clear();
        packed.reserve(zstd::zstd_safe::compress_bound(plain.len()));
        compressor.compress_to_buffer(plain, packed)?;
        let stored = if packed.len() < plain.len() { &*packed } else { &*plain };
        Ok((Digest::of(plain), stored.clone()))
    }
}

/// Reads the file from `at` on, with zeros for what it does not have.
fn fill(plain: &mut [u8], file: &File, at: u64) -> io::Result<()> {
    let mut filled = 0;
    while filled < plain.len() {
        match file.read_at(&mut plain[filled..], at + filled as u64) {
            // A hole at the end, which the file has not been extended over yet.
            Ok(0) => break,
            Ok(got) => filled += got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    plain[filled..].fill(0);
    Ok(())
}
