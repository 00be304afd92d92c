//! What happened to a sandbox, for its `logs`: in memory, and in `STATE/sandboxes/<random>/events.ndjson`
//! so that it outlives an edge that is killed.
//!
//! A line is written when it is added, by one `write` into the page cache; not synced, since a power cut
//! ends the sandbox as well.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::clock::now_ms;

/// Its name in the sandbox's directory.
pub const FILE: &str = "events.ndjson";
/// Its next version, while it is shortened.
pub const DRAFT: &str = "events.ndjson.new";
/// Events kept of a living sandbox: a rollout's worth of commands.
const LIVING_MAX: usize = 256;
/// Events kept of one that has ended, of which there may be ten thousand.
const ENDED_MAX: usize = 32;
/// Bytes of one line; of a longer one time and name are kept.
const LINE_MAX: usize = 16 << 10;
/// Bytes kept of a living sandbox.
const LIVING_BYTES_MAX: usize = 512 << 10;
/// Bytes kept of one that has ended.
const ENDED_BYTES_MAX: usize = 16 << 10;
/// Bytes of the file, which is then written anew with what is kept.
const FILE_BYTES_MAX: usize = 2 * LIVING_BYTES_MAX;

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<Box<str>>,
    bytes: usize,
    log: Option<Log>,
}

/// The last events, as lines of JSON.
#[derive(Debug, Default)]
pub struct EventRing {
    kept: Mutex<Kept>,
}

impl Kept {
    fn add(&mut self, line: Box<str>) {
        self.bytes += line.len();
        self.lines.push_back(line);
        self.keep(LIVING_MAX, LIVING_BYTES_MAX);
    }

    fn keep(&mut self, lines_max: usize, bytes_max: usize) {
        while self.lines.len() > lines_max || self.bytes > bytes_max {
            let Some(oldest) = self.lines.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }

    fn text(&self) -> String {
        self.lines.iter().flat_map(|line| [line.as_ref(), "\n"]).collect()
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        let Some(log) = &mut self.log else { return Ok(()) };
        if log.bytes + line.len() < FILE_BYTES_MAX {
            log.bytes += line.len() + 1;
            return log.file.write_all(format!("{line}\n").as_bytes());
        }
        // The line is among those that are kept.
        let path = log.path.clone();
        let text = self.text();
        let draft = path.with_file_name(DRAFT);
        std::fs::write(&draft, &text)?;
        std::fs::rename(&draft, &path)?;
        let file = File::options().append(true).open(&path)?;
        self.log = Some(Log { path, file, bytes: text.len() });
        Ok(())
    }
}

impl EventRing {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what an earlier edge wrote into a sandbox's directory, and writes there from now on.
    ///
    /// # Errors
    /// The disk's.
    pub fn write_into(&self, directory: &Path) -> io::Result<()> {
        std::fs::create_dir_all(directory)?;
        let path = directory.join(FILE);
        let mut file = File::options().create(true).append(true).open(&path)?;
        let earlier = self.read_from(directory);
        if earlier > 0 {
            // An edge that was killed may have written half a line.
            file.write_all(b"\n")?;
        }
        self.kept().log = Some(Log { path, file, bytes: earlier });
        Ok(())
    }

    /// Reads what an earlier edge wrote into a sandbox's directory; its bytes.
    pub fn read_from(&self, directory: &Path) -> usize {
        let text = std::fs::read(directory.join(FILE)).unwrap_or_default();
        self.restore(String::from_utf8_lossy(&text).lines());
        text.len()
    }

    /// Adds lines of an earlier edge. What is no whole line is left out.
    pub fn restore<'a>(&self, lines: impl Iterator<Item = &'a str>) {
        let mut kept = self.kept();
        for line in lines.filter(|line| serde_json::from_str::<Value>(line).is_ok()) {
            kept.add(line.into());
        }
    }

    /// Adds one; `fields` is an object.
    pub fn push(&self, event: &str, fields: Value) {
        self.push_of(now_ms(), event, fields);
    }

    /// Adds one that happened earlier and was not seen then.
    pub fn push_of(&self, time_ms: u64, event: &str, fields: Value) {
        let head = json!({ "time_ms": time_ms, "event": event });
        let mut whole = head.clone();
        if let (Value::Object(line), Value::Object(fields)) = (&mut whole, fields) {
            line.extend(fields);
        }
        let mut line = whole.to_string();
        if line.len() > LINE_MAX {
            line = head.to_string();
        }
        let mut kept = self.kept();
        kept.add(line.clone().into_boxed_str());
        if let Err(error) = kept.write(&line) {
            tracing::error!(%error, "a sandbox's events cannot be written down");
            kept.log = None;
        }
    }

    /// When the last one was.
    pub fn last_ms(&self) -> Option<u64> {
        let line: Value = serde_json::from_str(self.kept().lines.back()?).ok()?;
        line["time_ms"].as_u64()
    }

    /// Keeps only the last few, and writes no more.
    pub fn shorten(&self) {
        let mut kept = self.kept();
        kept.keep(ENDED_MAX, ENDED_BYTES_MAX);
        kept.lines.shrink_to_fit();
        kept.log = None;
    }

    /// All that is kept, a line each.
    pub fn ndjson(&self) -> String {
        self.kept().text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_and_every_line_is_json() {
        let ring = EventRing::default();
        for i in 0..300 {
            ring.push("tick", json!({ "i": i }));
        }
        let text = ring.ndjson();
        let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!((first["i"].as_u64(), text.lines().count()), (Some(44), LIVING_MAX));
        ring.shorten();
        assert_eq!(ring.ndjson().lines().count(), ENDED_MAX);
    }

    #[test]
    fn events_are_read_again_and_their_file_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let ring = EventRing::default();
        ring.write_into(&dir.path().join("one")).unwrap();
        for i in 0..3000 {
            ring.push("exec_started", json!({ "i": i, "command": "x".repeat(1000) }));
        }
        ring.push("huge", json!({ "field": "y".repeat(2 * LINE_MAX) }));
        let size = std::fs::metadata(dir.path().join("one").join(FILE)).unwrap().len();
        assert!(size <= FILE_BYTES_MAX as u64, "{size}");
        let before = ring.ndjson();
        assert!(before.lines().last().unwrap().contains("huge") && before.len() <= LIVING_BYTES_MAX);
        // Killed here, in the middle of a line.
        File::options()
            .append(true)
            .open(dir.path().join("one").join(FILE))
            .unwrap()
            .write_all(b"{\"ti")
            .unwrap();
        let again = EventRing::default();
        again.write_into(&dir.path().join("one")).unwrap();
        assert_eq!(again.ndjson(), before);
        assert_eq!(again.last_ms(), ring.last_ms());
        again.push("later", json!({}));
        let third = EventRing::default();
        third.write_into(&dir.path().join("one")).unwrap();
        assert_eq!(third.ndjson(), again.ndjson());
    }
}
