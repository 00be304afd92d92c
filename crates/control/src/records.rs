//! What this server knows of the sandboxes of all nodes: each node's records, as they were when it was last heard of.
//!
//! A node tells what has changed since it was last asked, once a second, and whenever a list wants to be sure. Nothing is kept: after a
//! start each node is read whole, in a second as a rule. A node that is silent keeps its records here, so that its sandboxes are told
//! as lost and not left out.

mod kept;
mod table;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use dsec_model::iam::Scope;
use dsec_model::{ErrorKind, NodeId, SandboxId, TaskId};
use dsec_proto::rest::{
    Filtered, NodeKnown, Position, Sandbox, SandboxChanges, SandboxFilter, SandboxOwner, StateCounts, Task,
};
use http::HeaderMap;

use crate::behalf::Behalf;
use crate::failure::Failure;
use crate::nodes::Node;
use crate::watcher::{ANSWER_WITHIN, Standing};
use kept::Kept;
use table::{LabelText, Table};

/// How often a node is asked; its moment is drawn anew each time, so that the nodes' answers do not come all at once.
const PERIOD: Duration = Duration::from_secs(1);
/// By how much of it, at most, that is earlier or later.
const JITTER: f64 = 0.2;
/// Answers that one node is read by at once: more sandboxes than any node has or remembers.
const ANSWERS_MAX: usize = 64;

/// Whose sandboxes are meant.
#[derive(Debug, Clone)]
pub struct Meant {
    /// Of this task; none: any.
    pub task: Option<TaskId>,
    /// In these projects.
    pub scope: Scope,
}

impl Meant {
    fn has(&self, owner: &SandboxOwner) -> bool {
        self.task.as_ref().is_none_or(|task| owner.task_id.as_ref() == Some(task))
            && self.scope.has(&owner.project)
    }
}

/// The records of all nodes, by the nodes' places.
#[derive(Default)]
pub struct Records {
    nodes: RwLock<Vec<Arc<OfNode>>>,
    kept: Kept,
}

/// The records of one node.
#[derive(Default)]
struct OfNode {
    told: Mutex<Told>,
    /// The turn of who reads, and when the last reading began that was read to its end.
    turn: tokio::sync::Mutex<Option<Instant>>,
}

/// What a node has told.
#[derive(Default)]
enum Told {
    /// Nothing yet.
    #[default]
    Nothing,
    /// Its edge is of a version that tells nothing.
    Never,
    /// Its sandboxes.
    Table(Table),
}

impl OfNode {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    /// A node at the next place.
    pub(crate) fn add(&self) {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner).push(Arc::default());
    }

    /// The node at this place has left, and its sandboxes with it.
    pub(crate) fn forget(&self, at: usize) {
        if let Some(node) = self.of(at) {
            *node.told() = Told::Nothing;
        }
    }

    fn of(&self, at: usize) -> Option<Arc<OfNode>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(at).map(Arc::clone)
    }

    /// What of the sandboxes of the node at a place is known.
    pub fn known(&self, at: usize) -> NodeKnown {
        let node = self.of(at);
        node.map_or(NodeKnown::Gathering, |node| match &*node.told() {
            Told::Nothing => NodeKnown::Gathering,
            Told::Never => NodeKnown::Untold,
            Told::Table(_) => NodeKnown::Counted,
        })
    }

    /// How long until a node is asked again.
    pub(crate) fn pause() -> Duration {
        PERIOD.mul_f64(1.0 - JITTER + 2.0 * JITTER * fastrand::f64())
    }

    /// Has what is known of a node be no older than this call. Who comes while it is being read waits for that and then for the next
    /// reading, which is for all who wait.
    ///
    /// # Errors
    /// The node did not answer, or not with what it should. What was known stays.
    ///
    /// Cancel-safe: what was read of changes so far stays, what was read of a whole is read again.
    pub async fn refresh(&self, at: usize, node: &Node) -> Result<(), Failure> {
        let came = Instant::now();
        let Some(of_node) = self.of(at) else { return Ok(()) };
        let mut turn = of_node.turn.lock().await;
        if turn.is_some_and(|began| began >= came) {
            return Ok(());
        }
        let began = Instant::now();
        self.read(&of_node, node).await?;
        *turn = Some(began);
        Ok(())
    }

    async fn read(&self, of_node: &OfNode, node: &Node) -> Result<(), Failure> {
        let mut headers = HeaderMap::new();
        Behalf::server().write(&mut headers);
        let mut upto = match &*of_node.told() {
            Told::Table(table) => table.upto().clone(),
            Told::Nothing | Told::Never => table::Upto::default(),
        };
        // A node that is read whole is looked at as it was until the end of that.
        let mut whole: Option<Table> = None;
        for _ in 0..ANSWERS_MAX {
            let path = format!("/internal/sandboxes/changes?since={}&epoch={}", upto.seq, upto.epoch);
            let answer =
                tokio::time::timeout(ANSWER_WITHIN, node.ask::<SandboxChanges>(&path, &headers)).await;
            let changes = match answer {
                Ok(Err(failure)) if failure.0.kind() == ErrorKind::NotFound => {
                    *of_node.told() = Told::Never;
                    return Ok(());
                }
                Ok(answer) => answer?,
                Err(_) => return Err(silent(node.name())),
            };
            let more = changes.more;
            if changes.whole {
                whole = Some(Table::new(node.name().clone()));
            }
            upto = match &mut whole {
                Some(table) => table.take_in(changes, &self.kept),
                None => match &mut *of_node.told() {
                    Told::Table(table) => table.take_in(changes, &self.kept),
                    Told::Nothing | Told::Never => Err(table::Odd::NotWhole),
                },
            }
            .map_err(|odd| node.odd(format!("told of its sandboxes what cannot be: {odd}")))?;
            if !more {
                if let Some(table) = whole {
                    *of_node.told() = Told::Table(table);
                }
                return Ok(());
            }
        }
        Err(node.odd(format!("has told of its sandboxes in {ANSWERS_MAX} answers and not come to an end")))
    }

    /// Does something with the table of a node, where there is one.
    fn with<T>(&self, at: usize, f: impl FnOnce(&Table) -> T) -> Option<T> {
        match &*self.of(at)?.told() {
            Told::Table(table) => Some(f(table)),
            Told::Nothing | Told::Never => None,
        }
    }

    /// The next sandboxes of a node that are asked for, at most `max`, in the order of lists: after the filter's cursor, and before
    /// `before`, if that is given. None: nothing is known of it.
    pub fn page(
        &self,
        at: usize,
        standing: Standing,
        filter: &SandboxFilter,
        scope: &Scope,
        before: Option<&Position>,
        max: usize,
    ) -> Option<Vec<Position>> {
        let labels: Vec<LabelText> = filter.labels.iter().map(LabelText::of).collect();
        let takes = |record: &table::Record| {
            let owner = record.owner();
            let state = standing.shown(record.state());
            filter.takes(Filtered { state, task: owner.task_id.as_ref(), project: &owner.project })
                && scope.has(&owner.project)
                // Of those whose labels are not told, their node knows.
                && (labels.is_empty() || record.has_labels(&labels).unwrap_or(!standing.is_lost()))
        };
        self.with(at, |table| table.page(filter.cursor.as_ref(), before, max, takes))
    }

    /// The record of a sandbox as it was last heard of, in so far as it is kept, if it is in one of these projects.
    pub fn sandbox(&self, at: usize, standing: Standing, id: &SandboxId, scope: &Scope) -> Option<Sandbox> {
        let sandbox = self.with(at, |table| table.sandbox(id)).flatten()?;
        scope.has(&sandbox.project).then(|| standing.seen(sandbox))
    }

    /// The same of one that [`Self::page`] gave.
    pub fn sandbox_at(&self, at: usize, standing: Standing, place: &Position) -> Option<Sandbox> {
        self.with(at, |table| table.sandbox_at(place)).flatten().map(|sandbox| standing.seen(sandbox))
    }

    /// How many sandboxes of a node each owner has, by state, of those that are meant.
    pub fn counts(
        &self,
        at: usize,
        standing: Standing,
        meant: &Meant,
    ) -> Option<Vec<(Arc<SandboxOwner>, StateCounts)>> {
        let mut counts = self.with(at, |table| {
            // Owners are kept once each, so that where one lies tells it.
            let mut counts: HashMap<*const SandboxOwner, (Arc<SandboxOwner>, StateCounts)> = HashMap::new();
            for (_, record) in table.records() {
                let owner = record.owner();
                let counted = counts.entry(Arc::as_ptr(owner));
                let counted = counted.or_insert_with(|| (Arc::clone(owner), StateCounts::default()));
                counted.1.count(standing.shown(record.state()));
            }
            counts
        })?;
        counts.retain(|_, (owner, _)| meant.has(owner));
        Some(counts.into_values().collect())
    }

    /// The tasks of a node's sandboxes, of those that are meant.
    pub fn tasks(&self, at: usize, standing: Standing, meant: &Meant) -> Option<Vec<Task>> {
        self.with(at, |table| {
            let mut tasks: HashMap<&TaskId, Task> = HashMap::new();
            for (created_ms, record) in table.records().filter(|(_, record)| meant.has(record.owner())) {
                let SandboxOwner { project, task_id: Some(task_id), .. } = &**record.owner() else {
                    continue;
                };
                let task = tasks.entry(task_id).or_insert_with(|| Task::new(task_id.clone(), created_ms));
                task.count(table.node().as_str(), project, standing.shown(record.state()), created_ms);
            }
            tasks.into_values().collect()
        })
    }

    /// How many records of a node there are.
    #[cfg(test)]
    fn len(&self, at: usize) -> usize {
        self.with(at, |table| table.records().count()).unwrap_or_default()
    }
}

fn silent(node: &NodeId) -> Failure {
    let message = format!("node {node} did not tell of its sandboxes within {} s", ANSWER_WITHIN.as_secs());
    Failure::new(ErrorKind::Unavailable, message)
        .hint("see that its dsec-edge runs (`dsec doctor`) and try again")
        .detail(serde_json::json!({ "node": node }))
}

#[cfg(test)]
mod tests;
