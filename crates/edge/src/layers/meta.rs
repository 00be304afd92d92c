//! What is on the node's disk of the layers that are here, for this edge and the one after it.
//!
//! ```text
//! meta/<id>.json    the manifest, and whether its mount reads through the device
//! meta/<id>.erofs   the metadata image, which is mounted
//! ```
//!
//! The note comes first and goes last, so whatever a killed edge left is known to the next one.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use dsec_image::layer::{LayerId, Manifest};
use serde::{Deserialize, Serialize};

/// What is noted of a layer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Note {
    pub(super) manifest: Manifest,
    /// Not all of its content was complete when it was last made ready.
    pub(super) is_partial: bool,
}

/// The directory.
pub(super) struct Meta(PathBuf);

impl Meta {
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }

    pub(super) fn image(&self, id: &LayerId) -> PathBuf {
        self.0.join(format!("{id}.erofs"))
    }

    fn note_of(&self, id: &LayerId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Notes a layer, in place of what was noted.
    pub(super) fn note(&self, id: &LayerId, note: &Note) -> io::Result<()> {
        self.write(&self.note_of(id), &serde_json::to_vec(note).map_err(io::Error::other)?)
    }

    /// Keeps a layer's metadata image, which is noted.
    pub(super) fn keep(&self, id: &LayerId, image: &[u8]) -> io::Result<()> {
        self.write(&self.image(id), image)
    }

    /// What is noted of a layer.
    pub(super) fn noted(&self, id: &LayerId) -> Option<Note> {
        let note: Note = serde_json::from_slice(&std::fs::read(self.note_of(id)).ok()?).ok()?;
        note.manifest.id().is_ok_and(|found| found == *id).then_some(note)
    }

    /// All layers that are noted. Images without a note are nobody's and removed.
    pub(super) fn all(&self) -> io::Result<Vec<(LayerId, Note)>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.0)? {
            let path = entry?.path();
            let id = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse().ok());
            match id.and_then(|id| Some((id, self.noted(&id)?))) {
                None => std::fs::remove_file(&path)?,
                Some(noted) if path.extension().is_some_and(|extension| extension == "json") => {
                    all.push(noted)
                }
                Some(_) => {}
            }
        }
        Ok(all)
    }

    /// Removes what is here of a layer that is not mounted.
    pub(super) fn remove(&self, id: &LayerId) {
        for path in [self.image(id), self.note_of(id)] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "a removed layer's file stays");
                }
                _ => {}
            }
        }
    }

    /// Beside it first, so that a file under its name is whole.
    fn write(&self, target: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut draft = tempfile::NamedTempFile::new_in(&self.0)?;
        draft.write_all(bytes)?;
        draft.as_file().sync_data()?;
        draft.persist(target)?;
        Ok(())
    }
}
