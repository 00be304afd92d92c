//! Access control lists as text (`SCHILY.acl.*`), which GNU tar writes with `--acls`.
//!
//! They cannot be left out: a file's group bits are then its list's mask, and without the list the
//! group would get all that the mask allows.
//! Source: `acl(5)` for the text, the kernel's `linux/posix_acl_xattr.h` for the attribute.

/// `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;
/// The id of an entry that has none.
const NO_ID: u32 = u32::MAX;

/// Whether a value holds no more than owner, group and others: what the mode says too. Such an
/// access list is never stored by the kernel, though tar writes it for directories.
pub(crate) fn is_mode(value: &[u8]) -> bool {
    value[4..].chunks_exact(8).all(|entry| matches!(entry[0], 0x01 | 0x04 | 0x20))
}

/// The attribute's value for a list, or what is wrong with it.
pub(crate) fn encode(text: &[u8]) -> Result<Vec<u8>, &'static str> {
    let text = std::str::from_utf8(text).map_err(|_| "its access list is no text")?;
    let lines = text.split([',', '\n']).map(str::trim).filter(|line| !line.is_empty());
    let mut entries = lines.map(entry).collect::<Result<Vec<_>, _>>()?;
    // The kernel takes them in this order only.
    entries.sort_unstable();
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Ok(value)
}

/// `type:who:rwx`, or star's `type:name:rwx:id`, as tag, id and permissions.
fn entry(line: &str) -> Result<(u16, u32, u16), &'static str> {
    let mut fields = line.split(':');
    let (Some(kind), Some(who), Some(permissions)) = (fields.next(), fields.next(), fields.next()) else {
        return Err("an entry of its access list is incomplete");
    };
    let who = fields.next().unwrap_or(who);
    let tag = match (kind, who.is_empty()) {
        ("user" | "u", true) => 0x01,
        ("user" | "u", false) => 0x02,
        ("group" | "g", true) => 0x04,
        ("group" | "g", false) => 0x08,
        ("mask" | "m", true) => 0x10,
        ("other" | "o", true) => 0x20,
        _ => return Err("its access list has an entry of unknown kind"),
    };
    let id = if who.is_empty() { Ok(NO_ID) } else { who.parse() };
    // The image's own accounts are not known while it is read, and the host's are not its.
    let id =
        id.map_err(|_| "its access list has names in place of numbers: archive it with --xattrs-include=* and not --acls")?;
    let mut bits = 0;
    for (allowed, bit) in [('r', 4), ('w', 2), ('x', 1)] {
        if permissions.contains(allowed) {
            bits |= bit;
        }
    }
    if permissions.is_empty() || !permissions.chars().all(|c| "rwx-".contains(c)) {
        return Err("its access list has permissions other than rwx");
    }
    Ok((tag, id, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_encoded_in_the_kernels_order() {
        let expected = [
            2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0, 4, 0, 4, 0, 255, 255, 255,
            255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
        ];
        for text in [
            "user::rw-,user:1000:r--,group::r--,mask::r--,other::---",
            "other::---\nmask::r--\ngroup::r--\nuser:alice:r--:1000\nuser::rw-\n",
        ] {
            assert_eq!(encode(text.as_bytes()), Ok(expected.to_vec()));
        }
        for bad in ["user::", "user:alice:r--", "mask:5:rwx", "x::rwx", "user", "user::rwz", "user:-1:r--"] {
            assert!(encode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
