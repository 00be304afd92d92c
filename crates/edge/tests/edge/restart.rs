//! An edge dies and another comes: what it finds.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use dsec_edge::sandbox::record::Stored;
use serde_json::{Value, json};

use crate::support::{World, until};

fn random(id: &str) -> &str {
    id.rsplit('-').next().unwrap()
}

fn record_file(world: &World, id: &str) -> PathBuf {
    world.state.join("sandboxes").join(random(id)).join("record.ndjson")
}

/// Changes a record on disk as only a test or a bad disk does.
fn tamper(world: &World, id: &str, change: impl FnOnce(&mut Value)) {
    let path = record_file(world, id);
    let text = std::fs::read_to_string(&path).unwrap();
    let mut value: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, format!("{value}\n")).unwrap();
}

fn append(path: &Path, bytes: &[u8]) {
    std::fs::File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

/// The record says what the test needs: it is written a moment after callers know.
async fn on_disk(world: &World, id: &str, state: &str) {
    until("the record", || {
        let bytes = std::fs::read(record_file(world, id)).map_err(|e| e.to_string())?;
        let stored = Stored::parse(&bytes)?;
        let seen = stored.sandbox.state.as_str();
        if seen == state && stored.anchor.is_some() { Ok(()) } else { Err(seen.to_owned()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_commands_and_output_outlive_the_edge() {
    let world = World::new();
    let edge = world.ready().await;
    let id =
        edge.client.create_with(json!({ "labels": { "k": "v" } })).await["id"].as_str().unwrap().to_owned();
    let done = edge.client.run(&id, "seq 1 10000").await;
    let line = "echo before; until [ -e go ]; do sleep 0.01; done; echo after; cat";
    let exec = edge.client.exec(&id, json!({ "shell": line, "stdin_mode": "stream" })).await;
    edge.client.post(&format!("/v1/sandboxes/{id}/sessions"), json!({ "id": "s" })).await.expect(201);
    on_disk(&world, &id, "running").await;
    let before = edge.client.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    let logs_path = format!("/v1/sandboxes/{id}/logs");
    let logs = edge.client.get(&logs_path).await.text();
    assert!(logs.contains("exec_ended"), "{logs}");
    drop(edge);
    // Killed here, in the middle of the next version.
    append(&record_file(&world, &id), b"\n{\"sandbox\": {");

    let edge = world.edge();
    let later = edge.client.get(&logs_path).await.text();
    assert!(
        later.starts_with(&logs) && later[logs.len()..].starts_with("{\"event\":\"adopted\""),
        "{logs}became\n{later}"
    );
    let record = edge.client.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!((record["state"].as_str(), &record["labels"]), (Some("running"), &json!({ "k": "v" })));
    assert_eq!(record["running_ms"], before["running_ms"]);
    let path =
        |exec: &Value, rest: &str| format!("/v1/sandboxes/{id}/execs/{}{rest}", exec["id"].as_str().unwrap());
    let old = edge.client.get(&path(&done, "/stdout")).await.text();
    assert_eq!((old.lines().count(), old.lines().last()), (10_000, Some("10000")));
    let running = edge.client.get(&path(&exec, "?inline_limit_bytes=100")).await.expect(200);
    assert_eq!((running["state"].as_str(), running["stdout"].as_str()), (Some("running"), Some("before\n")));
    crate::support::files::put(&world.host.guest(random(&id)), "go", b"");
    // The pipe of its stdin is asked for again.
    assert_eq!(edge.client.put(&path(&exec, "/stdin"), "typed").await.status, 204);
    let ended = edge.client.get(&path(&exec, "?wait_ms=20000&inline_limit_bytes=100")).await.expect(200);
    assert_eq!(ended["stdout"], "before\nafter\ntyped");
    let sessions = edge.client.get(&format!("/v1/sandboxes/{id}/sessions")).await.expect(200);
    assert_eq!(sessions["sessions"][0]["id"], "s");
    edge.client.delete("/v1/images/base").await.refused(409, "conflict");
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(edge.client.delete("/v1/images/base").await.status, 204);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edge_serves_what_runs_while_its_store_is_away_and_takes_it_up_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (store, away) = (dir.path().join("store"), dir.path().join("away"));
    let mut world = World::with(&format!("[store]\nurl = {store:?}\ncreate = true\n"));
    let edge = world.ready().await;
    let id = edge.client.create().await;
    on_disk(&world, &id, "running").await;
    drop(edge);
    std::fs::rename(&store, &away).unwrap();
    // As with any store after the first start.
    world.extra = format!("[store]\nurl = {store:?}\n");
    let edge = world.edge();
    assert_eq!(edge.client.run(&id, "echo on").await["stdout"], "on\n");
    let sandbox = edge.client.get(&format!("/v1/sandboxes/{id}?content=true")).await.expect(200);
    assert_eq!(sandbox["state"], "running");
    assert!(sandbox["layers"][0]["content"]["size_bytes"].as_u64().unwrap() > 0, "{sandbox}");
    let name = store.display().to_string();
    let layer_calls = [
        ("GET", "/v1/images", json!(null)),
        ("GET", "/v1/images/base", json!(null)),
        ("DELETE", "/v1/images/base", json!(null)),
        ("PUT", "/v1/images/other", json!("no archive")),
        ("POST", "/v1/sandboxes", json!({ "container_image": "base" })),
        ("POST", "/v1/store/collect", json!({})),
    ];
    for (method, path, body) in &layer_calls {
        let answer = edge.client.send(method, path, &[], body.to_string()).await;
        let text = answer.text();
        // What is streamed ends with the error.
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let error = if answer.status == 200 { &last["error"] } else { &last };
        assert_eq!(error["code"], "unavailable", "{method} {path}: {text}");
        assert!(error["message"].as_str().unwrap().contains(&name), "{method} {path}: {text}");
    }
    let pack = edge.client.post(&format!("/v1/sandboxes/{id}/pack"), json!({ "name": "x" })).await;
    assert!(pack.refused(503, "unavailable")["message"].as_str().unwrap().contains(&name));
    assert!(!store.exists(), "nothing is written where the store is not");
    assert_eq!(store_state(&edge).await, "missing");
    std::fs::rename(&away, &store).unwrap();
    for _ in 0..2000 {
        if store_state(&edge).await == "works" {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(store_state(&edge).await, "works");
    edge.client.create().await;
    edge.client.delete("/v1/images/base").await.refused(409, "conflict");
    let held = std::fs::read_dir(store.join("leases")).unwrap().map(|entry| entry.unwrap().file_name());
    let held: Vec<String> = held.map(|name| name.into_string().unwrap()).collect();
    let digest = sandbox["layers"][0]["id"].as_str().unwrap();
    assert!(held.iter().any(|hold| hold.contains(".hold.") && hold.ends_with(digest)), "{held:?}");
}

/// How the node says its store is.
async fn store_state(edge: &crate::support::Edge) -> String {
    let nodes = edge.client.get("/v1/nodes").await.expect(200);
    let features = nodes["nodes"][0]["features"].as_array().unwrap();
    let store = features.iter().find(|feature| feature["name"] == "store");
    store.map_or_else(String::new, |store| store["state"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_stays_small_and_its_last_whole_version_counts() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    on_disk(&world, &id, "running").await;
    let path = record_file(&world, &id);
    let mut stored = Stored::parse(&std::fs::read(&path).unwrap()).unwrap();
    for at in 1..=200 {
        stored.sandbox.last_active_ms = at;
        stored.write(&world.state).unwrap();
        if at % 10 == 0 {
            append(&path, b"\n{\"sandbox\": {");
        }
        let text = std::fs::read(&path).unwrap();
        assert_eq!(Stored::parse(&text).unwrap().sandbox.last_active_ms, at);
        assert!(text.len() < 80 << 10, "{} bytes", text.len());
    }
    assert!(Stored::parse(b"\n{\"sandbox\"").unwrap_err().contains("no whole version"));
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_sandboxes_and_keys_are_remembered() {
    let world = World::new();
    let edge = world.ready().await;
    let body = json!({ "container_image": "base" }).to_string();
    let create = async |edge: &crate::support::Edge| {
        edge.client.send("POST", "/v1/sandboxes", &[("idempotency-key", "k")], body.clone()).await
    };
    let id = create(&edge).await.expect(201)["id"].as_str().unwrap().to_owned();
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    drop(edge);
    let edge = world.edge();
    let again = create(&edge).await.expect(200);
    assert_eq!((again["id"].as_str(), again["state"].as_str()), (Some(id.as_str()), Some("stopped")));
    assert_eq!(again["usage"]["cpu_seconds"], 1.5);
    let logs = edge.client.get(&format!("/v1/sandboxes/{id}/logs")).await.text();
    assert!(logs.contains("\"created\"") && logs.contains("\"ended\""), "{logs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_did_not_outlive_the_edge_is_failed_and_swept() {
    let world = World::new();
    let edge = world.ready().await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        let id = edge.client.create().await;
        on_disk(&world, &id, "running").await;
        ids.push(id);
    }
    drop(edge);
    let [gone, rebooted, half, stopping, damaged] = &ids[..] else { panic!() };
    world.host.guests.lock().unwrap().remove(random(gone)).unwrap().kill();
    tamper(&world, rebooted, |r| r["boot_id"] = json!("another boot"));
    tamper(&world, half, |r| {
        r["anchor"] = Value::Null;
        r["sandbox"]["state"] = json!("creating");
    });
    tamper(&world, stopping, |r| {
        r["sandbox"]["state"] = json!("stopping");
        r["sandbox"]["reason"] = json!({ "code": "lifetime" });
    });
    std::fs::write(record_file(&world, damaged), "{\"sandbox\": nonsense\n").unwrap();

    let edge = world.edge();
    let end = async |id: &str| {
        let record = edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=stopped")).await.expect(200);
        (record["state"].as_str().unwrap().to_owned(), record["reason"]["code"].as_str().unwrap().to_owned())
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(end(gone).await, pair("failed", "agent_lost"));
    assert_eq!(end(rebooted).await, pair("failed", "rebooted"));
    assert_eq!(end(half).await, pair("failed", "launch_failed"));
    assert_eq!(end(stopping).await, pair("stopped", "lifetime"));
    edge.client.get(&format!("/v1/sandboxes/{damaged}")).await.refused(404, "not_found");
    assert_eq!(world.host.alive(), 0, "something was left running");
    assert!(world.state.join(format!("damaged/{}.ndjson", random(damaged))).exists());
    assert_eq!(std::fs::read_dir(world.state.join("sandboxes")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_does_not_answer_a_new_edge_is_lost() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    on_disk(&world, &id, "running").await;
    drop(edge);
    world.host.guest(random(&id)).drop_agent();
    let edge = world.edge();
    let record = edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=failed")).await.expect(200);
    assert_eq!(record["reason"]["code"], "agent_lost");
    assert_eq!(world.host.alive(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lifetimes_go_on_where_they_were() {
    let world = World::new();
    let edge = world.ready().await;
    let id =
        edge.client.create_with(json!({ "max_lifetime": 3600 })).await["id"].as_str().unwrap().to_owned();
    on_disk(&world, &id, "running").await;
    drop(edge);
    tamper(&world, &id, |r| {
        let ms = r["sandbox"]["running_ms"].as_u64().unwrap();
        r["sandbox"]["running_ms"] = json!(ms - 3_600_000);
    });
    let edge = world.edge();
    let record = edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=stopped")).await.expect(200);
    assert_eq!(record["reason"]["code"], "lifetime");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edge_that_dies_in_a_launch_finds_what_it_launched() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    on_disk(&world, &id, "running").await;
    drop(edge);
    tamper(&world, &id, |r| r["sandbox"]["state"] = json!("creating"));
    let edge = world.edge();
    let record = edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=running")).await.expect(200);
    assert_eq!(record["state"], "running");
    assert_eq!(edge.client.run(&id, "echo hi").await["stdout"], "hi\n");
    assert_eq!(world.host.launches.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_gets_the_directory_of_one_that_ended_and_nothing_that_was_in_it() {
    use std::os::unix::fs::MetadataExt;
    let world = World::new();
    let edge = world.ready().await;
    let inodes = |id: &str| {
        let directory = record_file(&world, id).with_file_name("");
        ["record.ndjson", "events.ndjson", "."]
            .map(|name| std::fs::metadata(directory.join(name)).unwrap().ino())
    };
    let logs = async |id: &str| edge.client.get(&format!("/v1/sandboxes/{id}/logs")).await.text();
    let first = edge.client.create().await;
    on_disk(&world, &first, "running").await;
    edge.client.run(&first, "echo of the first").await;
    let (of_first, log_of_first) = (inodes(&first), logs(&first).await);
    edge.client.delete(&format!("/v1/sandboxes/{first}")).await.expect(200);

    let second = edge.client.create().await;
    on_disk(&world, &second, "running").await;
    assert_eq!(inodes(&second), of_first);
    let record = std::fs::read_to_string(record_file(&world, &second)).unwrap();
    let events =
        std::fs::read_to_string(record_file(&world, &second).with_file_name("events.ndjson")).unwrap();
    assert!(!record.contains(random(&first)) && !events.contains("exec_"), "{record}{events}");
    assert!(log_of_first.contains("exec_ended") && !logs(&second).await.contains("exec_"));

    // What an edge leaves that is killed between a directory and its first record.
    let cut_off = world.state.join("sandboxes/cutoff00");
    std::fs::create_dir(&cut_off).unwrap();
    std::fs::write(cut_off.join("record.ndjson"), "").unwrap();
    drop(edge);
    let edge = world.edge();
    assert!(!cut_off.exists() && !world.state.join("damaged").exists());
    let again = edge.client.get(&format!("/v1/sandboxes/{second}")).await.expect(200);
    assert_eq!(again["state"], "running");
}
