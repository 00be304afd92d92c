use std::collections::BTreeMap;
use std::path::PathBuf;

use super::*;
use crate::build::{Hidden, merge};
use crate::erofs::{Area, FileData, LayerTree, Passing};
use crate::intake::stream::Budgeted;

#[path = "../../../tests/support/archive.rs"]
mod archive;
use archive::Archive;

/// Takes content in without making packs of it: this is done thousands of times.
struct Plain(Area);

impl ContentStore for Plain {
    fn append(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let extent = self.0.append(source, size, &mut Passing { seen: &mut |_| {}, tick })?;
        Ok(FileData::dense(size, extent.start, 1))
    }

    fn append_sparse(
        &mut self,
        source: &mut dyn Read,
        size: u64,
        segments: &[Segment],
        room: u64,
        tick: &mut dyn FnMut(u64),
    ) -> Result<FileData, AppendError> {
        let mut passing = Passing { seen: &mut |_| {}, tick };
        let (extent, chunks) = self.0.append_sparse(source, size, segments, room, &mut passing)?;
        let (start, blocks) = (extent.start, extent.blocks);
        Ok(FileData { size, start, blocks, device: 1, chunks: Some(Box::new(chunks)) })
    }
}

/// Applies archives, each as a layer of its own, as an import does.
fn trees(layers: &[Vec<u8>], limits: ImportLimits, whiteouts: Whiteouts) -> Result<Vec<LayerTree>, TarError> {
    // In memory: it must not wait for tests that sync the disk.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let budget = Budget::new(limits.max_bytes);
    let mut trees = Vec::new();
    let (mut files, mut metadata_bytes) = (0, 0);
    for (number, layer) in layers.iter().enumerate() {
        let path: PathBuf = dir.path().join(number.to_string());
        let mut applier = Applier {
            tree: Tree::new(),
            data: &mut Plain(Area::create(&path).unwrap()),
            data_path: &path,
            limits,
            budget: budget.clone(),
            tick: &mut |_| {},
            files,
            metadata_bytes,
            whiteouts,
        };
        let mut stream = Budgeted { inner: layer.as_slice(), budget: budget.clone() };
        applier.apply(&mut stream)?;
        (files, metadata_bytes) = (applier.files, applier.metadata_bytes);
        trees.push(LayerTree { tree: applier.tree, blobs: Vec::new() });
    }
    Ok(trees)
}

fn merged(trees: &[LayerTree]) -> BTreeMap<String, String> {
    let trees: Vec<_> = trees.iter().collect();
    listing(&merge(&trees, Hidden::Drop, 1000).unwrap_or_else(|e| panic!("{e}")).tree)
}

/// The layers of an image on each other, as paths with what they are.
fn layered(layers: &[Vec<u8>]) -> BTreeMap<String, String> {
    let trees = trees(layers, ImportLimits::default(), Whiteouts::Keep);
    merged(&trees.unwrap_or_else(|e| panic!("{}: {}", e.entry, e.problem)))
}

/// A plain root file system, likewise.
fn root(bytes: Vec<u8>, limits: ImportLimits) -> Result<BTreeMap<String, String>, TarError> {
    trees(&[bytes], limits, Whiteouts::None).map(|trees| merged(&trees))
}

fn listing(tree: &Tree) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut todo = vec![(String::new(), tree.root())];
    while let Some((path, id)) = todo.pop() {
        let inode = tree.get(id).unwrap();
        let what = match &inode.content {
            Content::Directory(entries) => {
                for (name, id) in entries {
                    todo.push((format!("{path}/{}", String::from_utf8_lossy(name)), *id));
                }
                "dir".to_owned()
            }
            Content::File(data) => format!("file {} #{}", data.size(), id.0),
            Content::Symlink(target) => format!("-> {}", String::from_utf8_lossy(target)),
            other => format!("{other:?}"),
        };
        out.insert(path, what);
    }
    out
}

fn one(archive: Archive) -> Result<BTreeMap<String, String>, TarError> {
    root(archive.finish(), ImportLimits::default())
}

fn paths(tree: &BTreeMap<String, String>) -> Vec<&str> {
    tree.keys().map(String::as_str).filter(|path| !path.is_empty()).collect()
}

/// The problem of an archive that must be refused, and the entry it names.
fn refused(name: &str, bytes: Vec<u8>, limits: ImportLimits) -> (EntryProblem, String) {
    match root(bytes, limits) {
        Ok(tree) => panic!("{name}: was taken in as {tree:?}"),
        Err(TarError { entry, problem }) => (problem, entry),
    }
}

macro_rules! refusals {
    ($($name:ident: $archive:expr, $problem:pat, $entry:expr;)*) => {$(
        #[test]
        fn $name() {
            let (problem, entry) = refused(stringify!($name), $archive, ImportLimits::default());
            assert!(matches!(problem, $problem), "{problem:?}");
            assert!(entry.contains($entry), "{entry:?} does not name {:?}", $entry);
            let text = problem.to_string();
            assert!(text.contains(';'), "{text:?} does not say what to do");
        }
    )*};
}

fn long(len: usize) -> Vec<u8> {
    vec![b'n'; len]
}

fn gnu(type_flag: u8, content: &[u8]) -> Archive {
    Archive::new().raw(b"././@LongLink", type_flag, b"", content, |_| {})
}

fn old_sparse(change: impl FnOnce(&mut [u8; 512])) -> Vec<u8> {
    Archive::new().raw(b"hole", b'S', b"", b"x", change).finish()
}

refusals! {
    parent_traversal: Archive::new().file("a/../../etc/passwd", b"x").finish(), EntryProblem::ParentTraversal, "a/../../etc/passwd";
    inner_parent_traversal: Archive::new().dir("a").file("a/../b", b"x").finish(), EntryProblem::ParentTraversal, "a/../b";
    nul_in_a_pax_path: Archive::new().pax(&[("path", b"a\0b")]).file("a", b"").finish(), EntryProblem::NulByte, "";
    nul_in_a_sparse_name: Archive::new().pax(&[("GNU.sparse.name", b"a\0b")]).file("a", b"").finish(), EntryProblem::NulByte, "";
    nul_in_a_symlink_target: Archive::new().pax(&[("linkpath", b"a\0b")]).symlink("a", "").finish(), EntryProblem::NulByte, "";
    name_of_256_bytes: Archive::new().pax(&[("path", &long(256))]).file("a", b"").finish(), EntryProblem::NameTooLong { len: 256 }, "nnnn";
    gnu_name_of_256_bytes: gnu(b'L', &long(256)).file("a", b"").finish(), EntryProblem::NameTooLong { len: 256 }, "nnnn";
    path_of_4097_bytes: Archive::new().pax(&[("path", &b"a/".repeat(2049))]).file("a", b"").finish(), EntryProblem::PathTooLong { len: 4098 }, "a/a/";
    symlink_target_of_4096_bytes: Archive::new().pax(&[("linkpath", &long(4096))]).symlink("l", "").finish(), EntryProblem::TargetTooLong { len: 4096 }, "l";
    empty_symlink_target: Archive::new().symlink("l", "").finish(), EntryProblem::EmptyTarget, "l";
    empty_hard_link_target: Archive::new().hard_link("l", "").finish(), EntryProblem::EmptyTarget, "l";
    extended_header_over_1_mib: Archive::new().pax(&[("comment", &long(1 << 20))]).file("a", b"").finish(), EntryProblem::ExtendedHeaderTooLarge { .. }, "pax";
    extended_headers_that_add_up_to_over_1_mib: Archive::new().pax(&[("comment", &long(600_000))]).pax(&[("comment", &long(600_000))]).file("a", b"").finish(), EntryProblem::ExtendedHeaderTooLarge { .. }, "pax";
    gnu_name_over_1_mib: gnu(b'L', &long((1 << 20) + 1)).file("a", b"").finish(), EntryProblem::ExtendedHeaderTooLarge { .. }, "LongLink";
    extended_header_of_garbage: Archive::new().raw(b"p", b'x', b"", b"99 path=a\n", |_| {}).file("a", b"").finish(), EntryProblem::BadExtendedHeader { .. }, "p";
    global_header_with_a_path: Archive::new().extended(b'g', &[("path", b"x")]).file("a", b"").finish(), EntryProblem::BadExtendedHeader { .. }, "pax";
    extended_header_before_nothing: Archive::new().pax(&[("path", b"x")]).finish(), EntryProblem::BadHeader { .. }, "at byte";
    no_end_mark: Archive::new().file("a", b"x").cut(), EntryProblem::Truncated, "a";
    no_bytes: Vec::new(), EntryProblem::Truncated, "at byte 0";
    garbage: vec![0x5a; 4096], EntryProblem::BadHeader { .. }, "at byte 0";
    garbage_after_an_entry: [Archive::new().file("a", b"x").cut(), vec![0x5a; 512]].concat(), EntryProblem::BadHeader { .. }, "after a";
    single_zero_block: [Archive::new().file("a", b"x").bytes(&[0; 512]).cut(), Archive::new().file("b", b"").finish()].concat(), EntryProblem::BadHeader { .. }, "after a";
    header_with_a_flipped_bit: { let mut whole = Archive::new().file("a", b"x").finish(); whole[0] ^= 2; whole }, EntryProblem::BadHeader { what: "its checksum is wrong" }, "at byte 0";
    size_that_is_no_number: Archive::new().raw(b"a", b'0', b"", b"", |h| h[124..128].copy_from_slice(b"9x-1")).finish(), EntryProblem::BadHeader { .. }, "";
    size_beyond_all_archives: Archive::new().pax(&[("size", b"18446744073709551615")]).file("a", b"").finish(), EntryProblem::BadHeader { .. }, "a";
    negative_size: Archive::new().raw(b"a", b'0', b"", b"", |h| h[124..136].fill(0xff)).finish(), EntryProblem::BadHeader { .. }, "";
    owner_beyond_32_bits: Archive::new().pax(&[("uid", b"4294967296")]).file("a", b"").finish(), EntryProblem::BadHeader { .. }, "a";
    unknown_type: Archive::new().raw(b"a", b'M', b"", b"", |_| {}).finish(), EntryProblem::UnsupportedType { type_flag: 'M' }, "a";
    symlink_loop: Archive::new().symlink("a", "b").symlink("b", "a").file("a/c", b"").finish(), EntryProblem::SymlinkLoop, "a/c";
    symlink_to_itself_below_itself: Archive::new().symlink("a", "a/x").file("a/c", b"").finish(), EntryProblem::SymlinkLoop, "a/c";
    file_as_parent: Archive::new().file("a", b"").file("a/c", b"").finish(), EntryProblem::ParentNotDirectory { .. }, "a/c";
    hard_link_to_nothing: Archive::new().hard_link("l", "gone").finish(), EntryProblem::LinkTargetMissing { .. }, "l";
    hard_link_to_what_comes_later: Archive::new().hard_link("l", "a").file("a", b"").finish(), EntryProblem::LinkTargetMissing { .. }, "l";
    hard_link_outside: Archive::new().hard_link("l", "../../etc/shadow").finish(), EntryProblem::LinkTargetOutside { .. }, "l";
    hard_link_to_a_directory: Archive::new().dir("d").hard_link("l", "d").finish(), EntryProblem::LinkTargetDirectory { .. }, "l";
    hard_link_to_the_root: Archive::new().hard_link("l", "/").finish(), EntryProblem::LinkTargetDirectory { .. }, "l";
    hard_link_over_its_targets_directory: Archive::new().file("d/a", b"").hard_link("d", "d/a").finish(), EntryProblem::LinkTargetMissing { .. }, "d";
    root_as_a_file: Archive::new().file("./", b"").raw(b"/", b'2', b"x", b"", |_| {}).finish(), EntryProblem::RootNotDirectory, "/";
    device_out_of_range: Archive::new().raw(b"d", b'3', b"", b"", |h| h[329..337].copy_from_slice(b"0010000\0")).finish(), EntryProblem::BadDevice { major: 4096, minor: 0 }, "d";
    xattr_with_a_name_of_256_bytes: Archive::new().pax(&[(&format!("SCHILY.xattr.user.{}", "n".repeat(256)), b"")]).file("a", b"").finish(), EntryProblem::BadXattr { .. }, "a";
    xattr_with_a_value_over_64_kib: Archive::new().pax(&[("SCHILY.xattr.user.a", &long(65_536))]).file("a", b"").finish(), EntryProblem::BadXattr { .. }, "a";
    sparse_pieces_that_overlap: Archive::new().pax(&[("GNU.sparse.map", b"0,1,0,1"), ("GNU.sparse.size", b"9")]).file("a", b"xy").finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_piece_after_the_end: Archive::new().pax(&[("GNU.sparse.map", b"9,1"), ("GNU.sparse.size", b"9")]).file("a", b"x").finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_pieces_longer_than_the_content: Archive::new().pax(&[("GNU.sparse.map", b"0,5"), ("GNU.sparse.size", b"9")]).file("a", b"x").finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_map_without_a_size: Archive::new().pax(&[("GNU.sparse.map", b"0,1")]).file("a", b"x").finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_map_of_garbage: Archive::new().pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"9")]).file("a", &[b'z'; 512]).finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_map_without_an_end: Archive::new().pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"9")]).file("a", &b"99999\n1\n1\n".repeat(52)[..512]).finish(), EntryProblem::BadSparseMap { .. }, "a";
    sparse_version_of_the_future: Archive::new().pax(&[("GNU.sparse.major", b"2"), ("GNU.sparse.realsize", b"9")]).file("a", b"x").finish(), EntryProblem::BadSparseMap { .. }, "a";
    old_sparse_map_of_garbage: old_sparse(|h| h[386..398].fill(b'z')), EntryProblem::BadSparseMap { .. }, "hole";
    old_sparse_map_that_ends_in_the_archives_end: old_sparse(|h| h[482] = 1), EntryProblem::BadSparseMap { .. }, "hole";
    sparse_file_too_large_to_be_one: Archive::new().pax(&[("GNU.sparse.map", b"0,1"), ("GNU.sparse.size", b"18446744073709551615")]).file("a", b"x").finish(), EntryProblem::BadSparseMap { .. }, "a";
}

#[test]
fn a_whiteout_of_no_name_is_refused() {
    for name in ["d/.wh...", "d/.wh."] {
        let archive = Archive::new().file(name, b"").finish();
        let refused = trees(&[archive], ImportLimits::default(), Whiteouts::Keep).unwrap_err();
        assert!(matches!(refused.problem, EntryProblem::BadWhiteout) && refused.entry == name);
    }
}

#[test]
fn limits_end_an_import_at_the_entry_that_passes_them() {
    let limits = ImportLimits { max_files: 3, ..ImportLimits::default() };
    let many = Archive::new().file("a", b"").file("b", b"").file("c", b"");
    assert_eq!(root(many.finish(), limits).unwrap().len(), 4);
    let many = Archive::new().file("a", b"").file("b", b"").file("c", b"").file("d", b"");
    let (problem, entry) = refused("files", many.finish(), limits);
    assert!(matches!(problem, EntryProblem::TooManyFiles { max: 3 }) && entry == "d", "{problem:?} {entry}");
    let (problem, _) = refused("parents", Archive::new().file("a/b/c/d", b"").finish(), limits);
    assert!(matches!(problem, EntryProblem::TooManyFiles { max: 3 }), "{problem:?}");

    let limits = ImportLimits { max_bytes: 10_000, ..ImportLimits::default() };
    let (problem, entry) = refused("bytes", Archive::new().file("big", &long(20_000)).finish(), limits);
    assert!(matches!(problem, EntryProblem::TooManyBytes { max: 10_000 }), "{problem:?}");
    assert_eq!(entry, "big");
    // The chunk in which one byte of a very large sparse file lies would be large too.
    let sparse = [("GNU.sparse.map", b"5,1".as_slice()), ("GNU.sparse.size", b"9223372036854775807")];
    let (problem, _) = refused("sparse", Archive::new().pax(&sparse).file("a", b"x").finish(), limits);
    assert!(matches!(problem, EntryProblem::TooManyBytes { max: 10_000 }), "{problem:?}");

    let limits = ImportLimits { max_metadata_bytes: 100, ..ImportLimits::default() };
    for archive in [
        Archive::new().pax(&[("SCHILY.xattr.user.a", &long(101))]).file("a", b""),
        Archive::new().pax(&[("linkpath", &long(101))]).symlink("a", ""),
        Archive::new().pax(&[("path", &long(101))]).file("a", b""),
        Archive::new().pax(&[("path", &b"nnnnnnnnnn/".repeat(12))]).file("a", b""),
    ] {
        let (problem, _) = refused("metadata", archive.finish(), limits);
        assert!(matches!(problem, EntryProblem::TooMuchMetadata { max: 100 }), "{problem:?}");
    }
}

#[test]
fn an_archive_cut_anywhere_is_never_taken_for_whole() {
    let whole = Archive::new().dir("d").file("d/a", &long(700)).symlink("l", "d").finish();
    let end = whole.len() - 1024;
    for cut in 0..=end + 511 {
        let result = root(whole[..cut].to_vec(), ImportLimits::default());
        let problem = result.map(|_| cut).unwrap_err().problem;
        assert!(matches!(problem, EntryProblem::Truncated), "{cut}: {problem:?}");
    }
}

#[test]
fn damaged_bytes_never_panic() {
    let whole = Archive::new()
        .pax(&[("path", b"d/x"), ("SCHILY.xattr.user.a", b"v"), ("mtime", b"1.5")])
        .file("a", b"x")
        .pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.realsize", b"4096")])
        .file("s", &[b"1\n0\n1\n".as_slice(), &[0; 506], b"x"].concat())
        .raw(b"o", b'S', b"", b"x", |h| {
            h[386..410].copy_from_slice(b"00000000000\x0000000000001\0");
            h[483..495].copy_from_slice(b"00000010000\0");
        })
        .hard_link("l", "d/x")
        .finish();
    assert_eq!(layered(std::slice::from_ref(&whole)).len(), 6);
    for at in 0..whole.len() {
        for value in [0xff, b'9', whole[at] ^ 1] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            // Also past the checksum, so that damaged numbers are seen.
            let header = at / 512 * 512;
            bytes[header + 148..header + 156].fill(b' ');
            let sum: u32 = bytes[header..header + 512].iter().map(|b| u32::from(*b)).sum();
            bytes[header + 148..header + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            if let Ok(trees) = trees(&[bytes], ImportLimits::default(), Whiteouts::Keep) {
                let _ = merge(&[&trees[0]], Hidden::Drop, 1000);
            }
        }
    }
}

#[test]
fn paths_are_taken_relative_to_the_images_root() {
    let tree = one(Archive::new().file("/etc/passwd", b"x").dir("./usr/").file("././usr//bin", b"")).unwrap();
    assert_eq!(paths(&tree), ["/etc", "/etc/passwd", "/usr", "/usr/bin"]);
}

#[test]
fn parents_that_are_symlinks_are_followed_inside_the_image() {
    let tree = one(Archive::new()
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .file("lib/a", b"")
        .symlink("abs", "/usr/lib")
        .file("abs/b", b"")
        .symlink("usr/up", "../../../../usr/./lib")
        .file("usr/up/c", b"")
        .symlink("usr/deep", "/usr/lib")
        .file("usr/deep/f", b"")
        .symlink("usr/top", "../../..")
        .file("usr/top/g", b"")
        .symlink("later", "made/by/need")
        .file("later/d", b"")
        .hard_link("lib/e", "abs/a"))
    .unwrap();
    for path in ["/usr/lib/a", "/usr/lib/b", "/usr/lib/c", "/made/by/need/d", "/usr/lib/f", "/g"] {
        assert!(tree.contains_key(path), "{path} in {tree:?}");
    }
    assert_eq!(tree["/usr/lib/e"], tree["/usr/lib/a"]);
    assert_eq!(tree["/lib"], "-> usr/lib");
}

#[test]
fn forty_symlinks_in_a_row_are_followed_and_one_more_is_not() {
    let chain = |links: usize| {
        let archive = (1..links).fold(Archive::new().dir("d"), |archive, number| {
            archive.symlink(&format!("l{number}"), &format!("l{}", number + 1))
        });
        one(archive.symlink(&format!("l{links}"), "d").file("l1/f", b""))
    };
    assert!(chain(40).unwrap().contains_key("/d/f"));
    assert!(matches!(chain(41).unwrap_err().problem, EntryProblem::SymlinkLoop));
}

#[test]
fn an_end_mark_of_one_block_is_enough_at_the_end_of_the_file() {
    let archive = Archive::new().file("a", b"").bytes(&[0; 512]).cut();
    assert_eq!(root(archive, ImportLimits::default()).unwrap().len(), 2);
}

#[test]
fn later_entries_take_the_place_of_earlier_ones() {
    let tree = one(Archive::new()
        .file("a", b"1")
        .file("a", b"22")
        .file("d/x", b"")
        .dir("d")
        .file("e/x", b"")
        .file("e", b"3")
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .dir("lib")
        .file("lib/y", b""))
    .unwrap();
    assert!(tree["/a"].starts_with("file 2"));
    assert!(tree.contains_key("/d/x"), "a directory again keeps what is in it");
    assert!(tree["/e"].starts_with("file 1") && !tree.contains_key("/e/x"));
    assert!(tree.contains_key("/lib/y") && !tree.contains_key("/usr/lib/y"), "{tree:?}");
}

#[test]
fn whiteouts_hide_lower_layers_only() {
    let low = Archive::new()
        .file("keep", b"")
        .file("gone", b"")
        .file("d/old", b"")
        .file("d/s/old", b"")
        .file("w", b"");
    let up = Archive::new()
        .file("d/s/new", b"")
        .file("d/.wh..wh..opq", b"")
        .file("d/fresh", b"")
        .file("w", b"22")
        .file(".wh.w", b"")
        .file(".wh.gone", b"")
        .file(".wh..wh.plnk", b"")
        .file(".wh.never-there", b"")
        .file("nowhere/.wh.x", b"");
    let layers = [low.finish(), up.finish()];
    let tree = layered(&layers);
    assert_eq!(paths(&tree), ["/d", "/d/fresh", "/d/s", "/d/s/new", "/keep", "/w"]);
    assert!(tree["/w"].starts_with("file 2"), "a whiteout does not hide its own layer's file");
    // In a root file system they are files like others.
    let [_, up] = layers;
    assert!(root(up, ImportLimits::default()).unwrap().contains_key("/.wh.gone"));
}

#[test]
fn hard_links_reach_across_layers_and_outlive_their_first_name() {
    let low = Archive::new().file("a", b"content");
    let up = Archive::new().hard_link("b", "a").hard_link("b", "b").file(".wh.a", b"");
    let tree = layered(&[low.finish(), up.finish()]);
    assert_eq!(paths(&tree), ["/b"]);
    assert!(tree["/b"].starts_with("file 7"));
}

#[test]
fn attributes_that_would_steer_overlayfs_or_are_not_linuxs_are_left_out() {
    let archive = Archive::new()
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
            ("SCHILY.xattr.user.overlay.opaque", b"y"),
            ("SCHILY.xattr.com.apple.provenance", b"1"),
            ("SCHILY.xattr.user.kept", b"1"),
        ])
        .file("a", b"")
        .finish();
    let mut reader = TarReader::new(Budgeted { inner: archive.as_slice(), budget: Budget::new(1 << 20) });
    let entry = reader.next_entry().unwrap().unwrap();
    assert_eq!(entry.xattrs.len(), 4);
    let mut expected = Xattrs::default();
    expected.set(b"user.kept", b"1").unwrap();
    assert_eq!(attributes(&entry).unwrap().xattrs.as_deref(), Some(&expected));
}

#[test]
fn a_global_header_gives_what_an_entry_does_not_say() {
    let archive = Archive::new()
        .extended(b'g', &[("mtime", b"5.5"), ("uid", b"7"), ("gid", b"8")])
        .file("a", b"")
        .pax(&[("mtime", b"6"), ("uid", b"9")])
        .file("b", b"")
        .finish();
    let mut reader = TarReader::new(Budgeted { inner: archive.as_slice(), budget: Budget::new(1 << 20) });
    let (a, b) = (reader.next_entry().unwrap().unwrap(), reader.next_entry().unwrap().unwrap());
    assert_eq!((a.uid, a.gid, a.mtime.seconds, a.mtime.nanoseconds), (7, 8, 5, 500_000_000));
    assert_eq!((b.uid, b.gid, b.mtime.seconds, b.mtime.nanoseconds), (9, 8, 6, 0));
}

#[test]
fn old_and_odd_headers_are_understood() {
    let tree = one(Archive::new()
        .raw(b"v7dir/", 0, b"", b"", |h| h[257..265].fill(0))
        .raw(b"v7file", 0, b"", b"x", |h| h[257..265].fill(0))
        .raw(b"name", b'0', b"", b"", |h| h[345..351].copy_from_slice(b"prefix"))
        // GNU keeps a time where POSIX has the prefix.
        .raw(b"gnu", b'0', b"", b"", |h| {
            h[257..265].copy_from_slice(b"ustar  \0");
            h[345..351].copy_from_slice(b"123456");
        })
        .raw(b"link", b'1', b"v7file", b"", |h| h[124..136].copy_from_slice(b"00000000777\0"))
        .raw(b"volume", b'7', b"", b"abc", |_| {}))
    .unwrap();
    assert_eq!(paths(&tree), ["/gnu", "/link", "/prefix", "/prefix/name", "/v7dir", "/v7file", "/volume"]);
    assert_eq!(tree["/v7dir"], "dir");
}
