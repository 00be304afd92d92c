//! Control groups: version 2, version 1, and hosts that mix them ("hybrid": controllers on version
//! 1, an empty version 2 tree beside them).
//!
//! Layout, with `dsec-TAG` one directory for each state directory of an edge:
//!
//! ```text
//! version 2 alone             hybrid
//! dsec-TAG/NAME/k   agent     unified/dsec-TAG/NAME/        agent
//! dsec-TAG/NAME/u   limits    unified/dsec-TAG/NAME/run-N   one exec or session
//! dsec-TAG/NAME/u/run-N       memory|cpu|pids/dsec-TAG/NAME limits
//! ```
//!
//! The agent stays outside the limits: inside, whoever fills the memory gets it killed.

mod cpu;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Gid, Mode, OFlags, Uid, open};

pub use cpu::CpuLimits;

/// Pause between two looks at whether a group stands still; most do at the first.
const FREEZE_POLL: Duration = Duration::from_micros(200);
/// Memory that is taken at once, bytes: some hundredths of a second's work.
const RECLAIM_PART: u64 = 64 << 20;
/// Bytes of the largest file of counters.
const COUNTERS_MAX: usize = 4096;
/// Limits of one group.
#[derive(Debug, Clone, Copy)]
pub struct GroupLimits {
    /// Memory, bytes; swap is not given in addition.
    pub memory_bytes: u64,
    /// CPU time.
    pub cpu: CpuLimits,
    /// Processes and threads.
    pub pids: u64,
}

/// Where the host has its hierarchies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchies {
    /// Version 2 alone, mounted here.
    V2(PathBuf),
    /// Version 1 controllers, and perhaps an empty version 2 tree.
    V1 {
        /// Of the `memory` controller.
        memory: PathBuf,
        /// Of the `cpu` controller.
        cpu: PathBuf,
        /// Of the `pids` controller.
        pids: PathBuf,
        /// Of `cpuacct`, which counts CPU time where there is no version 2 tree; often the same as `cpu`.
        cpuacct: Option<PathBuf>,
        /// The version 2 tree.
        unified: Option<PathBuf>,
    },
}

impl Hierarchies {
    /// Finds them in the mount table.
    ///
    /// # Errors
    /// A controller that is needed is mounted nowhere; the text names it.
    pub fn find() -> io::Result<Self> {
        Self::from_mounts(&fs::read_to_string("/proc/self/mounts")?)
    }

    fn from_mounts(table: &str) -> io::Result<Self> {
        let mounts: Vec<(&str, &str, &str)> = table
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(' ').skip(1);
                Some((fields.next()?, fields.next()?, fields.next()?))
            })
            .collect();
        let v1 = |controller: &str| {
            mounts
                .iter()
                .find(|(_, kind, options)| *kind == "cgroup" && options.split(',').any(|o| o == controller))
                .map(|(path, ..)| PathBuf::from(path))
        };
        let unified =
            mounts.iter().find(|(_, kind, _)| *kind == "cgroup2").map(|(path, ..)| PathBuf::from(path));
        match (v1("memory"), v1("cpu"), v1("pids"), unified) {
            (None, None, None, Some(root)) => Ok(Self::V2(root)),
            (Some(memory), Some(cpu), Some(pids), unified) => {
                let cpuacct = if unified.is_none() { v1("cpuacct") } else { None };
                Ok(Self::V1 { memory, cpu, pids, cpuacct, unified })
            }
            (memory, cpu, pids, _) => {
                let missing: Vec<_> = [("memory", memory), ("cpu", cpu), ("pids", pids)]
                    .into_iter()
                    .filter_map(|(name, found)| found.is_none().then_some(name))
                    .collect();
                Err(io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("no cgroup hierarchy is mounted for: {}", missing.join(", ")),
                ))
            }
        }
    }
}

/// This edge's directory in every hierarchy.
#[derive(Debug, Clone)]
pub struct Tree {
    hierarchies: Hierarchies,
    parent: String,
}

/// The groups of one sandbox.
#[derive(Debug, Clone)]
pub struct Group {
    memory: PathBuf,
    cpu: PathBuf,
    pids: PathBuf,
    /// What counts CPU time where version 2 does not.
    cpuacct: Option<PathBuf>,
    /// Where the agent is, version 2.
    agent: Option<PathBuf>,
    /// Where `run-N` directories go, version 2.
    runs: Option<PathBuf>,
    /// Common ancestor of both, version 2: who may write its `cgroup.procs` may start processes across.
    whole: Option<PathBuf>,
    v2: bool,
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    let named =
        |e: io::Error| io::Error::new(e.kind(), format!("write {value:?} to {}: {e}", path.display()));
    OpenOptions::new().write(true).open(path).and_then(|mut f| f.write_all(value.as_bytes())).map_err(named)
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(io::Error::new(e.kind(), format!("make {}: {e}", path.display()))),
        Ok(()) => Ok(()),
    }
}

/// A file of counters in one read: they are shorter than a page, and they are read around every command.
fn counters<T>(path: &Path, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut text = [0; COUNTERS_MAX];
    let read = File::open(path).ok()?.read(&mut text).ok()?;
    parse(std::str::from_utf8(&text[..read]).ok()?)
}

fn number(path: &Path) -> u64 {
    counters(path, |text| text.trim().parse().ok()).unwrap_or(0)
}

fn field(path: &Path, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    counters(path, |text| text.lines().find_map(value)).unwrap_or(0)
}

/// Process ids in a group, as this process sees them.
fn pids_in(group: &Path) -> io::Result<Vec<i32>> {
    let text = fs::read_to_string(group.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

impl Tree {
    /// The trees of the edge that `tag` names; makes their directories and turns controllers on.
    ///
    /// # Errors
    /// The kernel's, with the path.
    pub fn set_up(tag: &str) -> io::Result<Self> {
        let tree = Self { hierarchies: Hierarchies::find()?, parent: format!("dsec-{tag}") };
        for root in tree.roots() {
            make(&root)?;
        }
        if let Hierarchies::V2(root) = &tree.hierarchies {
            write(&root.join("cgroup.subtree_control"), "+memory +cpu +pids")?;
            write(&root.join(&tree.parent).join("cgroup.subtree_control"), "+memory +cpu +pids")?;
        }
        Ok(tree)
    }

    fn roots(&self) -> Vec<PathBuf> {
        match &self.hierarchies {
            Hierarchies::V2(root) => vec![root.join(&self.parent)],
            Hierarchies::V1 { memory, cpu, pids, cpuacct, unified } => {
                let all = [memory, cpu, pids].into_iter().chain(cpuacct).chain(unified);
                all.map(|h| h.join(&self.parent)).collect()
            }
        }
    }

    /// The groups of a sandbox, whether they are there or not.
    pub fn group(&self, name: &str) -> Group {
        let at = |hierarchy: &Path| hierarchy.join(&self.parent).join(name);
        match &self.hierarchies {
            Hierarchies::V2(root) => {
                let (whole, users) = (at(root), at(root).join("u"));
                Group {
                    memory: users.clone(),
                    cpu: users.clone(),
                    pids: users.clone(),
                    cpuacct: None,
                    agent: Some(whole.join("k")),
                    runs: Some(users),
                    whole: Some(whole),
                    v2: true,
                }
            }
            Hierarchies::V1 { memory, cpu, pids, cpuacct, unified } => {
                let whole = unified.as_deref().map(at);
                Group {
                    memory: at(memory),
                    cpu: at(cpu),
                    pids: at(pids),
                    cpuacct: cpuacct.as_deref().map(at),
                    agent: whole.clone(),
                    runs: whole.clone(),
                    whole,
                    v2: false,
                }
            }
        }
    }

    /// Names of all sandboxes that have a group in any hierarchy.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .roots()
            .iter()
            .filter_map(|root| fs::read_dir(root).ok())
            .flat_map(|entries| entries.flatten())
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Removes this edge's directories; every group must be gone.
    ///
    /// # Errors
    /// `EBUSY` with the path of one that is left.
    pub fn remove(&self) -> io::Result<()> {
        for root in self.roots() {
            remove_dir(&root)?;
        }
        Ok(())
    }
}

fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(io::Error::new(e.kind(), format!("remove {}: {e}", path.display())))
        }
        _ => Ok(()),
    }
}

impl Group {
    /// Makes the groups with their limits.
    ///
    /// # Errors
    /// The kernel's, with the path and value.
    pub fn create(&self, limits: &GroupLimits) -> io::Result<()> {
        if self.v2 { self.create_v2(limits) } else { self.create_v1(limits) }
    }

    fn create_v2(&self, limits: &GroupLimits) -> io::Result<()> {
        if let (Some(whole), Some(agent)) = (&self.whole, &self.agent) {
            make(whole)?;
            write(&whole.join("cgroup.subtree_control"), "+memory +cpu +pids")?;
            make(agent)?;
        }
        make(&self.memory)?;
        write(&self.memory.join("memory.max"), &limits.memory_bytes.to_string())?;
        // A kernel without swap accounting has no such file, and gives no swap in addition.
        let swap = self.memory.join("memory.swap.max");
        if swap.exists() {
            write(&swap, "0")?;
        }
        self.set_cpu(&limits.cpu)?;
        write(&self.pids.join("pids.max"), &limits.pids.to_string())
    }

    fn create_v1(&self, limits: &GroupLimits) -> io::Result<()> {
        make(&self.memory)?;
        let bytes = limits.memory_bytes.to_string();
        write(&self.memory.join("memory.limit_in_bytes"), &bytes)?;
        let with_swap = self.memory.join("memory.memsw.limit_in_bytes");
        if with_swap.exists() {
            write(&with_swap, &bytes)?;
        }
        // Buffers of TCP sockets have a counter of their own in version 1.
        let tcp = self.memory.join("memory.kmem.tcp.limit_in_bytes");
        if tcp.exists() {
            write(&tcp, &bytes)?;
        }
        make(&self.cpu)?;
        self.set_cpu(&limits.cpu)?;
        make(&self.pids)?;
        write(&self.pids.join("pids.max"), &limits.pids.to_string())?;
        [&self.cpuacct, &self.whole].into_iter().flatten().try_for_each(|dir| make(dir))
    }

    /// The directory the agent is started into, version 2.
    ///
    /// # Errors
    /// The kernel's.
    pub fn agent_dir(&self) -> io::Result<Option<OwnedFd>> {
        self.agent.as_deref().map(open_dir).transpose()
    }

    /// Lets the agent start processes in this sandbox's groups.
    ///
    /// # Errors
    /// The kernel's.
    pub fn delegate(&self, keeper: u32) -> io::Result<()> {
        match &self.whole {
            Some(whole) => give(&whole.join("cgroup.procs"), keeper),
            None => Ok(()),
        }
    }

    /// Version 1 `tasks` files, open for writing: a process that writes `0` there moves itself. Writing the
    /// thread's own id to `tasks` avoids the grace period that `cgroup.procs` waits for (11 ms after idle).
    ///
    /// # Errors
    /// The kernel's.
    pub fn task_files(&self) -> io::Result<Vec<OwnedFd>> {
        if self.v2 {
            return Ok(Vec::new());
        }
        let apart = self.cpuacct.iter().filter(|dir| **dir != self.cpu);
        [&self.memory, &self.cpu, &self.pids]
            .into_iter()
            .chain(apart)
            .map(|dir| Ok(OpenOptions::new().write(true).open(dir.join("tasks"))?.into()))
            .collect()
    }

    /// Makes (or finds) the group of one exec, which the agent may start processes in: the directory and its
    /// `cgroup.kill`. `None` without version 2.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create_run(&self, number: u32, keeper: u32) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
        let Some(path) = self.run_path(number) else { return Ok(None) };
        make(&path)?;
        give(&path.join("cgroup.procs"), keeper)?;
        let kill = OpenOptions::new().write(true).open(path.join("cgroup.kill"))?;
        Ok(Some((open_dir(&path)?, kill.into())))
    }

    /// Removes the group of an exec. Its number can then be made anew.
    ///
    /// # Errors
    /// `EBUSY` while it has a process.
    pub fn remove_run(&self, number: u32) -> io::Result<()> {
        self.run_path(number).map_or(Ok(()), |path| remove_dir(&path))
    }

    fn run_path(&self, number: u32) -> Option<PathBuf> {
        self.runs.as_ref().map(|runs| runs.join(format!("run-{number}")))
    }

    /// Host process ids in an exec's group.
    pub fn run_pids(&self, number: u32) -> Vec<i32> {
        self.run_path(number).and_then(|path| pids_in(&path).ok()).unwrap_or_default()
    }

    /// Numbers of the exec groups that are there.
    pub fn run_numbers(&self) -> Vec<u32> {
        self.list_runs().unwrap_or_default()
    }

    fn list_runs(&self) -> io::Result<Vec<u32>> {
        let Some(runs) = &self.runs else { return Ok(Vec::new()) };
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("run-")?.parse().ok();
        fs::read_dir(runs)?.filter_map(|entry| entry.map(number).transpose()).collect()
    }

    /// Host process ids in all exec groups.
    ///
    /// # Errors
    /// The kernel's; an exec that ends meanwhile has none.
    pub fn exec_pids(&self) -> io::Result<Vec<i32>> {
        let mut pids = Vec::new();
        for path in self.list_runs()?.into_iter().filter_map(|number| self.run_path(number)) {
            match pids_in(&path) {
                Ok(of_one) => pids.extend(of_one),
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(pids)
    }

    /// Whether this host can make it stand still.
    pub fn can_freeze(&self) -> bool {
        self.whole.is_some()
    }

    /// Stops all in the sandbox, the agent too, until [`Self::thaw`]; waits until all stand still, at most `limit` and while `go_on`
    /// says so. False: this host cannot (it has no version 2), or not in time; then nothing is stopped.
    pub fn freeze(&self, limit: Duration, go_on: &dyn Fn() -> bool) -> bool {
        let Some(whole) = &self.whole else { return false };
        if write(&whole.join("cgroup.freeze"), "1").is_err() {
            return false;
        }
        let until = std::time::Instant::now() + limit;
        while !self.stands_still(whole) {
            if std::time::Instant::now() >= until || !go_on() {
                self.thaw();
                return false;
            }
            std::thread::sleep(FREEZE_POLL);
        }
        true
    }

    /// Whether all stand still. A group with processes of its own, as `whole` is on a hybrid host, says so of these alone: an exec
    /// below it may be within a write (seen on Linux 6.18).
    fn stands_still(&self, whole: &Path) -> bool {
        let Ok(runs) = self.list_runs() else { return false };
        let runs = runs.into_iter().filter_map(|number| self.run_path(number));
        runs.chain([whole.to_owned()]).all(|dir| field(&dir.join("cgroup.events"), "frozen") == 1)
    }

    /// Has all stand still as soon as they can, without waiting for it. Where they do already nothing happens.
    pub fn freeze_soon(&self) {
        if let Some(whole) = &self.whole {
            let _thawed_then = write(&whole.join("cgroup.freeze"), "1");
        }
    }

    /// Lets all go on.
    pub fn thaw(&self) {
        if let Some(whole) = &self.whole {
            let _not_frozen_then = write(&whole.join("cgroup.freeze"), "0");
        }
    }

    /// Lets its memory go to swap, beside that of its limit, or not. With version 1 the limit holds for both together, and it always may.
    pub fn allow_swap(&self, allowed: bool) {
        if self.v2 {
            let _no_swap_accounting =
                write(&self.memory.join("memory.swap.max"), if allowed { "max" } else { "0" });
        }
    }

    /// Has the kernel take the group's memory, whoever of it and of its tmpfs has it, as far as it can. `go_on` is asked now and then.
    pub fn reclaim(&self, go_on: &dyn Fn() -> bool) {
        if !self.v2 {
            // All in one call; each page is tried twice, so that what was dirty is given back too.
            let _what_is_left = write(&self.memory.join("memory.force_empty"), "0");
            return;
        }
        let file = self.memory.join("memory.reclaim");
        // What is left is not to be had when a call ends without having got its part (EAGAIN), or this kernel has no such file.
        let take = |bytes: u64| bytes > 0 && write(&file, &bytes.min(RECLAIM_PART).to_string()).is_ok();
        while go_on() && take(self.memory().0) {}
    }

    /// SIGKILL to all in the sandbox, the agent too, where version 2 can.
    pub fn kill(&self) {
        if let Some(whole) = &self.whole {
            // A kernel before 5.14 has no such file; there the end of pid 1 is what ends the others.
            let _no_such_file = write(&whole.join("cgroup.kill"), "1");
        }
    }

    /// Removes all of it. Every process must have ended.
    ///
    /// # Errors
    /// `EBUSY` with the path that still has a process.
    pub fn remove(&self) -> io::Result<()> {
        for number in self.run_numbers() {
            self.remove_run(number)?;
        }
        let mut first_error = Ok(());
        let all = [&self.runs, &self.agent, &self.whole, &self.cpuacct].into_iter().flatten();
        for path in all.chain([&self.memory, &self.cpu, &self.pids]) {
            if let Err(error) = remove_dir(path) {
                first_error = first_error.and(Err(error));
            }
        }
        first_error
    }

    /// True when no directory of it is left.
    #[cfg(test)]
    fn is_gone(&self) -> bool {
        let all = [&self.runs, &self.agent, &self.whole, &self.cpuacct].into_iter().flatten();
        !all.chain([&self.memory, &self.cpu, &self.pids]).any(|path| path.exists())
    }

    /// CPU time so far: with version 2 (whose `cpu.stat` needs no controller) of the agent too, else of the
    /// commands. 0 where nothing counts it.
    pub fn cpu_time(&self) -> Duration {
        match (&self.whole, &self.cpuacct) {
            (Some(whole), _) => Duration::from_micros(field(&whole.join("cpu.stat"), "usage_usec")),
            (None, Some(cpuacct)) => Duration::from_nanos(number(&cpuacct.join("cpuacct.usage"))),
            (None, None) => Duration::ZERO,
        }
    }

    /// Memory now and at most so far, bytes.
    pub fn memory(&self) -> (u64, u64) {
        let (now, peak) = if self.v2 {
            ("memory.current", "memory.peak")
        } else {
            ("memory.usage_in_bytes", "memory.max_usage_in_bytes")
        };
        (number(&self.memory.join(now)), number(&self.memory.join(peak)))
    }

    /// Processes and threads now.
    pub fn pids(&self) -> u64 {
        number(&self.pids.join("pids.current"))
    }

    /// Kills so far because memory was full.
    pub fn oom_kills(&self) -> u64 {
        let file = if self.v2 { "memory.events" } else { "memory.oom_control" };
        field(&self.memory.join(file), "oom_kill")
    }
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .or_else(|_| open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()))?)
}

fn give(path: &Path, uid: u32) -> io::Result<()> {
    let file = File::open(path)?;
    Ok(rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(memory_bytes: u64) -> GroupLimits {
        let cpu = CpuLimits { millis: 2000, burst_ms: 0, weight: 100, idle: false };
        GroupLimits { memory_bytes, cpu, pids: 33 }
    }

    #[test]
    fn a_hybrid_host_is_told_from_a_pure_one() {
        let hybrid = "cgroup /s/memory cgroup rw,memory 0 0\ncgroup /s/cpu cgroup rw,cpu,cpuacct 0 0\n\
                      cgroup /s/pids cgroup rw,pids 0 0\ncgroup2 /s/unified cgroup2 rw 0 0\n";
        let Hierarchies::V1 { cpu, unified, .. } = Hierarchies::from_mounts(hybrid).unwrap() else {
            panic!("taken for version 2 alone")
        };
        assert_eq!((cpu, unified), ("/s/cpu".into(), Some("/s/unified".into())));
        let pure = Hierarchies::from_mounts("cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n").unwrap();
        assert_eq!(pure, Hierarchies::V2("/sys/fs/cgroup".into()));
        let v1 = hybrid.replace("cgroup2 /s/unified cgroup2 rw 0 0\n", "");
        let Hierarchies::V1 { cpuacct, unified: None, .. } = Hierarchies::from_mounts(&v1).unwrap() else {
            panic!("not taken for version 1 alone")
        };
        assert_eq!(cpuacct, Some("/s/cpu".into()));
        let error = Hierarchies::from_mounts("cgroup /s/cpu cgroup rw,cpu 0 0\n").unwrap_err();
        assert!(error.to_string().contains("memory, pids"), "{error}");
    }

    #[test]
    fn a_group_stands_still_only_when_every_exec_of_it_does() {
        let tree = Tree::set_up(&format!("frztest{}", std::process::id())).unwrap();
        let group = tree.group("one");
        group.create(&limits(1 << 30)).unwrap();
        let Some(agent) = group.agent.clone() else {
            group.remove().unwrap();
            return tree.remove().unwrap();
        };
        group.create_run(1, 0).unwrap().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let start = |dir: &Path, program: &str, args: &[&str]| {
            let child = std::process::Command::new(program).args(args).spawn().unwrap();
            write(&dir.join("cgroup.procs"), &child.id().to_string()).unwrap();
            child
        };
        // One that can be stopped at once, and one in a call that goes to its end first.
        let mut idle = start(&agent, "sleep", &["600"]);
        let out = format!("of={}", file.path().display());
        let mut busy = start(
            &group.run_path(1).unwrap(),
            "dd",
            &["if=/dev/zero", &out, "bs=400M", "count=1", "conv=notrunc", "status=none"],
        );
        let written = || file.as_file().metadata().unwrap().len();
        while written() == 0 && busy.try_wait().unwrap().is_none() {
            std::thread::sleep(FREEZE_POLL);
        }
        let stands_still = group.freeze(Duration::from_secs(60), &|| true);
        let at_first = written();
        std::thread::sleep(Duration::from_millis(100));
        let later = written();
        group.thaw();
        for child in [&mut idle, &mut busy] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while group.remove().is_err() && std::time::Instant::now() < until {
            std::thread::sleep(FREEZE_POLL);
        }
        tree.remove().unwrap();
        assert!(stands_still && at_first > 0);
        assert_eq!(later, at_first);
    }

    #[test]
    fn limits_are_in_the_kernel_and_nothing_is_left() {
        let tree = Tree::set_up(&format!("systest{}", std::process::id())).unwrap();
        let group = tree.group("one");
        group.create(&limits(64 << 20)).unwrap();
        assert_eq!(number(&group.pids.join("pids.max")), 33);
        assert_eq!(tree.names(), ["one"]);
        if group.create_run(3, 12345).unwrap().is_some() {
            assert_eq!(group.run_numbers(), [3]);
        }
        assert!(tree.remove().is_err(), "a tree with a group was removed");
        group.remove().unwrap();
        assert!(group.is_gone());
        tree.remove().unwrap();
        assert!(tree.roots().iter().all(|root| !root.exists()));
    }
}
