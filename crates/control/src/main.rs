//! `dsec-control`: the public API server. See the library for how it is built.

use std::fs::OpenOptions;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use dsec_control::app::App;
use dsec_control::config::{Config, ConfigFile, NodeEntry};
use dsec_control::server::Door;
use dsec_control::tls::PublicTls;
use dsec_control::{api, openapi, server};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// The public API server of dsec: authenticates, places, forwards to the nodes.
#[derive(Debug, Parser)]
#[command(name = "dsec-control", version)]
struct Args {
    /// Configuration file (TOML): listen, keys_file, tls_cert, tls_key, cluster_dir, nodes = [{ name, socket }],
    /// burst = { pool, above, share }
    #[arg(long, value_name = "FILE", env = "DSEC_CONTROL_CONFIG")]
    config: Option<PathBuf>,
    /// Address of the public API; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", env = "DSEC_CONTROL_LISTEN")]
    listen: Option<String>,
    /// File with the keys that may ask
    #[arg(long, value_name = "FILE", env = "DSEC_CONTROL_KEYS_FILE")]
    keys_file: Option<PathBuf>,
    /// Certificate of the public API (PEM, with the chain); it is read again when it changes
    #[arg(long, value_name = "FILE", env = "DSEC_CONTROL_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", env = "DSEC_CONTROL_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Directory to make an authority (ca.pem) and a certificate for this machine in, for development
    #[arg(long, value_name = "DIR", env = "DSEC_CONTROL_TLS_SELF_MADE", conflicts_with = "tls_cert")]
    tls_self_made: Option<PathBuf>,
    /// Directory of the cluster that machines may join over the network: its authority, tokens and nodes
    #[arg(long, value_name = "DIR", env = "DSEC_CONTROL_CLUSTER_DIR")]
    cluster_dir: Option<PathBuf>,
    /// Where identities are kept: sqlite:PATH or postgres://... (default: control.db beside the key file)
    #[arg(long, value_name = "URL", env = "DSEC_CONTROL_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// A node and its edge's socket; may be repeated, and replaces those of the file
    #[arg(long = "node", value_name = "NAME=SOCKET", env = "DSEC_CONTROL_NODES", value_delimiter = ',')]
    nodes: Vec<NodeEntry>,
    /// How logs are written to stderr; DSEC_LOG filters them (default: info)
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "DSEC_LOG_FORMAT")]
    log_format: LogFormat,
    /// Writes the bound address and a newline to this inherited pipe when ready, then closes it
    #[arg(long, value_name = "FD")]
    ready_fd: Option<i32>,
    /// Prints the settings in force and exits
    #[arg(long)]
    check: bool,
    /// Prints the OpenAPI document and exits
    #[arg(long, exclusive = true)]
    print_openapi: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if args.print_openapi {
        return print(openapi::document());
    }
    let config = settings(&args)?;
    if args.check {
        return print(&toml::to_string(&config)?);
    }
    start_logging(args.log_format)?;
    raise_descriptor_limit();
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(run(config, args.ready_fd))
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

fn settings(args: &Args) -> anyhow::Result<Config> {
    let mut file = match &args.config {
        Some(path) => ConfigFile::read(path)?,
        None => ConfigFile::default(),
    };
    if let Some(listen) = &args.listen {
        file.listen = Some(listen.clone());
    }
    if let Some(keys_file) = &args.keys_file {
        file.keys_file = Some(keys_file.clone());
    }
    if args.tls_cert.is_some() || args.tls_self_made.is_some() {
        (file.tls_cert, file.tls_key) = (args.tls_cert.clone(), args.tls_key.clone());
        file.tls_self_made.clone_from(&args.tls_self_made);
    }
    if let Some(cluster_dir) = &args.cluster_dir {
        file.cluster_dir = Some(cluster_dir.clone());
    }
    if let Some(database) = &args.database {
        file.database = Some(database.clone());
    }
    if !args.nodes.is_empty() {
        file.nodes.clone_from(&args.nodes);
    }
    Ok(file.validate()?)
}

fn start_logging(format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::builder()
        .with_default_directive(tracing::Level::INFO.into())
        .with_env_var("DSEC_LOG")
        .from_env()
        .context("DSEC_LOG is not a filter such as `info` or `dsec_control=debug`")?;
    let colour = std::io::stderr().is_terminal();
    let logs =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().flatten_event(true).init(),
    }
    Ok(())
}

/// A request takes two descriptors, and a job waits on thousands of commands at once; the usual
/// soft limit of 1,024 is for programs that use `select`.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

async fn run(config: Config, ready_fd: Option<i32>) -> anyhow::Result<()> {
    let app = App::open(&config).await?;
    let tls = config.tls.as_ref().map(PublicTls::open).transpose()?.map(Arc::new);
    let listener =
        server::bind(&config.listen).await.with_context(|| format!("cannot listen on {}", config.listen))?;
    let address = listener.local_addr()?;
    let stop = stop_on_signals()?;
    if let Some(cluster) = app.cluster.clone() {
        cluster.open().await.map_err(|failure| failure.0)?;
        cluster.apply(&app.nodes);
        let of = Arc::downgrade(&app);
        tokio::spawn(cluster.follow(move || of.upgrade()));
    }
    let watched = Arc::clone(&app);
    let watcher = tokio::spawn(async move { watched.watch().await });
    if let Some(tls) = tls.clone() {
        tokio::spawn(async move { tls.follow().await });
    }
    tracing::info!(%address, tls = tls.is_some(), nodes = config.nodes.len(), "listening");
    if let Some(fd) = ready_fd {
        tell_ready(fd, &address.to_string())?;
    }
    let router = api::router(Arc::clone(&app));
    server::serve(Door::from(listener).with_tls(tls), Arc::clone(&app), router, stop).await;
    watcher.abort();
    if let Err(error) = app.iam.end().await {
        tracing::warn!(%error, "others are not told that this server ends");
    }
    tracing::info!("ended");
    Ok(())
}

fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        tracing::info!("stopping");
        stopping.cancel();
    });
    Ok(stop)
}

/// The pipe is opened anew through /proc: taking over a descriptor by its number cannot be checked
/// by the compiler, and this way it needs not be.
fn tell_ready(fd: i32, address: &str) -> anyhow::Result<()> {
    if fd <= 2 {
        bail!("--ready-fd is {fd}; it must be an inherited descriptor above 2");
    }
    let mut pipe = OpenOptions::new()
        .write(true)
        // Without it the open would wait for ever when the reader is gone.
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{fd}"))
        .with_context(|| format!("--ready-fd {fd} is not an inherited pipe"))?;
    writeln!(pipe, "{address}").context("cannot write to the ready pipe")?;
    drop(pipe);
    nix::unistd::close(fd).context("cannot close the ready pipe")
}
