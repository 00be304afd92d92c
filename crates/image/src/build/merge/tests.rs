use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::erofs::{BlobRef, FileData};
use crate::layer::{BlobId, Digest};

/// A layer in one line: `d`, `d/f=7` (a file at block 7), `-d/x` (whiteout), `!d` (opaque), `?d` (implied),
/// `d/l>d/f` (hard link), `s@t` (symlink), `n<o` (renamed), `l*p` (link to what is below).
fn layer(name: &str, entries: &[&str]) -> LayerTree {
    let blob = BlobRef { id: BlobId(Digest::of(name.as_bytes())), blocks: 100 };
    let mut layer = LayerTree { tree: Tree::new(), blobs: vec![blob] };
    for entry in entries {
        add(&mut layer.tree, entry);
    }
    layer
}

fn add(tree: &mut Tree, entry: &str) {
    let (mark, rest) = match entry.split_at(1) {
        (mark @ ("-" | "!" | "?"), rest) => (mark, rest),
        _ => ("", entry),
    };
    let split = rest.find(['=', '>', '@', '<', '*']);
    let (path, kind, value) = match split {
        Some(at) => (&rest[..at], &rest[at..=at], &rest[at + 1..]),
        None => (rest, "", ""),
    };
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let dir = walk::directory(tree, vec![tree.root()], parent.as_bytes()).unwrap();
    let dir = *dir.last().unwrap();
    let mut attributes = Attributes { mode: 0o700, ..Attributes::default() };
    let content = match (mark, kind) {
        ("-", _) => overlay::whiteout().1,
        (_, "=") => Content::File(FileData::dense(4096, value.parse().unwrap(), 1)),
        (_, "@") => Content::Symlink(value.as_bytes().into()),
        (_, ">") => {
            let target = walk::entry(tree, value.as_bytes()).unwrap();
            return tree.hard_link(dir, name.as_bytes(), target);
        }
        (_, "*") => {
            overlay::mark(&mut attributes, overlay::LINK, value.as_bytes());
            Content::Fifo
        }
        _ => Content::directory(),
    };
    match (mark, kind) {
        ("!", _) => overlay::mark(&mut attributes, overlay::OPAQUE, b"y"),
        ("?", _) => overlay::mark(&mut attributes, overlay::IMPLIED, b""),
        (_, "<") => overlay::mark(&mut attributes, overlay::REDIRECT, value.as_bytes()),
        _ => {}
    }
    tree.insert(dir, name.as_bytes(), attributes, content);
}

/// The tree as paths with what they are: a file by blob and block.
fn listing(layer: &LayerTree) -> Vec<String> {
    let (mut out, mut first) = (Vec::new(), BTreeMap::new());
    let mut todo = vec![(String::new(), layer.tree.root())];
    while let Some((path, id)) = todo.pop() {
        for (name, id) in walk::entries(&layer.tree, id).unwrap().iter().rev() {
            let path = format!("{path}{}", String::from_utf8_lossy(name));
            todo.push((format!("{path}/"), *id));
            let inode = layer.tree.get(*id).unwrap();
            let mark = if overlay::is_opaque(&inode.attributes) { "!" } else { "" };
            out.push(match &inode.content {
                Content::Directory(_) => format!("{mark}{path}"),
                content if overlay::is_whiteout(content) => format!("-{path}"),
                Content::File(data) => {
                    let blob = layer.blobs[usize::from(data.device) - 1].id;
                    let name =
                        ["a", "b", "c"].into_iter().find(|name| BlobId(Digest::of(name.as_bytes())) == blob);
                    format!("{path}={}{}#{}", name.unwrap(), data.start, inode.names)
                }
                Content::Symlink(target) => format!("{path}@{}", String::from_utf8_lossy(target)),
                other => format!("{path} {other:?}"),
            });
            first.entry(*id).or_insert(path);
        }
        todo.retain(|(_, id)| walk::entries(&layer.tree, *id).is_some());
    }
    out.sort();
    out
}

fn merged(hidden: Hidden, layers: &[&LayerTree]) -> Vec<String> {
    let merged = merge(layers, hidden, 1000).unwrap_or_else(|e| panic!("{e}"));
    merged.encode().unwrap();
    listing(&merged)
}

#[test]
fn upper_entries_take_the_place_of_lower_ones() {
    let a = layer("a", &["d", "d/x=1", "d/y=2", "f=3", "e", "e/z=4", "g=5"]);
    let b = layer("b", &["d", "d/x=1", "-d/y", "f", "f/in=2", "e=3", "-g", "-nothing"]);
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), ["d", "d/x=b1#1", "e=b3#1", "f", "f/in=b2#1"]);
    let kept = merged(Hidden::Keep, &[&a, &b]);
    assert_eq!(kept, ["!f", "-d/y", "-g", "-nothing", "d", "d/x=b1#1", "e=b3#1", "f/in=b2#1"]);
}

#[test]
fn an_opaque_directory_hides_what_is_below_and_keeps_its_own() {
    let a = layer("a", &["d", "d/old=1", "d/sub", "d/sub/old=2"]);
    let b = layer("b", &["!d", "d/sub", "d/sub/new=1"]);
    let c = layer("c", &["d", "d/more=1"]);
    let expected = ["d", "d/more=c1#1", "d/sub", "d/sub/new=b1#1"];
    assert_eq!(merged(Hidden::Drop, &[&a, &b, &c]), expected);
    assert_eq!(merged(Hidden::Keep, &[&a, &b, &c])[0], "!d");
    let root = layer("b", &["new=1"]);
    let mut root = root;
    let mut attributes = Attributes::default();
    overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
    let id = root.tree.root();
    root.tree.set_attributes(id, attributes);
    assert_eq!(merged(Hidden::Drop, &[&a, &root]), ["new=b1#1"]);
}

#[test]
fn hard_links_survive_and_reach_below() {
    let a = layer("a", &["d", "d/x=1", "d/y>d/x", "z=2"]);
    let b = layer("b", &["p=1", "q>p", "-d", "r*d/x", "s*z", "-z"]);
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), ["p=b1#2", "q=b1#2", "r=a1#1", "s=a2#1"]);
    let missing = layer("b", &["r*d/nothing"]);
    let error = merge(&[&a, &missing], Hidden::Drop, 1000).unwrap_err();
    assert_eq!(error, MergeError::LinkTargetMissing { target: "d/nothing".to_owned() });
}

#[test]
fn an_implied_directory_changes_nothing_but_what_is_in_it() {
    let a = layer("a", &["usr", "usr/lib", "lib@usr/lib", "up", "up/link@../usr", "f=1"]);
    let b = layer(
        "b",
        &["?lib", "lib/x=1", "?up", "?up/link", "up/link/y=2", "?gone", "-gone/z", "?new", "new/w=3"],
    );
    let expected = [
        "f=a1#1",
        "lib@usr/lib",
        "new",
        "new/w=b3#1",
        "up",
        "up/link@../usr",
        "usr",
        "usr/lib",
        "usr/lib/x=b1#1",
        "usr/y=b2#1",
    ];
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), expected);
    let bad = layer("b", &["?f", "f/x=1"]);
    assert!(matches!(merge(&[&a, &bad], Hidden::Drop, 1000), Err(MergeError::NotADirectory { .. })));
}

#[test]
fn symlinks_to_the_root_and_round_in_circles_end() {
    let a = layer("a", &["a@/"]);
    let b = layer("b", &["?a", "?a/a", "a/a/x=1"]);
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), ["a@/", "x=b1#1"]);
    let a = layer("a", &["d", "d/s@.."]);
    let b = layer("b", &["?d", "?d/s", "?d/s/d", "?d/s/d/s", "d/s/d/s/y=2"]);
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), ["d", "d/s@..", "y=b2#1"]);
}

#[test]
fn renamed_directories_are_filled_with_what_is_below() {
    let a = layer("a", &["old", "old/x=1", "old/y=2", "old/sub", "old/sub/z=3", "other", "other/w=4"]);
    let b = layer(
        "b",
        &[
            "-old",
            "p",
            "p/new</old",
            "p/new/x=1",
            "-p/new/y",
            "p/new/sub",
            "p/new/sub/more=2",
            "p/new/in</other",
            "-other",
        ],
    );
    let expected = [
        "p",
        "p/new",
        "p/new/in",
        "p/new/in/w=a4#1",
        "p/new/sub",
        "p/new/sub/more=b2#1",
        "p/new/sub/z=a3#1",
        "p/new/x=b1#1",
    ];
    assert_eq!(merged(Hidden::Drop, &[&a, &b]), expected);
    let resolved = resolve(&b, &a).unwrap();
    assert!(!redirect::has_redirects(&resolved.tree));
    assert_eq!(merged(Hidden::Drop, &[&a, &resolved]), expected);
    // By another name in the same directory, twice over, and through layers.
    let c = layer("c", &["p", "p/newer<new", "-p/new", "p/newer/sub2<sub", "-p/newer/sub"]);
    let all = merged(Hidden::Drop, &[&a, &b, &c]);
    assert!(
        all.contains(&"p/newer/sub2/z=a3#1".to_owned()) && all.contains(&"p/newer/in/w=a4#1".to_owned()),
        "{all:?}"
    );
    assert!(
        !all.iter().any(|path| path.starts_with("p/new/") || path.starts_with("p/newer/sub/")),
        "{all:?}"
    );
    assert!(matches!(resolve(&b, &c), Err(MergeError::RedirectMissing { .. })));
    assert!(matches!(merge(&[&a, &b], Hidden::Keep, 1000), Err(MergeError::RedirectMissing { .. })));
}

fn resolve(upper: &LayerTree, lower: &LayerTree) -> Result<LayerTree, MergeError> {
    redirect::resolve_redirects(upper, lower, 1000)
}

#[test]
fn copies_of_copies_end_at_the_limit() {
    let a = layer("a", &["d", "d/f=1"]);
    let b = layer("b", &["d", "d/x</d", "d/y</d"]);
    let mut all = vec![&a];
    all.extend([&b; 60]);
    assert_eq!(merge(&all, Hidden::Drop, 10_000).unwrap_err(), MergeError::TooManyFiles { max: 10_000 });
}

#[test]
fn other_forms_of_hiding_are_refused() {
    for (name, value) in [(overlay::METACOPY, b"".as_slice()), (overlay::OPAQUE, b"x")] {
        let mut bad = layer("a", &["d"]);
        let id = walk::entry(&bad.tree, b"d").unwrap();
        let mut attributes = Attributes::default();
        overlay::mark(&mut attributes, name, value);
        bad.tree.set_attributes(id, attributes);
        assert!(matches!(merge(&[&bad], Hidden::Drop, 10), Err(MergeError::Unsupported { .. })));
    }
}

/// Entries of random layers over few names, so that they meet.
fn random_layer() -> impl Strategy<Value = Vec<(u8, u8, u8)>> {
    proptest::collection::vec((0u8..4, 0u8..9, 0u8..40), 0..12)
}

fn build(name: &str, entries: &[(u8, u8, u8)]) -> LayerTree {
    let mut layer = layer(name, &[]);
    for (kind, place, block) in entries {
        let (parent, child) = (place / 3, place % 3);
        let root = layer.tree.root();
        let parent_name = format!("p{parent}");
        let below = layer.tree.lookup(root, parent_name.as_bytes());
        let in_directory = below.is_some_and(|id| walk::entries(&layer.tree, id).is_some());
        let path = if in_directory { format!("{parent_name}/c{child}") } else { parent_name };
        let mark = match kind {
            0 => format!("{path}={block}"),
            1 => format!("-{path}"),
            2 => format!("!{path}"),
            _ => path,
        };
        add(&mut layer.tree, &mark);
    }
    layer
}

proptest! {
    #[test]
    fn it_does_not_matter_in_what_groups_layers_are_merged(a in random_layer(), b in random_layer(), c in random_layer()) {
        let (a, b, c) = (build("a", &a), build("b", &b), build("c", &c));
        let all = merged(Hidden::Drop, &[&a, &b, &c]);
        let upper = merge(&[&b, &c], Hidden::Keep, 1000).unwrap();
        prop_assert_eq!(&merged(Hidden::Drop, &[&a, &upper]), &all);
        let lower = merge(&[&a, &b], Hidden::Drop, 1000).unwrap();
        prop_assert_eq!(&merged(Hidden::Drop, &[&lower, &c]), &all);
    }
}
