//! `dsec project`: projects, what they may use, and all sandboxes of one as one.

use std::time::Duration;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;
use dsec_model::iam::{Amounts, Counted, Permission, Permissions, ProjectPath, Resource};
use dsec_proto::rest::{ChangeProjectRequest, CreateProjectRequest, Project, TaskWaited};

use super::exec::millis;
use super::task::{told, wait_for};
use super::{Context, completion};
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

/// `dsec project ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProjectCommand {
    /// List the projects
    #[command(after_help = "Examples:\n  dsec project ls\n  dsec --project root/rl project ls --json")]
    Ls,
    /// Show a project: its quota, what holds for it, what it uses
    #[command(after_help = "Examples:\n  dsec project inspect root/rl")]
    Inspect(ProjectArgs),
    /// Make a project in another
    #[command(after_help = "Examples:
  dsec project create root/rl
  dsec project create root/rl/job-42 --quota sandboxes=1000 --quota memory_mib=2048000
  dsec project create root/eval --quota creates_per_s=50 --quota container.sandboxes=200
  dsec project create root/guests --ceiling sandbox.read,sandbox.create,sandbox.use,sandbox.stop,layer.read")]
    Create(SetArgs),
    /// Set a project's quota or ceiling
    #[command(after_help = "Examples:
  dsec project set root/rl --quota sandboxes=2000    this one; others of its quota stay
  dsec project set root/rl --quota sandboxes=        no quota of its own any more
  dsec project set root/rl --ceiling ''              no ceiling of its own any more")]
    Set(SetArgs),
    /// Remove a project that nothing is in
    #[command(after_help = "Examples:\n  dsec project rm root/rl/job-42")]
    Rm(ProjectArgs),
    /// End all sandboxes of a project and of those in it
    #[command(
        after_help = "Examples:\n  dsec project stop root/rl/job-42\n  dsec project stop root/rl --grace 5s"
    )]
    Stop(StopArgs),
    /// Wait until no sandbox of a project, or of those in it, lives
    #[command(after_help = "Examples:\n  dsec project wait root/rl/job-42 --timeout 1h")]
    Wait(ProjectArgs),
}

/// Which project.
#[derive(Debug, Args)]
pub(crate) struct ProjectArgs {
    /// Its way from the root, such as root/rl
    #[arg(add = ArgValueCandidates::new(completion::project_names))]
    project: ProjectPath,
}

/// `dsec project create` and `set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Its way from the root, such as root/rl
    #[arg(add = ArgValueCandidates::new(completion::project_names))]
    project: ProjectPath,
    /// What it and all in it may use: sandboxes, cpu_millis, memory_mib, disk_mib or creates_per_s, of one
    /// backend with its name before it; may be repeated
    #[arg(long = "quota", value_name = "[BACKEND.]WHAT=AMOUNT", value_parser = quota)]
    quotas: Vec<(Counted, Option<u64>)>,
    /// What anybody may do in it at most, separated by commas; '' for no ceiling
    #[arg(long, value_name = "PERMISSIONS", value_parser = permissions)]
    ceiling: Option<Permissions>,
}

/// `dsec project stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Its way from the root, such as root/rl
    #[arg(add = ArgValueCandidates::new(completion::project_names))]
    project: ProjectPath,
    /// Time their processes get between SIGTERM and SIGKILL
    #[arg(long, short = 'g', value_name = "DURATION", default_value = "0", value_parser = parse::duration)]
    grace: Duration,
}

fn quota(text: &str) -> Result<(Counted, Option<u64>), String> {
    let (counted, amount) = text.split_once('=').ok_or("it must look like sandboxes=100")?;
    let amount = match amount {
        "" => None,
        _ => Some(amount.parse().map_err(|_| format!("{amount:?} is no amount: it must be a whole number"))?),
    };
    Ok((counted.parse()?, amount))
}

/// Names of permissions, separated by commas.
pub(super) fn permissions(text: &str) -> Result<Permissions, String> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| name.parse::<Permission>().map_err(|error| format!("{error}; there are: {}", all())))
        .collect()
}

fn all() -> String {
    Permission::ALL.iter().map(|permission| permission.as_str()).collect::<Vec<_>>().join(", ")
}

/// Permissions as people read them.
pub(super) fn named(permissions: Permissions) -> String {
    if permissions == Permissions::ALL {
        return "everything".to_owned();
    }
    permissions.iter().map(Permission::as_str).collect::<Vec<_>>().join(",")
}

/// Runs one of the commands.
pub(crate) async fn project(context: &Context, command: ProjectCommand) -> Outcome {
    let client = &context.client;
    match command {
        ProjectCommand::Ls => {
            let projects = client.projects().await?;
            if context.global.json { render::json(&projects)? } else { table(&projects)? }
        }
        ProjectCommand::Inspect(ProjectArgs { project }) => render::json(&client.project(&project).await?)?,
        ProjectCommand::Create(SetArgs { project, quotas, ceiling }) => {
            let quota = quotas.into_iter().filter_map(|(counted, amount)| Some((counted, amount?))).collect();
            let ceiling = ceiling.filter(|ceiling| !ceiling.is_empty());
            let made = client.create_project(&CreateProjectRequest { project, ceiling, quota }).await?;
            shown(context, &made)?;
        }
        ProjectCommand::Set(SetArgs { project, quotas, ceiling }) => {
            let quota =
                if quotas.is_empty() { None } else { Some(changed(context, &project, quotas).await?) };
            let ceiling = ceiling.map(|ceiling| Some(ceiling).filter(|ceiling| !ceiling.is_empty()));
            let made = client.change_project(&project, &ChangeProjectRequest { ceiling, quota }).await?;
            shown(context, &made)?;
        }
        ProjectCommand::Rm(ProjectArgs { project }) => client.remove_project(&project).await?,
        ProjectCommand::Stop(StopArgs { project, grace }) => {
            let grace_ms = if grace.is_zero() { 0 } else { millis(grace) };
            let outcome = client.stop_project(&project, grace_ms).await?;
            if !context.global.json {
                render::line(&format!("{project}: {} of {} ended", outcome.done, outcome.matched))?;
            }
            return told(context, &outcome);
        }
        ProjectCommand::Wait(ProjectArgs { project }) => {
            let ask = async |each| client.wait_project(&project, each).await;
            let TaskWaited { lost } = wait_for(context, project.as_str(), ask).await?;
            if context.global.json {
                render::json(&serde_json::json!({ "project": project, "lost": lost }))?;
            }
        }
    }
    Ok(0)
}

/// A project's quota with some of it set or taken out.
async fn changed(
    context: &Context,
    project: &ProjectPath,
    quotas: Vec<(Counted, Option<u64>)>,
) -> Result<Amounts, Failure> {
    let mut quota = context.client.project(project).await?.quota;
    for (counted, amount) in quotas {
        match amount {
            Some(amount) => quota.insert(counted, amount),
            None => quota.remove(&counted),
        };
    }
    Ok(quota)
}

fn shown(context: &Context, project: &Project) -> Result<(), Failure> {
    if context.global.json { render::json(project) } else { table(std::slice::from_ref(project)) }
}

fn table(projects: &[Project]) -> Result<(), Failure> {
    let of = |project: &Project, resource: Resource| {
        let counted = Counted::from(resource);
        let used = project.used.get(&counted).copied().unwrap_or(0);
        let amount = |amount: u64| match resource {
            Resource::MemoryMib | Resource::DiskMib => render::bytes(amount.saturating_mul(parse::MIB)),
            Resource::CpuMillis => format!("{}", amount as f64 / 1000.0),
            Resource::Sandboxes | Resource::CreatesPerS => amount.to_string(),
        };
        match project.effective.get(&counted) {
            Some(most) => format!("{} of {}", amount(used), amount(*most)),
            None => amount(used),
        }
    };
    let row = |project: &Project| {
        vec![
            project.project.to_string(),
            of(project, Resource::Sandboxes),
            of(project, Resource::CpuMillis),
            of(project, Resource::MemoryMib),
            of(project, Resource::DiskMib),
            project
                .effective
                .get(&Resource::CreatesPerS.into())
                .map_or_else(|| "-".to_owned(), u64::to_string),
            project.ceiling.map_or_else(|| "-".to_owned(), named),
        ]
    };
    let heading = ["PROJECT", "SANDBOXES", "CORES", "MEMORY", "DISK", "CREATES/S", "CEILING"];
    render::table(&heading, projects.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_and_permissions_are_read_as_they_are_written() {
        assert_eq!(quota("container.sandboxes=5").unwrap().1, Some(5));
        assert_eq!(quota("memory_mib=").unwrap(), (Resource::MemoryMib.into(), None));
        for bad in ["sandboxes", "pods=1", "sandboxes=many", "sandboxes=-1"] {
            assert!(quota(bad).is_err(), "{bad}");
        }
        assert_eq!(named(permissions("sandbox.use, layer.read").unwrap()), "sandbox.use,layer.read");
        assert!(permissions("").unwrap().is_empty());
        assert!(permissions("sandbox.fly").unwrap_err().contains("sandbox.stop"));
    }
}
