//! Archives are held against the kernel: what is mounted must be what was archived, byte for byte
//! and attribute for attribute. Needs root, EROFS in the kernel, erofs-utils and GNU tar.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::fs;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{XattrFlags, lsetxattr};
use support::archive::Archive;
use support::layers::Shop;
use support::source::archived;
use support::{assert_same, chain, facts, shell};

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
    let mut shop = Shop::new();
    let tar = shop.dir.path().join("source");
    archived(source.path(), &tar, &["--format=pax", "--acls"]);
    let archive = fs::read(&tar).unwrap();
    assert!(archive.windows(17).any(|bytes| bytes == b"SCHILY.acl.access"), "tar wrote no text");
    let image = shop.import(&tar).unwrap();
    assert_same(&expected, &facts(shop.mount(&image.layer).path()));
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
        let mut shop = Shop::new();
        let tar = shop.dir.path().join("source");
        archived(source.path(), &tar, options);
        let image = shop.import(&tar).unwrap_or_else(|e| panic!("{options:?}: {}", chain(&e)));
        assert_same(&expected, &facts(shop.mount(&image.layer).path()));
    }
}

#[test]
fn a_ten_gigabyte_sparse_file_is_small() {
    let source = tempfile::tempdir().unwrap();
    shell(
        source.path(),
        "truncate -s 10G disk; printf start | dd of=disk conv=notrunc status=none
         printf end | dd of=disk bs=1 seek=10737418237 conv=notrunc status=none
         printf mid | dd of=disk bs=1 seek=5000000000 conv=notrunc status=none",
    );
    let mut shop = Shop::new();
    let tar = shop.dir.path().join("source");
    archived(source.path(), &tar, &["--sparse"]);
    let image = shop.import(&tar).unwrap();
    let stored = image.encoded().len() as u64 + u64::from(image.layer.blobs[0].blocks) * 4096;
    assert!(stored < 4 << 20, "{stored}");
    assert_eq!(image.content_bytes, 10 << 30);
    // fsck.erofs reads holes.
    let mount = shop.unchecked(&image.layer);
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
    let mount = Shop::new().mounted(&archive.finish());
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
fn the_largest_attributes_ids_times_and_targets_are_kept() {
    // Attributes that reach over several blocks.
    let xattrs: Vec<_> = (0..20u8)
        .map(|number| (format!("SCHILY.xattr.trusted.number-{number}"), vec![number + 1; 1999]))
        .collect();
    let mut records: Vec<(&str, &[u8])> =
        vec![("uid", b"4294967294"), ("gid", b"65536"), ("mtime", b"4294967300.999999999")];
    records.extend(xattrs.iter().map(|(name, value)| (name.as_str(), value.as_slice())));
    let mode = |header: &mut [u8; 512]| header[100..108].copy_from_slice(b"0007777\0");
    let target = vec![b't'; 4095];
    let archive = Archive::new()
        .pax(&records)
        .raw(b"file", b'0', b"", b"content", mode)
        .pax(&records)
        .raw(b"dir", b'5', b"", b"", mode)
        .pax(&records)
        .raw(b"pipe", b'6', b"", b"", mode)
        .pax(&[("linkpath", &target)])
        .symlink("link", "");
    let mount = Shop::new().mounted(&archive.finish());
    let found = facts(mount.path());
    for name in ["./file", "./dir", "./pipe"] {
        let facts = &found[name.as_bytes()];
        assert_eq!((facts.mode & 0o7777, facts.uid, facts.gid), (0o7777, u32::MAX - 1, 65_536), "{name}");
        assert_eq!(facts.mtime, (i64::from(u32::MAX) + 5, 999_999_999), "{name}");
        assert_eq!(facts.xattrs.len(), 20, "{name}");
        assert_eq!(facts.xattrs[b"trusted.number-19".as_slice()], [20; 1999], "{name}");
    }
    assert_eq!(found[b"./link".as_slice()].target, target);
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
    let mut shop = Shop::new();
    let built = shop.bytes(&archive.finish());
    // fsck.erofs recurses and runs out of stack.
    let mount = shop.unchecked(&built.layer);
    for link in 0..12 {
        assert!(mount.path().join(format!("l{link}/end")).is_file(), "l{link}");
    }
    assert_eq!(built.layer.tree.iter().count(), 1 + 12 * 250 + 12 + 12);
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
    let mount = Shop::new().mounted(&archive.finish());
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
