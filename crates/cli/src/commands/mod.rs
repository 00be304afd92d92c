//! One module for each command, and the pieces they share.

pub(crate) mod archive;
mod authfile;
pub(crate) mod build;
pub(crate) mod cluster;
pub(crate) mod completion;
pub(crate) mod cp;
pub(crate) mod create;
pub(crate) mod exec;
pub(crate) mod execs;
mod feed;
pub(crate) mod fleet;
pub(crate) mod identity;
pub(crate) mod image;
mod input;
mod landing;
pub(crate) mod layer;
pub(crate) mod logs;
pub(crate) mod node;
mod output;
pub(crate) mod pack;
pub(crate) mod pause;
pub(crate) mod pool;
pub(crate) mod port_forward;
pub(crate) mod progress;
pub(crate) mod project;
pub(crate) mod ps;
mod pull;
pub(crate) mod run;
pub(crate) mod session;
pub(crate) mod shell;
pub(crate) mod signals;
pub(crate) mod stats;
pub(crate) mod status;
pub(crate) mod stop;
mod stream;
pub(crate) mod task;
pub(crate) mod update;

use crate::cli::{Cli, Command, Global};
use crate::client::Client;
use crate::failure::{Failure, Outcome};

/// What every command that talks to the platform is given.
pub(crate) struct Context {
    /// The client.
    pub(crate) client: Client,
    /// The options of every command.
    pub(crate) global: Global,
}

impl Context {
    /// For most commands.
    pub(crate) fn new(global: &Global) -> Result<Self, Failure> {
        Ok(Self { client: Client::new(global.target()?, global.timeout)?, global: global.clone() })
    }

    /// The same, for layers on these nodes.
    fn on(self, nodes: Vec<String>) -> Self {
        Self { client: self.client.on(nodes), ..self }
    }

    /// For `run` and `exec`, whose `--timeout` is the command's.
    fn for_command(global: &Global) -> Result<Self, Failure> {
        Ok(Self { client: Client::new(global.target()?, None)?, global: global.clone() })
    }
}

/// Runs the command that was asked for and answers its exit code.
pub(crate) async fn dispatch(cli: Cli) -> Outcome {
    let global = &cli.global;
    match cli.command {
        Command::Up(args) => crate::up::up(args, global.json).await,
        Command::Down(args) => crate::up::down(args, global.json).await,
        Command::Doctor(args) => crate::up::doctor(args, global.json).await,
        Command::Completion(args) => completion::completion(&args),
        Command::Node(command) => node::node(&Context::new(global)?, command).await,
        Command::Pool(command) => pool::pool(&Context::new(global)?, command).await,
        Command::Cluster(command) => cluster::cluster(&Context::new(global)?, command).await,
        Command::Fleet(command) => fleet::fleet(&Context::new(global)?, command).await,
        Command::Project(command) => project::project(&Context::new(global)?, command).await,
        Command::Identity(command) => identity::identity(&Context::new(global)?, command).await,
        Command::Key(command) => identity::key(&Context::new(global)?, command).await,
        Command::Grant(command) => identity::grant(&Context::new(global)?, command).await,
        Command::Whoami => identity::whoami(&Context::new(global)?).await,
        Command::Audit(args) => identity::audit(&Context::new(global)?, args).await,
        Command::Task(command) => task::task(&Context::new(global)?, command).await,
        Command::Status => status::status(&Context::new(global)?).await,
        Command::Image(args) => image::image(Context::new(global)?, args).await,
        Command::Layer(args) => image::layers(Context::new(global)?, args).await,
        Command::Create(args) => create::create(&Context::new(global)?, args).await,
        Command::Run(args) => run::run(&Context::for_command(global)?, args).await,
        Command::Exec(args) => exec::exec(&Context::for_command(global)?, args).await,
        Command::Attach(args) => execs::attach(&Context::new(global)?, args).await,
        Command::Execs(args) => execs::execs(&Context::new(global)?, args).await,
        Command::Kill(args) => execs::kill(&Context::new(global)?, args).await,
        Command::Session(command) => session::session(&Context::new(global)?, command).await,
        Command::PortForward(args) => port_forward::port_forward(&Context::new(global)?, args).await,
        Command::Shell(args) => shell::shell(&Context::new(global)?, args).await,
        Command::Cp(args) => cp::cp(&Context::new(global)?, args).await,
        Command::Ps(args) => ps::ps(&Context::new(global)?, args).await,
        Command::Stats(args) => stats::stats(&Context::new(global)?, args).await,
        Command::Logs(args) => logs::logs(&Context::new(global)?, &args).await,
        Command::Inspect(args) => logs::inspect(&Context::new(global)?, &args).await,
        Command::Pack(args) => pack::pack(&Context::new(global)?, args).await,
        Command::Update(args) => update::update(&Context::new(global)?, args).await,
        Command::Stop(args) => stop::stop(&Context::new(global)?, args).await,
        Command::Pause(args) => pause::set_paused(&Context::new(global)?, args, true).await,
        Command::Resume(args) => pause::set_paused(&Context::new(global)?, args, false).await,
        Command::Bench(command) => crate::bench::bench(global, command).await,
    }
}
