//! The owner of everything on this node.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use dsec_model::State;
use dsec_proto::rest::{ApiError, BACKEND_CONTAINER, Feature, NodeStatus, NodeUsage};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::admit::{Room, capacity, cpu_pressure_now, memory_mib_now};
use crate::clock::now_ms;
use crate::config::Config;
use crate::ended::EndedLog;
use crate::error::internal;
use crate::idempotency::Keys;
use crate::launch::Launch;
use crate::layers::{Content, Layers};
use crate::registry::Registry;
use crate::sandbox::Handle;
use crate::{adopt, doctor, maintenance, sockets};

/// MiB in bytes.
const MIB: u64 = 1 << 20;

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
    /// Room for more.
    pub room: Room,
    /// Those that ended.
    pub ended: EndedLog,
    /// Idempotency keys.
    pub keys: Arc<Keys>,
    /// Tasks that own sandboxes.
    pub tasks: TaskTracker,
    /// Boot of the machine.
    pub boot_id: String,
    started_ms: u64,
    draining: AtomicBool,
    over: watch::Sender<bool>,
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
        let backend = Arc::clone(&launch);
        let node = config.node.to_string();
        let layers = Layers::open(&config.state_dir, &node, &config.store, content, backend)?;
        let node = Arc::new(Self {
            room: Room::new(capacity(&*launch)?, config.max_sandboxes),
            layers,
            registry: Registry::default(),
            ended,
            keys: Arc::default(),
            tasks: TaskTracker::new(),
            boot_id,
            started_ms: now_ms(),
            draining: AtomicBool::new(false),
            over: watch::Sender::new(false),
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

    /// From now on no sandbox is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// No sandbox is taken any more.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The node was shut down: the process is to end.
    pub fn set_over(&self) {
        self.over.send_replace(true);
    }

    /// Resolves when the node was shut down.
    pub async fn over(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// What it is, has and does now.
    ///
    /// # Errors
    /// The host's numbers cannot be read.
    pub fn status(&self) -> Result<NodeStatus, ApiError> {
        let mut usage = NodeUsage {
            memory_promised_mib: self.room.promised_mib(),
            memory_available_mib: memory_mib_now()?.1,
            disk_free_mib: self.launch.disk().1 / MIB,
            cpu_pressure: cpu_pressure_now(),
            ..NodeUsage::default()
        };
        for handle in self.registry.all() {
            match handle.state() {
                State::Creating => usage.creating += 1,
                State::Running => usage.running += 1,
                State::Stopping => usage.stopping += 1,
                State::Stopped | State::Failed => {}
            }
        }
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
            sandboxes_max: self.config.max_sandboxes,
            labels: self.config.labels.clone(),
            features: self.features(),
        })
    }
}
