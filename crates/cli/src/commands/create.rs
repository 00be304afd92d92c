//! `dsec create`, and the options that describe a new sandbox.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{CpuClass, ErrorKind, TaskId};
use dsec_proto::rest::{
    BACKEND_CONTAINER, CREATE_AT_ONCE_MAX, CREATE_MANY_MAX, CreateManyEvent, CreateManyRequest,
    CreateSandboxRequest,
};
use indicatif::ProgressBar;

use super::layer::last;
use super::{Context, completion, progress};
use crate::client::{CREATE_PAUSE, CREATE_TRIES, ClientError, new_key};
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec create debian
  dsec create debian --count 1000 --task job-42
  dsec create debian --memory 512m --cpus 0.5 --ttl 10m --task job-42 --label step=3
  id=$(dsec create debian) && dsec exec $id -- uname -a; dsec stop $id";

/// `dsec create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Name of an imported image
    #[arg(add = ArgValueCandidates::new(completion::image_names))]
    pub(crate) image: String,
    /// Make so many that are alike; their ids come as they run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(CREATE_MANY_MAX)))]
    pub(crate) count: Option<u32>,
    /// With --count: so many at a time [default: 64]
    #[arg(long, value_name = "N", requires = "count", value_parser = clap::value_parser!(u32).range(1..=i64::from(CREATE_AT_ONCE_MAX)))]
    pub(crate) at_once: Option<u32>,
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
    /// CPU time in ms that it may save up while it uses less than its cores [default: as much as they give in 100 ms, up to 200]
    #[arg(long, value_name = "MS")]
    pub(crate) cpu_burst: Option<u64>,
    /// Share of CPU among those of its class under contention, 1 to 10000
    #[arg(long, value_name = "N")]
    pub(crate) cpu_weight: Option<u64>,
    /// latency_sensitive: its share of a busy node at once; best_effort: what the others leave [default: the node's]
    #[arg(long, value_name = "CLASS", value_parser = parse::cpu_class())]
    pub(crate) cpu_class: Option<CpuClass>,
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
    /// Pause it then, instead of ending it; whoever uses it resumes it
    #[arg(long)]
    pub(crate) auto_pause: bool,
    /// End it after it was paused for this long; 0 is never
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) paused_ttl: Option<Duration>,
    /// End it after this long whatever it does, time paused not counted
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
    /// The pool of nodes to run it in [default: any but the one that takes over when the others are full]
    #[arg(long, value_name = "NAME")]
    pub(crate) pool: Option<String>,
    /// The architecture of its node's processors, x86_64 or aarch64 [default: any]
    #[arg(long, value_name = "NAME")]
    pub(crate) architecture: Option<String>,
    /// A label that its node must have. May be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub(crate) node_label: Vec<(String, String)>,
    /// A kernel feature that must work on its node, as `dsec node inspect` names it. May be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) node_feature: Vec<String>,
    /// What isolates it
    #[arg(long, value_name = "NAME", default_value = BACKEND_CONTAINER)]
    pub(crate) backend: String,
}

impl SandboxOptions {
    /// The request for it.
    pub(crate) fn request(self, image: String) -> CreateSandboxRequest {
        CreateSandboxRequest {
            backend: if self.backend.is_empty() { BACKEND_CONTAINER.to_owned() } else { self.backend },
            container_image: image,
            workspace: self.workspace,
            toolkits: self.toolkit,
            memory_limit_mb: self.memory,
            cpu_cores_limit: self.cpus,
            cpu_burst_ms: self.cpu_burst,
            cpu_weight: self.cpu_weight,
            cpu_class: self.cpu_class,
            pids_limit: self.pids,
            open_files_limit: self.open_files,
            disk_limit_mb: self.disk,
            disk_files_limit: self.disk_files,
            ttl_running_stop: self.ttl.map(seconds),
            auto_pause: self.auto_pause.then_some(true),
            ttl_paused_stop: self.paused_ttl.map(seconds),
            max_lifetime: self.lifetime.map(seconds),
            init_user: self.user,
            env: self.env.into_iter().collect(),
            cwd: self.cwd,
            hostname: self.hostname,
            allow_setuid: self.allow_setuid,
            task_id: self.task,
            labels: self.label.into_iter().collect(),
            pool: self.pool,
            architecture: self.architecture,
            node_labels: self.node_label.into_iter().collect(),
            node_features: self.node_feature,
            ..CreateSandboxRequest::default()
        }
    }
}

/// Whole seconds, rounded up: of the times that a request gives in seconds, 0 often means never.
pub(super) fn seconds(duration: Duration) -> u64 {
    duration.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX)
}

/// Makes a sandbox and prints its id.
pub(crate) async fn create(context: &Context, args: CreateArgs) -> Outcome {
    let CreateArgs { image, count, at_once, sandbox } = args;
    let sandbox = sandbox.request(image);
    if let Some(count) = count {
        return create_many(context, CreateManyRequest { count, at_once, skip: Vec::new(), sandbox }).await;
    }
    let sandbox = context.client.create(&sandbox).await?;
    if context.global.json {
        render::json(&sandbox)?
    } else {
        render::line(sandbox.id.as_str())?
    }
    Ok(0)
}

/// Makes many and prints each one's id as it runs. A connection that breaks is taken up again, by a key that finds what was made.
async fn create_many(context: &Context, mut request: CreateManyRequest) -> Outcome {
    let bar = progress::things("creating", request.count.into(), context.global.json);
    let key = new_key();
    let mut told = Told { made: BTreeSet::new(), failed: BTreeMap::new() };
    let mut attempt = 0;
    let ended = loop {
        attempt += 1;
        request.skip = ranges(&told.made);
        let ended = match context.client.create_many(&request, key.as_deref(), attempt).await {
            // Nothing was begun yet: there is nothing to take up.
            Err(error @ ClientError::Unreachable { .. }) if attempt == 1 => break Err(error.into()),
            Err(error) => Err(error.into()),
            Ok(response) => last(context, response, "creates", |event| told.hear(context, &bar, event)).await,
        };
        match ended {
            Err(failure)
                if failure.kind == ErrorKind::Unavailable && key.is_some() && attempt < CREATE_TRIES =>
            {
                tokio::time::sleep(CREATE_PAUSE).await;
            }
            ended => break ended,
        }
    };
    bar.finish_and_clear();
    // The same failure over and over is told once.
    let mut failures: BTreeMap<&str, (u32, &Failure)> = BTreeMap::new();
    for failure in told.failed.values() {
        failures.entry(&failure.message).or_insert((0, failure)).0 += 1;
    }
    for (count, failure) in failures.into_values() {
        let message = format!("{count} of {}: {}", request.count, failure.message);
        render::failure(&Failure { message, ..failure.clone() }, context.global.json);
    }
    let left: u32 = ended?;
    Ok(u8::from(left > 0 || !told.failed.is_empty()))
}

/// What was heard of many creates so far.
struct Told {
    made: BTreeSet<u32>,
    failed: BTreeMap<u32, Failure>,
}

impl Told {
    /// Takes an event in; the last says how many were not tried.
    fn hear(
        &mut self,
        context: &Context,
        bar: &ProgressBar,
        event: CreateManyEvent,
    ) -> Option<Result<u32, Failure>> {
        match event {
            CreateManyEvent::Created { index, sandbox } => {
                self.failed.remove(&index);
                if !self.made.insert(index) {
                    return None;
                }
                bar.inc(1);
                let text = match context.global.json {
                    true => serde_json::to_string(&sandbox).map_err(|e| Failure::new(e.to_string())),
                    false => Ok(sandbox.id.to_string()),
                };
                text.and_then(|line| bar.suspend(|| render::line(&line))).err().map(Err)
            }
            CreateManyEvent::Failed { index, error } => {
                self.failed.insert(index, Failure::new(error.message).hint(error.hint));
                None
            }
            CreateManyEvent::Done { left, .. } => Some(Ok(left)),
        }
    }
}

/// Numbers as ranges with both ends.
fn ranges(numbers: &BTreeSet<u32>) -> Vec<[u32; 2]> {
    let mut ranges: Vec<[u32; 2]> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some([_, end]) if *end + 1 == number => *end = number,
            _ => ranges.push([number, number]),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_is_told_as_ranges() {
        assert_eq!(ranges(&BTreeSet::new()), Vec::<[u32; 2]>::new());
        assert_eq!(ranges(&BTreeSet::from([4, 0, 1, 2, 9, 8])), [[0, 2], [4, 4], [8, 9]]);
    }

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
