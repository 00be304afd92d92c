//! The programs that this one starts: beside it, else in `PATH`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// The node's program.
pub(super) const EDGE: &str = "dsec-edge";
/// The control plane's program.
pub(crate) const CONTROL: &str = "dsec-control";
/// The program with the simulated nodes.
pub(crate) const SIM: &str = "dsec-sim";

/// Finds a program.
///
/// # Errors
/// It is in neither place.
pub(crate) fn program(name: &str) -> Result<PathBuf, Failure> {
    let here = std::env::current_exe().ok();
    let beside = here.as_deref().and_then(Path::parent);
    find(name, beside, std::env::var_os("PATH").as_deref()).ok_or_else(|| {
        let places = beside.map_or_else(String::new, |dir| format!("in {} nor ", dir.display()));
        Failure::new(format!("the program {name} is neither {places}in PATH"))
            .hint(format!("install it beside `dsec`, or build it: cargo build --release -p {name}"))
    })
}

fn find(name: &str, beside: Option<&Path>, path: Option<&OsStr>) -> Option<PathBuf> {
    let dirs = path.map(std::env::split_paths).into_iter().flatten();
    // An empty or relative entry of PATH must not make root run what lies in the current directory.
    beside
        .map(Path::to_owned)
        .into_iter()
        .chain(dirs.filter(|dir| dir.is_absolute()))
        .map(|dir| dir.join(name))
        .find(|file| {
            use std::os::unix::fs::PermissionsExt;
            file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn beside_comes_first_then_path_and_what_cannot_run_is_passed_over() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let place = |dir: &Path, mode| {
            let file = dir.join("dsec-edge");
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            file
        };
        let path = std::env::join_paths([Path::new("relative"), b.path()]).unwrap();
        assert_eq!(find(EDGE, Some(a.path()), Some(&path)), None);
        let second = place(b.path(), 0o755);
        place(a.path(), 0o644);
        assert_eq!(find(EDGE, Some(a.path()), Some(&path)), Some(second));
        let first = place(a.path(), 0o755);
        assert_eq!(find(EDGE, Some(a.path()), Some(&path)), Some(first));
    }
}
