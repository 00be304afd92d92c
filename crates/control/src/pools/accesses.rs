//! What was asked for since it was last written down.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sandboxes of different layers that wait to be written: some MiB, and what the database takes in a second.
const WAITING_MAX: usize = 20_000;
/// Longest names of one sandbox's layers together, bytes: an index of the database has rows of some 2,700.
const LAYERS_LEN_MAX: usize = 1024;

/// How often sandboxes of the same layers were made.
#[derive(Debug, Default)]
pub(super) struct Accesses {
    waiting: Mutex<HashMap<String, u64>>,
    lost: AtomicU64,
}

impl Accesses {
    fn waiting(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One was made of these layers. None: there is nothing to bring anywhere.
    pub(super) fn add(&self, layers: &str) {
        if !layers.is_empty() {
            self.add_times(layers, 1);
        }
    }

    fn add_times(&self, layers: &str, times: u64) {
        let mut waiting = self.waiting();
        if let Some(count) = waiting.get_mut(layers) {
            *count += times;
        } else if waiting.len() < WAITING_MAX && layers.len() <= LAYERS_LEN_MAX {
            waiting.insert(layers.to_owned(), times);
        } else {
            self.lost.fetch_add(times, Ordering::Relaxed);
        }
    }

    /// All of them, which are not waiting any more.
    pub(super) fn take(&self) -> HashMap<String, u64> {
        std::mem::take(&mut *self.waiting())
    }

    /// What could not be written.
    pub(super) fn put_back(&self, taken: HashMap<String, u64>) {
        for (layers, times) in taken {
            self.add_times(&layers, times);
        }
    }

    /// How many were not recorded.
    pub(super) fn lost(&self) -> &AtomicU64 {
        &self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_written_is_written_the_next_time() {
        let accesses = Accesses::default();
        for layers in ["base/a", "base/b", "base/a", ""] {
            accesses.add(layers);
        }
        let taken = accesses.take();
        assert_eq!((taken.len(), taken["base/a"]), (2, 2));
        assert!(accesses.take().is_empty());
        accesses.add("base/a");
        accesses.put_back(taken);
        assert_eq!(accesses.take()["base/a"], 3);
    }

    #[test]
    fn what_waits_is_bounded_and_what_is_lost_is_counted() {
        let accesses = Accesses::default();
        (0..WAITING_MAX + 5).for_each(|number| accesses.add(&format!("base/{number}")));
        accesses.add("base/0");
        accesses.add(&"x".repeat(LAYERS_LEN_MAX + 1));
        assert_eq!(accesses.lost().load(Ordering::Relaxed), 6);
        let taken = accesses.take();
        assert_eq!((taken.len(), taken["base/0"]), (WAITING_MAX, 2));
    }
}
