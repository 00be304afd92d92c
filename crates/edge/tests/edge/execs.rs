//! Commands, their output and input, sessions and terminals.

use std::sync::atomic::Ordering;

use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::support::client::Client;
use crate::support::{World, until};

fn path(id: &str, exec: &Value, rest: &str) -> String {
    format!("/v1/sandboxes/{id}/execs/{}{rest}", exec["id"].as_str().unwrap())
}

fn random(id: &str) -> &str {
    id.rsplit('-').next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_answers_with_its_output_and_how_it_ended() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let both =
        edge.client.exec(&id, json!({ "shell": "echo out; echo err >&2; exit 3", "wait": true })).await;
    assert_eq!((both["stdout"].as_str(), both["stderr"].as_str()), (Some("out\n"), Some("err\n")));
    assert_eq!((both["exit_code"].as_i64(), both["state"].as_str()), (Some(3), Some("exited")));
    assert_eq!(both["cpu_us"], 42);
    let request =
        json!({ "argv": ["sh", "-c", "cat; echo $X"], "env": { "X": "y" }, "stdin": "in", "wait": true });
    assert_eq!(edge.client.exec(&id, request).await["stdout"], "iny\n");
    let bytes = edge.client.exec(&id, json!({ "shell": "printf '\\377'", "wait": true })).await;
    assert_eq!((bytes["stdout"].as_str(), bytes["stdout_base64"].as_str()), (Some("\u{fffd}"), Some("/w==")));
    let killed = edge.client.exec(&id, json!({ "shell": "kill -9 $$", "wait": true })).await;
    assert_eq!((killed["exit_code"].as_i64(), killed["signal"].as_str()), (Some(137), Some("SIGKILL")));
    let late =
        edge.client.exec(&id, json!({ "argv": ["sleep", "60"], "timeout_ms": 30, "wait": true })).await;
    assert_eq!((late["timed_out"].as_bool(), late["signal"].as_str()), (Some(true), Some("SIGKILL")));
    let execs = format!("/v1/sandboxes/{id}/execs");
    let list = edge.client.get(&execs).await.expect(200);
    assert_eq!(list["execs"].as_array().unwrap().len(), 5);
    edge.client.post(&execs, json!({ "argv": ["no-such-program"] })).await.refused(400, "invalid_argument");
    edge.client
        .post(&execs, json!({ "argv": ["true"], "user": "ghost" }))
        .await
        .refused(400, "invalid_argument");
    edge.client
        .post(&execs, json!({ "argv": ["true"], "shell": "x" }))
        .await
        .refused(400, "invalid_argument");
    assert_eq!(edge.client.get(&execs).await.expect(200)["execs"].as_array().unwrap().len(), 5);
    let guest = world.host.guest(random(&id));
    // Each cgroup that was handed out, those of refused commands too, came back.
    assert_eq!(guest.cgroups.load(Ordering::SeqCst), guest.released.load(Ordering::SeqCst));
}

#[tokio::test(flavor = "multi_thread")]
async fn large_output_is_read_in_any_part_and_cut_where_it_was_asked() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let line = "seq 1 200000";
    let exec = edge.client.exec(&id, json!({ "shell": line, "wait": true, "inline_limit_bytes": 10 })).await;
    assert_eq!(exec["stdout"], "1\n2\n3\n4\n5\n");
    let whole: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(exec["stdout_bytes"].as_u64().unwrap() as usize, whole.len());
    let answer = edge.client.get(&path(&id, &exec, "/stdout")).await;
    assert_eq!(answer.headers["x-dsec-stream-bytes"], whole.len().to_string());
    assert_eq!(answer.headers["x-dsec-truncated"], "false");
    assert_eq!(answer.headers["content-length"], whole.len().to_string());
    assert!(answer.text() == whole);
    let part = edge.client.get(&path(&id, &exec, "/stdout?offset=1000000&length=700&follow=true")).await;
    assert_eq!(part.text(), whole[1_000_000..1_000_700]);
    assert_eq!(edge.client.get(&path(&id, &exec, "/stdout?offset=99999999")).await.text(), "");
    assert_eq!(edge.client.get(&path(&id, &exec, "/stderr")).await.text(), "");
    let cut = edge.client.exec(&id, json!({ "shell": line, "wait": true, "output_limit_bytes": 5000 })).await;
    assert_eq!(
        (cut["stdout_truncated"].as_bool(), cut["stdout_bytes"].as_u64()),
        (Some(true), Some(whole.len() as u64))
    );
    let kept = edge.client.get(&path(&id, &cut, "/stdout?follow=true")).await;
    assert_eq!(
        (kept.text().as_str(), &kept.headers["x-dsec-truncated"]),
        (&whole[..5000], &"true".parse().unwrap())
    );
    let looked = edge.client.get(&path(&id, &cut, "?inline_limit_bytes=4")).await.expect(200);
    assert_eq!(looked["stdout"], "1\n2\n");
    assert!(edge.client.get(&path(&id, &cut, "")).await.expect(200)["stdout"].is_null());
    edge.client.get(&path(&id, &cut, "?wait_ms=600001")).await.refused(400, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_does_not_end_its_command() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let request = json!({ "shell": "echo on; read line < go; echo $line", "wait": true }).to_string();
    let fifo = world.host.guest(random(&id)).root.join("go");
    std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    let request = Client::request("POST", &format!("/v1/sandboxes/{id}/execs"), &[], request);
    let client = edge.client.clone();
    let call = tokio::spawn(async move { client.begin(request).await.map(|_| ()) });
    let execs = format!("/v1/sandboxes/{id}/execs");
    let exec = loop {
        let list = edge.client.get(&execs).await.expect(200);
        if list["execs"][0]["stdout_bytes"].as_u64() == Some(3) {
            break list["execs"][0].clone();
        }
    };
    call.abort();
    std::fs::write(fifo, "after\n").unwrap();
    let ended = edge.client.get(&path(&id, &exec, "?wait_ms=20000&inline_limit_bytes=100")).await.expect(200);
    assert_eq!((ended["stdout"].as_str(), ended["exit_code"].as_i64()), (Some("on\nafter\n"), Some(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn given_and_streamed_input_arrive_whole() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let large = "x".repeat(1 << 20);
    let counted = edge.client.exec(&id, json!({ "shell": "wc -c", "stdin": large, "wait": true })).await;
    assert_eq!(counted["stdout"].as_str().unwrap().trim(), "1048576");
    let unread = edge.client.exec(&id, json!({ "shell": "true", "stdin": large, "wait": true })).await;
    assert_eq!(unread["exit_code"], 0);
    let exec = edge.client.exec(&id, json!({ "shell": "cat", "stdin_mode": "stream" })).await;
    let stdin = path(&id, &exec, "/stdin");
    assert_eq!(edge.client.put(&format!("{stdin}?close=false"), "one ").await.status, 204);
    assert_eq!(edge.client.put(&stdin, "two").await.status, 204);
    let ended = edge.client.get(&path(&id, &exec, "?wait_ms=20000&inline_limit_bytes=100")).await.expect(200);
    assert_eq!(ended["stdout"], "one two");
    edge.client.put(&stdin, "three").await.refused(409, "conflict");
    let given = edge.client.exec(&id, json!({ "shell": "sleep 30" })).await;
    edge.client.put(&path(&id, &given, "/stdin"), "x").await.refused(409, "conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_reach_a_command() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec = edge.client.exec(&id, json!({ "argv": ["sleep", "60"] })).await;
    let signal = path(&id, &exec, "/signal");
    edge.client.post(&signal, json!({ "signal": "SIGWHAT" })).await.refused(400, "invalid_argument");
    edge.client.post(&signal, json!({ "signal": "term" })).await.expect(200);
    let ended = edge.client.get(&path(&id, &exec, "?wait_ms=20000")).await.expect(200);
    assert_eq!(ended["signal"], "SIGTERM");
    edge.client.post(&signal, json!({ "signal": "TERM" })).await.refused(409, "conflict");
    edge.client
        .post(&path(&id, &exec, "/resize"), json!({ "rows": 3, "cols": 3 }))
        .await
        .refused(409, "conflict");
    edge.client.get(&format!("/v1/sandboxes/{id}/execs/ex-none")).await.refused(404, "not_found");
}

type Socket = WebSocketStream<UnixStream>;

/// Reads frames until the socket closes or `stop` says so: output by stream, and the events.
async fn frames(ws: &mut Socket, mut stop: impl FnMut(&[u8]) -> bool) -> (Vec<u8>, Vec<Value>) {
    let (mut out, mut events) = (Vec::new(), Vec::new());
    while let Some(Ok(message)) = ws.next().await {
        let Message::Binary(frame) = message else { continue };
        match frame[0] {
            1 | 2 => out.extend_from_slice(&frame[1..]),
            3 => events.push(serde_json::from_slice(&frame[1..]).unwrap()),
            other => panic!("frame {other}"),
        }
        if stop(&out) {
            break;
        }
    }
    (out, events)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_client_types_leaves_and_comes_back_at_its_offset() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec =
        edge.client.exec(&id, json!({ "shell": "cat; echo end >&2; exit 4", "stdin_mode": "stream" })).await;
    let mut first = edge.client.ws(&path(&id, &exec, "/attach")).await;
    first.send(Message::Binary(b"\x10hello ".to_vec().into())).await.unwrap();
    assert_eq!(frames(&mut first, |out| out.len() >= 6).await.0, b"hello ");
    drop(first);
    let mut second = edge.client.ws(&path(&id, &exec, "/attach?stdout_offset=4")).await;
    second.send(Message::Binary(b"\x10again".to_vec().into())).await.unwrap();
    second.send(Message::Binary(b"\x11".to_vec().into())).await.unwrap();
    let (out, events) = frames(&mut second, |_| false).await;
    let out = String::from_utf8(out).unwrap();
    assert!(out == "o againend\n" || out.contains("again") && out.contains("end\n"), "{out:?}");
    assert_eq!(events.len(), 1);
    assert_eq!(
        (events[0]["event"].as_str(), events[0]["exec"]["exit_code"].as_i64()),
        (Some("exited"), Some(4))
    );
    let mut late = edge.client.ws(&path(&id, &exec, "/attach")).await;
    let (out, events) = frames(&mut late, |_| false).await;
    assert_eq!((out.len(), events.len()), ("hello again".len() + "end\n".len(), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stands_still_delays_nobody() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec =
        edge.client.exec(&id, json!({ "shell": "read go; seq 1 2000000", "stdin_mode": "stream" })).await;
    // Both attach first; one never reads.
    let _stuck = edge.client.ws(&path(&id, &exec, "/attach")).await;
    let request = Client::request("GET", &path(&id, &exec, "/stdout?follow=true"), &[], "");
    let _held = edge.client.begin(request).await.unwrap();
    let mut quick = edge.client.ws(&path(&id, &exec, "/attach")).await;
    edge.client.put(&path(&id, &exec, "/stdin"), "go\n").await;
    let (out, events) = frames(&mut quick, |_| false).await;
    assert_eq!(out.len() as u64, events[0]["exec"]["stdout_bytes"].as_u64().unwrap());
    assert!(out.ends_with(b"\n2000000\n"));
    assert_eq!(edge.client.run(&id, "echo alive").await["stdout"], "alive\n");
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_echoes_and_is_resized() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let request = json!({ "argv": ["sh", "-c", "read line; stty size; echo got-$line"], "pty": { "rows": 24, "cols": 80 } });
    let exec = edge.client.exec(&id, request).await;
    assert_eq!(
        edge.client.post(&path(&id, &exec, "/resize"), json!({ "rows": 40, "cols": 100 })).await.status,
        204
    );
    let mut ws = edge.client.ws(&path(&id, &exec, "/attach")).await;
    ws.send(Message::Binary(b"\x12\x00\x32\x00\x78".to_vec().into())).await.unwrap();
    ws.send(Message::Binary(b"\x10me\n".to_vec().into())).await.unwrap();
    let (out, events) = frames(&mut ws, |_| false).await;
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("50 120") && out.contains("got-me"), "{out:?}");
    assert_eq!(events.last().unwrap()["event"], "exited");
}

#[tokio::test(flavor = "multi_thread")]
async fn attaching_to_nothing_or_without_an_upgrade_is_refused_in_the_one_shape() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec = edge.client.exec(&id, json!({ "argv": ["true"] })).await;
    edge.client.get(&path(&id, &exec, "/attach")).await.refused(400, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_of_a_session_run_one_after_another_and_its_end_is_told() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let sessions = format!("/v1/sandboxes/{id}/sessions");
    edge.client.post(&sessions, json!({ "id": "s1", "user": "bob" })).await.expect(201);
    let found = edge.client.post(&sessions, json!({ "id": "s1" })).await.expect(200);
    assert_eq!((found["user"].as_str(), found["pid"].as_u64()), (Some("bob"), Some(7)));
    let line = |line: &str, wait: bool| json!({ "shell": line, "session_id": "s1", "wait": wait });
    let slow = edge.client.exec(&id, line("until [ -e go ]; do sleep 0.01; done; echo one", false)).await;
    let queued = edge.client.exec(&id, line("echo two", false)).await;
    assert_eq!((slow["state"].as_str(), queued["state"].as_str()), (Some("running"), Some("queued")));
    assert_eq!(edge.client.get(&format!("{sessions}/s1")).await.expect(200)["pending"], 2);
    crate::support::files::put(&world.host.guest(random(&id)), "go", b"");
    let two = edge.client.get(&path(&id, &queued, "?wait_ms=20000&inline_limit_bytes=10")).await.expect(200);
    assert_eq!(two["stdout"], "two\n");
    let one = edge.client.get(&path(&id, &slow, "?inline_limit_bytes=10")).await.expect(200);
    assert!(one["ended_ms"].as_u64() <= two["ended_ms"].as_u64());
    let exit = edge.client.exec(&id, line("exit", true)).await;
    assert_eq!(exit["session_ended"], true);
    // The next line makes it anew.
    assert_eq!(edge.client.exec(&id, line("echo new", true)).await["stdout"], "new\n");
    assert_eq!(edge.client.delete(&format!("{sessions}/s1")).await.status, 204);
    edge.client.get(&format!("{sessions}/s1")).await.refused(404, "not_found");
    let refused = json!({ "shell": "ls", "session_id": "s2", "user": "root" });
    edge.client.post(&format!("/v1/sandboxes/{id}/execs"), refused).await.refused(400, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_session_is_attached_through_its_exec() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let sessions = format!("/v1/sandboxes/{id}/sessions");
    let session = edge.client.post(&sessions, json!({ "pty": { "rows": 24, "cols": 80 } })).await.expect(201);
    let exec = json!({ "id": session["pty_exec_id"] });
    let mut ws = edge.client.ws(&path(&id, &exec, "/attach")).await;
    ws.send(Message::Binary(b"\x10echo $((6*7)); exit\n".to_vec().into())).await.unwrap();
    let (out, _) = frames(&mut ws, |_| false).await;
    assert!(String::from_utf8_lossy(&out).contains("42"), "{out:?}");
    let line = json!({ "shell": "ls", "session_id": session["id"] });
    edge.client.post(&format!("/v1/sandboxes/{id}/execs"), line).await.refused(409, "conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_for_memory_are_told_with_the_command_they_met() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec = edge.client.exec(&id, json!({ "shell": "read x", "stdin_mode": "stream" })).await;
    world.host.guest(random(&id)).count_oom();
    edge.client.put(&path(&id, &exec, "/stdin"), "").await;
    let ended = edge.client.get(&path(&id, &exec, "?wait_ms=20000")).await.expect(200);
    assert_eq!(ended["oom_kills"], json!([{ "process": "hog", "rss_bytes": 4096 }]));
    assert!(edge.client.run(&id, "true").await["oom_kills"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_ended_commands_are_forgotten_but_not_while_they_are_read() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let exec = edge.client.exec(&id, json!({ "shell": "seq 1 500000", "wait": true })).await;
    let request = Client::request("GET", &path(&id, &exec, "/stdout"), &[], "");
    let held = edge.client.begin(request).await.unwrap();
    for _ in 0..135 {
        edge.client.exec(&id, json!({ "argv": ["true"], "wait": true })).await;
    }
    let guest = world.host.guest(random(&id));
    until("the agent to forget", || match guest.forgotten.lock().unwrap().len() {
        8 => Ok(()),
        n => Err(n),
    })
    .await;
    assert_eq!(edge.client.get(&path(&id, &exec, "")).await.status, 200);
    let body = held.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body.len() as u64, exec["stdout_bytes"].as_u64().unwrap());
}
