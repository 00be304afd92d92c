//! The real `dsec-control` as a child, in front of simulated nodes.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};

use crate::edges::{Edges, unix_ms};

/// The program.
const CONTROL: &str = "dsec-control";
/// How long it may take until it is ready, and until it has ended.
const READY_WITHIN: Duration = Duration::from_secs(30);
const ENDED_WITHIN: Duration = Duration::from_secs(10);
/// Bytes of its log that are shown when it dies.
const TAIL_BYTES: usize = 2000;

/// A running control. Dropping it kills it.
pub(crate) struct Control {
    child: Child,
    address: String,
    key: String,
}

impl Control {
    /// Starts `program` in front of `edges`, with its configuration, key file and log in `dir`.
    ///
    /// # Errors
    /// It cannot be started, or dies, or is not ready in time.
    pub(crate) async fn start(program: &Path, dir: &Path, edges: &Edges) -> anyhow::Result<Self> {
        let key = format!("dsec_{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let (config, log) = (dir.join("control.toml"), dir.join("control.log"));
        let keys_file = dir.join("keys.json");
        let sha256: String =
            Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        let entry = json!({ "id": "key-sim", "project": "root", "sha256": sha256, "created_ms": unix_ms(), "name": "dsec-sim" });
        write(&keys_file, &json!({ "keys": [entry] }).to_string())?;
        let nodes = edges.all().iter().map(|edge| toml_node(edge.node().name().as_str(), edge.socket()));
        let settings = toml::Table::from_iter([
            ("listen".to_owned(), "127.0.0.1:0".into()),
            ("keys_file".to_owned(), keys_file.to_string_lossy().into_owned().into()),
            ("nodes".to_owned(), toml::Value::Array(nodes.collect())),
        ]);
        write(&config, &toml::to_string(&settings)?)?;

        let (read, write) = pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command.arg("--config").arg(&config).arg("--ready-fd").arg(write.as_raw_fd().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output).kill_on_drop(true);
        let child = spawn_with(&mut command, &write)
            .with_context(|| format!("cannot start {}", program.display()))?;
        drop(write);
        let mut control = Self { child, address: String::new(), key };
        let mut ready = Receiver::from_owned_fd(read)?;
        let said = tokio::time::timeout(READY_WITHIN, ready.read_to_string(&mut control.address)).await;
        control.address.truncate(control.address.trim_end().len());
        if said.is_err() || control.address.is_empty() {
            let log = std::fs::read(&log).unwrap_or_default();
            let tail = String::from_utf8_lossy(&log[log.len().saturating_sub(TAIL_BYTES)..]).into_owned();
            bail!("{} did not become ready; its last words: {}", program.display(), tail.trim());
        }
        Ok(control)
    }

    /// Where it listens, `host:port`.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// A key that it takes.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// The most memory that it held so far, MiB (`VmHWM`).
    pub(crate) fn memory_peak_mib(&self) -> anyhow::Result<f64> {
        let status = self.proc("status")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
        let kib: f64 = kib.and_then(|kib| kib.parse().ok()).context("/proc says no VmHWM")?;
        Ok(kib / 1024.0)
    }

    /// Processor time that it has used so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = self.proc("stat")?;
        // After the name, which may have blanks in it: state is the first field, utime and stime the 12th and 13th.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: u64 = fields.iter().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }

    fn proc(&self, file: &str) -> anyhow::Result<String> {
        let pid = self.child.id().ok_or_else(|| anyhow!("{CONTROL} has ended"))?;
        let path = format!("/proc/{pid}/{file}");
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    }

    /// Ends it and waits until it has.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        if let Some(pid) = self.child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())) {
            // A failure means that it is gone already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(ENDED_WITHIN, self.child.wait()).await.is_err() {
            self.child.kill().await.with_context(|| format!("cannot end {CONTROL}"))?;
        }
        Ok(())
    }
}

/// Spawns with one descriptor left open in the child. This program starts no other.
fn spawn_with(command: &mut Command, fd: &OwnedFd) -> std::io::Result<Child> {
    rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    let child = command.spawn();
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    child
}

fn toml_node(name: &str, socket: &Path) -> toml::Value {
    let socket = socket.to_string_lossy().into_owned();
    toml::Table::from_iter([("name".to_owned(), name.into()), ("socket".to_owned(), socket.into())]).into()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The program that is there: the one that was named, else beside this one.
///
/// # Errors
/// There is none.
pub(crate) fn locate(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let found = match named {
        Some(path) => path,
        None => {
            std::env::current_exe().context("where this program lies is not known")?.with_file_name(CONTROL)
        }
    };
    if !found.is_file() {
        bail!(
            "there is no {}; name one with --control, or build it: cargo build --release -p {CONTROL}",
            found.display()
        );
    }
    Ok(found)
}
