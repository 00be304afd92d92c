//! What is done now and then: file-count limits, last uses written down, old records forgotten.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dsec_backend::Instance;
use dsec_model::{EndReason, SandboxId, State};
use serde_json::json;

use crate::clock::now_ms;
use crate::node::Node;

/// How often file counts are looked at.
const TICK: Duration = Duration::from_secs(2);
/// Every how many ticks also sandboxes that look idle are looked at: a process in the background may
/// write. 30 s.
const ALL_EVERY: u64 = 15;
/// Every how many ticks it is looked whether content has room. 10 s.
const ROOM_EVERY: u64 = 5;
/// A last use is written down when the one on disk is older than this, ms: it bounds what a `kill -9`
/// of the edge can lose.
const LAST_USE_STALE_MS: u64 = 10_000;

/// What processes of a sandbox get between SIGTERM and SIGKILL when its node is drained, ms.
const DRAIN_GRACE_MS: u64 = 10_000;

/// What was seen of one sandbox at the last tick.
#[derive(Default)]
struct Seen {
    last_active_ms: u64,
    noted_ms: u64,
    disk_bytes: u64,
    over: bool,
}

/// Runs for as long as the node.
pub async fn run(node: Weak<Node>) {
    let mut seen: HashMap<SandboxId, Seen> = HashMap::new();
    let mut tick: u64 = 0;
    loop {
        tokio::time::sleep(TICK).await;
        let Some(node) = node.upgrade() else { return };
        tick += 1;
        // First: what follows may wait for the layer store.
        stop_drained(&node);
        let everything = tick.is_multiple_of(ALL_EVERY);
        if everything {
            node.registry.expire();
            node.keys.retain(|id| node.registry.find(id).is_some());
            node.layers.look_at_store();
            node.layers.keep_hold().await;
            node.layers.trim().await;
        }
        if tick.is_multiple_of(ROOM_EVERY) {
            node.layers.make_room().await;
        }
        let mut taken = std::mem::take(&mut seen);
        let looked = tokio::task::spawn_blocking(move || {
            look(&node, &mut taken, everything);
            taken
        });
        seen = looked.await.unwrap_or_default();
    }
}

/// Stops what is left on a draining node once its time is over; what takes longer than it may is ended at once.
fn stop_drained(node: &Node) {
    let Some(late_ms) = node.scheduling.now().stop_at_ms.and_then(|at| now_ms().checked_sub(at)) else {
        return;
    };
    for handle in node.registry.living() {
        // One that is being created is met at a later tick.
        let grace_ms = match handle.state() {
            state if state.is_usable() => DRAIN_GRACE_MS.saturating_sub(late_ms),
            State::Stopping if late_ms > DRAIN_GRACE_MS => 0,
            _ => continue,
        };
        tokio::spawn(async move { handle.stop(EndReason::Drained, grace_ms).await });
    }
}

fn look(node: &Arc<Node>, seen: &mut HashMap<SandboxId, Seen>, everything: bool) {
    let living = node.registry.living();
    for handle in &living {
        let (State::Running, Some(live)) = (handle.state(), handle.peek()) else { continue };
        let entry = seen.entry(handle.id.clone()).or_default();
        let active = handle.activity.last_active_ms();
        let used = active != entry.last_active_ms || live.guest.execs.running() > 0;
        entry.last_active_ms = active;
        if active.saturating_sub(entry.noted_ms) > LAST_USE_STALE_MS {
            entry.noted_ms = active;
            handle.note_use();
        }
        if !used && !everything {
            continue;
        }
        let Some(disk_bytes) = live.grip.with(|i| i.usage().disk_bytes) else { continue };
        if disk_bytes == entry.disk_bytes && !entry.over {
            continue;
        }
        entry.disk_bytes = disk_bytes;
        let over = live.grip.with(Instance::enforce_file_count).unwrap_or(false);
        if over && !entry.over {
            tracing::info!(sandbox_id = %handle.id, "sandbox has more files than its limit");
            handle.events.push("limit_hit", json!({ "limit": "disk_files_limit" }));
        }
        entry.over = over;
    }
    let alive: HashSet<&SandboxId> = living.iter().map(|handle| &handle.id).collect();
    seen.retain(|id, _| alive.contains(id));
}
