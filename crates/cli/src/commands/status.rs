//! `dsec status`: whether the platform answers, and its nodes.

use dsec_proto::rest::NodeStatus;

use super::{Context, node};
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
    node::table(nodes)
}
