//! Publishing, reading and names, on a directory and on an S3 server.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use bytes::Bytes;
use dsec_image::layer::{GROUP_SIZE, LayerKind, LayerRef};
use dsec_store::{CollectSettings, Collector, Publish, Store, StoreError};
use support::{Bucket, Sample, directory, label, lease, name};

const KIND: LayerKind = LayerKind::Toolkit;

fn reference(text: &str) -> LayerRef {
    text.parse().unwrap()
}

/// All that a store does, one after the other.
async fn whole_life(store: &Store) {
    let lease = lease(store).await;
    let (base, tool) = (Sample::new(&[1, 2]), Sample::new(&[2, 3, 4]));
    let tool = tool.over(&base.manifest);
    assert!(
        matches!(tool.publish(&lease, None).await, Err(StoreError::NotFound { .. })),
        "its parent is not there"
    );
    base.publish(&lease, Some(("team/base", "1"))).await.unwrap();
    tool.publish(&lease, Some(("team/tool", "1"))).await.unwrap();
    tool.publish(&lease, Some(("team/tool", "1"))).await.unwrap();
    reads(store, &tool).await;
    names(store, &base, &tool).await;
    let id = tool.manifest.id().unwrap();
    store.put_converted("sha256:12", id).await.unwrap();
    assert_eq!(store.converted("sha256:12").await.unwrap(), Some(id));
    assert_eq!(store.converted("sha256:13").await.unwrap(), None);
    store.put_trace(&tool.index.id(), Bytes::from_static(b"0")).await.unwrap();
    let verified = store.verify_all().await.unwrap();
    assert_eq!((verified.layers, verified.findings.len()), (2, 0), "{verified:?}");
    removal(store, &base, &tool).await;
    let lease = Arc::into_inner(lease).unwrap();
    lease.release().await.unwrap();
    nothing_is_left(store).await;
}

async fn reads(store: &Store, tool: &Sample) {
    let id = store.resolve(KIND, &reference("team/tool@1")).await.unwrap();
    let manifest = store.manifest(&id).await.unwrap();
    assert_eq!(manifest, tool.manifest);
    assert_eq!(store.metadata(&manifest.metadata).await.unwrap(), tool.metadata);
    let index = store.blob_index(&manifest.blobs[0].id).await.unwrap();
    assert_eq!(index, tool.index);
    for (number, content) in tool.content.iter().enumerate() {
        assert_eq!(store.group(&index, number as u64).await.unwrap(), content);
    }
    assert!(store.group(&index, 3).await.unwrap_err().is_not_found());
    let odd = &tool.content[1];
    let parts = store.fetch_all(&index.packs()[1].id, &[100..200, 0..10, 262_000..262_144]).await.unwrap();
    assert_eq!(parts, [odd.slice(100..200), odd.slice(0..10), odd.slice(262_000..)]);
    for past in [GROUP_SIZE as u32 - 5..GROUP_SIZE as u32 + 5, GROUP_SIZE as u32..GROUP_SIZE as u32 + 5] {
        let error = store.fetch(&index.packs()[1].id, past).await.unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
    }
}

async fn names(store: &Store, base: &Sample, tool: &Sample) {
    let (base_id, tool_id) = (base.manifest.id().unwrap(), tool.manifest.id().unwrap());
    let tool_name = name("team/tool");
    let conflict = store.put_version(KIND, &tool_name, &label("1"), base_id).await.unwrap_err();
    assert!(matches!(conflict, StoreError::Conflict { .. }), "{conflict:?}");
    assert!(store.resolve(KIND, &reference("team/tool")).await.unwrap_err().is_not_found());
    assert!(store.tag(KIND, &tool_name, &label("latest"), &label("2")).await.unwrap_err().is_not_found());
    store.put_version(KIND, &tool_name, &label("2"), base_id).await.unwrap();
    for (version, id) in [("1", tool_id), ("2", base_id), ("1", tool_id)] {
        store.tag(KIND, &tool_name, &label("latest"), &label(version)).await.unwrap();
        assert_eq!(store.resolve(KIND, &reference("team/tool")).await.unwrap(), id);
    }
    store.put_version(KIND, &name("team"), &label("1"), tool_id).await.unwrap();
    store.put_version(KIND, &name("team-x"), &label("1"), tool_id).await.unwrap();
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = store.names(KIND, after.as_ref(), 1).await.unwrap();
        seen.extend(page.entries.iter().map(|entry| entry.name.to_string()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, ["team", "team-x", "team/base", "team/tool"]);
    let entry = store.name(KIND, &tool_name).await.unwrap();
    assert_eq!((entry.versions, entry.tags), (vec![label("1"), label("2")], vec![label("latest")]));
    assert_eq!(store.versions(KIND, &tool_name).await.unwrap()[1].layer, base_id);
    assert!(store.names(LayerKind::Base, None, 10).await.unwrap().entries.is_empty());
}

async fn removal(store: &Store, base: &Sample, tool: &Sample) {
    let (tool_name, one) = (name("team/tool"), label("1"));
    let remove = || store.remove_version(KIND, &tool_name, &one);
    let by = |error: StoreError| match error {
        StoreError::InUse { by, .. } => by,
        other => panic!("{other:?}"),
    };
    assert!(by(remove().await.unwrap_err()).contains("latest"));
    store.untag(KIND, &tool_name, &label("latest")).await.unwrap();
    assert!(store.untag(KIND, &tool_name, &label("latest")).await.unwrap_err().is_not_found());
    let user = lease(store).await;
    user.use_layer(&tool.manifest.id().unwrap()).await.unwrap();
    assert!(by(remove().await.unwrap_err()).contains("test"));
    // Who says that the name alone is to go may.
    store.put_version(KIND, &tool_name, &label("again"), tool.manifest.id().unwrap()).await.unwrap();
    store.forget_version(KIND, &tool_name, &label("again")).await.unwrap();
    user.release_layer(&tool.manifest.id().unwrap()).await.unwrap();
    user.release_layer(&base.manifest.id().unwrap()).await.unwrap();
    user.release().await.unwrap();
    assert!(
        matches!(user.check(), Err(StoreError::LeaseLost { .. })),
        "a lease that was given back holds nothing"
    );
}

/// With every name gone, so is everything.
async fn nothing_is_left(store: &Store) {
    for entry in store.names(KIND, None, 100).await.unwrap().entries {
        for version in entry.versions {
            store.remove_version(KIND, &entry.name, &version).await.unwrap();
        }
    }
    let settings = CollectSettings { grace: std::time::Duration::ZERO, ..CollectSettings::default() };
    let mut collector = Collector::new(store, settings);
    let mut sum = (0, 0, 0);
    let begun = std::time::Instant::now();
    // A bucket dates objects by the second: what is of this one is not older than nothing.
    while sum != (2, 4, 4) {
        let collected = collector.run().await.unwrap();
        sum = (sum.0 + collected.layers, sum.1 + collected.indexes, sum.2 + collected.packs);
        assert!(begun.elapsed().as_secs() < 60, "{sum:?}");
    }
    assert_eq!(store.verify_all().await.unwrap().layers, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_a_store() {
    let (dir, store) = directory().await;
    whole_life(&store).await;
    let mut left = Vec::new();
    files(dir.path(), &mut left);
    left.retain(|file| {
        !file.ends_with("dsec-store.json") && !file.contains("/oci/") && !file.contains("/traces/")
    });
    assert!(left.is_empty(), "{left:?}");
}

fn files(dir: &std::path::Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, found) } else { found.push(path.display().to_string()) }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_is_a_store() {
    let bucket = Bucket::start();
    for prefix in ["", "some/where"] {
        let settings = bucket.settings(prefix);
        assert!(Store::open(&settings).await.unwrap_err().is_retryable(), "there is none yet");
        let store = Store::create(&settings).await.unwrap();
        whole_life(&store).await;
        Store::open(&settings).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_is_cut_anywhere_shows_nothing_and_goes_on() {
    let sample = Sample::new(&[1, 2, 3]);
    let (_dir, store) = directory().await;
    let mut cut = 0;
    loop {
        let lease = lease(&store).await;
        let publish = std::pin::pin!(sample.publish(&lease, Some(("a", "1"))));
        let done = polls(publish, cut).await;
        match store.resolve(KIND, &reference("a@1")).await {
            Ok(id) => assert!(store.verify(&id).await.unwrap().findings.is_empty()),
            Err(error) => assert!(error.is_not_found() && done.is_none(), "{error:?}"),
        }
        if let Some(done) = done {
            done.unwrap();
            break;
        }
        cut += 1;
    }
    assert!(cut > 10, "it was cut {cut} times");
}

/// Drives a future for so many polls and no further.
async fn polls<F: Future + Unpin>(mut future: F, count: usize) -> Option<F::Output> {
    let mut polled = 0;
    std::future::poll_fn(|context| {
        if polled == count {
            return std::task::Poll::Ready(None);
        }
        polled += 1;
        std::pin::Pin::new(&mut future).poll(context).map(Some)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn packs_come_from_a_blocking_writer_and_only_what_is_missing_is_sent() {
    let (dir, store) = directory().await;
    let sample = Sample::new(&[1, 3, 5, 7, 9, 11, 13]);
    let session = Publish::begin(lease(&store).await).await.unwrap();
    for _ in 0..2 {
        let (sender, sending) = session.sender();
        let packs: Vec<_> = sample.packs().collect();
        let send = move || packs.into_iter().all(|(id, pack)| sender.send(id, pack));
        let writer = tokio::task::spawn_blocking(send);
        sending.await.unwrap();
        assert!(writer.await.unwrap());
    }
    session.blob(&sample.index).await.unwrap();
    // Of another length: it is mended. Of the right one: it is left as it is.
    std::fs::write(sample.pack_path(dir.path(), 0), b"cut").unwrap();
    session.pack(sample.index.packs()[0].id, sample.packs[0].clone()).await.unwrap();
    assert_eq!(std::fs::read(sample.pack_path(dir.path(), 0)).unwrap(), sample.packs[0]);
    // A store that fails ends the sending, and the writer is told.
    let (sender, sending) = session.sender();
    let id = sample.index.packs()[0].id;
    let writer = tokio::task::spawn_blocking(move || (0..100).all(|_| sender.send(id, Bytes::new())));
    assert!(sending.await.is_err());
    assert!(!writer.await.unwrap());
}
