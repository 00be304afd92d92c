//! After a start: what became of the sandboxes of the edge before.

use std::sync::Arc;

use dsec_backend::Instance;
use dsec_model::{EndReason, SandboxId, State};
use dsec_proto::rest::ApiError;
use futures_util::StreamExt;
use serde_json::json;

use crate::clock::now_ms;
use crate::ended::Ended;
use crate::error::{chain, internal};
use crate::guest::{Connection, ExecTable};
use crate::node::Node;
use crate::release::TakenOver;
use crate::sandbox::actor::{self, Holds, Origin};
use crate::sandbox::record::{self, Stored};
use crate::sandbox::{Grip, Handle, Message};
use tokio::sync::mpsc;

/// Sandboxes taken over at once: enough to hide the agents' round trips.
const AT_ONCE: usize = 16;
/// After a restart callers get this long to come back before a sandbox is found idle, seconds, or its
/// whole ttl where that is less: its last use is written down now and then only, and nobody could reach
/// it while there was no edge.
const RETURN_S: u64 = 60;

/// Takes over what runs, ends what is gone, removes what belongs to nobody.
///
/// # Errors
/// The records cannot be read.
pub async fn all(node: &Arc<Node>) -> Result<(), ApiError> {
    let state_dir = node.config.state_dir.clone();
    let records = tokio::task::spawn_blocking(move || record::load_all(&state_dir))
        .await
        .map_err(|e| internal("reading the records broke off", &e))?
        .map_err(|e| internal("the sandboxes' records cannot be read", &e))?;
    let found = records.len();
    let fates: Vec<Option<Taken>> = futures_util::stream::iter(records)
        .map(|stored| one(Arc::clone(node), stored))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let (mut keep, mut lost, mut count) = (Vec::new(), Vec::new(), 0);
    for taken in fates.into_iter().flatten() {
        count += u64::from(taken.lives && !taken.is_lost);
        if taken.is_lost {
            lost.push(taken.id.to_string());
        }
        if taken.lives {
            keep.push(taken.id.random().to_owned());
        }
    }
    node.releases.took_over(TakenOver { count, lost });
    if found > 0 {
        tracing::info!(found, adopted = keep.len(), "sandboxes of an earlier edge");
    }
    let sweeper = Arc::clone(node);
    let swept = tokio::task::spawn_blocking(move || sweeper.launch.sweep(&keep));
    for removed in swept.await.map_err(|e| internal("the sweep broke off", &e))? {
        tracing::info!(removed, "leftover swept");
    }
    Ok(())
}

/// What a look at the host says of a record.
enum Fate {
    Lives(Arc<dyn Instance>),
    Gone(EndReason),
}

/// What became of a sandbox.
struct Taken {
    id: SandboxId,
    /// It is there.
    lives: bool,
    /// It ran, nobody had asked for its end, and it cannot be used any more.
    is_lost: bool,
}

async fn one(node: Arc<Node>, mut stored: Stored) -> Option<Taken> {
    let id = stored.sandbox.id.clone();
    let looker = Arc::clone(&node);
    let (fate, looked) = tokio::task::spawn_blocking(move || {
        let fate = look(&looker, &stored);
        (fate, stored)
    })
    .await
    .map_or_else(|_| (None, None), |(fate, stored)| (Some(fate), Some(stored)));
    stored = looked?;
    match fate? {
        Fate::Gone(reason) => {
            let is_lost = matches!(reason, EndReason::AgentLost { .. } | EndReason::LaunchFailed { .. });
            bury(&node, stored, reason).await;
            Some(Taken { id, lives: false, is_lost })
        }
        Fate::Lives(instance) => {
            let ttl_ms = stored.spec.limits.ttl_running_stop_s * 1000;
            let latest_over = now_ms().saturating_sub(ttl_ms) + ttl_ms.min(RETURN_S * 1000);
            stored.sandbox.last_active_ms = stored.sandbox.last_active_ms.max(latest_over);
            let (handle, mailbox) = Handle::new(stored.sandbox.clone());
            let directory = record::directory(&node.config.state_dir, id.random());
            if let Err(error) = handle.events.write_into(&directory) {
                tracing::error!(sandbox_id = %id, %error, "a sandbox's events cannot be written down");
            }
            let grip = Grip::new(instance);
            // The agent of one that is paused does not answer before it is resumed.
            let guest = match stored.sandbox.state {
                State::Paused => None,
                _ => Some(reconnect(&handle, &grip).await),
            };
            if let Some(key) = &stored.key {
                node.keys.restore(key, &id);
            }
            let is_lost = matches!(guest, Some(Err(_))) && stored.sandbox.reason.is_none();
            take_over(&node, handle, mailbox, stored, grip, guest);
            Some(Taken { id, lives: true, is_lost })
        }
    }
}

fn take_over(
    node: &Arc<Node>,
    handle: Arc<Handle>,
    mailbox: mpsc::Receiver<Message>,
    stored: Stored,
    grip: Arc<Grip>,
    guest: Option<Result<Arc<Connection>, String>>,
) {
    let ids = stored.sandbox.layers.iter().filter_map(|layer| layer.id.parse().ok()).collect();
    let Stored { sandbox, spec, charged_to, .. } = &stored;
    let holds = Holds {
        permit: node.room.readmit(&spec.limits),
        counted: node.charges.retake(&sandbox.project, &sandbox.backend, charged_to, &spec.limits),
        layers: node.layers.hold(ids, &handle.id),
    };
    node.registry.insert(Arc::clone(&handle));
    actor::spawn(node, handle, mailbox, stored, holds, Origin::Adopted { grip, guest });
}

fn look(node: &Node, stored: &Stored) -> Fate {
    let lost = |message: &str| Fate::Gone(EndReason::AgentLost { message: message.to_owned() });
    if stored.boot_id != node.boot_id {
        return Fate::Gone(stored.sandbox.reason.clone().unwrap_or(EndReason::Rebooted));
    }
    let Some(anchor) = &stored.anchor else {
        let message = "the edge was restarted during the launch".to_owned();
        return Fate::Gone(EndReason::LaunchFailed { message });
    };
    let is_paused = stored.sandbox.state == State::Paused;
    match node.launch.adopt(&stored.spec.to_container(&stored.sandbox.id), anchor, is_paused) {
        Ok(Some(instance)) => Fate::Lives(instance),
        Ok(None) => match stored.sandbox.reason.clone() {
            Some(reason) => Fate::Gone(reason),
            None => lost("it ended while no edge ran"),
        },
        Err(error) => {
            let error = chain(&error);
            tracing::error!(sandbox_id = %stored.sandbox.id, error, "a sandbox cannot be taken over");
            lost("it could not be taken over after a restart of the edge; the node's log says why")
        }
    }
}

/// Connects to the agent of a sandbox that an earlier edge launched.
///
/// # Errors
/// It is gone, or does not answer.
pub async fn reconnect(handle: &Arc<Handle>, grip: &Arc<Grip>) -> Result<Arc<Connection>, String> {
    let stream = grip.with(Instance::connect).ok_or("it has ended")?.map_err(|e| chain(&e))?;
    let table = ExecTable::new(handle.id.clone(), Arc::clone(grip), Arc::clone(&handle.events));
    Connection::open(stream, table).await.map_err(|e| chain(&e))
}

/// Remembers a sandbox of which nothing runs any more. The sweep removes what is left of it.
async fn bury(node: &Arc<Node>, stored: Stored, reason: EndReason) {
    let mut sandbox = stored.sandbox;
    // A stop that was in progress came to its end by itself; everything else is a failure.
    let asked = matches!(
        reason,
        EndReason::Asked
            | EndReason::Idle
            | EndReason::Lifetime
            | EndReason::PausedTooLong
            | EndReason::NodeDown
    );
    sandbox.state = if asked { State::Stopped } else { State::Failed };
    sandbox.reason = Some(reason);
    sandbox.ended_ms = Some(now_ms());
    let handle = Handle::ended(sandbox.clone());
    handle.events.read_from(&record::directory(&node.config.state_dir, sandbox.id.random()));
    handle.events.push("ended", json!({ "state": sandbox.state, "reason": sandbox.reason }));
    handle.events.shorten();
    let ended = Ended { sandbox: sandbox.clone(), key: stored.key, events: handle.events.ndjson() };
    if let Some(key) = &ended.key {
        node.keys.restore(key, &sandbox.id);
    }
    node.registry.insert(handle);
    let burier = Arc::clone(node);
    let noted = tokio::task::spawn_blocking(move || {
        burier.ended.append(&ended).and(record::remove(&burier.config.state_dir, ended.sandbox.id.random()))
    });
    if let Ok(Err(error)) = noted.await {
        tracing::warn!(sandbox_id = %sandbox.id, %error, "the end of a sandbox is not noted in full");
    }
    tracing::info!(sandbox_id = %sandbox.id, reason = ?sandbox.reason, "sandbox did not outlive the edge");
}
