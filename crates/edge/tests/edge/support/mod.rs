//! An edge with no kernel below it: a fake backend whose sandboxes are threads that speak the guest
//! protocol and run commands as plain processes of this host.
pub mod client;
pub mod content;
pub mod files;
pub mod guest;
pub mod streams;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_backend::container::{ContainerSpec, Layer, Probe};
use dsec_backend::{
    Anchor, BackendError, ExecCgroup, GoOn, InPlace, Instance, OomReport, PauseError, Paused, Phase, Quiesce,
    RawUsage, Snapshot, SnapshotError,
};
use dsec_edge::config::Config;
use dsec_edge::launch::Launch;
use dsec_edge::node::Node;
use dsec_edge::server::{Socket, serve};
use dsec_model::{CpuClass, Limits};

use client::Client;
use content::FakeContent;
use guest::FakeGuest;

/// A door that a test can close to hold launches in the middle.
#[derive(Default)]
pub struct Gate {
    closed: Mutex<bool>,
    moved: Condvar,
}

impl Gate {
    pub fn set(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.moved.notify_all();
    }

    fn pass(&self) {
        let mut closed = self.closed.lock().unwrap();
        while *closed {
            closed = self.moved.wait(closed).unwrap();
        }
    }
}

/// What is below all edges of one test: it stays when an edge goes.
#[derive(Default)]
pub struct Host {
    pub dir: PathBuf,
    pub guests: Mutex<HashMap<String, Arc<FakeGuest>>>,
    pub launches: AtomicU64,
    pub launch_gate: Gate,
    pub fail_launch: AtomicBool,
    pub forgotten: Mutex<Vec<PathBuf>>,
    /// The layers of each launch.
    pub layers: Mutex<Vec<Vec<Layer>>>,
    pub content: content::State,
    pub swept: Mutex<Vec<String>>,
    pub cleaned: Mutex<Vec<String>>,
    /// Class and weight of every change of CPU limits.
    pub cpu_set: Mutex<Vec<(CpuClass, u64)>>,
    pub down: AtomicBool,
    pub over_file_limit: AtomicBool,
    pub writing: AtomicBool,
    pub socket_bytes: AtomicU64,
}

impl Host {
    pub fn guest(&self, name: &str) -> Arc<FakeGuest> {
        Arc::clone(&self.guests.lock().unwrap()[name])
    }

    pub fn alive(&self) -> usize {
        self.guests.lock().unwrap().len()
    }
}

pub struct Backend(pub Arc<Host>);

#[derive(Debug)]
struct FakeInstance {
    host: Arc<Host>,
    name: String,
    guest: Arc<FakeGuest>,
    anchor: Anchor,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Host")
    }
}

fn anchor() -> Anchor {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    Anchor { pid: 1, start_ticks: 1, boot_id, id_base: 65536 }
}

impl Launch for Backend {
    fn launch(&self, spec: &ContainerSpec) -> Result<(Arc<dyn Instance>, Vec<Phase>), BackendError> {
        let host = &self.0;
        host.launches.fetch_add(1, Ordering::SeqCst);
        host.launch_gate.pass();
        if host.fail_launch.load(Ordering::SeqCst) {
            let what = format!("mount the root {:?}", spec.layers);
            return Err(BackendError::new(what, std::io::Error::other("no such luck")));
        }
        assert!(
            spec.layers.iter().all(|layer| layer.image.exists()),
            "a layer went between lookup and mount"
        );
        host.layers.lock().unwrap().push(spec.layers.clone());
        let guest = FakeGuest::start(&host.dir, &spec.name);
        host.guests.lock().unwrap().insert(spec.name.clone(), Arc::clone(&guest));
        let instance =
            FakeInstance { host: Arc::clone(host), name: spec.name.clone(), guest, anchor: anchor() };
        Ok((Arc::new(instance), vec![Phase { name: "clone".into(), took: Duration::from_micros(7) }]))
    }

    fn adopt(
        &self,
        spec: &ContainerSpec,
        _: &Anchor,
        _: bool,
    ) -> Result<Option<Arc<dyn Instance>>, BackendError> {
        let Some(guest) = self.0.guests.lock().unwrap().get(&spec.name).cloned() else { return Ok(None) };
        if guest.is_dead() {
            return Ok(None);
        }
        let instance =
            FakeInstance { host: Arc::clone(&self.0), name: spec.name.clone(), guest, anchor: anchor() };
        Ok(Some(Arc::new(instance)))
    }

    fn sweep(&self, keep: &[String]) -> Vec<String> {
        let mut guests = self.0.guests.lock().unwrap();
        let gone: Vec<String> = guests.keys().filter(|name| !keep.contains(name)).cloned().collect();
        for name in &gone {
            guests.remove(name).unwrap().kill();
        }
        self.0.swept.lock().unwrap().extend(gone.clone());
        gone
    }

    fn has_layer(&self, image: &Path) -> bool {
        self.0.layers.lock().unwrap().iter().flatten().any(|layer| layer.image == image)
    }

    fn forget_layer(&self, image: &Path) {
        self.0.forgotten.lock().unwrap().push(image.to_owned());
    }

    fn disk(&self) -> (u64, u64) {
        (100 << 30, 90 << 30)
    }

    fn probe(&self) -> Vec<Probe> {
        vec![Probe { name: "fake", purpose: "tests", found: Ok("seen".into()), needed: true, remedy: "none" }]
    }

    fn shut_down(&self) -> Result<(), BackendError> {
        self.0.down.store(true, Ordering::SeqCst);
        Ok(())
    }
}

impl Instance for FakeInstance {
    fn anchor(&self) -> &Anchor {
        &self.anchor
    }

    fn connect(&self) -> Result<UnixStream, BackendError> {
        UnixStream::connect(self.guest.socket()).map_err(|e| BackendError::new("connect", e))
    }

    fn exit_fd(&self) -> BorrowedFd<'_> {
        self.guest.exit.as_fd()
    }

    fn spool_dir(&self) -> &Path {
        &self.guest.spool
    }

    fn exec_cgroup(&self) -> Result<Option<ExecCgroup>, BackendError> {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let number = self.guest.cgroups.fetch_add(1, Ordering::SeqCst) as u32;
        Ok(Some(ExecCgroup { number, dir: null(), kill: null() }))
    }

    fn release_exec_cgroup(&self, _: u32) {
        self.guest.released.fetch_add(1, Ordering::SeqCst);
    }

    fn exec_pids(&self, _: u32) -> Vec<i32> {
        Vec::new()
    }

    fn usage(&self) -> RawUsage {
        RawUsage {
            cpu: Duration::from_millis(1500),
            memory_bytes: 1000,
            disk_bytes: self.guest.disk.fetch_add(1, Ordering::SeqCst),
            ..RawUsage::default()
        }
    }

    fn set_cpu(&self, limits: &Limits) -> Result<(), BackendError> {
        self.host.cpu_set.lock().unwrap().push((limits.cpu_class, limits.cpu_weight));
        Ok(())
    }

    fn socket_bytes(&self) -> u64 {
        self.host.socket_bytes.load(Ordering::SeqCst)
    }

    fn oom_kills(&self) -> u64 {
        self.guest.ooms.load(Ordering::SeqCst)
    }

    fn take_oom_reports(&self) -> Vec<OomReport> {
        vec![OomReport { process: "hog".into(), rss_bytes: 4096 }]
    }

    fn snapshot(&self, quiesce: Quiesce, _: InPlace<'_>) -> Result<Option<Snapshot>, SnapshotError> {
        if quiesce == Quiesce::WriteNothing && self.host.writing.load(Ordering::SeqCst) {
            return Err(SnapshotError::Writing { files: vec![("sqlite3".into(), "/work/a.db".into())] });
        }
        Ok(Some(Snapshot::new(self.host.dir.join("upper"), || ())))
    }

    fn pause(&self, _: GoOn<'_>) -> Result<Paused, PauseError> {
        Err(PauseError::Unsupported)
    }

    fn thaw(&self) {}

    fn prefetch(&self, _: GoOn<'_>) {}

    fn kill(&self) {
        self.guest.kill();
    }

    fn enforce_file_count(&self) -> bool {
        self.host.over_file_limit.load(Ordering::SeqCst)
    }

    fn clean_up(&self) -> Result<(), BackendError> {
        self.host.guests.lock().unwrap().remove(&self.name);
        self.host.cleaned.lock().unwrap().push(self.name.clone());
        Ok(())
    }
}

/// One edge process, as far as a test needs one: dropping it is `kill -9`.
pub struct Edge {
    runtime: Option<tokio::runtime::Runtime>,
    pub client: Client,
    served: Arc<AtomicBool>,
}

pub struct World {
    pub host: Arc<Host>,
    pub state: PathBuf,
    pub extra: String,
    pub name: String,
    _dir: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::with("")
    }

    /// A world whose edges have these further lines in their configuration.
    pub fn with(extra: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Host { dir: dir.path().join("host"), ..Host::default() };
        std::fs::create_dir_all(&host.dir).unwrap();
        let state = dir.path().join("state");
        Self { host: Arc::new(host), state, extra: extra.to_owned(), name: "n1".to_owned(), _dir: dir }
    }

    pub fn config(&self) -> Config {
        let text = format!("node = {:?}\nstate_dir = {:?}\n{}", self.name, self.state, self.extra);
        Config::parse(&text, Path::new("edge.toml")).unwrap()
    }

    /// Starts an edge on this world's state. Blocks until it serves.
    pub fn edge(&self) -> Edge {
        self.edge_with_threads(dsec_edge::BLOCKING_THREADS)
    }

    /// The same with fewer threads that may block.
    pub fn edge_with_threads(&self, blocking: usize) -> Edge {
        self.start(self.config(), blocking)
    }

    /// An edge with this configuration.
    pub fn edge_of(&self, config: Config) -> Edge {
        self.start(config, dsec_edge::BLOCKING_THREADS)
    }

    fn start(&self, config: Config, blocking: usize) -> Edge {
        let host = Arc::clone(&self.host);
        let content = Arc::new(FakeContent::new(Arc::clone(&host)));
        let started = std::thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime =
                runtime.worker_threads(2).max_blocking_threads(blocking).enable_all().build().unwrap();
            let path = config.socket.clone();
            let (node, socket) = runtime.block_on(async {
                let node = Node::start(config, Arc::new(Backend(host)), content).await.unwrap();
                (node, Socket::bind(&path).unwrap())
            });
            let served = Arc::new(AtomicBool::new(false));
            let done = Arc::clone(&served);
            runtime.spawn(async move {
                serve(node, socket).await;
                done.store(true, Ordering::SeqCst);
            });
            Edge { runtime: Some(runtime), client: Client::new(path), served }
        });
        started.join().unwrap()
    }

    /// An edge with the image `base`.
    pub async fn ready(&self) -> Edge {
        let edge = self.edge();
        edge.client.import("base").await;
        edge
    }
}

impl Edge {
    /// The server ended by itself.
    pub fn has_ended(&self) -> bool {
        self.served.load(Ordering::SeqCst)
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// However a test ends, what runs in its sandboxes ends with it.
impl Drop for World {
    fn drop(&mut self) {
        for guest in self.host.guests.lock().unwrap_or_else(PoisonError::into_inner).values() {
            guest.kill();
        }
    }
}

/// Waits for something outside the HTTP surface. On failure says what was last seen.
pub async fn until<T: std::fmt::Debug>(what: &str, mut look: impl FnMut() -> Result<(), T>) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match look() {
            Ok(()) => return,
            Err(seen) if Instant::now() > deadline => panic!("waited for {what}; last seen: {seen:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}
