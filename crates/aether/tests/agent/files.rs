//! File operations as users of the sandbox.

use std::fs;
use std::io::{Read, Write};

use dsec_proto::guest::{
    Empty, FileEventKind as Event, FileInfo, FileListOp, FileMakeDir, FileMove, FileOp, FileRemove,
    FileWatch, FileWrite, GuestError, GuestErrorKind as Kind,
};

use crate::support::{Client, FileSocket, Sandbox, eventually, shell};

pub(crate) fn read(edge: &mut Client, user: &str, path: &str) -> Result<String, GuestError> {
    let (_, fds) = edge.file(user, path, FileOp::Read(Empty {})).reply()?;
    let mut text = String::new();
    fs::File::from(fds.into_iter().next().unwrap()).read_to_string(&mut text).unwrap();
    Ok(text)
}

fn write_with(
    edge: &mut Client,
    user: &str,
    path: &str,
    text: &str,
    with: FileWrite,
) -> Result<FileInfo, GuestError> {
    let mut socket = edge.file(user, path, FileOp::Write(with));
    let (_, fds) = socket.reply()?;
    let mut file = fs::File::from(fds.into_iter().next().unwrap());
    // A pipe, since the sandbox's root is in memory.
    file.write_all(text.as_bytes()).unwrap();
    drop(file);
    socket.commit();
    let (reply, _) = socket.reply()?;
    Ok(reply.files.into_iter().next().unwrap())
}

fn write(edge: &mut Client, user: &str, path: &str, text: &str) -> Result<FileInfo, GuestError> {
    write_with(edge, user, path, text, FileWrite::default())
}

fn one(edge: &mut Client, user: &str, path: &str, op: FileOp) -> Result<Option<FileInfo>, GuestError> {
    let (reply, _) = edge.file(user, path, op).reply()?;
    Ok(reply.files.into_iter().next())
}

fn stat(edge: &mut Client, path: &str) -> Result<FileInfo, GuestError> {
    one(edge, "", path, FileOp::Stat(Empty {})).map(Option::unwrap)
}

fn says(error: &GuestError, kind: Kind, text: &str) {
    assert!(error.kind == kind as i32 && error.message.contains(text), "{error:?} has no `{text}`");
}

#[test]
fn files_are_written_whole_or_not_at_all() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let info = write(&mut edge, "", "/work/a", "first").unwrap();
    assert_eq!((info.size, info.mode & 0o7777, info.uid), (5, 0o644, 0));
    assert_eq!(read(&mut edge, "", "a").unwrap(), "first");
    // Dropped without a commit: nothing happens, and nothing is left.
    let mut socket = edge.file("", "/work/a", FileOp::Write(FileWrite::default()));
    let (_, fds) = socket.reply().unwrap();
    fs::File::from(fds.into_iter().next().unwrap()).write_all(b"second").unwrap();
    drop(socket);
    let listed = edge.run(shell("ls", "while [ $(ls -A | wc -l) != 1 ]; do sleep 0.01; done; ls -A; cat a"));
    assert_eq!(listed.out, "a\nfirst");
    // Mode and owner of what is replaced stay, and links are followed.
    edge.run(shell("b", "chmod 751 a; chown 1000:44 a; ln -s /work/a link; mkdir sub; ln -s ../link sub/l2"));
    let info = write(&mut edge, "", "/work/sub/l2", "third").unwrap();
    assert_eq!((info.mode & 0o7777, info.uid, info.gid), (0o751, 1000, 44));
    assert_eq!(edge.run(shell("c", "cat a; readlink link sub/l2")).out, "third/work/a\n../link\n");
    let with =
        FileWrite { mode: Some(0o4600), owner: "bob:extra".into(), parents: true, ..FileWrite::default() };
    let info = write_with(&mut edge, "", "/work/x/y/z", "z", with).unwrap();
    assert_eq!((info.mode & 0o7777, info.uid, info.gid), (0o4600, 1000, 44));
    // A dangling link gets its target.
    edge.run(shell("d", "ln -s made-by-link dangling"));
    write(&mut edge, "", "/work/dangling", "t").unwrap();
    assert_eq!(read(&mut edge, "", "/work/made-by-link").unwrap(), "t");
}

#[test]
fn writing_in_place_keeps_the_rest() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("a", "printf 0123456789 >f"));
    let mut socket = edge.file("", "f", FileOp::Write(FileWrite { offset: Some(4), ..FileWrite::default() }));
    let (_, fds) = socket.reply().unwrap();
    fs::File::from(fds.into_iter().next().unwrap()).write_all(b"xx").unwrap();
    socket.commit();
    assert_eq!(socket.reply().unwrap().0.files[0].size, 10);
    assert_eq!(read(&mut edge, "", "f").unwrap(), "0123xx6789");
    edge.run(shell("b", "ln -s /proc/self/mem mem"));
    let into_itself = FileWrite { offset: Some(0), ..FileWrite::default() };
    // Refused by the kernel already: the child is not dumpable.
    assert!(edge.file("", "mem", FileOp::Write(into_itself)).reply().is_err());
}

#[test]
fn what_is_no_file_is_named() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("a", "mkfifo pipe; mkdir dir; ln -s loop1 loop2; ln -s loop2 loop1; echo s >secret; chmod 600 secret; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"));
    for (path, kind, text) in [
        ("/work/pipe", Kind::InvalidArgument, "/work/pipe is a named pipe; only regular files can be read"),
        ("/work/dir", Kind::InvalidArgument, "is a directory; only regular files can be read"),
        ("/dev/null", Kind::InvalidArgument, "is a character device"),
        ("/work/sock", Kind::InvalidArgument, "is a socket"),
        ("/work/loop1", Kind::InvalidArgument, "symbolic links"),
        ("/work/none", Kind::NotFound, "cannot read /work/none: it does not exist"),
        ("/work/secret/x", Kind::InvalidArgument, "not a directory"),
        ("", Kind::InvalidArgument, "the path is empty"),
    ] {
        says(&read(&mut edge, "", path).unwrap_err(), kind, text);
    }
    says(&read(&mut edge, "bob", "/work/secret").unwrap_err(), Kind::PermissionDenied, "permission denied");
    says(&read(&mut edge, "eve", "/work/secret").unwrap_err(), Kind::InvalidArgument, "user `eve`");
    for (path, text) in [
        ("/work/pipe", "a named pipe; only regular files can be written"),
        ("/work/dir", "a directory"),
        ("/dev/null", "a character device"),
        ("/work/loop1", "symbolic links"),
        ("/work/new/", "names a directory"),
        ("/", "is a directory"),
    ] {
        says(&write(&mut edge, "", path, "x").unwrap_err(), Kind::InvalidArgument, text);
        let in_place = FileWrite { offset: Some(0), ..FileWrite::default() };
        let error = edge.file("", path, FileOp::Write(in_place)).reply().unwrap_err();
        assert_eq!(error.kind, Kind::InvalidArgument as i32, "{error:?}");
    }
    says(
        &write(&mut edge, "bob", "/work/x", "x").unwrap_err(),
        Kind::PermissionDenied,
        "cannot write /work/x: permission denied",
    );
    says(&write(&mut edge, "", "/usr/x", "x").unwrap_err(), Kind::PermissionDenied, "read-only");
}

#[test]
fn directories_are_listed_sorted_and_bounded() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("a", "mkdir -p t/b/c t/closed; touch t/a t/b/x t/b/c/deep; ln -s /etc t/link; chmod 0 t/closed; i=0; mkdir many; while [ $i -lt 1300 ]; do : >many/$i; i=$((i+1)); done"));
    let mut list = |user: &str, path: &str, depth, limit| {
        edge.file(user, path, FileOp::List(FileListOp { depth, limit })).all()
    };
    let paths = |files: &[FileInfo]| {
        files.iter().map(|f| String::from_utf8_lossy(&f.path).into_owned()).collect::<Vec<_>>().join(" ")
    };
    let (files, truncated) = list("bob", "/work/t", 1, 100).unwrap();
    assert_eq!((paths(&files).as_str(), truncated), ("a b closed link", false));
    assert_eq!(files[3].target.as_deref(), Some(&b"/etc"[..]));
    assert_eq!(paths(&list("bob", "/work/t", 9, 100).unwrap().0), "a b b/c b/c/deep b/x closed link");
    let (files, truncated) = list("", "t", 9, 3).unwrap();
    assert_eq!((files.len(), truncated), (3, true));
    let (files, truncated) = list("", "many", 1, 10_000).unwrap();
    assert_eq!((files.len(), truncated), (1300, false));
    assert!(files.is_sorted_by(|a, b| a.path < b.path));
    says(&list("", "/work/t/a", 1, 9).unwrap_err(), Kind::InvalidArgument, "is not a directory");
    says(&list("bob", "/work/t/closed", 1, 9).unwrap_err(), Kind::PermissionDenied, "cannot list");
}

#[test]
fn directories_moves_and_removal() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let mkdir = |parents, mode| FileOp::MakeDir(FileMakeDir { parents, mode });
    let made = one(&mut edge, "", "/work/p/q", mkdir(true, 0o1777)).unwrap().unwrap();
    assert_eq!(made.mode & 0o7777, 0o1777);
    assert!(one(&mut edge, "", "/work/p/q", mkdir(true, 0o755)).is_ok());
    says(
        &one(&mut edge, "", "/work/p/q", mkdir(false, 0o755)).unwrap_err(),
        Kind::AlreadyExists,
        "exists already",
    );
    says(
        &one(&mut edge, "", "/work/none/q", mkdir(false, 0o755)).unwrap_err(),
        Kind::NotFound,
        "/work/none/q",
    );
    edge.run(shell("a", "echo 1 >p/1; echo 2 >p/2; mkdir -p tree/sub; echo t >tree/sub/t; ln -s t tree/sub/l; chown -h 1000 tree/sub/l; chmod 640 tree/sub/t; chown 7:8 tree/sub/t; touch -d @1000 tree/sub/t"));
    let to = |to: &str, overwrite| FileOp::Move(FileMove { to: to.into(), overwrite });
    says(
        &one(&mut edge, "", "p/1", to("p/2", false)).unwrap_err(),
        Kind::AlreadyExists,
        "p/2 exists already",
    );
    assert!(one(&mut edge, "", "p/1", to("p/2", true)).is_ok());
    says(&one(&mut edge, "", "p/1", to("p/3", true)).unwrap_err(), Kind::NotFound, "p/1");
    // To another file system: copied, with all that a file has.
    one(&mut edge, "", "tree", to("/other/tree", false)).unwrap();
    let run = edge.run(shell("b", "ls tree 2>&1; cd /other; find tree -printf '%p %u %G %m %T@\\n' | grep /t; readlink tree/sub/l; cat tree/sub/t; ls -A"));
    assert!(run.out.contains("tree/sub/t 7 8 640 1000.0"), "{run:?}");
    assert!(run.out.ends_with("t\nt\ntree\n"), "{run:?}");
    let remove = |recursive| FileOp::Remove(FileRemove { recursive });
    says(&one(&mut edge, "", "/other/tree", remove(false)).unwrap_err(), Kind::Conflict, "not empty");
    says(&one(&mut edge, "bob", "/work/p", remove(true)).unwrap_err(), Kind::PermissionDenied, "");
    edge.run(shell("c", "mkdir keep; touch keep/me; ln -s /work/keep /other/tree/out"));
    one(&mut edge, "", "/other/tree", remove(true)).unwrap();
    one(&mut edge, "", "/work/p/q", remove(false)).unwrap();
    for path in ["/", "/work/..", ".", "/work/../"] {
        says(
            &one(&mut edge, "", path, remove(true)).unwrap_err(),
            Kind::InvalidArgument,
            "cannot be removed",
        );
    }
    assert_eq!(edge.run(shell("d", "ls -A /other keep p")).out, "/other:\n\nkeep:\nme\n\np:\n2\n");
    // Deeper than descriptors reach.
    edge.run(shell("e", "python3 -c 'import os\nfor i in range(3000):\n os.mkdir(\"d\"); os.chdir(\"d\")'"));
    one(&mut edge, "", "/work/d", remove(true)).unwrap();
    says(&stat(&mut edge, "/work/d").unwrap_err(), Kind::NotFound, "");
}

#[test]
fn a_full_disk_is_said_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell(
        "a",
        "head -c 100M /dev/zero >/other/big 2>/dev/null; mkdir d; head -c 1M /dev/zero >d/f",
    ));
    let to = FileOp::Move(FileMove { to: b"/other/d".to_vec(), overwrite: false });
    says(&one(&mut edge, "", "d", to).unwrap_err(), Kind::ResourceExhausted, "full");
    assert_eq!(edge.run(shell("b", "ls -A /other; ls d")).out, "big\nf\n");
}

struct Watching(FileSocket);

impl Watching {
    fn start(edge: &mut Client, path: &str, recursive: bool) -> Self {
        let mut socket = edge.file("", path, FileOp::Watch(FileWatch { recursive }));
        let (reply, _) = socket.reply().unwrap();
        assert_eq!(reply.events[0].kind, Event::Ready as i32);
        Self(socket)
    }

    /// Events until one of this path and kind.
    fn until(&mut self, kind: Event, path: &str) -> Vec<(Event, String, Option<String>)> {
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        let mut all = Vec::new();
        while !all.iter().any(|(k, p, _): &(Event, String, _)| *k == kind && p == path) {
            let (reply, _) = self.0.reply().unwrap();
            all.extend(
                reply
                    .events
                    .into_iter()
                    .map(|e| (Event::try_from(e.kind).unwrap(), text(e.path), e.from.map(text))),
            );
        }
        all
    }
}

#[test]
fn changes_are_watched() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("a", "mkdir -p w/old; touch w/gone"));
    let mut watch = Watching::start(&mut edge, "/work/w", true);
    edge.run(shell(
        "b",
        "cd w; echo x >f; chmod 600 f; rm gone; mkdir -p n1/n2; echo y >n1/n2/g; mv f old/f2; touch last",
    ));
    let events = watch.until(Event::Created, "last");
    let has = |kind: Event, path: &str| events.iter().any(|(k, p, _)| *k == kind && p == path);
    assert!(
        has(Event::Created, "f") && has(Event::Modified, "f") && has(Event::Attributes, "f"),
        "{events:?}"
    );
    assert!(
        has(Event::Removed, "gone") && has(Event::Created, "n1/n2") && has(Event::Created, "n1/n2/g"),
        "{events:?}"
    );
    assert!(events.contains(&(Event::Renamed, "old/f2".into(), Some("f".into()))), "{events:?}");
    // A directory that moves is still watched under its new name; one that leaves is not.
    edge.run(shell(
        "c",
        "cd w; mv n1 moved; touch moved/n2/h; mv old /work/out; touch /work/out/i; touch end",
    ));
    let events = watch.until(Event::Created, "end");
    assert!(events.contains(&(Event::Renamed, "moved".into(), Some("n1".into()))), "{events:?}");
    assert!(events.iter().any(|(k, p, _)| *k == Event::Created && p == "moved/n2/h"), "{events:?}");
    assert!(events.iter().any(|(k, p, _)| *k == Event::Removed && p == "old"), "{events:?}");
    assert!(!events.iter().any(|(_, p, _)| p.ends_with("/i")), "{events:?}");
    edge.run(shell("d", "rm -r w"));
    watch.until(Event::Removed, "");
    assert!(watch.0.reply().unwrap().0.last && watch.0.is_closed());
    says(
        &edge.file("", "/none", FileOp::Watch(FileWatch { recursive: false })).reply().unwrap_err(),
        Kind::NotFound,
        "/none",
    );
    // Not recursive: the directory alone. When the edge goes, so does the child.
    edge.run(shell("e", "mkdir -p v/sub"));
    let mut watch = Watching::start(&mut edge, "v", false);
    edge.run(shell("f", "touch v/sub/unseen v/seen"));
    let events = watch.until(Event::Modified, "seen");
    assert!(!events.iter().any(|(_, p, _)| p.contains("unseen")), "{events:?}");
    drop(watch);
    eventually("the processes of the sandbox", || sandbox.states().is_empty());
}

#[test]
fn a_file_operation_runs_in_the_cgroup_that_comes_with_it() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let dir = sandbox.cgroup("files").remove(0);
    let call = dsec_proto::guest::FileCall {
        user: "root".into(),
        path: b"/work".to_vec(),
        op: Some(FileOp::Watch(dsec_proto::guest::FileWatch { recursive: false })),
    };
    edge.call(dsec_proto::guest::Request::File(call), &[theirs.into(), dir]).unwrap();
    crate::support::eventually("the watch runs there", || sandbox.members("files").len() == 1);
    drop(ours);
    crate::support::eventually("it ends with its caller", || sandbox.members("files").is_empty());
}
