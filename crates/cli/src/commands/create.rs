//! `dsec create`, and the options that describe a new sandbox.

use std::time::Duration;

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::TaskId;
use dsec_proto::rest::{BACKEND_CONTAINER, CreateSandboxRequest};

use super::{Context, completion};
use crate::failure::Outcome;
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec create debian
  dsec create debian --memory 512m --cpus 0.5 --ttl 10m --task job-42 --label step=3
  id=$(dsec create debian) && dsec exec $id -- uname -a; dsec stop $id";

/// `dsec create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Name of an imported image
    #[arg(add = ArgValueCandidates::new(completion::image_names))]
    pub(crate) image: String,
    #[command(flatten)]
    pub(crate) sandbox: SandboxOptions,
}

/// What a new sandbox is like. What is left out is the node's to choose.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sandbox")]
pub(crate) struct SandboxOptions {
    /// A workspace, as a layer over the image: NAME, NAME:TAG or NAME@VERSION; or a snapshot: snapshot/NAME
    #[arg(long, value_name = "NAME")]
    pub(crate) workspace: Option<String>,
    /// A toolkit over both. May be repeated, each over the one before it
    #[arg(long, value_name = "NAME")]
    pub(crate) toolkit: Vec<String>,
    /// Memory, as in 512m or 2g
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = parse::size_mib)]
    pub(crate) memory: Option<u64>,
    /// Cores; fractions are allowed
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<f64>,
    /// Share of CPU under contention, 1 to 10000
    #[arg(long, value_name = "N")]
    pub(crate) cpu_weight: Option<u64>,
    /// Processes and threads
    #[arg(long, value_name = "N")]
    pub(crate) pids: Option<u64>,
    /// Open files of a process
    #[arg(long, value_name = "N")]
    pub(crate) open_files: Option<u64>,
    /// Writable layer, as in 10g
    #[arg(long, value_name = "SIZE", value_parser = parse::size_mib)]
    pub(crate) disk: Option<u64>,
    /// Files and directories in the writable layer
    #[arg(long, value_name = "N")]
    pub(crate) disk_files: Option<u64>,
    /// End it after this long without a request; 0 is never
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) ttl: Option<Duration>,
    /// End it after this long whatever it does
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) lifetime: Option<Duration>,
    /// User of its commands: a name, or uid[:gid]
    #[arg(long, short = 'u', value_name = "USER")]
    pub(crate) user: Option<String>,
    /// A variable of every command; KEY alone takes its value from here. May be repeated
    #[arg(long, short = 'e', value_name = "KEY[=VALUE]", value_parser = parse::env_value)]
    pub(crate) env: Vec<(String, String)>,
    /// A label to filter by. May be repeated
    #[arg(long, short = 'l', value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub(crate) label: Vec<(String, String)>,
    /// The job it belongs to
    #[arg(long, value_name = "ID")]
    pub(crate) task: Option<TaskId>,
    /// Host name inside
    #[arg(long, value_name = "NAME")]
    pub(crate) hostname: Option<String>,
    /// Working directory of its commands
    #[arg(long, short = 'w', value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// Let setuid programs such as sudo work
    #[arg(long)]
    pub(crate) allow_setuid: bool,
    /// What isolates it
    #[arg(long, value_name = "NAME", default_value = BACKEND_CONTAINER)]
    pub(crate) backend: String,
}

impl SandboxOptions {
    /// The request for it. Durations go up to whole seconds, since 0 means never.
    pub(crate) fn request(self, image: String) -> CreateSandboxRequest {
        let seconds = |d: Duration| d.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX);
        CreateSandboxRequest {
            backend: if self.backend.is_empty() { BACKEND_CONTAINER.to_owned() } else { self.backend },
            container_image: image,
            workspace: self.workspace,
            toolkits: self.toolkit,
            memory_limit_mb: self.memory,
            cpu_cores_limit: self.cpus,
            cpu_weight: self.cpu_weight,
            pids_limit: self.pids,
            open_files_limit: self.open_files,
            disk_limit_mb: self.disk,
            disk_files_limit: self.disk_files,
            ttl_running_stop: self.ttl.map(seconds),
            max_lifetime: self.lifetime.map(seconds),
            init_user: self.user,
            env: self.env.into_iter().collect(),
            cwd: self.cwd,
            hostname: self.hostname,
            allow_setuid: self.allow_setuid,
            task_id: self.task,
            labels: self.label.into_iter().collect(),
            ..CreateSandboxRequest::default()
        }
    }
}

/// Makes a sandbox and prints its id.
pub(crate) async fn create(context: &Context, args: CreateArgs) -> Outcome {
    let sandbox = context.client.create(&args.sandbox.request(args.image)).await?;
    if context.global.json {
        render::json(&sandbox)?
    } else {
        render::line(sandbox.id.as_str())?
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_has_what_was_given_and_nothing_else() {
        let options = SandboxOptions {
            memory: Some(512),
            ttl: Some(Duration::from_millis(1500)),
            env: vec![("A".into(), "1".into())],
            ..SandboxOptions::default()
        };
        let json = serde_json::to_value(options.request("debian".into())).unwrap();
        let expected = serde_json::json!({
            "backend": "container", "container_image": "debian", "memory_limit_mb": 512,
            "ttl_running_stop": 2, "env": {"A": "1"}, "allow_setuid": false,
        });
        assert_eq!(json, expected);
    }
}
