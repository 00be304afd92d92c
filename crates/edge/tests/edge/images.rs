//! Images and who uses them.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::support::{World, until};

#[tokio::test(flavor = "multi_thread")]
async fn an_image_in_use_stays_and_names_its_users() {
    let world = World::new();
    let edge = world.ready().await;
    edge.client.import("team/other:1").await;
    let id = edge.client.create().await;
    let list = edge.client.get("/v1/images").await.expect(200);
    assert_eq!(list["images"].as_array().unwrap().len(), 2);
    let image = edge.client.get("/v1/images/base").await.expect(200);
    assert_eq!((image["used_by"].clone(), image["source"].as_str()), (json!([id]), Some("test")));
    let refused = edge.client.delete("/v1/images/base").await.refused(409, "conflict");
    assert!(refused["message"].as_str().unwrap().contains(&id), "{refused}");
    assert_eq!(edge.client.delete("/v1/images/team%2Fother:1").await.status, 204);
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(edge.client.delete("/v1/images/base").await.status, 204);
    let digest = image["digest"].as_str().unwrap();
    let forgotten = world.host.forgotten.lock().unwrap().clone();
    assert!(forgotten.iter().any(|path| path.to_string_lossy().contains(digest)), "{forgotten:?}");
    edge.client.get("/v1/images/base").await.refused(404, "not_found");
    edge.client.delete("/v1/images/base").await.refused(404, "not_found");
    for dir in ["meta", "work"] {
        assert_eq!(std::fs::read_dir(world.state.join("layers").join(dir)).unwrap().count(), 0, "{dir}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_moves_takes_nothing_from_a_create_in_the_middle() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.launch_gate.set(true);
    let client = edge.client.clone();
    let create = tokio::spawn(async move { client.create_with(json!({})).await });
    until("the launch", || match world.host.launches.load(Ordering::SeqCst) {
        1 => Ok(()),
        n => Err(n),
    })
    .await;
    let before = edge.client.get("/v1/images/base").await.expect(200);
    let after = edge.client.import_with("base", "other content").await;
    assert_ne!(before["digest"], after["digest"]);
    world.host.launch_gate.set(false);
    // The fake launch fails when its image is not there.
    let made = create.await.unwrap();
    assert_eq!(made["image_digest"], before["digest"]);
    let id = made["id"].as_str().unwrap();
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
}

/// More imports at once than the node has threads that may block, each of which needs another thread for what it writes.
#[tokio::test(flavor = "multi_thread")]
async fn imports_take_turns_and_a_queue_that_is_full_says_so() {
    let world = World::new();
    let edge = world.edge_with_threads(12);
    let imports = (0..200).map(|number| {
        let client = edge.client.clone();
        tokio::spawn(async move {
            let path = format!("/v1/images/i{number}?source=test");
            client.put(&path, crate::support::client::tiny_tar(&number.to_string())).await
        })
    });
    let (mut done, mut refused) = (0, 0);
    for import in imports.collect::<Vec<_>>() {
        let answer = tokio::time::timeout(std::time::Duration::from_secs(60), import).await;
        let answer = answer.expect("imports wait for each other").unwrap();
        if answer.status == 200 {
            assert!(answer.text().contains("\"done\""), "{}", answer.text());
            done += 1;
        } else {
            let error = answer.refused(429, "resource_exhausted");
            assert!(error["message"].as_str().unwrap().contains("imports are under way or wait"), "{error}");
            refused += 1;
        }
    }
    assert!(done >= 72 && done + refused == 200, "{done} done, {refused} refused");
    assert_eq!(std::fs::read_dir(world.state.join("layers/work")).unwrap().count(), 0);
    // Whoever left has left its place.
    edge.client.import("later").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_archive_is_refused_and_leaves_nothing() {
    let world = World::new();
    let edge = world.edge();
    edge.client.put("/v1/images/Bad%20Name", "x").await.refused(400, "invalid_argument");
    edge.client.put("/v1/images/good", "").await.refused(400, "invalid_argument");
    let answer = edge.client.put("/v1/images/good", "this is no archive").await;
    let last: Value = serde_json::from_str(answer.text().lines().last().unwrap()).unwrap();
    assert_eq!(
        (last["event"].as_str(), last["error"]["code"].as_str()),
        (Some("error"), Some("invalid_argument"))
    );
    edge.client.get("/v1/images/good").await.refused(404, "not_found");
    assert_eq!(std::fs::read_dir(world.state.join("layers/work")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_last_name_of_an_image_in_use_stays() {
    let world = World::new();
    let edge = world.ready().await;
    let id = edge.client.create().await;
    let other = edge.client.import_with("other", "base").await;
    assert_eq!(other["digest"], edge.client.get("/v1/images/base").await.expect(200)["digest"]);
    assert_eq!(edge.client.delete("/v1/images/base").await.status, 204);
    edge.client.delete("/v1/images/other").await.refused(409, "conflict");
    // What runs on it goes on, and the name that is left makes more.
    assert_eq!(edge.client.run(&id, "echo on").await["stdout"], "on\n");
    edge.client.post("/v1/sandboxes", json!({ "container_image": "other" })).await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_import_is_told_in_its_senders_words() {
    let world = World::new();
    let edge = world.edge();
    let state = world.state.to_str().unwrap();
    let gzip: &[u8] = b"\x1f\x8b\x08\x00 nothing of the kind";
    for (body, word) in [
        (b"this is no archive".to_vec(), "my.tar"),
        (gzip.to_vec(), "my.tar"),
        (crate::support::client::tiny_tar("x")[..700].to_vec(), "my.tar"),
    ] {
        let answer = edge.client.put("/v1/images/good?source=my.tar", body).await;
        let last: Value = serde_json::from_str(answer.text().lines().last().unwrap()).unwrap();
        assert_eq!(last["event"], "error", "{last}");
        let text = last.to_string();
        assert!(text.contains(word) && !text.contains(state) && !text.contains("uploads"), "{text}");
    }
    // A host that fails is the operator's business: its paths are in the log.
    std::fs::remove_dir_all(world.state.join("layers/work")).unwrap();
    let error = edge.client.put("/v1/images/good", "x").await.refused(500, "internal");
    assert!(!error.to_string().contains(state), "{error}");
}
