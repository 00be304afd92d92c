//! Where bytes come from: ranges of files, decompressed on a thread of their own, counted against
//! the import's limit and checked against their digest.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};

/// Bytes passed from the decompressing thread at a time.
const PIECE: usize = 512 << 10;
/// Pieces that wait at most: enough to smooth the two sides, little enough to stay in the cache.
const PIECES_AHEAD: usize = 4;
/// zstd windows up to 128 MiB, what `zstd --long` makes; a larger one is memory spent on trust.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// A reader that can pass over bytes.
pub(crate) trait Stream: Read {
    /// Passes over up to `len` bytes and says how many there were.
    fn skip(&mut self, len: u64) -> io::Result<u64>;
}

impl<S: Stream + ?Sized> Stream for &mut S {
    fn skip(&mut self, len: u64) -> io::Result<u64> {
        (**self).skip(len)
    }
}

/// A part of a file. Reading counts into `progress`.
#[derive(Debug, Clone)]
pub(crate) struct FileRange {
    file: Arc<File>,
    at: u64,
    end: u64,
    progress: Arc<AtomicU64>,
}

impl FileRange {
    pub(crate) fn whole(file: File) -> io::Result<Self> {
        let end = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), at: 0, end, progress: Arc::default() })
    }

    /// A part of this one, from `offset`; shorter where this one ends.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Self {
        let at = self.at.saturating_add(offset).min(self.end);
        let end = at.saturating_add(len).min(self.end);
        Self { file: Arc::clone(&self.file), at, end, progress: Arc::default() }
    }

    pub(crate) fn len(&self) -> u64 {
        self.end - self.at
    }

    pub(crate) fn counted_by(self, progress: &Arc<AtomicU64>) -> Self {
        Self { progress: Arc::clone(progress), ..self }
    }

    /// How it is compressed, by its first bytes.
    pub(crate) fn compression(&self) -> io::Result<Compression> {
        let mut head = [0; 6];
        let mut probe = self.clone().counted_by(&Arc::default());
        let mut got = 0;
        while got < head.len() {
            match probe.read(&mut head[got..])? {
                0 => break,
                more => got += more,
            }
        }
        Ok(Compression::of(&head[..got]))
    }
}

impl Read for FileRange {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.len()).unwrap_or(usize::MAX));
        let got = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += got as u64;
        self.progress.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

impl Stream for FileRange {
    fn skip(&mut self, len: u64) -> io::Result<u64> {
        let skipped = len.min(self.len());
        self.at += skipped;
        self.progress.fetch_add(skipped, Ordering::Relaxed);
        Ok(skipped)
    }
}

/// How a file or layer is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    Xz,
}

impl Compression {
    fn of(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // A frame, or a skippable frame as chunked layers begin with.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            _ => Self::None,
        }
    }

    fn decoder<'a>(self, input: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::None => Box::new(input),
            Self::Gzip => {
                Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(PIECE, input)))
            }
            Self::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(BufReader::with_capacity(PIECE, input))?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
            Self::Xz => Box::new(lzma_rust2::XzReader::new(BufReader::with_capacity(PIECE, input), true)),
        })
    }
}

/// Which digests of a layer are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Hashed {
    /// Of the bytes as they are stored: digests of OCI blobs.
    pub(crate) stored: bool,
    /// Of the bytes after decompression: the `diff_ids` of an image's configuration.
    pub(crate) unpacked: bool,
}

/// SHA-256 in hex, of what was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Digests {
    pub(crate) stored: Option<String>,
    pub(crate) unpacked: Option<String>,
}

enum Message {
    Piece(Vec<u8>),
    Failed(io::Error),
    /// Everything has been read.
    End(Digests),
}

/// A file range, decompressed and hashed on a second thread.
pub(crate) struct Unpacked {
    messages: Receiver<Message>,
    piece: Vec<u8>,
    at: usize,
    digests: Option<Digests>,
    stop: Arc<AtomicBool>,
    worker: Option<JoinHandle<()>>,
}

impl Unpacked {
    pub(crate) fn new(range: FileRange, hashed: Hashed) -> io::Result<Self> {
        let compression = range.compression()?;
        let (sender, messages) = sync_channel(PIECES_AHEAD);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let worker = std::thread::Builder::new().name("image-unpack".to_owned()).spawn(move || {
            // An error here means that the reading side has gone.
            let _ = unpack(range, compression, hashed, &sender, &stopped);
        })?;
        Ok(Self { messages, piece: Vec::new(), at: 0, digests: None, stop, worker: Some(worker) })
    }

    /// Passes over what is left, without decompressing it where only the stored bytes count, and
    /// gives the digests; none if more than `budget` would have to be decompressed for them.
    pub(crate) fn finish(mut self, budget: &Budget) -> io::Result<Option<Digests>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut failure = None;
        while self.digests.is_none() {
            match self.messages.recv() {
                Ok(Message::Piece(piece)) if budget.take(piece.len() as u64) => {}
                Ok(Message::Piece(_)) => return Ok(None),
                Ok(Message::Failed(e)) => failure = Some(e),
                Ok(Message::End(digests)) => self.digests = Some(digests),
                Err(_) => return Err(failure.unwrap_or_else(worker_gone)),
            }
        }
        Ok(self.digests.take())
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // With the receiver gone, the worker's next send fails and it ends.
        let (_, gone) = sync_channel(0);
        self.messages = gone;
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            if self.digests.is_some() {
                return Ok(0);
            }
            match self.messages.recv() {
                Ok(Message::Piece(piece)) => (self.piece, self.at) = (piece, 0),
                Ok(Message::Failed(e)) => return Err(e),
                Ok(Message::End(digests)) => self.digests = Some(digests),
                Err(_) => return Err(worker_gone()),
            }
        }
        let got = buffer.len().min(self.piece.len() - self.at);
        buffer[..got].copy_from_slice(&self.piece[self.at..self.at + got]);
        self.at += got;
        Ok(got)
    }
}

fn worker_gone() -> io::Error {
    io::Error::other("the decompressing thread ended without a word")
}

struct Gone;

fn unpack(
    range: FileRange,
    compression: Compression,
    hashed: Hashed,
    to: &SyncSender<Message>,
    stop: &AtomicBool,
) -> Result<(), Gone> {
    let unpacked_is_stored = compression == Compression::None;
    let of_input = hashed.stored || (hashed.unpacked && unpacked_is_stored);
    let mut input = Hashing { inner: range, hash: of_input.then(Sha256::new) };
    let mut of_output = (hashed.unpacked && !unpacked_is_stored).then(Sha256::new);
    let result = pump(&mut input, compression, of_output.as_mut(), to, stop)?;
    // The digest is of all stored bytes, also those after what decompressing needed or bore.
    let drained = if of_input { io::copy(&mut input, &mut io::sink()).map(drop) } else { Ok(()) };
    if let Err(e) = result.and(drained) {
        send(to, Message::Failed(e))?;
    }
    let of_input = input.hash.map(|hash| hex(&hash.finalize()));
    let of_output = of_output.map(|hash| hex(&hash.finalize()));
    send(
        to,
        Message::End(Digests {
            unpacked: of_output.or_else(|| of_input.clone()).filter(|_| hashed.unpacked),
            stored: of_input.filter(|_| hashed.stored),
        }),
    )
}

fn pump(
    input: &mut Hashing,
    compression: Compression,
    mut hash: Option<&mut Sha256>,
    to: &SyncSender<Message>,
    stop: &AtomicBool,
) -> Result<io::Result<()>, Gone> {
    let mut decoder = match compression.decoder(input) {
        Ok(decoder) => decoder,
        Err(e) => return Ok(Err(e)),
    };
    // Whoever wants the digest of the unpacked bytes needs all of them.
    while hash.is_some() || !stop.load(Ordering::Relaxed) {
        let mut piece = vec![0; PIECE];
        let mut filled = 0;
        let mut failure = None;
        // Never with an empty rest: zstd takes that for an error.
        while filled < PIECE {
            match decoder.read(&mut piece[filled..]) {
                Ok(0) => break,
                Ok(got) => filled += got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            }
        }
        piece.truncate(filled);
        if let Some(hash) = &mut hash {
            hash.update(&piece);
        }
        let last = filled < PIECE;
        send(to, Message::Piece(piece))?;
        match failure {
            Some(e) => return Ok(Err(e)),
            None if last => break,
            None => {}
        }
    }
    Ok(Ok(()))
}

fn send(to: &SyncSender<Message>, message: Message) -> Result<(), Gone> {
    to.send(message).map_err(|_| Gone)
}

struct Hashing {
    inner: FileRange,
    hash: Option<Sha256>,
}

impl Read for Hashing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        if let Some(hash) = &mut self.hash {
            hash.update(&buffer[..got]);
        }
        Ok(got)
    }
}

/// Bytes the import may still use, shared by its layers.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    left: Arc<AtomicU64>,
    max: u64,
}

impl Budget {
    pub(crate) fn new(max: u64) -> Self {
        Self { left: Arc::new(AtomicU64::new(max)), max }
    }

    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// Takes `bytes`, or says that they are not there.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }
}

/// A reader that fails as soon as more than the budget has been read through it.
pub(crate) struct Budgeted<R> {
    pub(crate) inner: R,
    pub(crate) budget: Budget,
}

#[derive(Debug, thiserror::Error)]
#[error("more than {0} bytes")]
struct LimitReached(u64);

/// The limit, if that is why reading failed.
pub(crate) fn limit_of(error: &io::Error) -> Option<u64> {
    error.get_ref()?.downcast_ref::<LimitReached>().map(|limit| limit.0)
}

impl<R: Read> Read for Budgeted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        if self.budget.take(got as u64) {
            return Ok(got);
        }
        Err(io::Error::other(LimitReached(self.budget.max)))
    }
}

impl<R: Read> Stream for Budgeted<R> {
    fn skip(&mut self, len: u64) -> io::Result<u64> {
        io::copy(&mut Read::by_ref(self).take(len), &mut io::sink())
    }
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}
