//! Holds sandboxes to their memory limit where the kernel does not: what waits in netlink sockets is charged to nobody, and
//! what waits in UDP sockets not on every host. One that lets more wait than it may use as memory is ended.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dsec_backend::Instance;
use dsec_model::{EndReason, State};

use crate::node::Node;
use crate::sandbox::Handle;

/// How often sandboxes are looked at: what one can fill in this time comes on top of its limit.
const TICK: Duration = Duration::from_millis(500);

/// Runs for as long as the node.
pub async fn run(node: Weak<Node>) {
    loop {
        tokio::time::sleep(TICK).await;
        let Some(node) = node.upgrade() else { return };
        let looked = tokio::task::spawn_blocking(move || {
            node.registry.living().into_iter().filter_map(|h| Some((over(&h)?, h))).collect::<Vec<_>>()
        });
        for (message, handle) in looked.await.unwrap_or_default() {
            tokio::spawn(end(handle, message));
        }
    }
}

/// What a sandbox has too much of, in words.
fn over(handle: &Arc<Handle>) -> Option<String> {
    let (State::Running, Some(live)) = (handle.state(), handle.peek()) else { return None };
    let bytes = live.grip.with(Instance::socket_bytes).filter(|bytes| *bytes > 0)?;
    let limit_mb = handle.record().limits.memory_limit_mb;
    (bytes > limit_mb << 20)
        .then(|| format!("{} MiB waited in its sockets; its memory limit is {limit_mb} MiB", bytes >> 20))
}

async fn end(handle: Arc<Handle>, message: String) {
    tracing::warn!(sandbox_id = %handle.id, message, "a sandbox is ended for what waits in its sockets");
    if let Err(error) = handle.stop(EndReason::SocketMemory { message }, 0).await {
        // Looked at again at the next tick.
        tracing::error!(sandbox_id = %handle.id, %error, "a sandbox cannot be told to end");
    }
}
