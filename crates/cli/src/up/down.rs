//! `dsec down`.

use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::Signal;

use super::identity::{Identity, Lock, Locked, Processes};
use super::process::Program;
use super::settings::Settings;
use super::state::StateDir;
use super::supervisor::{DownOutput, PATIENCE, edge_down, forget};
use super::{DEFAULT_STATE_DIR, edge_program, locate, need_root, reach};
use crate::client::{Client, ListQuery};
use crate::config::{self, Target};
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const DOWN_EXAMPLES: &str = "\
Examples:
  sudo dsec down
  sudo dsec down --state-dir /srv/dsec

Every sandbox ends. Images, the root key and the config file stay.";

/// Longest wait for a supervisor to take the platform down. Thousands of sandboxes take a minute.
const LIMIT: Duration = Duration::from_secs(600);
/// Time between two looks at its progress.
const LOOK: Duration = Duration::from_millis(200);
/// Time between two words about it where it says none itself.
const REMIND: Duration = Duration::from_secs(10);
/// Longest wait for the number of sandboxes, which is only for show.
const COUNT_TIMEOUT: Duration = Duration::from_secs(1);

/// `dsec down`.
#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    /// Directory that `dsec up` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
}

/// Ends the platform of a state directory.
pub(crate) async fn down(args: DownArgs, json: bool) -> Outcome {
    need_root("dsec down")?;
    let state = StateDir::new(&args.state_dir)?;
    let was_running = take_down(&state).await?;
    if json {
        render::json(&serde_json::json!({ "was_running": was_running, "state_dir": state.root() }))?;
    } else if was_running {
        render::line("down: no sandbox and no process of the platform is left")?;
        let config = config::path().map(|path| path.display().to_string()).unwrap_or_default();
        render::line(&format!(
            "images and keys stay in {}, and the config file {config} too",
            state.root().display()
        ))?;
    } else {
        render::line(&format!("nothing was running on {}", state.root().display()))?;
    }
    Ok(0)
}

async fn take_down(state: &StateDir) -> Result<bool, Failure> {
    let holder = match Lock::take(state, false)? {
        None => return Ok(false),
        // Held to the end: nobody starts the platform beside us.
        Some(Locked::Ours(lock)) => return clean(state, lock).await,
        Some(Locked::Theirs(holder)) => holder.filter(|holder| holder.alive()),
    };
    let Some(holder) = holder else {
        let dir = state.root().display();
        return Err(Failure::new(format!("{dir} is locked by a process that has not said who it is"))
            .hint("another `dsec up` or `dsec down` is at work; try again when it is done"));
    };
    announce(state).await;
    ask(state, holder).await?;
    // The supervisor is gone. What it could not do is done here.
    if let Some(Locked::Ours(lock)) = Lock::take(state, false)? {
        clean(state, lock).await?;
    }
    Ok(true)
}

/// Takes down what a supervisor left that was killed. True: there was something.
async fn clean(state: &StateDir, lock: Lock) -> Result<bool, Failure> {
    let Some(left) = Processes::read(&state.processes()) else { return Ok(false) };
    render::note("dsec: the supervisor is gone and did not finish; taking down what it left");
    let edge: Program = edge_program(locate::program(locate::EDGE)?, state);
    if let Some(control) = left.control {
        control.terminate(PATIENCE).await;
    }
    let down = edge_down(&edge, state, DownOutput::Inherited).await;
    if let Some(edge) = left.edge {
        edge.terminate(PATIENCE).await;
    }
    down?;
    if let Some((name, identity)) = left.alive().first() {
        return Err(Failure::new(format!("{name} (pid {}) does not end, not even by SIGKILL", identity.pid))
            .hint("see its state in /proc; a process in uninterruptible sleep waits for the kernel"));
    }
    forget(state);
    drop(lock);
    Ok(true)
}

/// Asks the supervisor, and shows what goes on until it has ended.
async fn ask(state: &StateDir, supervisor: Identity) -> Result<(), Failure> {
    let log = state.log("down");
    // An old log is not this time's progress.
    let _ = std::fs::remove_file(&log);
    supervisor.signal(Signal::TERM);
    let (start, mut shown, mut spoke) = (Instant::now(), 0u64, Instant::now());
    while !supervisor.ended_within(LOOK).await {
        if let Some(text) = new_text(&log, &mut shown) {
            render::note(text.trim_end());
            spoke = Instant::now();
        }
        if spoke.elapsed() > REMIND {
            render::note(&format!("dsec: still ending sandboxes ({} s)", start.elapsed().as_secs()));
            spoke = Instant::now();
        }
        if start.elapsed() > LIMIT {
            return Err(Failure::new(format!(
                "the supervisor (pid {}) has not ended after {} s",
                supervisor.pid,
                LIMIT.as_secs()
            ))
            .hint(format!(
                "its log is {}; kill -9 it and run `dsec down` again",
                state.log("up").display()
            )));
        }
    }
    if let Some(text) = new_text(&log, &mut shown) {
        render::note(text.trim_end());
    }
    Ok(())
}

/// Whole lines that were added to a file since the last look.
fn new_text(path: &std::path::Path, shown: &mut u64) -> Option<String> {
    let mut file = std::fs::File::open(path).ok()?;
    file.seek(SeekFrom::Start(*shown)).ok()?;
    let mut bytes = Vec::new();
    file.take(1 << 20).read_to_end(&mut bytes).ok()?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n')? + 1;
    *shown += end as u64;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// Says how many sandboxes will end, where the platform still knows.
async fn announce(state: &StateDir) {
    let count = async {
        // Without the file nobody knows whose platform answers at the default address.
        state.control_config().exists().then_some(())?;
        let settings = Settings::resolve(state, None, None, None).ok()?;
        let api_key = std::fs::read_to_string(state.root().join("root.key")).ok()?.trim().to_owned();
        let target = Target { api_key: Some(api_key), ..reach::target(&settings) };
        let client = Client::new(target, Some(COUNT_TIMEOUT)).ok()?;
        let query = ListQuery { states: crate::commands::ps::live_states(), ..ListQuery::default() };
        Some(client.sandboxes(&query).await.ok()?.len())
    };
    if let Ok(Some(count)) = tokio::time::timeout(COUNT_TIMEOUT, count).await
        && count > 0
    {
        render::note(&format!("dsec: ending {count} sandbox{}", if count == 1 { "" } else { "es" }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_comes_in_whole_lines_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("down.log");
        let mut shown = 0;
        assert_eq!(new_text(&path, &mut shown), None);
        std::fs::write(&path, "one\ntw").unwrap();
        assert_eq!(new_text(&path, &mut shown).as_deref(), Some("one\n"));
        assert_eq!(new_text(&path, &mut shown), None);
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(new_text(&path, &mut shown).as_deref(), Some("two\n"));
    }
}
