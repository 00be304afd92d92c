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
    assert_eq!(world.host.forgotten.lock().unwrap().len(), 1);
    edge.client.get("/v1/images/base").await.refused(404, "not_found");
    edge.client.delete("/v1/images/base").await.refused(404, "not_found");
    for dir in ["pinned", "blobs", "uploads"] {
        assert_eq!(std::fs::read_dir(world.state.join("images").join(dir)).unwrap().count(), 0, "{dir}");
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
    assert_eq!(std::fs::read_dir(world.state.join("images/pinned")).unwrap().count(), 0);
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
    assert_eq!(std::fs::read_dir(world.state.join("images/uploads")).unwrap().count(), 0);
}
