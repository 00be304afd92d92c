//! From a source file to the trees of its layers.

mod apply;
mod archive;
mod docker;
mod oci;
mod stream;
mod tar;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::ImageConfig;
use crate::erofs::{ContentStore, Tree};
use crate::error::{EntryProblem, ImportError};
use crate::limits::{ImportLimits, ImportPhase, ImportProgress};

use apply::{Applier, Whiteouts};
use archive::{Archive, Members, looks_like_images, open_source};
pub use oci::OciConfig;
pub(crate) use oci::host_architecture;
pub(crate) use stream::hex;
use stream::{Budget, Budgeted, Compression, Digests, FileRange, Hashed, Unpacked};
use tar::{TarError, read_problem};

/// Progress is told again after so many source bytes, not after every read.
const REPORT_EVERY: u64 = 4 << 20;

/// One archive to apply.
#[derive(Clone)]
pub(crate) struct Layer {
    /// For errors.
    name: String,
    range: FileRange,
    /// The digest of its stored bytes, if the source says one.
    stored: Option<String>,
    /// The digest of its unpacked bytes, if the source says one.
    diff_id: Option<String>,
}

impl Layer {
    /// A layer in a file of its own, whose stored bytes are known to be right. `name` is for errors.
    pub(crate) fn of_file(name: &str, file: &Path, diff_id: &str) -> Result<Self, ImportError> {
        let range = open_source(file, &Arc::default())?;
        Ok(Self {
            name: name.to_owned(),
            range,
            stored: None,
            diff_id: Some(oci::sha256_of(diff_id)?.to_owned()),
        })
    }
}

/// What a source holds.
struct Resolved {
    layers: Vec<Layer>,
    config: ImageConfig,
    whiteouts: Whiteouts,
}

/// Tells the caller how far the import is.
struct Meter<'a> {
    callback: &'a mut dyn FnMut(ImportProgress),
    read: Arc<AtomicU64>,
    total: u64,
    told: u64,
}

impl Meter<'_> {
    fn files(&mut self, files: u64) {
        let read = self.read.load(Ordering::Relaxed);
        if read >= self.told + REPORT_EVERY {
            self.told = read;
            (self.callback)(ImportProgress {
                phase: ImportPhase::Reading,
                source_bytes: read.min(self.total),
                source_bytes_total: self.total,
                files,
            });
        }
    }
}

/// Layers taken in one after another, within bounds that they share.
pub(crate) struct LayerIntake {
    whiteouts: Whiteouts,
    limits: ImportLimits,
    budget: Budget,
    files: u64,
    metadata_bytes: u64,
    read: Arc<AtomicU64>,
    total: u64,
}

impl LayerIntake {
    /// For layers of an image, which are `total` bytes as they are stored.
    pub(crate) fn of_image(total: u64, limits: &ImportLimits) -> Self {
        Self::new(Whiteouts::Keep, total, limits)
    }

    fn new(whiteouts: Whiteouts, total: u64, limits: &ImportLimits) -> Self {
        Self {
            whiteouts,
            limits: *limits,
            budget: Budget::new(limits.max_bytes),
            files: 0,
            metadata_bytes: 0,
            read: Arc::default(),
            total,
        }
    }

    /// Takes one layer in. `path` is the file that `data` writes, for errors. Gives the layer's tree and the digest of
    /// what it unpacked to, unless the source is a plain root file system.
    pub(crate) fn take(
        &mut self,
        layer: Layer,
        data: &mut dyn ContentStore,
        path: &Path,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(Tree, Option<String>), ImportError> {
        let read = Arc::clone(&self.read);
        let told = read.load(Ordering::Relaxed);
        let mut meter = Meter { callback: progress, read, total: self.total, told };
        let mut tick = |files| meter.files(files);
        let mut applier = Applier {
            tree: Tree::new(),
            data,
            data_path: path,
            limits: self.limits,
            budget: self.budget.clone(),
            tick: &mut tick,
            files: self.files,
            metadata_bytes: self.metadata_bytes,
            whiteouts: self.whiteouts,
        };
        let diff_id = apply_layer(&mut applier, layer, &self.budget, &self.read)?;
        (self.files, self.metadata_bytes) = (applier.files, applier.metadata_bytes);
        Ok((applier.tree, diff_id))
    }
}

/// A source taken in layer by layer.
pub(crate) struct ArchiveLayers {
    layers: Vec<Layer>,
    config: ImageConfig,
    intake: LayerIntake,
}

impl ArchiveLayers {
    /// Looks into `source`. An archive of images that is compressed as a whole is unpacked into `work`.
    pub(crate) fn open(source: &Path, work: &Path, limits: &ImportLimits) -> Result<Self, ImportError> {
        let Resolved { layers, config, whiteouts } = resolve(source, work, limits)?;
        let total = layers.iter().map(|layer| layer.range.len()).sum();
        Ok(Self { layers, config, intake: LayerIntake::new(whiteouts, total, limits) })
    }

    pub(crate) fn config(&self) -> &ImageConfig {
        &self.config
    }

    /// What each layer unpacks to, as far as the source says so.
    pub(crate) fn diff_ids(&self) -> impl ExactSizeIterator<Item = Option<&str>> {
        self.layers.iter().map(|layer| layer.diff_id.as_deref())
    }

    /// Takes the layer with this number in; see [`LayerIntake::take`].
    pub(crate) fn take(
        &mut self,
        at: usize,
        data: &mut dyn ContentStore,
        path: &Path,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(Tree, Option<String>), ImportError> {
        self.intake.take(self.layers[at].clone(), data, path, progress)
    }
}

/// Applies one layer, checks its digests, and gives the one of its unpacked bytes if that was asked for.
fn apply_layer(
    applier: &mut Applier<'_>,
    layer: Layer,
    budget: &Budget,
    read: &Arc<AtomicU64>,
) -> Result<Option<String>, ImportError> {
    let Layer { name, range, stored, diff_id } = layer;
    // A layer of an image is known by what it unpacks to.
    let hashed = Hashed { stored: stored.is_some(), unpacked: applier.whiteouts == Whiteouts::Keep };
    let entry_error = |error: TarError| ImportError::Entry {
        archive: name.clone(),
        entry: error.entry,
        problem: error.problem,
    };
    let rest = |e: io::Error| TarError { entry: "after its end".to_owned(), problem: read_problem(e) };
    let stream = Unpacked::new(range.counted_by(read), hashed).map_err(|e| entry_error(rest(e)))?;
    let mut stream = Budgeted { inner: stream, budget: budget.clone() };
    let applied = applier.apply(&mut stream).and_then(|()| {
        // To the end, so that checksums of the compression are seen too.
        io::copy(&mut stream, &mut io::sink()).map(drop).map_err(rest)
    });
    let damaged = match &applied {
        Ok(()) => true,
        // A damaged blob often fails as an archive first; its digest is the better answer. Not so
        // for what the import itself ran out of.
        Err(error) => !matches!(
            error.problem,
            EntryProblem::TooManyBytes { .. }
                | EntryProblem::TooManyFiles { .. }
                | EntryProblem::TooMuchMetadata { .. }
                | EntryProblem::ImageTooLarge
                | EntryProblem::DiskFull { .. }
                | EntryProblem::Write { .. }
        ),
    };
    let mut digests = Digests::default();
    if damaged && hashed != Hashed::default() {
        let found = stream.inner.finish(budget).map_err(|e| entry_error(rest(e)))?;
        // An archive that failed and is too large to hash fails as what it failed as.
        if let Some(found) = found.or_else(|| applied.is_ok().then(Digests::default)) {
            digests = found;
            for (is_asked, wanted, found) in
                [(hashed.stored, stored, &digests.stored), (hashed.unpacked, diff_id, &digests.unpacked)]
            {
                if let Some(wanted) = wanted.filter(|wanted| is_asked && found.as_ref() != Some(wanted)) {
                    let found = format!("sha256:{}", found.as_deref().unwrap_or_default());
                    return Err(ImportError::DigestMismatch { blob: format!("sha256:{wanted}"), found });
                }
            }
        }
    }
    applied.map_err(entry_error).map(|()| digests.unpacked)
}

fn resolve(source: &Path, work: &Path, limits: &ImportLimits) -> Result<Resolved, ImportError> {
    if source.is_dir() {
        let found = "is a directory without an OCI layout";
        if !source.join("oci-layout").is_file() {
            return Err(ImportError::NotAnArchive { path: source.to_owned(), found });
        }
        return images(&Archive::Directory(source.to_owned()), source);
    }
    let range = open_source(source, &Arc::default())?;
    let unreadable = |e| ImportError::Source { path: source.to_owned(), source: e };
    let compression = range.compression().map_err(unreadable)?;
    let is_images = if compression == Compression::None {
        looks_like_images(range.clone())
    } else {
        // Only as far as the first telling member; all of it is counted when it is imported.
        let inner = Unpacked::new(range.clone(), Hashed::default()).map_err(unreadable)?;
        looks_like_images(Budgeted { inner, budget: Budget::new(limits.max_bytes) })
    };
    let entry_error = |error: TarError| ImportError::Entry {
        archive: source.display().to_string(),
        entry: error.entry,
        problem: error.problem,
    };
    let is_images = is_images.map_err(|error| match error.problem {
        EntryProblem::BadHeader { .. } | EntryProblem::Truncated if compression == Compression::None => {
            ImportError::NotAnArchive { path: source.to_owned(), found: "is no tar archive" }
        }
        _ => entry_error(error),
    })?;
    if !is_images {
        return Ok(root_file_system(source, range));
    }
    let plain = if compression == Compression::None {
        range
    } else {
        unpack_outer(range, work, limits).map_err(|problem| match problem {
            Outer::Work(path, e) => ImportError::write(&path, e),
            Outer::Source(e) => {
                entry_error(TarError { entry: "the whole of it".to_owned(), problem: read_problem(e) })
            }
        })?
    };
    match Members::index(&plain, limits.max_files).map_err(entry_error)? {
        Some(members) => images(&Archive::Tar(members), source),
        None => Ok(root_file_system(source, plain)),
    }
}

enum Outer {
    Work(PathBuf, io::Error),
    Source(io::Error),
}

/// Decompresses an archive whose members are needed out of order.
fn unpack_outer(range: FileRange, work: &Path, limits: &ImportLimits) -> Result<FileRange, Outer> {
    let path = work.join("archive.tar");
    let on_work = |e| Outer::Work(path.clone(), e);
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).map_err(on_work)?;
    let inner = Unpacked::new(range, Hashed::default()).map_err(Outer::Source)?;
    let mut stream = Budgeted { inner, budget: Budget::new(limits.max_bytes) };
    let mut buffer = vec![0; 256 << 10];
    loop {
        match stream.read(&mut buffer).map_err(Outer::Source)? {
            0 => break,
            got => file.write_all(&buffer[..got]).map_err(on_work)?,
        }
    }
    FileRange::whole(file).map_err(on_work)
}

fn root_file_system(source: &Path, range: FileRange) -> Resolved {
    let layer = Layer { name: source.display().to_string(), range, stored: None, diff_id: None };
    Resolved { layers: vec![layer], config: ImageConfig::of_this_host(), whiteouts: Whiteouts::None }
}

fn images(archive: &Archive, source: &Path) -> Result<Resolved, ImportError> {
    let architecture = oci::host_architecture();
    // Newer `docker save` archives are both; the OCI side has digests for everything.
    let is_oci = archive.open("index.json")?.is_some();
    let is_docker = archive.open("manifest.json")?.is_some();
    let (layers, config) = match (is_oci, is_docker) {
        (true, _) => oci::resolve(archive, architecture)?,
        (false, true) => docker::resolve(archive, architecture)?,
        (false, false) => {
            let found = "has blobs of images, but neither index.json nor manifest.json";
            return Err(ImportError::NotAnArchive { path: source.to_owned(), found });
        }
    };
    Ok(Resolved { layers, config, whiteouts: Whiteouts::Keep })
}
