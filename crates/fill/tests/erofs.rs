//! Layers on the device: metadata of EROFS over blobs that come as they are read. Needs root, and a kernel whose EROFS
//! takes files for devices.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dsec_image::ImportLimits;
use dsec_image::build::{BuiltLayer, Donors, Hidden, PackSink, Workshop, from_directory, merge};
use dsec_image::erofs::LayerTree;
use dsec_image::layer::PackId;
use dsec_sys::mount::{Attr, FsSetting, attach, new_mount};
use support::platform::{Platform, Reader, block_on};
use support::{GROUP, Made, Random};
use tempfile::TempDir;

#[derive(Default)]
struct Packs(HashMap<PackId, Bytes>);

impl PackSink for Packs {
    fn pack(&mut self, id: PackId, bytes: Vec<u8>) -> io::Result<()> {
        self.0.insert(id, bytes.into());
        Ok(())
    }
}

/// A directory of random files, as a layer.
struct Packed {
    layer: LayerTree,
    blob: Made,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Packed {
    fn new(name: &str, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut files = Vec::new();
        for number in 0..60 {
            let path = Path::new(name).join(format!("{}/file-{number}", number % 7));
            // From nothing to beyond a group.
            let length = random.below(1 << (10 + number % 11));
            files.push((path, (0..length).map(|_| (random.next() % 50) as u8).collect()));
        }
        Self::of(files)
    }

    fn of(files: Vec<(PathBuf, Vec<u8>)>) -> Self {
        let source = tempfile::tempdir().unwrap();
        for (path, content) in &files {
            std::fs::create_dir_all(source.path().join(path).parent().unwrap()).unwrap();
            std::fs::write(source.path().join(path), content).unwrap();
        }
        let (mut packs, work) = (Packs::default(), tempfile::tempdir().unwrap());
        let workshop = Workshop {
            blob_path: &work.path().join("blob"),
            donors: Donors::new(Vec::new()),
            sink: &mut packs,
            progress: &mut |_| {},
        };
        let made = from_directory(source.path(), &ImportLimits::default(), workshop).unwrap();
        let BuiltLayer { layer, blob: Some(blob), .. } = made else { panic!("it has content") };
        let plain = std::fs::read(&blob.path).unwrap();
        Self { layer, blob: Made { index: blob.index, plain, packs: packs.0 }, files }
    }
}

/// A mounted layer; gone with this, also when a test panics.
struct Mounted(TempDir);

impl Mounted {
    fn new(metadata: &Path, devices: &[PathBuf]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = vec![FsSetting::Text("source", metadata.to_str().unwrap())];
        settings.extend(devices.iter().map(|path| FsSetting::Text("device", path.to_str().unwrap())));
        let mount = new_mount("erofs", &settings, Attr::READ_ONLY).unwrap();
        attach(mount.as_fd(), rustix::fs::CWD, dir.path().to_str().unwrap()).unwrap();
        Self(dir)
    }

    /// Reads a file through an empty page cache.
    fn read(&self, path: &Path, length: usize) -> Vec<u8> {
        Reader::open(&self.0.path().join(path), false).read(0, length).unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(self.0.path()).status();
        if !std::thread::panicking() {
            assert!(done.unwrap().success());
        }
    }
}

/// EROFS takes a device that reads less than it was asked for as one that ends there, and fills up with zeros.
#[test]
fn a_read_through_a_layer_that_meets_a_missing_group_fails_and_is_never_zeros() {
    /// So that what the kernel reads ahead begins anywhere in a group.
    const STEP: usize = 17 << 12;
    let mut random = Random(31);
    let content: Vec<u8> = (0..4 * GROUP).map(|_| (random.next() % 50) as u8 + 1).collect();
    let packed = Packed::of(vec![("file".into(), content)]);
    let content = &packed.files[0].1;
    let platform = Platform::start(&[&packed.blob], |_| {});
    let (image, blobs) = packed.layer.encode().unwrap();
    let metadata = platform.dir.path().join("metadata");
    std::fs::write(&metadata, image).unwrap();
    let device = block_on(platform.client.open(blobs[0].id)).unwrap().path;
    // Every second group is there when the store goes.
    for group in (0..4).step_by(2) {
        Reader::open(&device, true).read(group * GROUP, 4096).unwrap();
    }
    let (packs, away) = (platform.dir.path().join("store/packs"), platform.dir.path().join("away"));
    std::fs::rename(&packs, &away).unwrap();
    let mounted = Mounted::new(&metadata, &[device]);
    let path = mounted.0.path().join("file");
    let mut failed = 0;
    for length in [STEP, content.len()] {
        let file = Reader::open(&path, false);
        for start in (0..content.len()).step_by(STEP) {
            let length = length.min(content.len() - start);
            match file.read(start as u64, length) {
                Ok(bytes) => {
                    assert!(bytes == content[start..start + length], "{length} bytes from {start} on")
                }
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
                    failed += 1;
                }
            }
        }
    }
    assert!(failed > 2 * 6, "{failed} reads failed, and half of the groups are missing");
    std::fs::rename(&away, &packs).unwrap();
    assert!(mounted.read(Path::new("file"), content.len()) == *content, "what failed once fails no more");
}

#[test]
fn a_layer_over_the_device_is_what_was_packed_while_workers_are_killed() {
    let packed = [Packed::new("one", 11), Packed::new("two", 12)];
    let platform = Platform::start(&[&packed[0].blob, &packed[1].blob], |_| {});
    let merged = merge(&[&packed[0].layer, &packed[1].layer], Hidden::Drop, 1000).unwrap();
    let (image, blobs) = merged.encode().unwrap();
    let metadata = platform.dir.path().join("metadata");
    std::fs::write(&metadata, image).unwrap();
    let devices = |direct: bool| -> Vec<PathBuf> {
        let opened = blobs.iter().map(|blob| block_on(platform.client.open(blob.id)).unwrap());
        opened.inspect(|opened| assert_eq!(opened.direct, direct)).map(|opened| opened.path).collect()
    };
    let files: Vec<_> = packed.iter().flat_map(|packed| &packed.files).collect();

    let devices_on_fuse = devices(false);
    let mounted = Mounted::new(&metadata, &devices_on_fuse);
    let fetched = |count: fn(&dsec_fill::engine::Counts) -> u64| {
        count(&block_on(platform.client.stats()).unwrap().counts)
    };
    assert_eq!(Command::new("find").arg(mounted.0.path()).arg("-ls").output().unwrap().stderr, b"");
    assert_eq!(fetched(|counts| counts.asked_bytes), 0, "looking around touches no content");

    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..4u64 {
            let (mounted, files, stop, reads, devices) = (&mounted, &files, &stop, &reads, &devices_on_fuse);
            scope.spawn(move || {
                let mut random = Random(reader + 200);
                while !stop.load(Ordering::Relaxed) {
                    // What the device's pages hold, the worker is not asked for.
                    devices.iter().for_each(|path| drop(Reader::open(path, false).read(0, 1)));
                    let (path, content) = files[random.below(files.len() as u64) as usize];
                    let same = mounted.read(path, content.len()) == *content;
                    stop.fetch_or(!same, Ordering::Relaxed);
                    assert!(same, "{}", path.display());
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for blob in &blobs {
                    block_on(platform.client.evict(blob.id)).unwrap();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        platform.kill_workers(150, &stop);
        stop.store(true, Ordering::Relaxed);
    });
    assert!(reads.load(Ordering::Relaxed) > 0);
    println!("{} files read over 150 kills", reads.load(Ordering::Relaxed));
    drop(mounted);

    for path in &devices_on_fuse {
        let size = std::fs::metadata(path).unwrap().len();
        Reader::open(path, true).read(0, size as usize).unwrap();
    }
    let mounted = Mounted::new(&metadata, &devices(true));
    platform.kill_workers(1, &stop);
    for (path, content) in &files {
        assert!(mounted.read(path, content.len()) == *content, "{}", path.display());
    }
}
