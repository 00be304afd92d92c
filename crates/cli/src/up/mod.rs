//! `dsec up`, `dsec down`, `dsec doctor`: the platform on this machine, as the same separate
//! processes that a cluster has.

mod doctor;
mod down;
mod identity;
mod join;
pub(crate) mod locate;
mod process;
mod reach;
mod settings;
mod state;
mod supervisor;

use std::ffi::OsString;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use clap::Args;
use dsec_model::NodeId;
use dsec_proto::rest::{Feature, FeatureState};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

pub(crate) use doctor::{DOCTOR_EXAMPLES, DoctorArgs, doctor};
pub(crate) use down::{DOWN_EXAMPLES, DownArgs, down};
use identity::{Identity, Lock, Locked, Processes};
use process::{JOIN_TOKEN, Logs, Program};
use settings::{Membership, Settings, Tls};
use state::StateDir;
use supervisor::{PATIENCE, Programs, Supervisor};

use crate::client::{Client, ClientError};
use crate::commands::signals::Signals;
use crate::config::Target;
use crate::failure::{Failure, Outcome};
use crate::render;

/// Where the platform keeps its state unless told otherwise.
const DEFAULT_STATE_DIR: &str = "/var/lib/dsec";
/// Longest wait for the API once both programs have said that they are ready.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time between two tries of it.
const ANSWER_PAUSE: Duration = Duration::from_millis(50);
/// Longest wait for what the node says of its host.
const FEATURES_LIMIT: Duration = Duration::from_secs(3);

pub(crate) const UP_EXAMPLES: &str = "\
Examples:
  sudo dsec up                     in the foreground; Ctrl-C takes it down
  sudo dsec up --detach            in the background; `dsec down` takes it down
  sudo dsec up --detach --state-dir /srv/dsec --listen 0.0.0.0:7420
  sudo dsec up --detach --tls-self-made
  sudo dsec up --detach --node n7 --join TOKEN --control https://10.0.0.1:7420

The API key goes to ~/.config/dsec/config.toml (DSEC_CONFIG names another file).";

/// `dsec up`.
#[derive(Debug, Clone, Args)]
pub(crate) struct UpArgs {
    /// Directory for images, sandboxes, keys and logs
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
    /// Address of the API, from now on [default: what control.toml says, else 127.0.0.1:7420]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Name of this machine in the ids of its sandboxes, from now on [default: what edge.toml says, else n1]
    #[arg(long, value_name = "NAME")]
    node: Option<NodeId>,
    /// Certificate of the API (PEM, with its chain), from now on; it is read again when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Make a certificate of the API and an authority to trust it by, from now on: for development
    #[arg(long, conflicts_with = "tls_cert")]
    tls_self_made: bool,
    /// Be a node of the cluster whose `dsec cluster token` made this, from now on; there is no API here then
    #[arg(long, value_name = "TOKEN", env = JOIN_TOKEN, hide_env = true, requires = "control", conflicts_with_all = ["listen", "tls_cert", "tls_self_made"])]
    join: Option<String>,
    /// A server of that cluster, as this machine reaches it
    #[arg(long, value_name = "https://HOST:PORT", requires = "join")]
    control: Option<String>,
    /// Where a node of a cluster listens for its servers, from now on [default: what edge.toml says, else 0.0.0.0:7421]
    #[arg(long, value_name = "ADDRESS:PORT")]
    edge_listen: Option<SocketAddr>,
    /// Where those reach it, from now on [default: where it listens, or the address by which it reaches them]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Run in the background, and return when the API answers
    #[arg(long, short = 'd')]
    detach: bool,
    /// Be the supervisor in the background: reports to standard output
    #[arg(long, hide = true)]
    supervise: bool,
}

/// The first line of a supervisor in the background.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Report {
    /// Both programs are ready.
    Ready,
    /// It ends.
    Failed { message: String, hint: String },
}

impl UpArgs {
    fn settings(&self, state: &StateDir) -> Result<Settings, Failure> {
        let settings = Settings::resolve(state, self.node.as_ref(), self.listen, self.tls(state)?)?;
        let is_member = self.join.is_some() || state.member().exists();
        let flags = Membership { listen: self.edge_listen, advertise: self.advertise.clone() };
        if !is_member && flags != Membership::default() {
            return Err(Failure::usage(
                "--edge-listen and --advertise are for a node that joins a cluster, or has joined one",
            )
            .hint("give --join TOKEN --control https://HOST:PORT"));
        }
        Ok(Settings { member: is_member.then_some(flags), ..settings })
    }

    /// What the flags say of TLS.
    fn tls(&self, state: &StateDir) -> Result<Option<Tls>, Failure> {
        let whole = |path: &PathBuf| {
            std::path::absolute(path)
                .map_err(|error| Failure::io(format!("{} is no path", path.display()), &error))
        };
        Ok(match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some(Tls::Files { cert: whole(cert)?, key: whole(key)? }),
            _ => self.tls_self_made.then(|| Tls::SelfMade(state.tls_dir())),
        })
    }
}

impl UpArgs {
    /// The other flags, for a supervisor in another directory.
    fn more_args(&self, settings: &Settings) -> Result<Vec<OsString>, Failure> {
        let state = StateDir::new(&self.state_dir)?;
        let mut more: Vec<OsString> = match self.tls(&state)? {
            Some(Tls::Files { cert, key }) => {
                vec!["--tls-cert".into(), cert.into(), "--tls-key".into(), key.into()]
            }
            Some(Tls::SelfMade(_)) => vec!["--tls-self-made".into()],
            Some(Tls::Plain) | None => Vec::new(),
        };
        if settings.member.is_none() {
            more.extend(["--listen".into(), settings.listen.to_string().into()]);
        }
        let listen = self.edge_listen.map(|listen| listen.to_string());
        let said =
            [("--control", &self.control), ("--edge-listen", &listen), ("--advertise", &self.advertise)];
        for (flag, value) in said {
            if let Some(value) = value {
                more.extend([flag.into(), value.into()]);
            }
        }
        Ok(more)
    }
}

/// Starts the platform.
pub(crate) async fn up(args: UpArgs, json: bool) -> Outcome {
    if args.supervise {
        return supervise(&args).await;
    }
    need_root("dsec up")?;
    let state = StateDir::new(&args.state_dir)?;
    let settings = args.settings(&state)?;
    preflight(&settings, &state)?;
    if args.detach {
        detached(&args, &settings, &state, json).await
    } else {
        foreground(&args, &settings, state, json).await
    }
}

/// Refuses who is not root.
fn need_root(command: &str) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new(format!("{command} needs root: it makes namespaces, mounts and control groups"))
        .hint(format!("run it with sudo: `sudo {command}`")))
}

fn edge_program(exe: PathBuf, state: &StateDir) -> Program {
    Program { name: "edge", exe, args: vec!["run".into(), "--config".into(), state.edge_config().into()] }
}

fn programs(settings: &Settings, state: &StateDir) -> Result<Programs, Failure> {
    let control = match settings.member {
        Some(_) => None,
        None => {
            let exe = locate::program(locate::CONTROL)?;
            let args = vec!["--config".into(), state.control_config().into()];
            Some(Program { name: "control", exe, args })
        }
    };
    Ok(Programs { edge: edge_program(locate::program(locate::EDGE)?, state), control })
}

/// All that can be seen to be wrong before anything is made or started.
fn preflight(settings: &Settings, state: &StateDir) -> Result<(), Failure> {
    if settings.listen.port() == 0 {
        return Err(Failure::new("the address to listen on has port 0")
            .hint("name a port, so that others can find it"));
    }
    programs(settings, state)?;
    if let Some(Locked::Theirs(holder)) = Lock::take(state, false)? {
        return Err(already_up(state, holder));
    }
    let left = Processes::read(&state.processes()).unwrap_or_default();
    if left.alive().is_empty() && settings.member.is_none() {
        check_port(settings.listen)?;
    }
    state.make()?;
    state.check_room()
}

fn already_up(state: &StateDir, holder: Option<Identity>) -> Failure {
    let pid = holder.map_or_else(|| "its pid is not known yet".to_owned(), |id| format!("pid {}", id.pid));
    let root = state.root().display();
    Failure::new(format!("dsec is already up on {root} ({pid})")).hint(format!(
        "`dsec down --state-dir {root}` ends it; another platform beside it needs its own --state-dir and --listen"
    ))
}

fn check_port(listen: SocketAddr) -> Result<(), Failure> {
    match TcpListener::bind(listen) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(Failure::new(format!(
            "{listen} is in use by another program"
        ))
        .hint(format!("see who: `ss -ltnp sport = :{}`; or choose another with --listen", listen.port()))),
        Err(error) => Err(Failure::io(format!("cannot listen on {listen}"), &error)),
    }
}

/// Takes the lock, ends what a killed supervisor left, writes keys and configurations, starts both.
async fn begin(
    args: &UpArgs,
    settings: &Settings,
    state: StateDir,
    logs: Logs,
    signals: &mut Signals,
) -> Result<Supervisor, Failure> {
    let lock = match Lock::take(&state, true)? {
        Some(Locked::Ours(lock)) => lock,
        Some(Locked::Theirs(holder)) => return Err(already_up(&state, holder)),
        None => return Err(Failure::new(format!("{} is gone", state.root().display()))),
    };
    let left = Processes::read(&state.processes()).unwrap_or_default();
    for (name, process) in left.alive() {
        supervisor::say(&format!(
            "{name} (pid {}) is left from a supervisor that was killed; it is started anew, sandboxes live on",
            process.pid
        ));
        process.terminate(PATIENCE).await;
    }
    let programs = programs(settings, &state)?;
    if settings.member.is_none() {
        check_port(settings.listen)?;
        state.root_key()?;
    }
    settings.write(&state)?;
    if let (Some(token), Some(control)) = (&args.join, &args.control) {
        join::join(&programs.edge, &state, token, control).await?;
    }
    Supervisor::start(state, programs, logs, lock, signals).await
}

async fn foreground(args: &UpArgs, settings: &Settings, state: StateDir, json: bool) -> Outcome {
    let mut signals = Signals::new()?;
    let supervisor = begin(args, settings, state.clone(), Logs::Relay, &mut signals).await?;
    let shown = show(args, settings, &state, std::process::id(), json).await;
    if let Err(failure) = &shown {
        render::failure(failure, json);
    }
    let ended = match shown {
        Ok(()) => supervisor.run(&mut signals).await,
        // Nobody can use it: it goes down by the usual way, as if asked at once.
        Err(_) => {
            Identity::own().map(|me| me.signal(rustix::process::Signal::TERM));
            supervisor.run(&mut signals).await
        }
    };
    ended.map(|()| u8::from(shown.is_err()))
}

/// Waits for the API, writes the config file, and says how to use both.
async fn show(
    args: &UpArgs,
    settings: &Settings,
    state: &StateDir,
    pid: u32,
    json: bool,
) -> Result<(), Failure> {
    if settings.member.is_some() {
        return show_member(args, settings, state, pid, json);
    }
    let target = reach::target(settings);
    let (url, ca_file) = (target.url.clone(), target.ca_file.clone());
    answers(target.clone(), &settings.tls).await?;
    let key = state.root_key()?;
    let config = state::write_user_config(&url, &key, ca_file.as_deref())?;
    warn(Target { api_key: Some(key), ..target }).await;
    let (dir, config) = (state.root().display(), config.display());
    if json {
        return render::json_line(&serde_json::json!({
            "url": url, "config": config.to_string(), "state_dir": dir.to_string(), "pid": pid,
        }));
    }
    let stop = how_to_stop(args);
    render::line(&format!("dsec is up at {url} (state in {dir})\nthe key for it is in {config}\n{stop}"))?;
    render::line("next: dsec image import NAME SOURCE, then dsec run NAME -- CMD")
}

fn how_to_stop(args: &UpArgs) -> String {
    if args.detach {
        format!("stop it with: dsec down{}", other_state_dir(args))
    } else {
        "Ctrl-C takes it down".to_owned()
    }
}

/// Says what a node of a cluster is.
fn show_member(
    args: &UpArgs,
    settings: &Settings,
    state: &StateDir,
    pid: u32,
    json: bool,
) -> Result<(), Failure> {
    let (node, dir) = (&settings.node, state.root().display());
    let control = join::control_of(state).unwrap_or_default();
    if json {
        return render::json_line(&serde_json::json!({
            "node": node.as_str(), "control": control, "state_dir": dir.to_string(), "pid": pid,
        }));
    }
    let stop = how_to_stop(args);
    render::line(&format!("node {node} is up, of the cluster at {control} (state in {dir})\n{stop}"))
}

/// Names what the node found to be less than it should be. The platform runs all the same, so nothing here fails it.
async fn warn(target: Target) {
    let Ok(client) = Client::new(target, Some(ANSWER_LIMIT)) else { return };
    let start = Instant::now();
    // The node tries its features after it has begun to serve.
    let features = loop {
        let nodes = client.nodes().await.unwrap_or_default();
        let features: Vec<Feature> = nodes.into_iter().flat_map(|node| node.features).collect();
        if !features.is_empty() || start.elapsed() > FEATURES_LIMIT {
            break features;
        }
        tokio::time::sleep(ANSWER_PAUSE).await;
    };
    for feature in features.iter().filter(|feature| feature.state != FeatureState::Works) {
        render::note(&format!("warning: {}: {}; {}", feature.name, feature.found, feature.remedy));
    }
}

fn other_state_dir(args: &UpArgs) -> String {
    if args.state_dir == std::path::Path::new(DEFAULT_STATE_DIR) {
        return String::new();
    }
    format!(" --state-dir {}", args.state_dir.display())
}

async fn answers(target: Target, tls: &Tls) -> Result<(), Failure> {
    let url = target.url.clone();
    let client = Client::new(target, Some(ANSWER_LIMIT))?;
    let start = Instant::now();
    loop {
        match client.health().await {
            Ok(()) => return Ok(()),
            // It may be for a name that others reach this machine by, or of an authority that they trust.
            Err(error @ ClientError::Unreachable { .. })
                if matches!(tls, Tls::Files { .. }) && error.to_string().contains("certificate") =>
            {
                render::note(&format!(
                    "warning: this machine does not trust the API at {url}: {error}; \
                     put the name that the certificate is for as `url` into the config file, and `ca_file` where it needs one"
                ));
                return Ok(());
            }
            Err(error) if start.elapsed() > ANSWER_LIMIT => {
                return Err(Failure::new(format!("the platform runs and does not answer: {error}"))
                    .hint("its logs are in the state directory, under log/"));
            }
            Err(_) => tokio::time::sleep(ANSWER_PAUSE).await,
        }
    }
}

/// Starts a supervisor in the background and waits for its first line.
async fn detached(args: &UpArgs, settings: &Settings, state: &StateDir, json: bool) -> Outcome {
    let failed = |error: std::io::Error| Failure::io("cannot start the supervisor", &error);
    let log = state.open_log("up")?;
    let from = log.metadata().map(|meta| meta.len()).unwrap_or_default();
    let mut child = tokio::process::Command::new(std::env::current_exe().map_err(failed)?)
        .args(["up", "--supervise", "--state-dir"])
        .arg(state.root())
        .args(["--node", settings.node.as_str()])
        .args(args.more_args(settings)?)
        .envs(args.join.as_ref().map(|token| (JOIN_TOKEN, token)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .current_dir("/")
        .spawn()
        .map_err(failed)?;
    let pid = child.id().unwrap_or_default();
    let mut line = Vec::new();
    if let Some(out) = child.stdout.as_mut() {
        // It closes its end after the one line, or by dying.
        out.read_to_end(&mut line).await.map_err(failed)?;
    }
    match serde_json::from_slice(&line) {
        Ok(Report::Ready) => {}
        Ok(Report::Failed { message, hint }) => return Err(Failure::new(message).hint(hint)),
        Err(_) => {
            let last = process::last_lines(&state.log("up"), from).unwrap_or_default().join("\n  ");
            return Err(Failure::new(format!("the supervisor ended at its start:\n  {last}")));
        }
    }
    show(args, settings, state, pid, json).await.map(|()| 0)
}

/// The supervisor in the background: in a session of its own, so that no terminal's end reaches it.
async fn supervise(args: &UpArgs) -> Outcome {
    let mut signals = Signals::new()?;
    let begun = async {
        need_root("dsec up")?;
        rustix::process::setsid().map_err(|errno| Failure::io("cannot leave the terminal", &errno.into()))?;
        let state = StateDir::new(&args.state_dir)?;
        begin(args, &args.settings(&state)?, state, Logs::File, &mut signals).await
    };
    match begun.await {
        Ok(supervisor) => {
            report(&Report::Ready);
            supervisor::say("up");
            supervisor.run(&mut signals).await.map(|()| 0)
        }
        Err(failure) => {
            report(&Report::Failed { message: failure.message.clone(), hint: failure.hint.clone() });
            Err(failure)
        }
    }
}

/// One line to whoever started us, then nothing more: standard output is `/dev/null` from here on.
fn report(report: &Report) {
    let mut out = std::io::stdout().lock();
    if let Ok(text) = serde_json::to_string(report) {
        // Whoever started us may be gone; the platform runs all the same.
        let _ = writeln!(out, "{text}");
        let _ = out.flush();
    }
    if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}
