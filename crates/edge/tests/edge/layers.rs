//! Layers between their store and their mount: coming, going, changing under those who want them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dsec_fill::engine::Counts;
use dsec_image::layer::LayerKind;
use dsec_store::{Lease, Publish, Store};
use serde_json::{Value, json};

use crate::support::client::tiny_tar;
use crate::support::{Edge, World, until};

/// Imports a toolkit.
async fn toolkit(edge: &Edge, name: &str, content: &str) -> Value {
    let answer = edge.client.put(&format!("/v1/layers/toolkit/{name}?source=test"), tiny_tar(content)).await;
    let last: Value = serde_json::from_str(answer.text().lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "done", "{last}");
    last["image"].clone()
}

/// Where the only blob of the base was read by the last launch.
fn device(world: &World) -> PathBuf {
    let layers = world.host.layers.lock().unwrap();
    layers.last().unwrap()[0].devices[0].clone()
}

/// What the store's leases hold.
fn held(world: &World) -> Vec<String> {
    let leases = std::fs::read_dir(world.state.join("store/leases"));
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    leases.map_or_else(|_| Vec::new(), |entries| entries.map(name).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_taken_away_and_wanted_at_once_is_made_ready_anew() {
    let world = World::new();
    let edge = world.ready().await;
    let image = edge.client.import_with("other", "base").await;
    let id = edge.client.create().await;
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    world.host.content.hold_close.send_replace(true);
    let (client, host) = (edge.client.clone(), world.host.clone());
    let removal = tokio::spawn(async move { client.delete("/v1/images/base").await.status });
    until("the layer going", || match host.content.closing.load(Ordering::SeqCst) {
        0 => Err(0),
        _ => Ok(()),
    })
    .await;
    let client = edge.client.clone();
    let create = tokio::spawn(async move {
        client.post("/v1/sandboxes", json!({ "container_image": "other" })).await.expect(201)
    });
    // It cannot be ready while it is being taken away; how long it is tried must not matter.
    for _ in 0..50 {
        edge.client.get("/v1/images/other").await.expect(200);
        assert_eq!(world.host.launches.load(Ordering::SeqCst), 1, "launched from a layer that goes");
    }
    world.host.content.hold_close.send_replace(false);
    assert_eq!(removal.await.unwrap(), 204);
    create.await.unwrap();
    // The fake launch fails without the metadata; its content and its hold in the store are there again, too.
    assert_eq!(world.host.content.open.lock().unwrap().len(), 1);
    let digest = image["digest"].as_str().unwrap();
    assert!(held(&world).iter().any(|hold| hold.ends_with(digest)), "{:?}", held(&world));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_of_several_layers_is_closed_with_the_last_of_them_also_by_the_next_edge() {
    let world = World::new();
    let edge = world.ready().await;
    // Both layers have one blob.
    let (base, tool) =
        (edge.client.get("/v1/images/base").await.expect(200), toolkit(&edge, "tool", "base").await);
    assert_eq!(base["blobs"], tool["blobs"]);
    let with_tool = edge.client.create_with(json!({ "toolkits": ["tool"] })).await;
    edge.client.create().await;
    drop(edge);
    let edge = world.edge();
    let id = with_tool["id"].as_str().unwrap();
    edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert_eq!(edge.client.delete("/v1/layers/toolkit/tool").await.status, 204);
    let digest = tool["digest"].as_str().unwrap();
    assert!(!world.state.join("layers/meta").join(format!("{digest}.erofs")).exists());
    // A sandbox of before runs on the other layer, which this edge has not made ready.
    assert_eq!(world.host.content.open.lock().unwrap().len(), 1);
    let left: Vec<String> = edge.client.get("/v1/sandboxes").await.expect(200)["sandboxes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|sandbox| sandbox["state"] == "running")
        .map(|sandbox| sandbox["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(left.len(), 1);
    edge.client.delete(&format!("/v1/sandboxes/{}", left[0])).await.expect(200);
    assert_eq!(edge.client.delete("/v1/images/base").await.status, 204);
    assert!(world.host.content.open.lock().unwrap().is_empty());
}

/// Removes what the name `base` stands for as another node does: an error says who uses it.
async fn remove_elsewhere(world: &World) -> Result<(), String> {
    let store = Store::open(&world.config().store).await.unwrap();
    let (name, tag) = ("base".parse().unwrap(), "latest".parse().unwrap());
    let version = match store.tagged(LayerKind::Base, &name, &tag).await {
        Ok(version) => version,
        Err(error) => return Err(error.to_string()),
    };
    store.untag(LayerKind::Base, &name, &tag).await.unwrap();
    match store.remove_version(LayerKind::Base, &name, &version).await {
        Ok(_) => Ok(()),
        Err(error) => {
            store.tag(LayerKind::Base, &name, &tag, &version).await.unwrap();
            Err(error.to_string())
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_only_idle_here_may_lose_its_name_elsewhere_and_is_let_go_of_then() {
    let world = World::new();
    let edge = world.ready().await;
    let digest = edge.client.get("/v1/images/base").await.expect(200)["digest"].as_str().unwrap().to_owned();
    let is_idle = || match held(&world).iter().any(|hold| hold.contains(".idle.") && hold.ends_with(&digest))
    {
        true => Ok(()),
        false => Err(held(&world)),
    };
    let first = edge.client.create().await;
    let refused = remove_elsewhere(&world).await.unwrap_err();
    assert!(refused.contains("the lease of n1"), "{refused}");
    edge.client.delete(&format!("/v1/sandboxes/{first}")).await.expect(200);
    until("the store to know that nobody uses it", is_idle).await;
    // Used again it is used at once, and by the edge that comes after this one.
    let second = edge.client.create().await;
    assert!(is_idle().is_err());
    assert!(remove_elsewhere(&world).await.is_err());
    drop(edge);
    let edge = world.edge();
    assert!(remove_elsewhere(&world).await.is_err());
    edge.client.delete(&format!("/v1/sandboxes/{second}")).await.expect(200);
    until("the store to know that nobody uses it", is_idle).await;
    remove_elsewhere(&world).await.unwrap();
    let image = world.state.join(format!("layers/meta/{digest}.erofs"));
    assert!(image.exists() && held(&world).iter().any(|hold| hold.ends_with(&digest)));
    // The node lets go of it when it looks what has a name, and then it goes.
    let done = lines(&edge.client.post("/v1/store/collect?grace_s=0", json!({})).await.text());
    assert_eq!(done.last().unwrap()["collected"]["layers"], 1, "{done:?}");
    assert!(!image.exists() && !held(&world).iter().any(|hold| hold.ends_with(&digest)));
    assert!(world.host.content.open.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_layers_make_room_the_longest_idle_first() {
    let world = World::new();
    let edge = world.ready().await;
    for name in ["a", "b", "c", "used"] {
        toolkit(&edge, name, name).await;
    }
    let start = async |name: &str| {
        edge.client.create_with(json!({ "toolkits": [name] })).await["id"].as_str().unwrap().to_owned()
    };
    // In this order they become idle; what they are made of is all that the cache has.
    for name in ["b", "a", "c"] {
        let id = start(name).await;
        edge.client.delete(&format!("/v1/sandboxes/{id}")).await.expect(200);
    }
    let _runs = start("used").await;
    let open = || world.host.content.open.lock().unwrap().len();
    assert_eq!(open(), 5);
    let of = async |name: &str| edge.client.get(&format!("/v1/layers/toolkit/{name}")).await.expect(200);
    // Of five blobs' room, a quarter must be free to go: two are too many.
    world.host.content.budget.store(5 * 4096, Ordering::SeqCst);
    until("room", || match open() {
        3 => Ok(()),
        many => Err(many),
    })
    .await;
    let is_here = |layer: &Value| {
        world.state.join(format!("layers/meta/{}.erofs", layer["digest"].as_str().unwrap())).exists()
    };
    let mut here = Vec::new();
    for name in ["a", "b", "c", "used"] {
        here.push(is_here(&of(name).await));
    }
    assert_eq!(here, [false, false, true, true]);
    assert!(world.host.content.evicted.lock().unwrap().is_empty(), "the disk has room");
    // What runs is never let go of, however little room there is.
    world.host.content.budget.store(4096, Ordering::SeqCst);
    until("room", || match open() {
        2 => Ok(()),
        many => Err(many),
    })
    .await;
    assert!(is_here(&of("used").await));
    start("a").await;
}

/// The collector that had it on its list is dead, its list is void, and its removal comes all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_a_very_late_removal_takes_while_it_is_made_ready_is_not_relied_on() {
    let world = World::new();
    let edge = world.ready().await;
    let digest = edge.client.get("/v1/images/base").await.expect(200)["digest"].as_str().unwrap().to_owned();
    let list = world.state.join("store/collect/other");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, format!("{{\"void_ms\":1,\"keys\":[\"layers/{digest}\"]}}")).unwrap();
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    std::fs::File::options().append(true).open(&list).unwrap().set_modified(old).unwrap();
    world.host.content.hold_open.send_replace(true);
    let client = edge.client.clone();
    let create =
        tokio::spawn(async move { client.post("/v1/sandboxes", json!({ "container_image": "base" })).await });
    until("the layer's content being opened", || match world.host.content.opening.load(Ordering::SeqCst) {
        0 => Err(0),
        _ => Ok(()),
    })
    .await;
    std::fs::remove_file(world.state.join(format!("store/layers/{digest}"))).unwrap();
    world.host.content.hold_open.send_replace(false);
    create.await.unwrap().refused(503, "unavailable");
    assert_eq!(world.host.launches.load(Ordering::SeqCst), 0);
}

/// Both make the same layers over and over and take their names away again, and each collects all the while what the other may just
/// be about to rely on.
#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_publish_and_collect_at_once_and_what_has_a_name_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let settings = format!("[store]\nurl = {:?}\ncreate = true\n", dir.path().join("store"));
    let worlds = [World::with(&settings), World::with(&settings)];
    let edges = worlds.each_ref().map(World::edge);
    let is_over = Arc::new(AtomicBool::new(false));
    let collecting: Vec<_> = edges
        .iter()
        .map(|edge| {
            let (client, is_over) = (edge.client.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut removed = 0;
                while !is_over.load(Ordering::SeqCst) {
                    let done = lines(&client.post("/v1/store/collect?grace_s=0", json!({})).await.text());
                    let last = done.last().unwrap();
                    assert_eq!(last["event"], "done", "{last}");
                    removed += last["collected"]["packs"].as_u64().unwrap();
                }
                removed
            })
        })
        .collect();
    let publishing = edges.iter().enumerate().map(|(node, edge)| async move {
        for round in 0..12 {
            let name = format!("n{node}-{round}");
            let made = toolkit(edge, &name, &(round % 3).to_string()).await;
            let path = format!("/v1/layers/toolkit/{name}");
            let seen = lines(&edge.client.post(&format!("{path}/verify"), json!({})).await.text());
            assert_eq!(seen.last().unwrap()["findings"], json!([]), "{name}: {made}");
            if round % 4 != 3 {
                // The other may be about to publish the same layer.
                assert!([204, 409].contains(&edge.client.delete(&path).await.status), "{name}");
            }
        }
    });
    futures_util::future::join_all(publishing).await;
    is_over.store(true, Ordering::SeqCst);
    let mut removed = 0;
    for collecting in collecting {
        removed += collecting.await.unwrap();
    }
    assert!(removed > 0, "nothing was there to collect");
    let seen = lines(&edges[0].client.post("/v1/store/verify", json!({})).await.text());
    let last = seen.last().unwrap();
    assert_eq!((&last["findings"], last["layers"].as_u64()), (&json!([]), Some(3)), "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_that_is_none_never_comes_to_the_kernel() {
    let world = World::new();
    let edge = world.ready().await;
    let good = toolkit(&edge, "good", "good").await;
    let store = Store::open(&world.config().store).await.unwrap();
    let mut manifest = store.manifest(&good["digest"].as_str().unwrap().parse().unwrap()).await.unwrap();
    let mut bytes = store.metadata(&manifest.metadata).await.unwrap().to_vec();
    // The root directory is another number: what its digest vouches for is no file system.
    bytes[1024..1152].fill(0xff);
    let lease = Arc::new(Lease::begin(&store, "test", Duration::from_secs(60)).await.unwrap());
    let session = Publish::begin(Arc::clone(&lease)).await.unwrap();
    manifest.metadata.id = session.metadata(bytes.into()).await.unwrap();
    let (name, version) = ("bad".parse().unwrap(), "1".parse().unwrap());
    let id = session.name(&manifest, &name, &version).await.unwrap();
    lease.release().await.unwrap();
    let launches = world.host.launches.load(Ordering::SeqCst);
    let request = json!({ "container_image": "base", "toolkits": ["bad@1"] });
    edge.client.post("/v1/sandboxes", request).await.refused(500, "internal");
    assert_eq!(world.host.launches.load(Ordering::SeqCst), launches);
    assert!(!world.state.join(format!("layers/meta/{id}.erofs")).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_became_complete_is_mounted_directly_by_whoever_starts_later() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.content.is_partial.store(true, Ordering::SeqCst);
    edge.client.create().await;
    let through = device(&world);
    assert!(through.starts_with(world.host.dir.join("device")), "{through:?}");
    assert!(world.host.forgotten.lock().unwrap().is_empty());
    world.host.content.is_partial.store(false, Ordering::SeqCst);
    let mut last = through.clone();
    for _ in 0..500 {
        edge.client.create().await;
        last = device(&world);
        if last != through {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(last.starts_with(world.host.dir.join("content")), "{last:?}");
    assert_eq!(
        world.host.forgotten.lock().unwrap().len(),
        1,
        "the mount through the device stays for new ones"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_a_device_that_went_are_mounted_anew() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.content.is_partial.store(true, Ordering::SeqCst);
    edge.client.create().await;
    assert!(world.host.forgotten.lock().unwrap().is_empty());
    world.host.content.generation.fetch_add(1, Ordering::SeqCst);
    edge.client.create().await;
    assert_eq!(world.host.forgotten.lock().unwrap().len(), 1);
    // Once; and by an edge that comes later, which knows nothing of the device before.
    edge.client.create().await;
    assert_eq!(world.host.forgotten.lock().unwrap().len(), 1);
    drop(edge);
    let edge = world.edge();
    assert_eq!(world.host.forgotten.lock().unwrap().len(), 2);
    edge.client.create().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_goes_down_gives_its_lease_back_and_leaves_nothing_of_its_layers() {
    let world = World::new();
    let edge = world.ready().await;
    edge.client.create().await;
    assert!(held(&world).iter().any(|lease| lease.starts_with("n1-")), "{:?}", held(&world));
    assert_eq!(edge.client.post("/internal/shutdown", json!({})).await.status, 200);
    assert_eq!(held(&world), [""; 0]);
    assert_eq!(std::fs::read_dir(world.state.join("layers/meta")).unwrap().count(), 0);
    assert!(!world.state.join("layers/lease").exists());
    assert!(world.host.content.open.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edge_whose_lease_ran_out_holds_what_its_sandboxes_use_with_a_new_one() {
    let world = World::new();
    let edge = world.ready().await;
    edge.client.create().await;
    let digest = edge.client.get("/v1/images/base").await.expect(200)["digest"].clone();
    let is_held = || held(&world).iter().any(|hold| hold.ends_with(digest.as_str().unwrap()));
    assert!(is_held());
    drop(edge);
    // What a collector does to a lease that has run out.
    std::fs::remove_dir_all(world.state.join("store/leases")).unwrap();
    assert!(!is_held());
    let edge = world.edge();
    assert!(is_held(), "{:?}", held(&world));
    assert_eq!(
        edge.client.get("/v1/sandboxes?state=running").await.expect(200)["sandboxes"][0]["image"],
        "base"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_version_of_a_name_goes_with_it_also_while_its_layer_is_used_by_another_name() {
    let world = World::new();
    let edge = world.ready().await;
    let image = edge.client.import_with("other", "base").await;
    let version = &image["digest"].as_str().unwrap()[..16];
    edge.client.create().await;
    assert_eq!(edge.client.delete("/v1/images/base").await.status, 204);
    edge.client.get(&format!("/v1/images/base@{version}")).await.refused(404, "not_found");
    edge.client.get(&format!("/v1/images/other@{version}")).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefetch_tells_how_far_it_is_and_what_starts_later_has_the_content_directly() {
    let world = World::new();
    let edge = world.ready().await;
    world.host.content.is_partial.store(true, Ordering::SeqCst);
    edge.client.create().await;
    let through = device(&world);
    world.host.content.rounds.store(3, Ordering::SeqCst);
    world.host.content.is_partial.store(false, Ordering::SeqCst);
    let events = lines(&edge.client.post("/v1/layers/base/base/prefetch", json!({})).await.text());
    let left = |event: &Value| (event["event"] == "progress").then(|| event["left_bytes"].as_u64().unwrap());
    assert_eq!(events.iter().filter_map(left).collect::<Vec<_>>(), [2, 1, 0]);
    assert_eq!(events.last().unwrap()["event"], "done");
    edge.client.create().await;
    assert_ne!(device(&world), through);
    assert_eq!(*world.host.content.fetches.lock().unwrap(), [None, None, None]);
    // Along a trace only where there is one.
    let events =
        lines(&edge.client.post("/v1/layers/base/base/prefetch", json!({ "what": "trace" })).await.text());
    assert_eq!(events.last().unwrap()["event"], "done");
    assert_eq!(world.host.content.fetches.lock().unwrap().len(), 3);
    *world.host.content.problem.lock().unwrap() = Some("the disk is full".to_owned());
    let events = lines(&edge.client.post("/v1/layers/base/base/prefetch", json!({})).await.text());
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["code"], "unavailable");
    assert!(error["message"].as_str().unwrap().contains("the disk is full"), "{error}");
    edge.client.post("/v1/layers/base/none/prefetch", json!({})).await.refused(404, "not_found");
    edge.client
        .post("/v1/layers/base/base/prefetch", json!({ "what": "x" }))
        .await
        .refused(400, "invalid_argument");
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn measures_of_content_are_those_of_the_blobs_of_a_layer() {
    let world = World::new();
    let edge = world.ready().await;
    let tool = toolkit(&edge, "tool", "other").await;
    let sandbox = edge.client.create_with(json!({ "toolkits": ["tool"] })).await;
    let blob = tool["blobs"][0].as_str().unwrap().parse().unwrap();
    let counts =
        Counts { asked_bytes: 70, cached_bytes: 60, fetched_bytes: 50, waited_us: 2500, ..Counts::default() };
    world.host.content.counts.lock().unwrap().insert(blob, counts);
    let here = edge.client.get("/v1/layers/toolkit/tool").await.expect(200)["nodes"][0].clone();
    assert_eq!((&here["node"], &here["mounted"]), (&json!("n1"), &json!(true)));
    let found = here["content"].clone();
    assert_eq!(
        (&found["asked_bytes"], &found["fetched_bytes"], &found["waited_ms"]),
        (&json!(70), &json!(50), &json!(2))
    );
    assert_eq!(found["blobs"][0]["id"], tool["blobs"][0]);
    let base = edge.client.get("/v1/images/base").await.expect(200)["nodes"][0]["content"].clone();
    assert_eq!((&base["asked_bytes"], &base["here_bytes"]), (&json!(0), &json!(4096)));
    let id = sandbox["id"].as_str().unwrap();
    for path in [format!("/v1/sandboxes/{id}?content=true"), "/v1/sandboxes?content=true".to_owned()] {
        let answer = edge.client.get(&path).await.expect(200);
        let sandbox = answer.get("sandboxes").map_or(&answer, |list| &list[0]);
        assert_eq!(sandbox["layers"][1]["content"], found, "{path}");
    }
    // The same without the names, for control: all that is at hand, and one layer with its content.
    let held = edge.client.get("/internal/layers").await.expect(200);
    assert!(
        held.as_array()
            .unwrap()
            .iter()
            .any(|one| one["id"] == tool["digest"] && one["used_by"] == json!([id]))
    );
    let one =
        edge.client.get(&format!("/internal/layers/{}", tool["digest"].as_str().unwrap())).await.expect(200);
    assert_eq!((&one["mounted"], &one["content"]), (&json!(true), &found));
    edge.client.get("/internal/layers/none").await.refused(400, "invalid_argument");
    // Only where it is asked for.
    let plain = edge.client.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    assert!(plain["layers"][1].get("content").is_none());
    let node = edge.client.get("/v1/nodes").await.expect(200)["nodes"][0]["usage"].clone();
    assert_eq!((&node["content"]["asked_bytes"], &node["content_cache_bytes"]), (&json!(70), &json!(8192)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_is_put_where_it_is_wanted_and_the_store_cared_for() {
    let world = World::new();
    let edge = world.ready().await;
    let old = edge.client.get("/v1/images/base").await.expect(200);
    let new = edge.client.import_with("base", "newer").await;
    let version = &old["digest"].as_str().unwrap()[..16];
    let tagged = edge.client.put(&format!("/v1/layers/base/base@{version}/tags/old"), "").await.expect(200);
    assert_eq!((&tagged["name"], &tagged["digest"]), (&json!("base:old"), &old["digest"]));
    edge.client.put("/v1/layers/base/base:old/tags/latest", "").await.expect(200);
    assert_eq!(edge.client.get("/v1/images/base").await.expect(200)["digest"], old["digest"]);
    edge.client.put("/v1/layers/base/base/tags/no%2Ftag", "").await.refused(400, "invalid_argument");
    edge.client.put("/v1/layers/base/none/tags/x", "").await.refused(404, "not_found");
    let trace = edge.client.get("/v1/layers/base/base/trace").await.expect(200);
    assert_eq!((&trace["digest"], &trace["blobs"][0]["runs"]), (&old["digest"], &json!(0)));
    let seen = lines(&edge.client.post("/v1/store/verify", json!({})).await.text());
    assert_eq!(seen.last().unwrap()["findings"], json!([]));
    let new_id = new["digest"].as_str().unwrap();
    let only = lines(
        &edge.client.post(&format!("/v1/layers/base/base@{}/verify", &new_id[..16]), json!({})).await.text(),
    );
    assert_eq!(only.last().unwrap()["layers"], 1);
    assert_eq!(edge.client.delete(&format!("/v1/images/base@{}", &new_id[..16])).await.status, 204);
    let done = lines(&edge.client.post("/v1/store/collect?grace_s=0", json!({})).await.text());
    assert_eq!(
        (&done.last().unwrap()["event"], &done.last().unwrap()["collected"]["layers"]),
        (&json!("done"), &json!(1))
    );
    let export = edge.client.get("/v1/layers/base/base/export").await;
    assert_eq!((export.status, export.headers["content-type"].to_str().unwrap()), (200, "application/x-tar"));
    let mut archive = tar::Archive::new(&export.body[..]);
    let names: Vec<String> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert!(names.iter().any(|name| name.ends_with("index.json")), "{names:?}");
    assert_eq!(std::fs::read_dir(world.state.join("layers/work")).unwrap().count(), 0);
}
