//! Edges that come and go, and edges that speak nonsense.

use dsec_proto::guest::GENERATION;

use crate::support::{Sandbox, exec, shell};

#[test]
fn a_new_edge_learns_all_that_happened_while_there_was_none() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    for i in 0..100 {
        let line =
            format!("echo out-{i}; while ! [ -e /work/go ]; do sleep 0.02; done; echo end-{i}; exit {i}");
        edge.start(shell(&format!("e{i}"), &line), &[]).unwrap();
    }
    drop(edge);
    let mut edge = sandbox.client();
    assert_eq!(edge.hello.execs.iter().filter(|e| !e.ended).count(), 100);
    edge.start(exec("go", &["touch", "/work/go"]), &[]).unwrap();
    drop(edge);
    let mut edge = loop {
        let edge = sandbox.client();
        if edge.hello.execs.iter().all(|e| e.ended) {
            break edge;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    for i in 0..100 {
        let run = edge.wait(&format!("e{i}"));
        assert_eq!((run.info.code, run.out), (i, format!("out-{i}\nend-{i}\n")));
    }
    assert_eq!(edge.hello.execs.len(), 101);
    let private = sandbox.private_kib();
    assert!(private < 1024, "{private} KiB private");
}

#[test]
fn the_newest_edge_is_the_only_one() {
    let sandbox = Sandbox::new();
    let mut first = sandbox.client();
    first.start(exec("a", &["sleep", "1000"]), &[]).unwrap();
    let mut second = sandbox.client();
    assert!(first.is_closed());
    assert_eq!(second.run(shell("b", "echo hi")).out, "hi\n");
    assert_eq!(second.hello.execs.len(), 1);
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    let sandbox = Sandbox::new();
    let frames: [&[u8]; 5] = [
        &[0xff; 64],                           // an absurd length
        &[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], // no protobuf
        &[2, 0, 0, 0, 0x10, 0x05],             // five descriptors that did not come
        &[0, 0, 0, 0],                         // an empty request: answered, or passed over
        &[1, 0],                               // half a frame
    ];
    for bytes in frames {
        let mut edge = sandbox.client();
        edge.send_raw(bytes);
        drop(edge);
        assert_eq!(sandbox.client().hello.generation, GENERATION);
    }
    let mut edge = sandbox.client();
    edge.send_raw(frames[0]);
    assert!(edge.is_closed());
    // Somebody who does not say hello is not served.
    let mut socket = std::os::unix::net::UnixStream::connect(sandbox.dir.join("socket")).unwrap();
    std::io::Write::write_all(&mut socket, &[2, 0, 0, 0, 0x08, 0x01]).unwrap();
    let read = std::io::Read::read(&mut socket, &mut [0; 16]);
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    assert_eq!(sandbox.client().run(shell("a", "echo on")).out, "on\n");
}

#[test]
fn an_edge_that_does_not_read_costs_nothing() {
    let sandbox = Sandbox::new();
    let mut edge = sandbox.client();
    // A thousand requests with large answers, none of them read.
    let ids: Vec<u64> = (0..1000)
        .map(|i| {
            edge.send(
                dsec_proto::guest::Request::ExecStart(exec(&format!("{}{i}", "no/".repeat(300)), &["x"])),
                &[],
            )
        })
        .collect();
    let private = sandbox.private_kib();
    assert!(private < 1024, "{private} KiB private");
    for id in ids {
        assert!(edge.answer(id).is_err());
    }
    assert_eq!(edge.run(shell("a", "echo on")).out, "on\n");
}
