//! The ways to make a layer.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use crate::config::ImageConfig;
use crate::erofs::{AppendError, BlobRef, Content, LayerTree, Timestamp, Tree};
use crate::error::ImportError;
use crate::intake::{ArchiveLayers, Layer, LayerIntake};
use crate::limits::{ImportLimits, ImportPhase, ImportProgress};

use super::attributes::Source;
use super::blob::{BlobWriter, BuiltBlob, Written};
use super::directory::{Contents, Failed, Intake, Taken};
use super::files::{Donors, FileIndex};
use super::pack::PackSink;
use super::previous::{Kept, Previous};
use super::rules::{LeftOut, Rules};

/// Entries of a directory between two reports of progress.
const REPORT_EVERY: u64 = 1024;

/// A layer that has been made. Its packs have been handed over; the rest is for the caller to keep.
#[derive(Debug)]
pub struct BuiltLayer {
    /// Its metadata; [`LayerTree::encode`] makes the image.
    pub layer: LayerTree,
    /// Its own blob, unless all of its content was stored before.
    pub blob: Option<BuiltBlob>,
    /// Its files, to be a donor of later layers.
    pub files: FileIndex,
    /// SHA-256 of the archive it was made of, unpacked, in hex: what OCI calls its diff id. Only for layers of images.
    pub diff_id: Option<String>,
    /// Sum of the sizes of its regular files in bytes, holes included, hard links once.
    pub content_bytes: u64,
}

/// What making a layer needs.
pub struct Workshop<'a> {
    /// Where the plain file of the blob is made; it must not be there yet.
    pub blob_path: &'a Path,
    /// Layers whose content is not stored again.
    pub donors: Donors,
    /// Where packs go.
    pub sink: &'a mut dyn PackSink,
    /// Told every few megabytes.
    pub progress: &'a mut dyn FnMut(ImportProgress),
}

/// A source of one or more layers: a root file system as tar, an OCI layout, or a `docker save` archive.
pub struct ArchiveSource(ArchiveLayers);

impl ArchiveSource {
    /// Looks into `source`. One of images that is compressed as a whole is unpacked into the directory `work`, which
    /// the caller empties when all layers are made.
    ///
    /// # Errors
    /// [`ImportError`]
    pub fn open(source: &Path, work: &Path, limits: &ImportLimits) -> Result<Self, ImportError> {
        ArchiveLayers::open(source, work, limits).map(Self)
    }

    /// How programs start in it.
    pub fn config(&self) -> &ImageConfig {
        self.0.config()
    }

    /// The diff ids of its layers, lowest first, as far as the source says them. A layer whose id is known from before
    /// need not be made: a source that says another one's gets that one's content.
    pub fn diff_ids(&self) -> Vec<Option<String>> {
        self.0.diff_ids().map(|id| id.map(str::to_owned)).collect()
    }

    /// Makes the layer with this number. Whiteouts are kept; parents and hard link targets that only layers below have
    /// are marked for [`super::merge()`], without which the layers of an image are not to be mounted.
    ///
    /// # Errors
    /// [`ImportError`]: also if the layer is not what its digests say.
    ///
    /// # Panics
    /// There is no layer with this number.
    pub fn build(&mut self, number: usize, workshop: Workshop<'_>) -> Result<BuiltLayer, ImportError> {
        let Workshop { blob_path, donors, sink, progress } = workshop;
        let mut writer = writer(blob_path, donors, sink)?;
        let (tree, diff_id) = self.0.take(number, &mut writer, blob_path, progress)?;
        Ok(BuiltLayer { diff_id, ..finish(tree, writer)?.0 })
    }
}

/// Layers of one image that come one at a time, each as a file: of a registry.
pub struct LayerSource(LayerIntake);

impl LayerSource {
    /// For layers that are `stored_bytes` together as they are stored; that is for the progress alone.
    pub fn new(stored_bytes: u64, limits: &ImportLimits) -> Self {
        Self(LayerIntake::of_image(stored_bytes, limits))
    }

    /// Makes the layer that is in `file`, a tar archive, plain or compressed with gzip, zstd or xz. Its bytes as they are stored
    /// are not checked. As [`ArchiveSource::build`]. `name` is for errors.
    ///
    /// # Errors
    /// [`ImportError`]: also if it does not unpack to what `diff_id`, `sha256:` and 64 digits, says.
    pub fn build(
        &mut self,
        name: &str,
        file: &Path,
        diff_id: &str,
        workshop: Workshop<'_>,
    ) -> Result<BuiltLayer, ImportError> {
        let layer = Layer::of_file(name, file, diff_id)?;
        let Workshop { blob_path, donors, sink, progress } = workshop;
        let mut writer = writer(blob_path, donors, sink)?;
        let (tree, diff_id) = self.0.take(layer, &mut writer, blob_path, progress)?;
        Ok(BuiltLayer { diff_id, ..finish(tree, writer)?.0 })
    }
}

/// Makes a layer of a directory of the host. No link in it is followed, and no other file system in it gone into.
///
/// # Errors
/// [`ImportError`]
pub fn from_directory(
    source: &Path,
    limits: &ImportLimits,
    workshop: Workshop<'_>,
) -> Result<BuiltLayer, ImportError> {
    let upper = Upper {
        path: source,
        previous: &Previous::default(),
        rules: &Rules::default(),
        moment: Timestamp::default(),
        until: None,
    };
    let Workshop { blob_path, donors, sink, progress } = workshop;
    let mut reader = UpperReader::begin(blob_path, donors, sink)?;
    reader.take(&upper, Source::Plain, limits, progress)?;
    reader.finish().map(|packed| packed.built)
}

/// The upper directory of an overlay that stands still: of a snapshot, or of a sandbox none of whose processes runs.
pub struct Upper<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// What the last pack of the same directory, or of an earlier snapshot of it, gave.
    pub previous: &'a Previous,
    /// What is left out or must not be there.
    pub rules: &'a Rules,
    /// When nothing in it has changed any more, by the clock that dates its files; the earliest time if it is not known.
    pub moment: Timestamp,
    /// By when all of it must be read, if it does not stand still for long.
    pub until: Option<Instant>,
}

/// A layer made of an upper directory.
#[derive(Debug)]
pub struct PackedUpper {
    /// The layer.
    pub built: BuiltLayer,
    /// For the next pack of the directory.
    pub previous: Previous,
    /// What rules left out.
    pub left_out: Vec<LeftOut>,
}

/// Makes a layer of an upper directory. Ids stay as they are on disk. Of what has not changed since the previous pack
/// nothing is read, and of what rules leave out nothing is opened.
///
/// A directory that was renamed points at its old place; [`super::resolve_redirects`] must be used, with the merged
/// layers below, before the layer is kept.
pub struct UpperReader<'s> {
    writer: BlobWriter<'s>,
    /// Files that have been read.
    read: HashMap<u64, Kept>,
    taken: Taken,
    moment: Timestamp,
}

impl<'s> UpperReader<'s> {
    /// Begins a blob at `blob_path`, where nothing must be yet. Content that `donors` have is not stored again; packs go to
    /// `sink`.
    ///
    /// # Errors
    /// [`ImportError`]
    pub fn begin(blob_path: &Path, donors: Donors, sink: &'s mut dyn PackSink) -> Result<Self, ImportError> {
        let writer = writer(blob_path, donors, sink)?;
        Ok(Self { writer, read: HashMap::new(), taken: Taken::default(), moment: Timestamp::default() })
    }

    /// Reads all of it; afterwards the directory is needed no more. After an error it may be read again, at another place
    /// too, if it has not changed: files that have been read are known.
    ///
    /// # Errors
    /// [`ImportError`]; its `Entry` with [`crate::EntryProblem::Denied`] if a rule denies what is there, with
    /// [`crate::EntryProblem::Late`] if time ran out.
    pub fn read(&mut self, upper: &Upper<'_>, limits: &ImportLimits) -> Result<(), ImportError> {
        self.take(upper, Source::Upper, limits, &mut |_| ())
    }

    fn take(
        &mut self,
        upper: &Upper<'_>,
        kind: Source,
        limits: &ImportLimits,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<(), ImportError> {
        let mut told = 0;
        let mut tick = |files| {
            // A directory's size is not known before all of it has been seen.
            if files >= told + REPORT_EVERY {
                told = files;
                progress(ImportProgress {
                    phase: ImportPhase::Reading,
                    source_bytes: 0,
                    source_bytes_total: 0,
                    files,
                });
            }
        };
        self.writer.hurry(upper.until.is_some());
        let content = Some((&mut self.writer, &mut self.read));
        self.taken = intake(upper, kind, limits, content, &mut tick)?;
        self.moment = upper.moment;
        Ok(())
    }

    /// Packs what is still to be packed.
    ///
    /// # Errors
    /// [`ImportError`]
    pub fn finish(self) -> Result<PackedUpper, ImportError> {
        let Taken { tree, last_change, left_out } = self.taken;
        let (built, blobs) = finish(tree, self.writer)?;
        let previous = Previous::new(blobs, self.read, last_change.max(self.moment));
        Ok(PackedUpper { built, previous, left_out })
    }
}

/// Looks at names alone for what rules deny, so that nothing of what would be refused is stored.
///
/// # Errors
/// As [`UpperReader::read`].
pub fn look_for_denied(upper: &Upper<'_>, limits: &ImportLimits) -> Result<(), ImportError> {
    intake(upper, Source::Upper, limits, None, &mut |_| ()).map(drop)
}

fn intake(
    upper: &Upper<'_>,
    source: Source,
    limits: &ImportLimits,
    content: Option<Contents<'_, '_>>,
    tick: &mut dyn FnMut(u64),
) -> Result<Taken, ImportError> {
    let unreadable = |e| ImportError::Source { path: upper.path.to_owned(), source: e };
    let root = File::open(upper.path).map_err(unreadable)?;
    if !root.metadata().map_err(unreadable)?.is_dir() {
        let found = "is no directory";
        return Err(ImportError::NotAnArchive { path: upper.path.to_owned(), found });
    }
    let Upper { previous, rules, until, .. } = *upper;
    let (limits, files, bytes, metadata_bytes) = (*limits, 0, 0, 0);
    let intake =
        Intake { source, limits, content, previous, rules, until, tick, files, bytes, metadata_bytes };
    intake.take(OwnedFd::from(root)).map_err(|Failed { entry, problem }| ImportError::Entry {
        archive: upper.path.display().to_string(),
        entry,
        problem,
    })
}

fn writer<'s>(
    path: &Path,
    donors: Donors,
    sink: &'s mut dyn PackSink,
) -> Result<BlobWriter<'s>, ImportError> {
    BlobWriter::create(path, donors, sink).map_err(|e| ImportError::write(path, e))
}

/// Finishes the blob. Gives its numbers of blobs, which those of the tree still are, too.
fn finish(tree: Tree, writer: BlobWriter<'_>) -> Result<(BuiltLayer, Vec<BlobRef>), ImportError> {
    let path = writer.path().to_owned();
    let Written { blob, blobs, files } = writer.finish().map_err(|error| match error {
        AppendError::Write(e) => ImportError::write(&path, e),
        other => ImportError::Pack(other),
    })?;
    let content_bytes = tree.iter().map(|(_, inode)| match &inode.content {
        Content::File(data) => data.size(),
        _ => 0,
    });
    let content_bytes = content_bytes.sum();
    let layer = LayerTree { tree, blobs: blobs.clone() };
    Ok((BuiltLayer { layer, blob, files, diff_id: None, content_bytes }, blobs))
}
