//! Pools of nodes: what one takes over from the others, and what is brought there for it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use dsec_control::config::BurstEntry;
use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::{Control, get, post, until, with};

/// Two nodes at home, n1 and n2, and n3 in the cloud, which has taken `share` of what it can since they were `above` full. All of them
/// know three images.
async fn bursting(above: f64, share: f64) -> Control {
    let burst = BurstEntry { pool: "cloud".to_owned(), above: Some(above), share: Some(share) };
    Control::start_as(
        3,
        |config| config.burst = Some(burst),
        |_| None,
        |edges| {
            *edges[2].notes.pool.lock().unwrap() = "cloud";
            for edge in edges {
                edge.notes.images.lock().unwrap().extend([("often", 60), ("seldom", 50), ("never", 10)]);
            }
        },
    )
    .await
}

/// Creates so many of an image; how many went to each node.
async fn create(control: &Control, image: &str, count: usize) -> BTreeMap<String, usize> {
    let (mut caller, mut nodes) = (control.connect().await, BTreeMap::new());
    let body = json!({ "container_image": image }).to_string();
    for _ in 0..count {
        let answer = caller.ask(post("/v1/sandboxes", body.clone())).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        *nodes.entry(answer.json()["node"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    nodes
}

/// The last line of a sync.
async fn sync(control: &Control, request: Value) -> Value {
    let answer = control.ask(post("/v1/pools/cloud/sync", request.to_string())).await;
    assert_eq!(answer.status, StatusCode::OK, "{:?}", String::from_utf8_lossy(&answer.body));
    let text = String::from_utf8(answer.body).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

async fn pools(control: &Control) -> Vec<Value> {
    control.ask(get("/v1/pools")).await.json()["pools"].as_array().unwrap().clone()
}

/// Says how much of the home nodes' memory is in use, and waits until the server has heard.
async fn fill_home(control: &Control, used: f64) {
    for edge in &control.edges[..2] {
        edge.notes.memory_used_mib.store((used * 100_000.0) as u64, Ordering::SeqCst);
    }
    until("the home nodes say how full they are", async || {
        let home = pools(control).await[1]["utilisation"].as_f64().unwrap();
        if (home - used).abs() < 0.02 { Ok(()) } else { Err(home) }
    })
    .await;
}

async fn metric(control: &Control, name: &str) -> u64 {
    let text = String::from_utf8(control.ask(get("/metrics")).await.body).unwrap();
    let line = format!("dsec_burst_{name}_total{{pool=\"cloud\"}} ");
    text.lines().find_map(|have| have.strip_prefix(&line)).unwrap().parse().unwrap()
}

#[tokio::test]
async fn what_is_in_the_pool_goes_there_above_the_threshold_and_nothing_else_does() {
    let control = bursting(0.8, 1.0).await;
    let at_home = |nodes: &BTreeMap<String, usize>| !nodes.contains_key("n3");
    for (image, count) in [("often", 6), ("seldom", 2)] {
        assert!(at_home(&create(&control, image, count).await), "nothing is in the pool yet");
    }
    let done = sync(&control, json!({ "budget_bytes": 100 })).await;
    assert_eq!(done["synced"]["layers"][0]["layer"], "base/often");
    assert!(at_home(&create(&control, "often", 6).await), "there is room at home");
    fill_home(&control, 0.9).await;
    assert_eq!(create(&control, "often", 6).await, BTreeMap::from([("n3".to_owned(), 6)]));
    assert!(at_home(&create(&control, "seldom", 6).await), "it is not in the pool");
    for (name, count) in [("creates", 26), ("eligible", 12), ("diverted", 6), ("refused", 0)] {
        assert_eq!(metric(&control, name).await, count, "{name}");
    }
    fill_home(&control, 0.3).await;
    assert!(at_home(&create(&control, "often", 6).await), "there is room at home again");
}

#[tokio::test]
async fn only_the_share_is_taken_over() {
    let control = bursting(0.8, 0.5).await;
    create(&control, "often", 1).await;
    sync(&control, json!({ "budget_bytes": 100 })).await;
    fill_home(&control, 0.9).await;
    let nodes = create(&control, "often", 200).await;
    assert!((60..140).contains(&nodes["n3"]), "{nodes:?}");
    assert_eq!(metric(&control, "diverted").await, nodes["n3"] as u64);
}

#[tokio::test]
async fn what_one_pool_has_no_room_for_the_other_takes() {
    let control = bursting(0.8, 1.0).await;
    create(&control, "often", 1).await;
    sync(&control, json!({ "budget_bytes": 100 })).await;
    let set_full = |at: usize, full: bool| control.edges[at].notes.full.store(full, Ordering::SeqCst);
    fill_home(&control, 0.9).await;
    set_full(2, true);
    assert!(!create(&control, "often", 4).await.contains_key("n3"));
    assert_eq!((metric(&control, "refused").await, metric(&control, "diverted").await), (4, 0));
    // Below the threshold, nodes that refuse for another reason say that they are full.
    fill_home(&control, 0.1).await;
    set_full(0, true);
    set_full(1, true);
    set_full(2, false);
    assert_eq!(create(&control, "often", 4).await, BTreeMap::from([("n3".to_owned(), 4)]));
    assert_eq!(metric(&control, "diverted").await, 4);
    let refused = control.ask(post("/v1/sandboxes", r#"{"container_image":"seldom"}"#)).await;
    assert_eq!(refused.error(), "resource_exhausted");
    assert_eq!(
        refused.json()["message"],
        "no node takes the sandbox: 2 without room, 1 of another pool",
        "what is not in the pool does not go there"
    );
    set_full(2, true);
    let refused = control.ask(post("/v1/sandboxes", r#"{"container_image":"often"}"#)).await;
    assert_eq!(refused.json()["message"], "no node takes the sandbox: 3 without room");
}

#[tokio::test]
async fn who_asks_for_a_pool_is_there_and_who_may_be_here_again_stays_at_home() {
    let control = bursting(0.8, 1.0).await;
    create(&control, "often", 1).await;
    sync(&control, json!({ "budget_bytes": 100 })).await;
    fill_home(&control, 0.9).await;
    let asked = |pool: &str| {
        let body = json!({ "container_image": "seldom", "pool": pool }).to_string();
        post("/v1/sandboxes", body)
    };
    for _ in 0..4 {
        assert_eq!(control.ask(asked("cloud")).await.json()["node"], "n3");
        assert_ne!(control.ask(asked("onprem")).await.json()["node"], "n3");
    }
    let nowhere = control.ask(asked("moon")).await;
    assert_eq!(nowhere.error(), "unsupported");
    assert_eq!(nowhere.json()["message"], "no node takes the sandbox: 3 of another pool");
    for number in 0..12 {
        let keyed = || {
            let create = post("/v1/sandboxes", r#"{"container_image":"often"}"#);
            with(create, "idempotency-key", &format!("key-{number}"))
        };
        assert_ne!(control.ask(keyed()).await.json()["node"], "n3", "its repeat would go elsewhere");
        let counted = with(keyed(), "idempotency-attempt", "1");
        assert_eq!(control.ask(counted).await.json()["node"], "n3");
    }
}

#[tokio::test]
async fn a_sync_says_what_it_covers_and_the_pool_has_only_what_is_whole_there() {
    let control = bursting(0.8, 1.0).await;
    create(&control, "often", 3).await;
    create(&control, "seldom", 2).await;
    let dry = sync(&control, json!({ "budget_bytes": 200, "dry_run": true })).await["synced"].clone();
    assert_eq!((&dry["bytes"], &dry["covered"], &dry["covered_before"]), (&110.into(), &5.into(), &0.into()));
    let brought = |at: usize| control.edges[at].notes.brought.lock().unwrap().len();
    assert_eq!((brought(2), pools(&control).await[0].get("synced")), (0, None), "a trial does nothing");
    control.edges[2].notes.unreadable.lock().unwrap().insert("seldom");
    let synced = sync(&control, json!({ "budget_bytes": 200 })).await["synced"].clone();
    assert_eq!((&synced["covered"], &synced["bytes"]), (&3.into(), &60.into()));
    assert_eq!(synced["failed"][0]["layer"], "base/seldom");
    assert!(synced["failed"][0]["problem"].as_str().unwrap().contains("n3: the store is away"), "{synced}");
    assert_eq!((brought(0), brought(1), brought(2)), (0, 0, 1), "it is brought to the pool's nodes");
    let cloud = &pools(&control).await[0];
    let content = &cloud["synced"];
    assert_eq!(
        (&content["layers"], &content["bytes"], &content["budget_bytes"]),
        (&1.into(), &60.into(), &200.into())
    );
    assert_eq!((&content["accesses"], &content["covered"]), (&5.into(), &3.into()));
    // What is chosen now is other than before.
    control.edges[2].notes.unreadable.lock().unwrap().clear();
    create(&control, "seldom", 9).await;
    let synced = sync(&control, json!({ "budget_bytes": 100 })).await["synced"].clone();
    assert_eq!(
        (&synced["covered_before"], &synced["covered"], &synced["accesses"]),
        (&3.into(), &11.into(), &14.into())
    );
    assert_eq!(
        (&synced["dropped"], &synced["layers"][0]["layer"]),
        (&json!(["base/often"]), &"base/seldom".into())
    );
    fill_home(&control, 0.9).await;
    assert!(!create(&control, "often", 4).await.contains_key("n3"), "it has fallen out");
    assert_eq!(create(&control, "seldom", 4).await, BTreeMap::from([("n3".to_owned(), 4)]));
    let audit = control.ask(get("/v1/audit")).await.json();
    let syncs =
        audit["entries"].as_array().unwrap().iter().filter(|entry| entry["action"] == "pool.sync").count();
    assert_eq!(syncs, 2, "a trial is no change: {audit}");
}

#[tokio::test]
async fn a_sync_that_cannot_be_done_says_why() {
    let control = bursting(0.8, 1.0).await;
    let ask = async |path: &str, body: &str| control.ask(post(path, body.to_owned())).await;
    let none = ask("/v1/pools/moon/sync", r#"{"budget_bytes":1}"#).await;
    assert_eq!(
        (none.error(), &none.json()["detail"]["pools"]),
        ("not_found".into(), &json!(["cloud", "onprem"]))
    );
    for body in [
        r#"{"budget_bytes":1,"since_days":0}"#,
        r#"{"budget_bytes":1,"since_days":31}"#,
        "{}",
        r#"{"budget_bytes":-1}"#,
    ] {
        assert_eq!(ask("/v1/pools/cloud/sync", body).await.error(), "invalid_argument", "{body}");
    }
    assert_eq!(ask("/v1/pools/The%20Cloud/sync", r#"{"budget_bytes":1}"#).await.error(), "invalid_argument");
    *control.edges[2].notes.store.lock().unwrap() = "another".to_owned();
    until("another store is refused", async || {
        let answer = ask("/v1/pools/cloud/sync", r#"{"budget_bytes":1}"#).await;
        let is_refused = answer.status == StatusCode::NOT_IMPLEMENTED;
        if is_refused && answer.json()["hint"].as_str().unwrap().contains("one store") {
            Ok(())
        } else {
            Err(answer)
        }
    })
    .await;
}
