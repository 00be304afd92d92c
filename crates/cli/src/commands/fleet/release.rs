//! A release as it lies with whoever sends it: three programs in a directory or a tar.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use dsec_proto::rest::{RELEASE_BYTES_MAX, RELEASE_PROGRAMS, ReleaseName, digest_text};
use sha2::{Digest as _, Sha256};
use tempfile::{NamedTempFile, TempDir};

use crate::failure::Failure;

/// The program that is asked for the version.
const EDGE: &str = "dsec-edge";

/// A release, ready to be sent.
#[derive(Debug)]
pub(super) struct Release {
    /// Its name.
    pub(super) name: ReleaseName,
    /// A tar of its programs.
    pub(super) archive: NamedTempFile,
    /// Bytes of that.
    pub(super) length: u64,
}

impl Release {
    /// Reads one.
    ///
    /// # Errors
    /// It has not the three programs, or its edge does not say its version.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        if path.is_dir() {
            return Self::of_dir(path);
        }
        let unpacked = unpacked(path)?;
        Self::of_dir(unpacked.path())
    }

    fn of_dir(dir: &Path) -> Result<Self, Failure> {
        let mut sha256_of = BTreeMap::new();
        let archive =
            NamedTempFile::new().map_err(|error| Failure::io("cannot make a temporary file", &error))?;
        let mut tar = tar::Builder::new(archive.as_file());
        for program in RELEASE_PROGRAMS {
            let path = dir.join(program);
            let failed =
                |error: std::io::Error| Failure::io(format!("cannot read {}", path.display()), &error);
            let mut file = File::open(&path).map_err(|error| {
                failed(error).hint(format!("a release has {}", RELEASE_PROGRAMS.join(", ")))
            })?;
            sha256_of.insert(program.to_owned(), sha256(&mut file).map_err(failed)?);
            let mut header = tar::Header::new_gnu();
            header.set_size(file.metadata().map_err(failed)?.len());
            header.set_mode(0o755);
            let file = File::open(&path).map_err(failed)?;
            tar.append_data(&mut header, program, file).map_err(failed)?;
        }
        tar.finish().map_err(|error| Failure::io("cannot write a temporary file", &error))?;
        drop(tar);
        let length = archive.as_file().metadata().map_or(0, |meta| meta.len());
        if length > RELEASE_BYTES_MAX {
            let message = format!("the programs have {length} bytes; nodes take {RELEASE_BYTES_MAX}");
            return Err(Failure::usage(message).hint("strip them: `strip dsec-edge dsec-fill`"));
        }
        let digest = hex(&Sha256::digest(digest_text(&sha256_of).as_bytes()));
        let name = ReleaseName::new(&version(&dir.join(EDGE))?, &digest)
            .map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Self { name, archive, length })
    }
}

fn sha256(file: &mut File) -> std::io::Result<String> {
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; 256 << 10]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&chunk[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What an edge says that it is.
fn version(edge: &Path) -> Result<String, Failure> {
    let failed = |what: String| {
        Failure::new(format!("{} does not say its version: {what}", edge.display()))
            .hint("call this on a machine of the nodes' kind")
    };
    let output = Command::new(edge).arg("--version").output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match said.strip_prefix(EDGE).map(str::trim) {
        Some(version) if output.status.success() && !version.is_empty() => Ok(version.to_owned()),
        _ => Err(failed(format!("it said {said:?} and ended with {}", output.status))),
    }
}

/// The programs out of a tar, in whatever directory they are in it.
fn unpacked(path: &Path) -> Result<TempDir, Failure> {
    let failed = |error: std::io::Error| Failure::io(format!("cannot read {}", path.display()), &error);
    let dir = TempDir::new().map_err(|error| Failure::io("cannot make a temporary directory", &error))?;
    let mut tar = tar::Archive::new(File::open(path).map_err(failed)?);
    for entry in tar.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let name = entry.path().map_err(failed)?.file_name().map(ToOwned::to_owned).unwrap_or_default();
        let Some(program) = RELEASE_PROGRAMS.into_iter().find(|program| name == **program) else { continue };
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let to = dir.path().join(program);
        let mut file = File::create_new(&to).map_err(|error| {
            Failure::io(format!("{} has {program} twice, or cannot be unpacked", path.display()), &error)
        })?;
        std::io::copy(&mut entry, &mut file).map_err(failed)?;
        file.set_permissions(PermissionsExt::from_mode(0o755)).map_err(failed)?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(dir: &Path) {
        for program in RELEASE_PROGRAMS {
            let path = dir.join(program);
            std::fs::write(&path, format!("#!/bin/sh\necho {program} 1.2.3\n")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        }
    }

    #[test]
    fn a_directory_and_a_tar_of_it_are_one_release() {
        let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        programs(dir.path());
        let of_dir = Release::read(dir.path()).unwrap();
        assert_eq!(of_dir.name.version(), "1.2.3");
        let path = other.path().join("release.tar");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        tar.append_dir_all("dsec-1.2.3/bin", dir.path()).unwrap();
        tar.finish().unwrap();
        assert_eq!(Release::read(&path).unwrap().name, of_dir.name);
        std::fs::write(dir.path().join("dsec-fill"), "other").unwrap();
        assert_ne!(Release::read(dir.path()).unwrap().name, of_dir.name);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = TempDir::new().unwrap();
        programs(dir.path());
        std::fs::remove_file(dir.path().join("dsec-fill")).unwrap();
        let failure = Release::read(dir.path()).unwrap_err();
        assert!(failure.message.contains("dsec-fill"), "{}", failure.message);
    }
}
