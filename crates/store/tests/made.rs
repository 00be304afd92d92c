//! Layers of real files: made, published, and used again.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use dsec_image::ImportLimits;
use dsec_image::build::{
    ArchiveSource, BuiltLayer, Donors, FileIndex, Hidden, PackSink, Workshop, from_directory, merge,
};
use dsec_image::erofs::{Attributes, BLOCK_SIZE, Content, LayerTree};
use dsec_image::layer::{
    BlobRef, Facts, LayerId, LayerKind, MANIFEST_FORMAT, Manifest, MetadataId, MetadataRef, PackId, Parent,
    ParentRole, Source,
};
use dsec_store::{CollectSettings, Collector, Lease, Publish, StoreError};
use support::{directory, lease};

#[derive(Default)]
struct Packs(Vec<(PackId, Vec<u8>)>);

impl PackSink for Packs {
    fn pack(&mut self, id: PackId, bytes: Vec<u8>) -> std::io::Result<()> {
        self.0.push((id, bytes));
        Ok(())
    }
}

/// Makes a layer of a directory, changes it, and publishes it with its file index.
async fn publish(
    lease: &Arc<Lease>,
    source: &Path,
    donors: Vec<Arc<FileIndex>>,
    parents: Vec<Parent>,
    change: impl FnOnce(&mut LayerTree),
) -> (LayerId, BuiltLayer) {
    let (work, mut packs) = (tempfile::tempdir().unwrap(), Packs::default());
    let workshop = Workshop {
        blob_path: &work.path().join("blob"),
        donors: Donors::new(donors),
        sink: &mut packs,
        progress: &mut |_| {},
    };
    let mut built = from_directory(source, &ImportLimits::default(), workshop).unwrap();
    change(&mut built.layer);
    let session = Publish::begin(Arc::clone(lease)).await.unwrap();
    for (id, pack) in packs.0 {
        session.pack(id, pack.into()).await.unwrap();
    }
    if let Some(blob) = &built.blob {
        session.blob(&blob.index).await.unwrap();
    }
    let (metadata, used) = built.layer.encode().unwrap();
    let mut blobs = Vec::new();
    for blob in used {
        let index_size = lease.store().blob_index(&blob.id).await.unwrap().encode().len() as u64;
        blobs.push(BlobRef { id: blob.id, index_size, size: u64::from(blob.blocks) * BLOCK_SIZE });
    }
    let size = metadata.len() as u64;
    let id: MetadataId = session.metadata(metadata.into()).await.unwrap();
    let manifest = Manifest {
        format: MANIFEST_FORMAT,
        kind: LayerKind::Workspace,
        metadata: MetadataRef { id, size },
        blobs,
        parents,
        config: None,
        facts: Facts {
            created_unix_ms: 1,
            builder: "test".to_owned(),
            source: Source::Archive { name: "test".to_owned(), digest: "sha256:none".to_owned() },
            diff_ids: vec![],
            files: built.layer.tree.iter().count() as u64,
            content_bytes: built.content_bytes,
            stored_bytes: size,
        },
    };
    let layer = session.manifest(&manifest).await.unwrap();
    session.files(&layer, &built.files).await.unwrap();
    (layer, built)
}

fn write(dir: &Path, name: &str, content: &[u8]) {
    std::fs::write(dir.join(name), content).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_published_layer_is_a_donor_until_it_is_collected() {
    let (dir, store) = directory().await;
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(one.path(), "a", &[1; 5000]);
    write(two.path(), "b", &[1; 5000]);
    write(two.path(), "c", &[2; 9000]);
    let publisher = lease(&store).await;
    let (first, built) = publish(&publisher, one.path(), vec![], vec![], |_| {}).await;
    let donor = publisher.use_donor(&first).await.unwrap().unwrap();
    assert_eq!(donor, built.files);
    let (second, built) = publish(&publisher, two.path(), vec![Arc::new(donor)], vec![], |_| {}).await;
    assert_eq!(built.blob.unwrap().index.size(), 12_288, "only what the donor has not");
    // The second keeps the donor's blob by itself, and says where all of its own files lie.
    assert_eq!(publisher.use_donor(&second).await.unwrap().unwrap().len(), 2);
    let verified = store.verify(&second).await.unwrap();
    assert!(verified.findings.is_empty(), "{verified:?}");
    // A damaged index is a finding, and as good as none to whoever makes a layer.
    let path = dir.path().join(format!("files/{second}"));
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(publisher.use_donor(&second).await.unwrap(), None);
    let findings = store.verify(&second).await.unwrap().findings;
    assert_eq!(findings[0].object, format!("the files of layer {second}"), "{findings:?}");
    // One that points elsewhere is held to the blobs that the layer keeps.
    std::fs::copy(&path, dir.path().join(format!("files/{first}"))).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(publisher.use_donor(&second).await.unwrap(), None);
    let session = Publish::begin(Arc::clone(&publisher)).await.unwrap();
    session.files(&second, &built.files).await.unwrap();
    std::fs::copy(&path, dir.path().join(format!("files/{first}"))).unwrap();
    assert_eq!(publisher.use_donor(&first).await.unwrap().unwrap().len(), 1, "`c` is in none of its blobs");
    drop(session);
    publisher.release_layer(&second).await.unwrap();
    Arc::into_inner(publisher).unwrap().release().await.unwrap();
    let user = lease(&store).await;
    user.use_layer(&second).await.unwrap();
    let at_once = CollectSettings { grace: std::time::Duration::ZERO, ..CollectSettings::default() };
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    assert_eq!(Collector::new(&store, at_once).run().await.unwrap().layers, 1);
    let left: Vec<_> =
        std::fs::read_dir(dir.path().join("files")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, [std::ffi::OsString::from(second.to_string())]);
    assert!(store.verify(&second).await.unwrap().findings.is_empty());
    let error = user.use_donor(&first).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error:?}");
}

/// All that a tree can have without special rights.
const ALL_SORTS: &str = r#"
    mkdir -p d/deep many; echo old > d/old; echo gone > gone; echo a > a; ln a d/another-a; ln -s ../a d/link
    chmod 4751 a; chmod 1777 many; mkfifo pipe; : > empty; ln -s "$(printf 'x%.0s' $(seq 300))" long-link
    i=0; while [ $i -lt 300 ]; do echo $i > many/$i; i=$((i+1)); done
    long=$(printf 'l%.0s' $(seq 200)); mkdir -p "d/$long/$long"; echo long > "d/$long/$long/file"
    printf umlaut > "$(printf 'caf\303\251')"; printf bytes > "$(printf '\377\376')"
    seq 1 200000 > large; truncate -s 3000001 hole; echo in > inside
    printf start | dd of=holes conv=notrunc status=none; printf mid | dd of=holes bs=1 seek=500000 conv=notrunc status=none
    truncate -s 1000000 holes; touch -d '1960-01-01 00:00:00.25' d/old; touch -d '2001-01-01 00:00:00.123456789' a
"#;

fn shell(dir: &Path, script: &str) {
    let status = Command::new("sh").args(["-ec", script]).current_dir(dir).status().unwrap();
    assert!(status.success(), "{script}");
}

fn whiteout(layer: &mut LayerTree, name: &str) {
    let root = layer.tree.root();
    layer.tree.insert(root, name.as_bytes(), Attributes::default(), Content::CharDevice(0, 0));
}

fn set_xattr(layer: &mut LayerTree, name: &str, xattr: &str, value: &[u8]) {
    let id = layer.tree.lookup(layer.tree.root(), name.as_bytes()).unwrap();
    let mut attributes = layer.tree.get(id).unwrap().attributes.clone();
    attributes.xattrs.get_or_insert_default().set(xattr.as_bytes(), value).unwrap();
    layer.tree.set_attributes(id, attributes);
}

/// The layers of an archive, made without donors.
fn imported(source: &Path) -> Vec<BuiltLayer> {
    let work = tempfile::tempdir().unwrap();
    let mut archive = ArchiveSource::open(source, work.path(), &ImportLimits::default()).unwrap();
    (0..archive.diff_ids().len())
        .map(|number| {
            let blob_path = &work.path().join(format!("blob-{number}"));
            let (donors, sink, progress) = (Donors::default(), &mut Packs::default(), &mut |_| {});
            archive.build(number, Workshop { blob_path, donors, sink, progress }).unwrap()
        })
        .collect()
}

fn image(layers: &[&LayerTree]) -> Vec<u8> {
    merge(layers, Hidden::Drop, 100_000).unwrap().encode().unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exported_image_comes_back_as_the_same_tree() {
    let (_dir, store) = directory().await;
    let (below, top) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    shell(below.path(), ALL_SORTS);
    shell(top.path(), "echo changed > a; mkdir d; echo new > d/new");
    let publisher = lease(&store).await;
    let (first, lower) = publish(&publisher, below.path(), vec![], vec![], |layer| {
        set_xattr(layer, "a", "user.note", b"with\n = and \0");
        set_xattr(layer, "large", "security.capability", &[1, 0, 0, 2, 0, 4, 0, 0]);
    })
    .await;
    let parents = vec![Parent { layer: first, role: ParentRole::Below }];
    let (second, upper) = publish(&publisher, top.path(), vec![], parents, |layer| {
        whiteout(layer, "gone");
        set_xattr(layer, "d", "trusted.overlay.opaque", b"y");
    })
    .await;
    let work = tempfile::tempdir().unwrap();
    let layout = work.path().join("layout");
    let digest = store.export(&second, &layout).await.unwrap();
    let again = imported(&layout);
    assert_eq!(again.len(), 2);
    assert!(image(&[&again[0].layer]) == image(&[&lower.layer]), "the lower layer is another");
    let merged = image(&[&lower.layer, &upper.layer]);
    assert!(image(&[&again[0].layer, &again[1].layer]) == merged, "together they are another");
    // The same layer gives the same image, and none in place of another.
    assert_eq!(store.export(&second, &work.path().join("again")).await.unwrap(), digest);
    let error = store.export(&second, &layout).await.unwrap_err();
    assert!(matches!(error, StoreError::Export { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_program_unpacks_an_exported_layer() {
    let (_dir, store) = directory().await;
    let source = tempfile::tempdir().unwrap();
    shell(source.path(), ALL_SORTS);
    let publisher = lease(&store).await;
    let (layer, built) = publish(&publisher, source.path(), vec![], vec![], |_| {}).await;
    let work = tempfile::tempdir().unwrap();
    store.export(&layer, &work.path().join("layout")).await.unwrap();
    shell(
        work.path(),
        r#"layer=$(grep -rl tar+gzip layout/blobs | xargs grep -o '"layers":.*' | grep -o 'sha256:[0-9a-f]*' | head -1)
        mkdir out; tar -xpzf "layout/blobs/sha256/${layer#sha256:}" -C out"#,
    );
    let (_, unpacked) = publish(&publisher, &work.path().join("out"), vec![], vec![], |_| {}).await;
    assert!(image(&[&unpacked.layer]) == image(&[&built.layer]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_of_what_is_damaged_says_so() {
    let (dir, store) = directory().await;
    let source = tempfile::tempdir().unwrap();
    shell(source.path(), "seq 1 200000 > large");
    let publisher = lease(&store).await;
    let (layer, _) = publish(&publisher, source.path(), vec![], vec![], |_| {}).await;
    shell(
        dir.path(),
        "for pack in packs/*/*; do printf x | dd of=$pack bs=1 seek=100 conv=notrunc status=none; done",
    );
    let work = tempfile::tempdir().unwrap();
    let error = store.export(&layer, &work.path().join("layout")).await.unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
    assert!(!work.path().join("layout/index.json").exists());
}
