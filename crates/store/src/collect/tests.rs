//! Stores whose removals hang or come too late.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dsec_image::layer::{Digest, PackId};
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::*;
use crate::connect::Backend;

/// A directory that never ends the removal of one object.
#[derive(Debug)]
struct Hangs {
    directory: LocalFileSystem,
    at: String,
}

impl fmt::Display for Hangs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hangs")
    }
}

#[async_trait]
impl ObjectStore for Hangs {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.directory.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.directory.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.directory.get_opts(at, options).await
    }

    fn delete_stream(&self, places: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let at = self.at.clone();
        let slow = places.then(move |place| {
            let hangs = place.as_ref().is_ok_and(|place| place.as_ref() == at);
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                place
            }
        });
        self.directory.delete_stream(slow.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.directory.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.directory.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.directory.copy_opts(from, to, options).await
    }
}

/// A store that sends nothing twice through `once`, and all else through `objects`.
async fn store(objects: Arc<dyn ObjectStore>, once: Arc<dyn ObjectStore>) -> Store {
    let removal_max = Duration::from_millis(200);
    let store =
        Store::of(Backend { brief: Arc::clone(&objects), objects, once, removal_max, directory: None });
    store.put_new(key::MARKER, Bytes::from_static(b"{\"format\":1}")).await.unwrap();
    store
}

/// Puts packs that nothing refers to.
async fn put(store: &Store, packs: &[String]) {
    for pack in packs {
        store.put_new(pack, Bytes::from_static(b"x")).await.unwrap();
    }
    // What was written in this millisecond is not older than nothing.
    tokio::time::sleep(Duration::from_millis(20)).await;
}

async fn collected(store: &Store, list_time: Duration) -> Result<Collected, StoreError> {
    let settings = CollectSettings { grace: Duration::ZERO, list_time, ..CollectSettings::default() };
    let mut collector = Collector::new(store, settings);
    tokio::time::timeout(Duration::from_secs(30), collector.run()).await.unwrap()
}

fn packs() -> [String; 2] {
    [b"1", b"2"].map(|bytes| key::pack(&PackId(Digest::of(bytes))))
}

#[tokio::test]
async fn a_removal_is_sent_the_way_on_which_nothing_is_sent_twice() {
    let dir = tempfile::tempdir().unwrap();
    let directory = || LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let [pack, _] = packs();
    let store =
        store(Arc::new(Hangs { directory: directory(), at: pack.clone() }), Arc::new(directory())).await;
    put(&store, std::slice::from_ref(&pack)).await;
    assert_eq!(collected(&store, Duration::from_secs(60)).await.unwrap().packs, 1);
    assert!(store.head(&pack).await.unwrap().is_none());
}

#[tokio::test]
async fn a_collector_whose_time_is_up_removes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let directory: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let store = store(Arc::clone(&directory), directory).await;
    put(&store, &packs()).await;
    assert_eq!(collected(&store, Duration::ZERO).await.unwrap(), Collected::default());
    assert_eq!(store.list(key::PACKS, None).await.unwrap().len(), 2);
    assert_eq!(collected(&store, Duration::from_secs(60)).await.unwrap().packs, 2);
}

#[tokio::test]
async fn a_removal_that_hangs_is_given_up_and_its_list_counts_until_it_cannot_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let [hangs, other] = packs();
    let directory = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let objects: Arc<dyn ObjectStore> = Arc::new(Hangs { directory, at: hangs.clone() });
    let store = store(Arc::clone(&objects), objects).await;
    put(&store, &[hangs.clone(), other.clone()]).await;
    let ended = collected(&store, Duration::from_secs(60)).await;
    assert!(matches!(ended, Err(StoreError::Unavailable { what, .. }) if what == hangs));
    assert!(store.head(&other).await.unwrap().is_none(), "others are removed all the same");
    assert_eq!(outlook(&store, &hangs).await.unwrap(), Outlook::MayGo);
    let list = store.list(key::COLLECT, None).await.unwrap().remove(0);
    let list: List =
        serde_json::from_slice(&store.get(&list.key, "a list", LIST_SIZE_MAX).await.unwrap()).unwrap();
    assert_eq!(list.void_ms, 60_000 + 2 * 200);
}
