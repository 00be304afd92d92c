//! What a store says when its content is damaged, a manifest lies, or the server is slow or gone.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dsec_image::layer::{BlobIndex, Digest, LayerId, LayerKind, Manifest, MetadataId};
use dsec_store::{Lease, Problem, Publish, Store, StoreError};
use support::{Sample, directory, label, lease, name, s3_settings};

/// What is wrong with a manifest.
type Lie<'a> = &'a dyn Fn(&mut Manifest);

/// What a test does to an object.
#[derive(Debug, Clone, Copy)]
enum Damage {
    Remove,
    Cut,
    Lengthen,
    /// One bit is another.
    Flip,
    /// The bytes of another object of its kind.
    Swap,
}

const ALL: [Damage; 5] = [Damage::Remove, Damage::Cut, Damage::Lengthen, Damage::Flip, Damage::Swap];

impl Damage {
    fn done_to(self, path: &Path, other: &Path) {
        let mut bytes = std::fs::read(path).unwrap();
        match self {
            Self::Remove => return std::fs::remove_file(path).unwrap(),
            Self::Cut => bytes.truncate(bytes.len() / 2),
            Self::Lengthen => bytes.push(0),
            Self::Flip => bytes[7] ^= 1,
            Self::Swap => bytes = std::fs::read(other).unwrap(),
        }
        std::fs::write(path, bytes).unwrap();
    }
}

/// Two layers in a store, of which one has the other as its parent.
struct Two {
    dir: tempfile::TempDir,
    store: Store,
    top: Sample,
    below: Sample,
    lease: Arc<Lease>,
}

impl Two {
    async fn published() -> Self {
        let (dir, store) = directory().await;
        let below = Sample::new(&[1, 2]);
        let top = Sample::new(&[3, 4, 5]).over(&below.manifest);
        let lease = lease(&store).await;
        below.publish(&lease, None).await.unwrap();
        top.publish(&lease, Some(("top", "1"))).await.unwrap();
        Self { dir, store, top, below, lease }
    }

    fn id(&self) -> LayerId {
        self.top.manifest.id().unwrap()
    }

    /// The objects of a layer: what they are called, and where they are.
    fn objects(&self, layer: &Sample) -> [(String, PathBuf); 4] {
        let manifest = &layer.manifest;
        let (id, metadata, blob) = (manifest.id().unwrap(), manifest.metadata.id, manifest.blobs[0].id);
        [
            (format!("layer {id}"), self.dir.path().join(format!("layers/{id}"))),
            (format!("metadata {metadata}"), self.dir.path().join(format!("meta/{metadata}"))),
            (format!("the index of blob {blob}"), self.dir.path().join(format!("blobs/{blob}"))),
            (format!("pack {}", layer.index.packs()[0].id), layer.pack_path(self.dir.path(), 0)),
        ]
    }

    /// Reads everything there is of the layer on top, as a node does, up to the first error.
    async fn read(&self) -> Result<(), StoreError> {
        let mut open = vec![self.id()];
        while let Some(id) = open.pop() {
            let manifest = self.store.manifest(&id).await?;
            self.store.metadata(&manifest.metadata).await?;
            for blob in &manifest.blobs {
                let index = self.store.blob_index(&blob.id).await?;
                for number in 0..index.groups().len() as u64 {
                    self.store.group(&index, number).await?;
                }
            }
            open.extend(manifest.parents.iter().map(|parent| parent.layer));
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_damage_to_every_object_is_found_and_refused() {
    let two = Two::published().await;
    assert!(two.store.verify(&two.id()).await.unwrap().findings.is_empty());
    two.read().await.unwrap();
    let pairs = [(&two.top, &two.below), (&two.below, &two.top)];
    for (layer, other) in pairs {
        for ((name, path), (_, other)) in two.objects(layer).into_iter().zip(two.objects(other)) {
            let good = std::fs::read(&path).unwrap();
            for damage in ALL {
                damage.done_to(&path, &other);
                let findings = two.store.verify(&two.id()).await.unwrap().findings;
                assert_eq!(findings.len(), 1, "{name} {damage:?}: {findings:?}");
                assert_eq!(findings[0].object, name, "{damage:?}");
                let is_manifest = name.starts_with("layer ");
                match (damage, &findings[0].problem) {
                    (Damage::Remove, Problem::Missing) => {}
                    (Damage::Cut, Problem::Truncated { found, wanted }) => {
                        assert_eq!((*found as usize, *wanted as usize), (good.len() / 2, good.len()));
                    }
                    // Nothing says how long a manifest is.
                    (Damage::Cut, Problem::Swapped { .. }) => assert!(is_manifest, "{name}"),
                    (Damage::Lengthen | Damage::Flip | Damage::Swap, Problem::Swapped { .. }) => {}
                    // The other object may be shorter.
                    (Damage::Swap, Problem::Truncated { .. }) => {}
                    (damage, problem) => panic!("{name} {damage:?}: {problem}"),
                }
                // Whoever reads is told too, but that bytes behind a pack's last group are nobody's.
                match (two.read().await, damage) {
                    (Err(StoreError::NotFound { what }), Damage::Remove) => assert_eq!(what, name),
                    (Err(StoreError::Damaged { .. }), _) => {}
                    (Ok(()), Damage::Lengthen) => assert!(name.starts_with("pack "), "{name}"),
                    (read, damage) => panic!("{name} {damage:?}: {read:?}"),
                }
                std::fs::write(&path, &good).unwrap();
            }
        }
    }
    assert!(two.store.verify_all().await.unwrap().findings.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_lies_is_not_published_and_is_found_where_it_is() {
    let two = Two::published().await;
    let session = Publish::begin(Arc::clone(&two.lease)).await.unwrap();
    let lies: [(&str, Lie<'_>); 6] = [
        ("metadata", &|m| m.metadata.size += 1),
        ("metadata", &|m| m.metadata.id = MetadataId(Digest::of(b"another"))),
        ("blob", &|m| m.blobs[0].index_size -= 1),
        ("blob", &|m| m.blobs[0].size += 4096),
        ("blob", &|m| m.blobs[0].id.0 = Digest::of(b"another")),
        ("layer", &|m| m.parents[0].layer = LayerId(Digest::of(b"another"))),
    ];
    for (at, (what, lie)) in lies.into_iter().enumerate() {
        let mut manifest = two.top.manifest.clone();
        lie(&mut manifest);
        let error = session.manifest(&manifest).await.unwrap_err();
        assert!(matches!(error, StoreError::NotFound { .. } | StoreError::Damaged { .. }), "{at}: {error:?}");
        assert!(error.to_string().contains(what), "{at}: {error}");
        let id = manifest.id().unwrap();
        assert!(two.store.manifest(&id).await.unwrap_err().is_not_found(), "{at}");
        std::fs::write(two.dir.path().join(format!("layers/{id}")), manifest.encode().unwrap()).unwrap();
        let findings = two.store.verify(&id).await.unwrap().findings;
        assert_eq!(findings.len(), 1, "{at}: {findings:?}");
        assert!(findings[0].object.contains(what), "{at}: {findings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_lies_of_a_group_is_found() {
    let two = Two::published().await;
    let mut groups = two.top.index.groups().to_vec();
    groups[1].hash = Digest::of(b"another");
    let lying = BlobIndex::new(two.top.index.size(), two.top.index.packs().to_vec(), groups).unwrap();
    let session = Publish::begin(Arc::clone(&two.lease)).await.unwrap();
    let blob = session.blob(&lying).await.unwrap();
    let mut manifest = two.top.manifest.clone();
    manifest.blobs[0].id = blob;
    let id = session.manifest(&manifest).await.unwrap();
    let findings = two.store.verify(&id).await.unwrap().findings;
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].object, format!("group 1 of blob {blob}"));
    let error = two.store.group(&lying, 1).await.unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
    assert!(two.store.group(&lying, 0).await.is_ok());
}

/// What a server does with each connection, once the request has begun.
#[derive(Debug, Clone, Copy)]
enum Server {
    /// Says nothing.
    Stalls,
    /// Closes.
    HangsUp,
    /// Says so many bytes will follow, and stops in the midst.
    StallsInTheBody,
    HangsUpInTheBody,
    Answers(&'static str),
    /// Says that more will follow than any memory holds.
    IsLong,
    /// Does not say how much will follow, and goes on.
    GoesOn,
}

/// Far more than any record has.
const LONG: usize = 64 << 20;

impl Server {
    /// Serves until the test's process ends, and says at which port.
    fn start(self) -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                std::thread::spawn(move || self.serve(connection));
            }
        });
        port
    }

    fn serve(self, mut connection: TcpStream) -> Option<()> {
        let mut request = [0; 4096];
        connection.read(&mut request).ok().filter(|len| *len > 0)?;
        let body = "HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"1\"\r\n\
                    Content-Length: 12\r\n\r\n{\"form";
        match self {
            Self::Stalls | Self::HangsUp => {}
            Self::StallsInTheBody | Self::HangsUpInTheBody => connection.write_all(body.as_bytes()).ok()?,
            Self::Answers(status) => {
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                connection.write_all(answer.as_bytes()).ok()?;
            }
            Self::IsLong | Self::GoesOn => {
                let head =
                    "HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"1\"\r\n";
                let length = match self {
                    Self::IsLong => format!("Content-Length: {}", 1_u64 << 40),
                    _ => "Transfer-Encoding: chunked".to_owned(),
                };
                connection.write_all(format!("{head}{length}\r\n\r\n").as_bytes()).ok()?;
                let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
                for _ in 0..LONG / chunk.len() {
                    connection.write_all(&chunk).ok()?;
                }
            }
        }
        if matches!(self, Self::Stalls | Self::StallsInTheBody) {
            // Until the other side gives up.
            while connection.read(&mut request).ok()? > 0 {}
        }
        Some(())
    }
}

async fn open(port: u16) -> StoreError {
    let mut settings = s3_settings(&format!("http://127.0.0.1:{port}"), "");
    settings.request_ms_max = 200;
    settings.retry_ms_max = 600;
    // Far more than its own limits together: it must not hang.
    tokio::time::timeout(Duration::from_secs(60), Store::open(&settings)).await.unwrap().unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_slow_gone_or_faulty_is_unavailable_and_may_be_tried_again() {
    let refuses = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let servers = [
        Server::Stalls,
        Server::HangsUp,
        Server::StallsInTheBody,
        Server::HangsUpInTheBody,
        Server::Answers("500 Internal Server Error"),
        Server::Answers("503 Slow Down"),
    ];
    let ports = servers.map(|server| (format!("{server:?}"), server.start()));
    for (server, port) in ports.into_iter().chain([("refuses".to_owned(), refuses)]) {
        let error = open(port).await;
        assert!(
            matches!(error, StoreError::Unavailable { .. }) && error.is_retryable(),
            "{server}: {error:?}"
        );
        assert!(error.to_string().contains("dsec-store.json"), "{server}: {error}");
        assert!(error.to_string().contains("at s3://"), "{server}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_goes_away_after_it_was_opened_is_named() {
    let two = Two::published().await;
    let place = two.dir.path().display().to_string();
    std::fs::remove_dir_all(two.dir.path()).unwrap();
    let (name, tag) = (name("top"), label("latest"));
    for error in [
        two.store.check().await.unwrap_err(),
        two.read().await.unwrap_err(),
        two.store.tagged(LayerKind::Base, &name, &tag).await.unwrap_err(),
        two.store.trace(&two.top.index.id()).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains(&place), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_longer_than_its_kind_is_not_read() {
    let error = open(Server::IsLong.start()).await;
    assert!(
        matches!(&error, StoreError::Damaged { problem, .. } if problem.contains("at most")),
        "{error:?}"
    );
    let error = open(Server::GoesOn.start()).await;
    assert!(format!("{error:?}").contains("goes on after"), "{error:?}");

    let two = Two::published().await;
    let too_long = |error: StoreError| match error {
        StoreError::Damaged { problem, .. } => assert!(problem.contains("at most"), "{problem}"),
        other => panic!("{other:?}"),
    };
    for (name, path) in two.objects(&two.top).into_iter().filter(|(name, _)| !name.starts_with("pack ")) {
        let good = std::fs::read(&path).unwrap();
        // A hole takes no room.
        std::fs::File::options().append(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        println!("{name}");
        too_long(two.read().await.unwrap_err());
        std::fs::write(&path, &good).unwrap();
    }
    two.read().await.unwrap();
    // A hint that is damaged is none.
    let id = two.top.manifest.id().unwrap();
    two.store.put_converted("sha256:1", id).await.unwrap();
    assert_eq!(two.store.converted("sha256:1").await.unwrap(), Some(id));
    let hint = std::fs::File::create(two.dir.path().join("oci/sha256-1")).unwrap();
    for length in [0, 1 << 40] {
        hint.set_len(length).unwrap();
        assert_eq!(two.store.converted("sha256:1").await.unwrap(), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_is_told_apart_from_one_that_has_nothing() {
    for status in ["401 Unauthorized", "403 Forbidden"] {
        let error = open(Server::Answers(status).start()).await;
        assert!(matches!(error, StoreError::Denied { .. }) && !error.is_retryable(), "{status}: {error:?}");
    }
    let error = open(Server::Answers("404 Not Found").start()).await;
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(source.contains("there is no store: see whether"), "{source}");
}
