//! What happened to a sandbox, for its `logs`.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::clock::now_ms;

/// Events kept of a living sandbox: a rollout's worth of commands.
const LIVING_MAX: usize = 256;
/// Events kept of one that has ended, of which there may be ten thousand.
const ENDED_MAX: usize = 32;

/// The last events, as lines of JSON.
#[derive(Debug, Default)]
pub struct EventRing {
    lines: Mutex<VecDeque<Box<str>>>,
}

impl EventRing {
    /// Adds one; `fields` is an object.
    pub fn push(&self, event: &str, fields: Value) {
        let mut line = json!({ "time_ms": now_ms(), "event": event });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LIVING_MAX {
            lines.pop_front();
        }
        lines.push_back(line.to_string().into_boxed_str());
    }

    /// Keeps only the last few.
    pub fn shorten(&self) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let surplus = lines.len().saturating_sub(ENDED_MAX);
        lines.drain(..surplus);
        lines.shrink_to_fit();
    }

    /// All that is kept, a line each.
    pub fn ndjson(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().flat_map(|line| [line.as_ref(), "\n"]).collect()
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
}
