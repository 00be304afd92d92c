//! `dsec status`: whether the platform answers, its nodes, and how many sandboxes there are.

use dsec_model::ErrorKind;
use dsec_proto::rest::{Counts, NodeHealth, NodeStatus};

use super::{Context, node};
use crate::client::ClientError;
use crate::failure::{Failure, Outcome};
use crate::render::{self, Tone, paint};

/// Shows whether the platform answers, its nodes, and how many sandboxes there are.
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
    let counts = match context.client.counts().await {
        Ok(counts) => Some(counts),
        // A server of a version that does not count.
        Err(ClientError::Api(error)) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if !healthy && error.passes() => None,
        Err(error) => return Err(error.into()),
    };
    let url = context.client.url();
    if context.global.json {
        let status = serde_json::json!({ "url": url, "healthy": healthy, "nodes": nodes, "counts": counts });
        render::json(&status)?;
    } else {
        people(url, healthy, &nodes)?;
        counts.iter().flat_map(lines).try_for_each(|line| render::line(&line))?;
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

/// How many sandboxes there are, and what is not in that, a line each.
fn lines(counts: &Counts) -> Vec<String> {
    let states = &counts.sandboxes;
    let by_state = [
        ("running", states.running),
        ("creating", states.creating),
        ("pausing", states.pausing),
        ("paused", states.paused),
        ("resuming", states.resuming),
        ("stopping", states.stopping),
        ("lost", states.lost),
        ("stopped", states.stopped),
        ("failed", states.failed),
    ];
    let said =
        by_state.iter().filter(|(_, count)| *count > 0).map(|(state, count)| format!("{count} {state}"));
    let said = said.collect::<Vec<_>>().join(", ");
    let mut lines = vec![format!("\nsandboxes: {}", if said.is_empty() { "none" } else { &said })];
    for (name, node) in counts.nodes.iter().filter(|(_, node)| node.health != NodeHealth::Well) {
        let health = node.health.as_str();
        lines.push(match node.heard_ms {
            Some(heard_ms) => {
                format!(
                    "node {name} is {health}: last heard of {} ago",
                    render::age(heard_ms, render::now_ms())
                )
            }
            None => format!("node {name} is {health}: not heard of since the server started"),
        });
    }
    if !counts.uncounted.is_empty() {
        let why = if counts.gathering { "still gathering" } else { "not counted" };
        lines.push(format!("{why}: {}", counts.uncounted.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_or_not_counted_is_said() {
        let counts: Counts = serde_json::from_str(
            r#"{"gathering":true,"uncounted":["n3"],"sandboxes":{"running":4,"lost":2},
                "nodes":{"n1":{"health":"well","known":"counted","sandboxes":{}},
                         "n2":{"health":"lost","known":"counted","heard_ms":1,"sandboxes":{"lost":2}},
                         "n3":{"health":"suspect","known":"gathering","sandboxes":{}}}}"#,
        )
        .unwrap();
        let lines = lines(&counts);
        assert_eq!(lines[0], "\nsandboxes: 4 running, 2 lost");
        assert!(lines[1].starts_with("node n2 is lost: last heard of "), "{lines:?}");
        assert_eq!(lines[2], "node n3 is suspect: not heard of since the server started");
        assert_eq!(lines[3], "still gathering: n3");
        assert_eq!(super::lines(&Counts::default()), ["\nsandboxes: none"]);
    }
}
