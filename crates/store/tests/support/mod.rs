//! Small layers, and stores to keep them in.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dsec_image::layer::{
    BlobIndex, BlobRef, Digest, Facts, GROUP_SIZE, GroupRef, Label, LayerKind, LayerName, MANIFEST_FORMAT,
    Manifest, MetadataId, MetadataRef, PackId, PackRef, Parent, ParentRole, Source,
};
use dsec_store::{Lease, Publish, Store, StoreError, StoreSettings};

pub const TTL: Duration = Duration::from_secs(60);

/// A layer of one blob, made of numbers: the same ones give the same layer, and layers with a number in common share a pack.
pub struct Sample {
    pub packs: Vec<Bytes>,
    pub index: BlobIndex,
    pub metadata: Bytes,
    pub manifest: Manifest,
    pub content: Vec<Bytes>,
}

impl Sample {
    pub fn new(numbers: &[u64]) -> Self {
        // Every number is a group; odd ones do not compress.
        let content: Vec<Bytes> = numbers.iter().map(|number| plain(*number)).collect();
        let packs: Vec<Bytes> = content
            .iter()
            .zip(numbers)
            .map(|(plain, number)| match number % 2 {
                1 => plain.clone(),
                _ => zstd::bulk::compress(plain, 1).unwrap().into(),
            })
            .collect();
        let refs = packs
            .iter()
            .map(|pack| PackRef { id: PackId(Digest::of(pack)), size: pack.len() as u32 })
            .collect();
        let groups = packs
            .iter()
            .enumerate()
            .map(|(at, pack)| GroupRef {
                hash: Digest::of(&content[at]),
                pack: at as u32,
                offset: 0,
                stored: pack.len() as u32,
            })
            .collect();
        let index = BlobIndex::new(GROUP_SIZE * numbers.len() as u64, refs, groups).unwrap();
        let metadata = Bytes::from(format!("metadata of {numbers:?}"));
        let encoded = index.encode();
        let manifest = Manifest {
            format: MANIFEST_FORMAT,
            kind: LayerKind::Toolkit,
            metadata: MetadataRef { id: MetadataId(Digest::of(&metadata)), size: metadata.len() as u64 },
            blobs: vec![BlobRef { id: index.id(), index_size: encoded.len() as u64, size: index.size() }],
            parents: vec![],
            config: None,
            facts: Facts {
                created_unix_ms: 1,
                builder: "test".to_owned(),
                source: Source::Archive { name: "test".to_owned(), digest: "sha256:none".to_owned() },
                diff_ids: vec![],
                files: numbers.len() as u64,
                content_bytes: index.size(),
                stored_bytes: packs.iter().map(|pack| pack.len() as u64).sum(),
            },
        };
        Self { packs, index, metadata, manifest, content }
    }

    pub fn over(mut self, parent: &Manifest) -> Self {
        self.manifest.parents = vec![Parent { layer: parent.id().unwrap(), role: ParentRole::Below }];
        self
    }

    pub async fn publish(&self, lease: &Arc<Lease>, name: Option<(&str, &str)>) -> Result<(), StoreError> {
        let session = Publish::begin(Arc::clone(lease)).await?;
        for (id, pack) in self.packs() {
            session.pack(id, pack).await?;
        }
        let name = name.map(|(name, version)| (name.parse::<LayerName>().unwrap(), label(version)));
        let name = name.as_ref().map(|(name, version)| (name, version));
        let id = session
            .finish(std::slice::from_ref(&self.index), self.metadata.clone(), &self.manifest, name)
            .await?;
        assert_eq!(id, self.manifest.id().unwrap());
        Ok(())
    }

    /// Its packs with their ids.
    pub fn packs(&self) -> impl Iterator<Item = (PackId, Bytes)> {
        self.index.packs().iter().map(|pack| pack.id).zip(self.packs.clone())
    }

    pub fn pack_path(&self, dir: &Path, at: usize) -> std::path::PathBuf {
        let id = self.index.packs()[at].id.to_string();
        dir.join("packs").join(&id[..2]).join(id)
    }
}

fn plain(number: u64) -> Bytes {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let noise: Vec<u8> = (0..512).map(|_| next()).collect();
    noise.iter().copied().cycle().take(GROUP_SIZE as usize).collect()
}

pub fn label(text: &str) -> Label {
    text.parse().unwrap()
}

pub fn name(text: &str) -> LayerName {
    text.parse().unwrap()
}

pub async fn directory() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(&StoreSettings::new(dir.path().to_str().unwrap())).await.unwrap();
    (dir, store)
}

pub async fn lease(store: &Store) -> Arc<Lease> {
    Arc::new(Lease::begin(store, "test", TTL).await.unwrap())
}

/// An S3 server on the loopback, ended with the test.
pub struct Bucket {
    server: Child,
    port: u16,
}

impl Bucket {
    pub fn start() -> Self {
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let server = Command::new(python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {python}, which scripts/venv dev makes: {error}"));
        let mut bucket = Self { server, port };
        bucket.make_bucket();
        bucket
    }

    /// Waits for the server and makes the bucket `layers`.
    fn make_bucket(&mut self) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.server.try_wait().unwrap() {
                panic!("the S3 server ended with {status}: is moto in .venv? scripts/venv dev puts it there");
            }
            let answer = self.put_bucket();
            match &answer {
                Ok(answer) if answer.starts_with("HTTP/1.1 200") => return,
                _ if begun.elapsed() > Duration::from_secs(60) => {
                    panic!("the S3 server makes no bucket: {answer:?}")
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn put_bucket(&self) -> std::io::Result<String> {
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        server.write_all(
            b"PUT /layers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        )?;
        let mut answer = String::new();
        server.read_to_string(&mut answer)?;
        Ok(answer)
    }

    pub fn settings(&self, prefix: &str) -> StoreSettings {
        s3_settings(&format!("http://127.0.0.1:{}", self.port), prefix)
    }
}

pub fn s3_settings(endpoint: &str, prefix: &str) -> StoreSettings {
    let mut settings = StoreSettings::new(format!("s3://layers/{prefix}"));
    settings.endpoint = Some(endpoint.to_owned());
    settings.access_key_id = Some("test".to_owned());
    settings.secret_access_key = Some("test".to_owned());
    settings.allow_http = true;
    settings
}

impl Drop for Bucket {
    fn drop(&mut self) {
        self.server.kill().ok();
        self.server.wait().ok();
    }
}
