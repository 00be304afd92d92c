//! Following one command: its output as it comes, our input to it, our signals to it, and a new
//! connection where the old one broke (a node's edge may start again while the command runs on).

use std::time::{Duration, Instant};

use bytes::Bytes;
use dsec_model::{ErrorKind, ExecId, SandboxId};
use dsec_proto::frames;
use dsec_proto::rest::{ApiError, AttachEvent, Exec};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::feed::Feed;
use super::input::{Input, Typed};
use super::output::{Output, Stream};
use super::signals::{Asked, Signals};
use crate::client::{AttachReader, AttachWriter, Client, ClientError, Frame, Offsets, PING_AFTER};
use crate::failure::Failure;
use crate::render;

/// Frames to the server that wait: two, so that the next is read while one is sent.
const OUTGOING_MAX: usize = 2;
/// Silent intervals until a connection counts as lost.
const SILENT_MAX: u32 = 3;
/// How long a lost connection is tried again: an edge or a control that starts again takes seconds.
const RECONNECT_FOR: Duration = Duration::from_secs(30);
/// Pause before a try to connect again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

/// Longest wait for a signal to be taken: somebody waits at the keyboard.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);

/// How following a command ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The command ended.
    Exited(Box<Exec>),
    /// We were told to end, and have told the command.
    Told(Asked),
    /// Nobody reads our output.
    ReaderGone,
    /// The person left the terminal; the command runs on.
    Left,
}

/// The command that is followed.
pub(crate) struct Followed<'a> {
    /// How to reach it.
    pub(crate) client: &'a Client,
    /// Its sandbox.
    pub(crate) sandbox: &'a SandboxId,
    /// The command.
    pub(crate) exec: &'a ExecId,
    /// Where its output is taken up.
    pub(crate) from: Offsets,
    /// It lives on when we end: a session that somebody comes back to. Else our signals are its.
    pub(crate) stays: bool,
}

/// Why one connection's loop ended.
enum Step {
    End(Ending),
    Lost(ClientError),
}

struct State {
    offsets: Offsets,
    input: Input,
    output: Output,
    /// Output that waits until the terminal takes it.
    unwritten: Option<(Stream, Bytes)>,
    /// Input that waits until the server takes it.
    unsent: Option<Typed>,
    /// Plain input on its way, whatever becomes of a connection.
    feed: Option<Feed>,
    asked: Option<Asked>,
    patience: Patience,
}

/// How long broken connections are put up with. A connection that brought something, or that held for
/// long, starts the time anew; one that breaks as soon as it is made does not.
#[derive(Debug, Default)]
struct Patience {
    /// When the first connection of a row of useless ones broke.
    broken_since: Option<Instant>,
    /// Something came over this connection.
    progressed: bool,
}

impl Patience {
    /// Whether to try again after a connection that was made at `made` (if it was) broke at `now`.
    fn lasts(&mut self, made: Option<Instant>, now: Instant) -> bool {
        let held = made.is_some_and(|made| now.duration_since(made) > RECONNECT_FOR);
        if std::mem::take(&mut self.progressed) || held {
            self.broken_since = None;
        }
        now.duration_since(*self.broken_since.get_or_insert(now)) <= RECONNECT_FOR
    }
}

/// Follows a command to its end.
///
/// # Errors
/// The command cannot be reached (any more).
pub(crate) async fn follow(
    followed: &Followed<'_>,
    mut input: Input,
    signals: &mut Signals,
) -> Result<Ending, Failure> {
    let plain = input.take_plain();
    let mut state = State {
        offsets: followed.from,
        feed: plain.map(|typed| Feed::start(followed.client, followed.sandbox, followed.exec, typed)),
        input,
        output: Output::new(),
        unwritten: None,
        unsent: None,
        asked: None,
        patience: Patience::default(),
    };
    loop {
        let mut made = None;
        let step = match followed.client.attach(followed.sandbox, followed.exec, state.offsets).await {
            Ok(attach) => {
                made = Some(Instant::now());
                let (reader, writer) = attach.split();
                connected(followed, &mut state, signals, reader, writer).await?
            }
            Err(error) => Step::Lost(error),
        };
        match step {
            Step::End(ending) => return finish(state, signals, ending).await,
            Step::Lost(error) => {
                if !error.passes() || !state.patience.lasts(made, Instant::now()) {
                    return Err(error.into());
                }
                tokio::select! {
                    () = tokio::time::sleep(RECONNECT_PAUSE) => {}
                    asked = signals.next() => {
                        if let Some(ending) = on_signal(followed, &mut state.asked, asked).await {
                            return Ok(ending);
                        }
                    }
                }
            }
        }
    }
}

/// Waits until our own output is written, unless we are told to end.
async fn finish(mut state: State, signals: &mut Signals, ending: Ending) -> Result<Ending, Failure> {
    if matches!(ending, Ending::Told(_)) {
        return Ok(ending);
    }
    if let Some(last) = state.unwritten.take()
        && let Some(room) = state.output.room().await
    {
        room.send(Some(last));
    }
    tokio::select! {
        written = state.output.finish() => written.map(|()| ending),
        asked = signals.next() => Ok(Ending::Told(asked)),
    }
}

/// One connection, until the command ends or the connection does.
async fn connected(
    followed: &Followed<'_>,
    state: &mut State,
    signals: &mut Signals,
    mut reader: AttachReader,
    writer: AttachWriter,
) -> Result<Step, Failure> {
    let (outgoing, sender) = start_writer(writer);
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + PING_AFTER, PING_AFTER);
    let mut silent = 0;
    if state.input.is_terminal() {
        // The size may have changed between the start and now, or while there was no connection.
        resize(followed).await;
    }
    let step = loop {
        tokio::select! {
            biased;
            asked = signals.next() => {
                if let Some(ending) = on_signal(followed, &mut state.asked, asked).await {
                    break Step::End(ending);
                }
            }
            room = state.output.room(), if state.unwritten.is_some() => match room {
                Some(permit) => permit.send(state.unwritten.take()),
                None => break Step::End(reader_gone(followed).await),
            },
            frame = reader.next(), if state.unwritten.is_none() => match frame {
                Ok(frame) => match on_frame(&mut state.offsets, &mut state.unwritten, frame)? {
                    Some(step) => break step,
                    None => state.patience.progressed = true,
                },
                Err(error) => break Step::Lost(error),
            },
            Ok(permit) = outgoing.reserve(), if state.unsent.is_some() => {
                if let Some(typed) = state.unsent.take() {
                    permit.send(Outgoing::Typed(typed));
                }
            }
            typed = state.input.next(), if state.unsent.is_none() => match typed {
                Typed::Leave => break Step::End(Ending::Left),
                Typed::Resized => resize(followed).await,
                typed => state.unsent = Some(typed),
            },
            error = feed_failed(&mut state.feed) => return input_lost(followed, error).await,
            _ = tick.tick() => {
                silent = if reader.heard() || state.unwritten.is_some() { 0 } else { silent + 1 };
                if silent >= SILENT_MAX {
                    let cause = "it has been silent for too long".to_owned();
                    break Step::Lost(ClientError::Broken { url: followed.client.url().to_owned(), cause });
                }
                let _ = outgoing.try_send(Outgoing::Ping);
            }
        }
    };
    sender.abort();
    Ok(step)
}

async fn feed_failed(feed: &mut Option<Feed>) -> ClientError {
    match feed {
        Some(feed) => feed.failed().await,
        None => std::future::pending().await,
    }
}

/// A command whose input is not whole must not go on as if it were.
async fn input_lost(followed: &Followed<'_>, error: ClientError) -> Result<Step, Failure> {
    send_signal(followed, "SIGKILL", true).await;
    let cause = Failure::from(error);
    Err(Failure { message: format!("input may be lost on its way: {}", cause.message), ..cause }
        .hint("the command was killed; run it again"))
}

enum Outgoing {
    Typed(Typed),
    Ping,
}

/// Sends frames from a task of its own: a server that takes no input must not keep us from reading
/// its output. A failure to send shows on the reading side.
fn start_writer(mut writer: AttachWriter) -> (mpsc::Sender<Outgoing>, JoinHandle<()>) {
    let (sender, mut receiver) = mpsc::channel::<Outgoing>(OUTGOING_MAX);
    let task = tokio::spawn(async move {
        while let Some(next) = receiver.recv().await {
            let sent = match next {
                Outgoing::Typed(Typed::Bytes(bytes)) => writer.send(frames::STDIN, &bytes).await,
                Outgoing::Typed(Typed::End) => writer.send(frames::STDIN_CLOSE, &[]).await,
                Outgoing::Typed(Typed::Resized | Typed::Leave) => Ok(()),
                Outgoing::Ping => writer.ping().await,
            };
            if sent.is_err() {
                // Held open, so that whoever sends sees a full queue and not a closed one.
                std::future::pending::<()>().await;
            }
        }
    });
    (sender, task)
}

fn on_frame(
    offsets: &mut Offsets,
    unwritten: &mut Option<(Stream, Bytes)>,
    frame: Frame,
) -> Result<Option<Step>, Failure> {
    match frame {
        Frame::Stdout(bytes) => {
            offsets.stdout += bytes.len() as u64;
            *unwritten = Some((Stream::Out, bytes));
        }
        Frame::Stderr(bytes) => {
            offsets.stderr += bytes.len() as u64;
            *unwritten = Some((Stream::Err, bytes));
        }
        Frame::Event(AttachEvent::Skipped { stream, from, to }) => {
            match stream.as_str() {
                "stderr" => offsets.stderr = to,
                _ => offsets.stdout = to,
            }
            render::note(&format!(
                "dsec: {} of {stream} were not kept",
                render::bytes(to.saturating_sub(from))
            ));
        }
        Frame::Event(AttachEvent::Exited { exec }) => return Ok(Some(Step::End(Ending::Exited(exec)))),
        Frame::Event(AttachEvent::Error { error }) => {
            let error = ClientError::Api(ApiError(Box::new(error)));
            if error.passes() {
                return Ok(Some(Step::Lost(error)));
            }
            return Err(error.into());
        }
    }
    Ok(None)
}

/// The first signal is passed on; a second one, or a lost terminal, ends the command with all it started.
async fn on_signal(followed: &Followed<'_>, before: &mut Option<Asked>, asked: Asked) -> Option<Ending> {
    if followed.stays {
        return Some(Ending::Told(asked));
    }
    let first = before.replace(asked).is_none();
    let (signal, tree) = match asked {
        Asked::HangUp => ("SIGHUP", true),
        asked if first => (asked.name(), false),
        _ => ("SIGKILL", true),
    };
    send_signal(followed, signal, tree).await;
    if first && asked != Asked::HangUp { None } else { Some(Ending::Told(asked)) }
}

async fn reader_gone(followed: &Followed<'_>) -> Ending {
    // A command whose output nobody reads would get SIGPIPE here; the next write there cannot know.
    send_signal(followed, "SIGKILL", true).await;
    Ending::ReaderGone
}

/// Sends a signal. A command that is over already needs none.
pub(crate) async fn send_signal(followed: &Followed<'_>, signal: &str, tree: bool) {
    let send = followed.client.signal(followed.sandbox, followed.exec, signal, tree);
    let why = match tokio::time::timeout(SIGNAL_TIMEOUT, send).await {
        Ok(Ok(_)) => return,
        Ok(Err(error)) if matches!(error.kind(), Some(ErrorKind::NotFound | ErrorKind::Conflict)) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the platform does not answer".to_owned(),
    };
    render::note(&format!("dsec: {signal} did not reach the command: {why}"));
}

async fn resize(followed: &Followed<'_>) {
    // A size that does not arrive is not worth ending a shell for.
    let _ = followed.client.resize(followed.sandbox, followed.exec, crate::terminal::size()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_connections_are_tried_for_a_time_and_good_ones_for_ever() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut useless = Patience::default();
        assert!(
            useless.lasts(Some(at(0)), at(0))
                && useless.lasts(Some(at(10)), at(10))
                && useless.lasts(None, at(30))
        );
        assert!(!useless.lasts(Some(at(31)), at(31)));
        let mut good = Patience::default();
        assert!(good.lasts(Some(at(0)), at(0)));
        good.progressed = true;
        assert!(good.lasts(Some(at(39)), at(40)), "it brought something");
        assert!(good.lasts(Some(at(41)), at(4000)), "a quiet command, and it held for long");
        assert!(!good.lasts(None, at(4031)));
    }
}
