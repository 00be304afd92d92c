//! Renamed directories. Sandboxes mount with `redirect_dir=on`, so a directory renamed in one has, in its upper
//! directory, only what changed and the attribute `trusted.overlay.redirect`; the rest is below, at the old place.
//!
//! ```text
//! upper:  new (redirect=/old)      below:  old/a, old/b       resolved:  new (opaque): a, b, c
//!           c                                                            old: whiteout, which the kernel left
//!         old (whiteout)
//! ```
//!
//! A layer must not say where something is in another layer, which may come to lie elsewhere. So [`resolve_redirects`]
//! puts what is below into the directory and makes it opaque. Only metadata is copied: the files point into the blobs of
//! the layers below. A hard link between a renamed directory and another place becomes two files of the same content.

use std::collections::HashMap;

use crate::erofs::{Content, InodeId, LayerTree, Tree};
use crate::error::printable;
use crate::overlay;

use super::merge::MergeError;
use super::walk;

/// Whether any directory was renamed.
pub fn has_redirects(tree: &Tree) -> bool {
    tree.iter().any(|(_, inode)| overlay::get(&inode.attributes, overlay::REDIRECT).is_some())
}

/// What to say of a layer whose renamed directories cannot be resolved.
pub(super) fn unresolved(tree: &Tree) -> MergeError {
    let from = tree.iter().find_map(|(_, inode)| overlay::get(&inode.attributes, overlay::REDIRECT));
    MergeError::RedirectMissing { path: "a directory".to_owned(), from: printable(from.unwrap_or_default()) }
}

/// A layer like `upper` without renamed directories, for the merged layers `lower` that it was made on. `max_files`
/// bounds the inodes that are copied.
///
/// # Errors
/// [`MergeError`]: an old place is not in `lower`, or the layer would be too large.
pub fn resolve_redirects(
    upper: &LayerTree,
    lower: &LayerTree,
    max_files: u64,
) -> Result<LayerTree, MergeError> {
    let mut resolving = Resolving { out: upper.clone(), lower, devices: vec![0], left: max_files, max_files };
    for blob in &lower.blobs {
        let device = resolving.out.device(*blob).ok_or(MergeError::TooManyBlobs)?;
        resolving.devices.push(device);
    }
    let mut todo = vec![At { dir: upper.tree.root(), below: Some(lower.tree.root()), moved: false }];
    while let Some(at) = todo.pop() {
        resolving.directory(at, &mut todo)?;
    }
    Ok(resolving.out)
}

/// A directory of the layer.
struct At {
    dir: InodeId,
    /// The directory below that it goes on with.
    below: Option<InodeId>,
    /// Whether it, or one above it, is elsewhere below.
    moved: bool,
}

struct Resolving<'a> {
    out: LayerTree,
    lower: &'a LayerTree,
    devices: Vec<u16>,
    left: u64,
    max_files: u64,
}

impl Resolving<'_> {
    fn directory(&mut self, at: At, todo: &mut Vec<At>) -> Result<(), MergeError> {
        let names: Vec<_> = walk::entries(&self.out.tree, at.dir)
            .into_iter()
            .flatten()
            .map(|(name, id)| (name.clone(), *id))
            .collect();
        if at.moved
            && let Some(below) = at.below
        {
            let has = |name: &[u8]| names.binary_search_by(|(known, _)| known.as_ref().cmp(name)).is_ok();
            self.copy_entries(below, at.dir, &has)?;
        }
        for (name, id) in names {
            let Some(inode) =
                self.out.tree.get(id).filter(|inode| matches!(inode.content, Content::Directory(_)))
            else {
                // Below a copy nothing is left to hide.
                let hides = self.out.tree.get(id).is_some_and(|inode| overlay::is_whiteout(&inode.content));
                if at.moved && hides {
                    self.out.tree.remove(at.dir, &name);
                }
                continue;
            };
            let redirect = overlay::get(&inode.attributes, overlay::REDIRECT).map(<[u8]>::to_vec);
            let opaque = overlay::is_opaque(&inode.attributes);
            let below = match &redirect {
                Some(path) => Some(self.old_place(path, at.below, &name)?),
                None if opaque => None,
                None => self.below(at.below, &name),
            };
            if redirect.is_some() {
                let mut attributes = inode.attributes.clone();
                overlay::unmark(&mut attributes, |name| name == overlay::REDIRECT);
                overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
                self.out.tree.set_attributes(id, attributes);
            }
            todo.push(At { dir: id, below, moved: at.moved || redirect.is_some() });
        }
        Ok(())
    }

    /// A redirect is a path from the root, or another name in the same directory.
    fn old_place(&self, path: &[u8], below: Option<InodeId>, name: &[u8]) -> Result<InodeId, MergeError> {
        let found = match path.strip_prefix(b"/") {
            Some(path) => {
                let mut names = path.split(|byte| *byte == b'/');
                // overlayfs follows no symlinks here.
                names.try_fold(self.lower.tree.root(), |dir, name| self.below(Some(dir), name))
            }
            None => self.below(below, path),
        };
        found.ok_or_else(|| MergeError::RedirectMissing { path: printable(name), from: printable(path) })
    }

    fn below(&self, dir: Option<InodeId>, name: &[u8]) -> Option<InodeId> {
        let found = self.lower.tree.lookup(dir?, name)?;
        walk::entries(&self.lower.tree, found).map(|_| found)
    }

    /// Copies what is below in `from` into `to`, but for names that `to` has by itself.
    fn copy_entries(
        &mut self,
        from: InodeId,
        to: InodeId,
        has: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), MergeError> {
        let mut links = HashMap::new();
        let (top, mut todo) = (to, vec![(from, to)]);
        while let Some((from, to)) = todo.pop() {
            for (name, id) in walk::entries(&self.lower.tree, from).into_iter().flatten() {
                if to == top && has(name) {
                    continue;
                }
                if let Some(copied) = links.get(id) {
                    self.out.tree.hard_link(to, name, *copied);
                    continue;
                }
                let Some(inode) = self.lower.tree.get(*id) else { continue };
                self.left =
                    self.left.checked_sub(1).ok_or(MergeError::TooManyFiles { max: self.max_files })?;
                let mut content = match &inode.content {
                    Content::Directory(_) => Content::directory(),
                    content => content.clone(),
                };
                if let Content::File(data) = &mut content {
                    data.device = self.devices.get(usize::from(data.device)).copied().unwrap_or_default();
                }
                let is_directory = matches!(content, Content::Directory(_));
                let attributes = inode.attributes.clone();
                let new = self.out.tree.insert(to, name, attributes, content);
                if is_directory {
                    todo.push((*id, new));
                } else {
                    links.insert(*id, new);
                }
            }
        }
        Ok(())
    }
}
