//! `dsec-edge`: the node agent.
//!
//! The order in `run` is load-bearing: the backend forks its launcher, so it starts while this process
//! has one thread; the lock comes before it, so that two edges never share a state directory.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use dsec_backend::NodePaths;
use dsec_backend::container::ContainerBackend;
use dsec_edge::config::Config;
use dsec_edge::launch::Containers;
use dsec_edge::layers::Filler;
use dsec_edge::lock::{LockError, StateLock};
use dsec_edge::member::{self, Joining, Member};
use dsec_edge::node::{Node, Over};
use dsec_edge::release::guard;
use dsec_edge::release::start::{Inherited, Purpose, become_chosen, become_next};
use dsec_edge::server::{Socket, serve, serve_cluster};
use dsec_edge::shutdown::{self, Progress};
use dsec_edge::{doctor, remote, swap};
use dsec_proto::rest::{Feature, FeatureState};
use dsec_store::{Store, StoreSettings};
use futures_util::StreamExt as _;
use tokio::task::JoinHandle;

/// How long `doctor` waits for the layer store.
const STORE_LOOK_MAX: Duration = Duration::from_secs(5);

/// The node agent of dsec: runs the node's sandboxes.
#[derive(Parser)]
#[command(name = "dsec-edge", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves the node. SIGTERM ends the edge and leaves its sandboxes running.
    Run {
        /// The edge's configuration.
        #[arg(long)]
        config: PathBuf,
        /// Writes "ready" and a line end to this descriptor when serving.
        #[arg(long)]
        ready_fd: Option<i32>,
        #[command(flatten)]
        join: JoinArgs,
    },
    /// Joins a cluster, and ends. The next `run` is a node of it.
    Join {
        /// The edge's configuration.
        #[arg(long)]
        config: PathBuf,
        #[command(flatten)]
        join: JoinArgs,
    },
    /// Ends every sandbox of the node, and the edge.
    Down {
        /// The edge's configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Looks whether this program would start with a configuration.
    Check {
        /// The edge's configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Ends an edge on trial that stands still; started by the one of before.
    #[command(hide = true, name = guard::SUBCOMMAND)]
    GuardTrial {
        #[arg(long)]
        state_dir: PathBuf,
        #[arg(long)]
        pid: i32,
        #[arg(long)]
        within_ms: u64,
    },
    /// Tries what this host's kernel can do.
    Doctor {
        /// The edge's configuration, for its paths.
        #[arg(long)]
        config: Option<PathBuf>,
        /// Where the state is to be, while there is no configuration yet.
        #[arg(long, default_value = "/var/lib/dsec", conflicts_with = "config")]
        state_dir: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Which cluster to join.
#[derive(clap::Args)]
struct JoinArgs {
    /// Token of `dsec cluster token`; one that this node has joined by already is passed over
    #[arg(
        long = "join",
        value_name = "TOKEN",
        env = "DSEC_JOIN_TOKEN",
        hide_env_values = true,
        requires = "control"
    )]
    token: Option<String>,
    /// A server of the cluster
    #[arg(long, value_name = "https://HOST:PORT", env = "DSEC_JOIN_CONTROL")]
    control: Option<String>,
}

impl JoinArgs {
    /// Joins, if that is asked for. In a runtime of its own, which is gone when the launcher is forked.
    fn join(self, config: &Config) -> anyhow::Result<bool> {
        let (Some(token), Some(control)) = (self.token, self.control) else { return Ok(false) };
        let joining = Joining { token: token.parse()?, control };
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("the async runtime cannot be started")?
            .block_on(member::join(config, &joining))?;
        Ok(true)
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run { config, ready_fd, join } => run(&config, ready_fd, join),
        Command::Join { config, join } => join_alone(&config, join),
        Command::Down { config } => down(&config),
        Command::Check { config } => check_config(&config),
        Command::GuardTrial { state_dir, pid, within_ms } => guard_trial(&state_dir, pid, within_ms),
        Command::Doctor { config, state_dir, json } => check(config.as_deref(), &state_dir, json),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "dsec-edge: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("DSEC_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours).init();
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(dsec_edge::BLOCKING_THREADS)
        .build()
        .context("the async runtime cannot be started")
}

fn start_backend(config: &Config) -> anyhow::Result<Arc<Containers>> {
    let paths = NodePaths { state_dir: config.state_dir.clone(), aether: config.aether.clone() };
    Ok(Arc::new(Containers::start(&paths).context("the container backend cannot be started")?))
}

/// A sandbox takes about ten descriptors and a request two, of thousands each; the usual soft limit of
/// 1,024 is for programs that use `select`.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// The content of layers: a holder that runs already, or a new one.
fn start_content(config: &Config) -> anyhow::Result<Arc<Filler>> {
    let filler = Filler::start(&config.fill, &config.state_dir, &config.store, config.cache_bytes);
    Ok(Arc::new(filler.context("the content of layers cannot be served")?))
}

fn join_alone(config: &Path, join: JoinArgs) -> anyhow::Result<ExitCode> {
    log_to_stderr("info");
    become_chosen(config, Purpose::Other);
    let config = Config::load(config)?;
    let _lock = StateLock::take(&config.state_dir)?;
    anyhow::ensure!(join.join(&config)?, "give --join TOKEN and --control https://HOST:PORT");
    Ok(ExitCode::SUCCESS)
}

/// Listens for control, and tells it so. What refuses this node for good ends the edge; a control that is away is tried again.
/// Returns the task that serves control.
async fn begin_membership(node: &Arc<Node>, member: Arc<Member>) -> anyhow::Result<JoinHandle<()>> {
    let listen = member.listen();
    let listener =
        tokio::net::TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    let serving = tokio::spawn(serve_cluster(Arc::clone(node), listener, member.server()));
    let pause = match member.announce(&node.instance, listen).await {
        Ok(pause) => pause,
        Err(error) if error.is_final() => return Err(error.into()),
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::warn!(error = format!("{error:#}"), "the cluster does not hear this node yet");
            Duration::ZERO
        }
    };
    tracing::info!(%listen, "the edge serves its cluster");
    tokio::spawn(member.keep(node.instance.clone(), listen, pause));
    Ok(serving)
}

fn run(file: &Path, ready_fd: Option<i32>, join: JoinArgs) -> anyhow::Result<ExitCode> {
    log_to_stderr("info");
    become_chosen(file, Purpose::Serve);
    let inherited = Inherited::find();
    let config = Config::load(file)?;
    let lock = StateLock::take(&config.state_dir)?;
    join.join(&config)?;
    // A node without its swap serves as well: pauses give no memory back then, and `dsec doctor` says so.
    if let Err(error) = swap::set_up(&config.state_dir, config.swap_bytes) {
        tracing::error!(%error, "the node's swap cannot be set up");
    }
    let member = member::check(&config)?.map(|kept| Member::new(&config, kept)).transpose()?.map(Arc::new);
    raise_descriptor_limit();
    let backend = start_backend(&config)?;
    inherited.reap();
    let content = start_content(&config)?;
    let state_dir = config.state_dir.clone();
    let runtime = runtime()?;
    let over = runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
        let path = config.socket.clone();
        tokio::spawn(Arc::clone(&content).supervise());
        let node = Node::start(config, backend, content).await?;
        let socket =
            Socket::bind(&path).with_context(|| format!("{} cannot be served on", path.display()))?;
        let serving = match member {
            Some(member) => Some(begin_membership(&node, member).await?),
            None => None,
        };
        if let Some(fd) = ready_fd {
            tell_ready(fd)?;
        }
        tracing::info!(socket = %path.display(), "the edge serves");
        tokio::spawn(go_back_in_time(Arc::clone(&node)));
        tokio::select! {
            over = serve(node, socket) => {
                if let Some(serving) = serving {
                    serving.await?;
                }
                return anyhow::Ok(Some(over));
            }
            _ = terminate.recv() => tracing::info!("terminated; sandboxes run on"),
            _ = interrupt.recv() => tracing::info!("interrupted; sandboxes run on"),
        }
        anyhow::Ok(None)
    });
    // Blocking threads may sit in reads that nobody waits for any more.
    runtime.shutdown_background();
    match over? {
        Some(Over::HandedOn) => {
            tracing::info!("the edge becomes the next one; sandboxes run on");
            lock.give_back();
            return Err(become_next(&state_dir, file));
        }
        Some(Over::Down) => tracing::info!("the node was taken down"),
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Has the node go back from a change of which nobody says in time that it is good.
async fn go_back_in_time(node: Arc<Node>) {
    node.releases.expired().await;
    node.hand_on().await;
}

fn check_config(file: &Path) -> anyhow::Result<ExitCode> {
    member::check(&Config::load(file)?)?;
    Ok(ExitCode::SUCCESS)
}

fn guard_trial(state_dir: &Path, pid: i32, within_ms: u64) -> anyhow::Result<ExitCode> {
    log_to_stderr("info");
    guard::watch(state_dir, pid, Duration::from_millis(within_ms)).context("the trial cannot be watched")?;
    Ok(ExitCode::SUCCESS)
}

fn tell_ready(fd: i32) -> anyhow::Result<()> {
    anyhow::ensure!(fd > 2, "--ready-fd is {fd}; it must be a descriptor above 2 that the caller passed");
    let mut file = std::fs::File::options()
        .write(true)
        .open(format!("/proc/self/fd/{fd}"))
        .with_context(|| format!("--ready-fd {fd} is no open descriptor"))?;
    file.write_all(b"ready\n").with_context(|| format!("--ready-fd {fd} cannot be written"))?;
    Ok(())
}

fn show(progress: &Progress) -> bool {
    let mut err = std::io::stderr();
    let shown = match progress {
        Progress::Stopping { left, total } => writeln!(err, "{} of {total} sandboxes ended", total - left),
        Progress::Backend => writeln!(err, "taking the node's own things down"),
        Progress::Done => writeln!(err, "nothing is left"),
        Progress::Error { message } => writeln!(err, "something is left: {message}"),
    };
    shown.is_ok() && *progress == Progress::Done
}

fn down(config: &Path) -> anyhow::Result<ExitCode> {
    log_to_stderr("warn");
    become_chosen(config, Purpose::Other);
    let config = Config::load(config)?;
    let code = |done: bool| if done { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    match StateLock::take(&config.state_dir) {
        Err(LockError::Held { .. }) => {
            let done = runtime()?.block_on(remote::shut_down(&config.socket, show))?;
            // The socket's last line comes before the process ends; whoever comes next may need the lock.
            remote::wait_for_lock(&config.state_dir)?;
            Ok(code(done))
        }
        Err(error) => Err(error.into()),
        Ok(_lock) => {
            let backend = start_backend(&config)?;
            let content = start_content(&config)?;
            let state_dir = config.state_dir.clone();
            let done = runtime()?.block_on(async {
                let (launch, served) = (Arc::clone(&backend), Arc::clone(&content));
                let node = match Node::start(config, backend, content).await {
                    Ok(node) => node,
                    Err(error) => {
                        // What runs ends all the same; records that are left are of sandboxes that the next edge finds gone.
                        tracing::warn!(%error, "the node is taken down without its records");
                        shutdown::without_node(launch, &*served).await.context("something is left")?;
                        shutdown::take_swap_down(&state_dir).await;
                        return Ok(show(&Progress::Done));
                    }
                };
                let mut lines = std::pin::pin!(shutdown::start(node));
                let mut done = false;
                while let Some(progress) = lines.next().await {
                    done = show(&progress);
                }
                anyhow::Ok(done)
            })?;
            Ok(code(done))
        }
    }
}

/// What keeps the store from being used. One that the first edge is going to make is none.
fn store_problem(settings: &StoreSettings) -> anyhow::Result<Option<String>> {
    let path = settings.url.strip_prefix("file://").unwrap_or(&settings.url);
    if settings.create && !Path::new(path).exists() {
        return Ok(None);
    }
    let runtime = runtime()?;
    let settings = settings.clone();
    let opened = runtime.block_on(async {
        // A directory whose server is gone may keep its thread for ever.
        let open = move || tokio::runtime::Handle::current().block_on(Store::open(&settings));
        tokio::time::timeout(STORE_LOOK_MAX, tokio::task::spawn_blocking(open)).await
    });
    runtime.shutdown_background();
    Ok(match opened {
        Ok(opened) => opened?.err().map(|error| format!("{:#}", anyhow::Error::from(error))),
        Err(_) => Some(format!("it did not answer within {} s", STORE_LOOK_MAX.as_secs())),
    })
}

fn check(config: Option<&Path>, state_dir: &Path, json: bool) -> anyhow::Result<ExitCode> {
    log_to_stderr("error");
    let mut features = match config.map(Config::load).transpose()? {
        Some(config) => {
            let mut own = doctor::own(&config.aether, &config.fill, &config.state_dir);
            own.push(doctor::store(&config.store.url, store_problem(&config.store)?));
            own
        }
        None => {
            let exe = std::env::current_exe()?;
            doctor::own(&exe.with_file_name("dsec-aether"), &exe.with_file_name("dsec-fill"), state_dir)
        }
    };
    features.push(swap::feature());
    features.extend(doctor::features(ContainerBackend::probe()));
    let mut out = std::io::stdout();
    if json {
        serde_json::to_writer_pretty(&mut out, &features)?;
        writeln!(out)?;
    } else {
        for Feature { name, purpose, state, found, remedy } in &features {
            let mark = match state {
                FeatureState::Works => "works   ",
                FeatureState::Degraded => "degraded",
                FeatureState::Missing => "MISSING ",
            };
            writeln!(out, "{mark}  {name}: {found} ({purpose})")?;
            if !remedy.is_empty() {
                writeln!(out, "          {remedy}")?;
            }
        }
    }
    let missing = features.iter().any(|feature| feature.state == FeatureState::Missing);
    Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
