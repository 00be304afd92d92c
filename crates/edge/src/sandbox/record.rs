//! What is on disk of a sandbox that lives: `STATE/sandboxes/<random>/record.ndjson`, a line for each version of its
//! record, the last of which counts.
//!
//! A version is appended by one `write`; one that was cut off has no end of line, and the one before it counts. Writing
//! aside and renaming would take a new inode each time, five in a short life. Not synced, since a record that a power
//! cut loses belongs to a sandbox that it has ended.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use dsec_backend::Anchor;
use dsec_backend::container::{ContainerSpec, Layer};
use dsec_backend::shelf::Shelf;
use dsec_model::{Limits, SandboxId, State};
use dsec_proto::rest::Sandbox;
use serde::{Deserialize, Serialize};

use super::events;
use crate::idempotency::StoredKey;

const FILE: &str = "record.ndjson";
/// Its next form, while earlier versions are dropped.
const DRAFT: &str = "record.ndjson.new";
/// Bytes of the file from which on earlier versions are dropped.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// What the last pack of the sandbox stored, and where that is written first.
pub const PACKED: &str = "packed";
const PACKED_DRAFT: &str = "packed.new";

/// What the backend was asked for, as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoredSpec {
    /// What the root is made of, the lowest first.
    pub layers: Vec<Layer>,
    /// Limits in force.
    pub limits: Limits,
    /// Environment, `K=V`.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// User.
    pub user: String,
    /// Host name.
    pub hostname: String,
    /// Setuid programs work.
    pub allow_setuid: bool,
}

impl StoredSpec {
    /// As the backend takes it.
    pub fn to_container(&self, id: &SandboxId) -> ContainerSpec {
        ContainerSpec {
            name: id.random().to_owned(),
            layers: self.layers.clone(),
            limits: self.limits.clone(),
            env: self.env.iter().map(|line| line.clone().into_bytes()).collect(),
            cwd: self.cwd.clone().into_bytes(),
            user: self.user.clone(),
            hostname: self.hostname.clone(),
            allow_setuid: self.allow_setuid,
        }
    }
}

/// The file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stored {
    /// The record as callers see it.
    pub sandbox: Sandbox,
    /// What was launched.
    pub spec: StoredSpec,
    /// How to find it again; missing until the launch is done.
    pub anchor: Option<Anchor>,
    /// Boot of the machine that it was made under.
    pub boot_id: String,
    /// The create's idempotency key.
    pub key: Option<StoredKey>,
    /// The replica of control that it is charged to.
    #[serde(default)]
    pub charged_to: String,
}

/// Directory of a sandbox's record.
pub fn directory(state_dir: &Path, random: &str) -> PathBuf {
    state_dir.join("sandboxes").join(random)
}

impl Stored {
    /// Writes it. Blocks for some tens of microseconds.
    ///
    /// # Errors
    /// The disk's; the version before it counts then.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        let dir = directory(state_dir, self.sandbox.id.random());
        let path = dir.join(FILE);
        // The first end of line closes what an edge that was killed may have begun.
        let mut line = b"\n".to_vec();
        serde_json::to_writer(&mut line, &self.as_kept())?;
        line.push(b'\n');
        let open = || File::options().create(true).append(true).open(&path);
        let mut file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(&dir)?;
                open()?
            }
            other => other?,
        };
        if file.metadata()?.len() < FILE_BYTES_MAX {
            return file.write_all(&line);
        }
        let draft = dir.join(DRAFT);
        std::fs::write(&draft, &line)?;
        std::fs::rename(draft, path)
    }

    /// With the states of a pause told by `pauses` alone: an edge of a release that has no such states takes the sandbox over as one
    /// that runs, and lets it run. On the way to a pause and back it runs, for whoever takes it over.
    fn as_kept(&self) -> Self {
        let mut kept = self.clone();
        if kept.sandbox.state.is_usable() {
            kept.sandbox.state = State::Running;
        }
        kept
    }

    /// The last version that was written whole.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(&[][..], |end| &text[..end]);
        let last = whole.rsplit(|byte| *byte == b'\n').find(|line| !line.is_empty());
        let last = last.ok_or("it has no whole version")?;
        let mut stored: Self = serde_json::from_slice(last).map_err(|error| error.to_string())?;
        let is_paused = stored.sandbox.pauses.is_some_and(|pauses| pauses.since_ms.is_some());
        if is_paused && stored.sandbox.state == State::Running {
            stored.sandbox.state = State::Paused;
        }
        Ok(stored)
    }
}

/// Makes the directory of a sandbox to be, out of one that has served where there is one.
///
/// # Errors
/// The disk's.
pub fn make(state_dir: &Path, random: &str, spare: &Shelf) -> io::Result<PathBuf> {
    let dir = directory(state_dir, random);
    if !spare.take(&dir) {
        std::fs::create_dir_all(&dir)?;
    }
    Ok(dir)
}

/// Takes a sandbox's record away, and keeps its directory for another where nothing else is in it.
///
/// # Errors
/// The disk's.
pub fn put_away(state_dir: &Path, random: &str, spare: &Shelf) -> io::Result<()> {
    let dir = directory(state_dir, random);
    let is_plain = std::fs::read_dir(&dir)?.all(|entry| {
        entry.is_ok_and(|entry| [FILE, events::FILE].iter().any(|name| entry.file_name() == *name))
    });
    let empty = |dir: &Path| {
        let truncate = |name| File::options().write(true).truncate(true).open(dir.join(name)).map(drop);
        truncate(FILE).and(truncate(events::FILE))
    };
    if is_plain && spare.put(&dir, empty)? {
        return Ok(());
    }
    remove(state_dir, random)
}

/// Removes the record and its directory, but nothing else that may be in it: that is the backend's,
/// and a mount point among it must not be walked into.
pub fn remove(state_dir: &Path, random: &str) -> io::Result<()> {
    let dir = directory(state_dir, random);
    for file in [FILE, DRAFT, events::FILE, events::DRAFT, PACKED, PACKED_DRAFT] {
        match std::fs::remove_file(dir.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match std::fs::remove_dir(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// All records of a state directory. One that is damaged is put aside, for a person to look at.
///
/// # Errors
/// The directory cannot be read.
pub fn load_all(state_dir: &Path) -> io::Result<Vec<Stored>> {
    let root = state_dir.join("sandboxes");
    std::fs::create_dir_all(&root)?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&root)? {
        let entry = entry?;
        let path = entry.path().join(FILE);
        let bytes = std::fs::read(&path).unwrap_or_default();
        if bytes.is_empty() {
            // A create that was cut off before its first record. The backend sweeps what it had made for it.
            if let Some(random) = entry.file_name().to_str()
                && let Err(error) = remove(state_dir, random)
            {
                tracing::warn!(path = %entry.path().display(), %error, "leftover of a create that was cut off");
            }
            continue;
        }
        match Stored::parse(&bytes) {
            Ok(stored) if entry.file_name().to_str() == Some(stored.sandbox.id.random()) => {
                found.push(stored)
            }
            Ok(_) => put_aside(state_dir, &path, "it names another sandbox"),
            Err(error) => put_aside(state_dir, &path, &error),
        }
    }
    Ok(found)
}

fn put_aside(state_dir: &Path, path: &Path, why: &str) {
    let aside = state_dir.join("damaged");
    let name = path.parent().and_then(Path::file_name).unwrap_or_default();
    let target = aside.join(name).with_extension("ndjson");
    let moved = std::fs::create_dir_all(&aside).and_then(|()| std::fs::rename(path, &target));
    for left in [DRAFT, events::FILE, events::DRAFT, PACKED, PACKED_DRAFT] {
        let _ = std::fs::remove_file(path.with_file_name(left));
    }
    let _ = path.parent().map(std::fs::remove_dir);
    tracing::error!(
        path = %path.display(),
        aside = %target.display(),
        moved = moved.is_ok(),
        error = why,
        "a sandbox's record is damaged; the sandbox is removed"
    );
}
