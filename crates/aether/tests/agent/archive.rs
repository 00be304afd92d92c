//! Tar, both ways, and archives that mean harm.

use std::fs;
use std::io::{Read, Write};

use dsec_proto::guest::{FileOp, FileReply, FileTar, GuestError, GuestErrorKind as Kind};
use tar::{Builder, EntryType, Header};

use crate::support::{Client, Sandbox, shell};

fn unpack(edge: &mut Client, user: &str, path: &str, archive: &[u8]) -> Result<FileReply, GuestError> {
    unpack_for(edge, user, path, "", archive)
}

fn unpack_for(
    edge: &mut Client,
    user: &str,
    path: &str,
    owner: &str,
    archive: &[u8],
) -> Result<FileReply, GuestError> {
    let mut socket = edge.file(user, path, FileOp::Tar(FileTar { unpack: true, owner: owner.to_owned() }));
    let (_, fds) = socket.reply()?;
    let mut pipe = fs::File::from(fds.into_iter().next().unwrap());
    // The child may refuse before it has read all.
    let _ = pipe.write_all(archive);
    drop(pipe);
    socket.reply().map(|(reply, _)| reply)
}

fn pack(edge: &mut Client, path: &str) -> Result<(Vec<u8>, FileReply), GuestError> {
    let mut socket = edge.file("", path, FileOp::Tar(FileTar::default()));
    let (_, fds) = socket.reply()?;
    let mut bytes = Vec::new();
    fs::File::from(fds.into_iter().next().unwrap()).read_to_end(&mut bytes).unwrap();
    Ok((bytes, socket.reply()?.0))
}

/// An entry: name, kind, link target, content.
type Named<'a> = (&'a str, EntryType, &'a str, &'a [u8]);

fn archive(entries: &[Named<'_>]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (name, kind, target, content) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o640);
        header.set_uid(1000);
        header.set_gid(44);
        header.set_mtime(1_000_000);
        header.set_size(content.len() as u64);
        // As hostile as wanted: the crate's own setters refuse such names.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        tar.append(&header, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

#[test]
fn all_that_is_unpacked_becomes_the_owners_that_is_named() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let entries = [
        ("d", EntryType::Directory, "", &b""[..]),
        ("d/f", EntryType::Regular, "", b"x"),
        ("d/l", EntryType::Symlink, "f", b""),
    ];
    let owners = [("a", "7:9", "7:9"), ("b", "0:0", "0:0"), ("c", "root", "0:0"), ("d", "", "1000:44")];
    for (exec, owner, wanted) in owners {
        unpack_for(&mut edge, "", "/work/owned", owner, &archive(&entries)).unwrap();
        let seen = edge.run(shell(exec, "cd owned && stat -c %u:%g d d/f d/l | sort -u")).out;
        assert_eq!(seen.trim(), wanted, "{owner}");
    }
    let error = unpack_for(&mut edge, "", "/work/owned", "nobody-here", &archive(&entries)).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidArgument);
    let error = unpack_for(&mut edge, "1000:1000", "/tmp/owned", "7:9", &archive(&entries)).unwrap_err();
    assert_eq!(error.kind(), Kind::PermissionDenied);
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let long = "n".repeat(180);
    let make = format!(
        "mkdir -p t/sub/empty; printf content >t/f; chown 1000:44 t/f; chmod 4711 t/f; touch -d @12345 t/f; ln t/f t/hard; ln -s ../f t/sub/link; mkfifo t/pipe; echo long >t/sub/{long}; head -c 3000000 /dev/urandom >t/big; chmod 500 t/sub; touch -d @54321 t/sub"
    );
    assert_eq!(edge.run(shell("a", &make)).err, "");
    let (bytes, reply) = pack(&mut edge, "/work/t").unwrap();
    assert_eq!((reply.count, reply.bytes), (8, 3_000_000 + 7 + 5));
    let reply = unpack(&mut edge, "", "/work/made/u", &bytes).unwrap();
    assert_eq!((reply.count, reply.bytes), (8, 3_000_000 + 7 + 5));
    let facts = "find . ! -name . -printf '%p %y %m %U %G %l %n %s\\n' | grep -v ' d ' | sort; stat -c '%n %Y' sub f sub/empty; md5sum big";
    let one = edge.run(shell("b", &format!("cd t; {facts}"))).out;
    let two = edge.run(shell("c", &format!("cd made/u; {facts}"))).out;
    assert!(one == two && one.contains("./f f 4711 1000 44") && one.contains("sub 54321"), "{one}\n{two}");
    // One file alone.
    let (bytes, reply) = pack(&mut edge, "t/f").unwrap();
    assert_eq!(reply.count, 1);
    let mut archive = tar::Archive::new(&bytes[..]);
    let first = archive.entries().unwrap().next().unwrap().unwrap();
    assert_eq!(first.path_bytes().as_ref(), b"f");
    let error = pack(&mut edge, "/none").unwrap_err();
    assert_eq!(error.kind, Kind::NotFound as i32);
}

#[test]
fn others_unpack_as_themselves() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let bytes = archive(&[("d", EntryType::Directory, "", b""), ("d/f", EntryType::Regular, "", b"x")]);
    unpack(&mut edge, "1234:55", "/tmp/mine", &bytes).unwrap();
    assert_eq!(edge.run(shell("a", "stat -c '%u %g %a' /tmp/mine/d/f")).out, "1234 55 640\n");
    let error = unpack(&mut edge, "bob", "/work", &bytes).unwrap_err();
    assert_eq!(error.kind, Kind::PermissionDenied as i32, "{error:?}");
}

#[test]
fn hostile_archives_stay_inside() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell(
        "a",
        "mkdir in; ln -s /etc in/there; ln -s sub in/ok; mkdir in/sub; ln -s /etc/passwd in/file",
    ));
    let file = EntryType::Regular;
    let bad: &[(&[Named<'_>], &str)] = &[
        (&[("../out", file, "", b"x")], "`..`"),
        (&[("a/../../out", file, "", b"x")], "`..`"),
        (&[("there/evil", file, "", b"x")], "leads out of /work/in"),
        (&[("l", EntryType::Symlink, "/etc", b""), ("l/evil", file, "", b"x")], "leads out of"),
        (&[("m", EntryType::Symlink, "../..", b""), ("m/evil", file, "", b"x")], "leads out of"),
        (&[("h", EntryType::Link, "../../etc/passwd", b"")], "`..`"),
        (&[("h", EntryType::Link, "there/passwd", b"")], "leads out of"),
        (&[("dev", EntryType::Char, "", b"")], "is a device"),
    ];
    for (entries, text) in bad {
        let error = unpack(&mut edge, "", "/work/in", &archive(entries)).unwrap_err();
        assert!(error.kind == Kind::InvalidArgument as i32 && error.message.contains(text), "{error:?}");
    }
    let good = archive(&[
        ("/etc/passwd", file, "", b"abs"),
        ("ok/f", file, "", b"through"),
        ("file", file, "", b"new"),
        ("there", EntryType::Directory, "", b""),
    ]);
    unpack(&mut edge, "", "/work/in", &good).unwrap();
    let run = edge.run(shell(
        "b",
        "cat in/etc/passwd in/sub/f in/file; ls -A; ls /etc; stat -c %F in/there; wc -l </etc/passwd",
    ));
    assert_eq!(run.out, "absthroughnewin\ngroup\npasswd\ndirectory\n2\n");
    let mut cut = archive(&[("f", file, "", &[b'x'; 5000])]);
    cut.truncate(3000);
    let error = unpack(&mut edge, "", "/work/in", &cut).unwrap_err();
    assert!(error.message.contains("cut short") || error.message.contains("ends within"), "{error:?}");
    let error = unpack(&mut edge, "", "/work/in", &[b'g'; 2000]).unwrap_err();
    assert_eq!(error.kind, Kind::InvalidArgument as i32, "{error:?}");
}
