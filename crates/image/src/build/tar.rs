//! Writes a layer as a tar archive: POSIX headers, and PAX records for what does not fit into them.
//!
//! Source: POSIX.1-2024, `pax`; GNU tar's manual, "PAX Format, Version 1.0" for files with holes.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use crate::erofs::{BLOCK_SIZE, BlobRef, Content, FileData, Inode, InodeId, LayerTree, NULL_ADDR, Segment};
use crate::error::printable;
use crate::overlay;

use super::export::oci_form;
use super::walk;

/// Bytes in a unit of an archive.
const UNIT: usize = 512;
/// Longest name and link target in a plain header.
const NAME_MAX: usize = 100;
/// What eleven and seven octal digits hold.
const SIZE_MAX: u64 = 0o777_7777_7777;
const ID_MAX: u64 = 0o777_7777;
/// Content is copied in pieces of this size.
const PIECE: usize = 256 << 10;

/// Where the content of blobs comes from.
pub trait BlobReader {
    /// Fills `into` with a blob's plain bytes from `offset` on.
    ///
    /// # Errors
    /// The blob cannot be read.
    fn read(&mut self, blob: &BlobRef, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

/// Writes a layer as the tar archive of an OCI layer. The same layer gives the same bytes.
///
/// # Errors
/// Reading or writing failed, or the layer has what no archive has a form for.
pub(super) fn write_tar(
    layer: &LayerTree,
    blobs: &mut dyn BlobReader,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut implied = HashSet::new();
    for (id, inode) in layer.tree.iter() {
        if [overlay::LINK, overlay::REDIRECT]
            .iter()
            .any(|mark| overlay::get(&inode.attributes, mark).is_some())
        {
            return Err(unsupported("it points into other layers: export what it was merged into"));
        }
        if overlay::get(&inode.attributes, overlay::IMPLIED).is_some() {
            implied.insert(id);
        }
    }
    let layer = oci_form(layer);
    let mut tar = TarWriter { layer: &layer, blobs, out, links: HashMap::new() };
    let mut todo = vec![(layer.tree.root(), b".".to_vec())];
    while let Some((id, path)) = todo.pop() {
        let Some(inode) = layer.tree.get(id) else { continue };
        if !implied.contains(&id) {
            tar.entry(id, inode, &path)?;
        }
        // Backwards, so that they come off in order.
        for (name, below) in walk::entries(&layer.tree, id).into_iter().flatten().rev() {
            let path = match id == layer.tree.root() {
                true => name.to_vec(),
                false => [&path, b"/".as_slice(), name].concat(),
            };
            todo.push((*below, path));
        }
    }
    out.write_all(&[0; 2 * UNIT])
}

fn unsupported(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, problem.into())
}

struct TarWriter<'a> {
    layer: &'a LayerTree,
    blobs: &'a mut dyn BlobReader,
    out: &'a mut dyn Write,
    /// The first names of files with several.
    links: HashMap<InodeId, Vec<u8>>,
}

/// What a header says, beside an inode's attributes.
struct Entry<'a> {
    kind: u8,
    path: Vec<u8>,
    target: &'a [u8],
    size: u64,
    device: (u32, u32),
    records: Vec<u8>,
}

impl TarWriter<'_> {
    fn entry(&mut self, id: InodeId, inode: &Inode, path: &[u8]) -> io::Result<()> {
        let empty: &[u8] = b"";
        let plain = |kind| Entry {
            kind,
            path: path.to_vec(),
            target: empty,
            size: 0,
            device: (0, 0),
            records: Vec::new(),
        };
        if inode.names > 1 && !matches!(inode.content, Content::Directory(_)) {
            if let Some(first) = self.links.get(&id).cloned() {
                return self.header(inode, Entry { target: &first, ..plain(b'1') });
            }
            self.links.insert(id, path.to_vec());
        }
        let entry = match &inode.content {
            Content::Directory(_) => Entry { path: [path, b"/"].concat(), ..plain(b'5') },
            Content::File(data) => return self.file(inode, data, plain(b'0')),
            Content::Symlink(target) => Entry { target, ..plain(b'2') },
            Content::CharDevice(major, minor) => Entry { device: (*major, *minor), ..plain(b'3') },
            Content::BlockDevice(major, minor) => Entry { device: (*major, *minor), ..plain(b'4') },
            Content::Fifo => plain(b'6'),
            // The form for OCI has none.
            Content::Socket => return Ok(()),
        };
        self.header(inode, entry)
    }

    fn file(&mut self, inode: &Inode, data: &FileData, mut entry: Entry<'_>) -> io::Result<()> {
        let Some(segments) = segments(data) else {
            entry.size = data.size;
            self.header(inode, entry)?;
            self.content(data, 0, data.size)?;
            return self.pad(data.size);
        };
        let mut map = format!("{}\n", segments.len());
        for (segment, _) in &segments {
            map += &format!("{}\n{}\n", segment.offset, segment.len);
        }
        let mut map = map.into_bytes();
        map.resize(map.len().next_multiple_of(UNIT), 0);
        let stored: u64 = segments.iter().map(|(segment, _)| segment.len).sum();
        record(&mut entry.records, b"GNU.sparse.major", b"1");
        record(&mut entry.records, b"GNU.sparse.minor", b"0");
        record(&mut entry.records, b"GNU.sparse.name", &entry.path);
        record(&mut entry.records, b"GNU.sparse.realsize", data.size.to_string().as_bytes());
        entry.size = map.len() as u64 + stored;
        self.header(inode, entry)?;
        self.out.write_all(&map)?;
        for (segment, at) in &segments {
            self.content(data, *at, segment.len)?;
        }
        self.pad(stored)
    }

    /// Copies content that begins `at` bytes behind where the file's begins in its blob.
    fn content(&mut self, data: &FileData, at: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let blob = usize::from(data.device).checked_sub(1).and_then(|number| self.layer.blobs.get(number));
        let blob = blob.ok_or_else(|| unsupported("a file's content is in none of the layer's blobs"))?;
        let (mut from, mut left) = (u64::from(data.start) * BLOCK_SIZE + at, len);
        let mut piece = vec![0; PIECE.min(len.try_into().unwrap_or(PIECE))];
        while left > 0 {
            let part = &mut piece[..left.min(PIECE as u64) as usize];
            self.blobs.read(blob, from, part)?;
            self.out.write_all(part)?;
            from += part.len() as u64;
            left -= part.len() as u64;
        }
        Ok(())
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let over = (written % UNIT as u64) as usize;
        self.out.write_all(&[0; UNIT][..(UNIT - over) % UNIT])
    }

    fn header(&mut self, inode: &Inode, entry: Entry<'_>) -> io::Result<()> {
        let Entry { kind, path, target, size, device, mut records } = entry;
        let attributes = &inode.attributes;
        let fits = |name: &[u8]| name.len() <= NAME_MAX && name.is_ascii();
        if !fits(&path) {
            record(&mut records, b"path", &path);
        }
        if !fits(target) {
            record(&mut records, b"linkpath", target);
        }
        let mut number = |name: &[u8], value: u64, max: u64| {
            if value > max {
                record(&mut records, name, value.to_string().as_bytes());
            }
            if value > max { 0 } else { value }
        };
        let uid = number(b"uid", attributes.uid.into(), ID_MAX);
        let gid = number(b"gid", attributes.gid.into(), ID_MAX);
        let short_size = number(b"size", size, SIZE_MAX);
        let (seconds, nanoseconds) = (attributes.mtime.seconds, attributes.mtime.nanoseconds);
        let short_time = u64::try_from(seconds).ok().filter(|time| *time <= SIZE_MAX && nanoseconds == 0);
        if short_time.is_none() {
            record(&mut records, b"mtime", time_text(seconds, nanoseconds).as_bytes());
        }
        // A hard link's are those of the first name.
        for (name, value) in
            attributes.xattrs.iter().filter(|_| kind != b'1').flat_map(|xattrs| xattrs.iter())
        {
            if name.contains(&b'=') {
                let problem = format!("an extended attribute is called {}", printable(&name));
                return Err(unsupported(format!("{problem}: archives have no form for `=` in a name")));
            }
            record(&mut records, &[b"SCHILY.xattr.".as_slice(), &name].concat(), value);
        }
        if !records.is_empty() {
            let pax = raw_header(b'x', b"PaxHeader", b"", 0o644, [0, 0, records.len() as u64, 0], (0, 0));
            self.out.write_all(&pax)?;
            self.out.write_all(&records)?;
            self.pad(records.len() as u64)?;
        }
        let numbers = [uid, gid, short_size, short_time.unwrap_or_default()];
        self.out.write_all(&raw_header(kind, &path, target, attributes.mode, numbers, device))
    }
}

/// The stretches of a file with holes that have content, each with where it begins behind the first; none for a file without holes.
fn segments(data: &FileData) -> Option<Vec<(Segment, u64)>> {
    let chunks = data.chunks.as_ref()?;
    let chunk = BLOCK_SIZE << chunks.bits;
    let mut segments: Vec<(Segment, u64)> = Vec::new();
    for (number, place) in chunks.offsets.iter().enumerate().filter(|(_, place)| **place != NULL_ADDR) {
        let (offset, at) = (number as u64 * chunk, u64::from(*place) * BLOCK_SIZE);
        let len = chunk.min(data.size.saturating_sub(offset));
        match segments.last_mut() {
            Some((last, begun)) if last.offset + last.len == offset && *begun + last.len == at => {
                last.len += len
            }
            _ => segments.push((Segment { offset, len }, at)),
        }
    }
    // What ends in a hole says so with an empty stretch at its end.
    if segments.last().is_none_or(|(last, _)| last.offset + last.len < data.size) {
        segments.push((Segment { offset: data.size, len: 0 }, 0));
    }
    Some(segments)
}

/// `LENGTH NAME=VALUE\n`, the length that of all of it.
fn record(records: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    let rest = name.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    records.extend_from_slice(format!("{len} ").as_bytes());
    records.extend_from_slice(name);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// A time in decimal: the part behind the point counts away from zero, as the one before it.
fn time_text(seconds: i64, nanoseconds: u32) -> String {
    match (seconds < 0, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (true, _) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
        (false, _) => format!("{seconds}.{nanoseconds:09}"),
    }
}

/// A header; what does not fit is cut, and said in full by a record. Numbers: user, group, size, time.
fn raw_header(
    kind: u8,
    path: &[u8],
    target: &[u8],
    mode: u16,
    numbers: [u64; 4],
    device: (u32, u32),
) -> [u8; UNIT] {
    let mut header = [0; UNIT];
    let mut text = |at: usize, text: &[u8], max: usize| {
        let len = text.len().min(max);
        header[at..at + len].copy_from_slice(&text[..len]);
    };
    let [uid, gid, size, time] = numbers;
    text(0, path, NAME_MAX);
    text(157, target, NAME_MAX);
    text(257, b"ustar\x0000", 8);
    text(156, &[kind], 1);
    for (at, digits, value) in [
        (100, 7, u64::from(mode)),
        (108, 7, uid),
        (116, 7, gid),
        (124, 11, size),
        (136, 11, time),
        (329, 7, device.0.into()),
        (337, 7, device.1.into()),
    ] {
        text(at, format!("{value:0digits$o}").as_bytes(), digits);
    }
    // The sum is made with its own place full of spaces.
    text(148, b"        ", 8);
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_records_length_counts_itself() {
        for value in (0..200).chain(980..1010) {
            let mut records = Vec::new();
            record(&mut records, b"key", &vec![b'x'; value]);
            let text = String::from_utf8(records).unwrap();
            assert!(text.starts_with(&format!("{} key=", text.len())), "{value}: {text}");
        }
    }

    #[test]
    fn times_before_1970_count_backwards() {
        assert_eq!(time_text(5, 0), "5");
        assert_eq!(time_text(5, 7), "5.000000007");
        assert_eq!(time_text(-2, 500_000_000), "-1.500000000");
        assert_eq!(time_text(-1, 250_000_000), "-0.750000000");
        assert_eq!(time_text(-3, 0), "-3");
    }
}
