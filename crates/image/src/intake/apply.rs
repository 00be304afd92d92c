//! Applies the entries of an archive to the tree.
//!
//! Paths are resolved inside the image, with its own symlinks and its own root, as `chroot` would:
//! real images need `/lib -> usr/lib` to be followed. Since the tree is all there is, nothing
//! outside it can be named.

use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;

use crate::ImportLimits;
use crate::erofs::{
    AppendError, Attributes, Content, ContentStore, InodeId, Segment, Tree, XattrError, Xattrs,
};
use crate::error::{EntryProblem, printable};
use crate::overlay;

use super::stream::{Budget, Stream};
use super::tar::{Entry, Kind, TarError, TarReader, read_problem};

/// Linux's `MAXSYMLINKS`.
const SYMLINKS_MAX: usize = 40;
/// Longest path of an entry in bytes.
const PATH_MAX: usize = 4096;
/// Longest symlink target: `PATH_MAX` of Linux with its NUL.
const TARGET_MAX: usize = 4095;
/// Longest file name.
const NAME_MAX: usize = 255;

/// Whiteouts. Source: the OCI image specification, `layer.md`.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Builds up the tree of one layer.
pub(crate) struct Applier<'a> {
    pub(crate) tree: Tree,
    pub(crate) data: &'a mut dyn ContentStore,
    /// The file behind `data`, for errors.
    pub(crate) data_path: &'a Path,
    pub(crate) limits: ImportLimits,
    pub(crate) budget: Budget,
    /// Told how many entries there were, after some content and at least every so many entries.
    pub(crate) tick: &'a mut dyn FnMut(u64),
    pub(crate) files: u64,
    pub(crate) metadata_bytes: u64,
    pub(crate) whiteouts: Whiteouts,
}

/// What `.wh.` names are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whiteouts {
    /// Names like any other: in a plain root file system.
    None,
    /// They are kept, in overlayfs's form: the tree is one layer, and what is below it not known. Parents that the
    /// archive does not have, and hard links to what it does not have, are marked for the merge; see [`overlay`].
    Keep,
}

impl Applier<'_> {
    /// Applies all entries of one archive.
    pub(crate) fn apply(&mut self, stream: &mut dyn Stream) -> Result<(), TarError> {
        let mut reader = TarReader::new(stream);
        while let Some(entry) = reader.next_entry()? {
            let applied = self.entry(entry, &mut reader.content());
            applied.map_err(|problem| reader.error(problem))?;
            if self.files.is_multiple_of(1024) {
                (self.tick)(self.files);
            }
        }
        Ok(())
    }

    fn entry(&mut self, entry: Entry, content: &mut dyn Read) -> Result<(), EntryProblem> {
        self.count(0)?;
        let path = components(&entry.path)?;
        self.count_metadata(&entry, &path)?;
        let Some((name, parents)) = path.split_last() else {
            return self.root(entry);
        };
        if self.whiteouts == Whiteouts::Keep && name.starts_with(WHITEOUT) {
            return self.whiteout(name, parents);
        }
        let attributes = attributes(&entry)?;
        match entry.kind {
            Kind::Directory => return self.directory(parents, name, attributes),
            Kind::HardLink(target) => return self.hard_link(parents, name, &target),
            _ => {}
        }
        let made = self.content(entry.kind, content)?;
        let dir = self.resolve(parents, true)?.ok_or(EntryProblem::SymlinkLoop)?;
        self.tree.insert(dir, name, attributes, made);
        Ok(())
    }

    fn content(&mut self, kind: Kind, source: &mut dyn Read) -> Result<Content, EntryProblem> {
        let (size, segments) = match kind {
            Kind::File { size } => (size, None),
            Kind::Sparse { size, segments } => (size, Some(segments)),
            Kind::Symlink(target) => return symlink(target),
            Kind::CharDevice(major, minor) => return Ok(Content::CharDevice(major, minor)),
            Kind::BlockDevice(major, minor) => return Ok(Content::BlockDevice(major, minor)),
            Kind::Fifo => return Ok(Content::Fifo),
            // Both were handled before; a directory has no content either way.
            Kind::Directory | Kind::HardLink(_) => return Ok(Content::directory()),
        };
        let (files, tick) = (self.files, &mut *self.tick);
        let mut tick = |_| tick(files);
        let dense = |segments: &[Segment]| size == 0 || segments.iter().any(|segment| segment.len == size);
        let appended = match segments.filter(|segments| !dense(segments)) {
            None => self.data.append(source, size, &mut tick),
            Some(segments) => {
                let room = self.budget.left();
                self.data.append_sparse(source, size, &segments, room, &mut tick).inspect(|data| {
                    // What was read has been counted; what chunks add to it is counted here.
                    let read: u64 = segments.iter().map(|segment| segment.len).sum();
                    self.budget.take(data.stored_bytes().saturating_sub(read).min(self.budget.left()));
                })
            }
        };
        appended.map(Content::File).map_err(|error| match error {
            AppendError::Read(e) => read_problem(e),
            AppendError::Short { .. } => EntryProblem::Truncated,
            AppendError::Write(e) => EntryProblem::write(self.data_path, e),
            AppendError::TooLarge => EntryProblem::ImageTooLarge,
            AppendError::NoRoom { .. } => EntryProblem::TooManyBytes { max: self.budget.max() },
            AppendError::Pack(source) => EntryProblem::Pack { source },
            AppendError::BadSegments => EntryProblem::BadSparseMap { what: "its pieces are not in order" },
        })
    }

    fn root(&mut self, entry: Entry) -> Result<(), EntryProblem> {
        if entry.kind != Kind::Directory {
            return Err(EntryProblem::RootNotDirectory);
        }
        let root = self.tree.root();
        self.set_attributes(root, attributes(&entry)?);
        Ok(())
    }

    /// A directory over a directory changes its attributes and keeps what is in it; over anything
    /// else it takes its place, also over a symlink to a directory.
    fn directory(
        &mut self,
        parents: &[&[u8]],
        name: &[u8],
        attributes: Attributes,
    ) -> Result<(), EntryProblem> {
        let dir = self.resolve(parents, true)?.ok_or(EntryProblem::SymlinkLoop)?;
        match self.tree.lookup(dir, name) {
            Some(found) if self.is_directory(found) => self.set_attributes(found, attributes),
            found => {
                let mut attributes = attributes;
                // What took the name before in this layer hides what layers below have there.
                if found.is_some() && self.whiteouts == Whiteouts::Keep {
                    overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
                }
                self.tree.insert(dir, name, attributes, Content::directory());
            }
        }
        Ok(())
    }

    /// Changes a directory's attributes; that it is opaque stays.
    fn set_attributes(&mut self, dir: InodeId, mut attributes: Attributes) {
        if self.tree.get(dir).is_some_and(|old| overlay::is_opaque(&old.attributes)) {
            overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
        }
        self.tree.set_attributes(dir, attributes);
    }

    fn hard_link(&mut self, parents: &[&[u8]], name: &[u8], target: &[u8]) -> Result<(), EntryProblem> {
        if target.is_empty() {
            return Err(EntryProblem::EmptyTarget);
        }
        let shown = || printable(target);
        let path = components(target).map_err(|problem| match problem {
            EntryProblem::ParentTraversal => EntryProblem::LinkTargetOutside { target: shown() },
            other => other,
        })?;
        let missing = || EntryProblem::LinkTargetMissing { target: shown() };
        let Some((target_name, target_parents)) = path.split_last() else {
            return Err(EntryProblem::LinkTargetDirectory { target: shown() });
        };
        let target_dir = self.resolve(target_parents, false)?;
        let found = target_dir.and_then(|dir| self.tree.lookup(dir, target_name));
        let Some(found) = found else {
            if self.whiteouts != Whiteouts::Keep {
                return Err(missing());
            }
            // It is in a layer below.
            let dir = self.resolve(parents, true)?.ok_or(EntryProblem::SymlinkLoop)?;
            let mut attributes = Attributes::default();
            overlay::mark(&mut attributes, overlay::LINK, &path.join(b"/".as_slice()));
            self.tree.insert(dir, name, attributes, Content::Fifo);
            return Ok(());
        };
        if self.tree.get(found).is_some_and(|inode| overlay::is_whiteout(&inode.content)) {
            return Err(missing());
        }
        if self.is_directory(found) {
            return Err(EntryProblem::LinkTargetDirectory { target: shown() });
        }
        let dir = self.resolve(parents, true)?.ok_or(EntryProblem::SymlinkLoop)?;
        // If the link takes the place of a directory its target is in, the target would be gone.
        let replaced = self.tree.lookup(dir, name);
        if replaced.is_some_and(|old| self.is_directory(old)) {
            self.tree.remove(dir, name);
            if self.tree.get(found).is_none() {
                return Err(missing());
            }
        }
        self.tree.hard_link(dir, name, found);
        Ok(())
    }

    fn whiteout(&mut self, name: &[u8], parents: &[&[u8]]) -> Result<(), EntryProblem> {
        let hidden = match name {
            OPAQUE => None,
            // Also `.wh..wh.aufs` and the like, bookkeeping of the file system that made the format:
            // no layer can have brought the name they hide.
            _ => match &name[WHITEOUT.len()..] {
                b"" | b"." | b".." => return Err(EntryProblem::BadWhiteout),
                hidden => Some(hidden),
            },
        };
        let dir = self.resolve(parents, true)?.ok_or(EntryProblem::SymlinkLoop)?;
        let opaque = match hidden {
            None => dir,
            Some(name) => match self.tree.lookup(dir, name) {
                Some(found) if self.is_directory(found) => found,
                // Anything else of this layer hides what is below by itself.
                Some(_) => return Ok(()),
                None => {
                    let (attributes, content) = overlay::whiteout();
                    self.tree.insert(dir, name, attributes, content);
                    return Ok(());
                }
            },
        };
        if let Some(inode) = self.tree.get(opaque) {
            let mut attributes = inode.attributes.clone();
            overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
            self.tree.set_attributes(opaque, attributes);
        }
        Ok(())
    }

    /// A directory that an entry needs and the archive does not have.
    fn implied(&mut self, dir: InodeId, name: &[u8], opaque: bool) -> InodeId {
        let mut attributes = Attributes { mode: 0o755, ..Attributes::default() };
        if self.whiteouts == Whiteouts::Keep {
            overlay::mark(&mut attributes, overlay::IMPLIED, b"");
        }
        if opaque {
            overlay::mark(&mut attributes, overlay::OPAQUE, b"y");
        }
        self.tree.insert(dir, name, attributes, Content::directory())
    }

    /// The directory at `path`, following symlinks. With `create`, missing directories are made
    /// (0755, root, 1970); without, a missing one gives nothing.
    fn resolve(&mut self, path: &[&[u8]], create: bool) -> Result<Option<InodeId>, EntryProblem> {
        let mut stack = vec![self.tree.root()];
        let mut todo: VecDeque<Box<[u8]>> = path.iter().map(|name| Box::from(*name)).collect();
        let mut symlinks = 0;
        while let Some(name) = todo.pop_front() {
            if name.as_ref() == b".." {
                // Of a symlink's target. Above the root is the root.
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let dir = stack.last().copied().unwrap_or(self.tree.root());
            let Some(found) = self.tree.lookup(dir, &name) else {
                if !create {
                    return Ok(None);
                }
                self.count(name.len())?;
                stack.push(self.implied(dir, &name, false));
                continue;
            };
            match self.tree.get(found).map(|inode| &inode.content) {
                Some(Content::Directory(_)) => stack.push(found),
                Some(Content::Symlink(target)) => {
                    symlinks += 1;
                    if symlinks > SYMLINKS_MAX {
                        return Err(EntryProblem::SymlinkLoop);
                    }
                    if target.first() == Some(&b'/') {
                        stack.truncate(1);
                    }
                    for name in target.split(|b| *b == b'/').rev() {
                        if !matches!(name, b"" | b".") {
                            check_name(name)?;
                            todo.push_front(name.into());
                        }
                    }
                }
                Some(content) if self.whiteouts == Whiteouts::Keep && overlay::is_whiteout(content) => {
                    if !create {
                        return Ok(None);
                    }
                    stack.push(self.implied(dir, &name, true));
                }
                _ => return Err(EntryProblem::ParentNotDirectory { parent: printable(&name) }),
            }
        }
        Ok(stack.last().copied())
    }

    fn is_directory(&self, id: InodeId) -> bool {
        self.tree.get(id).is_some_and(|inode| matches!(inode.content, Content::Directory(_)))
    }

    /// Counts one entry with so many bytes of metadata.
    fn count(&mut self, metadata: usize) -> Result<(), EntryProblem> {
        if self.files >= self.limits.max_files {
            return Err(EntryProblem::TooManyFiles { max: self.limits.max_files });
        }
        self.files += 1;
        self.spend(metadata)
    }

    fn count_metadata(&mut self, entry: &Entry, path: &[&[u8]]) -> Result<(), EntryProblem> {
        let xattrs: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let kind = match &entry.kind {
            Kind::Symlink(target) => target.len(),
            // Kept as an attribute if it is in a layer below.
            Kind::HardLink(target) if self.whiteouts == Whiteouts::Keep => target.len(),
            Kind::Sparse { segments, .. } => segments.len() * size_of::<Segment>(),
            _ => 0,
        };
        self.spend(xattrs + kind + path.last().map_or(0, |name| name.len()))
    }

    fn spend(&mut self, metadata: usize) -> Result<(), EntryProblem> {
        self.metadata_bytes += metadata as u64;
        if self.metadata_bytes > self.limits.max_metadata_bytes {
            return Err(EntryProblem::TooMuchMetadata { max: self.limits.max_metadata_bytes });
        }
        Ok(())
    }
}

/// The components of a path, without leading slashes and dots.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, EntryProblem> {
    if path.len() > PATH_MAX {
        return Err(EntryProblem::PathTooLong { len: path.len() });
    }
    let mut out = Vec::new();
    for name in path.split(|b| *b == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err(EntryProblem::ParentTraversal),
            _ => {
                check_name(name)?;
                out.push(name);
            }
        }
    }
    Ok(out)
}

fn check_name(name: &[u8]) -> Result<(), EntryProblem> {
    if name.contains(&0) {
        return Err(EntryProblem::NulByte);
    }
    if name.len() > NAME_MAX { Err(EntryProblem::NameTooLong { len: name.len() }) } else { Ok(()) }
}

fn symlink(target: Vec<u8>) -> Result<Content, EntryProblem> {
    match target.len() {
        0 => Err(EntryProblem::EmptyTarget),
        len if len > TARGET_MAX => Err(EntryProblem::TargetTooLong { len }),
        _ if target.contains(&0) => Err(EntryProblem::NulByte),
        _ => Ok(Content::Symlink(target.into())),
    }
}

/// Attributes of an entry. Left out are extended attributes of namespaces Linux does not have,
/// such as macOS's, and those by which overlayfs and our merge are steered: an image becomes a lower
/// directory and must not say how it is merged.
fn attributes(entry: &Entry) -> Result<Attributes, EntryProblem> {
    let mut xattrs = Xattrs::default();
    for (name, value) in &entry.xattrs {
        if overlay::steers(name) {
            continue;
        }
        match xattrs.set(name, value) {
            Ok(()) | Err(XattrError::UnknownNamespace) => {}
            Err(source) => return Err(EntryProblem::BadXattr { name: printable(name), source }),
        }
    }
    Ok(Attributes {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime,
        xattrs: (!xattrs.is_empty()).then(|| Box::new(xattrs)),
    })
}

#[cfg(test)]
mod tests;
