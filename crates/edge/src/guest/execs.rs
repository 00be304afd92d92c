//! What one sandbox's agent runs, as the edge last heard: commands and sessions. The agent is the
//! source; this table is filled again from its hello after a restart.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_backend::{ExecCgroup, Instance, OomReport};
use dsec_model::{ErrorKind, ExecId, SandboxId};
use dsec_proto::guest::{ExecInfo, Output, SessionInfo};
use dsec_proto::rest::{ApiError, OomKill};
use serde_json::json;

use super::Connection;
use super::exec::{Exec, Facts};
use super::stdin::{self, StdinPipe};
use crate::error::{internal, no_such};
use crate::sandbox::Grip;
use crate::sandbox::events::EventRing;

/// Ended commands that stay readable: what a rollout looks back at, with room.
pub const ENDED_MAX: usize = 128;
/// Bytes of ended commands' output on disk, of one sandbox; oldest go first.
pub const SPOOLED_MAX: u64 = 256 << 20;
/// Commands at once, those waiting in sessions included; pids run out before in any sane sandbox.
pub const RUNNING_MAX: usize = 4096;
/// Memory-kill reports kept for commands that still run.
const OOM_REPORTS_MAX: usize = 256;

struct SessionEntry {
    info: SessionInfo,
    cgroup: Option<u32>,
    /// It was closed here; the agent's word of its end is on its way.
    closed: bool,
    /// Cgroups of earlier sessions of this name whose end is still to be told: a name can be opened
    /// anew before that, and their ends must not be taken for its own.
    earlier: VecDeque<Option<u32>>,
}

/// Kills for memory, numbered as the kernel's counter counts them.
#[derive(Default)]
struct OomLog {
    /// Number of the first one in `kills`.
    first: u64,
    kills: VecDeque<OomReport>,
}

impl OomLog {
    /// Takes in what the kernel has counted and reported since.
    fn catch_up(&mut self, counted: u64, reports: Vec<OomReport>) {
        for report in reports {
            self.kills.push_back(report);
        }
        // Counted and never reported: the count is the truth.
        while self.first + (self.kills.len() as u64) < counted && self.kills.len() < OOM_REPORTS_MAX {
            self.kills.push_back(OomReport { process: String::new(), rss_bytes: 0 });
        }
        while self.kills.len() > OOM_REPORTS_MAX {
            self.kills.pop_front();
            self.first += 1;
        }
    }

    fn since(&self, before: u64) -> Vec<OomKill> {
        let skip = usize::try_from(before.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let kill = |report: &OomReport| OomKill {
            process: report.process.clone(),
            pid: None,
            rss_bytes: (report.rss_bytes > 0).then_some(report.rss_bytes),
        };
        self.kills.iter().skip(skip).map(kill).collect()
    }
}

#[derive(Default)]
struct Tables {
    execs: HashMap<ExecId, Arc<Exec>>,
    /// Those that run or wait, oldest first.
    running: VecDeque<ExecId>,
    /// Those that ended, oldest first.
    ended: VecDeque<ExecId>,
    sessions: BTreeMap<String, SessionEntry>,
    oom: OomLog,
    /// One more than the greatest number of a cgroup handed out.
    cgroups: u32,
}

/// The table of one sandbox.
pub struct ExecTable {
    sandbox: SandboxId,
    grip: Arc<Grip>,
    spool: Arc<Path>,
    events: Arc<EventRing>,
    tables: Mutex<Tables>,
    /// Where file operations run. One for all: it is never killed, so it can be used again.
    file_cgroup: Mutex<Option<ExecCgroup>>,
}

impl std::fmt::Debug for ExecTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecTable").field("sandbox", &self.sandbox).finish_non_exhaustive()
    }
}

impl ExecTable {
    /// An empty table.
    pub fn new(sandbox: SandboxId, grip: Arc<Grip>, events: Arc<EventRing>) -> Arc<Self> {
        let spool = grip.with(|instance| Arc::from(instance.spool_dir()));
        let spool = spool.unwrap_or_else(|| Arc::from(Path::new("/nonexistent")));
        let first = grip.with(Instance::oom_kills).unwrap_or(0);
        let tables = Tables { oom: OomLog { first, kills: VecDeque::new() }, ..Tables::default() };
        let tables = Mutex::new(tables);
        Arc::new(Self { sandbox, grip, spool, events, tables, file_cgroup: Mutex::default() })
    }

    /// The cgroup of file operations, under the sandbox's limits; none where the host has none.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn file_cgroup(&self) -> Result<Option<OwnedFd>, ApiError> {
        let failed = |e: &dyn std::error::Error| internal("no cgroup could be made for file operations", e);
        let mut held = self.file_cgroup.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            *held = self.grip.with(Instance::exec_cgroup).transpose().map_err(|e| failed(&e))?.flatten();
        }
        held.as_ref().map(|cgroup| cgroup.dir.try_clone()).transpose().map_err(|e| failed(&e))
    }

    fn oom_kills(&self) -> u64 {
        self.grip.with(Instance::oom_kills).unwrap_or(0)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a command that is about to be started.
    ///
    /// # Errors
    /// [`RUNNING_MAX`] commands run already.
    pub fn enter(&self, id: ExecId, mut facts: Facts) -> Result<Arc<Exec>, ApiError> {
        facts.oom_before = self.oom_kills();
        let mut tables = self.tables();
        if tables.running.len() >= RUNNING_MAX {
            return Err(ApiError::new(
                ErrorKind::ResourceExhausted,
                format!("{RUNNING_MAX} commands run in sandbox {}, the most at once", self.sandbox),
            )
            .hint("wait for some of them to end"));
        }
        if let Some(number) = facts.cgroup {
            tables.cgroups = tables.cgroups.max(number + 1);
        }
        let exec = Arc::new(Exec::new(id.clone(), Arc::clone(&self.spool), facts));
        tables.execs.insert(id.clone(), Arc::clone(&exec));
        tables.running.push_back(id);
        Ok(exec)
    }

    /// The agent started it. `fd`: its stdin or terminal.
    pub fn started(&self, connection: &Arc<Connection>, id: &ExecId, pid: u32, fd: Option<OwnedFd>) {
        let Some(exec) = self.find(id) else { return };
        let stdin = fd.and_then(|fd| StdinPipe::new(fd).ok()).map(Arc::new);
        let (given, command) = exec.change(|facts| {
            facts.started = true;
            if pid != 0 {
                facts.pid = pid;
            }
            // An end that overtook this answer in a reader's view leaves nothing to write to.
            facts.stdin = stdin.filter(|_| !facts.ended);
            (facts.stdin_given.take(), facts.command.clone())
        });
        self.events.push("exec_started", json!({ "exec_id": id, "command": command }));
        if let Some(given) = given {
            tokio::spawn(stdin::feed(Arc::clone(connection), exec, given));
        }
    }

    /// It was not started after all.
    pub fn abandon(&self, id: &ExecId) {
        let gone = {
            let mut tables = self.tables();
            tables.running.retain(|other| other != id);
            tables.execs.remove(id)
        };
        if let Some(exec) = gone {
            let cgroup = exec.change(|facts| {
                facts.lost = Some("it was not started".to_owned());
                facts.cgroup.take()
            });
            self.grip.release_cgroup(cgroup);
        }
    }

    /// A stream has grown.
    pub fn output(&self, news: Output) {
        let Ok(id) = news.exec.parse::<ExecId>() else { return };
        if let Some(exec) = self.find(&id) {
            exec.change(|facts| facts.grow(news.stdout.as_ref(), news.stderr.as_ref()));
        }
    }

    /// A command ended. Returns those that the agent shall forget.
    pub fn exited(&self, info: ExecInfo) -> Vec<ExecId> {
        let Ok(id) = info.exec.parse::<ExecId>() else { return Vec::new() };
        let Some(exec) = self.find(&id) else { return vec![id] };
        let counted = self.oom_kills();
        let mut tables = self.tables();
        let (cgroup, kills, session) = {
            let facts = exec.facts();
            if facts.ended {
                return Vec::new();
            }
            let mut kills = Vec::new();
            if counted > facts.oom_before {
                let reports = self.grip.with(Instance::take_oom_reports).unwrap_or_default();
                tables.oom.catch_up(counted, reports);
                kills = tables.oom.since(facts.oom_before);
            }
            (facts.cgroup, kills, facts.session.clone())
        };
        tables.running.retain(|other| *other != id);
        tables.ended.push_back(id.clone());
        let next = session.as_ref().and_then(|session| tables.next_line(session.as_str()));
        let forgotten = tables.prune();
        drop(tables);
        if !kills.is_empty() {
            self.events.push("oom_kill", json!({ "exec_id": id, "kills": kills }));
        }
        self.events.push("exec_ended", ended_fields(&info));
        exec.change(|facts| {
            facts.learn(&info);
            facts.oom_kills = kills;
            facts.cgroup = None;
        });
        if let Some((line, pid)) = next {
            line.change(|facts| facts.pid = pid);
        }
        self.grip.release_cgroup(cgroup);
        forgotten
    }

    /// Takes in all that an agent holds: after a restart, or nothing.
    pub fn restore(&self, execs: Vec<ExecInfo>, sessions: Vec<SessionInfo>) {
        let oom_before = self.oom_kills();
        let mut infos = execs;
        infos.sort_by_key(|info| (info.ended, if info.ended { info.ended_ms } else { info.started_ms }));
        let seen_ms = self.events.last_ms().unwrap_or(u64::MAX);
        let mut tables = self.tables();
        for info in infos {
            let Ok(id) = info.exec.parse::<ExecId>() else { continue };
            self.note_missed(&info, seen_ms);
            let mut facts = Facts { oom_before, ..Facts::default() };
            facts.learn(&info);
            let line = if info.ended { &mut tables.ended } else { &mut tables.running };
            line.push_back(id.clone());
            tables.execs.insert(id.clone(), Arc::new(Exec::new(id, Arc::clone(&self.spool), facts)));
        }
        for info in sessions {
            tables.sessions.insert(info.session.clone(), SessionEntry::new(info, None));
        }
    }

    /// Writes down what happened while no edge ran.
    fn note_missed(&self, info: &ExecInfo, seen_ms: u64) {
        if info.started_ms > seen_ms {
            let fields = json!({ "exec_id": info.exec, "command": info.command });
            self.events.push_of(info.started_ms, "exec_started", fields);
        }
        if info.ended && info.ended_ms > seen_ms {
            self.events.push_of(info.ended_ms, "exec_ended", ended_fields(info));
        }
    }

    /// The channel closed: whoever waits for a command learns it.
    pub fn lost(&self, why: &str) {
        let execs: Vec<_> = self.tables().execs.values().cloned().collect();
        for exec in execs {
            exec.change(|facts| {
                if !facts.ended && facts.lost.is_none() {
                    facts.lost = Some(why.to_owned());
                }
                facts.stdin = None;
            });
        }
    }

    /// A command by id.
    pub fn find(&self, id: &ExecId) -> Option<Arc<Exec>> {
        self.tables().execs.get(id).cloned()
    }

    /// A command by the text of its id.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, id: &str) -> Result<Arc<Exec>, ApiError> {
        let found = id.parse::<ExecId>().ok().and_then(|id| self.find(&id));
        found.ok_or_else(|| {
            no_such("exec", id, &self.sandbox)
                .hint(format!("the last {ENDED_MAX} ended commands are kept; GET .../execs lists them"))
        })
    }

    /// All commands, newest first.
    pub fn list(&self) -> Vec<Arc<Exec>> {
        let mut execs: Vec<_> = self.tables().execs.values().cloned().collect();
        execs.sort_by_cached_key(|exec| {
            let record = exec.record();
            (std::cmp::Reverse(record.started_ms), record.id)
        });
        execs
    }

    /// Commands that have not ended.
    pub fn running(&self) -> usize {
        self.tables().running.len()
    }

    /// No command runs and nothing that one started is left, as far as this host can tell.
    pub fn is_quiet(&self) -> bool {
        let (running, cgroups) = {
            let tables = self.tables();
            (tables.running.len(), tables.cgroups)
        };
        let empty = |instance: &(dyn Instance + 'static)| {
            (0..cgroups).all(|number| instance.exec_pids(number).is_empty())
        };
        running == 0 && self.grip.with(empty).unwrap_or(true)
    }

    /// Enters an open session, with the number of its cgroup when it was just made.
    pub fn session_opened(&self, info: SessionInfo, cgroup: Option<u32>) {
        let mut tables = self.tables();
        if let Some(number) = cgroup {
            tables.cgroups = tables.cgroups.max(number + 1);
        }
        match tables.sessions.get_mut(&info.session) {
            Some(entry) if info.existed => {
                entry.info = info;
                drop(tables);
                self.grip.release_cgroup(cgroup);
            }
            Some(entry) => {
                entry.info = info;
                entry.closed = false;
                let before = std::mem::replace(&mut entry.cgroup, cgroup);
                entry.earlier.push_back(before);
            }
            None => {
                tables.sessions.insert(info.session.clone(), SessionEntry::new(info, cgroup));
            }
        }
    }

    /// A session was closed on request; its end is told later.
    pub fn session_closed(&self, session: &str) {
        if let Some(entry) = self.tables().sessions.get_mut(session) {
            entry.closed = true;
        }
    }

    /// A session's shell is gone.
    pub fn session_ended(&self, session: &str) {
        let gone = {
            let mut tables = self.tables();
            let Some(entry) = tables.sessions.get_mut(session) else { return };
            match entry.earlier.pop_front() {
                Some(cgroup) => cgroup,
                None => tables.sessions.remove(session).and_then(|entry| entry.cgroup),
            }
        };
        self.events.push("session_ended", json!({ "session_id": session }));
        self.grip.release_cgroup(gone);
    }

    /// Open sessions, by name, with how many lines each has.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let tables = self.tables();
        tables
            .sessions
            .values()
            .filter(|entry| !entry.closed)
            .map(|entry| SessionInfo {
                pending: tables.lines(&entry.info.session).count() as u32,
                ..entry.info.clone()
            })
            .collect()
    }

    /// One open session.
    pub fn session(&self, name: &str) -> Option<SessionInfo> {
        let tables = self.tables();
        let entry = tables.sessions.get(name).filter(|entry| !entry.closed)?;
        Some(SessionInfo { pending: tables.lines(name).count() as u32, ..entry.info.clone() })
    }
}

fn ended_fields(info: &ExecInfo) -> serde_json::Value {
    json!({ "exec_id": info.exec, "code": info.code, "signal": info.signal, "timed_out": info.timed_out })
}

impl SessionEntry {
    fn new(info: SessionInfo, cgroup: Option<u32>) -> Self {
        Self { info, cgroup, closed: false, earlier: VecDeque::new() }
    }
}

impl Tables {
    /// Lines of a session that run or wait, oldest first. A terminal session's shell is none.
    fn lines<'a>(&'a self, session: &'a str) -> impl Iterator<Item = &'a Arc<Exec>> {
        self.running.iter().filter_map(|id| self.execs.get(id)).filter(move |exec| {
            let facts = exec.facts();
            !facts.pty && facts.session.as_ref().is_some_and(|s| s.as_str() == session)
        })
    }

    /// The line that a session's shell takes up now, with the shell's pid.
    fn next_line(&self, session: &str) -> Option<(Arc<Exec>, u32)> {
        let pid = self.sessions.get(session)?.info.pid;
        let line = self.lines(session).next()?;
        let waits = line.facts().pid == 0;
        waits.then(|| (Arc::clone(line), pid))
    }

    /// Forgets ended commands above the limits, oldest first and none that is being read.
    fn prune(&mut self) -> Vec<ExecId> {
        let mut spooled: u64 =
            self.ended.iter().filter_map(|id| self.execs.get(id)).map(|exec| exec.facts().spooled()).sum();
        let mut forgotten = Vec::new();
        let mut at = 0;
        while (self.ended.len() > ENDED_MAX || spooled > SPOOLED_MAX) && at + 1 < self.ended.len() {
            let id = &self.ended[at];
            match self.execs.get(id) {
                Some(exec) if exec.is_read() => at += 1,
                _ => {
                    let Some(id) = self.ended.remove(at) else { break };
                    if let Some(exec) = self.execs.remove(&id) {
                        spooled = spooled.saturating_sub(exec.facts().spooled());
                    }
                    forgotten.push(id);
                }
            }
        }
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(process: &str) -> OomReport {
        OomReport { process: process.to_owned(), rss_bytes: 7 }
    }

    #[test]
    fn a_kill_belongs_to_every_command_that_ran_and_to_none_that_came_later() {
        let mut log = OomLog { first: 10, kills: VecDeque::new() };
        log.catch_up(11, vec![report("hog")]);
        log.catch_up(12, vec![]);
        assert_eq!(log.since(10).len(), 2);
        assert_eq!(log.since(11).len(), 1);
        assert!(log.since(12).is_empty());
        assert_eq!(log.since(10)[0].process, "hog");
    }
}
