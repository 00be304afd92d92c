//! From what a sandbox has written to a published layer.
//!
//! ```text
//! sandbox ──► upper ──rules──► tree, blob ──► redirects resolved ──► merged with what it started from ──► name
//!   stands      │                 ▲           against all below        (metadata alone)
//!   still       └── unchanged since the last pack, or in a layer below: pointed at where it is stored
//! ```
//!
//! The upper directory is read where it lies while the sandbox stands still. If that takes longer than it may, or a process could
//! change a file without its times telling the next pack, a snapshot of the same moment is read instead.
//!
//! | kind | its metadata has | where it lies again |
//! |---|---|---|
//! | `workspace` | the workspace, what was written | over the base, below toolkits |
//! | `snapshot` | workspace, toolkits, what was written | over the base, and over toolkits |
//! | `toolkit` | what was written | over the workspace |
//! | `base` | all | lowest |
//!
//! All is read by names looked up in open directories, and ids in it are those inside.

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_backend::{InPlace, Quiesce};
use dsec_image::build::{
    Denied, Donors, Effect, FileIndex, Hidden, LeftOut, MergeError, PackedUpper, Previous, Rules, Upper,
    UpperReader, add_up, has_redirects, look_for_denied, mark_whiteouts, merge, resolve_redirects, shadowed,
    sift,
};
use dsec_image::erofs::{Content as Entry, LayerTree, Timestamp};
use dsec_image::layer::{BlobId, Digest, LayerId, LayerKind, LayerRef, Manifest, Parent, ParentRole, Source};
use dsec_image::{EntryProblem, ImageConfig, ImportError, ImportLimits};
use dsec_model::ErrorKind;
use dsec_proto::rest::{self, ApiError, ImageSettings, LaunchPhase, Packed, Sandbox};
use dsec_store::StoreError;

use super::publish::{About, Session, Sink};
use super::work::room_for;
use super::{Layers, names, steps};
use crate::clock::micros;
use crate::error::{
    denied, internal, no_room_for_layer, not_running, pack_failed, snapshot_failed, store_failed,
};
use crate::sandbox::Grip;
use crate::sandbox::plan::env_over;
use crate::sandbox::record;

/// Bytes of file indexes of layers that are kept in memory for the next pack: of a million and a half files.
const DONORS_MAX: usize = 64 << 20;
/// What one file takes of that.
const DONOR_FILE: usize = 48;
/// Blobs from which on a pack stores anew what an earlier one of the sandbox has: each is a device of the mount.
const BLOBS_FULL: usize = 256;

/// How hard content is compressed: a pack holds up a sandbox's owner, and takes its CPU time from other sandboxes.
const ZSTD_LEVEL: i32 = 1;

/// How long its packs become: short, so that the store takes the first while the rest is compressed.
const PACK_SIZE: u32 = 8 << 20;

/// A pack that is asked for.
pub struct Pack {
    /// What the layer is for.
    pub kind: LayerKind,
    /// Its name, with a tag to put on it or a version to give it.
    pub name: Option<LayerRef>,
    /// The key of the recipe's step that it is found by.
    pub step: Option<Digest>,
    /// Of a base: what it says of itself, over what the sandbox's image says.
    pub config: ImageSettings,
    /// What is left out, and what is denied.
    pub rules: Rules,
    /// What the sandbox does meanwhile.
    pub quiesce: Quiesce,
    /// How long it may stand still for what it wrote to be read where it lies.
    pub still_max: Duration,
    /// The sandbox's record.
    pub sandbox: Arc<Sandbox>,
    /// Who asks.
    pub project: String,
    /// The node's state directory.
    pub state_dir: PathBuf,
}

/// File indexes of layers, the last used at the end.
#[derive(Default)]
pub(super) struct DonorCache(VecDeque<(LayerId, Arc<FileIndex>)>);

impl DonorCache {
    fn find(&mut self, id: &LayerId) -> Option<Arc<FileIndex>> {
        let at = self.0.iter().position(|(known, _)| known == id)?;
        let found = self.0.remove(at)?;
        let files = Arc::clone(&found.1);
        self.0.push_back(found);
        Some(files)
    }

    fn keep(&mut self, id: LayerId, files: &Arc<FileIndex>) {
        let size = |files: &FileIndex| files.len() * DONOR_FILE;
        self.0.push_back((id, Arc::clone(files)));
        while self.0.iter().map(|(_, files)| size(files)).sum::<usize>() > DONORS_MAX {
            self.0.pop_front();
        }
    }
}

/// A layer that the sandbox is made of.
struct Lower {
    id: LayerId,
    kind: LayerKind,
    manifest: Arc<Manifest>,
    files: Arc<FileIndex>,
}

/// Times the steps.
struct Clock {
    since: Instant,
    phases: Vec<LaunchPhase>,
}

impl Clock {
    fn lap(&mut self, name: &str) {
        self.phases.push(LaunchPhase { name: name.to_owned(), us: micros(self.since.elapsed()) });
        self.since = Instant::now();
    }
}

/// A pack at work.
struct Job<'a> {
    layers: &'a Layers,
    asked: &'a Pack,
    grip: &'a Grip,
    stop: &'a dyn Fn() -> bool,
    session: Session<'a>,
    /// The layer of the sandbox's last pack.
    earlier: Option<Manifest>,
    /// The end of the snapshot.
    dropping: Option<std::thread::JoinHandle<()>>,
    clock: Clock,
}

impl Layers {
    /// Packs what a sandbox has written and publishes it. Blocks; on a thread of a runtime that may. `stop` ends it early.
    ///
    /// # Errors
    /// The sandbox is gone or writes, a rule denies what is there, or the store cannot take it; no name has changed then.
    pub fn pack(&self, asked: &Pack, grip: &Grip, stop: &dyn Fn() -> bool) -> Result<Packed, ApiError> {
        let clock = Clock { since: Instant::now(), phases: Vec::new() };
        let session = Session::begin(self, "pack")?;
        let mut job = Job { layers: self, asked, grip, stop, session, earlier: None, dropping: None, clock };
        let packed = job.run();
        // A pack that has ended has left nothing.
        if job.dropping.take().is_some_and(|dropping| dropping.join().is_err()) {
            tracing::error!(sandbox_id = %asked.sandbox.id, "dropping a snapshot panicked");
        }
        job.session.end();
        packed
    }

    /// Where the files of a layer lie, which this node uses.
    fn donor(&self, session: &Session<'_>, id: LayerId) -> Result<Arc<FileIndex>, StoreError> {
        let cache = || self.donors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cache().find(&id) {
            return Ok(known);
        }
        let files = Arc::new(session.wait(session.lease().use_donor(&id))?.unwrap_or_default());
        cache().keep(id, &files);
        Ok(files)
    }

    /// A layer's metadata, which this node has in a file.
    fn tree(&self, session: &Session<'_>, lower: &Lower) -> Result<LayerTree, ApiError> {
        let bytes = match std::fs::read(self.meta.image(&lower.id)) {
            Ok(bytes) => bytes.into(),
            Err(_) => session
                .wait(session.store().metadata(&lower.manifest.metadata))
                .map_err(|e| store_failed(&e))?,
        };
        LayerTree::decode(&bytes).map_err(|e| internal("the metadata of a layer cannot be read", &e))
    }
}

impl Job<'_> {
    fn run(&mut self) -> Result<Packed, ApiError> {
        self.check_room()?;
        let lowers = self.lowers()?;
        let (previous, mut donors) = self.previous()?;
        donors.extend(lowers.iter().rev().map(|lower| Arc::clone(&lower.files)));
        self.clock.lap("prepare");
        let PackedUpper { built, previous, left_out } = self.content(&previous, donors)?;
        let (new_bytes, files) = (built.blob.as_ref().map_or(0, |blob| blob.index.size()), built.files);
        built.blob.into_iter().for_each(|blob| self.session.add(blob));
        let mut made = Made { left_out, under_toolkits: None };
        let tree = self.whole(built.layer, &lowers, &mut made)?;
        let merged = lowers.iter().filter(|lower| self.is_merged(lower.kind)).map(|lower| &*lower.files);
        let files = FileIndex::joined(std::iter::once(&files).chain(merged));
        self.clock.lap("metadata");
        let (id, manifest) = self.publish(&tree, &files, &lowers)?;
        self.clock.lap("publish");
        self.session.keep_content();
        // A process that went on may have been within a write, whose time is that of its beginning.
        if self.asked.quiesce != Quiesce::GoOn {
            self.note_previous(id, &previous);
        }
        self.clock.lap("keep");
        let (scrubbed, excluded) =
            made.left_out.into_iter().partition::<Vec<_>, _>(|l| l.effect == Effect::Scrub);
        Ok(Packed {
            layer: self.layers.show(self.shown_name(), &id, &manifest),
            new_bytes,
            stored_bytes: self.session.built_bytes() + manifest.metadata.size,
            scrubbed: scrubbed.into_iter().map(shown).collect(),
            excluded: excluded.into_iter().map(shown).collect(),
            under_toolkits: made.under_toolkits,
            phases: std::mem::take(&mut self.clock.phases),
        })
    }

    /// Whether the disk has room for all that the sandbox holds.
    fn check_room(&self) -> Result<(), ApiError> {
        let used = self.grip.with(|instance| instance.usage().disk_bytes).unwrap_or(0);
        room_for(&self.session.work().join("blob"), used).map_err(|e| match e.kind() {
            std::io::ErrorKind::StorageFull => no_room_for_layer(&e),
            _ => internal("the disk of the node cannot be looked at", &e),
        })
    }

    /// What the sandbox is made of, the lowest first.
    fn lowers(&self) -> Result<Vec<Lower>, ApiError> {
        let mut lowers = Vec::new();
        for layer in &self.asked.sandbox.layers {
            let id: LayerId =
                layer.id.parse().map_err(|e| internal("the sandbox's record names no layers", &e))?;
            let manifest = self.session.wait(self.layers.manifest(&id))?;
            let files = self.layers.donor(&self.session, id).map_err(|e| store_failed(&e))?;
            // Not the manifest's kind: one layer may have names of several.
            let kind = LayerKind::ALL.into_iter().find(|kind| kind.as_str() == layer.kind);
            lowers.push(Lower { id, kind: kind.unwrap_or(manifest.kind), manifest, files });
        }
        Ok(lowers)
    }

    /// Whether the new layer has the metadata of a layer of this kind.
    fn is_merged(&self, kind: LayerKind) -> bool {
        match self.asked.kind {
            LayerKind::Toolkit => false,
            LayerKind::Workspace => matches!(kind, LayerKind::Workspace | LayerKind::Snapshot),
            LayerKind::Snapshot => kind != LayerKind::Base,
            LayerKind::Base => true,
        }
    }

    fn previous_file(&self) -> PathBuf {
        record::directory(&self.asked.state_dir, self.asked.sandbox.id.random()).join(record::PACKED)
    }

    /// What the last pack of this sandbox stored, as far as it is still there.
    fn previous(&mut self) -> Result<(Previous, Vec<Arc<FileIndex>>), ApiError> {
        let Some((id, previous)) = std::fs::read(self.previous_file()).ok().and_then(|bytes| {
            let (id, table) = bytes.split_at_checked(64)?;
            let id: LayerId = std::str::from_utf8(id).ok()?.parse().ok()?;
            Some((id, Previous::decode(table).ok()?))
        }) else {
            return Ok(Default::default());
        };
        let found = self.session.wait(async {
            let manifest = self.session.lease().use_layer(&id).await?;
            let files = self.session.lease().use_donor(&id).await?;
            Ok((manifest, files.unwrap_or_default()))
        });
        let (manifest, files) = match found {
            Ok(found) => found,
            Err(error @ StoreError::NotFound { .. }) => {
                tracing::info!(layer = %id, %error, "the sandbox's last pack is gone");
                return Ok(Default::default());
            }
            Err(error) => return Err(store_failed(&error)),
        };
        if manifest.blobs.len() >= BLOBS_FULL {
            return Ok(Default::default());
        }
        let previous = previous.within(|blob| manifest.blobs.iter().any(|kept| kept.id == blob.id));
        self.earlier = Some(manifest);
        Ok((previous, vec![Arc::new(files)]))
    }

    /// Makes a layer of what was written: read where it lies while the sandbox stands still, or from a snapshot if that takes
    /// longer than it may.
    fn content(&mut self, previous: &Previous, donors: Vec<Arc<FileIndex>>) -> Result<PackedUpper, ApiError> {
        let moment = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let moment = Timestamp { seconds: moment.as_secs() as i64, nanoseconds: moment.subsec_nanos() };
        let Self { session, clock, asked, grip, stop, dropping, .. } = self;
        let blob = session.work().join("blob");
        session.with_packs(|_, sink| {
            let mut sink = Stoppable { sink, stop: *stop };
            let begun = UpperReader::begin(&blob, Donors::new(donors), &mut sink);
            let mut reader = begun.map_err(|e| pack_failed(&e, &blob))?;
            let mut is_looked_at = !asked.rules.denies();
            let mut read = |path: &Path, until| {
                let (limits, rules) = (ImportLimits::default(), &asked.rules);
                let upper = Upper { path, previous, rules, moment, until };
                // Of a snapshot that is read because time ran out the names are the same.
                if !is_looked_at {
                    look_for_denied(&upper, &limits)?;
                    is_looked_at = true;
                }
                reader.read(&upper, &limits)
            };
            let mut in_place = None;
            let reading: InPlace<'_> = Box::new(|upper: &Path| {
                let done = read(upper, Some(Instant::now() + asked.still_max));
                let is_late = matches!(&done, Err(ImportError::Entry { problem: EntryProblem::Late, .. }));
                in_place = (!is_late).then(|| done.map_err(|e| pack_failed(&e, upper)));
                !is_late
            });
            let snapshot = match grip.with(|instance| instance.snapshot(asked.quiesce, reading)) {
                None => return Err(not_running(&asked.sandbox)),
                Some(Err(error)) => return Err(snapshot_failed(&error)),
                Some(Ok(snapshot)) => snapshot,
            };
            clock.lap(if snapshot.is_some() { "snapshot" } else { "read" });
            match &snapshot {
                None => in_place.unwrap_or_else(|| Err(nothing_read()))?,
                Some(snapshot) => {
                    read(snapshot.upper(), None).map_err(|e| pack_failed(&e, snapshot.upper()))?
                }
            }
            let packed = reader.finish().map_err(|e| pack_failed(&e, &blob))?;
            clock.lap("content");
            // All that it has in memory goes with it, which takes a while.
            *dropping = snapshot.map(|snapshot| std::thread::spawn(move || drop(snapshot)));
            Ok(packed)
        })
    }

    /// The whole of the new layer: what was written, with what it is merged with.
    fn whole(&mut self, upper: LayerTree, lowers: &[Lower], made: &mut Made) -> Result<LayerTree, ApiError> {
        let most = ImportLimits::default().max_files;
        let trees_of = |wanted: &dyn Fn(LayerKind) -> bool| {
            let wanted = lowers.iter().filter(|lower| wanted(lower.kind));
            wanted.map(|lower| self.layers.tree(&self.session, lower)).collect::<Result<Vec<_>, _>>()
        };
        let upper = if has_redirects(&upper.tree) {
            let all = trees_of(&|_| true)?;
            let below =
                merge(&all.iter().collect::<Vec<_>>(), Hidden::Drop, most).map_err(|e| does_not_fit(&e))?;
            resolve_redirects(&upper, &below, most).map_err(|e| does_not_fit(&e))?
        } else {
            upper
        };
        if self.asked.kind == LayerKind::Workspace {
            let toolkits = trees_of(&|kind| kind == LayerKind::Toolkit)?;
            made.under_toolkits = under_toolkits(&upper, &toolkits)?;
        }
        let scrub = self.asked.rules.of(&[Effect::Scrub]);
        let mut merged = Vec::new();
        for lower in lowers.iter().filter(|lower| self.is_merged(lower.kind)) {
            let mut tree = self.layers.tree(&self.session, lower)?;
            if matches!(lower.kind, LayerKind::Workspace | LayerKind::Snapshot) {
                add_up(&mut made.left_out, sift(&mut tree, &scrub).map_err(|e| denied(&e))?);
            }
            merged.push(tree);
        }
        let mut tree = if merged.is_empty() {
            upper
        } else {
            let hidden = if self.asked.kind == LayerKind::Base { Hidden::Drop } else { Hidden::Keep };
            let all: Vec<_> = merged.iter().chain([&upper]).collect();
            merge(&all, hidden, most).map_err(|e| does_not_fit(&e))?
        };
        // What came with renamed directories and from below has not been looked at yet.
        sift(&mut tree, &self.asked.rules.of(&[Effect::Deny])).map_err(|e: Denied| denied(&e))?;
        mark_whiteouts(&mut tree);
        Ok(tree)
    }

    fn publish(
        &mut self,
        tree: &LayerTree,
        files: &FileIndex,
        lowers: &[Lower],
    ) -> Result<(LayerId, Manifest), ApiError> {
        let asked = self.asked;
        let mut parents: Vec<Parent> = Vec::new();
        // Files may point into any of them.
        let pointed: HashSet<BlobId> = tree.blobs.iter().map(|blob| blob.id).collect();
        for manifest in self.earlier.iter().chain(lowers.iter().map(|lower| &*lower.manifest)) {
            self.session.know(manifest, |blob| pointed.contains(blob)).map_err(|e| store_failed(&e))?;
        }
        for lower in lowers {
            let role = if self.is_merged(lower.kind) { ParentRole::Merged } else { ParentRole::Below };
            parents.push(Parent { layer: lower.id, role });
        }
        let size = |content: &Entry| if let Entry::File(data) = content { data.size() } else { 0 };
        let about = About {
            kind: asked.kind,
            parents,
            source: Source::Sandbox {
                id: asked.sandbox.id.clone(),
                task: asked.sandbox.task_id.clone(),
                project: asked.project.clone(),
            },
            diff_ids: Vec::new(),
            content_bytes: tree.tree.iter().map(|(_, inode)| size(&inode.content)).sum(),
        };
        let mut draft = self.session.draft(tree, about)?;
        if asked.kind == LayerKind::Base {
            let config = lowers.iter().find_map(|lower| lower.manifest.config.clone());
            draft.manifest.config = config.map(|config| self.config_over(config));
        }
        let manifest = draft.manifest.clone();
        let id = match &asked.name {
            Some(name) => self.session.name(draft, files, name)?,
            None => self.session.finish(draft, files).map_err(|e| store_failed(&e))?,
        };
        if let Some(step) = &asked.step {
            self.session.wait(self.layers.store()?.put_step(step, id)).map_err(|e| store_failed(&e))?;
        }
        Ok((id, manifest))
    }

    fn config_over(&self, mut config: ImageConfig) -> ImageConfig {
        let asked = &self.asked.config;
        config.env = env_over(&config, &asked.env);
        config.working_dir = asked.working_dir.clone().or(config.working_dir);
        config.user = asked.user.clone().or(config.user);
        config
    }

    fn shown_name(&self) -> String {
        match (&self.asked.name, &self.asked.step) {
            (Some(name), _) => names::shown(name),
            (None, Some(step)) => steps::shown(step),
            (None, None) => String::new(),
        }
    }

    /// Writes down what this pack stored. While the sandbox is held its directory stays, and when it ends the file goes too.
    fn note_previous(&self, id: LayerId, previous: &Previous) {
        let file = self.previous_file();
        let bytes = [id.to_string().as_bytes(), &previous.encode()].concat();
        let written = self.grip.with(|_| {
            let draft = file.with_extension("new");
            std::fs::write(&draft, bytes).and_then(|()| std::fs::rename(&draft, &file))
        });
        if let Some(Err(error)) = written {
            tracing::warn!(sandbox_id = %self.asked.sandbox.id, %error, "the next pack will read everything again");
        }
    }
}

/// What is known of the layer besides itself.
struct Made {
    left_out: Vec<LeftOut>,
    under_toolkits: Option<rest::LeftOut>,
}

/// Takes no more packs when the node goes down.
struct Stoppable<'a, 's> {
    sink: &'a mut Sink<'s>,
    stop: &'a dyn Fn() -> bool,
}

impl dsec_image::build::PackSink for Stoppable<'_, '_> {
    fn pack(&mut self, id: dsec_image::layer::PackId, bytes: Vec<u8>) -> std::io::Result<()> {
        if (self.stop)() {
            return Err(std::io::Error::other("the node is going down"));
        }
        self.sink.pack(id, bytes)
    }

    fn level(&self) -> i32 {
        ZSTD_LEVEL
    }

    fn pack_size(&self) -> u32 {
        PACK_SIZE
    }
}

fn nothing_read() -> ApiError {
    internal("the sandbox could not be packed", &std::io::Error::other("its backend gave nothing to read"))
}

fn under_toolkits(upper: &LayerTree, toolkits: &[LayerTree]) -> Result<Option<rest::LeftOut>, ApiError> {
    if toolkits.is_empty() {
        return Ok(None);
    }
    let above = merge(&toolkits.iter().collect::<Vec<_>>(), Hidden::Keep, ImportLimits::default().max_files)
        .map_err(|e| does_not_fit(&e))?;
    let found = shadowed(upper, &above);
    let left_out = rest::LeftOut {
        rule: "toolkits".to_owned(),
        files: found.files,
        bytes: found.bytes,
        paths: found.paths,
    };
    Ok((found.files > 0).then_some(left_out))
}

fn shown(left_out: LeftOut) -> rest::LeftOut {
    let LeftOut { effect: _, rule, files, bytes, paths } = left_out;
    rest::LeftOut { rule, files, bytes, paths }
}

fn does_not_fit(error: &MergeError) -> ApiError {
    match error {
        MergeError::TooManyBlobs | MergeError::TooManyFiles { .. } => {
            ApiError::new(ErrorKind::TooLarge, format!("the layer cannot be made: {error}"))
        }
        _ => internal("what the sandbox wrote does not fit the layers below it", error),
    }
}
