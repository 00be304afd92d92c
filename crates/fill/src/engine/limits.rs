//! What the engine may take, and what it reports.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dsec_image::layer::{BlobId, GROUP_SIZE};
use serde::{Deserialize, Serialize};

use crate::cache::CacheError;
use crate::source::FetchError;

/// What the engine may take. Fields left out of a configuration have these defaults.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Fetches at once for somebody who waits. Enough to fill a fast network at 256 KiB and tens of milliseconds each.
    pub fetches: usize,
    /// Fetches at once ahead of demand.
    pub prefetches: usize,
    /// Bytes in memory that were fetched and are not yet in the cache or with their reader; a quarter is for prefetching.
    pub memory_bytes: u64,
    /// Neighbouring groups in one fetch.
    pub run_groups: usize,
    /// How long a read waits for a store that does not answer before it fails.
    pub outage_ms: u64,
    /// How long one fetch may take before it is given up and tried again.
    pub attempt_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            fetches: 48,
            prefetches: 16,
            memory_bytes: 256 << 20,
            run_groups: 16,
            outage_ms: 60_000,
            attempt_ms: 15_000,
        }
    }
}

/// Limits that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the fill engine's limits do not go together: {0}")]
pub struct LimitsError(String);

impl Limits {
    /// Bytes that a run may take in memory: as stored and as plain.
    pub(crate) fn run_bytes(&self) -> u64 {
        2 * GROUP_SIZE * self.run_groups as u64
    }

    /// Bytes that prefetching may take.
    pub(crate) fn prefetch_bytes(&self) -> u64 {
        self.memory_bytes / 4
    }

    /// How long a read waits for the store.
    pub(crate) fn outage(&self) -> Duration {
        Duration::from_millis(self.outage_ms)
    }

    /// How long a fetch may take.
    pub(crate) fn attempt(&self) -> Duration {
        Duration::from_millis(self.attempt_ms)
    }

    /// # Errors
    /// Nothing could ever be fetched under them.
    pub fn check(&self) -> Result<(), LimitsError> {
        /// Beyond a day it is no limit, and far beyond that no clock holds it.
        const LONGEST_MS: u64 = 86_400_000;
        if self.fetches == 0 || self.prefetches == 0 || self.run_groups == 0 {
            return Err(LimitsError("fetches, prefetches and run_groups must be at least 1".to_owned()));
        }
        if self.prefetch_bytes() < self.run_bytes() {
            let least = 4 * self.run_bytes();
            let given = self.memory_bytes;
            return Err(LimitsError(format!(
                "memory_bytes is {given}; with this run_groups it must be at least {least}"
            )));
        }
        if self.memory_bytes / 4096 > u64::from(u32::MAX >> 3) {
            return Err(LimitsError("memory_bytes is beyond 2 TiB".to_owned()));
        }
        if [self.outage_ms, self.attempt_ms].into_iter().any(|time_ms| !(1..=LONGEST_MS).contains(&time_ms)) {
            return Err(LimitsError("outage_ms and attempt_ms must be from 1 to 86400000".to_owned()));
        }
        Ok(())
    }
}

/// Why a read got no bytes. The next read of the same bytes tries again.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FillError {
    /// The store did not give them in time.
    #[error("blob {blob}: the store did not give what was asked for within the limit")]
    Unreachable {
        /// The blob.
        blob: BlobId,
        /// The last answer.
        #[source]
        source: FetchError,
    },
    /// All that the engine may do at once was taken, for longer than the limit.
    #[error("blob {blob}: no fetch could begin within the limit")]
    Busy {
        /// The blob.
        blob: BlobId,
    },
    /// The store does not have them.
    #[error("blob {blob} is incomplete in the store")]
    Missing {
        /// The blob.
        blob: BlobId,
        /// What is missing.
        #[source]
        source: FetchError,
    },
    /// The store has other bytes, each time they were fetched.
    #[error("blob {blob} is damaged in the store: {what} has another digest")]
    Damaged {
        /// The blob.
        blob: BlobId,
        /// Which part.
        what: String,
    },
    /// The cache could not be used.
    #[error("blob {blob}: {what}")]
    Cache {
        /// The blob.
        blob: BlobId,
        /// The error with its causes.
        what: String,
    },
    /// The engine stopped.
    #[error("blob {blob}: the fill engine stopped meanwhile")]
    Stopped {
        /// The blob.
        blob: BlobId,
    },
}

impl FillError {
    pub(crate) fn cache(blob: BlobId, error: &CacheError) -> Self {
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Self::Cache { blob, what: format!("{error}{cause}") }
    }
}

/// What was done for a blob since this worker began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Bytes that readers asked for.
    pub asked_bytes: u64,
    /// Of these, bytes that were in the cache.
    pub cached_bytes: u64,
    /// Bytes that came from the store, as stored, wrong ones included.
    pub fetched_bytes: u64,
    /// Fetches from the store, failed ones included.
    pub fetches: u64,
    /// Groups that were checked and became readable.
    pub filled_groups: u64,
    /// Groups that were checked and did not fit into the cache.
    pub uncached_groups: u64,
    /// Groups that came with wrong bytes.
    pub wrong_groups: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Microseconds that readers waited for content that was not here.
    pub waited_us: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// [`Counts`], counting.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        impl Counters {
            pub(crate) fn now(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl std::ops::Add for Counts {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name),* }
            }
        }
    };
}

counters!(
    asked_bytes,
    cached_bytes,
    fetched_bytes,
    fetches,
    filled_groups,
    uncached_groups,
    wrong_groups,
    failed_reads,
    waited_us
);

pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}
