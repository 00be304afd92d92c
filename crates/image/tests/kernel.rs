//! Images are held against the kernel: what is mounted must be what was archived, byte for byte
//! and attribute for attribute. Needs root, EROFS in the kernel, erofs-utils and GNU tar.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::{Duration, Instant};

use dsec_image::erofs::{Attributes, Content, ContentStore, DataArea, Timestamp, Tree, Xattrs, finish};
use rustix::fs::{XattrFlags, lsetxattr};
use support::archive::Archive;
use support::source::{archived, source_tree};
use support::{Mount, Store, assert_same, facts, run, shell};

#[test]
fn the_mounted_image_is_the_archived_tree() {
    let source = tempfile::tempdir().unwrap();
    source_tree(source.path());
    let expected = facts(source.path());
    let store = Store::new();
    let tar = store.dir.path().join("source");
    archived(source.path(), &tar, &["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse"]);
    let record = store.import(&tar).unwrap();
    let blob = store.store.blob_path(&record.digest);
    run("fsck.erofs", &["--extract".as_ref(), blob.as_os_str()]);
    let mount = Mount::erofs(&blob);
    assert_same(&expected, &facts(mount.path()));
    // Programs take inode number 0 for a deleted entry.
    assert_ne!(fs::metadata(mount.path()).unwrap().ino(), 0);
    // The hole at the end of one file and all of the other cost nothing.
    assert_eq!(record.size_bytes, fs::metadata(&blob).unwrap().len());
    assert_eq!(record.size_bytes % 4096, 0);
    let inodes: std::collections::BTreeSet<_> = expected.values().map(|facts| &facts.same_as).collect();
    assert_eq!(record.files, inodes.len() as u64);
    // Names that do not exist are not found, among those that do.
    for missing in ["bin/4098", "bin/", "zzz", ".!", "deep/hare", "deep/hardx"] {
        assert_eq!(mount.path().join(missing).exists(), missing == "bin/", "{missing}");
    }
}

#[test]
fn access_lists_written_as_text_are_kept() {
    let source = tempfile::tempdir().unwrap();
    shell(source.path(), "printf x > file; mkdir dir");
    // user::rw-, user:54321:r--, group::r--, group:54322:rw-, mask::rw-, other::---; ids that have
    // no name here, which tar would write.
    let acl = [
        2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0x31, 0xd4, 0, 0, 4, 0, 4, 0, 255, 255, 255,
        255, 8, 0, 6, 0, 0x32, 0xd4, 0, 0, 16, 0, 6, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
    ];
    for (path, name) in [("file", "system.posix_acl_access"), ("dir", "system.posix_acl_default")] {
        lsetxattr(source.path().join(path), name, &acl, XattrFlags::empty()).unwrap();
    }
    let expected = facts(source.path());
    assert_eq!(expected[b"./file".as_slice()].xattrs.len(), 1);
    let store = Store::new();
    let tar = store.dir.path().join("source");
    archived(source.path(), &tar, &["--format=pax", "--acls"]);
    let archive = fs::read(&tar).unwrap();
    assert!(archive.windows(17).any(|bytes| bytes == b"SCHILY.acl.access"), "tar wrote no text");
    let record = store.import(&tar).unwrap();
    let mount = Mount::erofs(&store.store.blob_path(&record.digest));
    assert_same(&expected, &facts(mount.path()));
}

#[test]
fn gnu_and_old_formats_and_all_sparse_forms_give_the_same_files() {
    let source = tempfile::tempdir().unwrap();
    shell(
        source.path(),
        r#"
        mkdir d; printf hello > d/file; ln d/file d/link; ln -s d/file sym
        name=$(printf '%0200d' 1); printf long > "d/$name"; ln -s "$name" d/long-link
        truncate -s 300000000 holes
        for at in 0 7 70000 1234567 9999999 20000000 30000000 44444444 55555555 66666666 77777777 299999999; do
            printf "x$at" | dd of=holes bs=1 seek=$at conv=notrunc status=none; done
        truncate -s 299999990 holes; truncate -s 50000 only-hole
        touch -h -d @1600000000 d/* sym holes only-hole d .
        "#,
    );
    let expected = facts(source.path());
    for options in [
        &["--format=gnu"][..],
        &["--format=gnu", "--sparse"],
        &["--format=posix", "--sparse", "--sparse-version=0.0"],
        &["--format=posix", "--sparse", "--sparse-version=0.1"],
        &["--format=posix", "--sparse", "--sparse-version=1.0"],
        &["--format=posix", "--pax-option=globexthdr.name=g,mtime=1600000000"],
    ] {
        let store = Store::new();
        let tar = store.dir.path().join("source");
        archived(source.path(), &tar, options);
        let record = store.import(&tar).unwrap_or_else(|e| panic!("{options:?}: {}", support::chain(&e)));
        let mount = Mount::erofs(&store.store.blob_path(&record.digest));
        assert_same(&expected, &facts(mount.path()));
    }
}

#[test]
fn a_ten_gigabyte_sparse_file_is_small_and_quick() {
    let source = tempfile::tempdir().unwrap();
    shell(
        source.path(),
        "truncate -s 10G disk; printf start | dd of=disk conv=notrunc status=none
         printf end | dd of=disk bs=1 seek=10737418237 conv=notrunc status=none
         printf mid | dd of=disk bs=1 seek=5000000000 conv=notrunc status=none",
    );
    let store = Store::new();
    let tar = store.dir.path().join("source");
    archived(source.path(), &tar, &["--sparse"]);
    let started = Instant::now();
    let record = store.import(&tar).unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(record.size_bytes < 4 << 20, "{}", record.size_bytes);
    assert_eq!(record.content_bytes, 10 << 30);
    let mount = Mount::erofs(&store.store.blob_path(&record.digest));
    let expected = facts(source.path()).remove(b"./disk".as_slice()).unwrap();
    let found = facts(mount.path()).remove(b"./disk".as_slice()).unwrap();
    assert_eq!((expected.size, expected.content), (found.size, found.content));
}

#[test]
fn a_directory_of_100_000_entries_lists_and_looks_up_whole() {
    const COUNT: usize = 100_000;
    let mut archive = Archive::new();
    // Not in order, and of several lengths.
    for number in 0..COUNT {
        let scattered = (number * 7919) % COUNT;
        archive = archive.file(&format!("d/{scattered}-{}", "n".repeat(scattered % 60)), b"");
    }
    let store = Store::new();
    let (_, mount) = store.mounted(&archive.finish());
    let names: Vec<_> =
        fs::read_dir(mount.path().join("d")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), COUNT);
    assert!(names.is_sorted_by(|a, b| a.as_bytes() < b.as_bytes()));
    for number in (0..COUNT).step_by(997) {
        let name = format!("d/{number}-{}", "n".repeat(number % 60));
        assert!(mount.path().join(&name).is_file(), "{name}");
        assert!(!mount.path().join(format!("{name}x")).exists());
    }
}

#[test]
fn a_tree_made_by_hand_may_hold_what_tar_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let mut tree = Tree::new();
    let mut data = DataArea::create(&path).unwrap();
    let mut xattrs = Xattrs::default();
    // Attributes that reach over several blocks.
    for number in 0..20u8 {
        xattrs.set(format!("trusted.number-{number}").as_bytes(), &[number; 1999]).unwrap();
    }
    let attributes = Attributes {
        mode: 0o7777,
        uid: u32::MAX - 1,
        gid: 65_536,
        mtime: Timestamp { seconds: i64::from(u32::MAX) + 5, nanoseconds: 999_999_999 },
        xattrs: Some(Box::new(xattrs)),
    };
    let root = tree.root();
    tree.insert(root, b"socket", 0, attributes.clone(), Content::Socket);
    let content = data.append(&mut b"content".as_slice(), 7, &mut |_| {}).unwrap();
    tree.insert(root, b"file", 0, attributes.clone(), Content::File(content));
    tree.insert(root, b"link", 0, attributes.clone(), Content::Symlink(vec![b't'; 4095].into()));
    tree.insert(root, b"dir", 0, attributes, Content::directory());
    drop(finish(&tree, data).unwrap());
    let mount = Mount::erofs(&path);
    let found = facts(mount.path());
    for name in ["./socket", "./file", "./dir"] {
        let facts = &found[name.as_bytes()];
        assert_eq!((facts.mode & 0o7777, facts.uid, facts.gid), (0o7777, u32::MAX - 1, 65_536), "{name}");
        assert_eq!(facts.mtime, (i64::from(u32::MAX) + 5, 999_999_999), "{name}");
        assert_eq!(facts.xattrs.len(), 20, "{name}");
        assert_eq!(facts.xattrs[b"trusted.number-19".as_slice()], [19; 1999], "{name}");
    }
    assert_eq!(found[b"./link".as_slice()].target, [b't'; 4095]);
    let socket = fs::symlink_metadata(mount.path().join("socket")).unwrap();
    assert!(socket.file_type().is_socket() && socket.ino() != 0);
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"content");
}

#[test]
fn very_deep_trees_are_written_and_walked() {
    // 250 levels by each of 12 entries, through symlinks that lead to where the last one ended.
    let mut archive = Archive::new();
    let level = "d/".repeat(250);
    let mut at = String::new();
    for number in 0..12 {
        let entry = format!("{at}{level}end");
        archive = archive.pax(&[("path", entry.as_bytes())]).file("x", b"");
        let target = format!("{at}{level}");
        let link = format!("l{number}");
        archive = archive.pax(&[("linkpath", target.as_bytes())]).symlink(&link, "");
        at = format!("{link}/");
    }
    let store = Store::new();
    let record = store.import(&store.file(&archive.finish())).unwrap();
    // fsck.erofs recurses and runs out of stack.
    let mount = Mount::unchecked(&store.store.blob_path(&record.digest));
    for link in 0..12 {
        assert!(mount.path().join(format!("l{link}/end")).is_file(), "l{link}");
    }
    assert_eq!(record.files, 1 + 12 * 250 + 12 + 12);
}

#[test]
fn every_length_fits_its_place() {
    // Symlinks, attributes and directories of all lengths, so that each boundary between inline
    // and not is met at many offsets.
    let mut archive = Archive::new();
    let mut expected = Vec::new();
    for number in 0..3000usize {
        let target = "t".repeat(1 + number * 37 % 4095);
        let value = "v".repeat(number * 53 % 4500);
        let name = format!("links/{number}");
        archive = archive
            .pax(&[("linkpath", target.as_bytes()), ("SCHILY.xattr.trusted.a", value.as_bytes())])
            .symlink(&name, "");
        expected.push((name, target, value));
    }
    for number in 0..400usize {
        for entry in 0..number % 70 {
            archive = archive
                .symlink(&format!("dirs/{number}/{entry}-{}", "n".repeat((number * 7 + entry) % 85)), "x");
        }
        archive = archive.dir(&format!("dirs/{number}"));
    }
    let store = Store::new();
    let (_, mount) = store.mounted(&archive.finish());
    let found = facts(mount.path());
    for (name, target, value) in expected {
        let facts = &found[format!("./{name}").as_bytes()];
        assert!(facts.target == target.as_bytes(), "{name}");
        assert!(facts.xattrs[b"trusted.a".as_slice()] == value.as_bytes(), "{name}");
    }
    for number in 0..400usize {
        for entry in 0..number % 70 {
            let name = format!("./dirs/{number}/{entry}-{}", "n".repeat((number * 7 + entry) % 85));
            assert!(found.contains_key(name.as_bytes()), "{name}");
        }
    }
    assert_eq!(
        found.keys().filter(|name| name.starts_with(b"./dirs/")).count(),
        400 + (0..400).map(|n| n % 70).sum::<usize>()
    );
}

#[test]
fn a_blob_is_mounted_straight_from_its_file() {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    };
    let store = Store::new();
    let record = store.import(&store.file(&Archive::new().file("a", b"straight").finish())).unwrap();
    let blob = store.store.blob_path(&record.digest);
    let context = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_set_string(&context, "source", &blob).unwrap();
    fsconfig_create(&context).unwrap();
    // Never attached, so it goes with its descriptor.
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY).unwrap();
    let file =
        rustix::fs::openat(&mount, "a", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let mut content = [0; 16];
    let len = rustix::io::read(&file, &mut content).unwrap();
    assert_eq!(&content[..len], b"straight");
    // Whoever has it mounted keeps it after its last name is gone.
    assert!(store.store.remove(&support::name("test:1")).unwrap().blob_deleted);
    let again = rustix::fs::openat(&mount, "a", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
    assert!(again.is_ok());
}

#[test]
fn an_image_is_a_lower_directory_of_overlayfs() {
    let store = Store::new();
    let (_, lower) = store.mounted(&Archive::new().dir("d").file("d/a", b"lower").finish());
    let upper = Mount::tmpfs("16m");
    shell(upper.path(), "mkdir u w");
    let options =
        format!("lowerdir={},upperdir={1}/u,workdir={1}/w", lower.path().display(), upper.path().display());
    let merged = Mount::new(&["-t", "overlay", "-o", &options, "none"].map(std::ffi::OsStr::new));
    fs::write(merged.path().join("d/b"), b"upper").unwrap();
    fs::write(merged.path().join("d/a"), b"changed").unwrap();
    assert_eq!(fs::read(merged.path().join("d/a")).unwrap(), b"changed");
    assert_eq!(fs::read(lower.path().join("d/a")).unwrap(), b"lower");
    drop(merged);
    drop(upper);
}
