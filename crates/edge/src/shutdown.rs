//! Taking a node down: every sandbox, then the backend's own things.

use std::path::Path;
use std::sync::Arc;

use dsec_backend::BackendError;
use dsec_model::EndReason;
use futures_util::Stream;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::error::chain;
use crate::launch::Launch;
use crate::layers::Content;
use crate::node::{Node, Over};
use crate::swap;

/// Lines of progress that may wait for a reader; a full queue drops a line, never the shutdown.
const LINES: usize = 64;

/// How far a shutdown is; a line each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Progress {
    /// Sandboxes are being ended.
    Stopping {
        /// How many are left.
        left: usize,
        /// How many there were.
        total: usize,
    },
    /// The backend is being taken down.
    Backend,
    /// Nothing is left.
    Done,
    /// Something is left.
    Error {
        /// What and why.
        message: String,
    },
}

/// Begins, and tells how far it is. Goes to its end whether or not anybody listens.
pub fn start(node: Arc<Node>) -> impl Stream<Item = Progress> + Send + 'static {
    let (lines, receiver) = mpsc::channel(LINES);
    tokio::spawn(run(node, lines));
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        let progress = receiver.recv().await?;
        Some((progress, receiver))
    })
}

/// Takes down what is on this host when there is no node to do it: its store or its records cannot be read.
///
/// # Errors
/// Something of the backend's is left.
pub async fn without_node(launch: Arc<dyn Launch>, content: &dyn Content) -> Result<(), BackendError> {
    let down = take_down(launch).await;
    if let Err(error) = content.shut_down().await {
        tracing::warn!(error = &error as &dyn std::error::Error, "the fill worker was not ended");
    }
    down
}

/// Takes the node's swap back, which nothing of its sandboxes is in any more.
pub async fn take_swap_down(state_dir: &Path) {
    let state_dir = state_dir.to_owned();
    let taken = tokio::task::spawn_blocking(move || swap::take_down(&state_dir)).await;
    if let Ok(Err(error)) = taken {
        tracing::error!(%error, "the node's swap is left");
    }
}

/// Ends what is left of sandboxes, and the backend's own things.
async fn take_down(launch: Arc<dyn Launch>) -> Result<(), BackendError> {
    let down = tokio::task::spawn_blocking(move || {
        for removed in launch.sweep(&[]) {
            tracing::info!(removed, "leftover swept");
        }
        launch.shut_down()
    });
    down.await.unwrap_or_else(|e| Err(BackendError::new("take the backend down", std::io::Error::other(e))))
}

async fn run(node: Arc<Node>, lines: mpsc::Sender<Progress>) {
    node.drain();
    let living = node.registry.living();
    let total = living.len();
    tracing::info!(total, "the node goes down");
    let mut ending = JoinSet::new();
    for handle in living {
        ending.spawn(async move {
            // A full mailbox holds stops already: what is left is to wait for the end.
            if handle.stop(EndReason::NodeDown, 0).await.is_err() {
                handle.wait_for(|_| false).await;
            }
        });
    }
    let _ = lines.try_send(Progress::Stopping { left: total, total });
    while ending.join_next().await.is_some() {
        let _ = lines.try_send(Progress::Stopping { left: ending.len(), total });
    }
    // Creates that were admitted before the drain have actors of their own.
    for handle in node.registry.living() {
        let _ = handle.stop(EndReason::NodeDown, 0).await;
    }
    node.tasks.close();
    node.tasks.wait().await;
    let _ = lines.try_send(Progress::Backend);
    let down = take_down(Arc::clone(&node.launch)).await;
    take_swap_down(&node.config.state_dir).await;
    if let Err(error) = node.records.remove() {
        tracing::warn!(%error, "directories of records are left");
    }
    // After the mounts, which read from it.
    node.layers.shut_down().await;
    let last = match down {
        Ok(()) => Progress::Done,
        Err(error) => Progress::Error { message: chain(&error) },
    };
    if let Progress::Error { message } = &last {
        tracing::error!(error = message, "the backend could not be taken down");
    }
    // The last line is not to be lost; a reader that is gone ends the wait.
    let _ = lines.send(last).await;
    drop(lines);
    tracing::info!("the node is down");
    node.set_over(Over::Down);
}
