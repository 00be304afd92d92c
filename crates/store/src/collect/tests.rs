//! A store whose removals hang.

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

#[tokio::test]
async fn a_removal_that_hangs_is_given_up_and_its_list_counts_until_it_cannot_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let [hangs, other] = [b"1", b"2"].map(|bytes| key::pack(&PackId(Digest::of(bytes))));
    let directory = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let objects: Arc<dyn ObjectStore> = Arc::new(Hangs { directory, at: hangs.clone() });
    let once = Arc::clone(&objects);
    let removal_max = Duration::from_millis(200);
    let store =
        Store::of(Backend { brief: Arc::clone(&objects), objects, once, removal_max, directory: None });
    store.put_new(key::MARKER, Bytes::from_static(b"{\"format\":1}")).await.unwrap();
    for pack in [&hangs, &other] {
        store.put_new(pack, Bytes::from_static(b"x")).await.unwrap();
    }
    // What was written in this millisecond is not older than nothing.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let settings = CollectSettings { grace: Duration::ZERO, ..CollectSettings::default() };
    let mut collector = Collector::new(&store, settings);
    let ended = tokio::time::timeout(Duration::from_secs(30), collector.run()).await.unwrap();
    assert!(matches!(ended, Err(StoreError::Unavailable { what, .. }) if what == hangs));
    assert!(store.head(&other).await.unwrap().is_none(), "others are removed all the same");
    assert_eq!(outlook(&store, &hangs).await.unwrap(), Outlook::MayGo);
    let list = store.list(key::COLLECT, None).await.unwrap().remove(0);
    let list: List =
        serde_json::from_slice(&store.get(&list.key, "a list", LIST_SIZE_MAX).await.unwrap()).unwrap();
    assert_eq!(list.void_ms, 60_000 + 2 * 200);
}
