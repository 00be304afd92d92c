//! `dsec update`: other limits for sandboxes that run.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::{CpuClass, SandboxId};
use dsec_proto::rest::UpdateSandboxRequest;

use super::{Context, completion};
use crate::failure::Outcome;
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec update sb-n1-abc --cpu-class best_effort
  dsec update sb-n1-abc sb-n2-def --cpu-weight 50
  dsec update $(dsec ps --quiet --task job-42) --cpu-class latency_sensitive";

/// `dsec update`.
#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    /// The sandboxes
    #[arg(required = true, add = ArgValueCandidates::new(completion::sandbox_ids))]
    ids: Vec<SandboxId>,
    /// How they stand to others on a busy node: latency_sensitive or best_effort
    #[arg(long, value_name = "CLASS", value_parser = parse::cpu_class(), required_unless_present = "cpu_weight")]
    cpu_class: Option<CpuClass>,
    /// Share of CPU among those of their class under contention, 1 to 10000
    #[arg(long, value_name = "N")]
    cpu_weight: Option<u64>,
}

/// Updates them one after the other, up to the first that cannot be.
pub(crate) async fn update(context: &Context, args: UpdateArgs) -> Outcome {
    let request = UpdateSandboxRequest { cpu_weight: args.cpu_weight, cpu_class: args.cpu_class };
    for id in &args.ids {
        let sandbox = context.client.update(id, &request).await?;
        if context.global.json {
            render::json_line(&sandbox)?;
        } else {
            render::line(id.as_str())?;
        }
    }
    Ok(0)
}
