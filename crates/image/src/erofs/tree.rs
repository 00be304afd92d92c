//! The tree an image is made from: metadata in memory, content only by reference.

use std::collections::BTreeMap;

use super::data::FileData;
use super::format::FileType;
use super::xattr::Xattrs;

/// The layer of a tree that is not built from layers.
pub const WHOLE_TREE_LAYER: u32 = 0;

/// An inode of one [`Tree`]. Ids are never used again, so a stale one finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeId(pub(crate) u32);

/// A point in time: seconds since 1970 (may be negative) and nanoseconds from there forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Seconds since 1970-01-01 UTC.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// What `chmod`, `chown`, `touch` and `setfattr` set.
#[derive(Debug, Clone, Default)]
pub struct Attributes {
    /// Permission bits, with set-id and sticky bits: 0 to 0o7777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of last change of content.
    pub mtime: Timestamp,
    /// Extended attributes; boxed, since few inodes have any.
    pub xattrs: Option<Box<Xattrs>>,
}

/// What an inode is.
#[derive(Debug, Clone)]
pub enum Content {
    /// A directory, its entries in byte order of their names, without `.` and `..`.
    Directory(BTreeMap<Box<[u8]>, Dirent>),
    /// A regular file.
    File(FileData),
    /// A symlink, with its target of 1 to 4,095 bytes.
    Symlink(Box<[u8]>),
    /// A character device: 12 bits of major, 20 bits of minor number.
    CharDevice(u32, u32),
    /// A block device, numbered alike.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
}

impl Content {
    /// An empty directory.
    pub fn directory() -> Self {
        Self::Directory(BTreeMap::new())
    }

    pub(crate) fn file_type(&self) -> FileType {
        match self {
            Self::Directory(_) => FileType::Directory,
            Self::File(_) => FileType::Regular,
            Self::Symlink(_) => FileType::Symlink,
            Self::CharDevice(..) => FileType::CharDevice,
            Self::BlockDevice(..) => FileType::BlockDevice,
            Self::Fifo => FileType::Fifo,
            Self::Socket => FileType::Socket,
        }
    }
}

/// A name's target in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirent {
    /// What the name stands for.
    pub inode: InodeId,
    /// The last layer that named this entry or something below it. A whiteout hides what older
    /// layers left and keeps what its own layer brought, in whatever order the two come.
    pub layer: u32,
}

/// One inode.
#[derive(Debug, Clone)]
pub struct Inode {
    /// Its attributes.
    pub attributes: Attributes,
    /// What it is.
    pub content: Content,
    /// How many names it has. Of a directory: one; the image counts `.` and `..` by itself.
    pub(crate) names: u32,
}

/// A directory tree. Whatever is done to it, every inode but the root has at least one name.
#[derive(Debug, Clone)]
pub struct Tree {
    inodes: Vec<Option<Inode>>,
}

impl Default for Tree {
    fn default() -> Self {
        Self::new()
    }
}

impl Tree {
    /// A tree of a root directory (0755, root, 1970).
    pub fn new() -> Self {
        let attributes = Attributes { mode: 0o755, ..Attributes::default() };
        Self { inodes: vec![Some(Inode { attributes, content: Content::directory(), names: 1 })] }
    }

    /// A tree of inodes with their ids as positions; the first is the root. The number beside each is not used.
    pub(crate) fn from_inodes<T>(inodes: Vec<(Inode, T)>) -> Self {
        Self { inodes: inodes.into_iter().map(|(inode, _)| Some(inode)).collect() }
    }

    /// The root directory.
    pub fn root(&self) -> InodeId {
        InodeId(0)
    }

    /// An inode, unless it has gone.
    pub fn get(&self, id: InodeId) -> Option<&Inode> {
        self.inodes.get(id.0 as usize)?.as_ref()
    }

    /// Changes an inode's attributes; nothing happens if it has gone.
    pub fn set_attributes(&mut self, id: InodeId, attributes: Attributes) {
        if let Some(inode) = self.get_mut(id) {
            inode.attributes = attributes;
        }
    }

    /// The entry `name` of directory `dir`.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Option<Dirent> {
        match &self.get(dir)?.content {
            Content::Directory(entries) => entries.get(name).copied(),
            _ => None,
        }
    }

    /// Puts a new inode at `name` in directory `dir`, in place of whatever is there.
    /// The caller has checked that `dir` is a directory and `name` is a valid file name.
    pub fn insert(
        &mut self,
        dir: InodeId,
        name: &[u8],
        layer: u32,
        attributes: Attributes,
        content: Content,
    ) -> InodeId {
        self.remove(dir, name);
        let inode = InodeId(self.inodes.len() as u32);
        self.inodes.push(Some(Inode { attributes, content, names: 1 }));
        if let Some(entries) = self.entries_mut(dir) {
            entries.insert(name.into(), Dirent { inode, layer });
        }
        inode
    }

    /// Gives `target`, which must not be a directory, one more name. A name that stands for
    /// `target` already stays as it is.
    pub fn hard_link(&mut self, dir: InodeId, name: &[u8], layer: u32, target: InodeId) {
        if self.lookup(dir, name).is_some_and(|old| old.inode == target) {
            self.touch(dir, name, layer);
            return;
        }
        self.remove(dir, name);
        if let Some(inode) = self.get_mut(target) {
            inode.names += 1;
            if let Some(entries) = self.entries_mut(dir) {
                entries.insert(name.into(), Dirent { inode: target, layer });
            }
        }
    }

    /// Marks an entry as named by `layer`.
    pub fn touch(&mut self, dir: InodeId, name: &[u8], layer: u32) {
        if let Some(entry) = self.entries_mut(dir).and_then(|entries| entries.get_mut(name)) {
            entry.layer = layer;
        }
    }

    /// Removes `name` from `dir`, with all that is below it. Says whether there was anything.
    pub fn remove(&mut self, dir: InodeId, name: &[u8]) -> bool {
        let Some(entry) = self.entries_mut(dir).and_then(|entries| entries.remove(name)) else {
            return false;
        };
        // A stack and not recursion: a hostile archive can nest deeper than a thread's stack.
        let mut doomed = vec![entry.inode];
        while let Some(id) = doomed.pop() {
            let Some(inode) = self.get_mut(id) else { continue };
            inode.names -= 1;
            if inode.names == 0
                && let Some(Inode { content: Content::Directory(entries), .. }) =
                    self.inodes[id.0 as usize].take()
            {
                doomed.extend(entries.into_values().map(|below| below.inode));
            }
        }
        true
    }

    /// Hides what layers before `layer` left at `name` in `dir`: an OCI whiteout.
    pub fn hide(&mut self, dir: InodeId, name: &[u8], layer: u32) {
        match self.lookup(dir, name) {
            Some(entry) if entry.layer == layer => self.hide_children(entry.inode, layer),
            Some(_) => {
                self.remove(dir, name);
            }
            None => {}
        }
    }

    /// Hides what layers before `layer` left in `dir`: an OCI opaque whiteout.
    pub fn hide_children(&mut self, dir: InodeId, layer: u32) {
        let mut pending = vec![dir];
        while let Some(dir) = pending.pop() {
            let Some(Inode { content: Content::Directory(entries), .. }) = self.get(dir) else { continue };
            let mut old = Vec::new();
            for (name, entry) in entries {
                if entry.layer == layer {
                    pending.push(entry.inode);
                } else {
                    old.push(name.clone());
                }
            }
            for name in old {
                self.remove(dir, &name);
            }
        }
    }

    /// All inodes that have a name, with their ids, in the order they were made.
    pub fn iter(&self) -> impl Iterator<Item = (InodeId, &Inode)> {
        self.inodes.iter().enumerate().filter_map(|(at, inode)| Some((InodeId(at as u32), inode.as_ref()?)))
    }

    /// Ids below this number exist or have existed.
    pub(crate) fn id_bound(&self) -> usize {
        self.inodes.len()
    }

    pub(crate) fn file_data_mut(&mut self, id: InodeId) -> Option<&mut FileData> {
        match &mut self.get_mut(id)?.content {
            Content::File(data) => Some(data),
            _ => None,
        }
    }

    fn get_mut(&mut self, id: InodeId) -> Option<&mut Inode> {
        self.inodes.get_mut(id.0 as usize)?.as_mut()
    }

    fn entries_mut(&mut self, dir: InodeId) -> Option<&mut BTreeMap<Box<[u8]>, Dirent>> {
        match &mut self.get_mut(dir)?.content {
            Content::Directory(entries) => Some(entries),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(tree: &mut Tree, parent: InodeId, name: &str, layer: u32) -> InodeId {
        tree.insert(parent, name.as_bytes(), layer, Attributes::default(), Content::directory())
    }

    fn fifo(tree: &mut Tree, parent: InodeId, name: &str, layer: u32) -> InodeId {
        tree.insert(parent, name.as_bytes(), layer, Attributes::default(), Content::Fifo)
    }

    #[test]
    fn an_inode_lives_as_long_as_its_last_name() {
        let mut tree = Tree::new();
        let root = tree.root();
        let id = fifo(&mut tree, root, "a", 0);
        tree.hard_link(root, b"b", 0, id);
        tree.hard_link(root, b"b", 0, id);
        assert_eq!(tree.get(id).unwrap().names, 2);
        assert!(tree.remove(root, b"a"));
        assert!(!tree.remove(root, b"a"));
        assert!(tree.get(id).is_some());
        tree.remove(root, b"b");
        assert!(tree.get(id).is_none());
    }

    #[test]
    fn removing_a_very_deep_tree_needs_no_stack() {
        let mut tree = Tree::new();
        let mut at = tree.root();
        for _ in 0..300_000 {
            at = dir(&mut tree, at, "d", 0);
        }
        let root = tree.root();
        tree.remove(root, b"d");
        assert_eq!(tree.iter().count(), 1);
    }

    #[test]
    fn a_whiteout_hides_older_layers_and_keeps_its_own() {
        let mut tree = Tree::new();
        let root = tree.root();
        let d = dir(&mut tree, root, "d", 0);
        fifo(&mut tree, d, "old", 0);
        let sub = dir(&mut tree, d, "sub", 0);
        fifo(&mut tree, sub, "old", 0);
        // Layer 1 adds d/sub/new before it says that d is opaque.
        tree.touch(root, b"d", 1);
        tree.touch(d, b"sub", 1);
        let new = fifo(&mut tree, sub, "new", 1);
        tree.hide(root, b"d", 1);
        assert_eq!(tree.lookup(d, b"old"), None);
        assert_eq!(tree.lookup(sub, b"old"), None);
        assert_eq!(tree.lookup(sub, b"new").unwrap().inode, new);
        tree.hide(root, b"d", 2);
        assert_eq!(tree.lookup(root, b"d"), None);
    }
}
