//! Taking a release in: a tar of three programs, checked against its name before it has one here.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::rest::{
    ApiError, RELEASE_BYTES_MAX, RELEASE_PROGRAMS, ReleaseName, StoredRelease, digest_text,
};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokio::process::Command;

use super::dir::DRAFT;
use super::{Releases, conflict};
use crate::error::{internal, invalid};

/// How long a program may take to say its version, or to look at a configuration.
const WORD_WITHIN: Duration = Duration::from_secs(10);
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;

impl Releases {
    /// Whether a release lies here.
    pub fn has(&self, name: &ReleaseName) -> bool {
        self.dir.edge(name).exists()
    }

    /// A place for an upload, which is gone when it is dropped.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn draft(&self) -> Result<TempDir, ApiError> {
        let made = self.dir.make().and_then(|()| {
            tempfile::Builder::new()
                .prefix(DRAFT)
                .permissions(Permissions::from_mode(0o700))
                .tempdir_in(self.dir.root())
        });
        made.map_err(|error| no_room("a release cannot be kept", &error))
    }

    /// Takes in a release out of an archive that lies in a draft. Blocks.
    ///
    /// # Errors
    /// It is not the one of this name, or the disk is full. Nothing of it is left then.
    pub fn store(
        &self,
        name: &ReleaseName,
        draft: &TempDir,
        archive: &Path,
    ) -> Result<StoredRelease, ApiError> {
        let programs = draft.path().join("programs");
        let sha256_of = unpack(archive, &programs)?;
        let digest = hex(&Sha256::digest(digest_text(&sha256_of).as_bytes()));
        let found = ReleaseName::new(name.version(), &digest)
            .map_err(|error| internal("a digest is none", &error))?;
        if found != *name {
            let message = format!("the archive is that of {found} and was sent as {name}");
            return Err(invalid(message).detail(json!({ "release": name, "sha256": sha256_of })));
        }
        let place = self.dir.release(name);
        let was_there = place.exists();
        if !was_there {
            let moved = fs::rename(&programs, &place).and_then(|()| File::open(self.dir.root())?.sync_all());
            moved.map_err(|error| no_room("a release cannot be kept", &error))?;
            tracing::info!(release = %name, "a release was taken in");
        }
        Ok(StoredRelease { release: name.clone(), was_there })
    }

    /// Sees that programs start and take the configuration, before anything is changed.
    ///
    /// # Errors
    /// They do not; what they said is in the text.
    pub(super) async fn check_programs(
        &self,
        dir: &Path,
        version: &str,
        config: &Path,
    ) -> Result<(), ApiError> {
        for program in ["dsec-edge", "dsec-fill"] {
            let said = word(&dir.join(program), &["--version".as_ref()]).await?;
            if said.trim() != format!("{program} {version}") {
                let message =
                    format!("{program} calls itself {:?} and not \"{program} {version}\"", said.trim());
                return Err(bad(message));
            }
        }
        // Started by hand it has nothing to serve and ends; what cannot be executed does not come as far.
        run(&dir.join("dsec-aether"), &[]).await?;
        check_config(&dir.join("dsec-edge"), config).await
    }
}

/// Has an edge look at a configuration.
///
/// # Errors
/// It would not start with it.
pub(super) async fn check_config(edge: &Path, config: &Path) -> Result<(), ApiError> {
    word(edge, &["check".as_ref(), "--config".as_ref(), config.as_os_str()]).await.map(drop)
}

/// What a program writes, which must end well.
async fn word(program: &Path, args: &[&std::ffi::OsStr]) -> Result<String, ApiError> {
    let output = run(program, args).await?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.trim().chars().take(1000).collect();
    let (name, args) = (shown(program), args.join(" ".as_ref()).to_string_lossy().into_owned());
    Err(bad(format!("`{name} {args}` ended with {}: {said}", output.status)))
}

async fn run(program: &Path, args: &[&std::ffi::OsStr]) -> Result<std::process::Output, ApiError> {
    let name = shown(program);
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(WORD_WITHIN, command.output()).await {
        Ok(Ok(output)) => Ok(output),
        Ok(Err(error)) => Err(bad(format!("{name} cannot be run: {error}"))),
        Err(_) => Err(bad(format!("{name} did not answer within {} s", WORD_WITHIN.as_secs()))),
    }
}

fn shown(program: &Path) -> String {
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

fn bad(message: String) -> ApiError {
    conflict(format!("the programs are not taken: {message}"))
}

/// Unpacks the programs, and those only, and gives the SHA-256 of each.
fn unpack(archive: &Path, into: &Path) -> Result<BTreeMap<String, String>, ApiError> {
    let broken = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            no_room("a release cannot be kept", &error)
        }
        _ => invalid(format!("the archive is no tar of a release: {error}")),
    };
    fs::create_dir(into).map_err(broken)?;
    fs::set_permissions(into, Permissions::from_mode(0o700)).map_err(broken)?;
    let mut tar = tar::Archive::new(File::open(archive).map_err(broken)?);
    let (mut sha256_of, mut left) = (BTreeMap::new(), RELEASE_BYTES_MAX);
    for entry in tar.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let path: PathBuf = entry.path().map_err(broken)?.into_owned();
        let known = RELEASE_PROGRAMS.into_iter().find(|program| Path::new(program) == path);
        let Some(program) = known.filter(|_| entry.header().entry_type().is_file()) else {
            let message = format!("the archive has {} in it, which is no file of a release", path.display());
            return Err(invalid(message).hint(format!("a release has {}", RELEASE_PROGRAMS.join(", "))));
        };
        if sha256_of.contains_key(program) {
            return Err(invalid(format!("the archive has {program} twice")));
        }
        let sha256 = copy(&mut entry, &into.join(program), &mut left).map_err(broken)?;
        sha256_of.insert(program.to_owned(), sha256);
    }
    if let Some(missing) = RELEASE_PROGRAMS.into_iter().find(|program| !sha256_of.contains_key(*program)) {
        return Err(invalid(format!("the archive has no {missing}")));
    }
    File::open(into).and_then(|dir| dir.sync_all()).map_err(broken)?;
    Ok(sha256_of)
}

/// Copies a program, written through, and gives its SHA-256.
fn copy(from: &mut impl Read, to: &Path, left: &mut u64) -> io::Result<String> {
    let (mut file, mut hash, mut chunk) = (File::create_new(to)?, Sha256::new(), vec![0; CHUNK]);
    loop {
        let read = from.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        *left =
            left.checked_sub(read as u64).ok_or_else(|| io::Error::other("its programs are too large"))?;
        hash.update(&chunk[..read]);
        file.write_all(&chunk[..read])?;
    }
    file.set_permissions(Permissions::from_mode(0o755))?;
    file.sync_all()?;
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn no_room(what: &str, error: &io::Error) -> ApiError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ApiError::new(ErrorKind::ResourceExhausted, "the node's disk has no room for the release")
                .hint("free some space where its state directory lies")
        }
        _ => internal(what, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(dir: &Path, files: &[(&str, &str)]) -> PathBuf {
        let path = dir.join("archive");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        for (name, text) in files {
            let mut header = tar::Header::new_ustar();
            header.set_size(text.len() as u64);
            header.set_mode(0o4777);
            header.set_cksum();
            tar.append_data(&mut header, name, text.as_bytes()).unwrap();
        }
        tar.finish().unwrap();
        path
    }

    #[test]
    fn three_programs_come_out_and_nobody_but_root_writes_them() {
        let dir = tempfile::tempdir().unwrap();
        let (into, whole) = (dir.path().join("out"), RELEASE_PROGRAMS.map(|program| (program, "x")));
        let sha256_of = unpack(&archive(dir.path(), &whole), &into).unwrap();
        assert_eq!(sha256_of.keys().map(String::as_str).collect::<Vec<_>>(), RELEASE_PROGRAMS);
        assert_eq!(sha256_of["dsec-edge"], hex(&Sha256::digest(b"x")));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&into), mode(&into.join("dsec-edge"))), (0o700, 0o755));
    }

    #[test]
    fn what_is_no_release_is_refused_by_name() {
        let whole = RELEASE_PROGRAMS.map(|program| (program, "x"));
        let with = |more: (&'static str, &'static str)| [whole.as_slice(), &[more]].concat();
        for (files, word) in [
            (whole[..2].to_vec(), "has no dsec-fill"),
            (with(("etc/passwd", "x")), "etc/passwd"),
            (with(("dsec-edge", "y")), "dsec-edge twice"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let error = unpack(&archive(dir.path(), &files), &dir.path().join("out")).unwrap_err();
            assert!(error.0.message.contains(word), "{}", error.0.message);
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("archive"), "no tar at all").unwrap();
        unpack(&dir.path().join("archive"), &dir.path().join("out")).unwrap_err();
    }
}
