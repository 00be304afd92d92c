//! What an exec and an idle agent cost. `cargo test --release -p dsec-aether -- --ignored --nocapture`

use std::time::{Duration, Instant};

use dsec_proto::guest::{Empty, ExecStart, FileOp, Pty, Reply, Request, SessionOpen};

use crate::support::{Client, Options, Sandbox, exec};

const ROUNDS: usize = 300;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn time(edge: &mut Client, name: &str, start: impl Fn() -> ExecStart) -> Duration {
    let mut times = Vec::new();
    for i in 0..ROUNDS {
        let id = format!("{name}{i}");
        let start = ExecStart { exec: id.clone(), ..start() };
        let began = Instant::now();
        edge.start(start, &[]).unwrap();
        edge.wait(&id);
        times.push(began.elapsed());
        edge.forget(&id);
    }
    median(times)
}

#[test]
#[ignore = "a measurement"]
fn costs() {
    let sandbox = Sandbox::with(Options::default());
    let mut edge = sandbox.client();
    println!("idle, connected: {} KiB private", sandbox.private_kib());
    println!("exec true: {:?}", time(&mut edge, "t", || exec("", &["/bin/true"])));
    println!("exec sh -c: {:?}", time(&mut edge, "s", || exec("", &["/bin/sh", "-c", "echo hi"])));
    let pty = Some(Pty { rows: 24, cols: 80 });
    println!(
        "exec true on a terminal: {:?}",
        time(&mut edge, "p", || ExecStart { pty, ..exec("", &["/bin/true"]) })
    );
    let mut times = Vec::new();
    for i in 0..ROUNDS {
        let id = format!("c{i}");
        let cgroup = sandbox.cgroup(&id);
        let began = Instant::now();
        edge.start(exec(&id, &["/bin/true"]), &cgroup).unwrap();
        edge.wait(&id);
        times.push(began.elapsed());
        edge.forget(&id);
    }
    println!("exec true in its cgroup: {:?}", median(times));
    let floor = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        std::process::Command::new("/bin/true").env_clear().status().unwrap();
        began.elapsed()
    });
    println!("spawn and wait of /bin/true here: {:?}", median(floor.collect()));
    for shell in ["/bin/bash", "/bin/dash"] {
        let request =
            SessionOpen { session: shell[5..].into(), shell: shell.into(), ..SessionOpen::default() };
        assert!(matches!(edge.call(Request::SessionOpen(request), &[]), Ok((Reply::Session(_), _))));
        let line = || ExecStart {
            argv: vec![],
            shell: Some(b":".to_vec()),
            session: shell[5..].into(),
            ..ExecStart::default()
        };
        println!("line `:` in {shell}: {:?}", time(&mut edge, &shell[5..], line));
    }
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        edge.file("", "/etc/passwd", FileOp::Stat(Empty {})).reply().unwrap();
        times.push(began.elapsed());
    }
    println!("stat: {:?}", median(times));
    println!("idle, after all: {} KiB private", sandbox.private_kib());
}
