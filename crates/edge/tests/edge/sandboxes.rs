//! Life of sandboxes: create, list, stop, idle, idempotency, refusals.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::client::Client;
use crate::support::{Edge, World, files, until};
use dsec_model::CpuClass;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_created_listed_looked_at_and_stopped() {
    let world = World::new();
    let edge = world.ready().await;
    let made = edge
        .client
        .create_with(json!({ "labels": { "a": "1" }, "task_id": "job/7", "exec": { "shell": "echo hi", "wait": true } }))
        .await;
    let id = made["id"].as_str().unwrap();
    assert_eq!(made["state"], "running");
    assert_eq!(made["first_exec"]["stdout"], "hi\n");
    assert_eq!(made["init_user"], "root");
    assert!(
        made["launch_phases"].as_array().unwrap().iter().any(|p| p["name"] == "clone" && p["us"] == 7),
        "{made}"
    );
    let seen = edge.client.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(seen["usage"]["cpu_seconds"], 1.5);
    assert!(seen["usage"]["bytes_out"].as_u64().unwrap() >= 3, "{seen}");
    for (query, count) in [
        ("", 1),
        ("?label=a%3D1&task_id=job/7&state=running&state=stopped", 1),
        ("?label=a%3D2", 0),
        ("?state=failed", 0),
        ("?task_id=other", 0),
    ] {
        let list = edge.client.get(&format!("/v1/sandboxes{query}")).await.expect(200);
        assert_eq!(list["sandboxes"].as_array().unwrap().len(), count, "{query}");
    }
    let stopped = edge.client.post(&format!("/v1/sandboxes/{id}/stop"), json!({})).await.expect(200);
    assert_eq!(
        (stopped["state"].as_str(), stopped["reason"]["code"].as_str()),
        (Some("stopped"), Some("asked"))
    );
    assert_eq!(world.host.alive(), 0);
    assert_eq!(world.host.cleaned.lock().unwrap().len(), 1);
    let again = edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(again["ended_ms"], stopped["ended_ms"]);
    let refused = edge.client.get(&format!("/v1/sandboxes/{id}/execs")).await.refused(409, "conflict");
    assert_eq!(refused["detail"]["state"], "stopped");
    let logs = edge.client.get(&format!("/v1/sandboxes/{id}/logs")).await.text();
    for event in ["created", "running", "exec_started", "exec_ended", "stop_asked", "stopping", "ended"] {
        assert!(logs.contains(&format!("\"event\":\"{event}\"")), "{event} is not in {logs}");
    }
    assert_eq!(std::fs::read_dir(world.state.join("sandboxes")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_cpu_time_change_while_it_runs_and_stay_changed() {
    let world = World::new();
    let edge = world.ready().await;
    let made = edge.client.create_with(json!({ "cpu_class": "best_effort", "cpu_cores_limit": 1 })).await;
    assert_eq!(made["limits"]["cpu_class"], "best_effort");
    assert_eq!(made["limits"]["cpu_burst_ms"], 100);
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    let update = async |edge: &Edge, body| {
        edge.client.send("PATCH", &path, &[], serde_json::Value::to_string(&body)).await
    };
    for (body, field) in [
        (json!({}), None),
        (json!({ "cpu_weight": 0 }), Some("cpu_weight")),
        (json!({ "cpu_class": "fast" }), None),
        (json!({ "memory_limit_mb": 7 }), None),
    ] {
        let refused = update(&edge, body).await.refused(400, "invalid_argument");
        assert_eq!(refused["detail"]["field"].as_str(), field, "{refused}");
    }
    let updated = update(&edge, json!({ "cpu_class": "latency_sensitive" })).await.expect(200);
    assert_eq!(updated["limits"]["cpu_class"], "latency_sensitive");
    assert_eq!(updated["limits"]["cpu_weight"], 100);
    update(&edge, json!({ "cpu_weight": 50 })).await.expect(200);
    assert_eq!(
        *world.host.cpu_set.lock().unwrap(),
        [(CpuClass::LatencySensitive, 100), (CpuClass::LatencySensitive, 50)]
    );
    drop(edge);
    let edge = world.edge();
    let limits = edge.client.get(&path).await.expect(200)["limits"].clone();
    assert_eq!(
        (limits["cpu_class"].as_str(), limits["cpu_weight"].as_u64()),
        (Some("latency_sensitive"), Some(50))
    );
    edge.client.delete(&path).await.expect(200);
    update(&edge, json!({ "cpu_weight": 60 })).await.refused(409, "conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_follow_each_other_and_meet_every_sandbox_once() {
    let world = World::new();
    let edge = world.ready().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(edge.client.create().await);
    }
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = edge.client.get(&format!("/v1/sandboxes?limit=2&usage=true{cursor}")).await.expect(200);
        for sandbox in page["sandboxes"].as_array().unwrap() {
            assert!(sandbox["usage"].is_object());
            seen.push(sandbox["id"].as_str().unwrap().to_owned());
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    made.sort();
    seen.sort();
    assert_eq!(made, seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_created_is_refused_and_leaves_nothing() {
    let world = World::with("max_sandboxes = 1\n");
    let edge = world.ready().await;
    let try_with = async |fields: serde_json::Value| {
        let mut body = json!({ "container_image": "base" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        edge.client.post("/v1/sandboxes", body).await
    };
    let missing = try_with(json!({ "container_image": "nope" })).await.refused(404, "not_found");
    assert!(missing["hint"].as_str().unwrap().contains("dsec image ls"));
    assert!(missing["message"].as_str().unwrap().contains("nope"));
    try_with(json!({ "backend": "microvm" })).await.refused(501, "unsupported");
    try_with(json!({ "network_rules": { "npm": true } })).await.refused(501, "unsupported");
    for (fields, field) in [
        (json!({ "memory_limit_mb": 1 }), "memory_limit_mb"),
        (json!({ "cpu_cores_limit": 100_000 }), "cpu_cores_limit"),
        (json!({ "hostname": "a_b" }), "hostname"),
        (json!({ "cwd": "rel" }), "cwd"),
        (json!({ "exec": { "argv": [] } }), "argv"),
    ] {
        let error = try_with(fields).await.refused(400, "invalid_argument");
        assert_eq!(error["detail"]["field"], field, "{error}");
    }
    let unknown = try_with(json!({ "imgae": "x" })).await.refused(400, "invalid_argument");
    assert!(unknown["message"].as_str().unwrap().contains("imgae"), "{unknown}");
    assert_eq!(world.host.launches.load(Ordering::SeqCst), 0);
    // These only the sandbox itself can tell.
    try_with(json!({ "init_user": "ghost" })).await.refused(400, "invalid_argument");
    try_with(json!({ "cwd": "/nowhere" })).await.refused(400, "invalid_argument");
    assert_eq!(world.host.alive(), 0);
    let list = edge.client.get("/v1/sandboxes").await.expect(200);
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 0, "{list}");
    // The room that the refused ones took is free again, and one sandbox fills it.
    let id = edge.client.create().await;
    let full = try_with(json!({})).await.refused(429, "resource_exhausted");
    assert!(full["message"].as_str().unwrap().contains("1 sandboxes"), "{full}");
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    edge.client.create().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launch_that_fails_is_a_failed_sandbox_and_an_error() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.fail_launch.store(true, Ordering::SeqCst);
    let error = edge
        .client
        .post("/v1/sandboxes", json!({ "container_image": "base" }))
        .await
        .refused(500, "internal");
    assert!(error["message"].as_str().unwrap().contains("no such luck"), "{error}");
    let id = error["detail"]["sandbox_id"].as_str().unwrap();
    let record = edge.client.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(
        (record["state"].as_str(), record["reason"]["code"].as_str()),
        (Some("failed"), Some("launch_failed"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_makes_one_sandbox_however_often_and_at_once_it_comes() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.launch_gate.set(true);
    let body = json!({ "container_image": "base" }).to_string();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (client, body) = (edge.client.clone(), body.clone());
        calls.spawn(
            async move { client.send("POST", "/v1/sandboxes", &[("idempotency-key", "k1")], body).await },
        );
    }
    until("the launch", || match world.host.launches.load(Ordering::SeqCst) {
        1 => Ok(()),
        n => Err(n),
    })
    .await;
    world.host.launch_gate.set(false);
    let (mut ids, mut fresh) = (Vec::new(), 0);
    while let Some(answer) = calls.join_next().await {
        let answer = answer.unwrap();
        fresh += usize::from(answer.status == 201);
        assert!([200, 201].contains(&answer.status), "{}", answer.text());
        ids.push(answer.json()["id"].as_str().unwrap().to_owned());
    }
    ids.dedup();
    assert_eq!((ids.len(), fresh, world.host.launches.load(Ordering::SeqCst)), (1, 1, 1));
    let other = json!({ "container_image": "base", "hostname": "x" }).to_string();
    edge.client
        .send("POST", "/v1/sandboxes", &[("idempotency-key", "k1")], other)
        .await
        .refused(409, "already_exists");
    edge.client.delete(&format!("/v1/sandboxes/{}", ids[0])).await.expect(200);
    let ended = edge
        .client
        .send("POST", "/v1/sandboxes", &[("idempotency-key", "k1")], body.clone())
        .await
        .expect(200);
    assert_eq!((ended["id"].as_str(), ended["state"].as_str()), (Some(ids[0].as_str()), Some("stopped")));
    edge.client
        .send("POST", "/v1/sandboxes", &[("idempotency-key", "a b")], body)
        .await
        .refused(400, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_is_sent_again_gets_its_first_command_again() {
    let world = World::new();
    let mut edge = world.ready().await;
    let again = async |edge: &crate::support::Edge, key: &str, shell: &str| {
        let body = json!({ "container_image": "base", "exec": { "shell": shell, "wait": true } }).to_string();
        edge.client.send("POST", "/v1/sandboxes", &[("idempotency-key", key)], body).await
    };
    let short = "echo hi; exit 3";
    let long = "head -c 40000 /dev/zero | tr '\\0' x";
    for (key, shell) in [("short", short), ("long", long)] {
        let first = again(&edge, key, shell).await.expect(201);
        for _ in 0..2 {
            let second = again(&edge, key, shell).await;
            let location = format!("/v1/sandboxes/{}", first["id"].as_str().unwrap());
            assert_eq!(second.headers["location"], location.as_str());
            assert_eq!(second.expect(200)["first_exec"], first["first_exec"], "{key}");
            // The next round asks an edge that never answered it.
            drop(edge);
            edge = world.edge();
        }
        let id = first["id"].as_str().unwrap();
        assert_eq!(
            edge.client.get(&format!("/v1/sandboxes/{id}/execs")).await.expect(200)["execs"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }
    // A command that could not be started fails each time, and each time names the sandbox.
    let body = json!({ "container_image": "base", "exec": { "argv": ["/no/such/program"] } }).to_string();
    let fails = async || {
        let headers = [("idempotency-key", "fails")];
        let answer = edge.client.send("POST", "/v1/sandboxes", &headers, body.clone()).await;
        (answer.status, answer.json())
    };
    let first = fails().await;
    assert_eq!((first.0, first.1["detail"]["sandbox_id"].is_string()), (400, true), "{first:?}");
    assert_eq!(fails().await, first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_has_ended_says_why_and_when() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let stopped = edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    let error = edge.client.get(&format!("/v1/sandboxes/{id}/execs")).await.refused(409, "conflict");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("is stopped: somebody asked for its end (0 s ago)"), "{message}");
    assert_eq!(error["detail"]["ended_ms"], stopped["ended_ms"]);
    assert_eq!(error["detail"]["reason"]["code"], "asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_launch_does_not_tell_where_the_state_is() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.fail_launch.store(true, Ordering::SeqCst);
    let error = edge.client.post("/v1/sandboxes", json!({ "container_image": "base" })).await;
    let error = error.refused(500, "internal");
    assert!(error["message"].as_str().unwrap().contains("no such luck"), "{error}");
    let state = world.state.to_str().unwrap();
    assert!(!error.to_string().contains(state), "{error}");
    let list = edge.client.get("/v1/sandboxes?state=failed").await.text();
    assert!(list.contains("no such luck") && !list.contains(state), "{list}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_create_frees_its_key() {
    let world = World::new();
    let edge = world.ready().await;
    let create = || {
        edge.client.send(
            "POST",
            "/v1/sandboxes",
            &[("idempotency-key", "k")],
            "{\"container_image\":\"base\"}",
        )
    };
    world.host.fail_launch.store(true, Ordering::SeqCst);
    create().await.refused(500, "internal");
    world.host.fail_launch.store(false, Ordering::SeqCst);
    create().await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_leaves_a_whole_sandbox() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.launch_gate.set(true);
    let request = Client::request("POST", "/v1/sandboxes", &[], "{\"container_image\":\"base\"}");
    let client = edge.client.clone();
    let call = tokio::spawn(async move { client.begin(request).await.map(|_| ()) });
    until("the launch", || match world.host.launches.load(Ordering::SeqCst) {
        1 => Ok(()),
        n => Err(n),
    })
    .await;
    call.abort();
    let _ = call.await;
    let listed = edge.client.get("/v1/sandboxes?state=creating").await.expect(200);
    let id = listed["sandboxes"][0]["id"].as_str().unwrap().to_owned();
    edge.client.get(&format!("/v1/sandboxes/{id}/execs")).await.refused(409, "conflict");
    world.host.launch_gate.set(false);
    let record = edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=running")).await.expect(200);
    assert_eq!(record["state"], "running");
    assert_eq!(edge.client.run(&id, "echo whole").await["stdout"], "whole\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_during_the_launch_ends_what_the_launch_makes() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.launch_gate.set(true);
    let client = edge.client.clone();
    let create =
        tokio::spawn(async move { client.post("/v1/sandboxes", json!({ "container_image": "base" })).await });
    until("the launch", || match world.host.launches.load(Ordering::SeqCst) {
        1 => Ok(()),
        n => Err(n),
    })
    .await;
    let listed = edge.client.get("/v1/sandboxes").await.expect(200);
    let id = listed["sandboxes"][0]["id"].as_str().unwrap().to_owned();
    let (client, path) = (edge.client.clone(), format!("/v1/sandboxes/{id}"));
    let stop = tokio::spawn(async move { client.delete(&path).await });
    edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=stopping")).await.expect(200);
    world.host.launch_gate.set(false);
    assert_eq!(stop.await.unwrap().expect(200)["state"], "stopped");
    create.await.unwrap().refused(409, "conflict");
    assert_eq!(world.host.alive(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_stops_at_once_share_one_end() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let mut stops = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let (client, path) = (edge.client.clone(), format!("/v1/sandboxes/{id}"));
        stops.spawn(async move { client.delete(&path).await });
    }
    let mut ends = Vec::new();
    while let Some(stop) = stops.join_next().await {
        let stop = stop.unwrap();
        // A flood may fill the mailbox; whoever was let in has the same answer.
        if stop.status == 200 {
            ends.push(stop.json()["ended_ms"].as_u64().unwrap());
        } else {
            stop.refused(503, "unavailable");
        }
    }
    assert!(!ends.is_empty());
    ends.dedup();
    assert_eq!((ends.len(), world.host.cleaned.lock().unwrap().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn grace_is_given_and_not_waited_for_in_vain() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let line = "trap 'echo bye > bye; exit 0' TERM; echo up; while :; do sleep 0.01; done";
    let exec = edge.client.exec(&id, json!({ "shell": line })).await;
    let out =
        format!("/v1/sandboxes/{id}/execs/{}/stdout?follow=true&length=3", exec["id"].as_str().unwrap());
    assert_eq!(edge.client.get(&out).await.text(), "up\n");
    let guest = world.host.guest(id.rsplit('-').next().unwrap());
    let began = Instant::now();
    let ended = edge
        .client
        .post(&format!("/v1/sandboxes/{id}/stop"), json!({ "grace_ms": 15_000 }))
        .await
        .expect(200);
    assert_eq!(ended["state"], "stopped");
    assert!(began.elapsed() < Duration::from_secs(10), "the whole grace was waited for");
    assert_eq!(files::content(&guest, "bye").unwrap(), b"bye\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_dies_fails_its_sandbox_and_no_other() {
    let world = World::new();
    let edge = world.ready().await;
    let (victim, other) = (edge.client.create().await, edge.client.create().await);
    let (client, path) = (edge.client.clone(), format!("/v1/sandboxes/{victim}/execs"));
    let waiting =
        tokio::spawn(async move { client.post(&path, json!({ "shell": "sleep 100", "wait": true })).await });
    let execs = format!("/v1/sandboxes/{victim}/execs");
    loop {
        if edge.client.get(&execs).await.expect(200)["execs"].as_array().is_some_and(|e| !e.is_empty()) {
            break;
        }
    }
    world.host.guest(victim.rsplit('-').next().unwrap()).drop_agent();
    let answer = waiting.await.unwrap();
    assert!([409, 503].contains(&answer.status), "{}", answer.text());
    let record = edge.client.get(&format!("/v1/sandboxes/{victim}?wait_state=failed")).await.expect(200);
    assert_eq!(
        (record["state"].as_str(), record["reason"]["code"].as_str()),
        (Some("failed"), Some("agent_lost"))
    );
    assert_eq!(edge.client.run(&other, "echo fine").await["stdout"], "fine\n");
    assert_eq!(world.host.alive(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_and_old_sandboxes_end_by_themselves_and_used_ones_do_not() {
    let world = World::new();
    let edge = world.ready().await;
    let id = |made: serde_json::Value| made["id"].as_str().unwrap().to_owned();
    let idle = id(edge.client.create_with(json!({ "ttl_running_stop": 1 })).await);
    let used = id(edge.client.create_with(json!({ "ttl_running_stop": 1 })).await);
    let old = id(edge.client.create_with(json!({ "max_lifetime": 1, "ttl_running_stop": 0 })).await);
    let end =
        async |id: &str| edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=stopped")).await.expect(200);
    // Waiting for a command is use; its end comes after the ttl of the idle one.
    let slow = edge.client.exec(&used, json!({ "shell": "sleep 2; echo done", "wait": true })).await;
    assert_eq!(slow["stdout"], "done\n");
    assert_eq!(end(&idle).await["reason"]["code"], "idle");
    assert_eq!(end(&old).await["reason"]["code"], "lifetime");
    assert_eq!(end(&used).await["reason"]["code"], "idle");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_with_more_in_its_sockets_than_its_memory_limit_is_ended() {
    let world = World::new();
    let edge = world.ready().await;
    let made = edge.client.create_with(json!({ "memory_limit_mb": 64 })).await;
    let larger = edge.client.create_with(json!({ "memory_limit_mb": 256 })).await;
    world.host.socket_bytes.store(65 << 20, std::sync::atomic::Ordering::SeqCst);
    let path = format!("/v1/sandboxes/{}?wait_state=stopped", made["id"].as_str().unwrap());
    let record = edge.client.get(&path).await.expect(200);
    assert_eq!(record["reason"]["code"], "socket_memory");
    assert_eq!(record["reason"]["message"], "65 MiB waited in its sockets; its memory limit is 64 MiB");
    let path = format!("/v1/sandboxes/{}", larger["id"].as_str().unwrap());
    assert_eq!(edge.client.get(&path).await.expect(200)["state"], "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_state_has_a_limit() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let path = format!("/v1/sandboxes/{id}?wait_state=stopped&timeout_ms=20");
    edge.client.get(&path).await.refused(504, "deadline_exceeded");
    edge.client.get(&format!("/v1/sandboxes/{id}?wait_state=weird")).await.refused(400, "invalid_argument");
    edge.client.get(&format!("/v1/sandboxes/{id}?timeout_ms=1")).await.refused(400, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_path_that_is_none_answers_in_the_one_shape() {
    let world = World::new();
    let edge = world.edge();
    edge.client.get("/v2/x").await.refused(404, "not_found");
    edge.client.delete("/v1/nodes").await.refused(405, "method_not_allowed");
    edge.client.get("/v1/sandboxes/sb-n1-abc").await.refused(404, "not_found");
    edge.client.get("/v1/sandboxes/..%2F..").await.refused(404, "not_found");
    edge.client.get("/v1/sandboxes?limit=0").await.refused(400, "invalid_argument");
    edge.client.get("/v1/sandboxes?colour=red").await.refused(400, "invalid_argument");
    edge.client.send("POST", "/v1/sandboxes", &[], "{").await.refused(400, "invalid_argument");
    let huge = vec![b' '; (8 << 20) + 1];
    edge.client.send("POST", "/v1/sandboxes", &[], huge).await.refused(413, "too_large");
    let named = edge.client.send("GET", "/healthz", &[("x-request-id", "r-7")], "").await;
    assert_eq!(named.headers["x-request-id"], "r-7");
    assert_eq!(named.expect(200)["status"], "ok");
    let nodes = edge.client.get("/v1/nodes").await.expect(200);
    assert_eq!(
        (nodes["nodes"][0]["node"].as_str(), nodes["nodes"][0]["pid"].as_u64()),
        (Some("n1"), Some(u64::from(std::process::id())))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_everything_and_then_the_server() {
    let world = World::new();
    let edge = world.ready().await;
    for _ in 0..3 {
        edge.client.create().await;
    }
    let answer = edge.client.post("/internal/shutdown", json!({})).await;
    let text = answer.text();
    assert!(text.lines().next().unwrap().contains("\"total\":3"), "{text}");
    assert!(text.lines().last().unwrap().contains("\"done\""), "{text}");
    assert_eq!(world.host.alive(), 0);
    assert!(world.host.down.load(Ordering::SeqCst));
    until("the server's end", || if edge.has_ended() { Ok(()) } else { Err("it serves") }).await;
    assert!(!world.state.join("run/edge.sock").exists());
}
