//! Commands and sessions on terminals.

use std::fs;
use std::io::Write;

use dsec_proto::guest::{
    ExecRef, ExecStart, GuestErrorKind as Kind, PTY_WINDOW, Pty, Reply, Request, SessionOpen,
};

use crate::support::{Sandbox, eventually, shell};

#[test]
fn a_terminal_has_its_user_size_and_signals() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let line = "tty; stty size; ls -l $(tty) | cut -d' ' -f3; ps -o tty= -p $$ | tr -d ' '; \
                trap 'stty size; exit 4' WINCH; echo up; while :; do sleep 0.02; done";
    let start = ExecStart { user: "bob".into(), pty: Some(Pty { rows: 33, cols: 99 }), ..shell("a", line) };
    let (_, fds) = edge.start(start, &[]).unwrap();
    let text = edge.until("a", 0, |_, text| text.contains("up\r\n"));
    assert_eq!(text, "/dev/pts/0\r\n33 99\r\nbob\r\npts/0\r\nup\r\n");
    let size = rustix::termios::Winsize { ws_row: 10, ws_col: 20, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&fds[0], size).unwrap();
    let run = edge.wait("a");
    assert!(run.info.code == 4 && run.info.pty && run.out.ends_with("10 20\r\n"), "{run:?}");
}

#[test]
fn a_terminal_reads_what_is_typed() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let start = ExecStart { pty: Some(Pty { rows: 24, cols: 80 }), ..shell("a", "cat; echo over") };
    let (_, fds) = edge.start(start, &[]).unwrap();
    let mut master = fs::File::from(fds.into_iter().next().unwrap());
    master.write_all(b"typed\n").unwrap();
    edge.until("a", 0, |_, text| text == "typed\r\ntyped\r\n");
    edge.call(Request::StdinClose(ExecRef { exec: "a".into() }), &[]).unwrap();
    assert!(edge.wait("a").out.ends_with("over\r\n"));
}

#[test]
fn old_output_of_a_terminal_leaves_its_file() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let line = "yes 0123456789abcde | head -n 800000; echo the-end";
    let start = ExecStart { pty: Some(Pty { rows: 24, cols: 80 }), ..shell("a", line) };
    edge.start(start, &[]).unwrap();
    let run = edge.wait("a");
    let out = run.info.stdout.unwrap();
    assert_eq!(out.total, 800_000 * 17 + 9);
    assert!(out.start > 0 && out.start + out.kept == out.total && out.kept >= PTY_WINDOW, "{out:?}");
    assert!(run.out.ends_with("the-end\r\n"));
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(edge.spool_file("a.out")).unwrap());
    assert!(blocks * 512 <= PTY_WINDOW + (2 << 20), "{} bytes on disk", blocks * 512);
}

#[test]
fn a_session_on_a_terminal_is_an_exec_to_attach_to() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let request = SessionOpen {
        session: "t".into(),
        shell: b"/bin/bash".to_vec(),
        pty: Some(Pty { rows: 24, cols: 80 }),
        pty_exec: "t-exec".into(),
        env: vec![b"PS1=ready>".to_vec()],
        ..SessionOpen::default()
    };
    match edge.call(Request::SessionOpen(request), &sandbox.cgroup("t")) {
        Ok((Reply::Session(info), _)) => assert_eq!(info.pty_exec, "t-exec"),
        other => panic!("{other:?}"),
    }
    let line = ExecStart { session: "t".into(), ..shell("line", ":") };
    assert_eq!(edge.start(line, &[]).unwrap_err().kind, Kind::Conflict as i32);
    let (_, fds) = edge.call(Request::StdinOpen(ExecRef { exec: "t-exec".into() }), &[]).unwrap();
    let mut master = fs::File::from(fds.into_iter().next().unwrap());
    master.write_all(b"echo $((40+2))\n").unwrap();
    edge.until("t-exec", 0, |_, text| text.contains("42\r\n"));
    master.write_all(b"setsid sleep 1000 >/dev/null 2>&1 </dev/null & exit 5\n").unwrap();
    assert_eq!(edge.wait("t-exec").info.code, 5);
    while edge.sessions_ended != ["t"] {
        edge.pump();
    }
    eventually("its cgroup", || sandbox.members("t").is_empty());
    assert!(sandbox.client().hello.sessions.is_empty());
}
