//! Layers are held against the kernel: metadata mounted with blobs as devices must be what was archived, packed or
//! merged, byte for byte and attribute for attribute. Needs root, EROFS and overlayfs in the kernel, erofs-utils and
//! GNU tar.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use dsec_image::build::{
    Donors, Effect, FileIndex, Hidden, PackSink, PackedUpper, Previous, Rules, Upper, UpperReader, Workshop,
    from_directory, look_for_denied, mark_whiteouts, merge, oci_form, resolve_redirects,
};
use dsec_image::erofs::{LayerTree, Timestamp};
use dsec_image::layer::PackId;
use dsec_image::{EntryProblem, ImportError, ImportLimits};
use support::archive::Archive;
use support::layers::Shop;
use support::layout::Layout;
use support::source::{archived, source_tree};
use support::{Facts, Mount, assert_same, facts, shell};

fn from_upper(
    upper: &Upper<'_>,
    limits: &ImportLimits,
    shop: Workshop<'_>,
) -> Result<PackedUpper, ImportError> {
    let mut reader = UpperReader::begin(shop.blob_path, shop.donors, shop.sink)?;
    reader.read(upper, limits)?;
    reader.finish()
}

fn encoded(layer: &LayerTree) -> Vec<u8> {
    layer.encode().unwrap().0
}

#[test]
fn a_layer_of_an_archive_is_the_archived_tree() {
    let source = tempfile::tempdir().unwrap();
    source_tree(source.path());
    let expected = facts(source.path());
    let mut shop = Shop::new();
    let tar = shop.dir.path().join("tar");
    archived(source.path(), &tar, &["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse"]);
    let built = shop.archive(&tar).pop().unwrap();
    let mount = shop.mount(&built.layer);
    assert_same(&expected, &facts(mount.path()));
    // Programs take inode number 0 for a deleted entry.
    assert_ne!(fs::metadata(mount.path()).unwrap().ino(), 0);
    let inodes: std::collections::BTreeSet<_> = expected.values().map(|facts| &facts.same_as).collect();
    assert_eq!(built.layer.tree.iter().count(), inodes.len());
    // Names that do not exist are not found, among those that do.
    for missing in ["bin/4098", "bin/", "zzz", ".!", "deep/hare", "deep/hardx"] {
        assert_eq!(mount.path().join(missing).exists(), missing == "bin/", "{missing}");
    }
    // No content is in the metadata, and none is there twice: the files of 5 MB, 4 KB and a program.
    assert!(encoded(&built.layer).len() < 200 << 10, "{}", encoded(&built.layer).len());
    let again = shop.archive(&tar).pop().unwrap();
    assert_eq!(encoded(&again.layer), encoded(&built.layer));
    assert_eq!(again.files, built.files);
    assert_eq!(again.blob.unwrap().id, built.blob.unwrap().id);
}

#[test]
fn a_layer_of_a_directory_is_the_directory() {
    let source = tempfile::tempdir().unwrap();
    source_tree(source.path());
    let python = "import socket; socket.socket(socket.AF_UNIX).bind('socket')";
    shell(source.path(), &format!("python3 -c \"{python}\"; touch -d @1 ."));
    let expected = facts(source.path());
    let mut shop = Shop::new();
    let limits = ImportLimits::default();
    let built = shop.make(&[], |shop| from_directory(source.path(), &limits, shop), |built| built);
    let mount = shop.mount(&built.layer);
    assert_same(&expected, &facts(mount.path()));
    let files = FileIndex::decode(&built.files.encode()).unwrap();
    // What a donor has is not stored again.
    let again = shop.make(&[&files], |shop| from_directory(source.path(), &limits, shop), |built| built);
    let stored = again.blob.as_ref().map_or(0, |blob| blob.index.size());
    assert!(stored <= 16 << 10, "{stored} bytes stored again, of two sparse files");
    let mount = shop.mount(&again.layer);
    assert_same(&expected, &facts(mount.path()));
}

#[test]
fn equal_files_are_stored_once() {
    let content = vec![7; 100_000];
    let mut large: Vec<u8> =
        (0..5_000_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    large.truncate(5_000_001);
    let tar = Archive::new()
        .file("a", &content)
        .file("large", &large)
        .file("b", &content)
        .file("large-again", &large)
        .file("c", b"c")
        .file("large-but-one", &large[1..])
        .finish();
    let mut shop = Shop::new();
    let built = shop.bytes(&tar);
    let blob = built.blob.as_ref().unwrap();
    assert_eq!(blob.index.size(), (25 + 1221 + 1 + 1221) * 4096);
    let mount = shop.mount(&built.layer);
    for (name, expected) in [
        ("a", &content[..]),
        ("b", &content),
        ("c", b"c"),
        ("large", &large),
        ("large-again", &large),
        ("large-but-one", &large[1..]),
    ] {
        assert!(fs::read(mount.path().join(name)).unwrap() == expected, "{name}");
    }
}

#[test]
fn a_second_pack_of_an_upper_directory_stores_what_changed() {
    let upper = tempfile::tempdir().unwrap();
    shell(
        upper.path(),
        "mkdir d; for i in 1 2 3 4 5 6 7 8; do head -c 50000 /dev/urandom > d/$i; done
         truncate -s 1M d/sparse; printf x | dd of=d/sparse bs=1 seek=500000 conv=notrunc status=none
         sleep 0.1; touch last",
    );
    let limits = ImportLimits::default();
    let mut shop = Shop::new();
    let packed = |shop: &mut Shop, donors: &[&FileIndex], previous: &Previous, moment| {
        let (path, rules) = (upper.path(), &Rules::default());
        let upper = Upper { path, previous, rules, moment, until: None };
        shop.make(donors, |shop| from_upper(&upper, &limits, shop), |made| &made.built)
    };
    let long_ago = Timestamp::default();
    let PackedUpper { built: first, previous, .. } = packed(&mut shop, &[], &Previous::default(), long_ago);
    let previous = Previous::decode(&previous.encode()).unwrap();
    assert_eq!(previous.len(), 9);
    assert_eq!(first.blob.as_ref().unwrap().index.size(), (8 * 13 + 1) * 4096);
    shell(
        upper.path(),
        "printf y >> d/3; chmod 600 d/4; rm d/5; mv d/6 six; ln d/7 seven; printf new > d/new",
    );
    let second = packed(&mut shop, &[], &previous, long_ago).built;
    // d/3 and d/new; d/4 and what else has a new change time is read again, and found to be the same as nothing.
    let stored = second.blob.as_ref().unwrap().index.size();
    assert!(stored <= (13 * 4 + 1) * 4096, "{stored}");
    let mount = shop.mount(&second.layer);
    assert_same(&facts(upper.path()), &facts(mount.path()));
    // With the first pack as a donor only what is new is stored.
    let third = packed(&mut shop, &[&first.files], &previous, long_ago).built;
    assert_eq!(third.blob.as_ref().unwrap().index.size(), (13 + 1) * 4096);
    // Who knows when the last change can have been trusts files that changed with it.
    assert!(packed(&mut shop, &[], &Previous::default(), long_ago).previous.len() < 9);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let later = Timestamp { seconds: now.as_secs() as i64 + 1, nanoseconds: 0 };
    assert_eq!(packed(&mut shop, &[], &Previous::default(), later).previous.len(), 9);
}

#[test]
fn what_rules_leave_out_is_not_read_and_what_they_deny_fails() {
    let upper = tempfile::tempdir().unwrap();
    shell(
        upper.path(),
        "mkdir -p work/__pycache__/deep root/.ssh data/sub var/log/app
         head -c 100000 /dev/urandom > work/__pycache__/a.pyc; echo b > work/__pycache__/deep/b.pyc
         echo key > root/.ssh/id_rsa; ln root/.ssh/id_rsa work/linked; echo x > data/sub/x; echo l > var/log/app/l
         echo code > work/a.py; mknod root/.ssh/old c 0 0; mknod data/gone c 0 0; ln -s /etc/shadow data/link
         mkfifo data/pipe",
    );
    // Were it opened, this would fail: nobody may read it, and it is a link out of the directory.
    shell(
        upper.path(),
        "ln -s / work/__pycache__/host; setfattr -n trusted.overlay.metacopy work/__pycache__/a.pyc",
    );
    let limits = ImportLimits::default();
    let mut shop = Shop::new();
    let mut rules = Rules::default();
    for name in Rules::residue_names() {
        assert!(rules.scrub(name));
    }
    rules.add(Effect::Exclude, "/data/**", "/data/**").unwrap();
    let previous = Previous::default();
    fn of<'a>(path: &'a std::path::Path, previous: &'a Previous, rules: &'a Rules) -> Upper<'a> {
        Upper { path, previous, rules, moment: Timestamp::default(), until: None }
    }
    let packed = shop.make(
        &[],
        |shop| from_upper(&of(upper.path(), &previous, &rules), &limits, shop),
        |made| &made.built,
    );
    let left: Vec<_> =
        packed.left_out.iter().map(|left| (left.rule.as_str(), left.files, left.bytes)).collect();
    assert_eq!(left, [("/data/**", 5, 2), ("caches/python", 5, 100_002), ("keys", 1, 4), ("logs", 1, 2)]);
    assert_eq!(packed.left_out[1].paths, ["/work/__pycache__"]);
    let mount = shop.mount(&packed.built.layer);
    let expected = tempfile::tempdir().unwrap();
    shell(
        upper.path(),
        &format!(
            "rm -r data work/__pycache__ root/.ssh/id_rsa var/log/app/l; mkdir data; cp -a . {}",
            expected.path().display()
        ),
    );
    let without_times = |mut all: std::collections::BTreeMap<Vec<u8>, support::Facts>| {
        all.values_mut().for_each(|facts| (facts.mtime, facts.links) = ((0, 0), 0));
        all
    };
    assert_same(&without_times(facts(expected.path())), &without_times(facts(mount.path())));
    // The key is there under its other name, and a rule that denies it says where.
    rules.add(Effect::Deny, "linked", "linked").unwrap();
    let workshop = Workshop {
        blob_path: &shop.dir.path().join("denied"),
        donors: Donors::default(),
        sink: &mut shop.packs,
        progress: &mut |_| (),
    };
    for denied in [
        look_for_denied(&of(upper.path(), &previous, &rules), &limits).unwrap_err(),
        from_upper(&of(upper.path(), &previous, &rules), &limits, workshop).map(drop).unwrap_err(),
    ] {
        let ImportError::Entry { entry, problem: EntryProblem::Denied { rule }, .. } = denied else {
            panic!("{denied:?}");
        };
        assert_eq!((entry.as_str(), rule.as_str()), ("work/linked", "linked"));
    }
    let mut other = Rules::default();
    other.add(Effect::Deny, "*.pem", "*.pem").unwrap();
    look_for_denied(&of(upper.path(), &previous, &other), &limits).unwrap();
}

#[test]
fn what_was_read_before_time_ran_out_is_not_read_again() {
    let upper = tempfile::tempdir().unwrap();
    // The large file is read last, which takes longer than the others and the time there is.
    shell(
        upper.path(),
        "for i in 1 2 3; do head -c 9000 /dev/urandom > a$i; done; head -c 64M /dev/zero > large",
    );
    let limits = ImportLimits::default();
    let mut shop = Shop::new();
    let (rules, previous) = (Rules::default(), Previous::default());
    let of = |until| Upper {
        path: upper.path(),
        previous: &previous,
        rules: &rules,
        moment: Timestamp::default(),
        until,
    };
    let made = shop.make(
        &[],
        |shop| {
            let mut reader = UpperReader::begin(shop.blob_path, shop.donors, shop.sink)?;
            for patience in [Duration::ZERO, Duration::from_millis(5)] {
                let late = reader.read(&of(Some(Instant::now() + patience)), &limits).unwrap_err();
                assert!(matches!(late, ImportError::Entry { problem: EntryProblem::Late, .. }), "{late:?}");
            }
            reader.read(&of(Some(Instant::now() + Duration::from_secs(600))), &limits)?;
            reader.finish()
        },
        |made| &made.built,
    );
    // Each is there once, and of the large one nothing is that was read in vain.
    assert_eq!(made.built.blob.as_ref().unwrap().index.size(), 3 * (12 << 10) + (64 << 20));
    let mount = shop.mount(&made.built.layer);
    assert_same(&facts(upper.path()), &facts(mount.path()));
}

/// Merges the layers of an image as an import does, through their images as they come out of a store, and mounts it.
fn merged(source: &std::path::Path) -> (LayerTree, BTreeMap<Vec<u8>, Facts>) {
    let mut shop = Shop::new();
    let built = shop.archive(source);
    let layers: Vec<_> =
        built.iter().map(|built| LayerTree::decode(&encoded(&built.layer)).unwrap()).collect();
    let all: Vec<_> = layers.iter().collect();
    let merged = merge(&all, Hidden::Drop, 1_000_000).unwrap();
    let mount = shop.mount(&merged);
    let found = facts(mount.path());
    (merged, found)
}

/// What is in a tree: files as `path=content`, directories as `path/`, links as `path>target`.
fn listed(found: &BTreeMap<Vec<u8>, Facts>, contents: &[&str]) -> Vec<String> {
    let content_of = |digest: &str| {
        let known = contents.iter().find(|content| support::layout::sha256(content.as_bytes()) == digest);
        (*known.unwrap_or(&"?")).to_owned()
    };
    let shown = found.iter().filter(|(path, _)| path.as_slice() != b".").map(|(path, facts)| {
        let path = String::from_utf8_lossy(&path[2..]).into_owned();
        match (facts.mode & 0o170_000, facts.target.is_empty()) {
            (0o040_000, _) => format!("{path}/"),
            (_, false) => format!("{path}>{}", String::from_utf8_lossy(&facts.target)),
            _ => format!("{path}={}", content_of(&facts.content)),
        }
    });
    shown.collect()
}

fn image_of(layers: Vec<Vec<u8>>) -> tempfile::NamedTempFile {
    let mut layout = Layout::default();
    let manifest = layout.manifest("amd64", &layers);
    layout.manifests.push(manifest);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), layout.tar()).unwrap();
    file
}

#[test]
fn merged_layers_of_an_image_are_what_the_last_of_them_left() {
    let first = Archive::new()
        .dir("usr")
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .dir("etc")
        .file("etc/a", b"a1")
        .file("etc/b", b"b1")
        .dir("gone")
        .file("gone/x", b"x")
        .dir("opaque")
        .file("opaque/old", b"old")
        .dir("became")
        .file("became/in", b"1")
        .file("linked", b"linked")
        .hard_link("second", "linked")
        .file("file", b"file");
    let second = Archive::new()
        .file("lib/followed", b"f")
        .file("etc/a", b"a2")
        .file("etc/.wh.b", b"")
        .file(".wh.gone", b"")
        .file("opaque/new", b"new")
        .file("opaque/.wh..wh..opq", b"")
        .file("became", b"a file now")
        .hard_link("third", "linked")
        .file("implied/deep/x", b"x")
        .dir("file")
        .file("file/in", b"in")
        .file("nowhere/.wh.nothing", b"");
    let third = Archive::new()
        .file(".wh.linked", b"")
        .dir("gone")
        .file("gone/back", b"back")
        .file("implied/.wh.deep", b"")
        .file("implied/deep/y", b"y")
        .file("etc/.wh.a", b"")
        .file("etc/a", b"a3")
        .dir("opaque")
        .file("opaque/z", b"z");
    let image = image_of(vec![first.finish(), second.finish(), third.finish()]);
    let (merged, found) = merged(image.path());
    assert_eq!(merged.blobs.len(), 3);
    let contents =
        ["a3", "b1", "a file now", "linked", "in", "f", "x", "y", "back", "new", "old", "z", "1", "file"];
    let expected = [
        "became=a file now",
        "etc/",
        "etc/a=a3",
        "file/",
        "file/in=in",
        "gone/",
        "gone/back=back",
        "implied/",
        "implied/deep/",
        "implied/deep/y=y",
        "lib>usr/lib",
        "opaque/",
        "opaque/new=new",
        "opaque/z=z",
        "second=linked",
        "third=linked",
        "usr/",
        "usr/lib/",
        "usr/lib/followed=f",
    ];
    assert_eq!(listed(&found, &contents), expected);
    assert_eq!(found[b"./second".as_slice()].same_as, found[b"./third".as_slice()].same_as);
}

#[test]
fn a_layer_is_known_by_what_it_unpacks_to() {
    let tar = Archive::new().file("a", b"a").finish();
    let packed = zstd::encode_all(tar.as_slice(), 1).unwrap();
    let image = image_of(vec![packed]);
    let built = Shop::new().archive(image.path()).pop().unwrap();
    assert_eq!(built.diff_id.unwrap(), support::layout::sha256(&tar));
}

#[test]
fn an_image_of_127_layers_merges() {
    let layers = (0..127u32).map(|number| {
        Archive::new()
            .dir("d")
            .file("d/same", number.to_string().as_bytes())
            .file(&format!("d/{number}"), format!("of {number}").as_bytes())
            .file(&format!("d/.wh.{}", number.wrapping_sub(2)), b"")
            .file(&format!("only/{}/{number}", number % 3), b"x")
            .finish()
    });
    let image = image_of(layers.collect());
    let (merged, found) = merged(image.path());
    assert_eq!(merged.blobs.len(), 127);
    let mut expected: Vec<_> = (0..127).map(|number| format!("only/{}/{number}=x", number % 3)).collect();
    expected.extend(["d/", "d/125=of 125", "d/126=of 126", "d/same=126"].map(str::to_owned));
    expected.extend(["only/", "only/0/", "only/1/", "only/2/"].map(str::to_owned));
    let mut found = listed(&found, &["x", "126", "of 125", "of 126"]);
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

/// A sandbox's writes, done through overlayfs as sandboxes mount it.
#[test]
fn an_upper_directory_packs_to_what_the_overlay_showed() {
    let base = tempfile::tempdir().unwrap();
    source_tree(base.path());
    shell(
        base.path(),
        "mkdir -p tree/a/b tree/c; printf 1 > tree/a/one; printf 2 > tree/a/b/two; printf 3 > tree/c/3",
    );
    let mut shop = Shop::new();
    let limits = ImportLimits::default();
    let lower = shop.make(&[], |shop| from_directory(base.path(), &limits, shop), |built| built);
    let lower_mount = shop.mount(&lower.layer);
    let writable = Mount::tmpfs("64m");
    shell(writable.path(), "mkdir u w");
    let options = format!(
        "lowerdir={},upperdir={1}/u,workdir={1}/w,redirect_dir=on",
        lower_mount.path().display(),
        writable.path().display()
    );
    let overlay = Mount::new(&["-t", "overlay", "-o", &options, "none"].map(std::ffi::OsStr::new));
    shell(
        overlay.path(),
        r#"
        printf more >> bin/one; rm bin/4096; chmod 700 bin/large; rm -r deep; mkdir deep; printf new > deep/new
        mv tree moved; printf x > moved/a/x; rm moved/a/one; mv moved/a/b moved/c/b2; mkdir tree; printf t > tree/t
        rm absolute; mkdir absolute; printf in > absolute/in; ln moved/c/3 three; mkfifo pipe2; mknod zero c 1 5
        truncate -s 9M big; printf y | dd of=big bs=1 seek=5000000 conv=notrunc status=none
        mv bin/4095 renamed; ln -sf elsewhere dangling; printf n > "$(printf 'new-\377')"
        "#,
    );
    let expected = facts(overlay.path());
    drop(overlay);
    let upper = writable.path().join("u");
    let (previous, rules, moment) = (&Previous::default(), &Rules::default(), Timestamp::default());
    let upper = Upper { path: &upper, previous, rules, moment, until: None };
    let packed = shop.make(&[&lower.files], |shop| from_upper(&upper, &limits, shop), |made| &made.built);
    let built = packed.built;
    let layer = resolve_redirects(&built.layer, &lower.layer, 100_000).unwrap();
    let merged = merge(&[&lower.layer, &layer], Hidden::Drop, 100_000).unwrap();
    let mount = shop.mount(&merged);
    let without_links = |mut all: BTreeMap<Vec<u8>, Facts>| {
        // Overlayfs without an index breaks hard links when it copies up, and counts differently.
        all.values_mut().for_each(|facts| (facts.links, facts.same_as) = (0, Vec::new()));
        all
    };
    let expected = without_links(expected);
    assert_same(&expected, &without_links(facts(mount.path())));
    // As layers on each other, too: the kernel follows whiteouts and opaque directories, and no redirect is left.
    let upper_mount = shop.mount(&layer);
    let options = format!("lowerdir={}:{}", upper_mount.path().display(), lower_mount.path().display());
    let overlay = Mount::new(&["-t", "overlay", "-o", &options, "none"].map(std::ffi::OsStr::new));
    assert_same(&expected, &without_links(facts(overlay.path())));
    drop(overlay);
    // And out again: as an OCI layer on top of the lower one, made anew.
    let oci = oci_form(&layer);
    let export = shop.unchecked(&oci);
    assert!(
        export.path().join("bin/.wh.4096").is_file() && export.path().join("deep/.wh..wh..opq").is_file()
    );
    let tar = shop.dir.path().join("export.tar");
    archived(export.path(), &tar, &["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse"]);
    drop(export);
    let image = image_of(vec![Archive::new().file("x", b"").finish(), fs::read(&tar).unwrap()]);
    let again = shop.archive(image.path()).pop().unwrap();
    let merged = merge(&[&lower.layer, &again.layer], Hidden::Drop, 100_000).unwrap();
    assert_same(&expected, &without_links(facts(shop.mount(&merged).path())));
}

/// Overlayfs lists a directory that one layer alone has as it is.
#[test]
fn what_was_removed_is_not_listed_whatever_lies_below() {
    let upper = tempfile::tempdir().unwrap();
    shell(
        upper.path(),
        "mkdir own; echo a > own/a; mknod own/gone c 0 0; mkdir own/d; mknod own/d/gone c 0 0",
    );
    let base = tempfile::tempdir().unwrap();
    shell(base.path(), "mkdir -p own2; echo b > b");
    let mut shop = Shop::new();
    let limits = ImportLimits::default();
    let (previous, rules, moment) = (&Previous::default(), &Rules::default(), Timestamp::default());
    let upper = Upper { path: upper.path(), previous, rules, moment, until: None };
    let mut layer = shop.make(&[], |shop| from_upper(&upper, &limits, shop), |made| &made.built).built.layer;
    let listed = |layer: &LayerTree, shop: &Shop| {
        let mount = shop.mount(layer);
        let options = format!("lowerdir={}:{}", mount.path().display(), base.path().display());
        let overlay = Mount::new(&["-t", "overlay", "-o", &options, "none"].map(std::ffi::OsStr::new));
        let names = |dir: &str| {
            let entries = fs::read_dir(overlay.path().join(dir)).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        (names("own"), names("own/d"))
    };
    mark_whiteouts(&mut layer);
    assert_eq!(listed(&layer, &shop), (vec!["a".to_owned(), "d".to_owned()], Vec::new()));
}

#[test]
fn names_that_some_systems_confuse_and_deep_and_long_files_are_kept() {
    let source = tempfile::tempdir().unwrap();
    shell(
        source.path(),
        r#"
        printf 1 > name; printf 2 > NAME; printf 3 > "$(printf 'caf\303\251')"; printf 4 > "$(printf 'cafe\314\201')"
        printf 5 > "$(printf '\377\376')"; printf 6 > "$(printf '\377')"
        truncate -s 5G long; printf end | dd of=long bs=1 seek=5368709110 conv=notrunc status=none
        printf mid | dd of=long bs=1 seek=3000000000 conv=notrunc status=none
        at=.; i=0; while [ $i -lt 12 ]; do
            d=$(printf 'd/%.0s' $(seq 100)); cd -P "$at" 2>/dev/null || true; mkdir -p "$d"; cd "$d"; printf $i > f; i=$((i+1)); at=.
        done
        "#,
    );
    let mut shop = Shop::new();
    let limits = ImportLimits::default();
    let built = shop.make(&[], |shop| from_directory(source.path(), &limits, shop), |built| built);
    assert!(built.blob.as_ref().unwrap().index.size() < 1 << 20);
    // fsck.erofs recurses and reads holes.
    let mount = shop.unchecked(&built.layer);
    assert_eq!(built.layer.tree.iter().count(), 1 + 7 + 12 * 101);
    let count = "find . -type f | wc -l; find . | LC_ALL=C sort | md5sum; find . -name f | wc -l";
    assert_eq!(shell(source.path(), count), shell(mount.path(), count));
    for name in ["name", "NAME", "caf\u{e9}", "cafe\u{301}"] {
        assert_eq!(fs::read(source.path().join(name)).unwrap(), fs::read(mount.path().join(name)).unwrap());
    }
    let cmp = format!(
        "cmp -n 1000000 '{0}/long' '{1}/long' 0 0; cmp -i 2999999000 -n 2000 '{0}/long' '{1}/long'; cmp -i 5368708000 '{0}/long' '{1}/long'",
        source.path().display(),
        mount.path().display()
    );
    shell(source.path(), &cmp);
}

#[test]
fn a_million_tiny_files_are_one_layer() {
    const COUNT: usize = 1_000_000;
    let mut shop = Shop::new();
    let path = shop.dir.path().join("source");
    let mut tar = zstd::Encoder::new(fs::File::create(&path).unwrap(), 1).unwrap();
    for number in 0..COUNT {
        if number % 1000 == 0 {
            tar.write_all(&Archive::new().dir(&format!("d{}", number / 1000)).cut()).unwrap();
        }
        // A thousand different contents.
        let entry =
            Archive::new().file(&format!("d{}/{number}", number / 1000), &(number % 1000).to_le_bytes());
        tar.write_all(&entry.cut()).unwrap();
    }
    tar.write_all(&Archive::new().finish()).unwrap();
    tar.finish().unwrap();
    let built = shop.archive(&path).pop().unwrap();
    assert_eq!(built.layer.tree.iter().count(), 1 + COUNT + 1000);
    assert_eq!(built.blob.as_ref().unwrap().index.size(), 1000 * 4096);
    let mount = shop.unchecked(&built.layer);
    for number in (0..COUNT).step_by(99_991) {
        let content = fs::read(mount.path().join(format!("d{}/{number}", number / 1000))).unwrap();
        assert_eq!(content, (number % 1000).to_le_bytes());
    }
}

#[test]
fn a_store_that_takes_no_packs_fails_the_layer() {
    struct Full;
    impl PackSink for Full {
        fn pack(&mut self, _: PackId, _: Vec<u8>) -> std::io::Result<()> {
            Err(std::io::Error::other("the store is full"))
        }
    }
    // Once while content is written, once at its end: a pack holds 32 MiB.
    for len in [100u32, 40 << 20] {
        let dir = tempfile::tempdir().unwrap();
        let noise: Vec<u8> = (0..len.div_ceil(4))
            .flat_map(|n| (n.wrapping_mul(n) ^ 77).wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        fs::create_dir(dir.path().join("source")).unwrap();
        fs::write(dir.path().join("source/noise"), noise).unwrap();
        let workshop = Workshop {
            blob_path: &dir.path().join("blob"),
            donors: Donors::default(),
            sink: &mut Full,
            progress: &mut |_| {},
        };
        let error =
            from_directory(&dir.path().join("source"), &ImportLimits::default(), workshop).unwrap_err();
        assert!(support::chain(&error).ends_with("the store is full"), "{}", support::chain(&error));
    }
}
