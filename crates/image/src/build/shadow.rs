//! What shows of a layer among others.

use crate::erofs::{Attributes, Content, InodeId, LayerTree, Tree};
use crate::error::printable;
use crate::overlay;

use super::walk;

/// Paths that are named.
const PATHS_MAX: usize = 10;

/// What of a layer does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shadowed {
    /// Files, removals, and directories that hide what is below them.
    pub files: u64,
    /// Sum of the sizes of the files.
    pub bytes: u64,
    /// The first paths.
    pub paths: Vec<String>,
}

/// What of `layer` does not show when `above`, layers that have been merged, lie over it: where both have a file, the upper
/// one is seen, and where the layer says that something is removed, it is there again.
pub fn shadowed(layer: &LayerTree, above: &LayerTree) -> Shadowed {
    let mut found = Shadowed::default();
    let mut todo = vec![(layer.tree.root(), above.tree.root(), Vec::new())];
    while let Some((dir, over, path)) = todo.pop() {
        for (name, id) in walk::entries(&layer.tree, dir).into_iter().flatten() {
            let Some(upper) = above.tree.lookup(over, name) else { continue };
            let full = [path.as_slice(), b"/", name].concat();
            let both = is_directory(&layer.tree, *id) && is_directory(&above.tree, upper);
            let Some(inode) = layer.tree.get(*id) else { continue };
            if !both || overlay::is_opaque(&inode.attributes) {
                found.files += 1;
                if let Content::File(data) = &inode.content {
                    found.bytes = found.bytes.saturating_add(data.size());
                }
                if found.paths.len() < PATHS_MAX {
                    found.paths.push(printable(&full));
                }
            }
            if both {
                todo.push((*id, upper, full));
            }
        }
    }
    found
}

/// Says of each directory of a layer that has whiteouts that it has, and of no other. Overlayfs looks for them where it merges
/// directories; one that no other layer has it would list as it is, with the names of what was removed in it. A directory that was
/// copied up, which it takes one with this attribute for, is looked through all the same.
/// Source: `ovl_get_inode` in `fs/overlayfs/inode.c`, Linux 4.14 to 6.18.
pub fn mark_whiteouts(layer: &mut LayerTree) {
    let has_whiteouts = |content: &Content| match content {
        Content::Directory(entries) => entries
            .values()
            .any(|id| layer.tree.get(*id).is_some_and(|inode| overlay::is_whiteout(&inode.content))),
        _ => false,
    };
    let changed: Vec<(InodeId, Attributes)> = layer
        .tree
        .iter()
        .filter_map(|(id, inode)| {
            let marked = overlay::get(&inode.attributes, overlay::ORIGIN).is_some();
            let mut attributes = inode.attributes.clone();
            match (has_whiteouts(&inode.content), marked) {
                (true, false) => overlay::mark(&mut attributes, overlay::ORIGIN, b""),
                (false, true) => overlay::unmark(&mut attributes, |name| name == overlay::ORIGIN),
                _ => return None,
            }
            Some((id, attributes))
        })
        .collect();
    for (id, attributes) in changed {
        layer.tree.set_attributes(id, attributes);
    }
}

fn is_directory(tree: &Tree, id: InodeId) -> bool {
    walk::entries(tree, id).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::erofs::{Attributes, FileData};

    fn layer(opaque: bool, entries: &[(&str, Content)]) -> LayerTree {
        let mut layer = LayerTree::default();
        let mut attributes = Attributes::default();
        if opaque {
            overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
        }
        let root = layer.tree.root();
        let dir = layer.tree.insert(root, b"opt", attributes, Content::directory());
        for (name, content) in entries {
            let attributes = Attributes::default();
            layer.tree.insert(dir, name.as_bytes(), attributes, content.clone());
        }
        layer
    }

    #[test]
    fn directories_with_whiteouts_are_marked_for_as_long_as_they_have_some() {
        let mut layer = layer(false, &[("gone", overlay::whiteout().1)]);
        let opt = layer.tree.lookup(layer.tree.root(), b"opt").unwrap();
        let marks = |layer: &LayerTree| {
            let of = |(id, inode): (InodeId, &crate::erofs::Inode)| {
                overlay::get(&inode.attributes, overlay::ORIGIN).map(|_| id)
            };
            layer.tree.iter().filter_map(of).collect::<Vec<_>>()
        };
        mark_whiteouts(&mut layer);
        assert_eq!(marks(&layer), [opt]);
        layer.tree.remove(opt, b"gone");
        mark_whiteouts(&mut layer);
        assert_eq!(marks(&layer), []);
    }

    #[test]
    fn what_both_have_does_not_show_and_what_one_has_does() {
        let file = || Content::File(FileData::dense(5, 0, 1));
        let above = layer(false, &[("tool", file()), ("gone", file())]);
        let below = layer(false, &[("tool", file()), ("gone", overlay::whiteout().1), ("own", file())]);
        let found = shadowed(&below, &above);
        assert_eq!((found.files, found.bytes), (2, 5));
        assert_eq!(found.paths, ["/opt/gone", "/opt/tool"]);
        assert_eq!(shadowed(&layer(true, &[]), &above).paths, ["/opt"]);
        assert_eq!(shadowed(&below, &LayerTree::default()), Shadowed::default());
    }
}
