//! What a node tells control of its sandboxes.

use serde_json::{Value, json};

use crate::support::World;
use crate::support::client::Client;

/// Asks for the changes after an answer; `null`: from nothing.
async fn changes(client: &Client, after: &Value) -> Value {
    let (since, epoch) = (after["seq"].as_u64().unwrap_or(0), after["epoch"].as_str().unwrap_or(""));
    client.get(&format!("/internal/sandboxes/changes?since={since}&epoch={epoch}")).await.expect(200)
}

fn states(answer: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let all = answer["changed"].as_array().unwrap().iter();
    let mut all: Vec<_> = all.map(|change| (text(&change["id"]), text(&change["state"]))).collect();
    all.sort();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn each_change_is_told_once_and_a_new_edge_tells_everything() {
    let world = World::new();
    let edge = world.ready().await;
    let labels = json!({ "many": "x".repeat(200) });
    let with = |labels: Value| json!({ "container_image": "base", "task_id": "job", "labels": labels });
    let made = edge.client.post("/v1/sandboxes", with(json!({ "step": "1" }))).await.expect(201);
    let second = edge.client.post("/v1/sandboxes", with(labels)).await.expect(201);
    let (first_id, second_id) = (made["id"].as_str().unwrap(), second["id"].as_str().unwrap());

    let all = changes(&edge.client, &Value::Null).await;
    assert_eq!((&all["whole"], &all["more"]), (&true.into(), &false.into()));
    assert_eq!(states(&all).len(), 2);
    let (owners, shapes) = (all["owners"].as_array().unwrap(), all["shapes"].as_array().unwrap());
    assert_eq!((owners.len(), shapes.len()), (1, 1), "what they have in common is told once");
    assert_eq!(owners[0], json!({ "project": "root", "task_id": "job", "backend": "container" }));
    assert_eq!(shapes[0]["limits"], made["limits"]);

    let none = changes(&edge.client, &all).await;
    assert_eq!((states(&none), &none["seq"], &none["whole"]), (vec![], &all["seq"], &false.into()));
    edge.client.delete(&format!("/v1/sandboxes/{first_id}")).await.expect(200);
    let ended = changes(&edge.client, &all).await;
    assert_eq!(states(&ended), [(first_id.to_owned(), "stopped".to_owned())]);
    assert_eq!(ended["changed"][0]["reason"]["code"], "asked");
    assert!(ended["changed"][0]["ended_ms"].as_u64() >= made["created_ms"].as_u64());

    let asked = json!({ "ids": [second_id, "sb-n1-nobody", first_id], "usage": true });
    let found = edge.client.post("/internal/sandboxes/get", asked).await.expect(200);
    let ids: Vec<&str> =
        found["sandboxes"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [second_id, first_id]);
    assert!(found["sandboxes"][0]["usage"].is_object());

    drop(edge);
    let edge = world.edge();
    let again = changes(&edge.client, &ended).await;
    assert_eq!(again["whole"], true, "numbers of another start mean nothing");
    assert_ne!(again["epoch"], ended["epoch"]);
    assert_eq!(states(&again).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_labels_than_control_is_to_hold_are_left_out() {
    let world = World::new();
    let edge = world.ready().await;
    let labels: serde_json::Map<String, Value> =
        (0..10).map(|number| (format!("key-{number}"), "x".repeat(200).into())).collect();
    let create = json!({ "container_image": "base", "labels": labels });
    edge.client.post("/v1/sandboxes", create).await.expect(201);
    edge.client
        .post("/v1/sandboxes", json!({ "container_image": "base", "labels": { "a": "b" } }))
        .await
        .expect(201);
    let told = changes(&edge.client, &Value::Null).await;
    let mut labels: Vec<&Value> =
        told["changed"].as_array().unwrap().iter().map(|it| &it["labels"]).collect();
    labels.sort_by_key(|labels| labels.is_object());
    assert_eq!(labels, [&Value::Null, &json!({ "a": "b" })]);
}
