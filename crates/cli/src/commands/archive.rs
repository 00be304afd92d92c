//! Bytes between files here and bodies of requests: plain files, and directories as tars made and
//! unpacked on the fly. File I/O runs in threads of its own.

use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use indicatif::ProgressBar;
use tokio::sync::{mpsc, oneshot};

use super::landing::Part;
use crate::client::ClientError;
use crate::failure::{Failure, plain};

/// Bytes of one piece: large enough that the cost of each vanishes.
const PIECE: usize = 256 * 1024;
/// Pieces that wait.
const WAITING_MAX: usize = 4;

/// Whose the files of an archive are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// As here.
    Kept,
    /// Root's: ids of this machine mean nothing in a sandbox.
    Root,
}

type Pieces = mpsc::Receiver<io::Result<Bytes>>;

/// A request's body out of pieces; `bar` counts them.
pub(crate) fn body(mut pieces: Pieces, bar: ProgressBar) -> reqwest::Body {
    let stream = futures_util::stream::poll_fn(move |context| pieces.poll_recv(context));
    reqwest::Body::wrap_stream(stream.inspect(move |piece| {
        if let Ok(piece) = piece {
            bar.inc(piece.len() as u64);
        }
    }))
}

/// What a reader gives, piece by piece.
pub(crate) fn pieces_of(mut reader: impl Read + Send + 'static) -> Pieces {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    std::thread::spawn(move || {
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            let read = reader.by_ref().take(PIECE as u64).read_to_end(&mut piece);
            let next = match read {
                Ok(0) => return,
                Ok(_) => Ok(piece.into()),
                Err(error) => Err(error),
            };
            let last = next.is_err();
            if sender.blocking_send(next).is_err() || last {
                return;
            }
        }
    });
    receiver
}

/// A directory's content as a tar, made while it is read.
pub(crate) fn tar_of(dir: PathBuf, owner: Owner) -> Pieces {
    pieces_by(move |out| write_tar(&dir, owner, out))
}

/// What is written, piece by piece.
pub(crate) fn pieces_by(write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static) -> Pieces {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    std::thread::spawn(move || {
        let mut out = PieceWriter { sender: sender.clone(), held: Vec::with_capacity(PIECE) };
        let made = write(&mut out).and_then(|()| out.flush());
        if let Err(error) = made {
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

struct PieceWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    held: Vec<u8>,
}

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(PIECE - self.held.len());
        self.held.extend_from_slice(&bytes[..n]);
        if self.held.len() == PIECE {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.held, Vec::with_capacity(PIECE));
        self.sender.blocking_send(Ok(piece.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

fn write_tar(dir: &Path, owner: Owner, out: &mut dyn Write) -> io::Result<()> {
    let mut builder = tar::Builder::new(out);
    let mut rest = sorted(dir)?;
    // Depth first, by name: a parent before what is in it.
    while let Some(path) = rest.pop() {
        let meta = named(&path, path.symlink_metadata())?;
        let name = path.strip_prefix(dir).map_err(io::Error::other)?;
        named(&path, add(&mut builder, &path, name, &meta, owner))?;
        if meta.is_dir() {
            rest.extend(sorted(&path)?);
        }
    }
    builder.finish()
}

/// Entries of a directory, the last by name first.
fn sorted(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = named(dir, std::fs::read_dir(dir))?;
    let mut paths = entries.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort_by(|a, b| b.cmp(a));
    Ok(paths)
}

fn add(
    builder: &mut tar::Builder<impl Write>,
    path: &Path,
    name: &Path,
    meta: &Metadata,
    owner: Owner,
) -> io::Result<()> {
    let kind = meta.file_type();
    if kind.is_socket() {
        return Ok(());
    }
    let mut header = tar::Header::new_gnu();
    header.set_metadata(meta);
    if owner == Owner::Root {
        header.set_uid(0);
        header.set_gid(0);
    }
    if kind.is_symlink() {
        header.set_size(0);
        return builder.append_link(&mut header, name, std::fs::read_link(path)?);
    }
    if kind.is_file() {
        // A file that grows or shrinks under us must not shift what comes after it.
        let exact = File::open(path)?.chain(io::repeat(0)).take(meta.len());
        return builder.append_data(&mut header, name, exact);
    }
    header.set_size(0);
    builder.append_data(&mut header, name, io::empty())
}

pub(crate) fn named<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{}: {}", path.display(), plain(&error))))
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Unpacked {
    /// Files, directories and links.
    pub(crate) files: u64,
    /// Bytes of their content.
    pub(crate) bytes: u64,
}

/// Unpacks a tar as it comes into `dir`, which is made when missing and not touched before the tar is whole.
/// What a sandbox sends is not trusted: nothing is written outside `dir`, no device is made, no setuid
/// bit is kept. Dropped on the way, it removes what it has written.
pub(crate) async fn unpack(
    stream: impl Stream<Item = Result<Bytes, ClientError>>,
    dir: PathBuf,
    bar: ProgressBar,
) -> Result<Unpacked, Failure> {
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        named(parent, std::fs::create_dir_all(parent))
            .map_err(|error| Failure::io("cannot unpack", &error))?;
    }
    let part = Part::of_tree(&dir);
    let mut unpacker = Unpacker::start(part.path.clone());
    let mut stream = std::pin::pin!(stream);
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        bar.inc(piece.len() as u64);
        if !unpacker.take(piece).await {
            break;
        }
    }
    let done = unpacker.finish().await?;
    part.land_directory(&dir)?;
    Ok(done)
}

/// A thread that unpacks. Dropping it waits for the thread, which writes nothing more.
struct Unpacker {
    sender: Option<mpsc::Sender<Bytes>>,
    thread: Option<std::thread::JoinHandle<()>>,
    done: oneshot::Receiver<io::Result<Unpacked>>,
}

impl Unpacker {
    fn start(dir: PathBuf) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let (tell, done) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            // Whoever waited may be gone.
            let _ = tell.send(unpack_from(&mut PieceReader { receiver, held: Bytes::new() }, &dir));
        });
        Self { sender: Some(sender), thread: Some(thread), done }
    }

    /// Hands a piece over. False: it has failed, and `finish` says why.
    async fn take(&mut self, piece: Bytes) -> bool {
        match &self.sender {
            Some(sender) => sender.send(piece).await.is_ok(),
            None => false,
        }
    }

    async fn finish(mut self) -> Result<Unpacked, Failure> {
        self.sender = None;
        match (&mut self.done).await {
            Ok(unpacked) => unpacked.map_err(|error| Failure::io("cannot unpack", &error)),
            Err(_) => Err(Failure::new("the thread that unpacks ended")),
        }
    }
}

impl Drop for Unpacker {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct PieceReader {
    receiver: mpsc::Receiver<Bytes>,
    held: Bytes,
}

impl Read for PieceReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.held.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.held = piece,
                None => return Ok(0),
            }
        }
        let n = into.len().min(self.held.len());
        into[..n].copy_from_slice(&self.held.split_to(n));
        Ok(n)
    }
}

fn unpack_from(reader: &mut impl Read, dir: &Path) -> io::Result<Unpacked> {
    named(dir, std::fs::create_dir_all(dir))?;
    let mut done = Unpacked::default();
    let mut archive = tar::Archive::new(&mut *reader);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let name = entry.path()?.display().to_string();
        let wanted = kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link();
        if !wanted || !entry.unpack_in(dir)? {
            crate::render::note(&format!(
                "dsec: {name:?} was left out: not a plain file below the directory"
            ));
            continue;
        }
        done.files += 1;
        done.bytes += if kind.is_file() { entry.size() } else { 0 };
    }
    // What pads the archive's end is read too, so that the sender is not cut off.
    io::copy(reader, &mut io::sink())?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(mut pieces: Pieces) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.blocking_recv() {
            bytes.extend_from_slice(&piece.unwrap());
        }
        bytes
    }

    #[test]
    fn a_tree_survives_the_way_through_a_tar() {
        let from = tempfile::tempdir().unwrap();
        let long = "n".repeat(120);
        std::fs::create_dir_all(from.path().join("a/empty")).unwrap();
        std::fs::write(from.path().join("a").join(&long), vec![7; PIECE + 3]).unwrap();
        std::os::unix::fs::symlink("a/empty", from.path().join("link")).unwrap();
        let bytes = collect(tar_of(from.path().to_owned(), Owner::Root));
        let to = tempfile::tempdir().unwrap();
        let done = unpack_from(&mut bytes.as_slice(), &to.path().join("new")).unwrap();
        assert_eq!(done, Unpacked { files: 4, bytes: PIECE as u64 + 3 });
        assert_eq!(std::fs::read(to.path().join("new/a").join(&long)).unwrap(), vec![7; PIECE + 3]);
        assert_eq!(std::fs::read_link(to.path().join("new/link")).unwrap(), Path::new("a/empty"));
        assert!(to.path().join("new/a/empty").is_dir());
    }

    #[test]
    fn an_archive_writes_nothing_outside_its_directory() {
        let to = tempfile::tempdir().unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o4755);
        header.as_gnu_mut().unwrap().name[..9].copy_from_slice(b"../escape");
        header.set_cksum();
        builder.append(&header, &b"x"[..]).unwrap();
        let mut device = tar::Header::new_gnu();
        device.set_entry_type(tar::EntryType::Char);
        device.set_size(0);
        builder.append_data(&mut device, "null", io::empty()).unwrap();
        let bytes = builder.into_inner().unwrap();
        let done = unpack_from(&mut bytes.as_slice(), &to.path().join("in")).unwrap();
        assert_eq!(done, Unpacked::default());
        assert!(!to.path().join("escape").exists());
        assert!(!to.path().join("in/null").exists());
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = tar_of("/nowhere/at/all".into(), Owner::Kept).blocking_recv().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "/nowhere/at/all: No such file or directory");
    }
}
