//! Where a copy lands: beside its target until it is whole, so that one that breaks off leaves what was.

use std::cell::RefCell;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::MoveRequest;

use super::Context;
use super::archive::named;
use crate::failure::Failure;

/// Tries to remove what an interrupted copy left in a sandbox: what was on its way may still be unpacked
/// there after the first ones.
const REMOVE_TRIES: u32 = 20;
/// Pause between them.
const REMOVE_PAUSE: Duration = Duration::from_millis(100);

/// Something half-written here, gone when dropped unless it was moved to its place.
pub(crate) struct Part {
    /// Where it is.
    pub(crate) path: PathBuf,
}

impl Part {
    /// A name beside `target` that nothing has.
    pub(crate) fn beside(target: &Path) -> Self {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        Self { path: target.with_file_name(part_name(&name, &std::process::id().to_string())) }
    }

    /// Where a tree for `dir` is written: inside a directory that is there, since what is beside it may be
    /// another file system, or nobody's to write; else beside it.
    pub(crate) fn of_tree(dir: &Path) -> Self {
        if dir.is_dir() { Self::beside(&dir.join("tree")) } else { Self::beside(dir) }
    }

    /// Moves a directory to its place; into one that is there, entry by entry.
    ///
    /// # Errors
    /// Something there cannot be replaced.
    pub(crate) fn land_directory(&self, target: &Path) -> Result<(), Failure> {
        let landed = if target.is_dir() {
            merge(&self.path, target)
        } else {
            named(target, std::fs::rename(&self.path, target))
        };
        landed.map_err(|error| Failure::io("cannot put the copy in its place", &error))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let Ok(meta) = self.path.symlink_metadata() else { return };
        if !meta.is_dir() {
            let _ = std::fs::remove_file(&self.path);
        } else if std::fs::remove_dir_all(&self.path).is_err() {
            // A directory that nobody may write holds its entries.
            let _ = open_up(&self.path).and_then(|()| std::fs::remove_dir_all(&self.path));
        }
    }
}

fn part_name(name: &str, unique: &str) -> String {
    let name: String = name.chars().take(60).collect();
    format!(".{name}.part-{unique}")
}

fn open_up(dir: &Path) -> io::Result<()> {
    std::fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_up(&entry.path())?;
        }
    }
    Ok(())
}

fn merge(from: &Path, into: &Path) -> io::Result<()> {
    let mode = named(from, from.metadata())?.permissions();
    std::fs::set_permissions(from, Permissions::from_mode(0o700))?;
    for entry in named(from, std::fs::read_dir(from))? {
        let entry = entry?;
        let (source, target) = (entry.path(), into.join(entry.file_name()));
        let is_dir = |path: &Path| path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if is_dir(&source) && is_dir(&target) {
            merge(&source, &target)?;
            named(&target, std::fs::set_permissions(&target, source.metadata()?.permissions()))?;
        } else {
            named(&target, std::fs::rename(&source, &target))?;
        }
    }
    named(from, std::fs::set_permissions(from, mode))
}

/// What a copy has half-written in a sandbox.
#[derive(Default)]
pub(crate) struct RemotePart {
    there: RefCell<Option<There>>,
}

#[derive(Clone)]
struct There {
    sandbox: SandboxId,
    path: String,
    user: Option<String>,
}

impl RemotePart {
    /// A path beside `target`, from now on removed unless it lands.
    pub(crate) fn beside(&self, sandbox: &SandboxId, target: &str, user: Option<&str>) -> String {
        let target = target.trim_end_matches('/');
        let (dir, name) = target.rsplit_once('/').map_or(("", target), |(dir, name)| (dir, name));
        let slash = if target.contains('/') { "/" } else { "" };
        let path = format!("{dir}{slash}{}", part_name(name, &unique()));
        let there = There { sandbox: sandbox.clone(), path: path.clone(), user: user.map(str::to_owned) };
        self.there.replace(Some(there));
        path
    }

    /// Moves it to its place, where nothing must be.
    ///
    /// # Errors
    /// Something is there by now, or the platform does not answer.
    pub(crate) async fn land(&self, context: &Context, target: &str) -> Result<(), Failure> {
        let Some(There { sandbox, path, user }) = self.there.borrow().clone() else { return Ok(()) };
        let to = target.trim_end_matches('/').to_owned();
        context.client.rename(&sandbox, &MoveRequest { from: path, to, overwrite: false, user }).await?;
        self.there.replace(None);
        Ok(())
    }

    /// Removes it, if it is there.
    pub(crate) async fn remove(&self, context: &Context) {
        let Some(There { sandbox, path, user }) = self.there.take() else { return };
        for _ in 0..REMOVE_TRIES {
            match context.client.remove(&sandbox, &path, user.as_deref()).await {
                Err(error) if error.kind() == Some(ErrorKind::NotFound) => return,
                _ => tokio::time::sleep(REMOVE_PAUSE).await,
            }
        }
    }
}

/// Ids of processes on several machines may be the same.
fn unique() -> String {
    let mut bytes = [0; 4];
    match getrandom::fill(&mut bytes) {
        Ok(()) => format!("{:08x}", u32::from_be_bytes(bytes)),
        Err(_) => std::process::id().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_lands_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        {
            let part = Part::beside(&target);
            std::fs::create_dir_all(part.path.join("closed")).unwrap();
            std::fs::set_permissions(part.path.join("closed"), Permissions::from_mode(0o500)).unwrap();
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let part = Part::beside(&target);
        std::fs::create_dir(&part.path).unwrap();
        part.land_directory(&target).unwrap();
        assert!(target.is_dir() && !part.path.exists());
    }

    #[test]
    fn a_tree_goes_into_one_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        std::fs::create_dir_all(target.join("sub")).unwrap();
        std::fs::write(target.join("sub/old"), "old").unwrap();
        std::fs::write(target.join("both"), "old").unwrap();
        let part = Part::of_tree(&target);
        assert_eq!(part.path.parent(), Some(target.as_path()));
        std::fs::create_dir_all(part.path.join("sub/deep")).unwrap();
        std::fs::write(part.path.join("sub/new"), "new").unwrap();
        std::fs::write(part.path.join("both"), "new").unwrap();
        part.land_directory(&target).unwrap();
        let read = |path: &str| std::fs::read_to_string(target.join(path)).unwrap();
        assert_eq!(
            (read("sub/old"), read("sub/new"), read("both")),
            ("old".into(), "new".into(), "new".into())
        );
        assert!(target.join("sub/deep").is_dir());
    }

    #[test]
    fn a_part_in_a_sandbox_is_beside_its_target() {
        let part = RemotePart::default();
        let sandbox = "sb-n1-a".parse().unwrap();
        assert!(part.beside(&sandbox, "/work/src/", None).starts_with("/work/.src.part-"));
        assert!(part.beside(&sandbox, "/src", None).starts_with("/.src.part-"));
        assert!(part.beside(&sandbox, "src", None).starts_with(".src.part-"));
    }
}
