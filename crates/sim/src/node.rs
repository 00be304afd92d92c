//! A simulated node: what its edge would know and answer, without sandboxes. It is given the time with each call.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use dsec_model::admission::{Admission, Capacity, Observed, Policy, Promised, Short};
use dsec_model::placement::Expected;
use dsec_model::{NodeId, PoolName, Shortage};
use dsec_proto::rest::{
    BACKEND_CONTAINER, Feature, FeatureState, NodeScheduling, NodeStatus, NodeUsage, StateCounts,
};

use crate::workload::Load;

/// What a node has and keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// All it has.
    pub capacity: Capacity,
    /// What it keeps for itself.
    pub policy: Policy,
}

impl Default for Shape {
    /// One of 160 that have 30,000 cores and 250 TB of memory together.
    fn default() -> Self {
        Self {
            capacity: Capacity {
                memory_mib: 1_500_000,
                cpu_millis: 187_000,
                disk_mib: 20_000_000,
                processes: 4_000_000,
            },
            policy: Policy::default(),
        }
    }
}

/// What a node uses without sandboxes: ours.
const IDLE_MEMORY_MIB: u64 = 4096;
const IDLE_PROCESSES: u64 = 800;
/// Disk and processes of one sandbox: ours.
const SANDBOX_DISK_MIB: u64 = 64;
const SANDBOX_PROCESSES: u64 = 4;
/// How long a sandbox takes what a start takes, before it takes what it will, ms. Ours.
const STARTING_MS: u64 = 30_000;
/// Pressure rises with the fourth power of the share of cores that are busy: little until most are. Ours.
const PRESSURE_POWER: i32 = 4;
/// Names of layers that a node reports, as the edge does.
const LAYERS_MAX: usize = 512;

/// What is asked of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Create {
    /// Its idempotency key.
    pub key: Option<Arc<str>>,
    /// Which attempt of its caller's it is.
    pub attempt: Option<u32>,
    /// Its task.
    pub task: Option<Arc<str>>,
    /// Its image.
    pub image: Arc<str>,
    /// What it does.
    pub load: Load,
}

/// A simulated sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct Sandbox {
    /// What it was made of.
    pub create: Create,
    /// When.
    pub created_ms: u64,
    /// When it ends by itself.
    pub ends_ms: u64,
    /// Whether it is paused.
    pub paused: bool,
    /// Whether it takes what it will, and not what a start takes.
    is_settled: bool,
}

impl Sandbox {
    /// Memory, MiB, and cores, in thousandths, that it takes now.
    fn takes(&self) -> (u64, u64) {
        let Expected { memory_mib, cpu_millis } = Expected::START;
        let load = &self.create.load;
        if self.is_settled { (load.memory_mib, load.cpu_millis) } else { (memory_mib, cpu_millis) }
    }
}

/// What a node made, or had made before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Which of its sandboxes.
    pub serial: u64,
    /// Whether this create made it.
    pub fresh: bool,
}

/// Why a node made nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no room.
    #[error(transparent)]
    Short(#[from] Short),
    /// A later attempt went elsewhere.
    #[error("attempt {attempt} of this create came after attempt {fence}")]
    Fenced {
        /// The attempt that came.
        attempt: u32,
        /// The one that was announced.
        fence: u32,
    },
}

/// A simulated node.
#[derive(Debug, Clone)]
pub struct Node {
    name: NodeId,
    shape: Shape,
    /// By serial number, so in the order of their making.
    sandboxes: BTreeMap<u64, Sandbox>,
    /// When each ends. Those that were stopped before stay here until then.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    /// Those that take what a start takes, and until when, the oldest first.
    starting: VecDeque<(u64, u64)>,
    promised: Promised,
    memory_mib: u64,
    cpu_millis: u64,
    /// What each key made, whether it is still there or not.
    keys: HashMap<Arc<str>, u64>,
    fences: HashMap<Arc<str>, u32>,
    /// Names of images, and the last sandbox of each.
    images: HashMap<Arc<str>, u64>,
    /// The same, the latest last.
    latest: BTreeMap<u64, Arc<str>>,
    last_serial: u64,
    is_refusing: bool,
    /// When the last ones ended by themselves, the oldest first.
    ended_ms: VecDeque<u64>,
}

/// How long it is remembered that one ended, ms.
const ENDED_FOR_MS: u64 = 10_000;

impl Node {
    /// An empty one.
    pub fn new(name: NodeId, shape: Shape) -> Self {
        Self {
            name,
            shape,
            sandboxes: BTreeMap::new(),
            ends: BinaryHeap::new(),
            starting: VecDeque::new(),
            promised: Promised::default(),
            memory_mib: 0,
            cpu_millis: 0,
            keys: HashMap::new(),
            fences: HashMap::new(),
            images: HashMap::new(),
            latest: BTreeMap::new(),
            last_serial: 0,
            is_refusing: false,
            ended_ms: VecDeque::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &NodeId {
        &self.name
    }

    /// Its sandboxes, the oldest first.
    pub fn sandboxes(&self) -> &BTreeMap<u64, Sandbox> {
        &self.sandboxes
    }

    /// Makes a sandbox, or finds the one that its key made.
    ///
    /// # Errors
    /// No room, or a later attempt of the same create went elsewhere.
    pub fn create(&mut self, now_ms: u64, create: Create) -> Result<Made, Refusal> {
        self.advance(now_ms);
        if let Some(key) = &create.key {
            if let Some(&serial) = self.keys.get(key) {
                return Ok(Made { serial, fresh: false });
            }
            if let (Some(attempt), Some(&fence)) = (create.attempt, self.fences.get(key))
                && attempt < fence
            {
                return Err(Refusal::Fenced { attempt, fence });
            }
        }
        if self.is_refusing {
            let found = "the simulated node refuses".to_owned();
            return Err(Short { of: Shortage::MemoryPressure, found }.into());
        }
        self.admission().decide(create.load.asked)?;
        Ok(Made { serial: self.add(now_ms, create), fresh: true })
    }

    /// One that is there when the simulation begins, whatever room there is.
    pub fn add(&mut self, created_ms: u64, create: Create) -> u64 {
        self.last_serial += 1;
        let serial = self.last_serial;
        let ends_ms = created_ms.saturating_add(create.load.lifetime_ms);
        if let Some(key) = &create.key {
            self.keys.insert(Arc::clone(key), serial);
        }
        if let Some(before) = self.images.insert(Arc::clone(&create.image), serial) {
            self.latest.remove(&before);
        }
        self.latest.insert(serial, Arc::clone(&create.image));
        if self.latest.len() > LAYERS_MAX
            && let Some((_, oldest)) = self.latest.pop_first()
        {
            self.images.remove(&oldest);
        }
        self.hold(serial, Sandbox { create, created_ms, ends_ms, paused: false, is_settled: false });
        serial
    }

    fn hold(&mut self, serial: u64, sandbox: Sandbox) {
        self.promised = self.promised.plus(sandbox.create.load.asked);
        let (memory_mib, cpu_millis) = sandbox.takes();
        self.memory_mib += memory_mib;
        self.cpu_millis += cpu_millis;
        self.ends.push(Reverse((sandbox.ends_ms, serial)));
        if !sandbox.is_settled {
            self.starting.push_back((sandbox.created_ms + STARTING_MS, serial));
        }
        self.sandboxes.insert(serial, sandbox);
    }

    /// Ends those whose time is over, and has those that have started take what they will.
    pub fn advance(&mut self, now_ms: u64) {
        while let Some(&(until_ms, serial)) = self.starting.front()
            && until_ms <= now_ms
        {
            self.starting.pop_front();
            let Some(sandbox) = self.sandboxes.get_mut(&serial) else { continue };
            let (memory_mib, cpu_millis) = sandbox.takes();
            sandbox.is_settled = true;
            let (memory_then_mib, cpu_then_millis) = sandbox.takes();
            self.memory_mib = self.memory_mib + memory_then_mib - memory_mib;
            self.cpu_millis = self.cpu_millis + cpu_then_millis - cpu_millis;
        }
        while let Some(&Reverse((ends_ms, serial))) = self.ends.peek()
            && ends_ms <= now_ms
        {
            self.ends.pop();
            if self.remove(serial).is_some() {
                self.ended_ms.push_back(ends_ms);
            }
        }
        while self.ended_ms.front().is_some_and(|ended_ms| ended_ms + ENDED_FOR_MS < now_ms) {
            self.ended_ms.pop_front();
        }
    }

    /// How many ended by themselves from this moment on, which must not be long ago.
    pub fn ended_since(&self, since_ms: u64) -> u64 {
        self.ended_ms.iter().filter(|ended_ms| **ended_ms >= since_ms).count() as u64
    }

    /// Ends one. Returns what it was.
    pub fn remove(&mut self, serial: u64) -> Option<Sandbox> {
        let sandbox = self.sandboxes.remove(&serial)?;
        let (memory_mib, cpu_millis) = sandbox.takes();
        self.promised = self.promised.minus(sandbox.create.load.asked);
        self.memory_mib -= memory_mib;
        self.cpu_millis -= cpu_millis;
        Some(sandbox)
    }

    /// The sandboxes of a task.
    pub fn of_task(&self, task: &str) -> Vec<u64> {
        let is_of = |sandbox: &Sandbox| sandbox.create.task.as_deref() == Some(task);
        self.sandboxes.iter().filter(|(_, sandbox)| is_of(sandbox)).map(|(serial, _)| *serial).collect()
    }

    /// Pauses one, or has it go on. Returns whether it is there.
    pub fn set_paused(&mut self, serial: u64, paused: bool) -> bool {
        self.sandboxes.get_mut(&serial).map(|sandbox| sandbox.paused = paused).is_some()
    }

    /// Whether it made the sandbox of a key. If not, it takes no attempt before this one from now on.
    pub fn fence(&mut self, key: &str, attempt: u32) -> bool {
        if self.keys.contains_key(key) {
            return true;
        }
        let fence = self.fences.entry(key.into()).or_insert(attempt);
        *fence = attempt.max(*fence);
        false
    }

    /// Its edge starts again. It finds its sandboxes by their records; without those it would have none. Fences are not
    /// written down.
    pub fn restart(&mut self, has_records: bool) {
        let empty = Self::new(self.name.clone(), self.shape.clone());
        let before = std::mem::replace(self, empty);
        (self.last_serial, self.is_refusing) = (before.last_serial, before.is_refusing);
        if has_records {
            (self.keys, self.images, self.latest) = (before.keys, before.images, before.latest);
        }
        for (serial, sandbox) in before.sandboxes.into_iter().filter(|_| has_records) {
            self.hold(serial, sandbox);
        }
    }

    /// Has it refuse every create, whatever room it has.
    pub fn set_refusing(&mut self, is_refusing: bool) {
        self.is_refusing = is_refusing;
    }

    /// What admission decides by.
    fn admission(&self) -> Admission {
        let count = self.sandboxes.len() as u64;
        let Shape { capacity, policy } = &self.shape;
        Admission {
            policy: *policy,
            capacity: *capacity,
            observed: Observed {
                memory_available_mib: capacity.memory_mib.saturating_sub(IDLE_MEMORY_MIB + self.memory_mib),
                memory_pressure: 0.0,
                cpu_pressure: self.cpu_pressure(),
                disk_free_mib: capacity.disk_mib.saturating_sub(count * SANDBOX_DISK_MIB),
                files_free: u64::MAX,
                processes: IDLE_PROCESSES + count * SANDBOX_PROCESSES,
            },
            promised: self.promised,
        }
    }

    fn cpu_pressure(&self) -> f64 {
        let busy = self.cpu_millis as f64 / self.shape.capacity.cpu_millis.max(1) as f64;
        busy.powi(PRESSURE_POWER).min(1.0)
    }

    /// What its edge answers about it, with the names of its layers.
    pub fn status(&mut self, now_ms: u64) -> NodeStatus {
        self.advance(now_ms);
        let Admission { policy, capacity, observed, promised } = self.admission();
        NodeStatus {
            node: self.name.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_ms: 0,
            capacity,
            usage: NodeUsage {
                running: self.sandboxes.len() as u64,
                memory_promised_mib: promised.memory_mib,
                memory_available_mib: observed.memory_available_mib,
                disk_free_mib: observed.disk_free_mib,
                cpu_pressure: observed.cpu_pressure,
                memory_pressure: observed.memory_pressure,
                cpu_promised_millis: promised.cpu_millis,
                processes: observed.processes,
                ..NodeUsage::default()
            },
            backends: vec![BACKEND_CONTAINER.to_owned()],
            store: "simulated".to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            sandboxes_max: policy.sandboxes_max,
            pool: PoolName::default(),
            labels: BTreeMap::new(),
            features: features(),
            scheduling: NodeScheduling::default(),
            charged: Vec::new(),
            arrived: Vec::new(),
            defaults: None,
            layers: self.latest.values().rev().map(|name| name.to_string()).collect(),
        }
    }

    /// Its sandboxes by task and state.
    pub fn tasks(&self) -> BTreeMap<Arc<str>, Tasked> {
        let mut tasks = BTreeMap::<Arc<str>, Tasked>::new();
        for sandbox in self.sandboxes.values() {
            let Some(task) = &sandbox.create.task else { continue };
            let of_task = tasks.entry(Arc::clone(task)).or_insert_with(|| Tasked {
                counts: StateCounts::default(),
                first_ms: sandbox.created_ms,
                last_ms: sandbox.created_ms,
            });
            of_task.counts.running += 1;
            of_task.first_ms = of_task.first_ms.min(sandbox.created_ms);
            of_task.last_ms = of_task.last_ms.max(sandbox.created_ms);
        }
        tasks
    }

    /// What does not add up in its own books; none when all does.
    pub fn audit(&self) -> Option<String> {
        let mut promised = Promised::default();
        let (mut memory_mib, mut cpu_millis) = (0, 0);
        for sandbox in self.sandboxes.values() {
            promised = promised.plus(sandbox.create.load.asked);
            let (its_memory_mib, its_cpu_millis) = sandbox.takes();
            memory_mib += its_memory_mib;
            cpu_millis += its_cpu_millis;
        }
        let counted = (promised, memory_mib, cpu_millis);
        let kept = (self.promised, self.memory_mib, self.cpu_millis);
        (counted != kept).then(|| format!("{} keeps {kept:?} and has {counted:?}", self.name))
    }
}

/// What a node has of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tasked {
    /// By state.
    pub counts: StateCounts,
    /// When the first of them was made, ms.
    pub first_ms: u64,
    /// When the last was.
    pub last_ms: u64,
}

/// As many as an edge reports, so that a report has its usual size.
fn features() -> Vec<Feature> {
    let feature = |name: &str| Feature {
        name: name.to_owned(),
        purpose: "simulated".to_owned(),
        state: FeatureState::Works,
        found: "this node is simulated".to_owned(),
        remedy: String::new(),
    };
    [
        "overlayfs",
        "erofs",
        "idmapped-mounts",
        "cgroup-kill",
        "psi",
        "fanotify-pre-content",
        "clone3",
        "seccomp",
    ]
    .map(feature)
    .to_vec()
}
