//! A holder with its worker on this kernel, and the certainty that nothing of it stays. Needs root.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dsec_fill::client::Client;
use dsec_fill::config::Config;
use dsec_fill::engine::Limits;
use dsec_image::layer::PackId;
use dsec_store::{Lease, Publish, Store, StoreSettings};
use rustix::fs::{Advice, OFlags, fadvise};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{Made, Random};

pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A running holder.
pub(crate) struct Platform {
    pub(crate) dir: TempDir,
    pub(crate) client: Client,
    /// What is started by [`Self::hold`], and where it writes its errors.
    pub(crate) program: PathBuf,
    pub(crate) errors: Option<PathBuf>,
    holder: Option<Child>,
}

impl Platform {
    /// Serves these blobs from a store that is a directory.
    pub(crate) fn start(made: &[&Made], change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let store = StoreSettings::new(path("store").display().to_string());
        block_on(async {
            let store = Store::create(&store).await.unwrap();
            let lease = Lease::begin(&store, "test", LIMIT).await.unwrap();
            let session = Publish::begin(Arc::new(lease)).await.unwrap();
            for made in made {
                made.publish(&session).await;
            }
        });
        let mut config = Config {
            mount: path("mount"),
            socket: path("socket"),
            cache_dir: path("cache"),
            cache_bytes: 10_000_000_000,
            devices: 4,
            store,
            limits: Limits { outage_ms: 1000, attempt_ms: 500, ..Limits::default() },
        };
        change(&mut config);
        std::fs::write(dir.path().join("fill.toml"), toml::to_string(&config).unwrap()).unwrap();
        let client = Client::new(&dir.path().join("socket"), LIMIT);
        let program = PathBuf::from(env!("CARGO_BIN_EXE_dsec-fill"));
        let mut platform = Self { dir, client, program, errors: None, holder: None };
        platform.hold();
        platform
    }

    /// Starts a holder and waits until its worker answers.
    pub(crate) fn hold(&mut self) {
        let errors = self.errors.as_ref().map_or(Stdio::inherit(), |path| File::create(path).unwrap().into());
        let holder = Command::new(&self.program)
            .stderr(errors)
            .args(["hold", "--config"])
            .arg(self.dir.path().join("fill.toml"))
            .env("DSEC_LOG", "error")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        self.holder = Some(holder);
        block_on(self.client.stats()).unwrap();
    }

    pub(crate) fn mount(&self) -> PathBuf {
        self.dir.path().join("mount")
    }

    /// A pack's file in the store.
    pub(crate) fn pack(&self, id: &PackId) -> PathBuf {
        let id = id.to_string();
        self.dir.path().join("store/packs").join(&id[..2]).join(id)
    }

    pub(crate) fn holder_pid(&self) -> Pid {
        Pid::from_child(self.holder.as_ref().unwrap())
    }

    /// The worker now, if there is one.
    pub(crate) fn worker_pid(&self) -> Option<Pid> {
        let holder = self.holder_pid().as_raw_nonzero();
        let children = std::fs::read_to_string(format!("/proc/{holder}/task/{holder}/children")).ok()?;
        Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
    }

    /// Kills each worker a moment after it came, from at once to 16 ms later, unless the readers stop.
    pub(crate) fn kill_workers(&self, kills: u64, stop: &AtomicBool) {
        let (mut random, mut last) = (Random(5), None);
        let mut seen = Instant::now();
        for _ in 0..kills {
            let worker = loop {
                match self.worker_pid() {
                    Some(pid) if Some(pid) != last => break pid,
                    _ if stop.load(Ordering::Relaxed) => return,
                    _ => std::thread::sleep(Duration::from_micros(200)),
                }
                assert!(seen.elapsed() < LIMIT, "no worker comes after {last:?}");
            };
            std::thread::sleep(Duration::from_micros(random.below(16_000)));
            // It may have ended by itself in between, which is then its holder's to notice.
            kill_process(worker, Signal::KILL).ok();
            (last, seen) = (Some(worker), Instant::now());
        }
    }

    /// Ends the holder with a signal and waits for it.
    pub(crate) fn end(&mut self, signal: Option<Signal>) {
        let Some(mut holder) = self.holder.take() else { return };
        if let Some(signal) = signal {
            kill_process(Pid::from_child(&holder), signal).unwrap();
        }
        let until = Instant::now() + LIMIT;
        while holder.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the holder does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What is mounted below this platform's directory.
    pub(crate) fn mounts(&self) -> Vec<String> {
        let here = self.dir.path().display().to_string();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.lines().filter(|line| line.contains(&here)).map(str::to_owned).collect()
    }

    /// Processes that were started with this platform's configuration.
    pub(crate) fn processes(&self) -> Vec<String> {
        let here = self.dir.path().display().to_string();
        let of = |entry: std::io::Result<std::fs::DirEntry>| {
            let line = std::fs::read(entry.ok()?.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(&here).then_some(line)
        };
        std::fs::read_dir("/proc").unwrap().filter_map(of).collect()
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        self.end(Some(Signal::TERM));
        if !panicking {
            assert_eq!((self.mounts(), self.processes()), (Vec::new(), Vec::new()));
            assert!(!self.dir.path().join("socket").exists());
        }
    }
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A file of the device.
pub(crate) struct Reader {
    file: File,
    direct: bool,
}

impl Reader {
    /// One that asks the worker for every byte, or one that reads through the page cache, which it empties first.
    pub(crate) fn open(path: &Path, direct: bool) -> Self {
        let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
        let file = File::options().read(true).custom_flags(flags).open(path).unwrap();
        Self { file, direct }
    }

    pub(crate) fn read(&self, start: u64, length: usize) -> std::io::Result<Vec<u8>> {
        if !self.direct {
            fadvise(&self.file, 0, None, Advice::DontNeed).unwrap();
        }
        let mut out = vec![0; length];
        self.file.read_exact_at(&mut out, start)?;
        Ok(out)
    }
}
