//! Where the content of layers can be read on this node: the fill worker, behind a trait.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsec_fill::client::{Client, ClientError, Opened};
use dsec_fill::config::Config;
use dsec_fill::engine::Limits;
use dsec_fill::protocol::Stats;
use dsec_fill::trace::Trace;
use dsec_image::layer::BlobId;
use dsec_store::StoreSettings;

/// How long one call of the worker may take, with a worker that is replaced meanwhile.
const CALL_MAX: Duration = Duration::from_secs(30);
/// How long a holder may take to mount its device and to serve.
const START_MAX: Duration = Duration::from_secs(20);
/// Threads that answer the kernel: a read waits in one only as long as the cache's disk takes.
const DEVICES: usize = 4;
/// How long a holder that answers takes to do so.
const PROBE_MAX: Duration = Duration::from_millis(500);
/// Pause between two looks at whether it serves.
const LOOK: Duration = Duration::from_millis(10);

/// A call under way.
pub type Calling<'a, T> = Pin<Box<dyn Future<Output = Result<T, ClientError>> + Send + 'a>>;

/// The content of blobs on this node.
pub trait Content: Send + Sync + 'static {
    /// Makes a blob readable and says where.
    fn open(&self, blob: BlobId) -> Calling<'_, Opened>;
    /// The blob is not mounted any more.
    fn close(&self, blob: BlobId) -> Calling<'_, ()>;
    /// Takes over the file of a blob that was made here just now.
    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool>;
    /// Brings content in ahead of demand.
    fn prefetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>) -> Calling<'a, ()>;
    /// What was wanted of the blob, in order.
    fn trace(&self, blob: BlobId) -> Calling<'_, Trace>;
    /// What was done and what is here.
    fn stats(&self) -> Calling<'_, Stats>;
    /// Ends it; no layer is mounted.
    fn shut_down(&self) -> Calling<'_, ()>;
}

/// The fill worker behind its socket.
pub struct Filler(Client);

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
        let (socket, file) = (run.join("fill.sock"), run.join("fill.toml"));
        if !answers(&socket) {
            let config = Config {
                mount: run.join("content"),
                socket: socket.clone(),
                cache_dir: state_dir.join("layers/cache"),
                cache_bytes,
                devices: DEVICES,
                store: store.clone(),
                limits: Limits::default(),
            };
            std::fs::create_dir_all(&run)?;
            std::fs::create_dir_all(&config.cache_dir)?;
            write_private(&file, &toml::to_string(&config).map_err(io::Error::other)?)?;
            spawn(program, &file, &socket)?;
        }
        Ok(Self(Client::new(&socket, CALL_MAX)))
    }
}

/// A file that may hold a store's keys.
fn write_private(file: &Path, text: &str) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(file)?;
    file.write_all(text.as_bytes())
}

/// Whether somebody serves the socket: a socket file alone says nothing.
fn answers(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok_and(|mut stream| {
        let mut answer = [0; 1];
        stream.set_read_timeout(Some(PROBE_MAX)).is_ok()
            && stream.write_all(b"{\"op\":\"stats\"}\n").is_ok()
            && stream.read_exact(&mut answer).is_ok()
    })
}

/// Starts a holder in a process group of its own, since it outlives this process, and waits until it serves. It logs where
/// this process does.
fn spawn(program: &Path, config: &Path, socket: &Path) -> io::Result<()> {
    let mut command = Command::new(program);
    command
        .arg("hold")
        .arg("--config")
        .arg(config)
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
            return Err(io::Error::other(format!("{} did not serve within {limit} s", program.display())));
        }
        std::thread::sleep(LOOK);
    }
    // Reaped when it ends, which is after this process in most cases.
    std::thread::spawn(move || child.wait());
    Ok(())
}

impl Content for Filler {
    fn open(&self, blob: BlobId) -> Calling<'_, Opened> {
        Box::pin(self.0.open(blob))
    }

    fn close(&self, blob: BlobId) -> Calling<'_, ()> {
        Box::pin(self.0.close(blob))
    }

    fn hand_over<'a>(&'a self, blob: BlobId, file: &'a Path) -> Calling<'a, bool> {
        Box::pin(self.0.hand_over(blob, file))
    }

    fn prefetch<'a>(&'a self, blob: BlobId, trace: Option<&'a Trace>) -> Calling<'a, ()> {
        Box::pin(self.0.prefetch(blob, trace))
    }

    fn trace(&self, blob: BlobId) -> Calling<'_, Trace> {
        Box::pin(self.0.trace(blob, false))
    }

    fn stats(&self) -> Calling<'_, Stats> {
        Box::pin(self.0.stats())
    }

    fn shut_down(&self) -> Calling<'_, ()> {
        Box::pin(self.0.shut_down())
    }
}
