//! Files of a sandbox.

use std::io::Write;

use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use crate::support::client::Client;
use crate::support::files::{content, put};
use crate::support::{World, until};

fn random(id: &str) -> &str {
    id.rsplit('-').next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_written_read_listed_moved_and_removed() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let files = format!("/v1/sandboxes/{id}/files");
    let big: Vec<u8> = (0..5_000_000u32).map(|n| (n % 251) as u8).collect();
    let info = edge
        .client
        .put(&format!("{files}?path=/a/b.bin&parents=true&mode=0600"), big.clone())
        .await
        .expect(200);
    assert_eq!((info["size"].as_u64(), info["mode"].as_u64()), (Some(5_000_000), Some(0o600)));
    let read = edge.client.get(&format!("{files}?path=/a/b.bin")).await;
    assert_eq!(read.headers["content-length"], "5000000");
    assert!(read.body == big);
    let part = edge.client.get(&format!("{files}?path=/a/b.bin&offset=10&length=5")).await;
    assert_eq!((part.status, &part.body[..]), (200, &big[10..15]));
    let range =
        edge.client.send("GET", &format!("{files}?path=/a/b.bin"), &[("range", "bytes=-3")], "").await;
    assert_eq!((range.status, &range.body[..]), (206, &big[4_999_997..]));
    assert_eq!(range.headers["content-range"], "bytes 4999997-4999999/5000000");
    let beyond =
        edge.client.send("GET", &format!("{files}?path=/a/b.bin"), &[("range", "bytes=5000000-")], "").await;
    assert_eq!(beyond.status, 416);
    assert_eq!(beyond.json()["code"], "range_not_satisfiable");
    edge.client.put(&format!("{files}?path=/a/b.bin&offset=3"), "XY").await.expect(200);
    let patched = content(&world.host.guest(random(&id)), "a/b.bin").unwrap();
    assert_eq!((patched.len(), &patched[..6]), (big.len(), &[0, 1, 2, b'X', b'Y', 5][..]));
    edge.client.put(&format!("{files}?path=/empty"), "").await.expect(200);
    let empty = edge.client.get(&format!("{files}?path=/empty")).await;
    assert_eq!((empty.status, empty.body.len()), (200, 0));
    assert_eq!(empty.headers["content-length"], "0");
    edge.client.post(&format!("{files}/mkdir"), json!({ "path": "/d" })).await.expect(200);
    edge.client.post(&format!("{files}/mkdir"), json!({ "path": "/d" })).await.refused(409, "already_exists");
    edge.client
        .post(&format!("{files}/move"), json!({ "from": "/empty", "to": "/d/moved" }))
        .await
        .expect(200);
    let list = edge.client.get(&format!("{files}/list?path=/")).await.expect(200);
    let names: Vec<_> =
        list["entries"].as_array().unwrap().iter().map(|e| e["path"].as_str().unwrap()).collect();
    assert_eq!((names, list["truncated"].as_bool()), (vec!["a", "d"], Some(false)));
    let some = edge.client.get(&format!("{files}/list?path=/&limit=1")).await.expect(200);
    assert_eq!((some["entries"].as_array().unwrap().len(), some["truncated"].as_bool()), (1, Some(true)));
    assert_eq!(edge.client.get(&format!("{files}/stat?path=/d")).await.expect(200)["kind"], "directory");
    assert_eq!(edge.client.delete(&format!("{files}?path=/d&recursive=true")).await.status, 204);
    edge.client.get(&format!("{files}/stat?path=/d")).await.refused(404, "not_found");
    edge.client.get(&format!("{files}?path=")).await.refused(400, "invalid_argument");
    edge.client.get(&format!("{files}/list?path=/&depth=0")).await.refused(400, "invalid_argument");
    edge.client.put(&format!("{files}?path=/x&mode=8"), "").await.refused(400, "invalid_argument");
    let none = edge.client.get(&format!("{files}/list?path=/none")).await.refused(404, "not_found");
    assert!(none["message"].as_str().unwrap().contains("none"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_does_not_know_its_size_is_read_to_its_end() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let read = edge.client.get(&format!("/v1/sandboxes/{id}/files?path=/proc/version")).await;
    assert!(read.text().starts_with("Linux"), "{}", read.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_cut_off_changes_nothing() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let guest = world.host.guest(random(&id));
    put(&guest, "kept", b"old");
    let mut stream = UnixStream::connect(&edge.client.socket).await.unwrap();
    let head = format!(
        "PUT /v1/sandboxes/{id}/files?path=/kept HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&[b'n'; 100_000]).await.unwrap();
    until("the draft", || if guest.root.join("kept.draft").exists() { Ok(()) } else { Err("none") }).await;
    drop(stream);
    until("the draft's end", || if guest.root.join("kept.draft").exists() { Err("there") } else { Ok(()) })
        .await;
    assert_eq!(content(&guest, "kept").unwrap(), b"old");
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_go_both_ways_plain_and_compressed() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let archive = format!("/v1/sandboxes/{id}/archive");
    let mut tar = tar::Builder::new(Vec::new());
    let text = "line\n".repeat(100_000);
    let mut header = tar::Header::new_ustar();
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append_data(&mut header, "f.txt", text.as_bytes()).unwrap();
    let plain = tar.into_inner().unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let zstd = zstd::encode_all(&plain[..], 1).unwrap();
    let guest = world.host.guest(random(&id));
    for (to, bytes) in [("p", plain.clone()), ("g", gzip.finish().unwrap()), ("z", zstd)] {
        let counts = edge.client.put(&format!("{archive}?path=/{to}"), bytes).await.expect(200);
        assert_eq!(counts, json!({ "files": 1, "bytes": 7 }));
        assert!(content(&guest, &format!("{to}/f.txt")).unwrap() == text.as_bytes(), "{to}");
    }
    let back = edge.client.get(&format!("{archive}?path=/g")).await;
    assert_eq!(back.headers["content-type"], "application/x-tar");
    let mut entries = tar::Archive::new(&back.body[..]);
    let names: Vec<_> =
        entries.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
    assert!(names.iter().any(|name| name.ends_with("f.txt")), "{names:?}");
    let damaged =
        edge.client.put(&format!("{archive}?path=/bad"), vec![0x1f, 0x8b, 8, 0, 1, 2, 3, 4, 5]).await;
    damaged.refused(400, "invalid_argument");
    edge.client.put(&format!("{archive}?path=/bad"), "no tar at all").await.refused(400, "invalid_argument");
    edge.client.get(&format!("{archive}?path=/none")).await.refused(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_tells_changes_as_they_come() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let mut ws = edge.client.ws(&format!("/v1/sandboxes/{id}/files/watch?path=/&recursive=true")).await;
    let mut next = async || -> Value {
        serde_json::from_str(ws.next().await.unwrap().unwrap().to_text().unwrap()).unwrap()
    };
    assert_eq!(next().await["kind"], "ready");
    let guest = world.host.guest(random(&id));
    let renamed =
        dsec_proto::guest::FileEvent { kind: 5, path: b"new".to_vec(), from: Some(b"old".to_vec()) };
    guest.file_events.lock().unwrap()[0].send(renamed).unwrap();
    assert_eq!(next().await, json!({ "kind": "renamed", "path": "new", "from": "old" }));
}

/// More transfers stand still than the edge has threads for files.
#[test]
fn children_that_stand_still_hold_no_thread() {
    const THREADS: usize = 8;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .max_blocking_threads(THREADS)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new();
        let edge = world.ready().await;
        let id = edge.client.create().await;
        let big: Vec<u8> = (0..3_000_000u32).map(|n| (n % 249) as u8).collect();
        edge.client.put(&format!("/v1/sandboxes/{id}/files?path=/big"), big.clone()).await.expect(200);
        let mut held = Vec::new();
        for _ in 0..2 * THREADS {
            let path = format!("/v1/sandboxes/{id}/archive?path=/hostile-stalled-pack");
            held.push(edge.client.begin(Client::request("GET", &path, &[], "")).await.unwrap());
        }
        let mut uploads = Vec::new();
        for _ in 0..2 * THREADS {
            let mut stream = UnixStream::connect(&edge.client.socket).await.unwrap();
            let head = format!(
                "PUT /v1/sandboxes/{id}/archive?path=/hostile-stalled-unpack HTTP/1.1\r\nhost: x\r\n\
                 content-length: 9000000\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&[b'n'; 100_000]).await.unwrap();
            uploads.push(stream);
        }
        // Callers that read nothing of a large file hold none either.
        for _ in 0..2 * THREADS {
            let path = format!("/v1/sandboxes/{id}/files?path=/big");
            held.push(edge.client.begin(Client::request("GET", &path, &[], "")).await.unwrap());
        }
        let read = edge.client.get(&format!("/v1/sandboxes/{id}/files?path=/big")).await;
        assert!(read.body == big);
        edge.client.put(&format!("/v1/sandboxes/{id}/files?path=/other"), big).await.expect(200);
        assert_eq!(edge.client.run(&id, "echo on").await["stdout"], "on\n");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_descriptor_of_the_wrong_kind_is_refused() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    for what in ["pipe", "socket", "device", "directory", "two"] {
        let path = format!("/v1/sandboxes/{id}/files?path=/hostile-{what}");
        let refused = edge.client.get(&path).await.refused(503, "unavailable");
        assert!(refused["message"].as_str().unwrap().contains("it "), "{refused}");
    }
    for what in ["socket", "device", "directory", "two"] {
        edge.client
            .put(&format!("/v1/sandboxes/{id}/files?path=/hostile-{what}"), "x")
            .await
            .refused(503, "unavailable");
        let archive = format!("/v1/sandboxes/{id}/archive?path=/hostile-{what}");
        edge.client.get(&archive).await.refused(503, "unavailable");
        edge.client.put(&archive, "x").await.refused(503, "unavailable");
    }
}
