//! A sandbox: a small root, the agent as pid 1 in it, and everything removed at the end.
#![allow(unsafe_code, reason = "fork, mount, setns, exec")]

use std::ffi::{CStr, CString};
use std::fs;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use dsec_proto::guest::Boot;
use prost::Message;

use super::Client;
use super::namespaces::{self, RANGE};

static COUNT: AtomicU32 = AtomicU32::new(0);
const V2: &str = "/sys/fs/cgroup/unified";
const V1: &str = "/sys/fs/cgroup";

/// What is not as usual.
pub(crate) struct Options {
    pub(crate) boot: Boot,
    /// Most processes of the sandbox, the agent among them.
    pub(crate) pids_max: Option<u32>,
    /// Most descriptors of the agent itself.
    pub(crate) agent_nofile: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        let env = vec![b"PATH=/usr/local/bin:/usr/bin:/bin".to_vec(), b"FROM_BOOT=1".to_vec()];
        let boot = Boot {
            generation: 1,
            env,
            user: "root".into(),
            cwd: b"/work".to_vec(),
            no_new_privs: true,
            // CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SYS_PTRACE: what attacks would use.
            capabilities: 0b1111_1011 | 1 << 19,
            nofile: 1024,
            seccomp: Vec::new(),
            tasks_fds: 0,
        };
        Self { boot, pids_max: None, agent_nofile: None }
    }
}

/// A running agent.
pub(crate) struct Sandbox {
    pub(crate) dir: PathBuf,
    pub(crate) owner: u32,
    /// The agent's process id as the host has it.
    pub(crate) pid: i32,
    launcher: i32,
    name: String,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    pub(crate) fn with(mut options: Options) -> Self {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let owner = 10_000_000 + (std::process::id() % 1000) * 2_000_000 + number * (RANGE + 10);
        let name = format!("dsec-aethertest-{}-{number}", std::process::id());
        let dir = PathBuf::from("/tmp").join(&name);
        for part in ["", "root", "spool"] {
            fs::create_dir(dir.join(part)).unwrap();
        }
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o711)).unwrap();
        chown(dir.join("spool"), Some(owner), Some(owner)).unwrap();
        let listen = UnixListener::bind(dir.join("socket")).unwrap();
        let spaces = namespaces::make(owner);
        let (tasks, joins) = make_cgroups(&name, owner, &options);
        options.boot.tasks_fds = tasks.len() as u32;
        let config = memfd(c"config", &options.boot.encode_to_vec(), 0o400);
        let spool = fs::File::open(dir.join("spool")).unwrap();
        let mut pass =
            vec![listen.as_raw_fd(), spaces.users.as_raw_fd(), spool.as_raw_fd(), config.as_raw_fd()];
        pass.extend(tasks.iter().map(AsRawFd::as_raw_fd));
        let plan = Plan {
            root: dir.join("root"),
            owner,
            outer: spaces.outer.as_raw_fd(),
            nofile: options.agent_nofile,
            program: agent_binary(),
            pass,
            joins: joins.iter().map(AsRawFd::as_raw_fd).collect(),
        };
        let (launcher, pid) = launch(&plan);
        Self { dir, owner, pid, launcher, name }
    }

    /// Connects as an edge and says hello.
    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.dir.join("socket"), &self.dir.join("spool"))
    }

    /// A cgroup for one exec: its directory and its `cgroup.kill`.
    pub(crate) fn cgroup(&self, name: &str) -> Vec<OwnedFd> {
        let dir = Path::new(V2).join(&self.name).join(name);
        fs::create_dir(&dir).unwrap();
        chown(dir.join("cgroup.procs"), Some(self.owner), None).unwrap();
        let kill = fs::OpenOptions::new().write(true).open(dir.join("cgroup.kill")).unwrap();
        vec![fs::File::open(&dir).unwrap().into(), kill.into()]
    }

    /// Limits the memory of all commands together.
    pub(crate) fn limit_memory(&self, bytes: u64) {
        let file = Path::new(V1).join("memory").join(&self.name).join("memory.limit_in_bytes");
        fs::write(file, bytes.to_string()).unwrap();
    }

    /// Processes in a cgroup made by [`Sandbox::cgroup`].
    pub(crate) fn members(&self, name: &str) -> Vec<i32> {
        let path = Path::new(V2).join(&self.name).join(name).join("cgroup.procs");
        fs::read_to_string(path).unwrap().lines().map(|l| l.parse().unwrap()).collect()
    }

    /// Memory of the agent that no other agent shares, KiB: its program's pages come from one memfd.
    pub(crate) fn private_kib(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid)).unwrap();
        let line = text.lines().find(|l| l.starts_with("Anonymous:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// CPU time of the agent so far, in clock ticks.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Descriptors that the agent holds.
    pub(crate) fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap().count()
    }

    /// The agent is there and not a zombie.
    pub(crate) fn alive(&self) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", self.pid))
            .is_ok_and(|s| !s.rsplit_once(") ").unwrap().1.starts_with('Z'))
    }

    /// States of all processes of the sandbox but the agent.
    pub(crate) fn states(&self) -> Vec<(i32, char)> {
        let ours = fs::read_link(format!("/proc/{}/ns/pid", self.pid)).unwrap();
        let pids = fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| *pid != self.pid)
            .filter(|pid| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns == ours))
            .filter_map(|pid| {
                let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
                Some((pid, stat.rsplit_once(") ")?.1.chars().next()?))
            })
            .collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // SAFETY: processes that this sandbox started and nobody has reaped but its launcher.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.launcher, std::ptr::null_mut(), 0);
        }
        remove_cgroups(&self.name);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The agent lives in `agent` of the sandbox's v2 cgroup and in its pids cgroup; commands enter the
/// memory cgroup.
fn make_cgroups(name: &str, owner: u32, options: &Options) -> (Vec<fs::File>, Vec<fs::File>) {
    let open = |path: PathBuf| fs::OpenOptions::new().write(true).open(path).unwrap();
    let memory = Path::new(V1).join("memory").join(name);
    fs::create_dir(&memory).unwrap();
    let unified = Path::new(V2).join(name);
    fs::create_dir(&unified).unwrap();
    chown(unified.join("cgroup.procs"), Some(owner), None).unwrap();
    fs::create_dir(unified.join("agent")).unwrap();
    let mut joins = vec![open(unified.join("agent/cgroup.procs"))];
    if let Some(max) = options.pids_max {
        let pids = Path::new(V1).join("pids").join(name);
        fs::create_dir(&pids).unwrap();
        fs::write(pids.join("pids.max"), max.to_string()).unwrap();
        joins.push(open(pids.join("tasks")));
    }
    (vec![open(memory.join("tasks"))], joins)
}

/// Once nothing is in them; their processes died with pid 1 of their namespace.
fn remove_cgroups(name: &str) {
    let unified = Path::new(V2).join(name);
    let _ = fs::write(unified.join("cgroup.kill"), "1");
    let below = fs::read_dir(&unified).into_iter().flatten().flatten().map(|e| e.path());
    let mut dirs: Vec<PathBuf> = below.filter(|p| p.is_dir()).collect();
    dirs.push(unified);
    dirs.extend(["memory", "pids"].map(|c| Path::new(V1).join(c).join(name)));
    for dir in dirs {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while dir.exists() && fs::remove_dir(&dir).is_err() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// The agent in a memfd that nobody can read or change, made once.
fn agent_binary() -> RawFd {
    static BINARY: OnceLock<OwnedFd> = OnceLock::new();
    BINARY
        .get_or_init(|| {
            let path = std::env::var("DSEC_AETHER_BIN");
            let path = path.unwrap_or_else(|_| env!("CARGO_BIN_EXE_dsec-aether").to_owned());
            memfd(c"init", &fs::read(path).unwrap(), 0o111)
        })
        .as_raw_fd()
}

fn memfd(name: &CStr, content: &[u8], mode: u32) -> OwnedFd {
    // SAFETY: a fresh descriptor, owned from here on.
    let fd = unsafe {
        OwnedFd::from_raw_fd(libc::memfd_create(name.as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC))
    };
    let mut file = fs::File::from(fd);
    file.write_all(content).unwrap();
    file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: integers only.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
    file.into()
}

struct Plan {
    root: PathBuf,
    owner: u32,
    outer: RawFd,
    nofile: Option<u64>,
    program: RawFd,
    pass: Vec<RawFd>,
    joins: Vec<RawFd>,
}

/// A process that waits for the agent (so that its end is seen), and the agent.
fn launch(plan: &Plan) -> (i32, i32) {
    let mut pipe = [0; 2];
    // SAFETY: two descriptors are written; the children end in exec or `_exit`.
    unsafe {
        assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let launcher = libc::fork();
        assert!(launcher >= 0, "fork");
        if launcher == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            close_others(plan, pipe[1]);
            assert_zero("unshare pid", libc::unshare(libc::CLONE_NEWPID));
            let agent = libc::fork();
            if agent == 0 {
                become_agent(plan);
            }
            let _ = libc::write(pipe[1], (&raw const agent).cast(), 4);
            let mut status = 0;
            libc::waitpid(agent, &raw mut status, 0);
            libc::_exit(0);
        }
        libc::close(pipe[1]);
        let mut agent = 0i32;
        assert_eq!(libc::read(pipe[0], (&raw mut agent).cast(), 4), 4);
        libc::close(pipe[0]);
        (launcher, agent)
    }
}

/// Closes what other tests had open at this moment: an end of file that they wait for would not come.
fn close_others(plan: &Plan, also: RawFd) {
    let keep = |fd: RawFd| {
        fd <= 2
            || fd == also
            || fd == plan.outer
            || fd == plan.program
            || plan.pass.contains(&fd)
            || plan.joins.contains(&fd)
    };
    for fd in (0..4096).filter(|fd| !keep(*fd)) {
        // SAFETY: this child's own copies; it ends in exec or `_exit` and drops no owner of them.
        unsafe { libc::close(fd) };
    }
}

fn assert_zero(what: &str, result: i32) {
    if result != 0 {
        let error = std::io::Error::last_os_error();
        eprintln!("launching an agent: {what}: {error}");
        // SAFETY: ends this child only.
        unsafe { libc::_exit(99) };
    }
}

fn mount(source: &str, target: &Path, kind: &str, flags: libc::c_ulong, data: &str) {
    let c = |s: &str| CString::new(s).unwrap();
    let (source, kind, data) = (c(source), c(kind), c(data));
    let to = c(target.to_str().unwrap());
    // SAFETY: all strings live through the call.
    let result =
        unsafe { libc::mount(source.as_ptr(), to.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) };
    assert_zero(&format!("mount {}", target.display()), result);
}

fn become_agent(plan: &Plan) -> ! {
    for fd in &plan.joins {
        // SAFETY: writes two bytes.
        assert_zero("join", i32::from(unsafe { libc::write(*fd, c"0".as_ptr().cast(), 1) } != 1));
    }
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWNET;
    // SAFETY: this child has one thread.
    assert_zero("unshare", unsafe { libc::unshare(spaces | libc::CLONE_NEWCGROUP) });
    build_root(&plan.root, plan.owner + 1);
    loopback_up();
    let root = CString::new(plan.root.to_str().unwrap()).unwrap();
    // SAFETY: the strings live through the calls; descriptors are this child's own copies.
    unsafe {
        assert_zero("chroot", libc::chroot(root.as_ptr()));
        assert_zero("chdir", libc::chdir(c"/".as_ptr()));
        let high: Vec<RawFd> = plan.pass.iter().map(|fd| libc::fcntl(*fd, libc::F_DUPFD, 100)).collect();
        let program = libc::fcntl(plan.program, libc::F_DUPFD_CLOEXEC, 100);
        let outer = libc::fcntl(plan.outer, libc::F_DUPFD_CLOEXEC, 100);
        for (fd, to) in high.iter().zip(3..) {
            libc::dup2(*fd, to);
        }
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        for to in 0..3 {
            libc::dup2(null, to);
        }
        assert_zero("setns", libc::setns(outer, libc::CLONE_NEWUSER));
        libc::syscall(libc::SYS_setgroups, 0, 0);
        libc::syscall(libc::SYS_setresgid, 0, 0, 0);
        libc::syscall(libc::SYS_setresuid, 0, 0, 0);
        let header: [u32; 2] = [0x2008_0522, 0];
        let none = [0u32; 6];
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr());
        if let Some(most) = plan.nofile {
            let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let first_extra = 3 + plan.pass.len() as u32;
        libc::syscall(libc::SYS_close_range, first_extra, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        let argv = [c"init".as_ptr(), std::ptr::null()];
        let env = [std::ptr::null::<libc::c_char>()];
        libc::syscall(
            libc::SYS_execveat,
            program,
            c"".as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
        libc::_exit(98)
    }
}

fn loopback_up() {
    // SAFETY: the request is a zeroed ifreq with a name.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        assert_zero("lo", libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const request));
        libc::close(socket);
    }
}

/// A tmpfs with the host's programs, accounts of its own, and fresh `/proc` and `/dev/pts`.
fn build_root(root: &Path, base: u32) {
    mount("none", Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE, "");
    mount("tmpfs", root, "tmpfs", 0, "mode=755,size=2g");
    let own = |path: &Path, id: u32| chown(path, Some(base + id), Some(base + id)).unwrap();
    own(root, 0);
    for dir in ["bin", "sbin", "lib", "lib64", "usr"] {
        let (from, to) = (Path::new("/").join(dir), root.join(dir));
        match fs::read_link(&from) {
            Ok(link) => std::os::unix::fs::symlink(link, to).unwrap(),
            Err(_) => {
                fs::create_dir(&to).unwrap();
                mount(from.to_str().unwrap(), &to, "", libc::MS_BIND | libc::MS_REC, "");
                mount("none", &to, "", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY, "");
            }
        }
    }
    for (dir, mode, id) in [
        ("etc", 0o755, 0),
        ("root", 0o700, 0),
        ("tmp", 0o1777, 0),
        ("work", 0o755, 0),
        ("home", 0o755, 0),
        ("home/bob", 0o755, 1000),
        ("proc", 0o755, 0),
        ("dev", 0o755, 0),
        ("dev/pts", 0o755, 0),
        ("other", 0o777, 0),
    ] {
        let path = root.join(dir);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        own(&path, id);
    }
    let passwd = "root:x:0:0:root:/root:/bin/bash\nbob:x:1000:1000:Bob:/home/bob:/bin/sh\n";
    fs::write(root.join("etc/passwd"), passwd).unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nbob:x:1000:\nextra:x:44:bob\n").unwrap();
    own(&root.join("etc/passwd"), 0);
    own(&root.join("etc/group"), 0);
    for device in ["null", "zero", "full", "random", "urandom", "tty"] {
        let to = root.join("dev").join(device);
        fs::write(&to, "").unwrap();
        mount(&format!("/dev/{device}"), &to, "", libc::MS_BIND, "");
    }
    for (link, to) in [
        ("fd", "/proc/self/fd"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        std::os::unix::fs::symlink(to, root.join("dev").join(link)).unwrap();
    }
    mount(
        "devpts",
        &root.join("dev/pts"),
        "devpts",
        0,
        &format!("newinstance,ptmxmode=0666,mode=620,gid={}", base + 5),
    );
    mount("proc", &root.join("proc"), "proc", 0, "hidepid=ptraceable");
    mount("tmpfs", &root.join("other"), "tmpfs", 0, &format!("mode=1777,size=64m,uid={base},gid={base}"));
}
