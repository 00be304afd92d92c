//! `dsec cluster`: machines that join over the network.

use std::time::Duration;

use clap::{Args, Subcommand};
use dsec_proto::rest::{Member, TokenRequest};

use super::Context;
use super::create::seconds;
use crate::failure::{Failure, Outcome};
use crate::parse;
use crate::render;

/// `dsec cluster ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Make the cluster's authority, unless there is one
    #[command(after_help = "Examples:\n  dsec cluster init")]
    Init,
    /// Make a token by which one machine can join
    #[command(after_help = "Examples:
  dsec cluster token                           good once, within an hour, for any name
  dsec cluster token --node n7 --ttl 10m
  ssh n7 sudo dsec up --detach --node n7 --join $(dsec cluster token --node n7) --control https://10.0.0.1:7420")]
    Token(TokenArgs),
    /// List the nodes that have joined
    #[command(after_help = "Examples:\n  dsec cluster nodes\n  dsec cluster nodes --json")]
    Nodes,
    /// Have a node be none of the cluster's any more: nothing is sent there, and its certificate is good for nothing
    #[command(after_help = "Examples:\n  dsec node drain n7 && dsec cluster forget n7")]
    Forget(ForgetArgs),
}

/// `dsec cluster token`.
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// The only name that it is good for [default: any]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// How long it is good, at most a week [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    ttl: Option<Duration>,
}

/// `dsec cluster forget`.
#[derive(Debug, Args)]
pub(crate) struct ForgetArgs {
    /// Its name
    node: String,
}

/// Runs one of the commands.
pub(crate) async fn cluster(context: &Context, command: ClusterCommand) -> Outcome {
    let json = context.global.json;
    match command {
        ClusterCommand::Init => {
            let made = context.client.make_cluster().await?;
            if json {
                render::json(&made)?;
            } else {
                let what = if made.made { "made the cluster" } else { "the cluster is there already" };
                render::line(&format!("{what}; its authority is {}", made.authority))?;
                render::note("next: dsec cluster token, then dsec up --join on another machine");
            }
        }
        ClusterCommand::Token(TokenArgs { node, ttl }) => {
            let request = TokenRequest { node, ttl_s: ttl.map(seconds) };
            let made = context.client.join_token(&request).await?;
            if json {
                render::json(&made)?;
            } else {
                render::line(&made.token)?;
                render::note(
                    "it lets one machine in: sudo dsec up --join TOKEN --control https://THIS-SERVER:PORT",
                );
            }
        }
        ClusterCommand::Nodes => {
            let members = context.client.members().await?;
            if json { render::json(&members)? } else { table(&members)? }
        }
        ClusterCommand::Forget(ForgetArgs { node }) => {
            context.client.forget_member(&node).await?;
            if json {
                render::json(&serde_json::json!({ "node": node }))?;
            } else {
                render::line(&format!("{node} is forgotten"))?;
            }
        }
    }
    Ok(0)
}

fn table(members: &[Member]) -> Result<(), Failure> {
    let now = render::now_ms();
    let row = |member: &Member| {
        vec![
            member.node.clone(),
            member.address.clone(),
            render::age(member.joined_ms, now),
            member.seen_ms.map_or_else(|| "-".to_owned(), |seen| render::age(seen, now)),
            render::age(now, member.certificate_until_ms),
            member.key.chars().take(16).collect(),
        ]
    };
    let heading = ["NODE", "ADDRESS", "JOINED", "SEEN", "CERTIFICATE LEFT", "KEY"];
    render::table(&heading, members.iter().map(row).collect())
}
