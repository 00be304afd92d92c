//! Users as the sandbox's own `/etc/passwd` and `/etc/group` name them.
//!
//! Read by a child that already is root of the users' namespace: the agent itself may not be able to
//! read them, and a file that hangs a reader (a fifo put there) must not hang the agent.

use dsec_proto::guest::GuestError;
use rustix::fs::{FileType, Mode, OFlags, fstat, open};

use crate::fail::{fail, invalid, os, show};

/// Larger account files are refused: nothing real comes near.
const FILE_MAX: usize = 1 << 20;
/// `NGROUPS_MAX`.
const GROUPS_MAX: usize = 65536;

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Missing for a number that the file does not have.
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) home: Vec<u8>,
    pub(crate) shell: Vec<u8>,
}

/// Finds `name`, `uid`, `name:group`, `uid:gid`; empty is root.
pub(crate) fn lookup(spec: &str) -> Result<User, GuestError> {
    let passwd = read("/etc/passwd")?;
    let group = read("/etc/group")?;
    find(spec, &passwd, &group)
}

/// `user[:group]` as two ids, for a file's owner; the group missing: the user's.
pub(crate) fn owner(spec: &str) -> Result<(u32, u32), GuestError> {
    lookup(spec).map(|user| (user.uid, user.gid))
}

fn find(spec: &str, passwd: &[u8], group: &[u8]) -> Result<User, GuestError> {
    let (name, wanted_group) = match spec.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (spec, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let number = name.parse::<u32>().ok();
    let entry = passwd.split(|b| *b == b'\n').find_map(|line| {
        let user = parse_user(line)?;
        // A name made of digits is a number, as everywhere else (`chown`, Docker).
        (number == Some(user.uid) || number.is_none() && user.name.as_deref() == Some(name.as_bytes()))
            .then_some(user)
    });
    // An image of a few programs has no accounts, and root is its default user all the same.
    let number = number.or((name == "root").then_some(0));
    let mut user = match (entry, number) {
        (Some(user), _) => user,
        // A number without an entry has group 0 and no home, as in Docker.
        (None, Some(uid)) => {
            let shell = b"/bin/sh".to_vec();
            User { uid, gid: 0, groups: Vec::new(), name: None, home: b"/".to_vec(), shell }
        }
        (None, None) => return Err(invalid(format!("user `{name}` is not in /etc/passwd"))),
    };
    match wanted_group {
        None => user.groups = member_of(user.name.as_deref(), group),
        // A group that was asked for is the only one, as in Docker.
        Some(wanted) => user.gid = group_id(wanted, group)?,
    }
    Ok(user)
}

fn parse_user(line: &[u8]) -> Option<User> {
    let mut fields = line.split(|b| *b == b':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let uid = number(fields.nth(1)?)?;
    let gid = number(fields.next()?)?;
    let home = fields.nth(1).filter(|h| h.starts_with(b"/")).unwrap_or(b"/");
    let shell = fields.next().filter(|s| s.starts_with(b"/")).unwrap_or(b"/bin/sh");
    Some(User {
        uid,
        gid,
        groups: Vec::new(),
        name: Some(name.to_vec()),
        home: home.to_vec(),
        shell: shell.to_vec(),
    })
}

fn groups(file: &[u8]) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
    file.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(|b| *b == b':');
        let name = fields.next()?;
        let gid = number(fields.nth(1)?)?;
        Some((name, gid, fields.next().unwrap_or_default()))
    })
}

fn member_of(name: Option<&[u8]>, file: &[u8]) -> Vec<u32> {
    let Some(name) = name else { return Vec::new() };
    groups(file)
        .filter(|(_, _, members)| members.split(|b| *b == b',').any(|m| m == name))
        .map(|(_, gid, _)| gid)
        .take(GROUPS_MAX)
        .collect()
}

fn group_id(wanted: &str, file: &[u8]) -> Result<u32, GuestError> {
    if let Ok(gid) = wanted.parse() {
        return Ok(gid);
    }
    groups(file)
        .find(|(name, ..)| *name == wanted.as_bytes())
        .map(|(_, gid, _)| gid)
        .ok_or_else(|| invalid(format!("group `{wanted}` is not in /etc/group")))
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// A missing file is an empty one; whatever is not a regular file is refused, unread.
fn read(path: &str) -> Result<Vec<u8>, GuestError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = match open(path, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::NOENT) => return Ok(Vec::new()),
        Err(e) => return Err(os(format!("cannot read {path}"), e)),
    };
    let stat = fstat(&fd).map_err(|e| os(format!("cannot read {path}"), e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(invalid(format!("{path} is not a regular file; users cannot be looked up")));
    }
    let mut content = vec![0; FILE_MAX.min(usize::try_from(stat.st_size).unwrap_or(0) + 1)];
    let mut len = 0;
    while len < content.len() {
        match rustix::io::read(&fd, &mut content[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) => return Err(os(format!("cannot read {path}"), e)),
        }
    }
    if len >= FILE_MAX {
        let kind = dsec_proto::guest::GuestErrorKind::TooLarge;
        return Err(fail(kind, format!("{} is larger than {FILE_MAX} bytes", show(path.as_bytes()))));
    }
    content.truncate(len);
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"\n# comment\nroot:x:0:0:root:/root:/bin/bash\n\xff\xfe:::\nshort:x\n\
        bob:x:1000:1001:Bob,,,:/home/bob:/bin/zsh\nnohome:x:7:7\n123:x:5:5::/x:/y\n";
    const GROUP: &[u8] = b"root:x:0:\nwheel:x:10:root,bob\nbad\ndocker:x:99:bob\nbobby:x:98:bobb\n";

    #[test]
    fn a_name_brings_its_groups_home_and_shell() {
        let bob = find("bob", PASSWD, GROUP).unwrap();
        assert_eq!((bob.uid, bob.gid, bob.groups), (1000, 1001, vec![10, 99]));
        assert_eq!((bob.home.as_slice(), bob.shell.as_slice()), (&b"/home/bob"[..], &b"/bin/zsh"[..]));
    }

    #[test]
    fn numbers_need_no_entry_but_use_one() {
        assert_eq!(find("1000", PASSWD, GROUP).unwrap().name.unwrap(), b"bob");
        let stranger = find("4242:17", PASSWD, GROUP).unwrap();
        assert_eq!((stranger.uid, stranger.gid, stranger.name), (4242, 17, None));
        assert_eq!(find("123", PASSWD, GROUP).unwrap().uid, 123);
    }

    #[test]
    fn an_explicit_group_is_the_only_one() {
        let bob = find("bob:wheel", PASSWD, GROUP).unwrap();
        assert_eq!((bob.gid, bob.groups.len()), (10, 0));
    }

    #[test]
    fn unknown_names_say_where_they_were_looked_for() {
        assert_eq!(find("eve", PASSWD, GROUP).unwrap_err().message, "user `eve` is not in /etc/passwd");
        assert!(find("bob:nope", PASSWD, GROUP).unwrap_err().message.contains("group `nope`"));
    }

    #[test]
    fn short_and_broken_lines_are_passed_over() {
        assert_eq!(find("nohome", PASSWD, GROUP).unwrap().home, b"/");
        assert!(find("short", PASSWD, GROUP).is_err());
        assert_eq!(find("", b"", b"").unwrap().uid, 0);
        let root = find("root", b"", b"").unwrap();
        assert_eq!((root.uid, root.gid, root.name, root.home.as_slice()), (0, 0, None, &b"/"[..]));
        assert_eq!(find("root", b"root:x:3:4::/r:\n", b"").unwrap().uid, 3);
    }
}
