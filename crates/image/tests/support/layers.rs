//! Layers that are made, kept and mounted with their blobs as devices.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dsec_image::build::{ArchiveSource, BuiltLayer, Donors, FileIndex, Hidden, PackSink, Workshop, merge};
use dsec_image::erofs::LayerTree;
use dsec_image::layer::{BlobId, Digest, GROUP_SIZE, PackId};
use dsec_image::{ImageConfig, ImportError, ImportLimits, ImportProgress};
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

/// What an import makes of a source: its layers on each other.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) layer: LayerTree,
    pub(crate) config: ImageConfig,
    pub(crate) content_bytes: u64,
}

impl Image {
    /// Its metadata, in which the ids of its blobs are.
    pub(crate) fn encoded(&self) -> Vec<u8> {
        self.layer.encode().unwrap().0
    }

    /// How many inodes it has.
    pub(crate) fn files(&self) -> usize {
        self.layer.tree.iter().count()
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
        self.try_make(donors, &mut |_| {}, make, built).unwrap_or_else(|e| panic!("{}", chain(&e)))
    }

    fn try_make<T>(
        &mut self,
        donors: &[&FileIndex],
        progress: &mut dyn FnMut(ImportProgress),
        make: impl FnOnce(Workshop<'_>) -> Result<T, ImportError>,
        built: impl Fn(&T) -> &BuiltLayer,
    ) -> Result<T, ImportError> {
        self.made += 1;
        let blob_path = self.dir.path().join(format!("blob-{}", self.made));
        let donors = Donors::new(donors.iter().map(|index| (*index).clone().into()).collect());
        let made = make(Workshop { blob_path: &blob_path, donors, sink: &mut self.packs, progress })?;
        if let Some(blob) = &built(&made).blob {
            assert_eq!(blob.path, blob_path);
            self.check_packs(blob);
            self.blobs.insert(blob.id, blob_path);
        }
        Ok(made)
    }

    /// Makes all layers of a source.
    pub(crate) fn archive(&mut self, source: &Path) -> Vec<BuiltLayer> {
        let built = self.layers(source, &ImportLimits::default(), &mut |_| {});
        built.unwrap_or_else(|e| panic!("{}", chain(&e))).0
    }

    fn layers(
        &mut self,
        source: &Path,
        limits: &ImportLimits,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(Vec<BuiltLayer>, ImageConfig), ImportError> {
        let work = tempfile::tempdir().unwrap();
        let mut source = ArchiveSource::open(source, work.path(), limits)?;
        let built = (0..source.diff_ids().len())
            .map(|number| self.try_make(&[], progress, |shop| source.build(number, shop), |built| built))
            .collect::<Result<_, _>>()?;
        Ok((built, source.config().clone()))
    }

    /// Imports a source as the node does: each of its layers is made, and they are merged.
    pub(crate) fn import(&mut self, source: &Path) -> Result<Image, ImportError> {
        self.import_within(source, &ImportLimits::default(), &mut |_| {})
    }

    pub(crate) fn import_within(
        &mut self,
        source: &Path,
        limits: &ImportLimits,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<Image, ImportError> {
        let (built, config) = self.layers(source, limits, progress)?;
        let layers: Vec<_> = built.iter().map(|built| &built.layer).collect();
        let layer = merge(&layers, Hidden::Drop, limits.max_files).unwrap_or_else(|e| panic!("{e}"));
        let content_bytes = built.iter().map(|built| built.content_bytes).sum();
        Ok(Image { layer, config, content_bytes })
    }

    /// Makes the one layer of an archive that must be good.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> BuiltLayer {
        let path = self.file(bytes);
        self.archive(&path).pop().unwrap()
    }

    /// The same, mounted.
    pub(crate) fn mounted(&mut self, bytes: &[u8]) -> LayerMount {
        let built = self.bytes(bytes);
        self.mount(&built.layer)
    }

    /// A file to import.
    pub(crate) fn file(&self, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join("source");
        fs::write(&path, bytes).unwrap();
        path
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
