//! `dsec fleet status`: what the nodes run.

use dsec_proto::rest::{NodeRelease, NodeStatus};
use futures_util::future::join_all;

use super::super::Context;
use super::change::shown;
use crate::client::ClientError;
use crate::failure::Outcome;
use crate::render::{self, Tone, paint};

/// Shows it.
pub(super) async fn status(context: &Context) -> Outcome {
    let nodes = context.client.nodes().await?;
    let asked = nodes.iter().map(|node| context.client.node_release(&node.node));
    let releases = join_all(asked).await;
    if context.global.json {
        let known: Vec<_> =
            nodes.iter().zip(&releases).map(|(node, release)| as_json(node, release)).collect();
        render::json(&known)?;
    } else {
        table(&nodes, &releases)?;
    }
    Ok(0)
}

fn as_json(node: &NodeStatus, release: &Result<NodeRelease, ClientError>) -> serde_json::Value {
    match release {
        Ok(release) => serde_json::json!(release),
        Err(error) => {
            serde_json::json!({ "node": node.node, "version": node.version, "error": error.to_string() })
        }
    }
}

fn table(nodes: &[NodeStatus], releases: &[Result<NodeRelease, ClientError>]) -> Outcome {
    let (now, colour) = (render::now_ms(), render::colours(&std::io::stdout()));
    let row = |(node, release): (&NodeStatus, &Result<NodeRelease, ClientError>)| {
        let unknown = || "-".to_owned();
        let Ok(release) = release else {
            let mut row = vec![node.node.clone(), node.version.clone()];
            row.extend([unknown(), unknown(), unknown(), unknown()]);
            row.push(paint("cannot be changed from afar", Tone::Dim, colour));
            return row;
        };
        let stands = match (&release.trial, &release.failed) {
            (Some(trial), _) => paint(&format!("tries {}", trial.change), Tone::Warn, colour),
            (None, Some(failed)) => {
                paint(&format!("went back from {}: {}", failed.change, failed.why), Tone::Bad, colour)
            }
            (None, None) => String::new(),
        };
        vec![
            release.node.clone(),
            release.version.clone(),
            shown(&release.running, &release.version),
            release.since_ms.map_or_else(unknown, |since| render::age(since, now)),
            release.previous.as_ref().map_or_else(unknown, ToString::to_string),
            release.config.clone(),
            stands,
        ]
    };
    let heading = ["NODE", "VERSION", "RELEASE", "SINCE", "PREVIOUS", "CONFIG", "CHANGES"];
    render::table(&heading, nodes.iter().zip(releases).map(row).collect())?;
    Ok(0)
}
