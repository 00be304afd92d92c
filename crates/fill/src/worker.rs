//! The worker: serves the device and the control socket that the holder gave it. It may die at any moment; all it knows
//! is in the cache directory or comes again.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use dsec_sys::process;
use rustix::process::{Resource, Signal};
use tokio::runtime::Runtime;

use crate::cache::{BootId, Cache};
use crate::config::Config;
use crate::control::{Control, Ending};
use crate::engine::Engine;
use crate::fuse::{Device, Shared, resend};
use crate::source::{LayerStore, REQUESTS_MAX};

/// Threads that may block on the disk, or unpack and check, at once. More would hold more memory and be no faster.
const BLOCKING_THREADS: usize = 64;

/// What the holder hands over.
#[derive(Debug)]
pub struct Inherited {
    /// Descriptors of the session.
    pub devices: Vec<OwnedFd>,
    /// The bound control socket.
    pub control: OwnedFd,
    /// Told when the worker serves.
    pub ready: OwnedFd,
    /// The holder, which this must not outlive.
    pub holder_pid: i32,
}

/// Serves until told otherwise.
///
/// # Errors
/// The cache, the device or the socket cannot be used.
pub fn run(config: &Config, inherited: Inherited) -> anyhow::Result<Ending> {
    end_with(inherited.holder_pid)?;
    rustix::thread::set_no_new_privs(true).context("privileges cannot be given up")?;
    process::drop_all_capabilities().context("capabilities cannot be given up")?;
    allow_many_files();

    let boot = BootId::current().context("the boot's id cannot be read")?;
    let cache = Arc::new(Cache::open(&config.cache_dir, config.cache_bytes, boot)?);
    let runtime = runtime("fill", BLOCKING_THREADS)?;
    let store_runtime = self::runtime("store", REQUESTS_MAX)?;
    let source = Arc::new(LayerStore::new(config.store.clone(), store_runtime.handle().clone()));
    let engine = Engine::new(cache, source, config.limits.clone())?;
    let shared = Arc::new(Shared { engine: engine.clone(), runtime: runtime.handle().clone() });

    let first = inherited.devices.first().context("no device descriptor was handed over")?;
    resend(first).context("the kernel cannot send unanswered requests again")?;
    for fd in inherited.devices {
        serve(Device::new(fd, shared.clone()))?;
    }
    rustix::io::write(&inherited.ready, b"r").context("the holder cannot be told")?;

    let listener = UnixListener::from(inherited.control);
    listener.set_nonblocking(true).context("the control socket cannot be used")?;
    let control = Control::new(engine, config.mount.clone());
    let ending = runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        anyhow::Ok(control.serve(listener).await)
    })?;
    if ending == Ending::Shutdown
        && let Some(holder) = rustix::process::getppid()
    {
        rustix::process::kill_process(holder, Signal::TERM).context("the holder cannot be told to end")?;
    }
    runtime.shutdown_background();
    store_runtime.shutdown_background();
    Ok(ending)
}

fn runtime(name: &str, blocking_threads: usize) -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .thread_name(name)
        .worker_threads(2)
        .max_blocking_threads(blocking_threads)
        .enable_all()
        .build()
        .context("an async runtime cannot be started")
}

/// A worker without a holder would keep a dead mount's content busy.
fn end_with(holder_pid: i32) -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("prctl")?;
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    anyhow::ensure!(parent == Some(holder_pid), "the holder, process {holder_pid}, is gone");
    Ok(())
}

/// Two descriptors a blob, and a node may know many.
fn allow_many_files() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

fn serve(device: Device) -> anyhow::Result<()> {
    let serve = move || {
        if let Err(error) = device.serve() {
            tracing::error!(%error, "the FUSE device cannot be read");
            // The holder starts another, which may have more luck.
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name("fuse".to_owned()).spawn(serve).context("a thread cannot be started")?;
    Ok(())
}

/// Takes over the descriptors with these numbers.
///
/// # Errors
/// One is not open.
pub fn inherit(devices: &[i32], control: i32, ready: i32, holder_pid: i32) -> anyhow::Result<Inherited> {
    let take = |number: i32| {
        process::inherited(number).with_context(|| format!("descriptor {number} was not handed over"))
    };
    Ok(Inherited {
        devices: devices.iter().map(|number| take(*number)).collect::<anyhow::Result<_>>()?,
        control: take(control)?,
        ready: take(ready)?,
        holder_pid,
    })
}

/// Reads the configuration and serves: what the program does when the holder starts it.
///
/// # Errors
/// As [`run`].
pub fn main(config: &Path, inherited: Inherited) -> anyhow::Result<Ending> {
    run(&Config::load(config)?, inherited)
}
