//! How full a node is, as one number.

use std::collections::VecDeque;

/// What a sandbox is expected to take of a node in the seconds before a report shows what it really takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
}

impl Expected {
    /// Of one that is not known better. Nine of ten sandboxes use a twentieth of what they ask for, so what they ask for
    /// says nothing; a start and a shell take this much.
    pub const START: Self = Self { memory_mib: 48, cpu_millis: 250 };
}

/// How full a node is: 0 when nothing is used, without an upper bound when something is all used.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Load(pub f64);

/// Memory weighs most: who runs out of it loses sandboxes. Who runs out of processor time loses speed, and counts stand for
/// kernel objects that neither shows.
const MEMORY_WEIGHT: f64 = 1.0;
const CPU_WEIGHT: f64 = 0.5;
const COUNT_WEIGHT: f64 = 0.25;
/// Nothing counts as fuller than this, so that a node with one thing used up still compares.
const FULLEST: f64 = 0.999;

impl Load {
    /// From the shares that are used, 0 to 1 (more is taken as all). Each counts as the length of a queue would, x / (1 - x): little
    /// while there is room, and beyond any weight when it is nearly used up. A sum of shares would take a node without
    /// memory for a good one because its processors idle.
    pub fn of(memory: f64, cpu: f64, count: f64) -> Self {
        let steep = |share: f64| {
            let share = share.clamp(0.0, FULLEST);
            share / (1.0 - share)
        };
        Self(MEMORY_WEIGHT * steep(memory) + CPU_WEIGHT * steep(cpu) + COUNT_WEIGHT * steep(count))
    }
}

/// How long after it was sent a create is surely counted by the node that got it, ms: the way there, and being admitted.
const ON_ITS_WAY_MS: u64 = 100;
/// How long a placement counts without a report that shows it, ms. By then the node has been silent for so long that
/// placement avoids it anyway.
const EXPIRES_MS: u64 = 30_000;

/// This replica's own placements on a node that its last report cannot show yet.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlight {
    /// When each was sent, ms, the oldest first, and what it is expected to take.
    sent: VecDeque<(u64, Expected)>,
    memory_mib: u64,
    cpu_millis: u64,
}

impl InFlight {
    pub(super) fn count(&self) -> u64 {
        self.sent.len() as u64
    }

    pub(super) fn memory_mib(&self) -> u64 {
        self.memory_mib
    }

    pub(super) fn cpu_millis(&self) -> u64 {
        self.cpu_millis
    }

    pub(super) fn add(&mut self, now_ms: u64, expected: Expected) {
        self.sent.push_back((now_ms, expected));
        self.memory_mib += expected.memory_mib;
        self.cpu_millis += expected.cpu_millis;
    }

    /// The node did not take one that was sent then.
    pub(super) fn take_back(&mut self, sent_ms: u64) {
        if let Some(at) = self.sent.iter().rposition(|(sent, _)| *sent == sent_ms)
            && let Some((_, expected)) = self.sent.remove(at)
        {
            self.subtract(expected);
        }
    }

    /// A report came that was asked for then: what was sent well before is in it.
    pub(super) fn shown(&mut self, asked_ms: u64) {
        self.drop_until(asked_ms.saturating_sub(ON_ITS_WAY_MS));
    }

    pub(super) fn expire(&mut self, now_ms: u64) {
        self.drop_until(now_ms.saturating_sub(EXPIRES_MS));
    }

    fn drop_until(&mut self, until_ms: u64) {
        while let Some(&(sent_ms, expected)) = self.sent.front()
            && sent_ms < until_ms
        {
            self.sent.pop_front();
            self.subtract(expected);
        }
    }

    fn subtract(&mut self, expected: Expected) {
        self.memory_mib -= expected.memory_mib;
        self.cpu_millis -= expected.cpu_millis;
    }
}
