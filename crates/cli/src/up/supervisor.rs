//! The supervisor: holds the lock of the state directory, keeps both programs running, takes the
//! platform down in order. A node of a cluster whose servers are elsewhere has the edge alone.
//!
//! ```text
//!  start ──both ready──► keep ──SIGTERM, SIGINT──► down: control, then `dsec-edge down`, then edge
//!    │ one died            │ one died
//!    └─► both ended        └─► started again after a pause; sandboxes live on meanwhile
//! ```

use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::identity::{Identity, Lock, Processes};
use super::process::{Logs, Program, Running, describe, start};
use super::state::StateDir;
use crate::commands::signals::Signals;
use crate::failure::Failure;
use crate::render;

/// How long a program gets between SIGTERM and SIGKILL: it finishes the requests it has.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// First pause before a program that died is started again.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A program that ran so long has not died of its start: the pause begins anew.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// The two programs of a platform on one machine.
#[derive(Debug, Clone)]
pub(super) struct Programs {
    /// The edge.
    pub(super) edge: Program,
    /// The control plane, where it is here.
    pub(super) control: Option<Program>,
}

/// A platform that runs under us.
pub(super) struct Supervisor {
    state: StateDir,
    programs: Programs,
    logs: Logs,
    record: Record,
    edge: Running,
    control: Option<Running>,
    lock: Lock,
}

/// Which processes run, on disk too.
#[derive(Clone)]
struct Record {
    state: StateDir,
    now: Arc<Mutex<Processes>>,
}

impl Record {
    fn set(&self, name: &str, identity: Option<Identity>) -> Result<(), Failure> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        match name {
            "edge" => now.edge = identity,
            _ => now.control = identity,
        }
        now.write(&self.state.processes())
    }
}

impl Supervisor {
    /// Starts both programs and waits until both are ready. Under a lock that is ours.
    ///
    /// # Errors
    /// One of them died or was not ready in time, or a signal came; then neither runs.
    pub(super) async fn start(
        state: StateDir,
        programs: Programs,
        logs: Logs,
        mut lock: Lock,
        signals: &mut Signals,
    ) -> Result<Self, Failure> {
        // What an earlier supervisor left may be sandboxes that live: then a failed start keeps them.
        let fresh = Processes::read(&state.processes()).is_none();
        lock.sign(&state)?;
        let record = Record { state: state.clone(), now: Arc::default() };
        let started = start_both(&state, &programs, logs, &record, signals).await;
        match started {
            Ok((edge, control)) => Ok(Self { state, programs, logs, record, edge, control, lock }),
            Err(failure) => {
                if fresh {
                    if state.edge_config().exists() {
                        let _ = edge_down(&programs.edge, &state, DownOutput::Nowhere).await;
                    }
                    forget(&state);
                } else {
                    let _ = std::fs::remove_file(state.pid_file());
                }
                Err(failure)
            }
        }
    }

    /// Keeps both programs running until a signal asks for the end, then takes the platform down.
    ///
    /// # Errors
    /// Something of it may be left; `dsec down` tries again.
    pub(super) async fn run(self, signals: &mut Signals) -> Result<(), Failure> {
        let (stop, stopping) = watch::channel(false);
        let keep = |program: Program, running: Running| {
            let keeper =
                Keeper { program, state: self.state.clone(), logs: self.logs, record: self.record.clone() };
            tokio::spawn(keeper.keep(running, stopping.clone()))
        };
        let edge = keep(self.programs.edge.clone(), self.edge);
        let control =
            self.programs.control.clone().zip(self.control).map(|(program, running)| keep(program, running));
        signals.next().await;
        say("taking the platform down");
        let _ = stop.send(true);
        // First the door, so that nothing new comes in.
        if let Some(control) = control
            && let Ok(Some(control)) = control.await
        {
            control.terminate(PATIENCE).await;
        }
        let edge = edge.await.ok().flatten();
        let output = match self.logs {
            Logs::File => DownOutput::Log,
            Logs::Relay => DownOutput::Inherited,
        };
        let down = edge_down(&self.programs.edge, &self.state, output).await;
        if let Some(edge) = edge {
            edge.terminate(PATIENCE).await;
        }
        if down.is_ok() {
            forget(&self.state);
            say("down");
        }
        drop(self.lock);
        down
    }
}

async fn start_both(
    state: &StateDir,
    programs: &Programs,
    logs: Logs,
    record: &Record,
    signals: &mut Signals,
) -> Result<(Running, Option<Running>), Failure> {
    let mut edge = start(&programs.edge, state, logs)?;
    let control = record
        .set("edge", edge.identity)
        .and_then(|()| programs.control.as_ref().map(|control| start(control, state, logs)).transpose());
    let mut control = match control {
        Ok(control) => control,
        Err(failure) => {
            edge.terminate(PATIENCE).await;
            return Err(failure);
        }
    };
    let ready = async {
        let Some(control) = &mut control else { return edge.ready().await };
        record.set("control", control.identity)?;
        tokio::try_join!(edge.ready(), control.ready()).map(drop)
    };
    let ready = tokio::select! {
        ready = ready => ready,
        asked = signals.next() => Err(Failure::new(format!("{} came while the platform started", asked.name()))),
    };
    match ready {
        Ok(()) => Ok((edge, control)),
        Err(failure) => {
            if let Some(control) = control {
                tokio::join!(control.terminate(PATIENCE), edge.terminate(PATIENCE));
            } else {
                edge.terminate(PATIENCE).await;
            }
            Err(failure)
        }
    }
}

/// Keeps one program running.
struct Keeper {
    program: Program,
    state: StateDir,
    logs: Logs,
    record: Record,
}

impl Keeper {
    /// Until `stopping`; answers the process that runs then, if one does.
    async fn keep(self, mut running: Running, mut stopping: watch::Receiver<bool>) -> Option<Running> {
        let mut pause = PAUSE_MIN;
        loop {
            let since = Instant::now();
            let ended = tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return Some(running),
                status = running.child.wait() => status.map_or_else(|error| error.to_string(), describe),
            };
            if since.elapsed() > STABLE_AFTER {
                pause = PAUSE_MIN;
            }
            let name = self.program.name;
            say(&format!("{name} ended ({ended}); it is started again in {} ms", pause.as_millis()));
            running = loop {
                tokio::select! {
                    _ = stopping.wait_for(|stop| *stop) => return None,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(PAUSE_MAX);
                let mut next = match start(&self.program, &self.state, self.logs) {
                    Ok(next) => next,
                    Err(failure) => {
                        say(&format!("{name} cannot be started: {failure}"));
                        continue;
                    }
                };
                if let Err(failure) = self.record.set(name, next.identity) {
                    say(&failure.message);
                }
                let ready = tokio::select! {
                    _ = stopping.wait_for(|stop| *stop) => return Some(next),
                    ready = next.ready() => ready,
                };
                match ready {
                    Ok(()) => break next,
                    Err(failure) => {
                        say(&failure.message);
                        next.terminate(PATIENCE).await;
                    }
                }
            };
            say(&format!("{name} runs again"));
        }
    }
}

/// Where the output of `dsec-edge down` goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DownOutput {
    /// To our standard error.
    Inherited,
    /// To `log/down.log`, written anew.
    Log,
    /// Nowhere.
    Nowhere,
}

/// Ends all sandboxes of the node and removes what they had, whether the edge runs or not.
///
/// # Errors
/// It did not succeed; something may be left.
pub(super) async fn edge_down(edge: &Program, state: &StateDir, output: DownOutput) -> Result<(), Failure> {
    let failed = |error| Failure::io(format!("cannot run {} down", edge.exe.display()), &error);
    let mut command = tokio::process::Command::new(&edge.exe);
    command.arg("down").arg("--config").arg(state.edge_config());
    command.stdin(Stdio::null()).current_dir("/").process_group(0);
    match output {
        DownOutput::Inherited => {
            let stderr = rustix::io::dup(std::io::stderr()).map_err(|errno| failed(errno.into()))?;
            command.stdout(stderr);
        }
        DownOutput::Log => {
            let file = std::fs::File::create(state.log("down")).map_err(failed)?;
            command.stdout(file.try_clone().map_err(failed)?).stderr(file);
        }
        DownOutput::Nowhere => {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
    }
    let status = command.status().await.map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    let lines = match output {
        DownOutput::Log => super::process::last_lines(&state.log("down"), 0).unwrap_or_default(),
        DownOutput::Inherited | DownOutput::Nowhere => Vec::new(),
    };
    let shown = if lines.is_empty() { String::new() } else { format!(":\n  {}", lines.join("\n  ")) };
    Err(Failure::new(format!("`dsec-edge down` did not succeed ({}){shown}", describe(status)))
        .hint("something of the sandboxes may be left; run `dsec down` again"))
}

/// Removes the traces of a supervisor: nothing of it is left to be taken over.
pub(super) fn forget(state: &StateDir) {
    for path in [state.processes(), state.pid_file()] {
        let _ = std::fs::remove_file(path);
    }
}

/// Says something of the supervisor's own: on the terminal, or in `log/up.log`.
pub(super) fn say(text: &str) {
    let time = render::clock(render::now_ms());
    render::note(&format!("dsec up: {time} {text}"));
}
