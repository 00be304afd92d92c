//! Tells a root file system from an archive of images, and finds the blobs in the latter.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{EntryProblem, ImportError};

use super::stream::{FileRange, Stream};
use super::tar::{Kind, TarError, TarReader};

/// Largest manifest, index or configuration. Registries stop at 4 MiB.
const DOCUMENT_MAX: u64 = 8 << 20;

/// What a member's path says of the archive it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Could be in both.
    Either,
    /// A file of an OCI layout or of `docker save`.
    OfImage,
    /// Nothing such an archive has.
    Foreign,
}

fn role(path: &str) -> Role {
    let path = path.strip_prefix("sha256:").unwrap_or(path);
    let is_digest = |text: &str| text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if let Some(blob) = path.strip_prefix("blobs/") {
        return match blob.split_once('/') {
            None => Role::Either,
            Some((_, digest)) if digest.bytes().all(|b| b.is_ascii_hexdigit()) && digest.len() >= 64 => {
                Role::OfImage
            }
            Some(_) => Role::Foreign,
        };
    }
    match path {
        "" | "blobs" => Role::Either,
        "oci-layout" | "index.json" | "manifest.json" | "repositories" => Role::OfImage,
        _ => match path.split_once('/') {
            None if is_digest(path) => Role::Either,
            None => {
                let stem = [".json", ".tar", ".tar.gz"].iter().find_map(|end| path.strip_suffix(end));
                if stem.is_some_and(is_digest) { Role::OfImage } else { Role::Foreign }
            }
            Some((dir, "VERSION" | "json" | "layer.tar")) if is_digest(dir) => Role::OfImage,
            Some(_) => Role::Foreign,
        },
    }
}

/// A member's path without `./` and slashes at either end; none if it is not UTF-8.
fn member_name(path: &[u8]) -> Option<String> {
    let path = std::str::from_utf8(path).ok()?;
    let parts: Vec<_> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    Some(parts.join("/"))
}

/// Whether the archive looks like one of images, by its first telling member. Only a hint:
/// [`Members::index`] sees all of them.
///
/// # Errors
/// When not even the first entry can be read.
pub(crate) fn looks_like_images(stream: impl Stream) -> Result<bool, TarError> {
    let mut reader = TarReader::new(stream);
    let mut first = true;
    loop {
        match reader.next_entry() {
            Ok(Some(entry)) => match member_name(&entry.path).map_or(Role::Foreign, |name| role(&name)) {
                Role::Either => {}
                found => return Ok(found == Role::OfImage),
            },
            Ok(None) => return Ok(false),
            // What is wrong further on is for the import to say.
            Err(error) if first => return Err(error),
            Err(_) => return Ok(false),
        }
        first = false;
    }
}

enum Member {
    File {
        offset: u64,
        size: u64,
    },
    /// Another member; `docker save` links layers it has twice.
    Link(String),
}

/// Where an archive's members are.
pub(crate) struct Members {
    file: FileRange,
    members: HashMap<String, Member>,
}

impl Members {
    /// Reads all headers. None if the archive holds anything an image archive does not.
    pub(crate) fn index(file: &FileRange, max_files: u64) -> Result<Option<Self>, TarError> {
        let mut reader = TarReader::new(file.clone());
        let mut members = HashMap::new();
        while let Some(entry) = reader.next_entry()? {
            let Some(name) = member_name(&entry.path) else { return Ok(None) };
            if role(&name) == Role::Foreign {
                return Ok(None);
            }
            if members.len() as u64 >= max_files {
                return Err(reader.error(EntryProblem::TooManyFiles { max: max_files }));
            }
            let member = match &entry.kind {
                Kind::File { size } => Member::File { offset: reader.content_offset(), size: *size },
                Kind::HardLink(target) => link("", target),
                Kind::Symlink(target) => link(name.rsplit_once('/').map_or("", |(dir, _)| dir), target),
                _ => continue,
            };
            members.insert(name, member);
        }
        Ok(Some(Self { file: file.clone(), members }))
    }

    fn open(&self, name: &str) -> Option<FileRange> {
        let name = member_name(name.as_bytes())?;
        let member = match self.members.get(&name)? {
            Member::Link(target) => self.members.get(target)?,
            member => member,
        };
        match member {
            Member::File { offset, size } => Some(self.file.part(*offset, *size)),
            Member::Link(_) => None,
        }
    }
}

fn link(dir: &str, target: &[u8]) -> Member {
    let target = String::from_utf8_lossy(target);
    let mut parts: Vec<&str> = dir.split('/').collect();
    for part in target.split('/') {
        match part {
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    Member::Link(member_name(parts.join("/").as_bytes()).unwrap_or_default())
}

/// An OCI layout or a `docker save` archive.
pub(crate) enum Archive {
    /// Unpacked, in a directory of the host.
    Directory(PathBuf),
    /// As a tar file.
    Tar(Members),
}

impl Archive {
    /// A file in it, if it is there. `name` must be trusted to stay inside: a constant, or made of
    /// a checked digest.
    pub(crate) fn open(&self, name: &str) -> Result<Option<FileRange>, ImportError> {
        match self {
            Self::Tar(members) => Ok(members.open(name)),
            Self::Directory(dir) => {
                let path = dir.join(name);
                let opened = match std::fs::metadata(&path) {
                    // Opening a pipe would wait for its writer.
                    Ok(metadata) if !metadata.is_file() => Err(io::ErrorKind::InvalidInput.into()),
                    Ok(_) => File::open(&path).and_then(FileRange::whole).map(Some),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(e) => Err(e),
                };
                opened.map_err(|source| ImportError::Source { path, source })
            }
        }
    }

    /// A small file in it, whole.
    pub(crate) fn document(&self, name: &str) -> Result<Option<Vec<u8>>, ImportError> {
        let Some(mut range) = self.open(name)? else { return Ok(None) };
        if range.len() > DOCUMENT_MAX {
            return Err(ImportError::DocumentTooLarge { what: name.to_owned(), size: range.len() });
        }
        let mut bytes = Vec::new();
        range
            .read_to_end(&mut bytes)
            .map_err(|source| ImportError::Source { path: Path::new(name).to_owned(), source })?;
        Ok(Some(bytes))
    }
}

/// The source, opened for reading.
pub(crate) fn open_source(
    path: &Path,
    progress: &Arc<std::sync::atomic::AtomicU64>,
) -> Result<FileRange, ImportError> {
    let failed = |source| ImportError::Source { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        let found = "is neither a file nor a directory";
        return Err(ImportError::NotAnArchive { path: path.to_owned(), found });
    }
    if metadata.len() == 0 {
        return Err(ImportError::NotAnArchive { path: path.to_owned(), found: "is empty" });
    }
    let range = File::open(path).and_then(FileRange::whole).map_err(failed)?;
    Ok(range.counted_by(progress))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_image_archives_are_told_from_root_file_systems() {
        let digest = "a".repeat(64);
        for path in
            ["oci-layout", "manifest.json", &format!("blobs/sha256/{digest}"), &format!("{digest}.json")]
        {
            assert_eq!(role(path), Role::OfImage, "{path}");
        }
        for path in ["", "blobs", "blobs/sha256", digest.as_str()] {
            assert_eq!(role(path), Role::Either, "{path}");
        }
        for path in ["bin", "etc/passwd", "blobs/sha256/x", "blobs/other/file", "layer.tar", "app.json"] {
            assert_eq!(role(path), Role::Foreign, "{path}");
        }
    }

    #[test]
    fn links_are_read_from_where_they_are() {
        let Member::Link(to) = link("aa", b"../bb/layer.tar") else { unreachable!() };
        assert_eq!(to, "bb/layer.tar");
        let Member::Link(to) = link("", b"./bb/layer.tar") else { unreachable!() };
        assert_eq!(to, "bb/layer.tar");
    }
}
