//! The tree an image is made from: metadata in memory, content only by reference.

use std::collections::BTreeMap;

use super::data::FileData;
use super::format::FileType;
use super::xattr::Xattrs;

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
    Directory(BTreeMap<Box<[u8]>, InodeId>),
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

    /// What `name` stands for in directory `dir`.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Option<InodeId> {
        match &self.get(dir)?.content {
            Content::Directory(entries) => entries.get(name).copied(),
            _ => None,
        }
    }

    /// Puts a new inode at `name` in directory `dir`, in place of whatever is there.
    /// The caller has checked that `dir` is a directory and `name` is a valid file name.
    pub fn insert(&mut self, dir: InodeId, name: &[u8], attributes: Attributes, content: Content) -> InodeId {
        self.remove(dir, name);
        let inode = InodeId(self.inodes.len() as u32);
        self.inodes.push(Some(Inode { attributes, content, names: 1 }));
        if let Some(entries) = self.entries_mut(dir) {
            entries.insert(name.into(), inode);
        }
        inode
    }

    /// Gives `target`, which must not be a directory, one more name. A name that stands for
    /// `target` already stays as it is.
    pub fn hard_link(&mut self, dir: InodeId, name: &[u8], target: InodeId) {
        if self.lookup(dir, name) == Some(target) {
            return;
        }
        self.remove(dir, name);
        if let Some(inode) = self.get_mut(target) {
            inode.names += 1;
            if let Some(entries) = self.entries_mut(dir) {
                entries.insert(name.into(), target);
            }
        }
    }

    /// Removes `name` from `dir`, with all that is below it. Says whether there was anything.
    pub fn remove(&mut self, dir: InodeId, name: &[u8]) -> bool {
        let Some(inode) = self.entries_mut(dir).and_then(|entries| entries.remove(name)) else {
            return false;
        };
        // A stack and not recursion: a hostile archive can nest deeper than a thread's stack.
        let mut doomed = vec![inode];
        while let Some(id) = doomed.pop() {
            let Some(inode) = self.get_mut(id) else { continue };
            inode.names -= 1;
            if inode.names == 0
                && let Some(Inode { content: Content::Directory(entries), .. }) =
                    self.inodes[id.0 as usize].take()
            {
                doomed.extend(entries.into_values());
            }
        }
        true
    }

    /// All inodes that have a name, with their ids, in the order they were made.
    pub fn iter(&self) -> impl Iterator<Item = (InodeId, &Inode)> {
        self.inodes.iter().enumerate().filter_map(|(at, inode)| Some((InodeId(at as u32), inode.as_ref()?)))
    }

    /// Ids below this number exist or have existed.
    pub(crate) fn id_bound(&self) -> usize {
        self.inodes.len()
    }

    fn get_mut(&mut self, id: InodeId) -> Option<&mut Inode> {
        self.inodes.get_mut(id.0 as usize)?.as_mut()
    }

    fn entries_mut(&mut self, dir: InodeId) -> Option<&mut BTreeMap<Box<[u8]>, InodeId>> {
        match &mut self.get_mut(dir)?.content {
            Content::Directory(entries) => Some(entries),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_lives_as_long_as_its_last_name() {
        let mut tree = Tree::new();
        let root = tree.root();
        let id = tree.insert(root, b"a", Attributes::default(), Content::Fifo);
        tree.hard_link(root, b"b", id);
        tree.hard_link(root, b"b", id);
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
            at = tree.insert(at, b"d", Attributes::default(), Content::directory());
        }
        let root = tree.root();
        tree.remove(root, b"d");
        assert_eq!(tree.iter().count(), 1);
    }
}
