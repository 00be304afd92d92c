//! `dsec bench output` and `dsec bench files`: where bytes move.

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use dsec_model::SandboxId;
use dsec_proto::rest::{ApiError, AttachEvent, ExecRequest};
use futures_util::{StreamExt, stream};

use super::numbers::mib_rate;
use super::{Load, Report};
use crate::client::{ClientError, Frame, Offsets, Transfer};
use crate::commands::Context;
use crate::failure::Failure;
use crate::parse::{self, MIB};

pub(crate) const OUTPUT_EXAMPLES: &str = "\
Examples:
  dsec bench output
  dsec bench output --size 256m --count 10 --concurrency 4 --json
  dsec bench output --raw        over GET .../stdout and not the WebSocket

A run starts `head -c SIZE /dev/zero` and reads all of its output while it runs.";
pub(crate) const FILES_EXAMPLES: &str = "\
Examples:
  dsec bench files
  dsec bench files --size 64m --count 20 --concurrency 4 --json

A run writes a file of SIZE into the sandbox and reads it back; every byte is compared.";

/// Runs when `--count` is not given: each moves much.
const COUNT: u64 = 3;
/// Bytes of one piece of an upload.
const PIECE: usize = 1 << 20;
/// Room beside the files themselves.
const DISK_SPARE: u64 = 64 * MIB;

/// `dsec bench output`.
#[derive(Debug, Args)]
pub(crate) struct OutputBench {
    #[command(flatten)]
    load: Load,
    /// Bytes that the command writes
    #[arg(long, value_name = "SIZE", default_value = "1g", value_parser = parse::size)]
    size: u64,
    /// Read GET .../stdout?follow=true and not the WebSocket
    #[arg(long)]
    raw: bool,
}

/// `dsec bench files`.
#[derive(Debug, Args)]
pub(crate) struct FilesBench {
    #[command(flatten)]
    load: Load,
    /// Bytes of the file
    #[arg(long, value_name = "SIZE", default_value = "512m", value_parser = parse::size)]
    size: u64,
    /// Directory in the sandbox to keep it in; /tmp may be memory and not disk
    #[arg(long, value_name = "DIR", default_value = "/")]
    dir: String,
}

/// Measures reading a command's output.
pub(super) async fn output(context: &Context, args: OutputBench) -> Result<Report, Failure> {
    let (load, size) = (args.load, args.size);
    let sandbox = load.sandbox(context, 0).await?;
    let request = ExecRequest {
        argv: ["head", "-c", &size.to_string(), "/dev/zero"].map(str::to_owned).to_vec(),
        output_limit_bytes: Some(size),
        ..ExecRequest::default()
    };
    let once = |_| async {
        let start = Instant::now();
        let exec = context.client.exec(&sandbox.id, &request).await?;
        let read = if args.raw {
            read_raw(context, &sandbox.id, &exec.id).await?
        } else {
            read_attached(context, &sandbox.id, &exec.id).await?
        };
        let took = start.elapsed();
        if read != size {
            return Err(Failure::new(format!("{read} bytes of {size} came")));
        }
        Ok(took)
    };
    let samples = load.drive(COUNT, "reading", context.global.json, once).await;
    super::end(context, &sandbox.id).await;
    let mut report = Report::new("output", &load, &samples, |took| *took);
    report.add("size_bytes", size);
    report.add("over", if args.raw { "stdout" } else { "attach" });
    report.add("mib_per_s", mib_rate(size * samples.good.len() as u64, samples.wall));
    Ok(report)
}

async fn read_raw(context: &Context, sandbox: &SandboxId, exec: &dsec_model::ExecId) -> Result<u64, Failure> {
    let response = context.client.stdout(sandbox, exec).await?;
    let mut body = std::pin::pin!(context.client.body(response));
    let mut read = 0;
    while let Some(piece) = body.next().await {
        read += piece?.len() as u64;
    }
    Ok(read)
}

async fn read_attached(
    context: &Context,
    sandbox: &SandboxId,
    exec: &dsec_model::ExecId,
) -> Result<u64, Failure> {
    let attach = context.client.attach(sandbox, exec, Offsets::default()).await?;
    // The writing half stays: dropping it is not closing, but nothing is to be sent.
    let (mut reader, _writer) = attach.split();
    let mut read = 0;
    loop {
        match reader.next().await? {
            Frame::Stdout(bytes) => read += bytes.len() as u64,
            Frame::Stderr(bytes) => {
                return Err(Failure::new(format!("it said: {}", String::from_utf8_lossy(&bytes).trim())));
            }
            Frame::Event(AttachEvent::Exited { exec }) if exec.exit_code == Some(0) => return Ok(read),
            Frame::Event(AttachEvent::Exited { exec }) => {
                return Err(Failure::new(format!("head ended with {:?}", exec.exit_code)));
            }
            Frame::Event(AttachEvent::Skipped { from, to, .. }) => {
                return Err(Failure::new(format!("bytes {from} to {to} were skipped")));
            }
            Frame::Event(AttachEvent::Error { error }) => {
                return Err(ClientError::Api(ApiError(Box::new(error))).into());
            }
        }
    }
}

struct Moved {
    up: Duration,
    down: Duration,
}

/// Measures writing and reading a file.
pub(super) async fn files(context: &Context, args: FilesBench) -> Result<Report, Failure> {
    let (load, size) = (args.load, args.size);
    // Each run under way has its file, and an atomic replace has the old one beside the new.
    let disk = size.saturating_mul(2 * load.concurrency).saturating_add(DISK_SPARE);
    let sandbox = load.sandbox(context, disk).await?;
    let content = noise()?;
    let next = std::cell::Cell::new(0u64);
    let once = |_| {
        // As many names as runs under way, so that the disk's need stays known.
        let slot = next.get() % load.concurrency;
        next.set(next.get() + 1);
        move_file(
            context,
            &sandbox.id,
            format!("{}/dsec-bench-{slot}", args.dir.trim_end_matches('/')),
            size,
            content.clone(),
        )
    };
    let samples = load.drive(COUNT, "moving", context.global.json, once).await;
    super::end(context, &sandbox.id).await;
    let mut report = Report::new("files", &load, &samples, |moved| moved.up + moved.down);
    let bytes = size * samples.good.len() as u64;
    // Of the time spent in either direction, spread over the runs under way.
    let spread = |total: Duration| total / u32::try_from(load.concurrency).unwrap_or(u32::MAX);
    report.add("size_bytes", size);
    report.add("mib_per_s", mib_rate(bytes * 2, samples.wall));
    report.add("up_mib_per_s", mib_rate(bytes, spread(samples.good.iter().map(|m| m.up).sum())));
    report.add("down_mib_per_s", mib_rate(bytes, spread(samples.good.iter().map(|m| m.down).sum())));
    Ok(report)
}

async fn move_file(
    context: &Context,
    sandbox: &SandboxId,
    path: String,
    size: u64,
    content: Bytes,
) -> Result<Moved, Failure> {
    let client = &context.client;
    let start = Instant::now();
    let body = upload(size, content.clone());
    client.write(sandbox, Transfer::File, &[("path", path.clone())], body, Some(size)).await?;
    let up = start.elapsed();
    let start = Instant::now();
    let response = client.read(sandbox, Transfer::File, &path, None).await?;
    let mut body = std::pin::pin!(client.body(response));
    let mut at = 0;
    while let Some(piece) = body.next().await {
        let piece = piece?;
        if !same(&content, at, &piece) {
            return Err(Failure::new(format!("other bytes came back near byte {at}")));
        }
        at += piece.len() as u64;
    }
    if at != size {
        return Err(Failure::new(format!("{at} bytes of {size} came back")));
    }
    Ok(Moved { up, down: start.elapsed() })
}

fn upload(size: u64, content: Bytes) -> reqwest::Body {
    let whole = size / PIECE as u64;
    let rest = (size % PIECE as u64) as usize;
    let pieces = (0..whole).map(|_| PIECE).chain((rest > 0).then_some(rest));
    let pieces: Vec<usize> = pieces.collect();
    reqwest::Body::wrap_stream(stream::iter(
        pieces.into_iter().map(move |n| Ok::<_, std::io::Error>(content.slice(..n))),
    ))
}

/// One piece of random bytes, sent again and again: zeros would let a file system cheat.
fn noise() -> Result<Bytes, Failure> {
    let mut bytes = vec![0; PIECE];
    getrandom::fill(&mut bytes).map_err(|error| Failure::new(format!("no random bytes: {error}")))?;
    Ok(bytes.into())
}

/// Whether `piece` is what the file has from byte `at` on.
fn same(content: &[u8], at: u64, piece: &[u8]) -> bool {
    let mut offset = (at % content.len() as u64) as usize;
    let mut rest = piece;
    while !rest.is_empty() {
        let n = rest.len().min(content.len() - offset);
        if rest[..n] != content[offset..offset + n] {
            return false;
        }
        (rest, offset) = (&rest[n..], 0);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_compared_across_the_borders_of_the_pattern() {
        let content: Vec<u8> = (0..10).collect();
        assert!(same(&content, 8, &[8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]));
        assert!(same(&content, 20, &[0, 1]));
        assert!(!same(&content, 8, &[8, 9, 1]));
        assert!(same(&content, 3, &[]));
    }
}
