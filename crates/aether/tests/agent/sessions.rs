//! Shell sessions, with bash and with dash.

use std::time::{Duration, Instant};

use dsec_proto::guest::{
    ExecStart, GuestErrorKind as Kind, Reply, Request, SessionInfo, SessionOpen, SessionRef,
};

use crate::support::{Client, Run, Sandbox, eventually, shell};

const SHELLS: [&str; 2] = ["/bin/bash", "/bin/dash"];

fn open(sandbox: &Sandbox, edge: &mut Client, name: &str, with: &str) -> SessionInfo {
    let request = SessionOpen { session: name.into(), shell: with.into(), ..SessionOpen::default() };
    match edge.call(Request::SessionOpen(request), &sandbox.cgroup(name)) {
        Ok((Reply::Session(info), _)) => info,
        other => panic!("{other:?}"),
    }
}

struct Session<'a> {
    edge: &'a mut Client,
    name: &'a str,
    count: u32,
}

impl Session<'_> {
    fn start(&mut self, line: &[u8], timeout_ms: u64) -> String {
        self.count += 1;
        let id = format!("{}-{}", self.name, self.count);
        let start = ExecStart {
            exec: id.clone(),
            shell: Some(line.to_vec()),
            session: self.name.into(),
            timeout_ms,
            ..ExecStart::default()
        };
        self.edge.start(start, &[]).unwrap();
        id
    }

    fn run(&mut self, line: &str) -> Run {
        let id = self.start(line.as_bytes(), 0);
        self.edge.wait(&id)
    }
}

/// A shell that another process of the sandbox traces is not the agent's to reap.
#[test]
fn a_session_is_closed_though_its_shell_is_traced() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let info = open(&sandbox, &mut edge, "s", "/bin/bash");
    let seize = format!(
        "import ctypes, time\nprint(ctypes.CDLL(None).ptrace(0x4206, {}, None, None), flush=True)\ntime.sleep(1000)",
        info.pid
    );
    edge.start(crate::support::exec("tracer", &["python3", "-c", &seize]), &[]).unwrap();
    edge.until("tracer", 0, |_, text| text == "0\n");
    edge.call(Request::SessionClose(SessionRef { session: "s".into() }), &[]).unwrap();
    // The name is free again, and a command that is traced ends as well when it is killed.
    let again = SessionOpen { session: "s".into(), shell: "/bin/bash".into(), ..SessionOpen::default() };
    edge.call(Request::SessionOpen(again), &sandbox.cgroup("s again")).unwrap();
    let pid = match edge.call(Request::ExecStart(crate::support::exec("v2", &["sleep", "1000"])), &[]) {
        Ok((Reply::ExecStarted(started), _)) => started.pid,
        other => panic!("{other:?}"),
    };
    let seize = seize.replace(&format!("(0x4206, {},", info.pid), &format!("(0x4206, {pid},"));
    edge.start(crate::support::exec("t2", &["python3", "-c", &seize]), &[]).unwrap();
    edge.until("t2", 0, |_, text| text == "0\n");
    let kill = dsec_proto::guest::ExecSignal { exec: "v2".into(), signal: 9, tree: false };
    edge.call(Request::ExecSignal(kill), &[]).unwrap();
    assert_eq!(edge.wait("v2").info.signal, 9);
}

#[test]
fn lines_share_one_shell() {
    for with in SHELLS {
        let sandbox = Sandbox::new();
        let mut edge = sandbox.client();
        let info = open(&sandbox, &mut edge, "s", with);
        assert!(info.pid > 1 && !info.existed);
        let mut s = Session { edge: &mut edge, name: "s", count: 0 };
        let table: &[(&str, i32, &str, &str)] = &[
            ("cd /tmp; x='a  b'; f() { echo \"f:$1\"; }; set -f; sleep 1000 &", 0, "", ""),
            ("pwd; echo \"$x\"; f 1; echo *", 0, "/tmp\na  b\nf:1\n*\n", ""),
            ("kill $!; wait $! 2>/dev/null; echo $?; set +f", 0, "143\n", ""),
            ("echo 'it'\\''s' \"q\\\"q\"", 0, "it's q\"q\n", ""),
            ("cat <<EOF\nhere $x\nEOF", 0, "here a  b\n", ""),
            ("cat <<'EOF'\nno newline at the end $x\nEOF", 0, "no newline at the end $x\n", ""),
            ("for i in 1 2\ndo\n  echo $i\ndone # comment", 0, "1\n2\n", ""),
            ("if", 2, "", "yntax error"),
            ("echo )", 2, "", "yntax error"),
            ("'", 2, "", ""),
            ("echo lives", 0, "lives\n", ""),
            ("false", 1, "", ""),
            ("echo $?", 0, "1\n", ""),
            ("(exit 77)", 77, "", ""),
            ("echo $?; echo err >&2", 0, "77\n", "err\n"),
            ("nosuchprogram", 127, "", "not found"),
            ("break 2>/dev/null; continue 2>/dev/null; echo still", 0, "still\n", ""),
            ("cat; read y; echo $?", 0, "1\n", ""),
            ("mkdir gone; cd gone; rmdir ../gone", 0, "", ""),
            ("echo in nowhere; cd /work && pwd", 0, "in nowhere\n/work\n", ""),
            ("alias ll='echo alias'; command() { echo hijack; }; unset -f command", 0, "", ""),
            ("set -x; echo traced; set +x", 0, "traced\n", "+ echo traced"),
            ("echo one; echo two >&2", 0, "one\n", "two\n"),
            ("exec 5>/tmp/five; echo to five >&5", 0, "", ""),
            ("exec 5>&-; cat /tmp/five", 0, "to five\n", ""),
            ("", 0, "", ""),
            ("\n\n# only a comment", 0, "", ""),
            ("ls /proc/self/fd | tr '\\n' ' '", 0, "0 1 2 3 ", ""),
            ("trap 'echo usr' USR1; kill -USR1 $$", 0, "usr\n", ""),
        ];
        for (line, code, out, err) in table {
            let run = s.run(line);
            assert_eq!((run.info.code, run.out.as_str()), (*code, *out), "{with}: {line}: {run:?}");
            assert!(
                run.err.contains(err) && (err.is_empty() == run.err.is_empty() || code == &2),
                "{with}: {line}: {run:?}"
            );
            assert!(run.info.pid == info.pid && !run.info.session_ended, "{with}: {line}: {run:?}");
        }
        let run = s.run("exit 3");
        assert!(run.info.code == 3 && run.info.session_ended, "{run:?}");
        while edge.sessions_ended.is_empty() {
            edge.pump();
        }
        let gone = edge.start(ExecStart { session: "s".into(), ..shell("late", ":") }, &[]).unwrap_err();
        assert_eq!(gone.kind, Kind::NotFound as i32);
    }
}

#[test]
fn messages_of_the_shell_do_not_name_the_agents_script() {
    for with in SHELLS {
        let sandbox = Sandbox::new();
        let mut edge = sandbox.client();
        open(&sandbox, &mut edge, "s", with);
        let mut s = Session { edge: &mut edge, name: "s", count: 0 };
        let missing = s.run("nosuchprogram; echo own >&2");
        assert!(
            missing.err.contains("nosuchprogram") && missing.err.ends_with("own\n"),
            "{with}: {missing:?}"
        );
        let id = s.start(b"sleep 1000", 300);
        let killed = s.edge.wait(&id);
        assert!(killed.info.timed_out, "{with}: {killed:?}");
        for run in [missing, killed] {
            assert!(!run.err.contains("/proc/self/fd"), "{with}: {run:?}");
        }
    }
}

#[test]
fn long_and_binary_lines_are_run_as_they_are() {
    for with in SHELLS {
        let sandbox = Sandbox::new();
        let mut edge = sandbox.client();
        open(&sandbox, &mut edge, "s", with);
        let mut s = Session { edge: &mut edge, name: "s", count: 0 };
        let long = format!("x='{}'; echo ${{#x}}", "y'\\''".repeat(200_000));
        let run = s.run(&long);
        assert_eq!(run.out, "400000\n", "{with}: {}", run.err);
        let id = s.start(b"printf '\xff\x81\x88' | od -An -tx1; head -c 9000 /dev/zero", 0);
        s.edge.wait(&id);
        let bytes = s.edge.bytes(&id, 0);
        assert_eq!(&bytes[..10], b" ff 81 88\n", "{with}");
        assert_eq!(bytes.len(), 9010);
        let nul = ExecStart { session: "s".into(), shell: Some(b"a\0b".to_vec()), ..shell("n", "") };
        assert_eq!(s.edge.start(nul, &[]).unwrap_err().kind, Kind::InvalidArgument as i32);
        assert_eq!(s.run("echo fine").out, "fine\n");
    }
}

#[test]
fn ends_of_the_shell_end_the_session() {
    for (number, line) in ["set -e; false", "exec true", "kill -9 $$"].iter().enumerate() {
        for with in SHELLS {
            let sandbox = Sandbox::new();
            let mut edge = sandbox.client();
            open(&sandbox, &mut edge, "s", with);
            let mut s = Session { edge: &mut edge, name: "s", count: 0 };
            s.run("setsid sleep 1000 &");
            let run = s.run(line);
            assert!(run.info.session_ended, "{with} {line} {run:?}");
            assert_eq!((run.info.code, run.info.signal), [(1, 0), (0, 0), (0, 9)][number], "{with}");
            while edge.sessions_ended.is_empty() {
                edge.pump();
            }
            assert!(sandbox.members("s").is_empty());
        }
    }
}

#[test]
fn a_line_past_its_time_loses_its_processes_and_the_session_stays() {
    for with in SHELLS {
        let sandbox = Sandbox::new();
        let mut edge = sandbox.client();
        open(&sandbox, &mut edge, "s", with);
        let mut s = Session { edge: &mut edge, name: "s", count: 0 };
        s.run("x=kept; sh -c 'while :; do sleep 0.05; done' & echo $!");
        let id = s.start(b"setsid sh -c 'setsid sleep 1000; :' & sleep 1000", 100);
        let run = s.edge.wait(&id);
        assert!(run.info.timed_out && !run.info.session_ended, "{run:?}");
        assert_eq!(
            s.run("echo $x; kill -0 $! 2>/dev/null; jobs | wc -l").out.lines().next(),
            Some("kept"),
            "{with}"
        );
        let background = s.run("ps -e -o args= | grep -c '[w]hile :'");
        // Twice for a moment, when it has forked for its `sleep`.
        assert_ne!(background.out, "0\n", "the earlier job is gone");
        // The shell itself is busy: nothing but its end helps.
        let started = Instant::now();
        let id = s.start(b"while :; do :; done", 100);
        let run = s.edge.wait(&id);
        assert!(run.info.timed_out && run.info.session_ended && run.info.signal == 9, "{run:?}");
        assert!(started.elapsed() < Duration::from_secs(3));
    }
}

#[test]
fn signals_interrupt_a_line_and_not_the_shell() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    open(&sandbox, &mut edge, "s", "");
    let mut s = Session { edge: &mut edge, name: "s", count: 0 };
    let id = s.start(b"echo up; sleep 1000; echo after $?", 0);
    let waiting = s.start(b"echo never", 0);
    s.edge.until(&id, 0, |_, text| text == "up\n");
    s.edge.signal(&waiting, libc::SIGTERM, false);
    assert_eq!(s.edge.wait(&waiting).info.signal, libc::SIGTERM);
    let name = "s";
    eventually("its cgroup", || sandbox.members(name).len() >= 2);
    s.edge.signal(&id, libc::SIGINT, false);
    assert_eq!(s.edge.wait(&id).out, "up\nafter 130\n");
    assert_eq!(s.run("echo here").out, "here\n");
}

#[test]
fn lines_wait_in_order_and_background_output_goes_to_the_next() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    open(&sandbox, &mut edge, "s", "");
    let mut s = Session { edge: &mut edge, name: "s", count: 0 };
    let first = s.start(b"sleep 0.2; echo 1 >>/work/order", 0);
    let ids: Vec<String> =
        (2..20).map(|i| s.start(format!("echo {i} >>/work/order; echo {i}").as_bytes(), 0)).collect();
    s.edge.wait(&first);
    for (id, i) in ids.iter().zip(2..) {
        assert_eq!(s.edge.wait(id).out, format!("{i}\n"));
    }
    assert_eq!(s.run("sort -nc /work/order && wc -l </work/order").out, "19\n");
    s.run("(while ! [ -e /work/go ]; do sleep 0.01; done; echo from behind; touch /work/said) &");
    s.edge.run(shell("go", "touch /work/go; while ! [ -e /work/said ]; do sleep 0.01; done"));
    assert_eq!(s.run("echo next").out, "from behind\nnext\n");
}

#[test]
fn sessions_are_found_refused_and_closed() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let first = open(&sandbox, &mut edge, "s", "");
    let again = SessionOpen { session: "s".into(), ..SessionOpen::default() };
    match edge.call(Request::SessionOpen(again), &[]) {
        Ok((Reply::Session(info), _)) => assert!(info.existed && info.pid == first.pid),
        other => panic!("{other:?}"),
    }
    let bad = SessionOpen { session: "t".into(), shell: b"/no/shell".to_vec(), ..SessionOpen::default() };
    let error = edge.call(Request::SessionOpen(bad), &[]).unwrap_err();
    assert!(error.message.contains("/no/shell does not exist"), "{error:?}");
    let mut s = Session { edge: &mut edge, name: "s", count: 0 };
    let running = s.start(b"trap '' TERM HUP; setsid sleep 1000 & sleep 1000", 0);
    let waiting = s.start(b"echo never", 0);
    let (hello_sessions, pending) = {
        let other = sandbox.client();
        (other.hello.sessions.len(), other.hello.sessions[0].pending)
    };
    assert_eq!((hello_sessions, pending), (1, 2));
    let mut edge = sandbox.client();
    edge.call(Request::SessionClose(SessionRef { session: "s".into() }), &[]).unwrap();
    assert!(sandbox.members("s").is_empty(), "all that it started is gone when it is answered");
    assert!(edge.wait(&running).info.session_ended);
    let lost = edge.wait(&waiting);
    assert!(lost.info.session_ended && lost.out.is_empty());
    let gone = edge.call(Request::SessionClose(SessionRef { session: "s".into() }), &[]).unwrap_err();
    assert_eq!(gone.kind, Kind::NotFound as i32);
}

/// States that a careless loop would spin in: a shell that was replaced, pipes without a reader,
/// lines that wait, background writers, an edge that is gone.
#[test]
fn waiting_costs_no_cpu() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    for (name, line) in [
        ("a", "exec sleep 1000"),
        ("b", "exec 9>&-; sleep 1000"),
        ("c", "exec 1>&- 2>&-; sleep 1000"),
        ("d", "(exec 8<&- 9>&-; sleep 1000) & sleep 1000"),
    ] {
        open(&sandbox, &mut edge, name, "");
        let mut s = Session { edge: &mut edge, name, count: 0 };
        s.start(line.as_bytes(), 0);
        s.start(b"echo waits", 0);
    }
    edge.run(shell("back", "sleep 1000 & exec 2>&-; :"));
    edge.start(shell("closed", "exec 1>&- 2>&-; sleep 1000"), &[]).unwrap();
    let pty = Some(dsec_proto::guest::Pty { rows: 9, cols: 9 });
    edge.start(ExecStart { pty, ..shell("pty", "exec 0>&- 1>&- 2>&-; setsid sleep 1000") }, &[]).unwrap();
    // Everything is under way: another command has come and gone.
    edge.run(shell("last", "sleep 0.1"));
    for connected in [true, false] {
        if !connected {
            drop(sandbox.client());
        }
        let before = sandbox.cpu_ticks();
        std::thread::sleep(Duration::from_millis(400));
        let used = sandbox.cpu_ticks() - before;
        assert!(used <= 4, "{used} ticks of 40, connected: {connected}");
    }
}
