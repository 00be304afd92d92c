//! Paths inside a tree, followed as `chroot` would.

use std::collections::{BTreeMap, VecDeque};

use crate::erofs::{Content, InodeId, Tree};

/// Linux's `MAXSYMLINKS`.
const SYMLINKS_MAX: usize = 40;

/// The entries of `id`, if it is a directory.
pub(super) fn entries(tree: &Tree, id: InodeId) -> Option<&BTreeMap<Box<[u8]>, InodeId>> {
    match &tree.get(id)?.content {
        Content::Directory(entries) => Some(entries),
        _ => None,
    }
}

/// The directory that `path` leads to, symlinks followed, with all directories above it from the root on. `above` is
/// where the path begins, likewise.
pub(super) fn directory(tree: &Tree, above: Vec<InodeId>, path: &[u8]) -> Option<Vec<InodeId>> {
    let mut stack = above;
    let mut todo: VecDeque<Box<[u8]>> = path.split(|byte| *byte == b'/').map(Box::from).collect();
    let mut symlinks = 0;
    while let Some(name) = todo.pop_front() {
        match name.as_ref() {
            b"" | b"." => continue,
            b".." => {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            _ => {}
        }
        let found = tree.lookup(*stack.last()?, &name)?;
        match &tree.get(found)?.content {
            Content::Directory(_) => stack.push(found),
            Content::Symlink(target) => {
                symlinks += 1;
                if symlinks > SYMLINKS_MAX {
                    return None;
                }
                if target.first() == Some(&b'/') {
                    stack.truncate(1);
                }
                for name in target.split(|byte| *byte == b'/').rev() {
                    todo.push_front(name.into());
                }
            }
            _ => return None,
        }
    }
    Some(stack)
}

/// What `path` names; symlinks are followed but for one at its end.
pub(super) fn entry(tree: &Tree, path: &[u8]) -> Option<InodeId> {
    let (parents, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"".as_slice(), path),
    };
    let dir = directory(tree, vec![tree.root()], parents)?;
    tree.lookup(*dir.last()?, name)
}
