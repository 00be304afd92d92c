//! Traces: in which order a blob's groups were first wanted, so that the next run finds them there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::cache::{Bits, CachedBlob, hold};

/// Most groups in a trace: 16 GiB of first touches, 640 KiB encoded. What comes later than that in a run is not what its
/// start waits for.
pub const TRACE_GROUPS_MAX: usize = 65_536;
/// Weight of one run. A merge leaves three quarters of what was there, so some fifteen runs without a group forget it.
const RUN_WEIGHT: u16 = 256;
/// Below this a group is forgotten.
const WEIGHT_MIN: u16 = 16;
/// First touches outside the trace before prefetching may stop: a run begins with a few of its own.
const STRAYS_MIN: u32 = 16;

const MAGIC: &[u8; 8] = b"DSECTRC1";
const STEP: usize = 4 + 4 + 2;

/// Why bytes are not a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a trace: {0}")]
pub struct TraceError(&'static str);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    group: u32,
    /// Place in the order, in sixteenths, averaged over runs.
    rank: u32,
    weight: u16,
}

/// The order in which a blob's groups were first wanted, over one run or several.
///
/// ```text
/// "DSECTRC1"  runs u32  steps u32  steps x (group u32  rank u32  weight u16)      little-endian
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    runs: u32,
    /// By rank.
    steps: Vec<Step>,
}

impl Trace {
    /// Of one run; groups that come again are left out, and so is what exceeds [`TRACE_GROUPS_MAX`].
    pub fn of_run(order: &[u32]) -> Self {
        let mut seen = std::collections::HashSet::new();
        let firsts = order.iter().filter(|group| seen.insert(**group)).take(TRACE_GROUPS_MAX);
        let step = |(rank, group): (u32, &u32)| Step { group: *group, rank: rank * 16, weight: RUN_WEIGHT };
        Self { runs: 1, steps: (0..).zip(firsts).map(step).collect() }
    }

    /// Runs it was made of.
    pub fn runs(&self) -> u32 {
        self.runs
    }

    /// Adds a later trace: what both have lies where it lay on average, what was not wanted again fades.
    pub fn merge(&mut self, later: &Self) {
        let mut steps: HashMap<u32, Step> = HashMap::with_capacity(self.steps.len());
        for step in &self.steps {
            let weight = step.weight - step.weight / 4;
            steps.insert(step.group, Step { weight, ..*step });
        }
        for new in &later.steps {
            let of_both = |old: &mut Step| {
                let (a, b) = (u64::from(old.weight), u64::from(new.weight));
                old.rank = ((u64::from(old.rank) * a + u64::from(new.rank) * b) / (a + b).max(1)) as u32;
                old.weight = old.weight.saturating_add(new.weight);
            };
            steps.entry(new.group).and_modify(of_both).or_insert(*new);
        }
        self.steps = steps.into_values().filter(|step| step.weight >= WEIGHT_MIN).collect();
        self.steps.sort_unstable_by_key(|step| (step.rank, step.group));
        self.steps.truncate(TRACE_GROUPS_MAX);
        self.runs = self.runs.saturating_add(later.runs);
    }

    /// What to bring in, and in which order: what weighs at least a quarter of what weighs most.
    pub fn order(&self) -> Vec<u32> {
        let heaviest = self.steps.iter().map(|step| step.weight).max().unwrap_or_default();
        self.steps.iter().filter(|step| step.weight >= heaviest / 4).map(|step| step.group).collect()
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&self.runs.to_le_bytes());
        out.extend_from_slice(&(self.steps.len() as u32).to_le_bytes());
        for step in &self.steps {
            out.extend_from_slice(&step.group.to_le_bytes());
            out.extend_from_slice(&step.rank.to_le_bytes());
            out.extend_from_slice(&step.weight.to_le_bytes());
        }
        out
    }

    /// Reads a trace. Its groups may be beyond a blob's end; whoever uses them looks.
    ///
    /// # Errors
    /// It is none, is cut, goes on after its end, or is too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let (head, rest) = bytes.split_at_checked(16).ok_or(TraceError("it is cut"))?;
        if &head[..8] != MAGIC {
            return Err(TraceError("it does not begin as one of this version"));
        }
        let number =
            |raw: &[u8], at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let steps = number(head, 12) as usize;
        if steps > TRACE_GROUPS_MAX {
            return Err(TraceError("it is too long"));
        }
        if rest.len() != steps * STEP {
            return Err(TraceError("its length does not fit its count"));
        }
        let step = |raw: &[u8]| Step {
            group: number(raw, 0),
            rank: number(raw, 4),
            weight: u16::from_le_bytes([raw[8], raw[9]]),
        };
        let mut steps: Vec<Step> = rest.chunks_exact(STEP).map(step).collect();
        steps.sort_by_key(|step| step.rank);
        Ok(Self { runs: number(head, 8), steps })
    }
}

/// Notes what a blob's readers want for the first time.
#[derive(Debug)]
pub(crate) struct Recorder {
    wanted: Bits,
    order: Mutex<Vec<u32>>,
    followed: Mutex<Option<Arc<Followed>>>,
}

/// A trace that is prefetched along, and what the readers thought of it.
#[derive(Debug)]
struct Followed {
    groups: Bits,
    hits: AtomicU32,
    strays: AtomicU32,
}

impl Recorder {
    pub(crate) fn new(groups: u64) -> Self {
        Self { wanted: Bits::new(groups, []), order: Mutex::default(), followed: Mutex::default() }
    }

    /// A reader wants these bytes, which are the blob's.
    pub(crate) fn touch_all(&self, blob: &CachedBlob, range: Range<u64>) {
        for group in blob.groups_of(&range) {
            if !self.wanted.get(group) && self.wanted.set(group) {
                self.first_touch(group);
            }
        }
    }

    fn first_touch(&self, group: u64) {
        let mut order = hold(&self.order);
        if order.len() < TRACE_GROUPS_MAX {
            order.push(group as u32);
        }
        drop(order);
        if let Some(followed) = hold(&self.followed).as_ref() {
            let counter = if followed.groups.get(group) { &followed.hits } else { &followed.strays };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The trace of what was wanted since the worker began, or since the last restart of the recording.
    pub(crate) fn trace(&self) -> Trace {
        Trace::of_run(&hold(&self.order))
    }

    /// Begins anew.
    pub(crate) fn restart(&self, groups: u64) {
        let mut order = hold(&self.order);
        (0..groups).for_each(|group| {
            self.wanted.clear(group);
        });
        order.clear();
    }
}

/// Prefetching along a trace, for as long as this lives; a later one on the same blob takes its place.
#[derive(Debug)]
pub(crate) struct Prefetching<'a> {
    recorder: &'a Recorder,
    followed: Arc<Followed>,
}

impl<'a> Prefetching<'a> {
    pub(crate) fn begin(recorder: &'a Recorder, order: &[u32], groups: u64) -> Self {
        let bits = Bits::new(groups, []);
        for group in order.iter().filter(|group| u64::from(**group) < groups) {
            bits.set(u64::from(*group));
        }
        let followed =
            Arc::new(Followed { groups: bits, hits: AtomicU32::new(0), strays: AtomicU32::new(0) });
        *hold(&recorder.followed) = Some(followed.clone());
        Self { recorder, followed }
    }

    /// Whether most of what readers want is not in the trace.
    pub(crate) fn disagrees(&self) -> bool {
        let (hits, strays) =
            (self.followed.hits.load(Ordering::Relaxed), self.followed.strays.load(Ordering::Relaxed));
        strays >= STRAYS_MIN && strays > hits
    }
}

impl Drop for Prefetching<'_> {
    fn drop(&mut self) {
        let mut followed = hold(&self.recorder.followed);
        if followed.as_ref().is_some_and(|followed| Arc::ptr_eq(followed, &self.followed)) {
            *followed = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_trace_survives_its_encoding_and_any_cut_is_refused(order in prop::collection::vec(any::<u32>(), 0..50), cut in any::<prop::sample::Index>()) {
            let trace = Trace::of_run(&order);
            let bytes = trace.encode();
            prop_assert_eq!(Trace::decode(&bytes).unwrap(), trace);
            prop_assert!(Trace::decode(&bytes[..cut.index(bytes.len())]).is_err());
            prop_assert!(Trace::decode(&[bytes.as_slice(), b"x"].concat()).is_err());
        }
    }

    #[test]
    fn merged_runs_keep_the_common_order_and_forget_what_is_not_wanted_again() {
        let mut trace = Trace::of_run(&[1, 2, 3, 99]);
        for _ in 0..3 {
            trace.merge(&Trace::of_run(&[1, 3, 2, 4]));
        }
        assert_eq!(trace.runs(), 4);
        let order = trace.order();
        assert_eq!(order[..3], [1, 3, 2], "later runs outweigh the first");
        assert!(order.contains(&4) && !order.contains(&99), "{order:?}");
        for _ in 0..20 {
            trace.merge(&Trace::of_run(&[7]));
        }
        assert_eq!(trace.order(), [7]);
        assert!(trace.steps.iter().all(|step| step.group == 7), "forgotten, not only left out");
    }

    #[test]
    fn a_group_that_repeats_counts_once() {
        assert_eq!(Trace::of_run(&[5, 5, 4, 5]).order(), [5, 4]);
    }
}
