//! `STATE/ended.jsonl`: sandboxes that have ended, so that they stay listed over a restart.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dsec_proto::rest::Sandbox;
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::idempotency::StoredKey;
use crate::registry::{REMEMBERED_MAX, REMEMBERED_MS};

/// Lines below which it is not worth compacting.
const COMPACT_MIN: usize = 2000;

/// One line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ended {
    /// The last record.
    pub sandbox: Sandbox,
    /// The create's idempotency key.
    pub key: Option<StoredKey>,
    /// Its last events, a line each.
    #[serde(default)]
    pub events: String,
}

#[derive(Debug)]
struct Writer {
    file: File,
    lines: usize,
    compact_at: usize,
}

/// The log.
#[derive(Debug)]
pub struct EndedLog {
    path: PathBuf,
    writer: Mutex<Writer>,
}

impl EndedLog {
    /// Opens it, compacts it, and returns what is still remembered, oldest first.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(state_dir: &Path) -> io::Result<(Self, Vec<Ended>)> {
        let path = state_dir.join("ended.jsonl");
        let kept = read(&path)?;
        let writer = rewrite(&path, &kept)?;
        Ok((Self { path, writer: Mutex::new(writer) }, kept))
    }

    /// Adds one. Blocks for some microseconds, rarely for a compaction.
    ///
    /// # Errors
    /// The disk's.
    pub fn append(&self, ended: &Ended) -> io::Result<()> {
        let mut line = serde_json::to_vec(ended)?;
        line.push(b'\n');
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.file.write_all(&line)?;
        writer.lines += 1;
        if writer.lines >= writer.compact_at {
            *writer = rewrite(&self.path, &read(&self.path)?)?;
        }
        Ok(())
    }
}

/// The lines that are still remembered; one that is damaged is skipped, of two for one sandbox the
/// later counts.
fn read(path: &Path) -> io::Result<Vec<Ended>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let oldest = now_ms().saturating_sub(REMEMBERED_MS);
    let mut by_id = HashMap::new();
    for line in BufReader::new(file).split(b'\n') {
        let Ok(ended) = serde_json::from_slice::<Ended>(&line?) else { continue };
        if ended.sandbox.ended_ms.is_some_and(|at| at >= oldest) {
            by_id.insert(ended.sandbox.id.clone(), ended);
        }
    }
    let mut kept: Vec<Ended> = by_id.into_values().collect();
    kept.sort_by_key(|ended| ended.sandbox.ended_ms);
    kept.drain(..kept.len().saturating_sub(REMEMBERED_MAX));
    Ok(kept)
}

fn rewrite(path: &Path, kept: &[Ended]) -> io::Result<Writer> {
    let draft = path.with_extension("jsonl.new");
    let mut bytes = Vec::new();
    for ended in kept {
        serde_json::to_writer(&mut bytes, ended)?;
        bytes.push(b'\n');
    }
    std::fs::write(&draft, bytes)?;
    std::fs::rename(&draft, path)?;
    let file = File::options().append(true).open(path)?;
    Ok(Writer { file, lines: kept.len(), compact_at: (kept.len() * 2).max(COMPACT_MIN) })
}
