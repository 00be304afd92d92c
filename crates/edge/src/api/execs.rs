//! Commands.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use dsec_proto::rest::{ApiError, ExecList, ExecRequest, PtySize, SignalRequest, TAKES_EARLY};
use http_body_util::BodyExt;
use serde::Deserialize;

use super::{Answer, In, Json, Params, PathOf, Shared, json};
use crate::error::{invalid, invalid_field};
use crate::guest::exec::{Exec, Which};
use crate::guest::read::{CHUNK, Step, StreamReader};
use crate::guest::stdin as input;
use crate::sandbox::{Entered, run};

/// Longest wait of a look at a command, ms.
const WAIT_MAX_MS: u64 = 600_000;
const STREAM_BYTES: HeaderName = HeaderName::from_static("x-dsec-stream-bytes");
const TRUNCATED: HeaderName = HeaderName::from_static("x-dsec-truncated");

/// A command's place in a path.
#[derive(Deserialize)]
pub(super) struct ExecPath {
    pub(super) eid: String,
}

pub(super) async fn start(
    State(node): Shared,
    In(entered): In,
    headers: HeaderMap,
    Json(request): Json<ExecRequest>,
) -> Answer {
    run::check(&request)?;
    let (wait, inline) = (request.wait, run::inline_limit(request.inline_limit_bytes, run::INLINE_DEFAULT)?);
    // Dropped with its caller, the start still happens whole or not at all; see `Connection::start`.
    let exec = run::start(&entered, request).await?;
    let takes_early = headers.contains_key(TAKES_EARLY);
    let record = match wait {
        true => tokio::select! {
            ended = run::finish(&entered, &exec, inline) => ended?,
            () = node.handed_on(), if takes_early => exec.record(),
        },
        false => exec.record(),
    };
    Ok(json(StatusCode::OK, &record))
}

pub(super) async fn list(In(entered): In) -> Answer {
    let execs = entered.guest().execs.list().iter().map(|exec| exec.record()).collect();
    Ok(json(StatusCode::OK, &ExecList { execs }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GetParams {
    wait_ms: Option<u64>,
    inline_limit_bytes: Option<u64>,
}

pub(super) async fn get(
    State(node): Shared,
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Params(params): Params<GetParams>,
) -> Answer {
    let exec = entered.guest().execs.get(&eid)?;
    let inline = run::inline_limit(params.inline_limit_bytes, 0)?;
    if let Some(ms) = params.wait_ms {
        if ms > WAIT_MAX_MS {
            return Err(
                invalid_field("wait_ms", format!("wait_ms is {ms}; {WAIT_MAX_MS} is the most")).into()
            );
        }
        let _keeps = exec.reading();
        tokio::select! {
            _ = tokio::time::timeout(Duration::from_millis(ms), exec.ended()) => {}
            () = node.handed_on() => {}
        }
    }
    let lost = exec.lost();
    if let Some(why) = lost {
        return Err(run::gone_during(&entered, &why).into());
    }
    Ok(json(StatusCode::OK, &run::with_output(&entered, &exec, inline).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OutputParams {
    #[serde(default)]
    offset: u64,
    length: Option<u64>,
    #[serde(default)]
    follow: bool,
}

pub(super) async fn stdout(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Params(params): Params<OutputParams>,
) -> Answer {
    output(entered, &eid, Which::Stdout, &params)
}

pub(super) async fn stderr(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Params(params): Params<OutputParams>,
) -> Answer {
    output(entered, &eid, Which::Stderr, &params)
}

/// What an output body is in the middle of.
struct Reading {
    entered: Entered,
    reader: StreamReader,
    left: u64,
    follow: bool,
}

fn output(entered: Entered, eid: &str, which: Which, params: &OutputParams) -> Answer {
    let exec = entered.guest().execs.get(eid)?;
    let record = exec.record();
    let (total, truncated) = match which {
        Which::Stdout => (record.stdout_bytes, record.stdout_truncated),
        Which::Stderr => (record.stderr_bytes, record.stderr_truncated),
    };
    let mut left = params.length.unwrap_or(u64::MAX);
    let mut length = None;
    if !params.follow {
        // What is there now and no more, whatever is written meanwhile.
        let facts = exec.facts();
        let stream = facts.stream(which);
        left = left.min(stream.end().saturating_sub(params.offset.max(stream.start)));
        // A terminal's window may move on while it is sent.
        length = (!facts.pty).then_some(left);
    }
    let reading = Reading {
        reader: StreamReader::new(&exec, which, params.offset),
        entered,
        left,
        follow: params.follow,
    };
    let body = Body::from_stream(futures_util::stream::unfold(reading, next_chunk));
    let mut response = (
        [(STREAM_BYTES, total.to_string()), (TRUNCATED, truncated.to_string())],
        [(header::CONTENT_TYPE, "application/octet-stream")],
        body,
    )
        .into_response();
    if let Some(length) = length {
        response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    Ok(response)
}

async fn next_chunk(mut reading: Reading) -> Option<(Result<Bytes, ApiError>, Reading)> {
    while reading.left > 0 {
        let mut chunk = Vec::new();
        let max = usize::try_from(reading.left).unwrap_or(usize::MAX).min(CHUNK);
        match reading.reader.step(max, &mut chunk).await {
            Ok(Step::Data) => {
                reading.left -= chunk.len() as u64;
                reading.entered.handle.traffic.count_out(chunk.len());
                return Some((Ok(chunk.into()), reading));
            }
            Ok(Step::Gap { .. }) => {}
            Ok(Step::Wait) if reading.follow => reading.reader.changed().await,
            Ok(Step::Wait | Step::End) => return None,
            Err(error) => {
                reading.left = 0;
                return Some((Err(error), reading));
            }
        }
    }
    None
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StdinParams {
    close: Option<bool>,
}

pub(super) async fn stdin(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Params(params): Params<StdinParams>,
    mut body: Body,
) -> Answer<StatusCode> {
    let exec = entered.guest().execs.get(&eid)?;
    input::check_open(&exec)?;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| invalid("the request's body ended before its length was reached"))?;
        if let Ok(bytes) = frame.into_data() {
            entered.handle.traffic.count_in(bytes.len());
            input::write(entered.guest(), &exec, &bytes).await?;
        }
    }
    if params.close.unwrap_or(true) {
        input::close(entered.guest(), &exec).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn signal(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Json(request): Json<SignalRequest>,
) -> Answer {
    let exec: Arc<Exec> = entered.guest().execs.get(&eid)?;
    let number = input::signal_number(&request.signal)?;
    input::signal(entered.guest(), &exec, number, request.tree).await?;
    Ok(json(StatusCode::OK, &exec.record()))
}

pub(super) async fn resize(
    In(entered): In,
    PathOf(ExecPath { eid }): PathOf<ExecPath>,
    Json(size): Json<PtySize>,
) -> Answer<StatusCode> {
    run::check_pty("rows", Some(size))?;
    let exec = entered.guest().execs.get(&eid)?;
    input::resize(entered.guest(), &exec, size).await?;
    Ok(StatusCode::NO_CONTENT)
}
