//! Output: spool files, limits, and what it costs the agent.

use dsec_proto::guest::{ENDED_EXECS_MAX, ExecStart, GuestErrorKind, HEAD_MAX, Request};

use crate::support::{Options, Sandbox, exec, shell};

#[test]
fn a_stream_moves_to_its_file_when_the_head_is_full() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    for (id, bytes, spooled) in [("a", HEAD_MAX, false), ("b", HEAD_MAX + 1, true), ("c", 3_000_000, true)] {
        let run = edge.run(shell(id, &format!("head -c {bytes} /dev/zero | tr '\\0' x")));
        let out = run.info.stdout.unwrap();
        assert_eq!((out.total, out.kept, out.spooled), (bytes as u64, bytes as u64, spooled));
        assert_eq!(run.out, "x".repeat(bytes));
        assert_eq!(edge.spool_file(&format!("{id}.out")).exists(), spooled);
        assert!(!edge.spool_file(&format!("{id}.err")).exists());
    }
    edge.forget("c");
    assert!(!edge.spool_file("c.out").exists());
}

#[test]
fn a_gigabyte_nobody_reads_is_counted_and_costs_nothing() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let limit = 64 << 20;
    let start = ExecStart { output_limit: limit, ..exec("a", &["head", "-c", "1G", "/dev/zero"]) };
    edge.start(start, &[]).unwrap();
    drop(edge);
    let mut edge = loop {
        let edge = sandbox.client();
        if edge.hello.execs[0].ended {
            break edge;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let out = edge.wait("a").info.stdout.unwrap();
    assert_eq!((out.total, out.kept, out.spooled), (1 << 30, limit, true));
    assert_eq!(std::fs::metadata(edge.spool_file("a.out")).unwrap().len(), limit);
    let private = sandbox.private_kib();
    assert!(private < 1024, "{private} KiB private");
}

#[test]
fn a_small_limit_needs_no_file() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let start = ExecStart { output_limit: 10, ..shell("a", "printf 0123456789abc; printf x >&2") };
    let run = edge.run(start);
    let out = run.info.stdout.unwrap();
    assert_eq!((out.total, out.kept, out.spooled, run.out.as_str()), (13, 10, false, "0123456789"));
    assert_eq!(run.err, "x");
}

#[test]
fn a_full_spool_truncates_and_the_command_goes_on() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    // The name is taken: as good as no room.
    std::fs::write(edge.spool_file("a.out"), "other").unwrap();
    let run = edge.run(shell("a", "head -c 100000 /dev/zero; echo done >&2"));
    let out = run.info.stdout.unwrap();
    assert_eq!((out.total, run.info.code, run.err.as_str()), (100_000, 0, "done\n"));
    assert!(out.kept <= HEAD_MAX as u64 && !out.spooled);
}

#[test]
fn old_ended_commands_make_room() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    edge.run(shell("first", "head -c 10000 /dev/zero"));
    for i in 0..ENDED_EXECS_MAX {
        edge.run(exec(&format!("x{i}"), &["true"]));
    }
    assert!(!edge.spool_file("first.out").exists());
    let edge = sandbox.client();
    assert_eq!(edge.hello.execs.len(), ENDED_EXECS_MAX);
    assert!(edge.hello.execs.iter().all(|e| e.ended && e.exec != "first"));
}

#[test]
fn a_writer_outlives_the_forgetting_of_its_command() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let line = "(while ! [ -e /work/go ]; do sleep 0.01; done; echo x; echo x; echo alive >/work/after) & :";
    edge.run(shell("a", line));
    edge.forget("a");
    edge.run(shell("b", "touch /work/go"));
    let run = edge.run(shell("c", "while ! [ -s /work/after ]; do sleep 0.01; done; cat /work/after"));
    assert_eq!(run.out, "alive\n");
}

#[test]
fn writers_left_behind_cost_a_bounded_number_of_descriptors() {
    const COUNT: usize = 200;
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let before = sandbox.open_files();
    let ids: Vec<String> = (0..COUNT).map(|i| format!("e{i}")).collect();
    for id in &ids {
        edge.start(shell(id, "sleep 1000 & :"), &[]).unwrap();
    }
    for id in &ids {
        edge.wait(id);
        edge.forget(id);
    }
    let held = sandbox.open_files() - before;
    assert!((100..=256).contains(&held), "{held} descriptors for two pipes of {COUNT} commands each");
    assert_eq!(edge.run(shell("on", "echo on")).out, "on\n");
}

#[test]
fn a_burst_of_commands_loses_nothing() {
    const COUNT: usize = 400;
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    let ids: Vec<u64> = (0..COUNT)
        .map(|i| {
            edge.send(
                Request::ExecStart(shell(
                    &format!("e{i}"),
                    &format!("echo {i}; echo -{i} >&2; exit $(({i} % 200))"),
                )),
                &[],
            )
        })
        .collect();
    for id in ids {
        edge.answer(id).unwrap();
    }
    for i in 0..COUNT {
        let run = edge.wait(&format!("e{i}"));
        assert_eq!(
            (run.info.code as usize, run.out, run.err),
            (i % 200, format!("{i}\n"), format!("-{i}\n"))
        );
    }
}

#[test]
fn an_agent_without_descriptors_says_so_and_recovers() {
    let sandbox = Sandbox::with(Options { agent_nofile: Some(64), ..Options::default() });
    let mut edge = sandbox.client();
    let mut refused = None;
    for i in 0..40 {
        if let Err(error) = edge.start(exec(&format!("e{i}"), &["sleep", "1000"]), &[]) {
            refused = Some(error);
            break;
        }
    }
    let refused = refused.expect("64 descriptors are not enough");
    assert_eq!(refused.kind, GuestErrorKind::ResourceExhausted as i32, "{refused:?}");
    // A new edge still gets in, and it is not paid for by spinning.
    drop(edge);
    let mut edge = sandbox.client();
    for exec in edge.hello.execs.clone() {
        edge.signal(&exec.exec, libc::SIGKILL, true);
        edge.wait(&exec.exec);
    }
    assert_eq!(edge.run(shell("again", "echo on")).out, "on\n");
}
