//! The directory of a recipe: what a path of it holds, as a digest and as a part of an archive.
//!
//! Paths stay below the directory, whatever links say. Links in what is copied are copied as links and never followed.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use dsec_recipe::Ignore;

use crate::commands::archive::named;
use crate::failure::Failure;

/// What is left out, by its name in the directory.
const IGNORE_FILE: &str = ".dockerignore";
/// Bytes read at once.
const PIECE: usize = 256 << 10;
/// Permissions of a directory that is made on the way.
pub(super) const DIRECTORY_MODE: u32 = 0o755;

/// A digest of what a path holds: names, kinds, permissions and bytes; not times, nor owners.
pub(super) type Digest = [u8; 32];

/// A recipe's directory.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    /// Without links.
    root: PathBuf,
    ignore: Ignore,
}

/// What one path of the directory holds.
#[derive(Debug)]
pub(super) struct Content {
    /// Name to give a file in a directory that it is copied into; none: a directory, whose content is meant.
    pub(super) file_name: Option<OsString>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    at: PathBuf,
    /// Below the directory that is copied; of a file that is named itself, nothing.
    name: PathBuf,
    meta: Metadata,
}

impl Directory {
    /// Opens a directory and reads what is to be left out.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::io(format!("cannot read {}", path.display()), &error);
        let root = path.canonicalize().map_err(failed)?;
        if !root.is_dir() {
            return Err(Failure::usage(format!("{} is no directory", path.display())));
        }
        let ignore = root.join(IGNORE_FILE);
        let ignore = match std::fs::read_to_string(&ignore) {
            Ok(text) => Ignore::parse(&text)
                .map_err(|error| Failure::usage(format!("{}: {error}", ignore.display())))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ignore::default(),
            Err(error) => return Err(Failure::io(format!("cannot read {}", ignore.display()), &error)),
        };
        Ok(Self { root, ignore })
    }

    /// What a path of the directory holds, without what is left out.
    ///
    /// # Errors
    /// It is not there, left out, leads out of the directory, or has what cannot be copied.
    pub(super) fn content(&self, path: &str) -> Result<Content, Failure> {
        let shown = self.root.join(path);
        let at = shown
            .canonicalize()
            .map_err(|error| Failure::io(format!("cannot copy {}", shown.display()), &error))?;
        if !at.starts_with(&self.root) {
            return Err(Failure::usage(format!(
                "{path:?} leads out of {}, through a link",
                self.root.display()
            ))
            .hint("copy what is needed into the directory"));
        }
        let from_root = at.strip_prefix(&self.root).unwrap_or(Path::new("")).to_owned();
        let meta = named(&at, at.metadata()).map_err(|error| Failure::io("cannot copy", &error))?;
        let mut content = Content { file_name: None, entries: Vec::new() };
        if meta.is_dir() {
            self.walk(&at, Path::new(""), &from_root, &mut content.entries)?;
        } else {
            content.file_name = shown.file_name().map(OsStr::to_os_string);
            content.entries.push(Entry { at, name: PathBuf::new(), meta });
            content.entries[0].check()?;
        }
        match self.ignore.leaves_out(&from_root.to_string_lossy()) {
            // Something in it may have been taken back.
            Some(line) if content.entries.is_empty() || content.file_name.is_some() => {
                Err(Failure::usage(format!("{path:?} is left out by line {line} of {IGNORE_FILE}")))
            }
            _ => Ok(content),
        }
    }

    /// Adds what a directory holds, by name, a directory before what is in it. `name` is its name in what is copied, `from_root` as the
    /// patterns have it.
    fn walk(
        &self,
        dir: &Path,
        name: &Path,
        from_root: &Path,
        entries: &mut Vec<Entry>,
    ) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::io("cannot copy", &error);
        let list = named(dir, std::fs::read_dir(dir)).map_err(failed)?;
        let names = list.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>();
        let mut names = named(dir, names).map_err(failed)?;
        names.sort_unstable();
        for own in names {
            let (at, name, from_root) = (dir.join(&own), name.join(&own), from_root.join(&own));
            let is_left_out = self.ignore.leaves_out(&from_root.to_string_lossy()).is_some();
            let meta = named(&at, at.symlink_metadata()).map_err(failed)?;
            if is_left_out && !(meta.is_dir() && self.ignore.may_take_back()) {
                continue;
            }
            let (is_dir, place) = (meta.is_dir(), entries.len());
            let entry = Entry { at: at.clone(), name: name.clone(), meta };
            entry.check()?;
            entries.push(entry);
            if is_dir {
                self.walk(&at, &name, &from_root, entries)?;
            }
            if is_left_out && entries.len() == place + 1 {
                entries.pop();
            }
        }
        Ok(())
    }
}

impl Entry {
    fn check(&self) -> Result<(), Failure> {
        let kind = self.meta.file_type();
        if kind.is_file() || kind.is_dir() || kind.is_symlink() {
            return Ok(());
        }
        let what = match (kind.is_socket(), kind.is_fifo()) {
            (true, _) => "a socket",
            (_, true) => "a named pipe",
            _ => "a device",
        };
        Err(Failure::usage(format!("{} is {what}, which is not copied", self.at.display()))
            .hint(format!("leave it out by a line of {IGNORE_FILE}")))
    }

    fn mode(&self) -> u32 {
        self.meta.permissions().mode() & 0o7777
    }
}

impl Content {
    /// Its digest.
    pub(super) fn digest(&self) -> io::Result<Digest> {
        self.read(|_, _, content| io::copy(content, &mut io::sink()).map(drop))
    }

    /// Adds it to an archive below `prefix`, with `mode` for files unless theirs are kept; the digest of what was added.
    pub(super) fn add_to(
        &self,
        archive: &mut tar::Builder<impl Write>,
        prefix: &Path,
        mode: Option<u32>,
    ) -> io::Result<Digest> {
        self.read(|entry, mode_of, content| {
            let mut header = tar::Header::new_gnu();
            header.set_metadata(&entry.meta);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mode(match mode {
                _ if entry.meta.is_symlink() => 0o777,
                Some(mode) if entry.meta.is_dir() => searchable(mode),
                Some(mode) => mode,
                None => mode_of,
            });
            let name = match (&self.file_name, entry.name.as_os_str().is_empty()) {
                (Some(name), true) => prefix.join(name),
                _ => prefix.join(&entry.name),
            };
            if entry.meta.is_symlink() {
                header.set_size(0);
                let mut target = Vec::new();
                content.read_to_end(&mut target)?;
                return archive.append_link(&mut header, name, OsStr::from_bytes(&target));
            }
            if !entry.meta.is_file() {
                header.set_size(0);
            }
            archive.append_data(&mut header, name, content)
        })
    }

    /// Hands every entry with its permissions and its content on (of a link: its target), and digests all that is seen.
    fn read(&self, mut each: impl FnMut(&Entry, u32, &mut dyn Read) -> io::Result<()>) -> io::Result<Digest> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(if self.file_name.is_some() { b"file" } else { b"tree" });
        for entry in &self.entries {
            let name = entry.name.as_os_str().as_bytes();
            let (kind, mode, size, content): (_, _, _, Box<dyn Read>) = if entry.meta.is_dir() {
                (b"d", entry.mode(), 0, Box::new(io::empty()))
            } else if entry.meta.is_symlink() {
                let target = named(&entry.at, std::fs::read_link(&entry.at))?.into_os_string();
                let target = target.as_bytes().to_vec();
                (b"l", 0, target.len() as u64, Box::new(io::Cursor::new(target)))
            } else {
                // A file that grows or shrinks under us must not shift what comes after it.
                let file = named(&entry.at, File::open(&entry.at))?.chain(io::repeat(0));
                let size = entry.meta.len();
                let file = io::BufReader::with_capacity(PIECE, file.take(size));
                (b"f", entry.mode(), size, Box::new(file))
            };
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name).update(kind);
            hasher.update(&mode.to_le_bytes()).update(&size.to_le_bytes());
            let mut content = Digested { content, hasher: &mut hasher };
            named(&entry.at, each(entry, mode, &mut content))?;
        }
        Ok(*hasher.finalize().as_bytes())
    }
}

/// Permissions of a directory whose files have `mode`: who may read it may search it.
fn searchable(mode: u32) -> u32 {
    mode | (mode & 0o444) >> 2
}

struct Digested<'a> {
    content: Box<dyn Read + 'a>,
    hasher: &'a mut blake3::Hasher,
}

impl Read for Digested<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read(into)?;
        self.hasher.update(&into[..read]);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::{Duration, SystemTime};

    use super::*;

    /// A directory with every kind of thing in `src`.
    fn made() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let src = dir.path().join("src");
        fs::create_dir_all(src.join("sub/empty")).unwrap();
        fs::write(src.join("a.py"), "a").unwrap();
        fs::write(src.join("sub/b.py"), "b").unwrap();
        symlink("a.py", src.join("link")).unwrap();
        for (path, mode) in [("src", 0o755), ("src/a.py", 0o644), ("src/sub", 0o755), ("src/sub/b.py", 0o600)]
        {
            fs::set_permissions(dir.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        dir
    }

    fn digest(dir: &tempfile::TempDir, path: &str) -> Digest {
        Directory::open(dir.path()).unwrap().content(path).unwrap().digest().unwrap()
    }

    fn refusal(dir: &tempfile::TempDir, path: &str) -> String {
        Directory::open(dir.path()).unwrap().content(path).unwrap_err().message
    }

    #[test]
    fn names_kinds_permissions_and_bytes_count_and_times_do_not() {
        let dir = made();
        let src = dir.path().join("src");
        let before = digest(&dir, "src");
        assert_eq!(digest(&made(), "src"), before, "the same content elsewhere");
        assert_eq!(digest(&dir, "./src/"), before);
        let file = File::options().write(true).open(src.join("a.py")).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        assert_eq!(digest(&dir, "src"), before, "another time");
        type Change<'a> = (&'a str, &'a dyn Fn(&Path));
        let changes: [Change<'_>; 7] = [
            ("bytes", &|src| fs::write(src.join("a.py"), "A").unwrap()),
            ("a name", &|src| fs::rename(src.join("a.py"), src.join("c.py")).unwrap()),
            ("permissions", &|src| {
                fs::set_permissions(src.join("a.py"), fs::Permissions::from_mode(0o755)).unwrap();
            }),
            ("a directory less", &|src| fs::remove_dir(src.join("sub/empty")).unwrap()),
            ("a file for a directory", &|src| {
                fs::remove_dir(src.join("sub/empty")).unwrap();
                fs::write(src.join("sub/empty"), "").unwrap();
            }),
            ("a link's target", &|src| {
                fs::remove_file(src.join("link")).unwrap();
                symlink("b.py", src.join("link")).unwrap();
            }),
            ("bytes that move to the next file", &|src| {
                fs::write(src.join("a.py"), "").unwrap();
                fs::write(src.join("sub/b.py"), "ab").unwrap();
            }),
        ];
        for (what, change) in changes {
            let dir = made();
            change(&dir.path().join("src"));
            assert_ne!(digest(&dir, "src"), before, "{what}");
        }
    }

    #[test]
    fn what_is_copied_has_the_digest_that_was_planned_with() {
        let dir = made();
        let directory = Directory::open(dir.path()).unwrap();
        let content = directory.content("src").unwrap();
        let mut archive = tar::Builder::new(Vec::new());
        assert_eq!(
            content.add_to(&mut archive, Path::new("to"), Some(0o640)).unwrap(),
            content.digest().unwrap()
        );
        let file = directory.content("src/a.py").unwrap();
        file.add_to(&mut archive, Path::new("to"), None).unwrap();
        let bytes = archive.into_inner().unwrap();
        let mut seen = Vec::new();
        for entry in tar::Archive::new(&bytes[..]).entries().unwrap() {
            let entry = entry.unwrap();
            let mode = entry.header().mode().unwrap();
            seen.push(format!("{} {mode:o}", entry.path().unwrap().display()));
        }
        let wanted = [
            "to/a.py 640",
            "to/link 777",
            "to/sub 750",
            "to/sub/b.py 640",
            "to/sub/empty 750",
            "to/a.py 644",
        ];
        assert_eq!(seen, wanted);
        fs::write(dir.path().join("src/a.py"), "z").unwrap();
        let mut archive = tar::Builder::new(io::sink());
        assert_ne!(content.add_to(&mut archive, Path::new(""), None).unwrap(), digest(&made(), "src"));
    }

    #[test]
    fn nothing_outside_is_read_and_links_are_links() {
        let (dir, outside) = (made(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("secret"), "s").unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink("src", dir.path().join("in")).unwrap();
        for path in ["out", "out/secret", "src/../out"] {
            assert!(refusal(&dir, path).contains("leads out"), "{path}");
        }
        assert!(refusal(&dir, "nothing").contains("nothing"));
        let before = digest(&dir, ".");
        fs::write(outside.path().join("secret"), "t").unwrap();
        assert_eq!(digest(&dir, "."), before, "the link counts, not what it leads to");
        assert_eq!(digest(&dir, "in"), digest(&dir, "src"), "a link that stays inside is followed");
        let _bound = std::os::unix::net::UnixListener::bind(dir.path().join("src/socket")).unwrap();
        assert!(refusal(&dir, "src").contains("a socket"));
    }

    #[test]
    fn what_is_left_out_does_not_count_and_cannot_be_named() {
        let dir = made();
        fs::write(dir.path().join(".dockerignore"), "**/*.py\nsrc/sub\n").unwrap();
        let before = digest(&dir, "src");
        fs::write(dir.path().join("src/a.py"), "other").unwrap();
        fs::write(dir.path().join("src/sub/new"), "").unwrap();
        assert_eq!(digest(&dir, "src"), before);
        assert_eq!(refusal(&dir, "src/a.py"), "\"src/a.py\" is left out by line 1 of .dockerignore");
        assert_eq!(refusal(&dir, "src/sub"), "\"src/sub\" is left out by line 2 of .dockerignore");
        fs::write(dir.path().join(".dockerignore"), "*\n!src/sub/b.py\n").unwrap();
        let kept = Directory::open(dir.path()).unwrap().content(".").unwrap();
        let names: Vec<_> = kept.entries.iter().map(|entry| entry.name.display().to_string()).collect();
        assert_eq!(names, ["src", "src/sub", "src/sub/b.py"], "and the directories above it");
        fs::write(dir.path().join(".dockerignore"), "ok\n../x\n").unwrap();
        assert!(Directory::open(dir.path()).unwrap_err().message.contains("line 2"));
    }
}
