//! The command line.

use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::commands::{completion, cp, create, exec, image, logs, ps, run, shell, stats, stop};
use crate::config::Target;
use crate::failure::Failure;
use crate::parse;
use crate::up::{DoctorArgs, DownArgs, UpArgs};

const AFTER: &str = "\
Examples:
  sudo dsec up --detach                     start the platform on this machine
  dsec image import debian ./debian.tar     take an image in
  dsec run debian -- cat /etc/os-release    one command in a sandbox of its own
  dsec run -it debian                       a shell in a sandbox of its own
  dsec ps                                   what runs

Exit codes: run, exec and shell end with the command's own code, or 125 when dsec itself failed;
every other command ends with 0, or 1 on a failure, or 2 when it was called wrongly.";

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

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// Address of the platform [default: the config file's, else http://127.0.0.1:7420]
    #[arg(long, global = true, env = "DSEC_URL", hide_env_values = true, value_name = "URL")]
    url: Option<String>,
    /// Key for it [default: the config file's]
    #[arg(long, global = true, env = "DSEC_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// For run, exec: until the command is killed. Elsewhere: until a request is given up [default: 2m]
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Write JSON for programs
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
        Ok(crate::config::resolve(self.url.clone(), self.api_key.clone(), &file))
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
    /// Show whether the platform answers, and its nodes
    #[command(after_help = "Examples:\n  dsec status\n  dsec status --json")]
    Status,
    /// Try what this machine's kernel can do
    #[command(after_help = crate::up::DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Import, list and remove images
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Make a sandbox and print its id
    #[command(after_help = create::EXAMPLES)]
    Create(create::CreateArgs),
    /// Make a sandbox, run a command in it, and end it
    #[command(after_help = run::EXAMPLES)]
    Run(run::RunArgs),
    /// Run a command in a sandbox
    #[command(after_help = exec::EXAMPLES)]
    Exec(exec::ExecArgs),
    /// Open a terminal in a sandbox
    #[command(after_help = shell::EXAMPLES)]
    Shell(shell::ShellArgs),
    /// Copy files and directories into or out of a sandbox
    #[command(after_help = cp::EXAMPLES)]
    Cp(cp::CpArgs),
    /// List sandboxes
    #[command(after_help = ps::EXAMPLES)]
    Ps(ps::PsArgs),
    /// Show what sandboxes use
    #[command(after_help = stats::EXAMPLES)]
    Stats(stats::StatsArgs),
    /// Show what happened to a sandbox
    #[command(after_help = logs::LOGS_EXAMPLES)]
    Logs(logs::LogsArgs),
    /// Show all of a sandbox's record, as JSON
    #[command(after_help = logs::INSPECT_EXAMPLES)]
    Inspect(logs::InspectArgs),
    /// End sandboxes
    #[command(after_help = stop::EXAMPLES)]
    Stop(stop::StopArgs),
    /// Print the completion script of a shell
    #[command(after_help = completion::EXAMPLES)]
    Completion(completion::CompletionArgs),
    /// Measure the platform through its public API
    #[command(subcommand)]
    Bench(BenchCommand),
}

impl Command {
    /// Exit code of dsec's own failures under this command.
    pub(crate) fn failure_code(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Exec(_) | Self::Shell(_) => crate::failure::EXIT_OWN_FAILURE,
            _ => 1,
        }
    }
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
