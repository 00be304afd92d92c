//! The 512-byte header block.

/// Bytes in a tar block.
pub(crate) const BLOCK: usize = 512;

/// A header block, its numbers read.
pub(crate) struct Header {
    pub(crate) raw: [u8; BLOCK],
    pub(crate) type_flag: u8,
    pub(crate) mode: u64,
    pub(crate) uid: i128,
    pub(crate) gid: i128,
    pub(crate) size: u64,
    pub(crate) mtime: i64,
    pub(crate) major: u64,
    pub(crate) minor: u64,
}

impl Header {
    /// Checks the checksum and reads the numbers.
    pub(crate) fn parse(raw: [u8; BLOCK]) -> Result<Self, &'static str> {
        let stated = number(&raw[148..156]).ok_or("its checksum is no number")?;
        let sum = |signed: bool| -> i128 {
            raw.iter()
                .enumerate()
                .map(|(at, byte)| match (at, signed) {
                    (148..156, _) => i128::from(b' '),
                    // Some old archivers added signed characters.
                    (_, true) => i128::from(*byte as i8),
                    (_, false) => i128::from(*byte),
                })
                .sum()
        };
        if stated != sum(false) && stated != sum(true) {
            return Err("its checksum is wrong");
        }
        let unsigned = |field: &[u8]| number(field).and_then(|n| u64::try_from(n).ok());
        let type_flag = raw[156];
        // Only devices have these, and some archivers leave garbage there for everything else.
        let device = matches!(type_flag, b'3' | b'4');
        let device_number = |field: &[u8]| if device { unsigned(field) } else { Some(0) };
        Ok(Self {
            type_flag,
            mode: unsigned(&raw[100..108]).ok_or("its mode is no number")?,
            uid: number(&raw[108..116]).ok_or("its owner is no number")?,
            gid: number(&raw[116..124]).ok_or("its group is no number")?,
            size: unsigned(&raw[124..136]).ok_or("its size is no number")?,
            mtime: number(&raw[136..148])
                .and_then(|n| i64::try_from(n).ok())
                .ok_or("its time is no number")?,
            major: device_number(&raw[329..337]).ok_or("its device is no number")?,
            minor: device_number(&raw[337..345]).ok_or("its device is no number")?,
            raw,
        })
    }

    /// Name with prefix.
    pub(crate) fn path(&self) -> Vec<u8> {
        let name = super::until_nul(&self.raw[..100]);
        // GNU's magic is `ustar  `; it keeps other things where POSIX has the prefix.
        let prefix = if &self.raw[257..263] == b"ustar\0" {
            super::until_nul(&self.raw[345..500])
        } else {
            Vec::new()
        };
        if prefix.is_empty() { name } else { [prefix.as_slice(), b"/", name.as_slice()].concat() }
    }

    /// Link target.
    pub(crate) fn link(&self) -> Vec<u8> {
        super::until_nul(&self.raw[157..257])
    }
}

/// A numeric field: octal digits with blanks or NULs around, nothing for zero, or GNU's base 256.
pub(crate) fn number(field: &[u8]) -> Option<i128> {
    match field.first()? {
        0x80 => base256(0, &field[1..]),
        0xff => base256(-1, &field[1..]),
        _ => {
            let text = field.trim_ascii_start();
            let end = text.iter().position(|b| matches!(b, 0 | b' ')).unwrap_or(text.len());
            let (digits, rest) = text.split_at(end);
            if rest.iter().any(|b| !matches!(b, 0 | b' ')) {
                return None;
            }
            digits.iter().try_fold(0, |sum: i128, digit| match digit {
                b'0'..=b'7' => Some(sum * 8 + i128::from(digit - b'0')),
                _ => None,
            })
        }
    }
}

fn base256(start: i128, bytes: &[u8]) -> Option<i128> {
    Some(bytes.iter().fold(start, |sum, byte| (sum << 8) | i128::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_in_all_their_forms() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(number(b"        "), Some(0));
        assert_eq!(number(b"77777777"), Some(0o77_777_777));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\0\x02\0\0\0"), Some(2 << 24));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe"), Some(-2));
        for bad in [b"12a4567\0".as_slice(), b"12 4567\0", b"-1\0\0\0\0\0\0", b"89\0\0\0\0\0\0"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn octal_round_trips(value in 0u64..(1 << 33)) {
            prop_assert_eq!(number(format!("{value:011o}\0").as_bytes()), Some(i128::from(value)));
        }

        #[test]
        fn no_block_panics(raw in proptest::collection::vec(any::<u8>(), BLOCK)) {
            let mut block = [0; BLOCK];
            block.copy_from_slice(&raw);
            let _ = Header::parse(block);
        }
    }
}
