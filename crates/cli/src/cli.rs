//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use dsec_model::iam::ProjectPath;

use crate::bench::BenchCommand;
use crate::commands::{
    cluster, completion, cp, create, exec, execs, fleet, identity, image, logs, node, pack, pause, pool,
    port_forward, project, ps, run, session, shell, stats, stop, task, update,
};
use crate::config::{Given, Target};
use crate::failure::{EXIT_OWN_FAILURE, EXIT_USAGE, Failure};
use crate::parse;
use crate::up::{DoctorArgs, DownArgs, UpArgs};

const AFTER: &str = "\
Examples:
  sudo dsec up --detach                     start the platform on this machine
  dsec image import debian ./debian.tar     take an image in
  dsec run debian -- cat /etc/os-release    one command in a sandbox of its own
  dsec run -it debian                       a shell in a sandbox of its own
  dsec ps                                   what runs

Exit codes of run, exec, shell and attach are the command's own, or 125 when dsec itself failed or was
called wrongly, 126 when the program cannot be run, 127 when it is not there. Other commands end with 0,
with 1 on a failure, with 2 when called wrongly. With --json a failure is the API's JSON on stderr.";

/// Sandboxes for agents: make them by the thousand, run commands in them, look into them.
#[derive(Debug, Parser)]
#[command(name = "dsec", version, after_help = AFTER, max_term_width = 110)]
pub(crate) struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub(crate) global: Global,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Heading of the options of every command.
const EVERYWHERE: &str = "Options of every command";

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = EVERYWHERE)]
pub(crate) struct Global {
    /// Address of the platform [default: the config file's, else http://127.0.0.1:7420]
    #[arg(long, global = true, env = "DSEC_URL", hide_env_values = true, value_name = "URL")]
    url: Option<String>,
    /// Key for it [default: the config file's]
    #[arg(long, global = true, env = "DSEC_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// PEM file of certificates to trust beside the system's, for https [default: the config file's]
    #[arg(long, global = true, env = "DSEC_CA_FILE", hide_env_values = true, value_name = "PATH")]
    ca_file: Option<OsString>,
    /// Project to act in: what is made belongs to it, lists show what is in it [default: the key's]
    #[arg(long, global = true, env = "DSEC_PROJECT", hide_env_values = true, value_name = "PROJECT")]
    project: Option<ProjectPath>,
    /// For run, exec: until the command is killed. Elsewhere: until a request is given up [default: 2m]
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Write JSON for programs, failures too
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl Global {
    /// Where the platform is and the key for it, the config file counted in.
    pub(crate) fn target(&self) -> Result<Target, Failure> {
        let file = match crate::config::path() {
            Ok(path) => crate::config::read(&path)?,
            Err(_) => crate::config::ConfigFile::default(),
        };
        let ca_file = self.ca_file.clone().map(PathBuf::from);
        let (url, api_key, project) = (self.url.clone(), self.api_key.clone(), self.project.clone());
        crate::config::resolve(Given { url, api_key, ca_file, project }, &file)
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the platform on this machine (needs root)
    #[command(after_help = crate::up::UP_EXAMPLES)]
    Up(UpArgs),
    /// End the platform on this machine with all its sandboxes (needs root)
    #[command(after_help = crate::up::DOWN_EXAMPLES)]
    Down(DownArgs),
    /// Show whether the platform answers, its nodes, and how many sandboxes there are
    #[command(after_help = "Examples:\n  dsec status\n  dsec status --json")]
    Status,
    /// List nodes, and say whether they take new sandboxes
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// List pools of nodes, and bring to one what it is to take over with
    #[command(subcommand)]
    Pool(pool::PoolCommand),
    /// Let machines join over the network, list and forget them
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Give the nodes other programs and configurations, some at a time
    #[command(subcommand)]
    Fleet(fleet::FleetCommand),
    /// Try what this machine's kernel can do
    #[command(after_help = crate::up::DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Import, list, tag, prefetch, export and remove images
    Image(image::ImageArgs),
    /// The same for workspaces, toolkits and other layers, and the care of their store
    Layer(image::LayerArgs),
    /// Make a sandbox and print its id
    #[command(after_help = create::EXAMPLES)]
    Create(create::CreateArgs),
    /// Make a sandbox, run a command in it, and end it
    #[command(after_help = run::EXAMPLES)]
    Run(run::RunArgs),
    /// Run a command in a sandbox
    #[command(after_help = exec::EXAMPLES)]
    Exec(exec::ExecArgs),
    /// Follow a command that runs in the background
    #[command(after_help = execs::ATTACH_EXAMPLES)]
    Attach(execs::AttachArgs),
    /// List the commands of a sandbox
    #[command(after_help = execs::EXECS_EXAMPLES)]
    Execs(execs::ExecsArgs),
    /// Send a signal to a command
    #[command(after_help = execs::KILL_EXAMPLES)]
    Kill(execs::KillArgs),
    /// Open a terminal in a sandbox
    #[command(after_help = shell::EXAMPLES)]
    Shell(shell::ShellArgs),
    /// List and close the shells that a sandbox keeps
    #[command(subcommand)]
    Session(session::SessionCommand),
    /// Copy files and directories into or out of a sandbox
    #[command(after_help = cp::EXAMPLES)]
    Cp(cp::CpArgs),
    /// Reach ports of a sandbox on this machine
    #[command(after_help = port_forward::EXAMPLES)]
    PortForward(port_forward::PortForwardArgs),
    /// Make a layer of what a sandbox wrote
    #[command(after_help = pack::EXAMPLES)]
    Pack(pack::PackArgs),
    /// List sandboxes
    #[command(after_help = ps::EXAMPLES)]
    Ps(ps::PsArgs),
    /// Look at all sandboxes of a job as one, end them, wait for them
    #[command(subcommand)]
    Task(task::TaskCommand),
    /// List and set up projects, look at all sandboxes of one as one
    #[command(subcommand)]
    Project(project::ProjectCommand),
    /// People, services and agents who may have keys
    #[command(subcommand)]
    Identity(identity::IdentityCommand),
    /// Make and revoke keys
    #[command(subcommand)]
    Key(identity::KeyCommand),
    /// Say what identities may do
    #[command(subcommand)]
    Grant(identity::GrantCommand),
    /// Show who one's key belongs to, and what it may do
    #[command(after_help = identity::WHOAMI_EXAMPLES)]
    Whoami,
    /// Show who did what, and who was not let
    #[command(after_help = identity::AUDIT_EXAMPLES)]
    Audit(identity::AuditArgs),
    /// Show what sandboxes use
    #[command(after_help = stats::EXAMPLES)]
    Stats(stats::StatsArgs),
    /// Show what happened to a sandbox
    #[command(after_help = logs::LOGS_EXAMPLES)]
    Logs(logs::LogsArgs),
    /// Show all of a sandbox's record, as JSON
    #[command(after_help = logs::INSPECT_EXAMPLES)]
    Inspect(logs::InspectArgs),
    /// Give sandboxes other limits while they run
    #[command(after_help = update::EXAMPLES)]
    Update(update::UpdateArgs),
    /// End sandboxes
    #[command(after_help = stop::EXAMPLES)]
    Stop(stop::StopArgs),
    /// Make sandboxes stand still and give their memory back; whoever uses one resumes it
    #[command(after_help = pause::PAUSE_EXAMPLES)]
    Pause(pause::PauseArgs),
    /// Let paused sandboxes go on
    #[command(after_help = pause::RESUME_EXAMPLES)]
    Resume(pause::PauseArgs),
    /// Print the completion script of a shell
    #[command(after_help = completion::EXAMPLES)]
    Completion(completion::CompletionArgs),
    /// Measure the platform through its public API
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// Subcommands whose exit codes are those of the command inside.
const OF_THE_COMMAND: [&str; 4] = ["run", "exec", "shell", "attach"];

impl Command {
    /// True where exit codes are those of the command inside; see [`OF_THE_COMMAND`].
    pub(crate) fn has_codes_of_its_own(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Exec(_) | Self::Shell(_) | Self::Attach(_))
    }
}

/// What is known of a command line that cannot be parsed: its exit code, and whether it asks for JSON.
pub(crate) fn misused(args: &[OsString]) -> (u8, bool) {
    let words = || args.iter().skip(1).map(|word| word.to_string_lossy()).take_while(|word| word != "--");
    let mut rest = words();
    let subcommand = loop {
        match rest.next() {
            Some(word) if ["--url", "--api-key", "--ca-file", "--project", "--timeout"].contains(&&*word) => {
                rest.next();
            }
            Some(word) if word.starts_with('-') => {}
            other => break other.unwrap_or_default().into_owned(),
        }
    };
    let code = if OF_THE_COMMAND.contains(&&*subcommand) { EXIT_OWN_FAILURE } else { EXIT_USAGE };
    (code, words().any(|word| word == "--json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_every_command_has_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        fn leaves(command: &clap::Command, seen: &mut Vec<String>) {
            if command.get_subcommands().next().is_none() {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example"), "{} has no examples", command.get_name());
                assert!(command.get_about().is_some(), "{} says nothing", command.get_name());
                seen.push(command.get_name().to_owned());
            }
            command.get_subcommands().for_each(|sub| leaves(sub, seen));
        }
        let mut seen = Vec::new();
        leaves(&command, &mut seen);
        assert!(seen.len() > 20, "{seen:?}");
    }

    /// `docs/reference/cli.md` out of the help texts.
    fn reference() -> String {
        fn page(command: &clap::Command, path: &str, out: &mut String) {
            let level = "#".repeat(path.split(' ').count().clamp(1, 3));
            let help = command.clone().bin_name(path).term_width(110).render_help().to_string();
            // The options of every command are on the first page alone.
            let mut everywhere = false;
            let lines = help.lines().map(str::trim_end).filter(|line| {
                if path != "dsec" && !line.is_empty() && !line.starts_with(' ') {
                    everywhere = line.starts_with(EVERYWHERE);
                }
                !everywhere
            });
            let text = lines.collect::<Vec<_>>().join("\n");
            out.push_str(&format!("\n{level} {path}\n\n```text\n{}\n```\n", text.trim_end()));
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                page(sub, &format!("{path} {}", sub.get_name()), out);
            }
        }
        let mut command = Cli::command();
        command.build();
        let mut pages = String::new();
        page(&command, "dsec", &mut pages);
        let note = "<!-- Written by the tests of crates/cli from the help texts: \
                    `DSEC_WRITE_REFERENCE=1 cargo test -p dsec --bins reference` -->\n";
        format!("{note}{pages}")
    }

    #[test]
    fn the_reference_has_the_help_texts() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
        if std::env::var_os("DSEC_WRITE_REFERENCE").is_some() {
            std::fs::write(&path, reference()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == reference(),
            "docs/reference/cli.md is stale; `DSEC_WRITE_REFERENCE=1 cargo test -p dsec --bins reference` writes it"
        );
    }

    #[test]
    fn a_wrong_call_has_the_exit_code_of_its_command() {
        let misused = |words: &[&str]| misused(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(misused(&["dsec", "run"]), (125, false));
        assert_eq!(misused(&["dsec", "--url", "exec", "ps", "--json"]), (2, true));
        assert_eq!(misused(&["dsec", "--json", "exec", "--", "--nonsense"]), (125, true));
        assert_eq!(misused(&["dsec", "exec", "sb", "--", "ls", "--json"]), (125, false));
        assert_eq!(misused(&["dsec"]), (2, false));
    }

    #[test]
    fn options_may_follow_the_id_and_what_follows_the_command_is_its_own() {
        let parse = |words: &[&str]| match Cli::try_parse_from(words).unwrap().command {
            Command::Exec(args) => args,
            other => panic!("{other:?}"),
        };
        let args = parse(&["dsec", "exec", "sb-n1-a", "-i", "--", "ls", "-i", "--json", "--", "x"]);
        assert!(args.interactive);
        assert_eq!(args.command, ["ls", "-i", "--json", "--", "x"]);
        let args = parse(&["dsec", "exec", "sb-n1-a", "ls", "-t", "--help"]);
        assert_eq!(args.command, ["ls", "-t", "--help"]);
        assert!(!args.tty);
    }
}
