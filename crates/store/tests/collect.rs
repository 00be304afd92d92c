//! Collection and leases: what is referred to stays, what is not goes, whoever dies on the way.

#![allow(clippy::unwrap_used)]

mod support;

use std::hash::BuildHasher as _;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dsec_image::layer::{Digest, LayerKind};
use dsec_store::{CollectSettings, Collected, Collector, Lease, Publish, Store, StoreError, StoreSettings};
use support::{Sample, directory, label, lease, name};

const KIND: LayerKind = LayerKind::Toolkit;
const AT_ONCE: CollectSettings = CollectSettings {
    grace: Duration::ZERO,
    step_age: Duration::from_secs(3600),
    list_time: Duration::from_secs(2),
    removal_max: Some(Duration::from_secs(2)),
};

async fn collect(store: &Store) -> Collected {
    // What was written in this millisecond is not older than nothing.
    tokio::time::sleep(Duration::from_millis(20)).await;
    Collector::new(store, AT_ONCE).run().await.unwrap()
}

async fn collect_steps_too(store: &Store) -> Collected {
    tokio::time::sleep(Duration::from_millis(20)).await;
    Collector::new(store, CollectSettings { step_age: Duration::ZERO, ..AT_ONCE }).run().await.unwrap()
}

async fn remove(store: &Store, layer: &str, version: &str) {
    store.remove_version(KIND, &name(layer), &label(version)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_keeps_its_layer_for_a_while_after_its_use_and_longer_if_something_was_made_of_it() {
    let (dir, store) = directory().await;
    let (first, second) = (Sample::new(&[1, 2]), Sample::new(&[2, 3]));
    let second = second.over(&first.manifest);
    let [first_id, second_id] = [&first, &second].map(|sample| sample.manifest.id().unwrap());
    let [first_key, second_key] = [b"first", b"other"].map(|text| Digest::of(text));
    let publisher = lease(&store).await;
    first.publish(&publisher, None).await.unwrap();
    store.put_step(&first_key, first_id).await.unwrap();
    second.publish(&publisher, None).await.unwrap();
    store.put_step(&second_key, second_id).await.unwrap();
    Arc::into_inner(publisher).unwrap().release().await.unwrap();
    assert_eq!(collect(&store).await, Collected::default(), "they were used just now");
    assert_eq!(store.step(&second_key).await.unwrap(), Some(second_id));
    store.put_version(KIND, &name("made"), &label("1"), second_id).await.unwrap();
    assert_eq!(collect_steps_too(&store).await, Collected::default(), "a name and a child keep both");
    assert_eq!(store.step(&first_key).await.unwrap(), Some(first_id));
    remove(&store, "made", "1").await;
    assert_eq!(collect(&store).await, Collected::default(), "they are young yet");
    // A hint that says nothing, or speaks of what is gone, is no reason to stop.
    std::fs::write(dir.path().join("steps").join(Digest::of(b"damaged").to_string()), "x").unwrap();
    store.put_step(&Digest::of(b"gone"), Sample::new(&[4]).manifest.id().unwrap()).await.unwrap();
    let collected = collect_steps_too(&store).await;
    assert_eq!((collected.layers, collected.leftovers), (2, 4));
    assert_eq!(store.step(&second_key).await.unwrap(), None);
    assert_eq!(std::fs::read_dir(dir.path().join("steps")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_parents_and_leases_keep_and_nothing_else_does() {
    let (_dir, store) = directory().await;
    let (base, tool, loose) = (Sample::new(&[1, 2]), Sample::new(&[2, 3]), Sample::new(&[3, 4]));
    let tool = tool.over(&base.manifest);
    let publisher = lease(&store).await;
    base.publish(&publisher, Some(("base", "1"))).await.unwrap();
    tool.publish(&publisher, Some(("tool", "1"))).await.unwrap();
    loose.publish(&publisher, None).await.unwrap();
    assert_eq!(collect(&store).await, Collected::default(), "the publisher holds it all");
    Arc::into_inner(publisher).unwrap().release().await.unwrap();
    remove(&store, "base", "1").await;
    let collected = collect(&store).await;
    assert_eq!(
        (collected.layers, collected.indexes, collected.packs),
        (1, 2, 1),
        "loose alone, less what it shares"
    );
    let node = lease(&store).await;
    node.use_layer(&tool.manifest.id().unwrap()).await.unwrap();
    store.remove_version(KIND, &name("tool"), &label("1")).await.unwrap_err();
    node.release_layer(&tool.manifest.id().unwrap()).await.unwrap();
    remove(&store, "tool", "1").await;
    node.use_layer(&tool.manifest.id().unwrap()).await.unwrap();
    assert_eq!(collect(&store).await, Collected::default(), "a node uses it and its parent");
    assert!(store.verify(&tool.manifest.id().unwrap()).await.unwrap().findings.is_empty());
    Arc::into_inner(node).unwrap().release().await.unwrap();
    let young = CollectSettings { grace: Duration::from_secs(3600), ..AT_ONCE };
    assert_eq!(Collector::new(&store, young).run().await.unwrap(), Collected::default(), "it is young");
    let collected = collect(&store).await;
    assert_eq!((collected.layers, collected.indexes, collected.packs), (2, 4, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_stays_for_its_youth_keeps_an_old_parent() {
    let (dir, store) = directory().await;
    let base = Sample::new(&[1]);
    let tool = Sample::new(&[2]).over(&base.manifest);
    let publisher = lease(&store).await;
    base.publish(&publisher, None).await.unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(7200);
    for file in files(dir.path()) {
        std::fs::File::options().append(true).open(file).unwrap().set_modified(old).unwrap();
    }
    tool.publish(&publisher, None).await.unwrap();
    Arc::into_inner(publisher).unwrap().release().await.unwrap();
    let young = CollectSettings { grace: Duration::from_secs(3600), ..AT_ONCE };
    assert_eq!(Collector::new(&store, young).run().await.unwrap(), Collected::default());
    assert!(store.verify(&tool.manifest.id().unwrap()).await.unwrap().findings.is_empty());
    assert_eq!(collect(&store).await.layers, 2, "one after the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_waits_for_a_collection_that_has_its_pack_and_sends_it_again() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let first = lease(&store).await;
    sample.publish(&first, None).await.unwrap();
    Arc::into_inner(first).unwrap().release().await.unwrap();
    let pack = sample.pack_path(dir.path(), 0);
    let key = pack.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
    // A collector that has written its list and read the leases, and is about to remove.
    let list = dir.path().join("collect/other");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, format!("{{\"void_ms\":60000,\"keys\":[\"{key}\"]}}")).unwrap();
    let session = Publish::begin(lease(&store).await).await.unwrap();
    let (id, bytes) = sample.packs().next().unwrap();
    let mut sending = tokio::spawn(async move { session.pack(id, bytes).await.map(|()| session) });
    let waited = tokio::time::timeout(Duration::from_millis(700), &mut sending).await;
    assert!(waited.is_err(), "it trusted a pack that is about to go");
    std::fs::remove_file(&pack).unwrap();
    std::fs::remove_file(&list).unwrap();
    let _session = sending.await.unwrap().unwrap();
    assert_eq!(std::fs::read(&pack).unwrap(), sample.packs[0]);
    // From now on it is held.
    assert_eq!(collect(&store).await.packs, 0);
    // A list whose collector died is void after its time, and another collector clears it.
    std::fs::write(&list, "{\"void_ms\":1,\"keys\":[]}").unwrap();
    assert_eq!(collect(&store).await.leftovers, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_not_renewed_runs_out_and_one_that_is_stays() {
    let (_dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let ttl = Duration::from_millis(300);
    let publisher = Arc::new(Lease::begin(&store, "publisher", ttl).await.unwrap());
    sample.publish(&publisher, None).await.unwrap();
    tokio::time::sleep(ttl * 4).await;
    assert_eq!(collect(&store).await.layers, 0, "it is renewed");
    let id = publisher.id().to_owned();
    drop(publisher);
    let heir = Lease::adopt(&store, &id, ttl).await.unwrap();
    tokio::time::sleep(ttl * 4).await;
    assert_eq!(collect(&store).await.layers, 0, "another process went on with it");
    drop(heir);
    let begun = Instant::now();
    while collect(&store).await.layers == 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "it never ran out");
    }
    let error = Lease::adopt(&store, &id, ttl).await.unwrap_err();
    assert!(matches!(error, StoreError::LeaseLost { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_hold_keeps_its_layer_and_not_its_name() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let id = sample.manifest.id().unwrap();
    let publisher = lease(&store).await;
    sample.publish(&publisher, Some(("a", "1"))).await.unwrap();
    publisher.release().await.unwrap();
    let node = lease(&store).await;
    node.use_layer(&id).await.unwrap();
    let is_used = async || {
        matches!(store.remove_version(KIND, &name("a"), &label("1")).await, Err(StoreError::InUse { .. }))
    };
    assert!(is_used().await);
    node.tell_idle(&id, true).await.unwrap();
    node.tell_idle(&id, false).await.unwrap();
    assert!(is_used().await, "it is used again");
    node.tell_idle(&id, true).await.unwrap();
    // Its holder's next process knows what was told.
    let lease_id = node.id().to_owned();
    drop(node);
    let node = Lease::adopt(&store, &lease_id, Duration::from_secs(60)).await.unwrap();
    let mut collector = Collector::new(&store, AT_ONCE);
    assert_eq!(collector.unnamed(vec![id]).await.unwrap(), []);
    assert!(!is_used().await, "nobody uses it");
    assert_eq!(collector.unnamed(vec![id]).await.unwrap(), [id]);
    assert_eq!(collect(&store).await, Collected::default(), "its holder may use it again without asking");
    node.tell_idle(&id, false).await.unwrap();
    store.put_version(KIND, &name("a"), &label("1"), id).await.unwrap();
    assert!(is_used().await);
    node.tell_idle(&id, true).await.unwrap();
    node.release_layer(&id).await.unwrap();
    assert_eq!(files(&dir.path().join("leases")).len(), 1, "its own sign of life is left");
    remove(&store, "a", "1").await;
    assert_eq!(collect(&store).await.layers, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_of_a_hold_that_arrives_again_takes_no_newer_hold() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let id = sample.manifest.id().unwrap();
    let publisher = lease(&store).await;
    sample.publish(&publisher, Some(("a", "1"))).await.unwrap();
    publisher.release().await.unwrap();
    let node = lease(&store).await;
    node.use_layer(&id).await.unwrap();
    let holds = || files(&dir.path().join("leases")).into_iter().filter(|file| file.contains(".hold."));
    let first: Vec<String> = holds().collect();
    node.release_layer(&id).await.unwrap();
    assert_eq!(holds().count(), 0);
    node.use_layer(&id).await.unwrap();
    for hold in first {
        let _not_there = std::fs::remove_file(hold);
    }
    std::fs::remove_dir_all(dir.path().join("names")).unwrap();
    assert_eq!(collect(&store).await, Collected::default(), "it is held");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_goes_on_with_a_lease_looks_at_collections_for_what_it_held() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let id = sample.manifest.id().unwrap();
    let publisher = lease(&store).await;
    sample.publish(&publisher, None).await.unwrap();
    publisher.release().await.unwrap();
    let list = dir.path().join("collect/other");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, format!("{{\"void_ms\":60000,\"keys\":[\"layers/{id}\"]}}")).unwrap();
    let node = lease(&store).await;
    let waited = tokio::time::timeout(Duration::from_millis(700), node.use_layer(&id)).await;
    assert!(waited.is_err(), "it trusted a layer that is about to go");
    let lease_id = node.id().to_owned();
    drop(node);
    let heir = Lease::adopt(&store, &lease_id, Duration::from_secs(60)).await.unwrap();
    let waited = tokio::time::timeout(Duration::from_millis(700), heir.use_layer(&id)).await;
    assert!(waited.is_err(), "it trusted a layer that its last process held and had not looked at");
    std::fs::remove_file(dir.path().join(format!("layers/{id}"))).unwrap();
    std::fs::remove_file(&list).unwrap();
    assert!(heir.use_layer(&id).await.unwrap_err().is_not_found());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_stops_the_collection() {
    let (dir, store) = directory().await;
    let (named, loose) = (Sample::new(&[1]), Sample::new(&[2]));
    let publisher = lease(&store).await;
    named.publish(&publisher, Some(("named", "1"))).await.unwrap();
    loose.publish(&publisher, None).await.unwrap();
    Arc::into_inner(publisher).unwrap().release().await.unwrap();
    let manifest = dir.path().join("layers").join(named.manifest.id().unwrap().to_string());
    let good = std::fs::read(&manifest).unwrap();
    for damage in [Some(&good[..good.len() - 1]), None] {
        match damage {
            Some(bytes) => std::fs::write(&manifest, bytes).unwrap(),
            None => std::fs::remove_file(&manifest).unwrap(),
        }
        let error = Collector::new(&store, AT_ONCE).run().await.unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
        assert!(named.pack_path(dir.path(), 0).exists() && loose.pack_path(dir.path(), 0).exists());
    }
    remove(&store, "named", "1").await;
    let begun = Instant::now();
    while loose.pack_path(dir.path(), 0).exists() {
        collect(&store).await;
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_is_later_than_its_list_is_seen_before_anything_is_named() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1, 2]);
    let first = lease(&store).await;
    sample.publish(&first, None).await.unwrap();
    first.release().await.unwrap();
    let pack = sample.pack_path(dir.path(), 0);
    let key = pack.strip_prefix(dir.path()).unwrap().to_str().unwrap();
    let list = dir.path().join("collect/other");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, format!("{{\"void_ms\":1,\"keys\":[\"{key}\"]}}")).unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(60);
    std::fs::File::options().append(true).open(&list).unwrap().set_modified(old).unwrap();

    let publisher = lease(&store).await;
    let session = Publish::begin(Arc::clone(&publisher)).await.unwrap();
    for (id, pack) in sample.packs() {
        session.pack(id, pack).await.unwrap();
    }
    session.blob(&sample.index).await.unwrap();
    std::fs::remove_file(&pack).unwrap();
    let error = session.name(&sample.manifest, &name("a"), &label("1")).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let reference = "a@1".parse().unwrap();
    assert!(store.resolve(KIND, &reference).await.unwrap_err().is_not_found());
    sample.publish(&publisher, Some(("a", "1"))).await.unwrap();
    assert!(store.verify(&sample.manifest.id().unwrap()).await.unwrap().findings.is_empty());
}

/// As after a power cut of the store's host: the file is there, its bytes are not.
fn empty(path: &std::path::Path, age: Duration) {
    let file = std::fs::File::create(path).unwrap();
    file.set_modified(std::time::SystemTime::now() - age).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_lost_its_bytes_counts_until_it_is_old() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let node = lease(&store).await;
    sample.publish(&node, Some(("a", "1"))).await.unwrap();
    let alive = dir.path().join(format!("leases/{}.alive", node.id()));
    let id = node.id().to_owned();
    drop(node);
    empty(&alive, Duration::from_secs(3600));
    let removed = store.remove_version(KIND, &name("a"), &label("1")).await;
    assert!(matches!(removed, Err(StoreError::InUse { by, .. }) if by.contains("test")));
    std::fs::remove_dir_all(dir.path().join("names")).unwrap();
    assert_eq!(collect(&store).await, Collected::default(), "what it holds stays");
    drop(Lease::adopt(&store, &id, Duration::from_secs(60)).await.unwrap());
    assert!(alive.metadata().unwrap().len() > 0, "its holder writes it anew");
    empty(&alive, Duration::from_secs(3 * 3600));
    let collected = collect(&store).await;
    assert_eq!((collected.layers, collected.packs, alive.exists()), (1, 1, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_lost_its_bytes_holds_publishers_up_until_it_is_old() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1]);
    let list = dir.path().join("collect/other");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    empty(&list, Duration::from_secs(3600));
    assert_eq!(collect(&store).await, Collected::default(), "collecting goes on");
    let publisher = lease(&store).await;
    {
        let mut publishing = std::pin::pin!(sample.publish(&publisher, Some(("a", "1"))));
        let waited = tokio::time::timeout(Duration::from_millis(700), &mut publishing).await;
        assert!(waited.is_err(), "it may name what is published");
        empty(&list, Duration::from_secs(3 * 3600));
        publishing.await.unwrap();
    }
    assert_eq!(collect(&store).await.leftovers, 1);
    assert!(!list.exists());
}

const CHAOS_DIR: &str = "DSEC_STORE_CHAOS_DIR";
const CHAOS_ROLE: &str = "DSEC_STORE_CHAOS_ROLE";
/// How many workers are killed. More for a long run.
const CHAOS_KILLS: &str = "DSEC_STORE_CHAOS_KILLS";
const CHAOS_TTL: Duration = Duration::from_secs(3);

/// A process of the test below, which starts this one with its place and its part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a part of publishers_and_collectors_that_are_killed_lose_nothing"]
async fn chaos_worker() {
    let settings = StoreSettings::new(std::env::var(CHAOS_DIR).unwrap());
    let store = Store::open(&settings).await.unwrap();
    if std::env::var(CHAOS_ROLE).unwrap() == "collect" {
        let mut collector = Collector::new(&store, AT_ONCE);
        loop {
            collector.run().await.unwrap();
        }
    }
    for round in 0_u64.. {
        match publish_and_check(&store, round).await {
            Ok(()) | Err(StoreError::LeaseLost { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Publishes a layer over another, as others do too, is content only if all of it is there, and lets it go.
async fn publish_and_check(store: &Store, round: u64) -> Result<(), StoreError> {
    let seed = round.wrapping_mul(7).wrapping_add(u64::from(std::process::id()));
    let base = Sample::new(&[seed % 2, 10]);
    let sample = Sample::new(&[seed % 3, 3 + seed % 4, 7 + seed % 2]).over(&base.manifest);
    let lease = Arc::new(Lease::begin(store, "chaos", CHAOS_TTL).await?);
    let version = format!("{}-{round}", std::process::id());
    base.publish(&lease, None).await?;
    sample.publish(&lease, Some(("chaos", &version))).await?;
    let id = sample.manifest.id().unwrap();
    let verified = store.verify(&id).await?;
    lease.check()?;
    assert!(verified.findings.is_empty(), "held and named: {verified:?}");
    Arc::into_inner(lease).unwrap().release().await?;
    let verified = store.verify(&id).await?;
    assert!(verified.findings.is_empty(), "named: {verified:?}");
    match store.remove_version(KIND, &name("chaos"), &label(&version)).await {
        Err(StoreError::InUse { .. }) => Ok(()),
        other => other.map(drop),
    }
}

fn worker(dir: &std::path::Path, role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "chaos_worker", "--ignored", "--nocapture"])
        .env(CHAOS_DIR, dir)
        .env(CHAOS_ROLE, role)
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn publishers_and_collectors_that_are_killed_lose_nothing() {
    let (dir, store) = directory().await;
    let roles = ["publish", "collect", "publish", "collect", "publish"];
    let mut workers: Vec<Child> = roles.iter().map(|role| worker(dir.path(), role)).collect();
    let kills = std::env::var(CHAOS_KILLS).map_or(12, |kills| kills.parse().unwrap());
    for _ in 0..kills {
        let random = std::hash::RandomState::new().hash_one(0);
        tokio::time::sleep(Duration::from_millis(100 + random % 1000)).await;
        let dead = workers.iter_mut().any(|worker| worker.try_wait().unwrap().is_some());
        let at = (random >> 32) as usize % workers.len();
        workers[at].kill().unwrap();
        workers[at].wait().unwrap();
        if dead {
            workers.iter_mut().for_each(|worker| drop(worker.kill()));
            workers.iter_mut().for_each(|worker| drop(worker.wait()));
            panic!("a worker failed; it said why above");
        }
        workers[at] = worker(dir.path(), roles[at]);
    }
    for worker in &mut workers {
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
    let entries = store.names(KIND, None, 10).await.unwrap().entries;
    for version in entries.iter().flat_map(|entry| entry.versions.clone()) {
        let reference = format!("chaos@{version}").parse().unwrap();
        let id = store.resolve(KIND, &reference).await.unwrap();
        let verified = store.verify(&id).await.unwrap();
        assert!(verified.findings.is_empty(), "{version}: {verified:?}");
    }
    all_goes_in_the_end(&store, dir.path()).await;
}

async fn all_goes_in_the_end(store: &Store, dir: &std::path::Path) {
    let begun = Instant::now();
    loop {
        for entry in store.names(KIND, None, 10).await.unwrap().entries {
            for version in entry.versions {
                let removed = store.remove_version(KIND, &entry.name, &version).await;
                assert!(matches!(removed, Ok(_) | Err(StoreError::InUse { .. })), "{removed:?}");
            }
        }
        collect(store).await;
        // Halves of files stay for an hour, and so does a clock's object.
        let mut left = files(dir);
        left.retain(|file| {
            !file.contains('#') && !file.contains("/clock/") && !file.ends_with("dsec-store.json")
        });
        if left.is_empty() {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{left:?}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

fn files(dir: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path().display().to_string());
        }
    }
    found
}
