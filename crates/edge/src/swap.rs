//! The node's swap, where paused sandboxes' memory goes: a file of the state directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dsec_proto::rest::{Feature, FeatureState};
use dsec_sys::swap;

fn file_of(state_dir: &Path) -> PathBuf {
    state_dir.join("swap")
}

/// Has the kernel swap to a file of `bytes`; 0: to none of this node's. A file that it swaps to already stays, whatever its size: to
/// change that the node is taken down first. Blocks for a moment.
///
/// # Errors
/// The disk has no room for it, or its file system cannot hold swap.
pub fn set_up(state_dir: &Path, bytes: u64) -> io::Result<()> {
    let file = file_of(state_dir);
    if bytes == 0 || swap::is_on(&file)? {
        return Ok(());
    }
    swap::make(&file, bytes)?;
    swap::on(&file).inspect_err(|_| {
        let _of_no_use = fs::remove_file(&file);
    })?;
    tracing::info!(bytes, "swap for paused sandboxes is on");
    Ok(())
}

/// Takes the node's swap back, if it has any. No sandbox is left.
///
/// # Errors
/// The kernel goes on to swap there.
pub fn take_down(state_dir: &Path) -> io::Result<()> {
    let file = file_of(state_dir);
    if swap::is_on(&file)? {
        swap::off(&file)?;
    }
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What the machine has, for `dsec doctor`.
pub fn feature() -> Feature {
    let purpose = "takes the memory of paused sandboxes".to_owned();
    let name = "swap".to_owned();
    match swap::size() {
        Ok((all @ 1.., free)) => {
            let found = format!("{} MiB, {} MiB of them free", all >> 20, free >> 20);
            Feature { name, purpose, state: FeatureState::Works, found, remedy: String::new() }
        }
        looked => {
            let found = looked.map_or_else(|error| error.to_string(), |_| "the machine has none".to_owned());
            let remedy =
                "a pause stops processes and gives no memory back; set size_mib in [swap] of edge.toml"
                    .to_owned();
            Feature { name, purpose, state: FeatureState::Degraded, found, remedy }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_is_set_up_once_found_again_and_taken_back() {
        let state = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
        let own = || swap::size_of(&file_of(state.path())).unwrap();
        set_up(state.path(), 0).unwrap();
        assert_eq!(own(), None);
        set_up(state.path(), 8 << 20).unwrap();
        let with = own();
        // As after a restart of the edge, with other settings: it is in use.
        set_up(state.path(), 16 << 20).unwrap();
        let again = own();
        take_down(state.path()).unwrap();
        assert!(with.is_some() && again == with, "{with:?} {again:?}");
        assert!(!file_of(state.path()).exists());
        take_down(state.path()).unwrap();
    }
}
