//! A command's streams on a WebSocket. Frames: `dsec_proto::frames`.
//!
//! Output and input are two loops, so that a reader that is slow to take output can still type, and one
//! that types much still reads. Each attachment reads for itself; none waits for another.

use std::sync::Arc;

use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::frames;
use dsec_proto::rest::{ApiError, AttachEvent, PtySize};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;

use super::execs::ExecPath;
use super::{Answer, In, Params, PathOf};
use crate::error::invalid;
use crate::guest::exec::{Exec, Which};
use crate::guest::read::{Step, StreamReader};
use crate::guest::stdin as input;
use crate::sandbox::{Entered, run};

/// Largest message from a client: a payload and its kind, with some grace for a careless one.
const MESSAGE_MAX: usize = 4 * frames::PAYLOAD_MAX;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttachParams {
    #[serde(default)]
    stdout_offset: u64,
    #[serde(default)]
    stderr_offset: u64,
}

pub(super) async fn attach(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Params(params): Params<AttachParams>,
    upgrade: Upgrade,
) -> Answer {
    let exec = entered.guest().execs.get(&eid)?;
    let out = StreamReader::new(&exec, Which::Stdout, params.stdout_offset);
    let err = StreamReader::new(&exec, Which::Stderr, params.stderr_offset);
    Ok(upgrade.0.max_message_size(MESSAGE_MAX).on_upgrade(move |socket| async move {
        let (sink, stream) = socket.split();
        let entered = Arc::new(entered);
        let mut output = Output { sink, entered: Arc::clone(&entered), exec: Arc::clone(&exec) };
        tokio::select! {
            _ = output.run(out, err) => {}
            () = read_input(stream, &entered, &exec) => {}
        }
    }))
}

/// A WebSocket upgrade, with our own refusal.
pub(super) struct Upgrade(pub(super) WebSocketUpgrade);

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Upgrade {
    type Rejection = super::Failure;
    async fn from_request_parts(
        parts: &mut axum::http::request::Parts,
        state: &S,
    ) -> Result<Self, super::Failure> {
        WebSocketUpgrade::from_request_parts(parts, state).await.map(Self).map_err(|rejection| {
            invalid(format!("this path is a WebSocket: {}", rejection.body_text())).into()
        })
    }
}

/// The client is gone.
struct Gone;

struct Output {
    sink: SplitSink<WebSocket, Message>,
    entered: Arc<Entered>,
    exec: Arc<Exec>,
}

impl Output {
    async fn send(&mut self, frame: Vec<u8>) -> Result<(), Gone> {
        self.sink.send(Message::Binary(frame.into())).await.map_err(|_| Gone)
    }

    async fn event(&mut self, event: &AttachEvent) -> Result<(), Gone> {
        let mut frame = vec![frames::EVENT];
        if serde_json::to_writer(&mut frame, event).is_err() {
            return Err(Gone);
        }
        self.send(frame).await
    }

    async fn skipped(&mut self, which: Which, from: u64, to: u64) -> Result<(), Gone> {
        self.event(&AttachEvent::Skipped { stream: which.as_str().to_owned(), from, to }).await
    }

    /// Sends all that is there of one stream, a payload at most. `Ok(None)`: it failed, and the
    /// client was told.
    async fn step(&mut self, reader: &mut StreamReader, which: Which) -> Result<Option<Step>, Gone> {
        let kind = if which == Which::Stdout { frames::STDOUT } else { frames::STDERR };
        let from = reader.offset();
        let mut frame = vec![kind];
        match reader.step(frames::PAYLOAD_MAX, &mut frame).await {
            Ok(Step::Data) => {
                self.entered.handle.traffic.count_out(frame.len() - 1);
                self.send(frame).await?;
                Ok(Some(Step::Data))
            }
            Ok(Step::Gap { to }) => {
                self.skipped(which, from, to).await?;
                Ok(Some(Step::Gap { to }))
            }
            Ok(step) => Ok(Some(step)),
            Err(error) => {
                let why = self.exec.lost().unwrap_or_default();
                let error = if why.is_empty() { error } else { run::gone_during(&self.entered, &why) };
                self.event(&AttachEvent::Error { error: *error.0 }).await?;
                Ok(None)
            }
        }
    }

    async fn run(&mut self, mut out: StreamReader, mut err: StreamReader) -> Result<(), Gone> {
        loop {
            let Some(a) = self.step(&mut out, Which::Stdout).await? else { break };
            let Some(b) = self.step(&mut err, Which::Stderr).await? else { break };
            match (a, b) {
                (Step::End, Step::End) => {
                    for (which, reader) in [(Which::Stdout, &out), (Which::Stderr, &err)] {
                        let total = self.exec.facts().stream(which).total;
                        if total > reader.offset() {
                            self.skipped(which, reader.offset(), total).await?;
                        }
                    }
                    let exec = Box::new(self.exec.record());
                    self.event(&AttachEvent::Exited { exec }).await?;
                    break;
                }
                (Step::Wait | Step::End, Step::Wait | Step::End) => {
                    // Either reader hears of any change of the command.
                    tokio::select! {
                        () = out.changed() => {}
                        () = err.changed() => {}
                    }
                }
                _ => {}
            }
        }
        self.sink.close().await.map_err(|_| Gone)
    }
}

/// Takes what the client sends until it goes. A bad frame or a stdin that is closed is no reason to
/// end the output: the next `exited` tells what happened.
async fn read_input(mut stream: SplitStream<WebSocket>, entered: &Entered, exec: &Arc<Exec>) {
    while let Some(Ok(message)) = stream.next().await {
        let taken = match message {
            Message::Binary(frame) => take(entered, exec, &frame).await,
            Message::Close(_) => return,
            Message::Text(_) => Err(invalid("text messages are not used here")),
            Message::Ping(_) | Message::Pong(_) => Ok(()),
        };
        if let Err(error) = taken
            && error.kind() != ErrorKind::Conflict
        {
            tracing::debug!(sandbox_id = %entered.handle.id, error = %error, "an attached client's frame was not taken");
        }
    }
}

async fn take(entered: &Entered, exec: &Arc<Exec>, frame: &Bytes) -> Result<(), ApiError> {
    let Some((kind, payload)) = frame.split_first() else { return Ok(()) };
    let guest = entered.guest();
    match *kind {
        frames::STDIN => {
            entered.handle.traffic.count_in(payload.len());
            input::write(guest, exec, payload).await
        }
        frames::STDIN_CLOSE => input::close(guest, exec).await,
        frames::RESIZE => {
            let [a, b, c, d] = payload else { return Err(invalid("a resize has four bytes")) };
            let size = PtySize { rows: u16::from_be_bytes([*a, *b]), cols: u16::from_be_bytes([*c, *d]) };
            run::check_pty("resize", Some(size))?;
            input::resize(guest, exec, size).await
        }
        frames::SIGNAL => {
            let name = std::str::from_utf8(payload).map_err(|_| invalid("a signal has a name"))?;
            input::signal(guest, exec, input::signal_number(name)?, false).await
        }
        other => Err(invalid(format!("no frame has the kind {other:#04x}"))),
    }
}
