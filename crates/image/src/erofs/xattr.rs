//! Extended attributes of one inode, in the form they have on disk.

use super::format::XATTR_HEADER_SIZE;

/// Largest value: `e_value_size` has 16 bits.
const VALUE_MAX: usize = u16::MAX as usize;
/// Largest whole: `i_xattr_icount` has 16 bits and counts four-byte words after the header.
const TOTAL_MAX: usize = XATTR_HEADER_SIZE + 4 * (u16::MAX as usize - 1);

/// The name prefixes EROFS knows, with their index (`EROFS_XATTR_INDEX_*`).
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Why an attribute cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum XattrError {
    /// The name is in no namespace that EROFS (and Linux) has.
    #[error("the attribute's namespace does not exist on Linux; use user., trusted. or security.")]
    UnknownNamespace,
    /// The name without its namespace is empty or over 255 bytes, or contains NUL.
    #[error("the attribute's name must have 1 to 255 bytes after its namespace, none of them NUL")]
    BadName,
    /// The value is over 65,535 bytes, or all attributes together over 256 KiB.
    #[error("the attribute is too large: one value may have 65535 bytes, all of a file 256 KiB")]
    TooLarge,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Xattr {
    index: u8,
    name: Box<[u8]>,
    value: Box<[u8]>,
}

impl Xattr {
    fn full_name(&self) -> Vec<u8> {
        let prefix =
            PREFIXES.iter().find(|(_, index)| *index == self.index).map_or(b"".as_slice(), |(p, _)| p);
        [prefix, &self.name].concat()
    }

    fn encoded_size(&self) -> usize {
        (4 + self.name.len() + self.value.len()).next_multiple_of(4)
    }
}

/// The extended attributes of one inode, sorted, so that the order of a source does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Xattrs(Vec<Xattr>);

impl Xattrs {
    /// Sets `name` (with its namespace, such as `security.capability`) to `value`.
    ///
    /// # Errors
    /// [`XattrError`]; the set is then as before.
    pub fn set(&mut self, name: &[u8], value: &[u8]) -> Result<(), XattrError> {
        let (index, rest) = split(name).ok_or(XattrError::UnknownNamespace)?;
        let whole_name = matches!(index, 2 | 3);
        if whole_name != rest.is_empty() || rest.len() > 255 || rest.contains(&0) {
            return Err(XattrError::BadName);
        }
        if value.len() > VALUE_MAX {
            return Err(XattrError::TooLarge);
        }
        let new = Xattr { index, name: rest.into(), value: value.into() };
        let mut next = self.0.clone();
        next.retain(|old| (old.index, &old.name) != (new.index, &new.name));
        next.push(new);
        next.sort();
        let next = Self(next);
        if next.encoded_size() > TOTAL_MAX {
            return Err(XattrError::TooLarge);
        }
        *self = next;
        Ok(())
    }

    /// The value of `name`, if it is set.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        let (index, rest) = split(name)?;
        let found = self.0.iter().find(|xattr| xattr.index == index && xattr.name.as_ref() == rest)?;
        Some(&found.value)
    }

    /// Removes all whose full name `doomed` says yes to.
    pub fn remove_if(&mut self, mut doomed: impl FnMut(&[u8]) -> bool) {
        self.0.retain(|xattr| !doomed(&xattr.full_name()));
    }

    /// Full names and values, sorted as they are stored.
    pub fn iter(&self) -> impl Iterator<Item = (Vec<u8>, &[u8])> {
        self.0.iter().map(|xattr| (xattr.full_name(), xattr.value.as_ref()))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes behind the inode: header and entries, nothing when there are none.
    pub(crate) fn encoded_size(&self) -> usize {
        if self.0.is_empty() {
            return 0;
        }
        XATTR_HEADER_SIZE + self.0.iter().map(Xattr::encoded_size).sum::<usize>()
    }

    /// `i_xattr_icount`: the header counts as one, then one for each four bytes.
    pub(crate) fn count(&self) -> u16 {
        match self.encoded_size() {
            0 => 0,
            size => (1 + (size - XATTR_HEADER_SIZE) / 4) as u16,
        }
    }

    /// Reads what [`Self::encode`] makes; none of anything else.
    pub(crate) fn decode(raw: &[u8]) -> Option<Self> {
        let mut rest = raw.strip_prefix(&[0; XATTR_HEADER_SIZE])?;
        let mut all: Vec<Xattr> = Vec::new();
        while let Some(([name_len, index, value_low, value_high], body)) = rest.split_first_chunk::<4>() {
            let (name_len, value_len) =
                (usize::from(*name_len), usize::from(u16::from_le_bytes([*value_low, *value_high])));
            let padded = (4 + name_len + value_len).next_multiple_of(4) - 4;
            let (body, after) = body.split_at_checked(padded)?;
            let (name, value) = (&body[..name_len], &body[name_len..name_len + value_len]);
            let xattr = Xattr { index: *index, name: name.into(), value: value.into() };
            let known = PREFIXES.iter().any(|(_, known)| known == index);
            let in_order = all.last().is_none_or(|last| (last.index, &last.name) < (*index, &xattr.name));
            let padding_is_zero = body[name_len + value_len..].iter().all(|byte| *byte == 0);
            if !known
                || !in_order
                || !padding_is_zero
                || matches!(index, 2 | 3) != name.is_empty()
                || name.contains(&0)
            {
                return None;
            }
            all.push(xattr);
            rest = after;
        }
        (rest.is_empty() && !all.is_empty()).then_some(Self(all))
    }

    /// Header and entries, as they follow the inode.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        if self.0.is_empty() {
            return;
        }
        // No name filter and no shared attributes.
        out.extend_from_slice(&[0; XATTR_HEADER_SIZE]);
        for xattr in &self.0 {
            out.extend_from_slice(&[xattr.name.len() as u8, xattr.index]);
            out.extend_from_slice(&(xattr.value.len() as u16).to_le_bytes());
            out.extend_from_slice(&xattr.name);
            out.extend_from_slice(&xattr.value);
            let padding = xattr.encoded_size() - (4 + xattr.name.len() + xattr.value.len());
            out.extend_from_slice(&[0; 4][..padding]);
        }
    }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(prefix, index)| name.strip_prefix(*prefix).map(|rest| (*index, rest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_format_are_refused_before_anything_is_stored() {
        let mut set = Xattrs::default();
        assert_eq!(set.set(b"com.apple.provenance", b""), Err(XattrError::UnknownNamespace));
        assert_eq!(set.set(b"user.", b""), Err(XattrError::BadName));
        assert_eq!(set.set(b"system.posix_acl_accessory", b""), Err(XattrError::BadName));
        assert_eq!(set.set(&[b"user.".as_slice(), &[b'n'; 256]].concat(), b""), Err(XattrError::BadName));
        assert_eq!(set.set(b"user.v", &[0; 65_536]), Err(XattrError::TooLarge));
        assert!(set.is_empty());
        for name in 0..3u8 {
            set.set(&[b'u', b's', b'e', b'r', b'.', b'a' + name], &[0; 65_535]).unwrap();
        }
        assert_eq!(set.set(b"user.d", &[0; 65_535]), Err(XattrError::TooLarge));
        assert_eq!(set.0.len(), 3);
    }

    #[test]
    fn encoding_is_sorted_padded_and_of_the_announced_size() {
        let mut one = Xattrs::default();
        one.set(b"user.b", b"12345").unwrap();
        one.set(b"security.capability", b"x").unwrap();
        one.set(b"user.b", b"1").unwrap();
        let mut other = Xattrs::default();
        other.set(b"security.capability", b"x").unwrap();
        other.set(b"user.b", b"1").unwrap();
        assert_eq!(one, other);
        let mut raw = Vec::new();
        one.encode(&mut raw);
        assert_eq!(raw.len(), one.encoded_size());
        assert_eq!(raw.len() % 4, 0);
        assert_eq!(&raw[12..18], &[1, 1, 1, 0, b'b', b'1']);
        assert_eq!(usize::from(one.count()), 1 + (raw.len() - 12) / 4);
    }
}
