//! Maps of sparse files, in GNU tar's four forms.
//! Source: the GNU tar manual, "Storing Sparse Files".

use crate::erofs::Segment;
use crate::error::EntryProblem;
use crate::intake::stream::Stream;

use super::header::{BLOCK, Header, number};
use super::pax::decimal;
use super::{TarReader, read_problem};

/// Most segments a file may have (16 MiB of map): one per 4 KiB of a 4 GiB file.
const SEGMENTS_MAX: usize = 1 << 20;

fn bad(what: &'static str) -> EntryProblem {
    EntryProblem::BadSparseMap { what }
}

/// The `GNU.sparse.*` records of a PAX header.
#[derive(Debug, Default)]
pub(crate) struct PaxSparse {
    major: Option<u64>,
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) real_size: Option<u64>,
    segments: Vec<Segment>,
    /// An offset of the 0.0 form, before its length comes.
    open: Option<u64>,
    mapped: bool,
}

impl PaxSparse {
    /// Takes one record, its name without `GNU.sparse.`.
    pub(crate) fn record(&mut self, name: &[u8], value: &[u8]) -> Result<(), EntryProblem> {
        match name {
            b"major" => self.major = Some(decimal(value)?),
            b"name" if value.contains(&0) => return Err(EntryProblem::NulByte),
            b"name" => self.name = Some(value.to_vec()),
            b"size" | b"realsize" => self.real_size = Some(decimal(value)?),
            b"offset" => self.open = Some(decimal(value)?),
            b"numbytes" => {
                let offset = self.open.take().ok_or_else(|| bad("a length without an offset"))?;
                self.mapped = true;
                push(&mut self.segments, offset, decimal(value)?)?;
            }
            b"map" => {
                self.mapped = true;
                self.segments.clear();
                let mut numbers = value.split(|b| *b == b',').filter(|text| !text.is_empty());
                while let Some(offset) = numbers.next() {
                    let len = numbers.next().ok_or_else(|| bad("an offset without a length"))?;
                    push(&mut self.segments, decimal(offset)?, decimal(len)?)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether the entry is a sparse file.
    pub(crate) fn is_any(&self) -> bool {
        self.major.is_some_and(|major| major > 0) || self.mapped
    }

    /// The map: from the records, or in form 1.0 from the start of the content.
    pub(crate) fn map<S: Stream>(
        &self,
        stored: u64,
        reader: &mut TarReader<S>,
    ) -> Result<Vec<Segment>, EntryProblem> {
        match self.major {
            None | Some(0) => Ok(self.segments.clone()),
            Some(1) => read_map(stored, reader),
            Some(_) => Err(bad("a version this program does not know")),
        }
    }
}

/// Form 1.0: decimal numbers, one a line, in blocks of their own before the content.
fn read_map<S: Stream>(stored: u64, reader: &mut TarReader<S>) -> Result<Vec<Segment>, EntryProblem> {
    let mut lines = Lines { reader, left: stored, block: [0; BLOCK], at: BLOCK };
    let count = lines.number()?;
    let mut segments = Vec::new();
    for _ in 0..count {
        let offset = lines.number()?;
        let len = lines.number()?;
        push(&mut segments, offset, len)?;
    }
    let left = lines.left;
    reader.content = left;
    Ok(segments)
}

struct Lines<'a, S> {
    reader: &'a mut TarReader<S>,
    left: u64,
    block: [u8; BLOCK],
    at: usize,
}

impl<S: Stream> Lines<'_, S> {
    fn number(&mut self) -> Result<u64, EntryProblem> {
        let mut digits = Vec::new();
        loop {
            if self.at == BLOCK {
                self.left = self.left.checked_sub(BLOCK as u64).ok_or_else(|| bad("the map has no end"))?;
                self.reader.stream.read_exact(&mut self.block).map_err(read_problem)?;
                self.reader.offset += BLOCK as u64;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            match byte {
                b'\n' => return decimal(&digits).map_err(|_| bad("a number is none")),
                b'0'..=b'9' if digits.len() < 20 => digits.push(byte),
                _ => return Err(bad("a number is none")),
            }
        }
    }
}

/// The old GNU form: four segments in the header, 21 in each block after it. Gives the real size.
pub(crate) fn old_gnu<S: Stream>(
    header: &Header,
    reader: &mut TarReader<S>,
) -> Result<(u64, Vec<Segment>), EntryProblem> {
    let field =
        |raw: &[u8]| number(raw).and_then(|n| u64::try_from(n).ok()).ok_or_else(|| bad("a number is none"));
    let take = |raw: &[u8], segments: &mut Vec<Segment>| {
        for pair in raw.chunks_exact(24) {
            // An unused pair is all zeros.
            if pair[0] == 0 && pair[12] == 0 {
                break;
            }
            push(segments, field(&pair[..12])?, field(&pair[12..])?)?;
        }
        Ok::<(), EntryProblem>(())
    };
    let mut segments = Vec::new();
    take(&header.raw[386..482], &mut segments)?;
    let mut more = header.raw[482] != 0;
    while more {
        let block = reader.block()?;
        take(&block[..504], &mut segments)?;
        more = block[504] != 0;
    }
    Ok((field(&header.raw[483..495])?, segments))
}

fn push(segments: &mut Vec<Segment>, offset: u64, len: u64) -> Result<(), EntryProblem> {
    if segments.len() == SEGMENTS_MAX {
        return Err(bad("more than 1048576 pieces"));
    }
    segments.push(Segment { offset, len });
    Ok(())
}

/// Refuses maps that overlap, run past the file, or differ from the content that is stored.
pub(crate) fn check(size: u64, segments: &[Segment], stored: u64) -> Result<(), EntryProblem> {
    let (mut end, mut sum) = (0u64, 0u64);
    if size > i64::MAX as u64 {
        return Err(bad("the file's size is absurd"));
    }
    for segment in segments {
        if segment.offset < end {
            return Err(bad("its pieces overlap or are out of order"));
        }
        end = segment
            .offset
            .checked_add(segment.len)
            .filter(|end| *end <= size)
            .ok_or_else(|| bad("a piece ends after the file"))?;
        sum += segment.len;
    }
    if sum == stored { Ok(()) } else { Err(bad("its pieces are not as long as the content")) }
}
