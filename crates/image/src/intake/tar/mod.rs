//! A tar reader for hostile input: v7, ustar, PAX and GNU archives, sparse files in all four
//! forms, bounded memory, and errors that name the entry.
//!
//! Ours, because an import must tell a cut-off archive from a finished one, read the PAX sparse
//! formats and bound extended headers, none of which the `tar` crate does.
//! Source: POSIX.1-2024 `pax`, and the GNU tar manual, "Tar Internals".

mod acl;
mod header;
mod pax;
mod sparse;

use std::io::{self, Read};

use crate::erofs::{Segment, Timestamp};
use crate::error::{EntryProblem, printable};
use crate::intake::stream::Stream;

use header::{BLOCK, Header};
use pax::Extended;

/// All extended headers of one entry together: attributes of honest files have a few KiB.
pub(crate) const EXTENDED_MAX: u64 = 1 << 20;

/// One entry. Paths and targets are as the archive has them.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Timestamp,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// What an entry is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File { size: u64 },
    Sparse { size: u64, segments: Vec<Segment> },
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    CharDevice(u32, u32),
    BlockDevice(u32, u32),
    Fifo,
}

/// A problem, and the entry it is in.
#[derive(Debug)]
pub(crate) struct TarError {
    pub(crate) entry: String,
    pub(crate) problem: EntryProblem,
}

/// Reads entries one after the other.
pub(crate) struct TarReader<S> {
    stream: S,
    /// Bytes read so far: where the current entry's content begins, right after [`Self::next_entry`].
    offset: u64,
    /// Content of the current entry not read yet, and the padding behind it.
    content: u64,
    padding: u64,
    /// The current entry's path, for errors.
    current: Vec<u8>,
    global: Extended,
}

impl<S: Stream> TarReader<S> {
    pub(crate) fn new(stream: S) -> Self {
        let global = Extended::default();
        Self { stream, offset: 0, content: 0, padding: 0, current: Vec::new(), global }
    }

    /// Where in the stream the current entry's content begins.
    pub(crate) fn content_offset(&self) -> u64 {
        self.offset
    }

    /// The stored content of the current entry: for a sparse file its segments, end to end.
    pub(crate) fn content(&mut self) -> impl Read + '_ {
        Body { reader: self }
    }

    /// What to say of a problem in the current entry.
    pub(crate) fn error(&self, problem: EntryProblem) -> TarError {
        TarError { entry: printable(&self.current), problem }
    }

    /// The next entry; none at the archive's end mark.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        self.skip_rest()?;
        let mut extended = Extended::default();
        let mut room = EXTENDED_MAX;
        let mut extended_seen = false;
        loop {
            let at = self.offset;
            let Some(block) = self.header_block()? else {
                let what = "no entry follows an extended header";
                return if extended_seen {
                    Err(self.at(at, EntryProblem::BadHeader { what }))
                } else {
                    Ok(None)
                };
            };
            let header =
                Header::parse(block).map_err(|what| self.at(at, EntryProblem::BadHeader { what }))?;
            if !matches!(header.type_flag, b'x' | b'g' | b'L' | b'K') {
                return self.entry(&header, &extended).map(Some);
            }
            extended_seen = header.type_flag != b'g';
            // The name of what follows is not known yet; the header's own is a good hint.
            self.current = header.path();
            let payload = self.payload(header.size, &mut room)?;
            let parsed = match header.type_flag {
                b'x' => extended.parse_pax(&payload),
                b'g' => self.global.parse_global(&payload),
                b'L' => {
                    extended.path = Some(until_nul(&payload));
                    Ok(())
                }
                _ => {
                    extended.link = Some(until_nul(&payload));
                    Ok(())
                }
            };
            parsed.map_err(|problem| self.error(problem))?;
        }
    }

    fn entry(&mut self, header: &Header, extended: &Extended) -> Result<Entry, TarError> {
        let mut path = extended.path.clone().unwrap_or_else(|| header.path());
        if let Some(name) = &extended.sparse.name {
            path.clone_from(name);
        }
        self.current.clone_from(&path);
        let stored = extended.size.unwrap_or(header.size);
        let kind = self.kind(header, extended, stored, &path).map_err(|problem| self.error(problem))?;
        let attributes = self.global.or(extended, header).map_err(|problem| self.error(problem))?;
        let (uid, gid, mtime) = attributes;
        let xattrs = extended.xattrs.clone();
        Ok(Entry { path, kind, mode: (header.mode & 0o7777) as u16, uid, gid, mtime, xattrs })
    }

    /// Reads what belongs to the entry besides its content, and sets how long that is.
    fn kind(
        &mut self,
        header: &Header,
        extended: &Extended,
        stored: u64,
        path: &[u8],
    ) -> Result<Kind, EntryProblem> {
        let link = || extended.link.clone().unwrap_or_else(|| header.link());
        // As in Go's reader: what cannot have content has none, whatever its size says.
        self.content = 0;
        self.padding = 0;
        let device = |major: u64, minor: u64| {
            if major > 0xfff || minor > 0xf_ffff {
                return Err(EntryProblem::BadDevice { major, minor });
            }
            Ok((major as u32, minor as u32))
        };
        match header.type_flag {
            b'0' | b'7' | 0 if extended.sparse.is_any() => {
                self.expect_content(stored)?;
                let map = extended.sparse.map(stored, self)?;
                let size =
                    extended.sparse.real_size.ok_or(EntryProblem::BadSparseMap { what: "no real size" })?;
                self.sparse(size, map)
            }
            // Archives from before ustar have no type for directories.
            b'0' | 0 if path.last() == Some(&b'/') => Ok(Kind::Directory),
            b'0' | b'7' | 0 => {
                self.expect_content(stored)?;
                Ok(Kind::File { size: stored })
            }
            b'S' => {
                let (size, map) = sparse::old_gnu(header, self)?;
                self.expect_content(stored)?;
                self.sparse(size, map)
            }
            b'1' => Ok(Kind::HardLink(link())),
            b'2' => Ok(Kind::Symlink(link())),
            b'3' => device(header.major, header.minor).map(|(major, minor)| Kind::CharDevice(major, minor)),
            b'4' => device(header.major, header.minor).map(|(major, minor)| Kind::BlockDevice(major, minor)),
            b'5' => Ok(Kind::Directory),
            b'6' => Ok(Kind::Fifo),
            other => Err(EntryProblem::UnsupportedType { type_flag: char::from(other) }),
        }
    }

    fn sparse(&self, size: u64, segments: Vec<Segment>) -> Result<Kind, EntryProblem> {
        sparse::check(size, &segments, self.content)?;
        Ok(Kind::Sparse { size, segments })
    }

    fn expect_content(&mut self, len: u64) -> Result<(), EntryProblem> {
        // Beyond this no padding or offset can be computed; no archive is that large.
        if len > i64::MAX as u64 {
            return Err(EntryProblem::BadHeader { what: "its size is absurd" });
        }
        self.content = len;
        self.padding = len.next_multiple_of(BLOCK as u64) - len;
        Ok(())
    }

    fn skip_rest(&mut self) -> Result<(), TarError> {
        let rest = self.content + self.padding;
        let skipped = self.stream.skip(rest).map_err(|e| self.error(read_problem(e)))?;
        self.offset += skipped;
        self.content = 0;
        self.padding = 0;
        if skipped < rest { Err(self.error(EntryProblem::Truncated)) } else { Ok(()) }
    }

    /// The next header, or nothing at the end mark. The mark is a zero block, and a second one or
    /// the end of the file: without it an archive cut between two entries would look whole.
    fn header_block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let at = self.offset;
        let block = self.block().map_err(|problem| self.at(at, problem))?;
        if block != [0; BLOCK] {
            return Ok(Some(block));
        }
        match self.block() {
            Ok(second) if second == [0; BLOCK] => Ok(None),
            Err(EntryProblem::Truncated) => Ok(None),
            Ok(_) => {
                Err(self.at(at, EntryProblem::BadHeader { what: "a single zero block, and more after it" }))
            }
            Err(problem) => Err(self.at(at, problem)),
        }
    }

    fn block(&mut self) -> Result<[u8; BLOCK], EntryProblem> {
        let mut block = [0; BLOCK];
        self.stream.read_exact(&mut block).map_err(read_problem)?;
        self.offset += BLOCK as u64;
        Ok(block)
    }

    /// The content of an extended header, with its padding.
    fn payload(&mut self, size: u64, room: &mut u64) -> Result<Vec<u8>, TarError> {
        if size > *room {
            return Err(self.error(EntryProblem::ExtendedHeaderTooLarge { size }));
        }
        *room -= size;
        let mut payload = vec![0; size.next_multiple_of(BLOCK as u64) as usize];
        self.stream.read_exact(&mut payload).map_err(|e| self.error(read_problem(e)))?;
        self.offset += payload.len() as u64;
        payload.truncate(size as usize);
        Ok(payload)
    }

    fn at(&self, offset: u64, problem: EntryProblem) -> TarError {
        let entry = match self.current.as_slice() {
            [] => format!("at byte {offset}"),
            current => format!("at byte {offset}, after {}", printable(current)),
        };
        TarError { entry, problem }
    }
}

/// The unread content of the current entry.
struct Body<'a, S> {
    reader: &'a mut TarReader<S>,
}

impl<S: Stream> Read for Body<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.reader.content).unwrap_or(usize::MAX));
        let got = self.reader.stream.read(&mut buffer[..most])?;
        self.reader.content -= got as u64;
        self.reader.offset += got as u64;
        Ok(got)
    }
}

/// What a failing stream means for the entry being read.
pub(crate) fn read_problem(error: io::Error) -> EntryProblem {
    if let Some(limit) = crate::intake::stream::limit_of(&error) {
        return EntryProblem::TooManyBytes { max: limit };
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof => EntryProblem::Truncated,
        _ => EntryProblem::Read(error),
    }
}

fn until_nul(bytes: &[u8]) -> Vec<u8> {
    bytes.split(|b| *b == 0).next().unwrap_or_default().to_vec()
}
