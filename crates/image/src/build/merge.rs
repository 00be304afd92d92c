//! One layer of several that lie on each other. Only metadata is touched: the merged layer points into the blobs of all.
//!
//! ```text
//! lowest ──► tree ◄── entries of the next layer, directory by directory
//!                      whiteout: removes · directory over directory: goes into it · anything else: takes its place
//! ```

use std::collections::{HashMap, HashSet};

use crate::erofs::{Attributes, BLOBS_MAX, Content, InodeId, LayerTree, Tree};
use crate::error::printable;
use crate::overlay;

use super::redirect;
use super::walk;

/// What becomes of what layers say they hide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden {
    /// There is nothing below these layers: whiteouts and marks go once they have been followed.
    Drop,
    /// There are layers below: whiteouts stay, and directories are opaque where they must be.
    Keep,
}

/// Why layers cannot be merged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// They point into too many blobs.
    #[error("together the layers have more than {BLOBS_MAX} blobs; merge fewer")]
    TooManyBlobs,
    /// The merged layer would be too large.
    #[error("together the layers have more than {max} files; merge fewer or raise the limit")]
    TooManyFiles {
        /// The limit.
        max: u64,
    },
    /// An attribute of overlayfs that asks for what our sandboxes never make.
    #[error(
        "`{path}` has the attribute `{attribute}`, which no sandbox sets; make the layer again without it"
    )]
    Unsupported {
        /// Where.
        path: String,
        /// Which.
        attribute: String,
    },
    /// A renamed directory whose old place is not in the layers below.
    #[error(
        "`{path}` is a directory renamed from `{from}`, which is not below; merge with all layers it was made on"
    )]
    RedirectMissing {
        /// Where.
        path: String,
        /// The old place.
        from: String,
    },
    /// A hard link to nothing.
    #[error(
        "a file is a hard link to `{target}`, which no layer below has; merge with all layers it was made on"
    )]
    LinkTargetMissing {
        /// The target.
        target: String,
    },
    /// An entry's parent is a file.
    #[error("`{path}` must be a directory for what an upper layer has in it, and is none")]
    NotADirectory {
        /// The parent.
        path: String,
    },
}

/// Merges layers, the lowest first. Renamed directories are resolved on the way. `max_files` bounds the inodes of the
/// result.
///
/// # Errors
/// [`MergeError`]
pub fn merge(layers: &[&LayerTree], hidden: Hidden, max_files: u64) -> Result<LayerTree, MergeError> {
    let mut merge = Merge { out: LayerTree::default(), hidden, max_files, made: 0 };
    for layer in layers {
        if redirect::has_redirects(&layer.tree) {
            if hidden == Hidden::Keep {
                return Err(redirect::unresolved(&layer.tree));
            }
            merge.layer(&redirect::resolve_redirects(layer, &merge.out, max_files)?)?;
        } else {
            merge.layer(layer)?;
        }
    }
    if hidden == Hidden::Drop {
        let root = merge.out.tree.root();
        merge.settle(root);
    }
    Ok(merge.out)
}

struct Merge {
    out: LayerTree,
    hidden: Hidden,
    max_files: u64,
    made: u64,
}

/// A layer while it is merged.
struct Upper<'a> {
    tree: &'a Tree,
    /// For each number of a blob in the layer that in the result.
    devices: Vec<u16>,
    /// Where its inodes went.
    moved: HashMap<InodeId, InodeId>,
    /// Implied directories with nothing in them that could be put anywhere.
    hollow: HashSet<InodeId>,
    /// The parents of directories in the result, of those that have been gone into.
    parents: HashMap<InodeId, InodeId>,
}

impl Merge {
    fn layer(&mut self, layer: &LayerTree) -> Result<(), MergeError> {
        let mut devices = vec![0];
        for blob in &layer.blobs {
            devices.push(self.out.device(*blob).ok_or(MergeError::TooManyBlobs)?);
        }
        let tree = &layer.tree;
        let mut upper =
            Upper { tree, devices, moved: HashMap::new(), hollow: hollow(tree), parents: HashMap::new() };
        let pinned = self.pin_links(&mut upper)?;
        let (from, to) = (tree.root(), self.out.tree.root());
        if let Some(inode) = tree.get(from) {
            if overlay::is_opaque(&inode.attributes) {
                self.clear(to);
            }
            if overlay::get(&inode.attributes, overlay::IMPLIED).is_none() {
                self.out.tree.set_attributes(to, inode.attributes.clone());
            }
        }
        let mut todo = vec![(from, to)];
        while let Some((from, to)) = todo.pop() {
            let Some(Content::Directory(entries)) = tree.get(from).map(|inode| &inode.content) else {
                continue;
            };
            for (name, id) in entries {
                if let Some(below) = self.entry(&mut upper, to, name, *id)? {
                    // A symlink may lead to the root, which has none.
                    if below != self.out.tree.root() {
                        upper.parents.entry(below).or_insert(to);
                    }
                    todo.push((*id, below));
                }
            }
        }
        for name in pinned {
            let root = self.out.tree.root();
            self.out.tree.remove(root, &name);
        }
        Ok(())
    }

    /// Puts one entry into the directory `to`. Gives the directory that its own entries go into.
    fn entry(
        &mut self,
        upper: &mut Upper<'_>,
        to: InodeId,
        name: &[u8],
        id: InodeId,
    ) -> Result<Option<InodeId>, MergeError> {
        let Some(inode) = upper.tree.get(id) else { return Ok(None) };
        for (attribute, _) in inode.attributes.xattrs.iter().flat_map(|xattrs| xattrs.iter()) {
            let other = attribute == overlay::METACOPY
                || (attribute == overlay::OPAQUE && !overlay::is_opaque(&inode.attributes));
            if other {
                return Err(MergeError::Unsupported {
                    path: printable(name),
                    attribute: printable(&attribute),
                });
            }
        }
        let old = self.out.tree.lookup(to, name);
        match &inode.content {
            Content::Directory(_) => return self.directory(upper, to, name, id, &inode.attributes),
            content if overlay::is_whiteout(content) && self.hidden == Hidden::Drop => {
                self.out.tree.remove(to, name);
            }
            content => {
                let linked = upper.moved.get(&id).filter(|moved| self.out.tree.get(**moved).is_some());
                if let Some(linked) = linked.copied() {
                    // A link that takes the place of the last name of what it links to.
                    if old != Some(linked) {
                        self.out.tree.hard_link(to, name, linked);
                    }
                    return Ok(None);
                }
                let content = upper.content(content);
                let new = self.insert(to, name, inode.attributes.clone(), content)?;
                upper.moved.insert(id, new);
            }
        }
        Ok(None)
    }

    fn directory(
        &mut self,
        upper: &mut Upper<'_>,
        to: InodeId,
        name: &[u8],
        id: InodeId,
        attributes: &Attributes,
    ) -> Result<Option<InodeId>, MergeError> {
        let old = self.out.tree.lookup(to, name);
        let opaque = overlay::is_opaque(attributes);
        let implied = overlay::get(attributes, overlay::IMPLIED).is_some();
        if implied {
            let hollow = upper.hollow.contains(&id);
            match old.and_then(|old| self.out.tree.get(old)).map(|inode| &inode.content) {
                Some(Content::Directory(_)) => {
                    if let Some(old) = old.filter(|_| opaque) {
                        self.clear(old);
                        self.keep_opaque(old);
                    }
                    return Ok(old);
                }
                None if hollow && self.hidden == Hidden::Drop => return Ok(None),
                Some(content) if opaque || overlay::is_whiteout(content) => {}
                None => {}
                Some(Content::Symlink(_)) => return self.through_symlink(upper, to, name, hollow),
                Some(_) if hollow => return Ok(None),
                Some(_) => return Err(MergeError::NotADirectory { path: printable(name) }),
            }
        }
        let mut attributes = attributes.clone();
        match old.map(|old| (old, self.out.tree.get(old))) {
            Some((old, Some(inode))) if matches!(inode.content, Content::Directory(_)) => {
                if opaque {
                    self.clear(old);
                } else if overlay::is_opaque(&inode.attributes) {
                    overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
                }
                self.out.tree.set_attributes(old, attributes);
                Ok(Some(old))
            }
            found => {
                // What was here hid what is below these layers.
                if found.is_some() && self.hidden == Hidden::Keep {
                    overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
                }
                self.insert(to, name, attributes, Content::directory()).map(Some)
            }
        }
    }

    /// Says that a directory hides what is below these layers.
    fn keep_opaque(&mut self, dir: InodeId) {
        if let (Hidden::Keep, Some(inode)) = (self.hidden, self.out.tree.get(dir)) {
            let mut attributes = inode.attributes.clone();
            overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
            self.out.tree.set_attributes(dir, attributes);
        }
    }

    /// Where the entries of an implied directory go when there is a symlink in its place.
    fn through_symlink(
        &self,
        upper: &mut Upper<'_>,
        to: InodeId,
        name: &[u8],
        hollow: bool,
    ) -> Result<Option<InodeId>, MergeError> {
        match walk::directory(&self.out.tree, upper.above(to), name) {
            Some(found) => {
                upper.parents.extend(found.windows(2).map(|pair| (pair[1], pair[0])));
                Ok(found.last().copied())
            }
            None if hollow => Ok(None),
            None => Err(MergeError::NotADirectory { path: printable(name) }),
        }
    }

    /// Finds what hard links to files of layers below stand for, and gives it a name that no layer can take away. Gives
    /// the names.
    fn pin_links(&mut self, upper: &mut Upper<'_>) -> Result<Vec<Vec<u8>>, MergeError> {
        let mut pinned = Vec::new();
        for (id, inode) in upper.tree.iter() {
            let Some(target) = overlay::get(&inode.attributes, overlay::LINK) else { continue };
            let found = walk::entry(&self.out.tree, target)
                .filter(|found| walk::entries(&self.out.tree, *found).is_none())
                .filter(|found| {
                    self.out.tree.get(*found).is_some_and(|old| !overlay::is_whiteout(&old.content))
                });
            let Some(found) = found else {
                if self.hidden == Hidden::Keep {
                    continue;
                }
                return Err(MergeError::LinkTargetMissing { target: printable(target) });
            };
            // A slash is in no name of a layer.
            let name = format!("/{}", pinned.len()).into_bytes();
            let root = self.out.tree.root();
            self.out.tree.hard_link(root, &name, found);
            upper.moved.insert(id, found);
            pinned.push(name);
        }
        Ok(pinned)
    }

    fn insert(
        &mut self,
        dir: InodeId,
        name: &[u8],
        attributes: Attributes,
        content: Content,
    ) -> Result<InodeId, MergeError> {
        self.made += 1;
        if self.made > self.max_files {
            return Err(MergeError::TooManyFiles { max: self.max_files });
        }
        Ok(self.out.tree.insert(dir, name, attributes, content))
    }

    fn clear(&mut self, dir: InodeId) {
        let names: Vec<_> = match self.out.tree.get(dir).map(|inode| &inode.content) {
            // Pinned names are not part of any layer.
            Some(Content::Directory(entries)) => {
                entries.keys().filter(|name| !name.contains(&b'/')).cloned().collect()
            }
            _ => Vec::new(),
        };
        for name in names {
            self.out.tree.remove(dir, &name);
        }
    }

    /// Takes the marks off what is left when there is nothing below.
    fn settle(&mut self, root: InodeId) {
        let marked = |attributes: &Attributes| {
            [overlay::OPAQUE, overlay::IMPLIED].iter().any(|mark| overlay::get(attributes, mark).is_some())
        };
        let ids: Vec<_> =
            self.out.tree.iter().filter(|(_, inode)| marked(&inode.attributes)).map(|(id, _)| id).collect();
        for id in ids.into_iter().chain([root]) {
            if let Some(inode) = self.out.tree.get(id) {
                let mut attributes = inode.attributes.clone();
                overlay::unmark(&mut attributes, |name| name == overlay::OPAQUE || name == overlay::IMPLIED);
                self.out.tree.set_attributes(id, attributes);
            }
        }
    }
}

impl Upper<'_> {
    /// All directories from the root to `dir` in the result.
    fn above(&self, dir: InodeId) -> Vec<InodeId> {
        let mut above = vec![dir];
        while let Some(parent) = above.last().and_then(|last| self.parents.get(last)) {
            above.push(*parent);
        }
        above.reverse();
        above
    }

    fn content(&self, content: &Content) -> Content {
        let mut content = content.clone();
        if let Content::File(data) = &mut content {
            data.device = self.devices.get(usize::from(data.device)).copied().unwrap_or_default();
        }
        content
    }
}

/// Implied directories that hold nothing but whiteouts and each other.
fn hollow(tree: &Tree) -> HashSet<InodeId> {
    // Children come after their parents here, so backwards every child is known before its parent.
    let mut order = vec![tree.root()];
    let mut at = 0;
    while let Some(id) = order.get(at) {
        if let Some(Content::Directory(entries)) = tree.get(*id).map(|inode| &inode.content) {
            order.extend(entries.values());
        }
        at += 1;
    }
    let mut hollow = HashSet::new();
    for id in order.into_iter().rev() {
        let Some(inode) = tree.get(id) else { continue };
        let Content::Directory(entries) = &inode.content else { continue };
        let empty = |id: InodeId| {
            hollow.contains(&id) || tree.get(id).is_some_and(|inode| overlay::is_whiteout(&inode.content))
        };
        if overlay::get(&inode.attributes, overlay::IMPLIED).is_some()
            && entries.values().all(|id| empty(*id))
        {
            hollow.insert(id);
        }
    }
    hollow
}

#[cfg(test)]
#[path = "merge/tests.rs"]
mod tests;
