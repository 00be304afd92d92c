//! `dsec identity`, `key`, `grant`, `whoami` and `audit`: who may do what, and who did.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCandidates;
use dsec_model::iam::{Permissions, ProjectPath, Role};
use dsec_proto::rest::{
    AuditEntry, CreateGrantRequest, CreateIdentityRequest, CreateKeyRequest, Grant, Identity, Key,
};

use super::create::seconds;
use super::project::{named, permissions};
use super::{Context, completion};
use crate::failure::{Failure, Outcome};
use crate::render::{self, Tone, paint};
use crate::{parse, render::note};

/// Entries that are asked for at once.
const AUDIT_PAGE: u32 = 1000;

/// `dsec identity ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum IdentityCommand {
    /// List the identities
    #[command(after_help = "Examples:\n  dsec identity ls\n  dsec --project root/rl identity ls")]
    Ls,
    /// Show an identity, what it was given and its keys
    #[command(after_help = "Examples:\n  dsec identity inspect 7")]
    Inspect(IdentityArgs),
    /// Make an identity; it holds nothing until it is given something
    #[command(after_help = "Examples:
  dsec identity create ci                          a service, in the project one acts in
  dsec --project root/rl identity create alice --kind person
  dsec grant add 7 --role runtime                  what it may do
  dsec key create 7 --name laptop                  a key for it")]
    Create(CreateArgs),
    /// Remove an identity, its keys and its grants
    #[command(after_help = "Examples:\n  dsec identity rm 7")]
    Rm(IdentityArgs),
}

/// Which identity.
#[derive(Debug, Args)]
pub(crate) struct IdentityArgs {
    /// Its number
    #[arg(add = ArgValueCandidates::new(completion::identities))]
    identity: u64,
}

/// What an identity is.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    Person,
    Service,
    Agent,
}

/// `dsec identity create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Its name
    name: String,
    /// What it is
    #[arg(long, value_enum, default_value_t = Kind::Service)]
    kind: Kind,
}

/// `dsec key ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key and print it, this once
    #[command(after_help = "Examples:
  dsec key create --name laptop                                     for oneself
  dsec key create 7 --name trainer --expires-in 30d
  dsec key create 7 --name agent --within root/rl/job-42 --role runtime   no more than that")]
    Create(KeyArgs),
    /// Revoke keys: they work nowhere from then on
    #[command(after_help = "Examples:\n  dsec key revoke k-1f2e3d4c5b6a")]
    Revoke(RevokeArgs),
}

/// `dsec key create`.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// Number of the identity it is for [default: one's own]
    #[arg(add = ArgValueCandidates::new(completion::identities))]
    identity: Option<u64>,
    /// What it is for
    #[arg(long, value_name = "TEXT")]
    name: String,
    /// It ends after this long [default: never]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    expires_in: Option<Duration>,
    /// Narrow it to a project and all in it
    #[arg(long, value_name = "PROJECT", add = ArgValueCandidates::new(completion::project_names))]
    within: Option<ProjectPath>,
    /// Narrow it to what a role may do
    #[arg(long, value_enum)]
    role: Option<RoleName>,
    /// Narrow it to these, separated by commas
    #[arg(long, value_name = "PERMISSIONS", value_parser = permissions)]
    permissions: Option<Permissions>,
}

/// `dsec key revoke`.
#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// Their ids
    #[arg(required = true)]
    keys: Vec<String>,
}

/// `dsec grant ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum GrantCommand {
    /// List what was given in a project and those in it
    #[command(after_help = "Examples:\n  dsec grant ls\n  dsec --project root/rl grant ls --json")]
    Ls,
    /// Give an identity something in a project, of what one holds there
    #[command(after_help = "Examples:
  dsec --project root/rl grant add 7 --role runtime
  dsec --project root/rl grant add 8 --role builder --permissions identity.manage,project.manage")]
    Add(GrantArgs),
    /// Take grants back, and with them all that rests on them
    #[command(after_help = "Examples:\n  dsec grant rm 12")]
    Rm(TakeArgs),
}

/// `dsec grant add`.
#[derive(Debug, Args)]
pub(crate) struct GrantArgs {
    /// Number of the identity
    #[arg(add = ArgValueCandidates::new(completion::identities))]
    identity: u64,
    /// What a role may do
    #[arg(long, value_enum, required_unless_present = "permissions")]
    role: Option<RoleName>,
    /// These, beside what the role may do, separated by commas
    #[arg(long, value_name = "PERMISSIONS", value_parser = permissions)]
    permissions: Option<Permissions>,
}

/// `dsec grant rm`.
#[derive(Debug, Args)]
pub(crate) struct TakeArgs {
    /// Their numbers
    #[arg(required = true)]
    grants: Vec<u64>,
}

/// A set of permissions with a name.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleName {
    /// Everything
    Owner,
    /// Sandboxes, and all of layers
    Builder,
    /// Sandboxes, and layers to start from
    Runtime,
    /// Looks, and changes nothing
    Viewer,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::Owner => Self::Owner,
            RoleName::Builder => Self::Builder,
            RoleName::Runtime => Self::Runtime,
            RoleName::Viewer => Self::Viewer,
        }
    }
}

/// `dsec audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// At most so many entries
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 50)]
    last: u32,
    /// Only calls that were denied
    #[arg(long, conflicts_with = "changes")]
    denied: bool,
    /// Only what was done
    #[arg(long)]
    changes: bool,
}

/// Examples of `dsec audit`.
pub(crate) const AUDIT_EXAMPLES: &str = "Examples:\n  dsec audit\n  dsec --project root/rl audit --denied -n 500\n  dsec audit --json | jq '.[].action'";
/// Examples of `dsec whoami`.
pub(crate) const WHOAMI_EXAMPLES: &str = "Examples:\n  dsec whoami\n  dsec --project root/rl whoami --json";

/// `dsec whoami`.
pub(crate) async fn whoami(context: &Context) -> Outcome {
    let me = context.client.whoami().await?;
    if context.global.json {
        render::json(&me)?;
    } else {
        let identity = me.identity.map_or_else(String::new, |id| format!(" (identity {id})"));
        let may = if me.permissions.is_empty() { "nothing".to_owned() } else { named(me.permissions) };
        render::line(&format!("{}{identity}, with key {}\nin {}: {may}", me.name, me.key_id, me.project))?;
    }
    Ok(0)
}

/// Runs one of the commands.
pub(crate) async fn identity(context: &Context, command: IdentityCommand) -> Outcome {
    let client = &context.client;
    match command {
        IdentityCommand::Ls => {
            let identities = client.identities().await?;
            if context.global.json { render::json(&identities)? } else { table(&identities)? }
        }
        IdentityCommand::Inspect(IdentityArgs { identity }) => {
            render::json(&client.identity(identity).await?)?;
        }
        IdentityCommand::Create(CreateArgs { name, kind }) => {
            let kind = match kind {
                Kind::Person => "person",
                Kind::Service => "service",
                Kind::Agent => "agent",
            };
            let request = CreateIdentityRequest { name, kind: kind.to_owned(), project: None };
            let made = client.create_identity(&request).await?;
            if context.global.json {
                render::json(&made)?;
            } else {
                render::line(&made.identity.to_string())?;
            }
        }
        IdentityCommand::Rm(IdentityArgs { identity }) => client.remove_identity(identity).await?,
    }
    Ok(0)
}

/// Runs one of the commands.
pub(crate) async fn key(context: &Context, command: KeyCommand) -> Outcome {
    let client = &context.client;
    match command {
        KeyCommand::Create(KeyArgs { identity, name, expires_in, within, role, permissions }) => {
            let identity = match identity {
                Some(identity) => identity,
                None => client.whoami().await?.identity.ok_or_else(|| {
                    Failure::usage("the cluster's own key belongs to no identity")
                        .hint("say for which identity the new key is (`dsec identity ls`)")
                })?,
            };
            let request = CreateKeyRequest {
                name,
                project: within,
                role: role.map(Role::from),
                permissions,
                expires_in_s: expires_in.map(seconds),
            };
            let made = client.create_key(identity, &request).await?;
            if context.global.json { render::json(&made)? } else { tell_key(&made)? }
        }
        KeyCommand::Revoke(RevokeArgs { keys }) => {
            for key in &keys {
                client.revoke_key(key).await?;
            }
        }
    }
    Ok(0)
}

fn tell_key(made: &Key) -> Result<(), Failure> {
    note(&format!("key {} of identity {}; it is not shown again:", made.id, made.identity));
    render::line(made.key.as_deref().unwrap_or_default())
}

/// Runs one of the commands.
pub(crate) async fn grant(context: &Context, command: GrantCommand) -> Outcome {
    let client = &context.client;
    match command {
        GrantCommand::Ls => {
            let grants = client.grants().await?;
            if context.global.json { render::json(&grants)? } else { grants_table(&grants)? }
        }
        GrantCommand::Add(GrantArgs { identity, role, permissions }) => {
            let request = CreateGrantRequest {
                identity,
                project: None,
                role: role.map(Role::from),
                permissions: permissions.unwrap_or_default(),
            };
            let made = client.create_grant(&request).await?;
            if context.global.json {
                render::json(&made)?;
            } else {
                grants_table(std::slice::from_ref(&made))?;
            }
        }
        GrantCommand::Rm(TakeArgs { grants }) => {
            for grant in grants {
                client.revoke_grant(grant).await?;
            }
        }
    }
    Ok(0)
}

/// `dsec audit`.
pub(crate) async fn audit(context: &Context, args: AuditArgs) -> Outcome {
    let AuditArgs { last, denied, changes } = args;
    let denied = (denied || changes).then_some(denied);
    let (mut entries, mut before): (Vec<AuditEntry>, Option<String>) = (Vec::new(), None);
    while entries.len() < last as usize {
        let left = last - u32::try_from(entries.len()).unwrap_or(last);
        let page = context.client.audit(before.as_deref(), left.min(AUDIT_PAGE), denied).await?;
        entries.extend(page.entries);
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    entries.reverse();
    if context.global.json {
        render::json(&entries)?;
        return Ok(0);
    }
    let (now, colour) = (render::now_ms(), render::colours(&std::io::stdout()));
    let row = |entry: &AuditEntry| {
        let times = if entry.count > 1 { format!(" ({} times)", entry.count) } else { String::new() };
        let what = format!("{}{times}", entry.action);
        vec![
            render::age(entry.at_ms, now),
            entry.name.clone(),
            entry.project.clone(),
            if entry.denied { paint(&format!("denied: {what}"), Tone::Bad, colour) } else { what },
            entry.target.clone(),
            entry.detail.clone(),
        ]
    };
    render::table(
        &["AGE", "WHO", "PROJECT", "ACTION", "TARGET", "DETAIL"],
        entries.iter().map(row).collect(),
    )?;
    Ok(0)
}

fn table(identities: &[Identity]) -> Result<(), Failure> {
    let now = render::now_ms();
    let row = |it: &Identity| {
        vec![
            it.identity.to_string(),
            it.name.clone(),
            it.kind.clone(),
            it.project.to_string(),
            render::age(it.created_ms, now),
        ]
    };
    render::table(&["IDENTITY", "NAME", "KIND", "PROJECT", "AGE"], identities.iter().map(row).collect())
}

fn grants_table(grants: &[Grant]) -> Result<(), Failure> {
    let now = render::now_ms();
    let row = |it: &Grant| {
        vec![
            it.grant.to_string(),
            it.identity.to_string(),
            it.project.to_string(),
            named(it.permissions),
            if it.counts_for == it.permissions { "all of it".to_owned() } else { named(it.counts_for) },
            it.given_by.map_or_else(|| "the cluster".to_owned(), |by| by.to_string()),
            render::age(it.created_ms, now),
        ]
    };
    let heading = ["GRANT", "IDENTITY", "PROJECT", "PERMISSIONS", "COUNTS FOR", "BY", "AGE"];
    render::table(&heading, grants.iter().map(row).collect())
}
