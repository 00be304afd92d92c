//! What placement knows of a node, and whether it could take a sandbox.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use super::load::{Expected, InFlight, Load};
use super::pool::Pools;
use crate::{NodeId, PoolName};

/// Whether a node answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// It answered when it was last asked.
    Well,
    /// It missed a report or more. It is tried when no node that is well is left: the one who asks may be cut off, not it.
    Suspect,
    /// Nothing was heard of it yet, or not for so long that nothing is sent there.
    Lost,
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// The pool that it is of.
    pub pool: PoolName,
    /// It takes no new sandboxes, until told otherwise.
    pub cordoned: bool,
    /// It waits for its sandboxes to end.
    pub draining: bool,
    /// Backends that work there.
    pub backends: BTreeSet<String>,
    /// Kernel features that work there.
    pub features: BTreeSet<String>,
    /// Its processor's architecture, `x86_64` or `aarch64`.
    pub architecture: String,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Graphics processors that are free.
    pub gpus_free: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Memory that is available now, MiB.
    pub memory_available_mib: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
    /// Share of the last seconds in which some process waited for a processor, 0 to 1 (pressure stall information).
    pub cpu_pressure: f64,
    /// Sandboxes there are, whatever their state.
    pub sandboxes: u64,
    /// Most sandboxes it takes.
    pub sandboxes_max: u64,
    /// Layers whose content is at hand there, by [`layer_number`] of what sandboxes call them.
    pub layers: Layers,
}

/// Layers, by [`layer_number`].
pub type Layers = HashSet<u64, BuildHasherDefault<AlreadySpread>>;

/// The hash of a layer's number is the number: it is spread already, and every create looks for its layers on every node.
#[derive(Debug, Clone, Copy, Default)]
pub struct AlreadySpread(u64);

impl Hasher for AlreadySpread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

/// What a sandbox needs of its node.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// The backend.
    pub backend: &'a str,
    /// The pools that it may run in.
    pub pools: Pools<'a>,
    /// Kernel features it cannot do without.
    pub features: &'a [String],
    /// The architecture of its image; none: any.
    pub architecture: Option<&'a str>,
    /// Labels its node must have.
    pub labels: Option<&'a BTreeMap<String, String>>,
    /// Graphics processors.
    pub gpus: u64,
    /// Its layers, as reports number them.
    pub layers: &'a [u64],
}

/// What stands for a layer, of the name that a request has for it: FNV-1a, 64 bits. That two names share one costs a look at the
/// wrong node.
pub fn layer_number(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Why a node could not take a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unfit {
    /// It does not answer.
    Lost,
    /// An operator keeps new sandboxes away.
    Cordoned,
    /// It waits for its sandboxes to end.
    Draining,
    /// It is of a pool that was not asked for.
    Pool,
    /// It does not have the backend.
    Backend,
    /// A kernel feature is missing.
    Feature,
    /// The image is for another architecture.
    Architecture,
    /// It does not have the labels.
    Label,
    /// It has not that many graphics processors free.
    Gpu,
}

impl Unfit {
    /// What a node is before what goes on there.
    const ALL: [Self; 9] = [
        Self::Lost,
        Self::Pool,
        Self::Backend,
        Self::Feature,
        Self::Architecture,
        Self::Label,
        Self::Cordoned,
        Self::Draining,
        Self::Gpu,
    ];

    /// Whether it is what the node is, and not what goes on there.
    pub fn is_lasting(self) -> bool {
        match self {
            Self::Lost | Self::Cordoned | Self::Draining | Self::Gpu => false,
            Self::Pool | Self::Backend | Self::Feature | Self::Architecture | Self::Label => true,
        }
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost => "lost",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Pool => "of another pool",
            Self::Backend => "without the backend",
            Self::Feature => "without a kernel feature",
            Self::Architecture => "of another architecture",
            Self::Label => "without the labels",
            Self::Gpu => "without a free GPU",
        })
    }
}

/// What one replica knows of one node.
#[derive(Debug, Clone)]
pub struct Node {
    name: NodeId,
    health: Health,
    report: Report,
    in_flight: InFlight,
}

impl Node {
    /// A node that has not reported yet.
    pub fn new(name: NodeId) -> Self {
        Self { name, health: Health::Lost, report: Report::default(), in_flight: InFlight::default() }
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.name
    }

    /// Whether it answers.
    pub fn health(&self) -> Health {
        self.health
    }

    /// What it said last.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// It answered a question that was asked at `asked_ms`. Placements that were sent well before are in the answer.
    pub fn reported(&mut self, report: Report, asked_ms: u64) {
        self.report = report;
        self.health = Health::Well;
        self.in_flight.shown(asked_ms);
    }

    /// It did not answer.
    pub fn missed(&mut self, health: Health, now_ms: u64) {
        self.health = health;
        self.in_flight.expire(now_ms);
    }

    /// A create was sent to it.
    pub fn placed(&mut self, now_ms: u64, expected: Expected) {
        self.in_flight.add(now_ms, expected);
    }

    /// The create that was sent at `sent_ms` was not taken.
    pub fn refused(&mut self, sent_ms: u64) {
        self.in_flight.take_back(sent_ms);
    }

    /// Memory in use there, MiB, with what was sent there since it reported.
    pub(super) fn memory_used_mib(&self) -> u64 {
        self.report.memory_mib.saturating_sub(self.report.memory_available_mib) + self.in_flight.memory_mib()
    }

    /// Sandboxes there, with those that were sent there since it reported.
    pub(super) fn sandboxes(&self) -> u64 {
        self.report.sandboxes + self.in_flight.count()
    }

    /// How full it is, with what was sent there since it reported.
    pub fn load(&self) -> Load {
        let (report, ours) = (&self.report, &self.in_flight);
        let share = |used: u64, all: u64| used as f64 / all.max(1) as f64;
        Load::of(
            share(self.memory_used_mib(), report.memory_mib),
            report.cpu_pressure + share(ours.cpu_millis(), report.cpu_millis),
            share(self.sandboxes(), report.sandboxes_max),
        )
    }

    /// How many of these layers are at hand there.
    pub fn holds(&self, layers: &[u64]) -> usize {
        layers.iter().filter(|layer| self.report.layers.contains(layer)).count()
    }

    /// Why it could not take this, if so: what it is before what goes on there.
    pub fn unfit(&self, wanted: &Wanted<'_>) -> Option<Unfit> {
        Unfit::ALL.into_iter().find(|unfit| self.is(*unfit, wanted))
    }

    fn is(&self, unfit: Unfit, wanted: &Wanted<'_>) -> bool {
        let report = &self.report;
        match unfit {
            Unfit::Lost => self.health == Health::Lost,
            Unfit::Pool => !wanted.pools.has(&report.pool),
            Unfit::Backend => !report.backends.contains(wanted.backend),
            Unfit::Feature => wanted.features.iter().any(|feature| !report.features.contains(feature)),
            Unfit::Architecture => wanted.architecture.is_some_and(|name| name != report.architecture),
            Unfit::Label => wanted.labels.is_some_and(|labels| !has_all(&report.labels, labels)),
            Unfit::Cordoned => report.cordoned,
            Unfit::Draining => report.draining,
            Unfit::Gpu => wanted.gpus > report.gpus_free,
        }
    }
}

fn has_all(labels: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> bool {
    wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
}
