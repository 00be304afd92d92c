//! Commands: results, errors that name what was wrong, users, input, signals, time limits.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use dsec_proto::guest::{
    Check, Dial, Empty, ExecRef, ExecStart, GuestError, GuestErrorKind as Kind, PROGRAM_NOT_EXECUTABLE,
    PROGRAM_NOT_FOUND, Reply, Request, Stdin,
};

use crate::support::{Client, Options, Sandbox, eventually, exec, shell};

fn refused(edge: &mut Client, start: ExecStart) -> GuestError {
    edge.start(start, &[]).expect_err("it cannot be started")
}

#[test]
fn results_and_streams_come_apart() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let run = edge.run(shell("a", "echo out; echo err >&2; exit 3"));
    assert_eq!((run.info.code, run.info.signal, run.info.pid > 1), (3, 0, true));
    assert_eq!((run.out.as_str(), run.err.as_str()), ("out\n", "err\n"));
    let run = edge.run(exec("b", &["sh", "-c", "kill -9 $$"]));
    assert_eq!(run.info.signal, 9);
    let run = edge.run(exec("c", &["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"]));
    assert!(run.info.cpu_us > 10_000, "{run:?}");
    assert!(run.info.ended_ms >= run.info.started_ms && run.info.started_ms > 1_600_000_000_000);
}

#[test]
fn what_cannot_be_started_says_why() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let setup = "mkdir d; printf '#!/no/such\\n' >bad; printf '#!/bin/sh\\r\\n' >crlf; chmod +x bad crlf; \
                 echo x >plain; ln -s nowhere dangling; printf 'echo from-script $1' >noexec; chmod +x noexec";
    assert_eq!(edge.run(shell("setup", setup)).info.code, 0);
    let cases: Vec<(ExecStart, Kind, &str)> = vec![
        (
            exec("1", &["nosuch"]),
            Kind::InvalidArgument,
            "no program `nosuch` in PATH (/usr/local/bin:/usr/bin:/bin)",
        ),
        (exec("2", &["/nope/x"]), Kind::InvalidArgument, "program /nope/x does not exist"),
        (exec("3", &["/work/d"]), Kind::InvalidArgument, "/work/d is a directory"),
        (exec("4", &["/work/plain"]), Kind::InvalidArgument, "/work/plain may not be executed by user 0"),
        (
            exec("5", &["./bad"]),
            Kind::InvalidArgument,
            "script ./bad names the interpreter /no/such, which does not exist",
        ),
        (exec("6", &["./crlf"]), Kind::InvalidArgument, "names the interpreter /bin/sh\r"),
        (exec("7", &["./dangling"]), Kind::InvalidArgument, "symbolic link to nothing"),
        (exec("8", &[""]), Kind::InvalidArgument, "no program is named"),
        (exec("9", &[]), Kind::InvalidArgument, "argv is empty"),
        (exec("10", &["a\0b"]), Kind::InvalidArgument, "NUL"),
        (
            ExecStart { cwd: b"/nope".to_vec(), ..shell("11", ":") },
            Kind::InvalidArgument,
            "cwd /nope does not exist",
        ),
        (
            ExecStart { cwd: b"/work/plain".to_vec(), ..shell("12", ":") },
            Kind::InvalidArgument,
            "cwd /work/plain is not a directory",
        ),
        (
            ExecStart { cwd: b"/root".to_vec(), user: "bob".into(), ..shell("13", ":") },
            Kind::InvalidArgument,
            "cwd /root may not be entered by user 1000",
        ),
        (
            ExecStart { user: "eve".into(), ..shell("14", ":") },
            Kind::InvalidArgument,
            "user `eve` is not in /etc/passwd",
        ),
        (
            ExecStart { user: "bob:none".into(), ..shell("15", ":") },
            Kind::InvalidArgument,
            "group `none` is not in /etc/group",
        ),
        (ExecStart { user: "70000".into(), ..shell("16", ":") }, Kind::InvalidArgument, "outside the range"),
        (
            ExecStart { env: vec![b"NOVALUE".to_vec()], ..shell("17", ":") },
            Kind::InvalidArgument,
            "`NOVALUE` is no environment variable",
        ),
        (
            ExecStart { argv: vec![b"x".to_vec()], ..shell("18", ":") },
            Kind::InvalidArgument,
            "cannot go together",
        ),
        (exec("19", &["echo", &"x".repeat(200_000)]), Kind::TooLarge, "argument list too long"),
        (exec("../20", &["true"]), Kind::InvalidArgument, "is no exec id"),
        (ExecStart { session: "none".into(), ..shell("21", ":") }, Kind::NotFound, "no session none"),
    ];
    for (start, kind, text) in cases {
        let error = refused(&mut edge, start);
        assert!(error.kind == kind as i32 && error.message.contains(text), "{error:?} has no `{text}`");
    }
    // What a shell makes 127 and 126 is told apart for programs, and nothing else is.
    for (argv, reason) in [
        ("nosuch", PROGRAM_NOT_FOUND),
        ("/nope/x", PROGRAM_NOT_FOUND),
        ("/work/plain/x", PROGRAM_NOT_FOUND),
        ("./bad", PROGRAM_NOT_FOUND),
        ("/work/d", PROGRAM_NOT_EXECUTABLE),
        ("/work/plain", PROGRAM_NOT_EXECUTABLE),
        ("", ""),
    ] {
        assert_eq!(refused(&mut edge, exec("22", &[argv])).reason, reason, "{argv}");
    }
    // Nothing of them is known; the names are free.
    assert_eq!(sandbox.client().hello.execs.len(), 1);
    let mut edge = sandbox.client();
    assert_eq!(edge.run(exec("1", &["./noexec", "arg"])).out, "from-script arg\n");
    let again = refused(&mut edge, shell("1", ":"));
    assert_eq!(again.kind, Kind::AlreadyExists as i32);
}

#[test]
fn an_account_file_that_is_no_file_hangs_nobody() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("a", "rm /etc/passwd; mkfifo /etc/passwd"));
    let error = refused(&mut edge, shell("b", ":"));
    assert!(error.message.contains("/etc/passwd is not a regular file"), "{error:?}");
    let _ = sandbox.client();
}

#[test]
fn users_groups_environment_and_rights() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let id = |edge: &mut Client, name: &str, user: &str| {
        let line = "echo $(id -u):$(id -g):$(id -G):$HOME:$USER:$FROM_BOOT:$PATH; pwd";
        edge.run(ExecStart { user: user.into(), ..shell(name, line) }).out
    };
    assert_eq!(id(&mut edge, "a", ""), "0:0:0:/root:root:1:/usr/local/bin:/usr/bin:/bin\n/work\n");
    assert!(id(&mut edge, "b", "bob").starts_with("1000:1000:1000 44:/home/bob:bob:1:"));
    assert!(id(&mut edge, "c", "1234:77").starts_with("1234:77:77:/::1:"));
    let env = vec![b"HOME=/x".to_vec(), b"FROM_BOOT=2".to_vec(), b"A=b=c".to_vec()];
    let run = edge.run(ExecStart { env, user: "bob".into(), ..shell("d", "echo $HOME $FROM_BOOT $A") });
    assert_eq!(run.out, "/x 2 b=c\n");
    let line = "grep -E '^(Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Sig(Blk|Ign))' /proc/self/status; ulimit -n; ulimit -c; umask";
    let root = edge.run(shell("e", line)).out;
    for wanted in [
        "CapInh:\t0000000000000000",
        "CapPrm:\t00000000000800fb",
        "CapBnd:\t00000000000800fb",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "SigBlk:\t0000000000000000",
        "SigIgn:\t0000000000000000",
        "\n1024\n0\n0022\n",
    ] {
        assert!(root.contains(wanted), "{wanted} is not in {root}");
    }
    let bob = edge.run(ExecStart { user: "bob".into(), ..shell("f", line) }).out;
    assert!(bob.contains("CapEff:\t0000000000000000"), "{bob}");
    // Only the three standard descriptors; ls has one on the directory itself.
    assert_eq!(edge.run(shell("g", "ls /proc/self/fd | tr '\\n' ' '")).out, "0 1 2 3 ");
    // Streams may be opened by name, by anybody.
    let named = "echo o >/dev/stdout; echo e >/dev/stderr";
    let run = edge.run(ExecStart { user: "bob".into(), ..shell("h", named) });
    assert_eq!((run.out.as_str(), run.err.as_str()), ("o\n", "e\n"));
}

#[test]
fn standard_input_is_null_given_or_streamed() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    assert_eq!(edge.run(shell("a", "cat; echo end")).out, "end\n");
    let given = vec![b'x'; 64 * 1024];
    let start = ExecStart { stdin_mode: Stdin::Given as i32, stdin: given, ..shell("b", "wc -c") };
    assert_eq!(edge.run(start).out.trim(), "65536");
    let start = ExecStart { stdin_mode: Stdin::Pipe as i32, ..shell("c", "cat") };
    let (_, fds) = edge.start(start, &[]).unwrap();
    fs::File::from(fds.into_iter().next().unwrap()).write_all(b"one ").unwrap();
    // Closed here, still open in the agent: another end can be had.
    let name = || ExecRef { exec: "c".into() };
    let (_, fds) = edge.call(Request::StdinOpen(name()), &[]).unwrap();
    fs::File::from(fds.into_iter().next().unwrap()).write_all(b"two").unwrap();
    edge.until("c", 0, |_, text| text == "one two");
    edge.call(Request::StdinClose(name()), &[]).unwrap();
    assert_eq!(edge.wait("c").out, "one two");
    let error = edge.call(Request::StdinOpen(name()), &[]).unwrap_err();
    assert_eq!(error.kind, Kind::Conflict as i32);
}

#[test]
fn an_end_waits_a_little_for_output_that_is_still_held() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let started = Instant::now();
    let run = edge.run(shell("a", "(read x </proc/self/fd/0; sleep 0.6; echo late) & echo now"));
    assert_eq!(run.out, "now\n");
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert_eq!(edge.until("a", 0, |_, text| text.contains("late")), "now\nlate\n");
}

#[test]
fn signals_reach_the_group_or_the_tree() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.start(shell("a", "trap 'echo got; exit 7' TERM; echo up; while :; do sleep 0.01; done"), &[])
        .unwrap();
    edge.until("a", 0, |_, text| text == "up\n");
    edge.signal("a", libc::SIGTERM, false);
    let run = edge.wait("a");
    assert_eq!((run.info.code, run.out.as_str()), (7, "up\ngot\n"));
    // A daemon in a session of its own is reached through the cgroup only.
    let line = "setsid sh -c 'setsid sleep 1000 & sleep 1000' & echo up; wait";
    edge.start(shell("b", line), &sandbox.cgroup("b")).unwrap();
    eventually("its cgroup", || sandbox.members("b").len() >= 4);
    edge.signal("b", libc::SIGKILL, true);
    assert_eq!(edge.wait("b").info.signal, 9);
    eventually("its cgroup", || sandbox.members("b").is_empty());
}

#[test]
fn a_time_limit_ends_daemons_too() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let line = "setsid sh -c 'trap \"\" TERM; setsid sleep 1000 & sleep 1000' & sleep 1000";
    let start = ExecStart { timeout_ms: 150, ..shell("a", line) };
    let started = Instant::now();
    edge.start(start, &sandbox.cgroup("a")).unwrap();
    let run = edge.wait("a");
    assert!(run.info.timed_out && run.info.signal == 9, "{run:?}");
    assert!(started.elapsed() < Duration::from_secs(2));
    eventually("its cgroup", || sandbox.members("a").is_empty());
    // Without a cgroup: the group and all descendants.
    let start = ExecStart { timeout_ms: 100, ..shell("b", "setsid sleep 1000 & (setsid sleep 1000); :") };
    edge.start(start, &[]).unwrap();
    assert!(edge.wait("b").info.timed_out);
    eventually("the processes of the sandbox", || sandbox.states().is_empty());
}

#[test]
fn ports_are_dialled_on_the_sandbox_loopback() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let dial = |edge: &mut Client, port| edge.call(Request::Dial(Dial { port }), &[]);
    let error = dial(&mut edge, 8080).unwrap_err();
    assert_eq!(
        (error.kind, error.message.as_str()),
        (Kind::Unavailable as i32, "nothing listens on port 8080 inside the sandbox")
    );
    assert_eq!(dial(&mut edge, 0).unwrap_err().kind, Kind::InvalidArgument as i32);
    let server = "import socket\ns=socket.socket(socket.AF_INET6)\ns.setsockopt(41,26,1)\ns.bind(('::1',8080))\ns.listen()\nprint('up',flush=True)\nc,_=s.accept()\nc.sendall(b'hi')";
    edge.start(exec("s", &["python3", "-c", server]), &[]).unwrap();
    edge.until("s", 0, |_, text| text == "up\n");
    let (_, fds) = dial(&mut edge, 8080).unwrap();
    let socket = std::net::TcpStream::from(fds.into_iter().next().unwrap());
    socket.set_nonblocking(false).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut &socket, &mut text).unwrap();
    assert_eq!(text, "hi");
}

#[test]
fn checks_answer_for_users_and_directories() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let mut check =
        |user: &str, cwd: &str| edge.call(Request::Check(Check { user: user.into(), cwd: cwd.into() }), &[]);
    assert!(check("bob", "/home/bob").is_ok() && check("", "").is_ok());
    assert!(check("eve", "").unwrap_err().message.contains("eve"));
    assert!(check("bob", "/root").unwrap_err().message.contains("/root"));
}

#[test]
fn the_limit_of_processes_is_named() {
    let sandbox = Sandbox::with(Options { pids_max: Some(8), ..Options::default() });
    let mut edge = sandbox.client();
    edge.start(shell("a", "for i in 1 2 3 4 5 6; do sleep 1000 & done; echo up; wait"), &[]).unwrap();
    edge.until("a", 0, |_, text| text.contains("up"));
    let error = refused(&mut edge, shell("b", ":"));
    assert_eq!(error.kind, Kind::ResourceExhausted as i32, "{error:?}");
    assert!(error.message.contains("limit of processes (pids)"), "{error:?}");
    edge.signal("a", libc::SIGKILL, true);
    edge.wait("a");
    eventually("the processes of the sandbox", || sandbox.states().is_empty());
    assert_eq!(edge.run(shell("c", "echo again")).out, "again\n");
}

#[test]
fn termination_reaches_all_and_nothing_starts_after_it() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.start(shell("a", "setsid sleep 1000 & echo up; wait"), &[]).unwrap();
    edge.until("a", 0, |_, text| text == "up\n");
    assert!(matches!(edge.call(Request::Terminate(Empty {}), &[]), Ok((Reply::Done(_), _))));
    assert_eq!(edge.wait("a").info.signal, libc::SIGTERM);
    assert_eq!(refused(&mut edge, shell("b", ":")).kind, Kind::Conflict as i32);
}
