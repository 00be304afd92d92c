//! Layers that are made, kept and mounted with their blobs as devices.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dsec_image::build::{ArchiveSource, BuiltLayer, Donors, FileIndex, PackSink, Workshop};
use dsec_image::erofs::LayerTree;
use dsec_image::layer::{BlobId, Digest, GROUP_SIZE, PackId};
use dsec_image::{ImportError, ImportLimits};
use dsec_sys::mount::{Attr, FsSetting, attach, new_mount};
use tempfile::TempDir;

use super::{chain, run};

/// Keeps packs in memory.
#[derive(Default)]
pub(crate) struct Packs(pub(crate) BTreeMap<PackId, Vec<u8>>);

impl PackSink for Packs {
    fn pack(&mut self, id: PackId, bytes: Vec<u8>) -> io::Result<()> {
        assert_eq!(id, PackId(Digest::of(&bytes)));
        self.0.insert(id, bytes);
        Ok(())
    }
}

/// A place where layers are made.
pub(crate) struct Shop {
    pub(crate) dir: TempDir,
    pub(crate) packs: Packs,
    pub(crate) blobs: BTreeMap<BlobId, PathBuf>,
    made: u32,
}

impl Shop {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), packs: Packs::default(), blobs: BTreeMap::new(), made: 0 }
    }

    /// Makes a layer, and checks that its packs give its blob.
    pub(crate) fn make<T>(
        &mut self,
        donors: &[&FileIndex],
        make: impl FnOnce(Workshop<'_>) -> Result<T, ImportError>,
        built: impl Fn(&T) -> &BuiltLayer,
    ) -> T {
        self.made += 1;
        let blob_path = self.dir.path().join(format!("blob-{}", self.made));
        let donors = Donors::new(donors.iter().map(|index| (*index).clone().into()).collect());
        let workshop =
            Workshop { blob_path: &blob_path, donors, sink: &mut self.packs, progress: &mut |_| {} };
        let made = make(workshop).unwrap_or_else(|e| panic!("{}", chain(&e)));
        if let Some(blob) = &built(&made).blob {
            assert_eq!(blob.path, blob_path);
            self.check_packs(blob);
            self.blobs.insert(blob.id, blob_path);
        }
        made
    }

    pub(crate) fn archive(&mut self, source: &Path) -> Vec<BuiltLayer> {
        let work = tempfile::tempdir().unwrap();
        let mut source = ArchiveSource::open(source, work.path(), &ImportLimits::default())
            .unwrap_or_else(|e| panic!("{}", chain(&e)));
        (0..source.diff_ids().len())
            .map(|number| self.make(&[], |workshop| source.build(number, workshop), |built| built))
            .collect()
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> BuiltLayer {
        let path = self.dir.path().join("source");
        fs::write(&path, bytes).unwrap();
        self.archive(&path).pop().unwrap()
    }

    fn check_packs(&self, blob: &dsec_image::build::BuiltBlob) {
        let plain = File::open(&blob.path).unwrap();
        assert_eq!(plain.metadata().unwrap().len(), blob.index.size());
        let mut buffer = vec![0; GROUP_SIZE as usize];
        for (at, group) in blob.index.groups().iter().enumerate() {
            let pack = &self.packs.0[&blob.index.packs()[group.pack as usize].id];
            let stored = &pack[group.offset as usize..][..group.stored as usize];
            let len = blob.index.plain_len(at as u64) as usize;
            let unpacked = match group.stored as usize == len {
                true => stored.to_vec(),
                false => zstd::bulk::decompress(stored, len).unwrap(),
            };
            std::os::unix::fs::FileExt::read_exact_at(&plain, &mut buffer[..len], at as u64 * GROUP_SIZE)
                .unwrap();
            assert!(unpacked == buffer[..len], "group {at}");
            assert_eq!(group.hash, Digest::of(&unpacked));
        }
    }

    /// Mounts a layer with the plain files of its blobs as devices, after `fsck.erofs` has read all of it and our own
    /// reader has given the same bytes back.
    pub(crate) fn mount(&self, layer: &LayerTree) -> LayerMount {
        let mount = self.unchecked(layer);
        let mut args: Vec<_> =
            mount.devices.iter().map(|path| format!("--device={}", path.display())).collect();
        args.extend(["--extract".to_owned(), mount.metadata.display().to_string()]);
        run("fsck.erofs", &args);
        mount
    }

    pub(crate) fn unchecked(&self, layer: &LayerTree) -> LayerMount {
        let (image, blobs) = layer.encode().unwrap();
        let again = LayerTree::decode(&image).unwrap_or_else(|e| panic!("{e}"));
        assert!(again.encode().unwrap().0 == image, "the reader changed the image");
        let devices: Vec<_> = blobs.iter().map(|blob| self.blobs[&blob.id].clone()).collect();
        let metadata = self.dir.path().join(format!("meta-{}", Digest::of(&image)));
        fs::write(&metadata, image).unwrap();
        LayerMount::new(metadata, devices)
    }
}

/// A mounted layer; gone with this, also when a test panics.
pub(crate) struct LayerMount {
    dir: TempDir,
    pub(crate) metadata: PathBuf,
    pub(crate) devices: Vec<PathBuf>,
}

impl LayerMount {
    fn new(metadata: PathBuf, devices: Vec<PathBuf>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (source, paths) = (text(&metadata), devices.iter().map(|path| text(path)).collect::<Vec<_>>());
        let mut settings = vec![FsSetting::Text("source", &source)];
        settings.extend(paths.iter().map(|path| FsSetting::Text("device", path)));
        let mount = new_mount("erofs", &settings, Attr::READ_ONLY).unwrap();
        attach(mount.as_fd(), rustix::fs::CWD, dir.path().to_str().unwrap()).unwrap();
        Self { dir, metadata, devices }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for LayerMount {
    fn drop(&mut self) {
        let status = std::process::Command::new("umount").arg::<&OsStr>(self.dir.path().as_os_str()).status();
        if !std::thread::panicking() {
            assert!(status.is_ok_and(|status| status.success()), "{} stays", self.dir.path().display());
        }
    }
}
