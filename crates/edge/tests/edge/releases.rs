//! Releases and configurations as a node tries them. The programs are scripts; what becomes of a process that is another program is
//! tested on real ones, in `tests/e2e/test_fleet.py`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use dsec_edge::config::Config;
use dsec_edge::release::choice::Choice;
use dsec_edge::release::dir::ReleaseDir;
use dsec_proto::rest::{RELEASE_PROGRAMS, ReleaseName, digest_text};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::support::{Edge, World, until};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A release of scripts: what its edge does when it is to look at a configuration.
struct Release {
    name: ReleaseName,
    tar: Vec<u8>,
}

impl Release {
    fn of(version: &str, check: &str) -> Self {
        let (mut tar, mut sha256_of) = (tar::Builder::new(Vec::new()), BTreeMap::new());
        for program in RELEASE_PROGRAMS {
            let text = format!(
                "#!/bin/sh\ncase $1 in --version) echo {program} {version};; check) {check};; esac\n"
            );
            let mut header = tar::Header::new_ustar();
            header.set_size(text.len() as u64);
            header.set_mode(0o755);
            header.set_cksum();
            tar.append_data(&mut header, program, text.as_bytes()).unwrap();
            sha256_of.insert(program.to_owned(), hex(&Sha256::digest(text.as_bytes())));
        }
        let digest = hex(&Sha256::digest(digest_text(&sha256_of).as_bytes()));
        Self { name: ReleaseName::new(version, &digest).unwrap(), tar: tar.into_inner().unwrap() }
    }

    async fn send(&self, edge: &Edge) {
        let path = format!("/v1/nodes/n1/releases/{}", self.name);
        let stored = edge.client.put(&path, self.tar.clone()).await.expect(200);
        assert_eq!(stored["release"], self.name.as_str());
    }
}

async fn status(edge: &Edge) -> Value {
    edge.client.get("/v1/nodes/n1/release").await.expect(200)
}

async fn try_release(edge: &Edge, programs: &str) -> crate::support::client::Answer {
    edge.client.post("/v1/nodes/n1/release/try", json!({ "programs": programs })).await
}

async fn ended(edge: &Edge) {
    until("the edge's end", || if edge.has_ended() { Ok(()) } else { Err("it serves") }).await;
}

fn choice(world: &World) -> Choice {
    ReleaseDir::new(&world.state).load().unwrap().unwrap_or_default()
}

/// A world whose edges read their configuration from a file, as real ones do.
struct Configured {
    world: World,
    file: PathBuf,
}

impl Configured {
    fn new(more: &str) -> Self {
        let world = World::new();
        std::fs::create_dir_all(&world.state).unwrap();
        let file = world.state.join("edge.toml");
        let text = format!("# mine\nnode = \"n1\"\nstate_dir = {:?}\n{more}", world.state);
        std::fs::write(&file, text).unwrap();
        Self { world, file }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    fn edge(&self) -> Edge {
        self.world.edge_of(Config::load(&self.file).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_taken_in_under_its_own_name_and_no_other() {
    let world = World::new();
    let edge = world.edge();
    let release = Release::of("1.0.0", "exit 0");
    release.send(&edge).await;
    let again = edge.client.put(&format!("/v1/nodes/n1/releases/{}", release.name), "").await.expect(200);
    assert_eq!(again["was_there"], true);
    let other = Release::of("2.0.0", "exit 0");
    let wrong = format!("/v1/nodes/n1/releases/2.0.0-{}", "0".repeat(16));
    let refused = edge.client.put(&wrong, other.tar.clone()).await.refused(400, "invalid_argument");
    assert!(refused["message"].as_str().unwrap().contains(other.name.as_str()), "{refused}");
    edge.client.put("/v1/nodes/n1/releases/..%2F..%2Fx", "x").await.refused(400, "invalid_argument");
    edge.client.put(&format!("/v1/nodes/n2/releases/{}", other.name), other.tar.clone()).await.expect(404);
    let there = status(&edge).await;
    assert_eq!(there["stored"], json!([release.name]));
    assert_eq!((&there["running"], &there["chosen"]), (&json!("installed"), &json!("installed")));
    let left = std::fs::read_dir(world.state.join("releases")).unwrap().count();
    assert_eq!(left, 1, "a draft was left");
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_do_not_start_are_refused_and_nothing_changes() {
    let world = World::new();
    let edge = world.edge();
    let crashes = Release::of("1.0.0", "echo no such luck >&2; exit 3");
    crashes.send(&edge).await;
    let refused = try_release(&edge, crashes.name.as_str()).await.refused(409, "conflict");
    assert!(refused["message"].as_str().unwrap().contains("no such luck"), "{refused}");
    let missing = Release::of("1.0.1", "exit 0");
    try_release(&edge, missing.name.as_str()).await.refused(404, "not_found");
    try_release(&edge, "../x").await.refused(400, "invalid_argument");
    assert_eq!(try_release(&edge, "installed").await.expect(200)["changes"], false);
    assert!(!edge.has_ended());
    assert_eq!(choice(&world), Choice::default());
    assert!(status(&edge).await["trial"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edge_that_is_to_be_another_lets_launches_end_and_takes_no_more() {
    let world = World::new();
    let edge = world.ready().await;
    let release = Release::of("1.0.0", "exit 0");
    release.send(&edge).await;
    world.host.launch_gate.set(true);
    let client = edge.client.clone();
    let launching = tokio::spawn(async move { client.create().await });
    until("a launch", || match world.host.launches.load(std::sync::atomic::Ordering::SeqCst) {
        0 => Err(0),
        _ => Ok(()),
    })
    .await;
    let begun = try_release(&edge, release.name.as_str()).await.expect(200);
    assert_eq!(begun, json!({ "changes": true, "change": { "programs": release.name } }));
    let mut refused = Value::Null;
    for _ in 0..1000 {
        let answer = edge.client.post("/v1/sandboxes", json!({ "container_image": "base" })).await;
        if answer.status == 429 {
            refused = answer.json();
            break;
        }
    }
    assert_eq!(refused["detail"]["short"], "cordoned", "{refused}");
    assert!(!edge.has_ended(), "a launch was cut off");
    world.host.launch_gate.set(false);
    launching.await.unwrap();
    ended(&edge).await;
    let trial = choice(&world).trial.unwrap();
    assert_eq!((trial.change.to_string(), trial.starts), (release.name.to_string(), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_not_kept_by_an_edge_that_is_not_it() {
    let world = World::new();
    let edge = world.edge();
    let release = Release::of("1.0.0", "exit 0");
    release.send(&edge).await;
    try_release(&edge, release.name.as_str()).await.expect(200);
    ended(&edge).await;
    let next = world.edge();
    let change = json!({ "programs": release.name });
    let keep = json!({ "change": change, "keep": true });
    next.client.post("/v1/nodes/n1/trial/end", keep).await.refused(409, "conflict");
    let other = json!({ "change": { "config": "0" }, "keep": false });
    next.client.post("/v1/nodes/n1/trial/end", other).await.refused(409, "conflict");
    assert_eq!(status(&next).await["trial"]["change"], change);
    let back = json!({ "change": change, "keep": false, "why": "it is slow" });
    let there = next.client.post("/v1/nodes/n1/trial/end", back).await.expect(200);
    assert_eq!((&there["failed"]["why"], &there["trial"]), (&json!("it is slow"), &Value::Null));
    ended(&next).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_is_tried_with_the_sandboxes_there_are_and_kept() {
    let node = Configured::new("max_sandboxes = 7 # few\n");
    let edge = node.edge();
    edge.client.import("base").await;
    let id = edge.client.create().await;
    let before = status(&edge).await;
    let set = json!({ "set": "max_sandboxes = 9\n[labels]\nrack = \"r1\"\n" });
    let begun = edge.client.post("/v1/nodes/n1/config/try", set.clone()).await.expect(200);
    assert_eq!(begun["changes"], true);
    ended(&edge).await;
    drop(edge);
    let next = node.edge();
    let there = status(&next).await;
    assert_eq!((&there["trial"]["taken_over"], &there["trial"]["sandboxes"]), (&json!(1), &json!(1)));
    assert_ne!(there["config"], before["config"]);
    let keep = json!({ "change": begun["change"], "keep": true });
    for _ in 0..2 {
        next.client.post("/v1/nodes/n1/trial/end", keep.clone()).await.expect(200);
    }
    assert!(node.text().contains("max_sandboxes = 9 # few"), "{}", node.text());
    assert_eq!(next.client.run(&id, "echo on").await["stdout"], "on\n");
    let again = next.client.post("/v1/nodes/n1/config/try", set).await.expect(200);
    assert_eq!(again["changes"], false);
    assert!(!next.has_ended());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_cannot_be_is_refused_by_its_key_and_changes_nothing() {
    let node = Configured::new("");
    let edge = node.edge();
    let text = node.text();
    for (set, word) in [
        ("max_sandboxes = 0", "max_sandboxes"),
        ("[admission]\ncpu_overcommit = 0", "admission.cpu_overcommit"),
        ("max_sandboxs = 1", "max_sandboxs"),
        ("node = \"n2\"", "node"),
        ("state_dir = \"/y\"", "state_dir"),
        ("[store]\nurl = \"/y\"", "store"),
        ("max_sandboxes", "TOML"),
    ] {
        let answer = edge.client.post("/v1/nodes/n1/config/try", json!({ "set": set })).await;
        let refused = answer.refused(400, "invalid_argument");
        assert!(refused["message"].as_str().unwrap().contains(word), "{set}: {refused}");
    }
    let look = json!({ "set": "max_sandboxes = 3", "only_look": true });
    assert_eq!(edge.client.post("/v1/nodes/n1/config/try", look).await.expect(200)["changes"], true);
    assert_eq!((node.text(), choice(&node.world)), (text, Choice::default()));
    assert!(!edge.has_ended());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_nobody_calls_good_is_gone_back_from() {
    let node = Configured::new("");
    let edge = node.edge();
    let text = node.text();
    let set = json!({ "set": "max_sandboxes = 3", "trial_ms": 1000 });
    edge.client.post("/v1/nodes/n1/config/try", set).await.expect(200);
    ended(&edge).await;
    drop(edge);
    assert!(node.text().contains("max_sandboxes = 3"));
    let next = dsec_edge::release::Releases::open(&Config::load(&node.file).unwrap()).unwrap();
    tokio::time::timeout(Duration::from_secs(20), next.expired()).await.unwrap();
    assert_eq!(node.text(), text);
    let failed = choice(&node.world).failed.unwrap();
    assert!(failed.why.contains("nobody said in time"), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_the_configuration_names_do_not_become_part_of_a_release() {
    let node = Configured::new("fill = \"/usr/lib/mine/dsec-fill\"\n");
    let edge = node.edge();
    let release = Release::of("1.0.0", "exit 0");
    release.send(&edge).await;
    let refused = try_release(&edge, release.name.as_str()).await.refused(409, "conflict");
    assert!(refused["message"].as_str().unwrap().contains("fill"), "{refused}");
}
