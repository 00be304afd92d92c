//! From the plain file of a blob to packs, on threads of their own.
//!
//! ```text
//! writer ──group numbers──► threads: read back from the file, BLAKE3, zstd ──► in order ──► pack ──► sink
//! ```
//!
//! Groups are read back from the file, where they have just been written and so are in memory, instead of being passed
//! on: that way content can be taken back until it is settled, and nothing is held twice.

use std::collections::BTreeMap;
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
/// Groups given out a thread before the writer waits for them: enough that no thread is idle.
const GROUPS_AHEAD: u64 = 8;

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
}

/// A group on its way back.
struct Done {
    number: u64,
    result: io::Result<(Digest, Vec<u8>)>,
}

/// Makes packs of the groups of a file.
pub(crate) struct Packer<'s> {
    sink: &'s mut dyn PackSink,
    work: Option<Sender<(u64, u64)>>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
    /// Groups given out, and those that are in a pack.
    given: u64,
    packed: u64,
    /// Groups that came back before an earlier one.
    early: BTreeMap<u64, Done>,
    pack: Vec<u8>,
    packs: Vec<PackRef>,
    groups: Vec<GroupRef>,
}

impl<'s> Packer<'s> {
    pub(crate) fn new(file: File, sink: &'s mut dyn PackSink) -> io::Result<Self> {
        let (work, todo) = channel();
        let (send, done) = channel();
        let (file, todo) = (Arc::new(file), Arc::new(Mutex::new(todo)));
        let level = sink.level();
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let threads = (0..count).map(|_| {
            let (file, todo, send) = (Arc::clone(&file), Arc::clone(&todo), send.clone());
            std::thread::Builder::new()
                .name("blob-pack".to_owned())
                .spawn(move || compress_all(&file, level, &todo, &send))
        });
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Self {
            sink,
            work: Some(work),
            done,
            threads,
            given: 0,
            packed: 0,
            early: BTreeMap::new(),
            pack: Vec::new(),
            packs: Vec::new(),
            groups: Vec::new(),
        })
    }

    /// Says that the first `size` bytes of the file are there and stay as they are.
    pub(crate) fn settled(&mut self, size: u64) -> io::Result<()> {
        while (self.given + 1) * GROUP_SIZE <= size {
            self.give(GROUP_SIZE)?;
        }
        Ok(())
    }

    /// Packs the rest of the file, which has `size` bytes.
    pub(crate) fn finish(mut self, size: u64) -> io::Result<BlobIndex> {
        self.settled(size)?;
        if size > self.given * GROUP_SIZE {
            self.give(size - self.given * GROUP_SIZE)?;
        }
        while self.packed < self.given {
            self.take()?;
        }
        self.close_pack()?;
        let (packs, groups) = (std::mem::take(&mut self.packs), std::mem::take(&mut self.groups));
        BlobIndex::new(size, packs, groups).map_err(io::Error::other)
    }

    fn give(&mut self, len: u64) -> io::Result<()> {
        while self.given - self.packed >= GROUPS_AHEAD * self.threads.len() as u64 {
            self.take()?;
        }
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
        self.early.insert(done.number, done);
        while let Some(done) = self.early.remove(&self.packed) {
            let (hash, bytes) = done.result?;
            if self.pack.len() + bytes.len() > PACK_SIZE_MAX as usize {
                self.close_pack()?;
            }
            let (pack, offset) = (self.packs.len() as u32, self.pack.len() as u32);
            self.groups.push(GroupRef { hash, pack, offset, stored: bytes.len() as u32 });
            self.pack.extend_from_slice(&bytes);
            self.packed += 1;
        }
        Ok(())
    }

    fn close_pack(&mut self) -> io::Result<()> {
        if self.pack.is_empty() {
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.pack);
        let id = PackId(Digest::of(&bytes));
        self.packs.push(PackRef { id, size: bytes.len() as u32 });
        self.sink.pack(id, bytes)
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
    let mut compressor = None;
    loop {
        // Nothing panics with the lock held; were it so, the writer would learn that no thread is left.
        let Ok((number, len)) = todo.lock().map_or(Err(()), |todo| todo.recv().map_err(drop)) else { return };
        let result = compress(file, level, number, len, &mut compressor);
        if done.send(Done { number, result }).is_err() {
            return;
        }
    }
}

fn compress(
    file: &File,
    level: i32,
    number: u64,
    len: u64,
    compressor: &mut Option<zstd::bulk::Compressor<'static>>,
) -> io::Result<(Digest, Vec<u8>)> {
    let mut plain = vec![0; len as usize];
    let mut filled = 0;
    while filled < plain.len() {
        match file.read_at(&mut plain[filled..], number * GROUP_SIZE + filled as u64) {
            // A hole at the end, which the file has not been extended over yet.
            Ok(0) => break,
            Ok(got) => filled += got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let hash = Digest::of(&plain);
    let compressor = match compressor {
        Some(compressor) => compressor,
        None => compressor.insert(zstd::bulk::Compressor::new(level)?),
    };
    let packed = compressor.compress(&plain)?;
    Ok((hash, if packed.len() < plain.len() { packed } else { plain }))
}
