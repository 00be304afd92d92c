//! The fill worker and its holder: found or started, watched, and started again when the holder ends. (A worker that ends
//! is the holder's to replace.)
//!
//! ```text
//! start ── adopted (generation 0) or started (1) ──► serves ── ends ──► started again (2, 3, ...), with backoff
//!                                                      └─ shut down: ends for good
//! ```
//!
//! With the holder its device goes: what is mounted from it reads errors where the content is not in memory. The next one
//! has a device of its own, from which layers are mounted anew.

use std::ffi::CString;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dsec_fill::client::{Client, ClientError, Opened};
use dsec_fill::config::Config;
use dsec_fill::engine::Limits;
use dsec_fill::protocol::{BlobStats, Fetched, Room, Stats};
use dsec_fill::trace::Trace;
use dsec_image::layer::BlobId;
use dsec_store::StoreSettings;
use dsec_sys::{mount, process};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::sync::Mutex;

use super::content::{Calling, Content};
use crate::guest::codec::watched;

/// How long one call of the worker may take, with a worker or a holder that is replaced meanwhile.
const CALL_MAX: Duration = Duration::from_secs(30);
/// How long a holder may take to mount its device and to serve.
const START_MAX: Duration = Duration::from_secs(20);
/// How long a holder may take to end that was asked to.
const END_MAX: Duration = Duration::from_secs(10);
/// Threads that answer the kernel: a read waits in one only as long as the cache's disk takes.
const DEVICES: usize = 4;
/// How long a holder that answers takes to do so.
const PROBE_MAX: Duration = Duration::from_millis(500);
/// Pause between two looks at whether it serves.
const LOOK: Duration = Duration::from_millis(10);
/// Pause before a holder is started again; it doubles up to the second, and begins anew after one that lasted.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// What a holder must live to have lasted.
const LASTED: Duration = Duration::from_secs(60);

/// The fill worker behind its socket, and its holder.
pub struct Filler {
    client: Client,
    launch: Launch,
    /// The holder, readable when it has ended. Locked by whoever starts or ends one.
    holder: Mutex<Arc<OwnedFd>>,
    generation: AtomicU64,
    is_over: AtomicBool,
}

/// How holders are started.
#[derive(Clone)]
struct Launch {
    program: PathBuf,
    /// Link to the program, which workers are started from: one that leads elsewhere is a holder's next worker.
    link: PathBuf,
    file: PathBuf,
    socket: PathBuf,
    mount: PathBuf,
}

impl Filler {
    /// Finds the holder of an earlier edge, or starts one. Blocks for as long as it takes to start.
    ///
    /// # Errors
    /// The program is missing or does not start; its own words are in the node's log.
    pub fn start(
        program: &Path,
        state_dir: &Path,
        store: &StoreSettings,
        cache_bytes: u64,
    ) -> io::Result<Self> {
        let run = state_dir.join("run");
        let config = Config {
            mount: run.join("content"),
            socket: run.join("fill.sock"),
            cache_dir: state_dir.join("layers/cache"),
            cache_bytes,
            devices: DEVICES,
            store: store.clone(),
            limits: Limits::default(),
        };
        let launch = Launch {
            program: program.to_owned(),
            link: run.join("dsec-fill"),
            file: run.join("fill.toml"),
            socket: config.socket.clone(),
            mount: config.mount.clone(),
        };
        let (holder, generation) = match found(&launch.socket) {
            Some(holder) => {
                let (settings, program) = (launch.takes(&config)?, launch.points()?);
                if settings || program {
                    // Whose next worker is another program, or reads what is written there now.
                    pidfd_send_signal(&holder, Signal::HUP)?;
                }
                launch.wait_for(&holder)?;
                (holder, 0)
            }
            None => {
                std::fs::create_dir_all(&run)?;
                std::fs::create_dir_all(&config.cache_dir)?;
                write_private(&launch.file, &toml::to_string(&config).map_err(io::Error::other)?)?;
                launch.points()?;
                (launch.holder()?, 1)
            }
        };
        Ok(Self {
            client: Client::new(&launch.socket, CALL_MAX),
            launch,
            holder: Mutex::new(Arc::new(holder)),
            generation: AtomicU64::new(generation),
            is_over: AtomicBool::new(false),
        })
    }

    /// Starts another holder whenever one ends, until it is shut down.
    pub async fn supervise(self: Arc<Self>) {
        let mut pause = PAUSE_MIN;
        loop {
            let (holder, since) = (Arc::clone(&*self.holder.lock().await), Instant::now());
            if let Err(error) = ended(&holder).await {
                tracing::error!(%error, "the fill holder cannot be watched");
                return;
            }
            if self.is_over.load(Ordering::Acquire) {
                return;
            }
            tracing::error!(
                "the fill holder ended; reads through it fail until their layers are mounted anew"
            );
            if since.elapsed() >= LASTED {
                pause = PAUSE_MIN;
            }
            loop {
                tokio::time::sleep(pause).await;
                pause = PAUSE_MAX.min(pause * 2);
                match self.start_again().await {
                    Ok(()) => break,
                    Err(error) => tracing::error!(%error, ?pause, "the fill holder was not started again"),
                }
            }
        }
    }

    /// Another holder, unless it is over.
    async fn start_again(&self) -> io::Result<()> {
        let mut holder = self.holder.lock().await;
        if self.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        let launch = self.launch.clone();
        let started = tokio::task::spawn_blocking(move || launch.holder()).await;
        *holder = Arc::new(started.map_err(io::Error::other)??);
        self.generation.fetch_add(1, Ordering::AcqRel);
        tracing::info!("the fill holder was started again");
        Ok(())
    }

    async fn end(&self) -> Result<(), ClientError> {
        self.is_over.store(true, Ordering::Release);
        let holder = self.holder.lock().await;
        if has_ended(&holder) {
            self.launch.clear();
            return Ok(());
        }
        self.client.shut_down().await?;
        if !matches!(tokio::time::timeout(END_MAX, ended(&holder)).await, Ok(Ok(()))) {
            tracing::warn!("the fill holder has not ended yet");
        }
        Ok(())
    }
}

impl Launch {
    /// Writes down what an earlier holder is to serve with from now on; whether that is anything new.
    ///
    /// # Errors
    /// It serves another store, which what is mounted on it cannot follow.
    fn takes(&self, wanted: &Config) -> io::Result<bool> {
        let text = toml::to_string(wanted).map_err(io::Error::other)?;
        let earlier = std::fs::read_to_string(&self.file)?;
        if earlier == text {
            return Ok(false);
        }
        let place = |store: &StoreSettings| (store.url.clone(), store.endpoint.clone());
        if toml::from_str(&earlier).is_ok_and(|there: Config| place(&there.store) != place(&wanted.store)) {
            return Err(io::Error::other(
                "[store] of edge.toml is not the store that the running dsec-fill serves: undo the change, or run `dsec down`, \
                 which ends every sandbox, and then `dsec up`",
            ));
        }
        write_private(&self.file, &text)?;
        Ok(true)
    }

    /// Has the link lead to the program; whether it did not before.
    fn points(&self) -> io::Result<bool> {
        if std::fs::read_link(&self.link).is_ok_and(|leads| leads == self.program) {
            return Ok(false);
        }
        let draft = self.link.with_extension("new");
        let _was_none = std::fs::remove_file(&draft);
        std::os::unix::fs::symlink(&self.program, &draft)?;
        std::fs::rename(&draft, &self.link)?;
        Ok(true)
    }

    /// Waits until the holder of an earlier edge has a worker that serves: the one there was may be in the midst of its replacement.
    fn wait_for(&self, holder: &OwnedFd) -> io::Result<()> {
        let until = Instant::now() + START_MAX;
        while !answers(&self.socket) {
            if has_ended(holder) {
                return Err(io::Error::other("the fill holder ended while it was taken over"));
            }
            if Instant::now() >= until {
                let limit = START_MAX.as_secs();
                return Err(io::Error::other(format!(
                    "the fill holder had no worker that served within {limit} s"
                )));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Starts a holder in a process group of its own, since it outlives this process, and waits until it serves. It logs
    /// where this process does.
    fn holder(&self) -> io::Result<OwnedFd> {
        let Self { program, link, file, socket, .. } = self;
        let mut command = Command::new(program);
        command
            .arg("hold")
            .arg("--config")
            .arg(file)
            .arg("--program")
            .arg(link)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|e| io::Error::new(e.kind(), format!("{} cannot be started: {e}", program.display())))?;
        let until = Instant::now() + START_MAX;
        while !answers(socket) {
            if let Some(ended) = child.try_wait()? {
                return Err(io::Error::other(format!(
                    "{} ended with {ended}; its words are in the log",
                    program.display()
                )));
            }
            if Instant::now() >= until {
                let _gone_already = child.kill();
                let _reaped = child.wait();
                let limit = START_MAX.as_secs();
                return Err(io::Error::other(format!(
                    "{} did not serve within {limit} s",
                    program.display()
                )));
            }
            std::thread::sleep(LOOK);
        }
        let pidfd = process::open_pidfd(child.id() as i32);
        // Reaped when it ends, which is after this process in most cases.
        std::thread::spawn(move || child.wait());
        pidfd
    }

    /// Takes away what a holder left that was killed: its mount answers nothing any more.
    fn clear(&self) {
        let mount = CString::new(self.mount.as_os_str().as_bytes()).map_err(io::Error::other);
        if let Err(error) = mount.and_then(|at| mount::unmount(&at, true)) {
            tracing::warn!(%error, "the mount of a fill holder that was killed stays");
        }
        let _gone_already = std::fs::remove_file(&self.socket);
    }
}

/// A file that may hold a store's keys: readable for nobody else from its beginning, and whole under its name.
fn write_private(file: &Path, text: &str) -> io::Result<()> {
    let dir = file.parent().unwrap_or(Path::new("/"));
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    draft.write_all(text.as_bytes())?;
    draft.persist(file)?;
    Ok(())
}

/// Whether somebody serves the socket: a socket file alone says nothing.
fn answers(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok_and(|stream| is_served(&stream))
}

fn is_served(mut stream: &UnixStream) -> bool {
    let mut answer = [0; 1];
    stream.set_read_timeout(Some(PROBE_MAX)).is_ok()
        && stream.write_all(b"{\"op\":\"stats\"}\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
}

/// The holder of an earlier edge: whoever made the socket listen. It may have no worker at this moment.
fn found(socket: &Path) -> Option<OwnedFd> {
    let stream = UnixStream::connect(socket).ok()?;
    let holder = socket_peercred(&stream).ok()?.pid.as_raw_nonzero().get();
    process::open_pidfd(holder).ok()
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    process::wait_for_end(pidfd.as_fd(), Duration::ZERO).unwrap_or(true)
}

async fn ended(pidfd: &Arc<OwnedFd>) -> io::Result<()> {
    watched(pidfd.try_clone()?)?.readable().await.map(drop)
}

impl Content for Filler {
    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn open(&self, blob: BlobId) -> Calling<'_, Opened> {
        Box::pin(self.client.open(blob))
    }

    fn close(&self, blob: BlobId) -> Calling<'_, ()> {
        Box::pin(self.client.close(blob))
    }

    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool> {
        Box::pin(self.client.hand_over(blob, file))
    }

    fn prefetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>) -> Calling<'a, ()> {
        Box::pin(self.client.prefetch(blob, trace))
    }

    fn fetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>, limit: Duration) -> Calling<'a, Fetched> {
        Box::pin(self.client.fetch(blob, trace, limit))
    }

    fn trace(&self, blob: BlobId) -> Calling<'_, Trace> {
        Box::pin(self.client.trace(blob, false))
    }

    fn stats(&self) -> Calling<'_, Stats> {
        Box::pin(self.client.stats())
    }

    fn look<'a>(&'a self, blobs: &'a [BlobId]) -> Calling<'a, Vec<BlobStats>> {
        Box::pin(self.client.look(blobs))
    }

    fn room(&self) -> Calling<'_, Room> {
        Box::pin(self.client.room())
    }

    fn evict(&self, blob: BlobId) -> Calling<'_, u64> {
        Box::pin(self.client.evict(blob))
    }

    fn shut_down(&self) -> Calling<'_, ()> {
        Box::pin(self.end())
    }
}
