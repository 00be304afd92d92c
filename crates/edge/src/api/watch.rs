//! Changes of files, on a WebSocket.

use axum::extract::ws::{Message, WebSocket};
use dsec_proto::guest::{self, FileOp, FileWatch};
use dsec_proto::rest::{ApiError, FileEvent, FileEventKind};
use serde::Deserialize;

use super::attach::Upgrade;
use super::files::call;
use super::{Answer, In, Params};
use crate::guest::files::FileChild;
use crate::sandbox::Entered;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WatchParams {
    path: String,
    #[serde(default)]
    recursive: bool,
    user: Option<String>,
}

pub(super) async fn watch(In(entered): In, Params(params): Params<WatchParams>, upgrade: Upgrade) -> Answer {
    let op = FileOp::Watch(FileWatch { recursive: params.recursive });
    let call = call(&params.path, params.user.as_deref(), op)?;
    let mut child = FileChild::start(entered.guest(), call).await?;
    // The first answer has `ready`, so a path that is not there is refused before the upgrade.
    let (first, _) = child.next_soon().await?;
    Ok(upgrade.0.on_upgrade(move |socket| pass_on(socket, entered, child, first)))
}

async fn pass_on(mut socket: WebSocket, entered: Entered, mut child: FileChild, first: guest::FileReply) {
    let mut reply = first;
    loop {
        for event in &reply.events {
            let Ok(text) = serde_json::to_string(&describe(event)) else { continue };
            entered.handle.traffic.count_out(text.len());
            if socket.send(Message::Text(text.into())).await.is_err() {
                return;
            }
        }
        if reply.last {
            break;
        }
        let next = tokio::select! {
            next = child.next() => next,
            () = gone(&mut socket) => return,
        };
        match next {
            Ok((next, _)) => reply = next,
            Err(error) => {
                close_with(&mut socket, &error).await;
                return;
            }
        }
    }
    let _ = socket.send(Message::Close(None)).await;
}

/// Resolves when the client has gone. What it sends otherwise means nothing here.
async fn gone(socket: &mut WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if matches!(message, Message::Close(_)) {
            return;
        }
    }
}

/// Closes with the reason, as far as a close frame has room for it.
pub(super) async fn close_with(socket: &mut WebSocket, error: &ApiError) {
    const REASON_MAX: usize = 120;
    /// RFC 6455: the server met a condition that keeps it from going on.
    const CODE: u16 = 1011;
    let reason: String = error.0.message.chars().filter(char::is_ascii).take(REASON_MAX).collect();
    let close = axum::extract::ws::CloseFrame { code: CODE, reason: reason.into() };
    let _ = socket.send(Message::Close(Some(close))).await;
}

fn describe(event: &guest::FileEvent) -> FileEvent {
    let kind = match guest::FileEventKind::try_from(event.kind) {
        Ok(guest::FileEventKind::Ready) => FileEventKind::Ready,
        Ok(guest::FileEventKind::Created) => FileEventKind::Created,
        Ok(guest::FileEventKind::Modified) => FileEventKind::Modified,
        Ok(guest::FileEventKind::Attributes) => FileEventKind::Attributes,
        Ok(guest::FileEventKind::Removed) => FileEventKind::Removed,
        Ok(guest::FileEventKind::Renamed) => FileEventKind::Renamed,
        // A kind of a newer agent: something happened, look again.
        Ok(guest::FileEventKind::Overflow) | Err(_) => FileEventKind::Overflow,
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    FileEvent { kind, path: text(&event.path), from: event.from.as_deref().map(text) }
}
