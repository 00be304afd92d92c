//! The guard of a trial: a process of the program of before, which ends the one that tries if that stands still beyond its time. A
//! program on trial goes back by itself as a rule; this is for one that cannot even do that.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::process;

use super::dir::ReleaseDir;

/// How often it looks whether the trial is over.
const LOOK: Duration = Duration::from_millis(200);
/// What the one that tries has, beyond its time, to go back by itself.
const GRACE: Duration = Duration::from_secs(5);
/// The subcommand that is a guard.
pub const SUBCOMMAND: &str = "guard-trial";

/// Leaves a guard behind, which this process is about to be watched by as another program.
///
/// # Errors
/// It cannot be started.
pub(super) fn leave(state_dir: &Path, left: Duration) -> io::Result<()> {
    let within_ms = (left + GRACE).as_millis().to_string();
    Command::new(std::env::current_exe()?)
        .arg(SUBCOMMAND)
        .arg("--state-dir")
        .arg(state_dir)
        .args(["--pid", &std::process::id().to_string(), "--within-ms", &within_ms])
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .map(drop)
}

/// Watches an edge until its trial is over, and ends it if that is not so in time. True: it was ended.
///
/// # Errors
/// It cannot be watched.
pub fn watch(state_dir: &Path, pid: i32, within: Duration) -> io::Result<bool> {
    let (dir, began) = (ReleaseDir::new(state_dir), Instant::now());
    let on_trial = || dir.load().is_ok_and(|choice| choice.is_some_and(|choice| choice.trial.is_some()));
    let Ok(edge) = process::open_pidfd(pid) else { return Ok(false) };
    while on_trial() {
        if process::wait_for_end(edge.as_fd(), LOOK)? {
            return Ok(false);
        }
        if began.elapsed() >= within && on_trial() {
            tracing::error!(pid, "an edge on trial stands still and is ended");
            process::kill(edge.as_fd());
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use dsec_proto::rest::{NodeChange, Programs};

    use super::super::choice::Choice;
    use super::*;

    fn state(on_trial: bool) -> tempfile::TempDir {
        let state = tempfile::tempdir().unwrap();
        let mut choice = Choice::default();
        if on_trial {
            choice.begin(NodeChange::Programs(Programs::Installed), u64::MAX, 0);
        }
        ReleaseDir::new(state.path()).save(&choice).unwrap();
        state
    }

    fn edge() -> std::process::Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    #[test]
    fn an_edge_that_stands_still_on_trial_is_ended_and_one_that_was_kept_is_not() {
        let mut still = edge();
        assert!(watch(state(true).path(), still.id() as i32, Duration::from_millis(1)).unwrap());
        assert!(!still.wait().unwrap().success());
        let mut kept = edge();
        assert!(!watch(state(false).path(), kept.id() as i32, Duration::ZERO).unwrap());
        assert_eq!(kept.try_wait().unwrap(), None);
        kept.kill().unwrap();
        kept.wait().unwrap();
    }

    #[test]
    fn an_edge_that_ended_is_watched_no_longer() {
        let mut gone = edge();
        gone.kill().unwrap();
        assert!(!watch(state(true).path(), gone.id() as i32, Duration::from_secs(60)).unwrap());
        gone.wait().unwrap();
    }
}
