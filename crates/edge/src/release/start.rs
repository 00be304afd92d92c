//! Becoming the chosen program: at the start of the installed one, and in the midst of a change.
//!
//! Whoever keeps the edge running, `dsec up`, systemd or a kubelet, starts the installed program and knows of no other. It looks here
//! first, and becomes what was chosen. Becoming is `execve`: the process stays the same to whoever watches it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use dsec_proto::rest::{NodeChange, Programs};
use rustix::process::{Pid, WaitOptions, waitpid};
use serde::Deserialize;

use super::choice::{Choice, Installed};
use super::dir::ReleaseDir;
use super::guard;
use crate::clock::now_ms;
use crate::lock::{LockError, StateLock};

/// Says to a program that it is the chosen one: it looks no further.
const CHOSEN: &str = "DSEC_EDGE_CHOSEN";

/// What has to be known of a configuration before the program is chosen that reads the rest of it: a newer one may have keys that the
/// installed one does not know.
#[derive(Deserialize)]
struct Place {
    state_dir: PathBuf,
}

/// Why a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To serve the node: it may be a trial's start.
    Serve,
    /// For something else, by the program that serves.
    Other,
}

/// Becomes the chosen program, or returns: this is it. What keeps it from being chosen is logged, and this one goes on, so that a node
/// has an edge whatever lies in its state.
pub fn become_chosen(config: &Path, purpose: Purpose) {
    if std::env::var_os(CHOSEN).is_some() {
        return;
    }
    if let Err(error) = choose(config, purpose) {
        let error = format!("{error:#}");
        tracing::error!(error, "the chosen release is not run; the installed program is");
    }
}

fn choose(config: &Path, purpose: Purpose) -> anyhow::Result<()> {
    let Some(Place { state_dir }) =
        std::fs::read_to_string(config).ok().and_then(|text| toml::from_str(&text).ok())
    else {
        // Whoever reads it in earnest says what is wrong with it.
        return Ok(());
    };
    let dir = ReleaseDir::new(&state_dir);
    let own = std::env::current_exe().context("this program's path is unknown")?;
    if dir.release_of(&own).is_some() {
        return Ok(());
    }
    let Some(mut choice) = dir.load().with_context(|| format!("{}", dir.choice_file().display()))? else {
        return Ok(());
    };
    if purpose == Purpose::Serve {
        // Two that start at once must not count as two starts of a trial.
        let _lock = match StateLock::take(&state_dir) {
            Err(LockError::Held { .. }) => return Ok(()),
            lock => lock?,
        };
        count_start(&mut choice, &dir, config, &own)?;
    }
    let Programs::Release(name) = choice.to_run() else { return Ok(()) };
    let program = dir.edge(name);
    let error = exec(&program, std::env::args_os().skip(1));
    Err(error).with_context(|| format!("{} cannot be run", program.display()))
}

/// Takes down that an edge starts, and puts the configuration back if that ends a trial of one.
fn count_start(choice: &mut Choice, dir: &ReleaseDir, config: &Path, own: &Path) -> anyhow::Result<()> {
    let (before, installed) = (choice.clone(), Installed::of(own)?);
    let ended = if choice.installed.as_ref() == Some(&installed) {
        choice.started(now_ms())
    } else {
        tracing::warn!(chosen = %choice.chosen, "other programs were installed since this was chosen: they are run");
        choice.reinstalled(installed, now_ms())
    };
    if let (Some(change), Some(failed)) = (&ended, &choice.failed) {
        tracing::error!(%change, why = failed.why, "a change was gone back from");
        if matches!(change, NodeChange::Config(_)) {
            dir.put_config_back(config).context("the configuration of before cannot be put back")?;
        }
    }
    if *choice != before {
        dir.save(choice).with_context(|| format!("{} cannot be written", dir.choice_file().display()))?;
    }
    Ok(())
}

/// Becomes what is to run now, in the midst of a change. Everything of this process that is not on disk ends. On return it could not,
/// and the process must end: whoever keeps it running starts it anew, and it goes back.
pub fn become_next(state_dir: &Path, config: &Path) -> anyhow::Error {
    match next(state_dir, config) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn next(state_dir: &Path, config: &Path) -> anyhow::Result<std::convert::Infallible> {
    let dir = ReleaseDir::new(state_dir);
    let mut choice = dir.load()?.unwrap_or_default();
    if let Some(trial) = &mut choice.trial {
        trial.starts = 1;
        let left = Duration::from_millis(trial.until_ms.saturating_sub(now_ms()));
        dir.save(&choice)?;
        guard::leave(state_dir, left).context("nobody can be left to watch the trial")?;
    }
    let program = match choice.to_run() {
        Programs::Release(name) => dir.edge(name),
        Programs::Installed => match &choice.installed {
            Some(installed) => installed.path.clone(),
            None => std::env::current_exe()?,
        },
    };
    let args = ["run".into(), "--config".into(), config.as_os_str().to_owned()];
    let error = exec(&program, args.into_iter());
    Err(error).with_context(|| format!("{} cannot be run", program.display()))
}

fn exec(program: &Path, args: impl Iterator<Item = OsString>) -> io::Error {
    Command::new(program).args(args).env(CHOSEN, "1").stdin(Stdio::null()).exec()
}

/// Children of the program that was in this process before: nobody else waits for them.
#[derive(Debug)]
pub struct Inherited(Vec<Pid>);

impl Inherited {
    /// Those that there are now: to be asked for before any is started.
    pub fn find() -> Self {
        let pid = std::process::id();
        let children = std::fs::read_to_string(format!("/proc/self/task/{pid}/children")).unwrap_or_default();
        let pids = children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
        Self(pids.collect())
    }

    /// Waits for them, each in a thread of its own, so that their ends leave nothing.
    pub fn reap(self) {
        for pid in self.0 {
            std::thread::spawn(move || waitpid(Some(pid), WaitOptions::empty()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node whose configuration is on trial, after so many starts of an edge.
    fn tried(starts: usize) -> (tempfile::TempDir, Choice) {
        let state = tempfile::tempdir().unwrap();
        let (dir, config) = (ReleaseDir::new(state.path()), state.path().join("edge.toml"));
        dir.keep_config("max_sandboxes = 7").unwrap();
        std::fs::write(&config, "max_sandboxes = 9").unwrap();
        let own = std::env::current_exe().unwrap();
        let mut choice = Choice { installed: Some(Installed::of(&own).unwrap()), ..Choice::default() };
        choice.begin(NodeChange::Config("0".to_owned()), now_ms() + 60_000, 0);
        for _ in 0..starts {
            count_start(&mut choice, &dir, &config, &own).unwrap();
        }
        assert_eq!(dir.load().unwrap(), (starts > 0).then(|| choice.clone()));
        (state, choice)
    }

    fn config(state: &tempfile::TempDir) -> String {
        std::fs::read_to_string(state.path().join("edge.toml")).unwrap()
    }

    #[test]
    fn a_configuration_with_which_an_edge_ended_is_put_back_at_the_next_start() {
        let (state, choice) = tried(1);
        assert_eq!((config(&state).as_str(), choice.trial.unwrap().starts), ("max_sandboxes = 9", 1));
        for starts in [2, 3] {
            let (state, choice) = tried(starts);
            assert_eq!((config(&state).as_str(), choice.trial), ("max_sandboxes = 7", None));
        }
    }

    #[test]
    fn other_programs_in_the_place_of_the_installed_ones_end_a_trial() {
        let (state, mut choice) = tried(1);
        let other = state.path().join("other");
        std::fs::write(&other, "x").unwrap();
        let (dir, file) = (ReleaseDir::new(state.path()), state.path().join("edge.toml"));
        count_start(&mut choice, &dir, &file, &other).unwrap();
        assert_eq!((config(&state).as_str(), &choice.trial), ("max_sandboxes = 7", &None));
        assert_eq!(*choice.to_run(), Programs::Installed);
    }
}
