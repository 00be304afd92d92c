//! What this host can do, as `dsec doctor` and the node's status show it.

use std::path::Path;

use dsec_backend::container::Probe;
use dsec_proto::rest::{Feature, FeatureState};

/// The backend's probes as features.
pub fn features(probes: Vec<Probe>) -> Vec<Feature> {
    probes.into_iter().map(feature).collect()
}

fn feature(probe: Probe) -> Feature {
    let (state, found) = match probe.found {
        Ok(found) => (FeatureState::Works, found),
        Err(found) if probe.needed => (FeatureState::Missing, found),
        Err(found) => (FeatureState::Degraded, found),
    };
    let remedy = if state == FeatureState::Works { String::new() } else { probe.remedy.to_owned() };
    Feature { name: probe.name.to_owned(), purpose: probe.purpose.to_owned(), state, found, remedy }
}

/// The edge's own checks: its files. The rest the backend tries itself.
pub fn own(aether: &Path, fill: &Path, state_dir: &Path) -> Vec<Feature> {
    let check = |name: &str, purpose: &str, found: Result<String, String>, remedy: String| {
        let (state, found, remedy) = match found {
            Ok(found) => (FeatureState::Works, found, String::new()),
            Err(found) => (FeatureState::Missing, found, remedy),
        };
        Feature { name: name.to_owned(), purpose: purpose.to_owned(), state, found, remedy }
    };
    let program = |path: &Path| {
        std::fs::metadata(path)
            .map(|meta| format!("{} ({} bytes)", path.display(), meta.len()))
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    let state = nearest(state_dir)
        .map(|dir| format!("{} is on a plain file system", dir.display()))
        .map_err(|found| format!("{}: {found}", state_dir.display()));
    vec![
        check(
            "agent",
            "runs inside every sandbox",
            program(aether),
            "install dsec-aether beside dsec-edge, or set `aether` in edge.toml".to_owned(),
        ),
        check(
            "fill",
            "brings content of layers to the node",
            program(fill),
            "install dsec-fill beside dsec-edge, or set `fill` in edge.toml".to_owned(),
        ),
        check(
            "state_dir",
            "images are mounted from files in it",
            state,
            "put state_dir on ext4, XFS or btrfs".to_owned(),
        ),
    ]
}

/// The layer store: what is wrong with it, if anything is.
pub fn store(url: &str, problem: Option<String>) -> Feature {
    let (state, found, remedy) = match problem {
        None => (FeatureState::Works, format!("{url} answers"), String::new()),
        Some(problem) => {
            let remedy = "see that it is mounted or its server runs; the node takes it up when it answers";
            (FeatureState::Missing, format!("{url} is away: {problem}"), remedy.to_owned())
        }
    };
    let purpose = "has the layers that sandboxes are made of".to_owned();
    Feature { name: "store".to_owned(), purpose, state, found, remedy }
}

/// The nearest directory that is there, unless its file system cannot hold mounted images.
/// Source: measured, file-backed EROFS on overlayfs and EROFS fails with ENOTBLK.
fn nearest(dir: &Path) -> Result<&Path, String> {
    const OVERLAYFS: u64 = 0x794c_7630;
    const EROFS: u64 = 0xe0f5_e1e2;
    let there = dir.ancestors().find(|path| path.exists()).ok_or("no part of it exists")?;
    let fs = rustix::fs::statfs(there).map_err(|errno| errno.to_string())?;
    match fs.f_type as u64 {
        OVERLAYFS => Err("it lies on overlayfs, where EROFS images cannot be mounted from".to_owned()),
        EROFS => Err("it lies on EROFS, which cannot be written".to_owned()),
        _ => Ok(there),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_and_fails_is_missing_and_the_rest_is_degraded() {
        let probe = |found: Result<String, String>, needed| Probe {
            name: "x",
            purpose: "p",
            found,
            needed,
            remedy: "do",
        };
        let state = |p| feature(p).state;
        assert_eq!(state(probe(Ok("ok".into()), true)), FeatureState::Works);
        assert_eq!(state(probe(Err("no".into()), true)), FeatureState::Missing);
        assert_eq!(state(probe(Err("no".into()), false)), FeatureState::Degraded);
    }
}
