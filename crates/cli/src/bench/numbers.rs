//! Percentiles out of all samples, and rates.

use std::time::Duration;

use serde::Serialize;

/// Latencies in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// Half of the samples are at most this.
    pub(crate) p50_ms: f64,
    /// 90 of 100.
    pub(crate) p90_ms: f64,
    /// 99 of 100.
    pub(crate) p99_ms: f64,
    /// All.
    pub(crate) max_ms: f64,
}

impl Summary {
    /// Of these samples; zeros when there are none.
    pub(crate) fn of(samples: impl Iterator<Item = Duration>) -> Self {
        let mut sorted: Vec<Duration> = samples.collect();
        sorted.sort_unstable();
        let at = |q| percentile(&sorted, q).map_or(0.0, ms);
        Self { p50_ms: at(50.0), p90_ms: at(90.0), p99_ms: at(99.0), max_ms: at(100.0) }
    }
}

/// The smallest sample that at least `q` of 100 samples do not exceed (nearest rank): always one that
/// was measured, never a value between two.
pub(crate) fn percentile<T: Copy>(sorted: &[T], q: f64) -> Option<T> {
    let rank = (q / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// Milliseconds, to the microsecond.
pub(crate) fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// To three decimals.
pub(crate) fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// So much in so long, a second, to three decimals.
pub(crate) fn rate(amount: f64, wall: Duration) -> f64 {
    let seconds = wall.as_secs_f64();
    if seconds > 0.0 { round(amount / seconds) } else { 0.0 }
}

/// MiB a second.
pub(crate) fn mib_rate(bytes: u64, wall: Duration) -> f64 {
    rate(bytes as f64 / crate::parse::MIB as f64, wall)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_of_a_hundred_are_the_ranks() {
        let sorted: Vec<u32> = (1..=100).collect();
        let at = |q| percentile(&sorted, q);
        assert_eq!((at(50.0), at(90.0), at(99.0), at(100.0)), (Some(50), Some(90), Some(99), Some(100)));
        assert_eq!(percentile(&[7], 1.0), Some(7));
        assert_eq!(percentile::<u32>(&[], 50.0), None);
        assert_eq!(Summary::of(std::iter::empty()), Summary::default());
    }

    proptest! {
        #[test]
        fn a_percentile_is_a_sample_with_enough_below_and_not_more_than_needed(
            mut samples in proptest::collection::vec(0u32..1000, 1..200), q in 0.1f64..100.0
        ) {
            samples.sort_unstable();
            let value = percentile(&samples, q).unwrap();
            let share = |n: usize| n as f64 / samples.len() as f64 * 100.0;
            let at_most = samples.iter().filter(|s| **s <= value).count();
            let below = samples.iter().filter(|s| **s < value).count();
            prop_assert!(samples.contains(&value));
            prop_assert!(share(at_most) >= q - 1e-9);
            prop_assert!(share(below) < q + 1e-9);
        }

        #[test]
        fn percentiles_do_not_fall(samples in proptest::collection::vec(0u64..10_000, 1..100)) {
            let s = Summary::of(samples.iter().map(|us| Duration::from_micros(*us)));
            prop_assert!(s.p50_ms <= s.p90_ms && s.p90_ms <= s.p99_ms && s.p99_ms <= s.max_ms);
        }
    }
}
