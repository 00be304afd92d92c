//! `dsec status`: whether the platform answers, and its nodes.

use dsec_proto::rest::{FeatureState, NodeStatus};

use super::Context;
use crate::client::ClientError;
use crate::failure::{Failure, Outcome};
use crate::render::{self, Tone, paint};

/// Shows whether the platform answers, and its nodes.
pub(crate) async fn status(context: &Context) -> Outcome {
    // No node answers: the control plane still says so itself, and may know the nodes.
    let healthy = match context.client.health().await {
        Ok(()) => true,
        Err(ClientError::Api(_)) => false,
        Err(ClientError::Strange { what, .. }) if what.starts_with("HTTP 503") => false,
        Err(error) => return Err(error.into()),
    };
    let nodes = match context.client.nodes().await {
        Ok(nodes) => nodes,
        Err(error) if !healthy && error.passes() => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    if context.global.json {
        let url = context.client.url();
        render::json(&serde_json::json!({ "url": url, "healthy": healthy, "nodes": nodes }))?;
    } else {
        people(context.client.url(), healthy, &nodes)?;
    }
    Ok(u8::from(!healthy))
}

fn people(url: &str, healthy: bool, nodes: &[NodeStatus]) -> Result<(), Failure> {
    let colour = render::colours(&std::io::stdout());
    let word =
        if healthy { paint("up", Tone::Good, colour) } else { paint("no node answers", Tone::Bad, colour) };
    render::line(&format!("{url}: {word}\n"))?;
    let now = render::now_ms();
    let row = |node: &NodeStatus| {
        let (usage, all) = (&node.usage, &node.capacity);
        let mib = |n: u64| render::bytes(n.saturating_mul(crate::parse::MIB));
        let lacking = |state| node.features.iter().filter(|feature| feature.state == state).count();
        vec![
            node.node.clone(),
            node.version.clone(),
            render::age(node.started_ms, now),
            format!("{} (+{} -{})", usage.running, usage.creating, usage.stopping),
            format!("{} of {} free", mib(usage.memory_available_mib), mib(all.memory_mib)),
            format!("{}", all.cpu_millis as f64 / 1000.0),
            format!("{} free", mib(usage.disk_free_mib)),
            node.backends.join(","),
            match (lacking(FeatureState::Missing), lacking(FeatureState::Degraded)) {
                (0, 0) => "all".to_owned(),
                (missing, degraded) => format!("{missing} missing, {degraded} degraded"),
            },
        ]
    };
    let heading = ["NODE", "VERSION", "UP", "SANDBOXES", "MEMORY", "CORES", "DISK", "BACKENDS", "FEATURES"];
    render::table(&heading, nodes.iter().map(row).collect())
}
