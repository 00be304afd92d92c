//! The owner of everything on this node.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use dsec_backend::shelf::Shelf;
use dsec_model::{ErrorKind, Journal, SandboxId, State};
use dsec_proto::rest::{
    ApiError, BACKEND_CONTAINER, CreateSandboxRequest, Feature, FeatureState, NodeStatus, NodeUsage,
    SandboxLimits,
};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::admit::{Room, capacity};
use crate::charges::Charges;
use crate::clock::now_ms;
use crate::config::Config;
use crate::ended::EndedLog;
use crate::error::internal;
use crate::idempotency::Keys;
use crate::launch::Launch;
use crate::layers::{Content, Layers};
use crate::pending::Pending;
use crate::registry::Registry;
use crate::release::Releases;
use crate::sandbox::Handle;
use crate::sandbox::plan::defaults_on;
use crate::scheduling::Scheduling;
use crate::traffic::Traffic;
use crate::{adopt, doctor, ids, maintenance, sockets};

/// Names of layers that a report has: some kilobytes, a second and node.
const LAYER_NAMES_MAX: usize = 512;

/// How long launches that are under way are waited for before this process becomes another, and how often they are looked at.
const LAUNCHES_MAX: Duration = Duration::from_secs(10);
const LAUNCHES_LOOK: Duration = Duration::from_millis(5);

/// Sandboxes that are being paused at once: each takes a processor for as long as its memory is given back.
fn pauses_at_once() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// Why an edge's work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// The node was taken down: the process is to end.
    Down,
    /// The process is to become another program, or to read its configuration anew. The sandboxes run on.
    HandedOn,
}

/// The node.
pub struct Node {
    /// What it runs with.
    pub config: Config,
    /// The way to the kernel.
    pub launch: Arc<dyn Launch>,
    /// Layers.
    pub layers: Arc<Layers>,
    /// Sandboxes.
    pub registry: Registry,
    /// What of them control is told: when each was created, and its state.
    pub journal: Mutex<Journal<SandboxId, (u64, State)>>,
    /// Creates that have no sandbox yet.
    pub pending: Pending,
    /// Room for more.
    pub room: Room,
    /// Whose they are, and to whom they are charged.
    pub charges: Charges,
    /// Whether its operator wants more on it.
    pub scheduling: Scheduling,
    /// Which programs it runs.
    pub releases: Releases,
    /// Requests that are being answered.
    pub traffic: Traffic,
    /// Those that ended.
    pub ended: EndedLog,
    /// Directories of records, between one sandbox and the next.
    pub records: Shelf,
    /// Idempotency keys.
    pub keys: Arc<Keys>,
    /// Tasks that own sandboxes.
    pub tasks: TaskTracker,
    /// Turns of sandboxes that are being paused.
    pub pauses: Semaphore,
    /// Boot of the machine.
    pub boot_id: String,
    /// Drawn anew at each start.
    pub instance: String,
    started_ms: u64,
    draining: AtomicBool,
    over: watch::Sender<Option<Over>>,
    features: RwLock<Vec<Feature>>,
}

impl Node {
    /// Opens the state, takes over what an earlier edge left, and starts the node's own tasks.
    ///
    /// # Errors
    /// The state cannot be read.
    pub async fn start(
        config: Config,
        launch: Arc<dyn Launch>,
        content: Arc<dyn Content>,
    ) -> Result<Arc<Self>, ApiError> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|e| internal("the boot id cannot be read", &e))?
            .trim()
            .to_owned();
        std::fs::create_dir_all(&config.state_dir)
            .map_err(|e| internal("the state directory cannot be made", &e))?;
        let (ended, remembered) =
            EndedLog::open(&config.state_dir).map_err(|e| internal("ended.jsonl cannot be read", &e))?;
        let records = Shelf::open(config.state_dir.join("run/records"))
            .map_err(|e| internal("room for records cannot be made", &e))?;
        let backend = Arc::clone(&launch);
        let node = config.node.to_string();
        let layers = Layers::open(&config.state_dir, &node, &config.store, content, backend)?;
        let node = Arc::new(Self {
            room: Room::new(capacity(&*launch)?, config.admission, &config.state_dir),
            scheduling: Scheduling::load(&config.state_dir, &node)?,
            releases: Releases::open(&config)?,
            traffic: Traffic::default(),
            layers,
            registry: Registry::default(),
            journal: Mutex::default(),
            pending: Pending::default(),
            charges: Charges::default(),
            ended,
            records,
            keys: Arc::default(),
            tasks: TaskTracker::new(),
            pauses: Semaphore::new(pauses_at_once()),
            boot_id,
            instance: ids::instance()?,
            started_ms: now_ms(),
            draining: AtomicBool::new(false),
            over: watch::Sender::new(None),
            features: RwLock::default(),
            launch,
            config,
        });
        for past in remembered {
            if let Some(key) = &past.key {
                node.keys.restore(key, &past.sandbox.id);
            }
            let handle = Handle::ended(past.sandbox);
            handle.events.restore(past.events.lines());
            node.registry.insert(handle);
        }
        adopt::all(&node).await?;
        node.layers.take_up().await?;
        tokio::spawn(maintenance::run(Arc::downgrade(&node)));
        tokio::spawn(Arc::clone(&node.layers).collect());
        tokio::spawn(Arc::clone(&node.layers).tell_idle());
        tokio::spawn(sockets::run(Arc::downgrade(&node)));
        let probed = Arc::downgrade(&node);
        let backend = Arc::clone(&node.launch);
        tokio::task::spawn_blocking(move || {
            let features = doctor::features(backend.probe());
            if let Some(node) = probed.upgrade() {
                *node.features.write().unwrap_or_else(PoisonError::into_inner) = features;
            }
        });
        Ok(node)
    }

    /// What shapes what it can do; nothing until the host has been tried.
    fn features(&self) -> Vec<Feature> {
        let mut features = self.features.read().unwrap_or_else(PoisonError::into_inner).clone();
        if !features.is_empty() {
            features.push(self.layers.store_feature());
        }
        features
    }

    /// Whether it has what a request wants of its node. Where several nodes are, who places has looked already.
    ///
    /// # Errors
    /// It is of another pool or architecture, lacks a label or a feature, or has not tried its features yet.
    pub fn suits(&self, request: &CreateSandboxRequest) -> Result<(), ApiError> {
        let (node, labels) = (&self.config.node, &self.config.labels);
        let lacks = |field: &str, message: String| {
            let error = ApiError::new(ErrorKind::Unsupported, message)
                .detail(json!({ "field": field, "node": node }));
            Err(error.hint("`dsec node ls` shows what the nodes have"))
        };
        let pool = &self.config.pool;
        if let Some(asked) = request.pool.as_ref().filter(|asked| *asked != pool.as_str()) {
            return lacks("pool", format!("node {node} is of the pool {pool}, not of {asked}"));
        }
        let other = |asked: &&String| asked.as_str() != std::env::consts::ARCH;
        if let Some(asked) = request.architecture.as_ref().filter(other) {
            return lacks("architecture", format!("node {node} is {}, not {asked}", std::env::consts::ARCH));
        }
        if let Some((name, value)) =
            request.node_labels.iter().find(|(name, value)| labels.get(*name) != Some(*value))
        {
            return lacks("node_labels", format!("node {node} does not have the label {name}={value}"));
        }
        if request.node_features.is_empty() {
            return Ok(());
        }
        let features = self.features();
        if features.is_empty() {
            return Err(ApiError::new(
                ErrorKind::Unavailable,
                format!("node {node} is still trying what it can do"),
            )
            .hint("try again in a moment"));
        }
        let works =
            |name: &String| features.iter().any(|f| f.name == *name && f.state == FeatureState::Works);
        match request.node_features.iter().find(|name| !works(name)) {
            Some(name) => {
                lacks("node_features", format!("the feature {name:?} does not work on node {node}"))
            }
            None => Ok(()),
        }
    }

    /// From now on no sandbox is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// No sandbox is taken any more.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// This edge's work is done. The first word counts.
    pub fn set_over(&self, over: Over) {
        self.over.send_if_modified(|said| {
            let is_first = said.is_none();
            said.get_or_insert(over);
            is_first
        });
    }

    /// Resolves when its work is done.
    pub async fn over(&self) -> Over {
        let mut over = self.over.subscribe();
        // The sender lives as long as `self`.
        let said = over.wait_for(Option::is_some).await.ok().and_then(|said| *said);
        said.unwrap_or(Over::Down)
    }

    /// Resolves when this edge is about to become another: who waits here has to wait there.
    pub async fn handed_on(&self) {
        let mut over = self.over.subscribe();
        let _ = over.wait_for(|over| *over == Some(Over::HandedOn)).await;
    }

    /// Lets what is being launched come to its end, and has this process become what is to run next. New sandboxes are kept away from
    /// here on; those that still wait for their layers are refused when they have them, or cut off, and made by whoever asks again.
    pub async fn hand_on(&self) {
        self.scheduling.hold();
        let until = Instant::now() + LAUNCHES_MAX;
        let launches = || self.registry.living().iter().any(|handle| handle.state() == State::Creating);
        while launches() && Instant::now() < until {
            tokio::time::sleep(LAUNCHES_LOOK).await;
        }
        self.set_over(Over::HandedOn);
    }

    /// What the sandboxes that it remembers called their layers, the latest first.
    fn layer_names(&self) -> Vec<String> {
        let mut records: Vec<_> = self.registry.all().iter().map(|handle| handle.record()).collect();
        records.sort_unstable_by_key(|record| Reverse(record.created_ms));
        let mut seen = HashSet::new();
        let names = records.iter().flat_map(|record| &record.layers).map(|layer| layer.name.as_str());
        names.filter(|name| seen.insert(*name)).take(LAYER_NAMES_MAX).map(str::to_owned).collect()
    }

    /// What it is, has and does now. Blocks for a moment.
    ///
    /// # Errors
    /// The host's numbers cannot be read.
    pub fn status(&self, with_layers: bool) -> Result<NodeStatus, ApiError> {
        let (promised, observed) = (self.room.promised(), self.room.observe(&*self.launch)?);
        let mut usage = NodeUsage {
            memory_promised_mib: promised.memory_mib,
            cpu_promised_millis: promised.cpu_millis,
            memory_available_mib: observed.memory_available_mib,
            memory_pressure: observed.memory_pressure,
            cpu_pressure: observed.cpu_pressure,
            disk_free_mib: observed.disk_free_mib,
            files_free: Some(observed.files_free).filter(|free| *free != u64::MAX),
            processes: observed.processes,
            ..NodeUsage::default()
        };
        for handle in self.registry.all() {
            match handle.state() {
                State::Creating => usage.creating += 1,
                State::Running => usage.running += 1,
                State::Pausing | State::Paused | State::Resuming => usage.paused += 1,
                State::Stopping => usage.stopping += 1,
                State::Stopped | State::Failed | State::Lost => {}
            }
        }
        let (charged, arrived) = self.charges.all();
        Ok(NodeStatus {
            node: self.config.node.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_ms: self.started_ms,
            capacity: self.room.capacity(),
            usage,
            backends: vec![BACKEND_CONTAINER.to_owned()],
            store: self.layers.store_id(),
            architecture: std::env::consts::ARCH.to_owned(),
            sandboxes_max: self.config.admission.sandboxes_max,
            pool: self.config.pool.clone(),
            labels: self.config.labels.clone(),
            features: self.features(),
            scheduling: self.scheduling.now(),
            charged,
            arrived,
            defaults: Some(SandboxLimits::from(&defaults_on(&self.config.defaults, &self.room.capacity()))),
            layers: if with_layers { self.layer_names() } else { Vec::new() },
        })
    }
}
