//! From an archive, or an image of a registry, to a published layer whose content is on this node already.
//!
//! ```text
//! origin ──► part 0 ── known by its diff id? take it from the store ─┐
//!            part 1 ── else build it: blob, packs ──► store          ├─► merge ──► metadata, manifest, name
//!            ...                             └─► plain file ──► cache ┘
//! ```

use std::path::Path;

use dsec_image::build::{ArchiveSource, BuiltLayer, Donors, FileIndex, Hidden, Workshop, merge};
use dsec_image::erofs::LayerTree;
use dsec_image::layer::{LayerId, LayerKind, LayerRef, Manifest, Parent, ParentRole, Source};
use dsec_image::{ImageConfig, ImportLimits, ImportPhase, ImportProgress};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, Image};
use dsec_store::StoreError;

use super::publish::{About, Session, Sink};
use super::pull::Pull;
use super::{Layers, names};
use crate::error::{import_failed, store_failed};

/// An import that is asked for.
pub struct Import<'a> {
    /// What the layer is for.
    pub kind: LayerKind,
    /// Its name, with a tag to put on it or a version to give it.
    pub name: LayerRef,
    /// What it is made of.
    pub origin: Origin<'a>,
}

/// What a layer is made of.
pub enum Origin<'a> {
    /// An archive on this node.
    Archive {
        /// Where it is.
        path: &'a Path,
        /// Digest of it.
        digest: String,
        /// What the caller says it is.
        source: String,
    },
    /// An image of a registry.
    Registry(&'a Pull),
}

/// An origin that has been looked into: the archives in it, the lowest first.
pub(super) trait Parts {
    /// What each unpacks to, `sha256:` and 64 digits, as far as the origin says.
    fn diff_ids(&self) -> Vec<Option<String>>;
    /// Those that will be built, in this order; the others are here.
    fn begin(&mut self, missing: &[usize]);
    /// Builds one.
    fn build(&mut self, number: usize, workshop: Workshop<'_>) -> Result<BuiltLayer, ApiError>;
    /// How programs start in the whole.
    fn config(&self) -> ImageConfig;
    /// What the layer's record says of its origin.
    fn source(&self) -> Source;
}

/// The parts of an archive.
struct ArchiveParts<'a> {
    archive: ArchiveSource,
    path: &'a Path,
    digest: &'a str,
    source: &'a str,
}

impl Parts for ArchiveParts<'_> {
    fn diff_ids(&self) -> Vec<Option<String>> {
        self.archive.diff_ids().into_iter().map(|id| id.map(|digits| format!("sha256:{digits}"))).collect()
    }

    fn begin(&mut self, _: &[usize]) {}

    fn build(&mut self, number: usize, workshop: Workshop<'_>) -> Result<BuiltLayer, ApiError> {
        self.archive.build(number, workshop).map_err(|e| import_failed(&e, self.path, self.source))
    }

    fn config(&self) -> ImageConfig {
        self.archive.config().clone()
    }

    fn source(&self) -> Source {
        Source::Archive { name: self.source.to_owned(), digest: self.digest.to_owned() }
    }
}

impl Origin<'_> {
    /// Looks into it. What it needs on the disk is kept in the session's directory.
    fn open<'s>(&'s self, session: &Session<'_>) -> Result<Box<dyn Parts + 's>, ApiError> {
        match self {
            Self::Registry(pull) => Ok(Box::new(pull.open(session.work())?)),
            Self::Archive { path, digest, source } => {
                let archive = ArchiveSource::open(path, session.work(), &ImportLimits::default())
                    .map_err(|e| import_failed(&e, path, source))?;
                Ok(Box::new(ArchiveParts { archive, path, digest, source }))
            }
        }
    }
}

/// One archive of an image, as a layer of its own.
#[derive(Clone)]
struct Part {
    tree: LayerTree,
    /// Where its files lie.
    files: FileIndex,
    /// The published layer, of those that were known.
    known: Option<LayerId>,
    diff_id: Option<String>,
    content_bytes: u64,
}

/// All that an origin gave.
struct Made {
    parts: Vec<Part>,
    config: ImageConfig,
    source: Source,
}

/// An import at work.
struct Job<'a> {
    layers: &'a Layers,
    asked: &'a Import<'a>,
    session: Session<'a>,
}

impl Layers {
    /// Imports an archive and publishes it. Blocks, for minutes with a large one; on a thread of a runtime that may.
    ///
    /// # Errors
    /// The archive cannot be imported or the store cannot take it; no name has changed then.
    pub fn import(
        &self,
        asked: &Import<'_>,
        progress: &mut dyn FnMut(ImportProgress),
    ) -> Result<Image, ApiError> {
        let mut job = Job { layers: self, asked, session: Session::begin(self, "import")? };
        let imported = job.run(progress);
        job.session.end();
        imported
    }
}

impl Job<'_> {
    fn run(&mut self, progress: &mut dyn FnMut(ImportProgress)) -> Result<Image, ApiError> {
        let made = self.parts(progress)?;
        let (id, manifest) = self.publish(made)?;
        self.session.keep_content();
        Ok(self.layers.show(names::shown(&self.asked.name), &id, &manifest))
    }

    /// Makes or finds every part; on return all packs are in the store.
    fn parts(&mut self, progress: &mut dyn FnMut(ImportProgress)) -> Result<Made, ApiError> {
        let asked = self.asked;
        let made = self.session.with_packs(|session, sink| make_parts(asked, session, sink, progress));
        progress(ImportProgress {
            phase: ImportPhase::Sealing,
            source_bytes: 0,
            source_bytes_total: 0,
            files: 0,
        });
        made
    }

    fn publish(&mut self, made: Made) -> Result<(LayerId, Manifest), ApiError> {
        let Made { parts, config, source } = made;
        let is_image = parts.iter().any(|part| part.diff_id.is_some());
        let mut parents = Vec::new();
        if is_image {
            for part in &parts {
                let layer = self.publish_part(part, &source)?;
                parents.push(Parent { layer, role: ParentRole::Merged });
            }
        }
        let trees: Vec<&LayerTree> = parts.iter().map(|part| &part.tree).collect();
        let merged = merge(&trees, Hidden::Drop, ImportLimits::default().max_files).map_err(|e| {
            ApiError::new(ErrorKind::InvalidArgument, format!("the image's layers do not fit: {e}"))
        })?;
        let files = FileIndex::joined(parts.iter().map(|part| &part.files));
        let kind = self.asked.kind;
        let mut draft = self.session.draft(
            &merged,
            About {
                kind,
                parents,
                source,
                diff_ids: parts.iter().filter_map(|part| part.diff_id.clone()).collect(),
                content_bytes: parts.iter().map(|part| part.content_bytes).sum(),
            },
        )?;
        draft.manifest.config = (kind == LayerKind::Base).then_some(config);
        let manifest = draft.manifest.clone();
        let id = self.session.name(draft, &files, &self.asked.name)?;
        Ok((id, manifest))
    }

    /// Publishes a part for the next image that has it.
    fn publish_part(&mut self, part: &Part, source: &Source) -> Result<LayerId, ApiError> {
        if let Some(known) = part.known {
            return Ok(known);
        }
        let about = About {
            kind: LayerKind::Base,
            parents: Vec::new(),
            source: source.clone(),
            diff_ids: part.diff_id.iter().cloned().collect(),
            content_bytes: part.content_bytes,
        };
        let draft = self.session.draft(&part.tree, about)?;
        let published = self.session.finish(draft, &part.files).and_then(|id| {
            if let Some(diff_id) = &part.diff_id {
                self.session.wait(self.session.store().put_converted(diff_id, id))?;
            }
            Ok(id)
        });
        published.map_err(|e: StoreError| store_failed(&e))
    }
}

fn make_parts(
    asked: &Import<'_>,
    session: &mut Session<'_>,
    sink: &mut Sink<'_>,
    progress: &mut dyn FnMut(ImportProgress),
) -> Result<Made, ApiError> {
    let mut origin = asked.origin.open(session)?;
    let diff_ids = origin.diff_ids();
    let mut found: Vec<Option<Part>> =
        diff_ids.iter().map(|diff_id| known(session, diff_id.as_deref()?)).collect();
    // What an image has twice is built once.
    let first = |number: usize| match &diff_ids[number] {
        None => number,
        same => diff_ids.iter().position(|diff_id| diff_id == same).unwrap_or(number),
    };
    let missing: Vec<usize> =
        (0..found.len()).filter(|number| found[*number].is_none() && first(*number) == *number).collect();
    origin.begin(&missing);
    for number in missing {
        let blob_path = session.work().join(format!("blob-{number}"));
        let workshop =
            Workshop { blob_path: &blob_path, donors: Donors::default(), sink: &mut *sink, progress };
        let built = origin.build(number, workshop)?;
        let BuiltLayer { layer, blob, files, diff_id, content_bytes } = built;
        blob.into_iter().for_each(|blob| session.add(blob));
        let diff_id = diff_id.map(|digest| format!("sha256:{digest}"));
        found[number] = Some(Part { tree: layer, files, known: None, diff_id, content_bytes });
    }
    let mut parts: Vec<Part> = Vec::with_capacity(found.len());
    for (number, part) in found.into_iter().enumerate() {
        let part = if first(number) == number { part } else { parts.get(first(number)).cloned() };
        parts.extend(part);
    }
    Ok(Made { parts, config: origin.config(), source: origin.source() })
}

/// A part that was converted before and is still there. Whatever is wrong with it, it is made again.
fn known(session: &mut Session<'_>, diff_id: &str) -> Option<Part> {
    let found = session.wait(async {
        let Some(id) = session.store().converted(diff_id).await? else { return Ok(None) };
        let manifest = session.lease().use_layer(&id).await?;
        let metadata = session.store().metadata(&manifest.metadata).await?;
        let files = session.lease().use_donor(&id).await?.unwrap_or_default();
        Ok::<_, StoreError>(Some((id, manifest, metadata, files)))
    });
    let found = found
        .and_then(|found| found.map(|found| session.know(&found.1, |_| true).map(|()| found)).transpose());
    let (id, manifest, metadata, files) = match found {
        Ok(found) => found?,
        Err(error) => {
            tracing::info!(diff_id, error = &error as &dyn std::error::Error, "a layer is converted again");
            return None;
        }
    };
    let tree = LayerTree::decode(&metadata).ok()?;
    let content_bytes = manifest.facts.content_bytes;
    Some(Part { tree, files, known: Some(id), diff_id: Some(diff_id.to_owned()), content_bytes })
}
