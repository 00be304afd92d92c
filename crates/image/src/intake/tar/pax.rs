//! Extended headers: PAX records and GNU's long names.

use crate::erofs::Timestamp;
use crate::error::EntryProblem;

use super::acl;
use super::header::Header;
use super::sparse::PaxSparse;

/// What extended headers say of the entry after them.
#[derive(Debug, Default)]
pub(crate) struct Extended {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) uid: Option<u64>,
    pub(crate) gid: Option<u64>,
    pub(crate) mtime: Option<Timestamp>,
    /// Full names with values, in the archive's order.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) sparse: PaxSparse,
}

const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
const SPARSE_PREFIX: &[u8] = b"GNU.sparse.";

fn bad(what: &'static str) -> EntryProblem {
    EntryProblem::BadExtendedHeader { what }
}

impl Extended {
    /// Reads the records of one entry's header.
    pub(crate) fn parse_pax(&mut self, payload: &[u8]) -> Result<(), EntryProblem> {
        for_each_record(payload, |key, value| match key {
            b"path" => path(value).map(|value| self.path = value),
            b"linkpath" => path(value).map(|value| self.link = value),
            b"size" => decimal(value).map(|value| self.size = Some(value)),
            b"SCHILY.acl.access" => self.acl(b"system.posix_acl_access", value),
            b"SCHILY.acl.default" => self.acl(b"system.posix_acl_default", value),
            _ => {
                if let Some(name) = key.strip_prefix(XATTR_PREFIX) {
                    self.xattrs.push((decode_keyword(name), value.to_vec()));
                    return Ok(());
                }
                match key.strip_prefix(SPARSE_PREFIX) {
                    Some(name) => self.sparse.record(name, value),
                    None => self.common(key, value),
                }
            }
        })
    }

    fn acl(&mut self, name: &[u8], text: &[u8]) -> Result<(), EntryProblem> {
        // GNU tar writes an empty one where there is none.
        if text.is_empty() {
            return Ok(());
        }
        let value = acl::encode(text).map_err(bad)?;
        if name != b"system.posix_acl_access" || !acl::is_mode(&value) {
            self.xattrs.push((name.to_vec(), value));
        }
        Ok(())
    }

    /// Reads a global header: defaults for all entries after it.
    pub(crate) fn parse_global(&mut self, payload: &[u8]) -> Result<(), EntryProblem> {
        for_each_record(payload, |key, value| match key {
            b"path" | b"linkpath" | b"size" => Err(bad("a global header names one file")),
            _ if key.starts_with(XATTR_PREFIX) || key.starts_with(SPARSE_PREFIX) => {
                Err(bad("a global header describes one file"))
            }
            _ => self.common(key, value),
        })
    }

    /// Owner, group and time, from the entry's own header, else the global one, else the block.
    pub(crate) fn or(&self, own: &Self, header: &Header) -> Result<(u32, u32, Timestamp), EntryProblem> {
        let id = |own: Option<u64>, global: Option<u64>, block: i128, what| {
            let id = own.or(global).map_or(block, i128::from);
            u32::try_from(id).map_err(|_| EntryProblem::BadHeader { what })
        };
        let uid = id(own.uid, self.uid, header.uid, "its owner does not fit 32 bits")?;
        let gid = id(own.gid, self.gid, header.gid, "its group does not fit 32 bits")?;
        let block = Timestamp { seconds: header.mtime, nanoseconds: 0 };
        Ok((uid, gid, own.mtime.or(self.mtime).unwrap_or(block)))
    }

    // Names of users and groups are not read: the host's accounts are not the image's. SELinux
    // labels (`RHT.security.selinux`) belong to the policy of where they were made. Access and
    // change times are not kept by EROFS.
    fn common(&mut self, key: &[u8], value: &[u8]) -> Result<(), EntryProblem> {
        match key {
            b"uid" => self.uid = Some(decimal(value)?),
            b"gid" => self.gid = Some(decimal(value)?),
            b"mtime" => self.mtime = Some(time(value).ok_or_else(|| bad("its time is no number"))?),
            _ => {}
        }
        Ok(())
    }
}

/// A path; an empty one takes back what an earlier record said.
fn path(value: &[u8]) -> Result<Option<Vec<u8>>, EntryProblem> {
    if value.contains(&0) {
        return Err(EntryProblem::NulByte);
    }
    Ok((!value.is_empty()).then(|| value.to_vec()))
}

/// Calls `each` with the records `<length> <key>=<value>\n`.
fn for_each_record(
    mut rest: &[u8],
    mut each: impl FnMut(&[u8], &[u8]) -> Result<(), EntryProblem>,
) -> Result<(), EntryProblem> {
    while !rest.is_empty() {
        let space =
            rest.iter().take(20).position(|b| *b == b' ').ok_or_else(|| bad("a record has no length"))?;
        let len = decimal(&rest[..space])?;
        let len = usize::try_from(len).ok().filter(|len| (space + 3..=rest.len()).contains(len));
        let (record, after) = rest.split_at(len.ok_or_else(|| bad("a record has a wrong length"))?);
        let body = record[space + 1..].strip_suffix(b"\n").ok_or_else(|| bad("a record has no end"))?;
        let equals = body.iter().position(|b| *b == b'=').ok_or_else(|| bad("a record has no value"))?;
        each(&body[..equals], &body[equals + 1..])?;
        rest = after;
    }
    Ok(())
}

/// A whole number.
pub(crate) fn decimal(text: &[u8]) -> Result<u64, EntryProblem> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(text).ok().filter(|_| digits).and_then(|text| text.parse().ok());
    number.ok_or_else(|| bad("a number is none"))
}

/// Decimal seconds with a fraction; digits beyond nanoseconds are cut towards the past.
fn time(text: &[u8]) -> Option<Timestamp> {
    let text = std::str::from_utf8(text).ok()?;
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if whole.is_empty() || !text.bytes().all(|b| b.is_ascii_digit() || b == b'.') || fraction.contains('.') {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let nanoseconds: u32 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    Some(match (negative, nanoseconds) {
        (false, _) => Timestamp { seconds, nanoseconds },
        (true, 0) => Timestamp { seconds: -seconds, nanoseconds: 0 },
        (true, _) => Timestamp { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
    })
}

/// GNU tar writes `=` and `%` in an attribute's name as `%3D` and `%25`.
fn decode_keyword(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, after)) = rest.split_first() {
        let (byte, after) = match rest {
            [b'%', b'3', b'D', after @ ..] => (b'=', after),
            [b'%', b'2', b'5', after @ ..] => (b'%', after),
            _ => (*first, after),
        };
        out.push(byte);
        rest = after;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_before_1970_round_towards_the_past() {
        let at = |seconds, nanoseconds| Some(Timestamp { seconds, nanoseconds });
        assert_eq!(time(b"12.5"), at(12, 500_000_000));
        assert_eq!(time(b"12"), at(12, 0));
        assert_eq!(time(b"0.1234567899"), at(0, 123_456_789));
        assert_eq!(time(b"-1.25"), at(-2, 750_000_000));
        assert_eq!(time(b"-3"), at(-3, 0));
        for bad in [b"".as_slice(), b"-", b"1.2.3", b"1e3", b".5", b"+1"] {
            assert_eq!(time(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_value_may_hold_newlines_and_zero_bytes() {
        let mut extended = Extended::default();
        extended.parse_pax(b"28 SCHILY.xattr.user.a=\n\0=b\n12 path=abc\n").unwrap();
        assert_eq!(extended.xattrs, [(b"user.a".to_vec(), b"\n\0=b".to_vec())]);
        assert_eq!(extended.path.as_deref(), Some(b"abc".as_slice()));
        assert_eq!(decode_keyword(b"user.a%3Db%25%41"), b"user.a=b%%41");
    }

    proptest! {
        #[test]
        fn no_payload_panics(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Extended::default().parse_pax(&payload);
        }

        #[test]
        fn no_truncated_payload_panics(cut in 0usize..60) {
            let whole = b"30 mtime=-123456789.123456789\n20 GNU.sparse.major=1\n";
            let _ = Extended::default().parse_pax(&whole[..cut.min(whole.len())]);
        }
    }
}
