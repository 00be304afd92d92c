//! What a user of the sandbox, root included, may try against the agent.

use crate::support::{Options, Sandbox, eventually, exec, shell};

#[test]
fn root_inside_cannot_touch_or_read_the_agent() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let script = r#"
import os, ctypes, signal
bad = []
libc = ctypes.CDLL(None, use_errno=True)
for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM, signal.SIGCONT):
    try:
        os.kill(1, s); bad.append(f"kill {s}")
    except OSError: pass
for f in ("environ", "maps", "mem", "auxv", "stack", "syscall", "io", "pagemap", "smaps", "wchan"):
    try:
        with open(f"/proc/1/{f}", "rb") as h:
            if h.read(16): bad.append(f)
    except OSError: pass
for f in ("exe", "cwd", "root", "fd/3", "fd/6", "ns/user"):
    try: os.readlink(f"/proc/1/{f}"); bad.append(f)
    except OSError: pass
for f in ("fd", "map_files", "fdinfo"):
    try: os.listdir(f"/proc/1/{f}"); bad.append(f)
    except OSError: pass
for f in ("oom_score_adj", "comm", "clear_refs"):
    try:
        with open(f"/proc/1/{f}", "w") as h: h.write("1")
        bad.append("write " + f)
    except OSError: pass
for request in (16, 0x4206):
    if libc.ptrace(request, 1, 0, 0) == 0: bad.append("ptrace")
p = libc.syscall(434, 1, 0)
if p >= 0:
    for n in range(12):
        if libc.syscall(438, p, n, 0) >= 0: bad.append(f"pidfd_getfd {n}")
if libc.setpriority(0, 1, 19) == 0: bad.append("renice")
class R(ctypes.Structure): _fields_ = [("a", ctypes.c_ulong), ("b", ctypes.c_ulong)]
if libc.prlimit(1, 7, ctypes.byref(R(3, 3)), None) == 0: bad.append("prlimit")
if libc.sched_setaffinity(1, 8, ctypes.byref(ctypes.c_ulong(1))) == 0: bad.append("affinity")
print(bad)
"#;
    for user in ["root", "bob"] {
        let start =
            dsec_proto::guest::ExecStart { user: user.into(), ..exec(user, &["python3", "-c", script]) };
        let run = edge.run(start);
        assert_eq!((run.out.as_str(), run.err.as_str()), ("[]\n", ""), "as {user}");
    }
    assert!(sandbox.alive());
    assert_eq!(edge.run(shell("z", "echo on; cat /proc/1/comm 2>/dev/null")).out.lines().next(), Some("on"));
}

/// A process that tries to catch children of the agent before they are commands.
#[test]
fn a_child_cannot_be_looked_into_before_it_is_a_command() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let script = r#"
import os, ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
me = os.getpid()
print("up", flush=True)
caught = 0
while not os.path.exists("/work/stop"):
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, me): continue
        try:
            fds = os.listdir(f"/proc/{name}/fd")
            links = [os.readlink(f"/proc/{name}/fd/{f}") for f in fds]
            exe = os.readlink(f"/proc/{name}/exe")
        except OSError: continue
        if "memfd" in exe or any("spool" in l or "config" in l or "user:" in l for l in links):
            caught += 1
print("caught", caught)
"#;
    edge.start(exec("spy", &["python3", "-c", script]), &[]).unwrap();
    edge.until("spy", 0, |_, text| text == "up\n");
    for i in 0..150 {
        edge.run(exec(&format!("e{i}"), &["true"]));
    }
    edge.run(shell("stop", "touch /work/stop"));
    assert_eq!(edge.wait("spy").out, "up\ncaught 0\n");
}

#[test]
fn orphans_are_reaped_and_bombs_are_survived() {
    let sandbox = Sandbox::with(Options { pids_max: Some(60), ..Options::default() });
    let mut edge = sandbox.client();
    edge.run(shell("a", "i=0; while [ $i -lt 500 ]; do (: & ) ; i=$((i+1)); done"));
    eventually("orphans are reaped", || sandbox.states().is_empty());
    let bomb = dsec_proto::guest::ExecStart {
        timeout_ms: 700,
        ..exec("bomb", &["python3", "-c", "import os\nwhile True:\n try: os.fork()\n except OSError: pass"])
    };
    edge.start(bomb, &sandbox.cgroup("bomb")).unwrap();
    assert!(edge.wait("bomb").info.timed_out);
    eventually("the processes of the sandbox", || sandbox.states().is_empty());
    assert!(sandbox.alive());
    assert_eq!(edge.run(shell("after", "echo on")).out, "on\n");
}

/// A stopped child of the agent holds up nobody but itself.
#[test]
fn a_stopped_file_child_does_not_stop_the_agent() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.start(shell("stopper", "echo up; while :; do for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p -gt 1 ] && [ $p != $$ ] && kill -STOP $p 2>/dev/null; done; done"), &[]).unwrap();
    edge.until("stopper", 0, |_, text| text == "up\n");
    let started: Vec<u64> = (0..20)
        .map(|i| edge.send(dsec_proto::guest::Request::ExecStart(exec(&format!("e{i}"), &["true"])), &[]))
        .collect();
    edge.signal("stopper", libc::SIGKILL, false);
    edge.wait("stopper");
    sandbox.states().iter().for_each(|(pid, _)| {
        let _ = std::process::Command::new("kill").args(["-CONT", &pid.to_string()]).output();
    });
    for (i, id) in started.into_iter().enumerate() {
        edge.answer(id).unwrap();
        edge.wait(&format!("e{i}"));
    }
}

/// `mkdir` fails with EPERM, all else is allowed.
fn no_mkdir() -> Vec<u8> {
    let program: [(u16, u8, u8, u32); 5] = [
        (0x20, 0, 0, 0),           // load the call's number
        (0x15, 1, 0, 83),          // mkdir
        (0x15, 0, 1, 258),         // mkdirat
        (0x06, 0, 0, 0x0005_0001), // EPERM
        (0x06, 0, 0, 0x7fff_0000), // allow
    ];
    program
        .iter()
        .flat_map(|(code, jt, jf, k)| [&code.to_ne_bytes()[..], &[*jt, *jf], &k.to_ne_bytes()].concat())
        .collect()
}

#[test]
fn the_filter_binds_commands_and_file_operations_with_and_without_no_new_privs() {
    for no_new_privs in [true, false] {
        let mut options = Options::default();
        options.boot.seccomp = no_mkdir();
        options.boot.no_new_privs = no_new_privs;
        let sandbox = Sandbox::with(options);
        let mut edge = sandbox.client();
        let line = "grep -E 'Seccomp:|NoNewPrivs:|CapEff:' /proc/self/status; mkdir /tmp/x 2>&1";
        for user in ["root", "bob"] {
            let start = dsec_proto::guest::ExecStart { user: user.into(), ..shell(user, line) };
            let run = edge.run(start);
            let caps = if user == "root" { "00000000000800fb" } else { "0000000000000000" };
            for wanted in [
                caps,
                "Seccomp:\t2",
                "Operation not permitted",
                &format!("NoNewPrivs:\t{}", u8::from(no_new_privs)),
            ] {
                assert!(run.out.contains(wanted), "{user} {no_new_privs}: {run:?}");
            }
            let make = dsec_proto::guest::FileMakeDir { parents: false, mode: 0o755 };
            let error =
                edge.file(user, "/tmp/y", dsec_proto::guest::FileOp::MakeDir(make)).reply().unwrap_err();
            assert!(error.message.contains("not permitted"), "{error:?}");
        }
        // A terminal works under it as well.
        let pty = Some(dsec_proto::guest::Pty { rows: 24, cols: 80 });
        let start = dsec_proto::guest::ExecStart { pty, user: "bob".into(), ..shell("pty", "tty") };
        assert_eq!(edge.run(start).out, "/dev/pts/0\r\n");
    }
}

/// The memory limit kills commands, never the agent.
#[test]
fn memory_fillers_take_only_themselves_down() {
    let sandbox = Sandbox::new();
    sandbox.limit_memory(24 << 20);
    let mut edge = sandbox.client();
    let run = edge.run(exec("a", &["python3", "-c", "x = bytearray(400 << 20)"]));
    assert!(run.info.signal == 9 || run.info.code != 0, "{run:?}");
    assert!(sandbox.alive());
    assert_eq!(edge.run(shell("b", "echo on")).out, "on\n");
}

/// Time limits of any size, and names of any kind, are no way to end the agent.
#[test]
fn extreme_numbers_are_harmless() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let start = dsec_proto::guest::ExecStart {
        timeout_ms: u64::MAX,
        output_limit: u64::MAX,
        ..shell("a", "head -c 20000 /dev/zero")
    };
    assert_eq!(edge.run(start).info.stdout.unwrap().kept, 20_000);
    let pty = Some(dsec_proto::guest::Pty { rows: u32::MAX, cols: u32::MAX });
    let start = dsec_proto::guest::ExecStart { pty, ..shell("b", "stty size") };
    assert_eq!(edge.run(start).out, "65535 65535\r\n");
    for signal in [-1, 65, i32::MIN] {
        let request = dsec_proto::guest::ExecSignal { exec: "a".into(), signal, tree: true };
        assert!(edge.call(dsec_proto::guest::Request::ExecSignal(request), &[]).is_err());
    }
    assert!(sandbox.alive());
}
