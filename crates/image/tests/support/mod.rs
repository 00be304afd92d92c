//! What the tests with a kernel share: mounts that go away, trees that can be compared, and
//! a shop to make layers in.
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod archive;
pub(crate) mod layers;
pub(crate) mod layout;
pub(crate) mod source;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// Runs a program that must succeed, and gives what it printed.
pub(crate) fn run(program: &str, args: &[impl AsRef<OsStr>]) -> String {
    let output = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program} cannot be run ({e}); the tests need it"));
    let shown: Vec<_> = args.iter().map(|arg| arg.as_ref().to_string_lossy()).collect();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {}: {}\n{text}{}",
        shown.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// A shell script that must succeed, in `dir`.
pub(crate) fn shell(dir: &Path, script: &str) -> String {
    run("sh", &["-ec", &format!("cd '{}'\n{script}", dir.display())])
}

/// A mount; gone with this, also when a test panics.
pub(crate) struct Mount {
    dir: TempDir,
}

impl Mount {
    pub(crate) fn new(args: &[&OsStr]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut all = args.to_vec();
        all.push(dir.path().as_os_str());
        run("mount", &all);
        Self { dir }
    }

    pub(crate) fn tmpfs(size: &str) -> Self {
        let options = format!("size={size}");
        Self::new(&["-t", "tmpfs", "-o", &options, "none"].map(OsStr::new))
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(self.dir.path()).status();
        if !std::thread::panicking() {
            assert!(
                status.is_ok_and(|status| status.success()),
                "{} stays mounted",
                self.dir.path().display()
            );
        }
    }
}

/// All that `stat`, `readlink`, `getfattr` and `cat` tell of one file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) mtime: (i64, i64),
    pub(crate) links: u64,
    pub(crate) device: u64,
    pub(crate) target: Vec<u8>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) content: String,
    /// The first path of the same inode.
    pub(crate) same_as: Vec<u8>,
}

/// A whole tree, by path; `.` is its root.
pub(crate) fn facts(root: &Path) -> BTreeMap<Vec<u8>, Facts> {
    let mut names = vec![PathBuf::from(".")];
    let mut at = 0;
    while let Some(path) = names.get(at).cloned() {
        at += 1;
        let full = root.join(&path);
        if fs::symlink_metadata(&full).unwrap().is_dir() {
            names.extend(fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        }
    }
    names.sort();
    let mut first_names = BTreeMap::new();
    names
        .into_iter()
        .map(|path| {
            let name = path.clone().into_os_string().into_vec();
            let meta = fs::symlink_metadata(root.join(&path)).unwrap();
            let same_as = first_names.entry(meta.ino()).or_insert_with(|| name.clone()).clone();
            (name, file_facts(&root.join(&path), &meta, same_as))
        })
        .collect()
}

fn file_facts(path: &Path, meta: &fs::Metadata, same_as: Vec<u8>) -> Facts {
    let kind = meta.file_type();
    Facts {
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
        size: if kind.is_dir() { 0 } else { meta.size() },
        mtime: (meta.mtime(), meta.mtime_nsec()),
        links: meta.nlink(),
        device: if kind.is_char_device() || kind.is_block_device() { meta.rdev() } else { 0 },
        target: if kind.is_symlink() {
            fs::read_link(path).unwrap().into_os_string().into_vec()
        } else {
            Vec::new()
        },
        xattrs: xattrs(path),
        content: if kind.is_file() { digest(path) } else { String::new() },
        same_as,
    }
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0u8; 1 << 16];
    let len = rustix::fs::llistxattr(path, &mut list[..]).unwrap();
    list[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0u8; 1 << 16];
            let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect()
}

/// A digest of content, in which zeros at the end of huge files are not read one by one.
fn digest(path: &Path) -> String {
    let file = fs::File::open(path).unwrap();
    let size = file.metadata().unwrap().len();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let read = |at: u64, buffer: &mut [u8]| {
        let most = buffer.len().min((size - at) as usize);
        file.read_exact_at(&mut buffer[..most], at).unwrap();
        most
    };
    // Of a file over 1 GiB only the start, the end and every 37th megabyte.
    let mut at = 0;
    while at < size {
        let got = read(at, &mut buffer);
        hash.update(&buffer[..got]);
        at += if size > 1 << 30 && at > 8 << 20 && at + (64 << 20) < size { 37 << 20 } else { got as u64 };
    }
    format!("{:x}", hash.finalize())
}

/// Compares two trees and names what differs.
pub(crate) fn assert_same(expected: &BTreeMap<Vec<u8>, Facts>, found: &BTreeMap<Vec<u8>, Facts>) {
    let show = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    for (name, facts) in expected {
        assert_eq!(Some(facts), found.get(name), "{} differs", show(name));
    }
    for name in found.keys() {
        assert!(expected.contains_key(name), "{} is too much", show(name));
    }
}

/// An error with all its sources, as a log shows it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
