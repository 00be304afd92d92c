//! The records of one node, some hundred bytes each.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use dsec_model::{EndReason, NodeId, SandboxId, State};
use dsec_proto::rest::{Position, Sandbox, SandboxChange, SandboxChanges, SandboxOwner, SandboxShape};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::kept::Kept;

/// How far a node was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Upto {
    /// Which start of its edge counts.
    pub(super) epoch: String,
    /// Up to which of its numbers.
    pub(super) seq: u64,
}

/// What a node cannot have told.
#[derive(Debug, thiserror::Error)]
pub(super) enum Odd {
    /// Changes to what was never told.
    #[error("changes, where nothing was told before")]
    NotWhole,
    /// Changes since a number of another start.
    #[error("changes of another start of the edge")]
    OtherStart,
    /// A sandbox of another node.
    #[error("a sandbox that another node has: {0}")]
    OtherNode(SandboxId),
    /// A place that its list does not have.
    #[error("sandbox {0} is of an owner or a shape that is not in the answer")]
    NoSuchPlace(SandboxId),
}

/// A node's sandboxes, in the order of lists.
#[derive(Debug)]
pub(super) struct Table {
    node: NodeId,
    upto: Upto,
    records: BTreeMap<Key, Record>,
}

/// When a sandbox was created, and the random part of its id: the rest of the id is its node's.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key(Reverse<u64>, Box<str>);

impl Key {
    fn of(created_ms: u64, id: &SandboxId) -> Self {
        Self(Reverse(created_ms), id.random().into())
    }
}

/// What is kept of a sandbox.
#[derive(Debug)]
pub(super) struct Record {
    owner: Arc<SandboxOwner>,
    /// A [`SandboxShape`], as JSON.
    shape: Arc<str>,
    /// As JSON; none: too many to be told.
    labels: Option<Arc<str>>,
    /// As JSON.
    reason: Option<Arc<str>>,
    /// 0: it did not come to that.
    running_ms: u64,
    ended_ms: u64,
    state: State,
}

/// A label as it is in the JSON of all: `"key":"value"`. No other label's text has that in it, since quotes within are escaped.
pub(super) struct LabelText(String);

impl LabelText {
    pub(super) fn of((key, value): &(String, String)) -> Self {
        Self(format!("{}:{}", text(key), text(value)))
    }
}

impl Record {
    /// Whose it is.
    pub(super) fn owner(&self) -> &Arc<SandboxOwner> {
        &self.owner
    }

    /// Its state when its node was last heard of.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Whether it has all of these labels; none: they are too many to be told.
    pub(super) fn has_labels(&self, labels: &[LabelText]) -> Option<bool> {
        let all = self.labels.as_deref()?;
        Some(labels.iter().all(|LabelText(label)| all.contains(label)))
    }
}

impl Table {
    /// Of a node that has told nothing yet.
    pub(super) fn new(node: NodeId) -> Self {
        Self { node, upto: Upto::default(), records: BTreeMap::new() }
    }

    /// How far the node was read.
    pub(super) fn upto(&self) -> &Upto {
        &self.upto
    }

    /// Takes an answer in. Returns how far the node is read with it.
    ///
    /// # Errors
    /// It cannot be. Nothing of it is taken in.
    pub(super) fn take_in(&mut self, changes: SandboxChanges, kept: &Kept) -> Result<Upto, Odd> {
        let SandboxChanges { epoch, seq, whole, owners, shapes, changed, forgotten, more: _ } = changes;
        if !whole && epoch != self.upto.epoch {
            return Err(Odd::OtherStart);
        }
        let ids = changed.iter().map(|change| &change.id).chain(forgotten.iter().map(|gone| &gone.id));
        if let Some(id) = ids.into_iter().find(|id| id.node() != self.node.as_str()) {
            return Err(Odd::OtherNode(id.clone()));
        }
        let is_there = |change: &&SandboxChange| change.owner < owners.len() && change.shape < shapes.len();
        if let Some(change) = changed.iter().find(|change| !is_there(change)) {
            return Err(Odd::NoSuchPlace(change.id.clone()));
        }
        let owners: Vec<Arc<SandboxOwner>> = owners.into_iter().map(|owner| kept.owners.get(owner)).collect();
        let shapes: Vec<Arc<str>> = shapes.iter().map(|shape| kept.texts.get(text(shape))).collect();
        for change in changed {
            let SandboxChange { id, owner, shape, labels, state, reason, created_ms, running_ms, ended_ms } =
                change;
            let record = Record {
                owner: Arc::clone(&owners[owner]),
                shape: Arc::clone(&shapes[shape]),
                labels: labels.map(|labels| kept.texts.get(text(&labels))),
                reason: reason.map(|reason| kept.texts.get(text(&reason))),
                running_ms: running_ms.unwrap_or_default(),
                ended_ms: ended_ms.unwrap_or_default(),
                state,
            };
            self.records.insert(Key::of(created_ms, &id), record);
        }
        for gone in forgotten {
            self.records.remove(&Key::of(gone.created_ms, &gone.id));
        }
        self.upto = Upto { epoch, seq };
        Ok(self.upto.clone())
    }

    /// All of them, the newest first, each with when it was created, Unix ms.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, &Record)> {
        self.records.iter().map(|(Key(Reverse(created_ms), _), record)| (*created_ms, record))
    }

    /// Its node.
    pub(super) fn node(&self) -> &NodeId {
        &self.node
    }

    /// Those that are taken, at most `max`, after one place in the order of lists and before another.
    pub(super) fn page(
        &self,
        after: Option<&Position>,
        before: Option<&Position>,
        max: usize,
        takes: impl Fn(&Record) -> bool,
    ) -> Vec<Position> {
        let first = after
            .map_or(Bound::Unbounded, |Position(created, _)| Bound::Included(Key(*created, Box::default())));
        self.records
            .range((first, Bound::Unbounded))
            // Most are told by their time alone.
            .take_while(|(key, _)| before.is_none_or(|Position(created, _)| key.0 <= *created))
            .filter(|(_, record)| takes(record))
            .filter_map(|(key, _)| Some(Position(key.0, self.id(key)?)))
            .skip_while(|position| after.is_some_and(|after| position <= after))
            .take_while(|position| before.is_none_or(|before| position < before))
            .take(max)
            .collect()
    }

    fn id(&self, key: &Key) -> Option<SandboxId> {
        SandboxId::new(&self.node, &key.1).ok()
    }

    /// The record of a sandbox, in so far as it is kept.
    pub(super) fn sandbox(&self, id: &SandboxId) -> Option<Sandbox> {
        // When it was created is not in its id; a node has some thousands.
        let (key, record) = self.records.iter().find(|(key, _)| &*key.1 == id.random())?;
        self.shown(key, record)
    }

    /// The same, where its place in the order of lists is known.
    pub(super) fn sandbox_at(&self, Position(created, id): &Position) -> Option<Sandbox> {
        let (key, record) = self.records.get_key_value(&Key::of(created.0, id))?;
        self.shown(key, record)
    }

    fn shown(&self, key: &Key, record: &Record) -> Option<Sandbox> {
        let SandboxShape { image, image_digest, limits, init_user } = parsed(&record.shape)?;
        let given = |ms: u64| Some(ms).filter(|ms| *ms > 0);
        let created_ms = key.0.0;
        Some(Sandbox {
            id: self.id(key)?,
            state: record.state,
            reason: record.reason.as_deref().and_then(parsed::<EndReason>),
            lost: None,
            backend: record.owner.backend.clone(),
            image,
            image_digest,
            layers: Vec::new(),
            node: self.node.to_string(),
            project: record.owner.project.clone(),
            limits,
            init_user,
            task_id: record.owner.task_id.clone(),
            labels: record.labels.as_deref().and_then(parsed).unwrap_or_default(),
            created_ms,
            running_ms: given(record.running_ms),
            ended_ms: given(record.ended_ms),
            last_active_ms: created_ms.max(record.running_ms).max(record.ended_ms),
            pauses: None,
            usage: None,
            launch_phases: Vec::new(),
            first_exec: None,
        })
    }
}

fn text(thing: &impl Serialize) -> String {
    // Texts and numbers, which always can be written.
    serde_json::to_string(thing).unwrap_or_default()
}

fn parsed<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}
