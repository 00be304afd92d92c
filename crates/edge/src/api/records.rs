//! What control keeps of the node's sandboxes: their records as they change, and those that it asks for by their ids.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::http::StatusCode;
use dsec_proto::rest::{
    CHANGES_MAX, JSON_BODY_MAX, LABELS_TOLD_MAX, PAGE_MAX, Sandbox, SandboxChange, SandboxChanges,
    SandboxForgotten, SandboxList, SandboxOwner, SandboxShape, SandboxesById,
};
use serde::Deserialize;

use super::sandboxes::shown;
use super::{Answer, Caller, Json, Params, Shared, json};
use crate::error::invalid_field;
use crate::node::Node;
use crate::sandbox::Handle;

// A page of ids fits into a body.
const _: () = assert!(PAGE_MAX * 128 < JSON_BODY_MAX);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Since {
    /// The number that the answer before ended at; left out: everything.
    #[serde(default)]
    since: u64,
    /// Which start of the edge gave it.
    #[serde(default)]
    epoch: String,
}

/// What has changed since control last asked.
pub(super) async fn changes(State(node): Shared, Params(Since { since, epoch }): Params<Since>) -> Answer {
    let since = if epoch == node.instance { since } else { 0 };
    Ok(json(StatusCode::OK, &changes_since(&node, since)))
}

fn changes_since(node: &Node, since: u64) -> SandboxChanges {
    let page = {
        let mut journal = node.journal.lock().unwrap_or_else(PoisonError::into_inner);
        // Looked at under the lock, so that no older look is taken in after a newer one.
        let all = node.registry.all();
        journal.compare(all.iter().map(|handle| (&handle.id, (handle.created_ms, handle.state()))));
        journal.after(since, CHANGES_MAX)
    };
    let mut told = SandboxChanges {
        epoch: node.instance.clone(),
        seq: page.upto,
        more: page.more,
        whole: page.whole,
        ..SandboxChanges::default()
    };
    let forgotten = page.gone.into_iter().map(|(id, (created_ms, _))| SandboxForgotten { id, created_ms });
    told.forgotten = forgotten.collect();
    let (mut owners, mut shapes) = (Distinct::default(), Distinct::default());
    // One that is gone since it was looked at is told as that the next time.
    for handle in page.changed.iter().filter_map(|id| node.registry.find(id)) {
        told.changed.push(change(&handle.record(), &mut owners, &mut shapes));
    }
    (told.owners, told.shapes) = (owners.all, shapes.all);
    told
}

fn change(
    record: &Sandbox,
    owners: &mut Distinct<SandboxOwner, SandboxOwner>,
    shapes: &mut Distinct<(String, String, String), SandboxShape>,
) -> SandboxChange {
    let owner = SandboxOwner {
        project: record.project.clone(),
        task_id: record.task_id.clone(),
        backend: record.backend.clone(),
    };
    let shape = SandboxShape {
        image: record.image.clone(),
        image_digest: record.image_digest.clone(),
        limits: record.limits.clone(),
        init_user: record.init_user.clone(),
    };
    // Limits are no key, for their fraction of cores; the text of them is.
    let limits = serde_json::to_string(&shape.limits).unwrap_or_default();
    let told_by = (shape.image_digest.clone(), format!("{}\0{}", shape.image, shape.init_user), limits);
    let labels = serde_json::to_vec(&record.labels).map_or(0, |labels| labels.len());
    SandboxChange {
        id: record.id.clone(),
        owner: owners.place(owner.clone(), owner),
        shape: shapes.place(told_by, shape),
        labels: (labels <= LABELS_TOLD_MAX).then(|| record.labels.clone()),
        state: record.state,
        reason: record.reason.clone(),
        created_ms: record.created_ms,
        running_ms: record.running_ms,
        ended_ms: record.ended_ms,
    }
}

/// A list in which each thing is once, found by its key.
struct Distinct<K, T> {
    places: HashMap<K, usize>,
    all: Vec<T>,
}

impl<K, T> Default for Distinct<K, T> {
    fn default() -> Self {
        Self { places: HashMap::new(), all: Vec::new() }
    }
}

impl<K: Eq + Hash, T> Distinct<K, T> {
    fn place(&mut self, key: K, thing: T) -> usize {
        match self.places.entry(key) {
            Entry::Occupied(place) => *place.get(),
            Entry::Vacant(free) => {
                self.all.push(thing);
                *free.insert(self.all.len() - 1)
            }
        }
    }
}

/// The records of some sandboxes, in the order of their ids' asking, of those that the caller sees.
pub(super) async fn by_id(
    State(node): Shared,
    caller: Caller,
    Json(SandboxesById { ids, usage, content }): Json<SandboxesById>,
) -> Answer {
    if ids.len() > PAGE_MAX {
        let message = format!("{} ids are asked for; {PAGE_MAX} is the most", ids.len());
        return Err(invalid_field("ids", message).into());
    }
    let found: Vec<(Arc<Sandbox>, Arc<Handle>)> = ids
        .iter()
        .filter_map(|id| node.registry.find(id))
        .map(|handle| (handle.record(), handle))
        .filter(|(record, _)| caller.sees.has(&record.project))
        .collect();
    let sandboxes = shown(&node, found, usage, content).await?;
    Ok(json(StatusCode::OK, &SandboxList { sandboxes, next_cursor: None }))
}
