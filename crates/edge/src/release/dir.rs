//! `STATE/releases`: what was chosen, the releases, and the `edge.toml` of before a change of it.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use dsec_proto::rest::ReleaseName;

use super::choice::Choice;

/// The node's own program in a release.
pub const EDGE: &str = "dsec-edge";
const CHOICE: &str = "choice.json";
const CONFIG_BEFORE: &str = "edge.toml.before";
/// How the names of uploads and of releases that are being unpacked begin: no release has such a name.
pub(super) const DRAFT: &str = ".draft-";

/// The directory.
#[derive(Debug, Clone)]
pub struct ReleaseDir {
    root: PathBuf,
}

impl ReleaseDir {
    /// That of a state directory; nothing is made yet.
    pub fn new(state_dir: &Path) -> Self {
        Self { root: state_dir.join("releases") }
    }

    /// Makes it: nobody but root may look in.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.root)?;
        fs::set_permissions(&self.root, Permissions::from_mode(0o700))
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where what was chosen is written down.
    pub fn choice_file(&self) -> PathBuf {
        self.root.join(CHOICE)
    }

    /// Where a release lies.
    pub fn release(&self, name: &ReleaseName) -> PathBuf {
        self.root.join(name.as_str())
    }

    /// The edge of a release.
    pub fn edge(&self, name: &ReleaseName) -> PathBuf {
        self.release(name).join(EDGE)
    }

    /// The release that a program is of; none: it was installed.
    pub fn release_of(&self, program: &Path) -> Option<ReleaseName> {
        let root = fs::canonicalize(&self.root).ok()?;
        let mut parts = program.strip_prefix(&root).ok()?.components();
        parts.next()?.as_os_str().to_str()?.parse().ok()
    }

    /// The releases that lie here.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn stored(&self) -> io::Result<Vec<ReleaseName>> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().to_str().and_then(|name| name.parse::<ReleaseName>().ok()));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// What was chosen; none: nothing ever was.
    ///
    /// # Errors
    /// The file cannot be read or understood.
    pub fn load(&self) -> io::Result<Option<Choice>> {
        match fs::read(self.choice_file()) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes down what was chosen. It holds after a power cut.
    ///
    /// # Errors
    /// It cannot be written; what was written before holds.
    pub fn save(&self, choice: &Choice) -> io::Result<()> {
        self.make()?;
        write_whole(&self.choice_file(), &serde_json::to_vec_pretty(choice)?)
    }

    /// Keeps a configuration for the time in which another one is tried.
    ///
    /// # Errors
    /// The kernel's.
    pub fn keep_config(&self, text: &str) -> io::Result<()> {
        self.make()?;
        write_whole(&self.root.join(CONFIG_BEFORE), text.as_bytes())
    }

    /// Puts back the configuration that was kept, if one was.
    ///
    /// # Errors
    /// The kernel's.
    pub fn put_config_back(&self, file: &Path) -> io::Result<()> {
        match fs::read(self.root.join(CONFIG_BEFORE)) {
            Ok(text) => {
                write_whole(file, &text)?;
                self.drop_config();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The configuration of before is not needed any more.
    pub fn drop_config(&self) {
        let _was_none = fs::remove_file(self.root.join(CONFIG_BEFORE));
    }

    /// Removes what is left of releases that did not come whole. No edge runs that takes one in.
    ///
    /// # Errors
    /// The first one that cannot be removed.
    pub fn clear_drafts(&self) -> io::Result<()> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes()) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the releases that are not among these. One whose programs run still runs on.
    ///
    /// # Errors
    /// The first one that cannot be removed.
    pub fn retain(&self, kept: &[&ReleaseName]) -> io::Result<()> {
        for name in self.stored()?.iter().filter(|name| !kept.contains(name)) {
            fs::remove_dir_all(self.release(name))?;
            tracing::info!(release = %name, "a release that is not needed any more was removed");
        }
        Ok(())
    }
}

/// Replaces a file by another content, written through. Whoever reads it has the one or the other, and nobody else may read it.
///
/// # Errors
/// The kernel's; the file is what it was.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    draft.write_all(bytes)?;
    draft.as_file().set_permissions(Permissions::from_mode(0o600))?;
    draft.as_file().sync_all()?;
    draft.persist(path)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "0.1.0-0123456789abcdef";

    #[test]
    fn a_program_is_of_the_release_it_lies_in() {
        let state = tempfile::tempdir().unwrap();
        let dir = ReleaseDir::new(state.path());
        assert_eq!(dir.release_of(Path::new("/usr/bin/dsec-edge")), None);
        dir.make().unwrap();
        let name: ReleaseName = NAME.parse().unwrap();
        let program = fs::canonicalize(state.path()).unwrap().join("releases").join(NAME).join(EDGE);
        assert_eq!(dir.release_of(&program), Some(name));
        assert_eq!(dir.release_of(Path::new("/usr/bin/dsec-edge")), None);
    }

    #[test]
    fn what_is_not_kept_is_removed_and_nothing_else() {
        let state = tempfile::tempdir().unwrap();
        let dir = ReleaseDir::new(state.path());
        let names = ["a", "b"].map(|digit| format!("0.1.0-{}", digit.repeat(16)).parse().unwrap());
        names.iter().for_each(|name| fs::create_dir_all(dir.release(name)).unwrap());
        dir.save(&Choice::default()).unwrap();
        fs::create_dir(dir.root().join(".draft-x")).unwrap();
        dir.clear_drafts().unwrap();
        assert!(!dir.root().join(".draft-x").exists());
        dir.retain(&[&names[1]]).unwrap();
        assert_eq!(dir.stored().unwrap(), names[1..]);
        assert_eq!(dir.load().unwrap(), Some(Choice::default()));
        assert_eq!(fs::metadata(dir.root()).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_configuration_comes_back_as_it_was_and_once() {
        let state = tempfile::tempdir().unwrap();
        let (dir, file) = (ReleaseDir::new(state.path()), state.path().join("edge.toml"));
        dir.keep_config("a = 1 # why\n").unwrap();
        fs::write(&file, "a = 2\n").unwrap();
        dir.put_config_back(&file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "a = 1 # why\n");
        fs::write(&file, "a = 3\n").unwrap();
        dir.put_config_back(&file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "a = 3\n");
    }
}
