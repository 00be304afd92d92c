//! `dsec logs` and `dsec inspect`: what is known of a sandbox.

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use serde_json::Value;

use super::{Context, completion};
use crate::client::JsonLines;
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const LOGS_EXAMPLES: &str = "\
Examples:
  dsec logs sb-n1-abc
  dsec logs sb-n1-abc --json      as the platform keeps it, one JSON object a line";
pub(crate) const INSPECT_EXAMPLES: &str = "\
Examples:
  dsec inspect sb-n1-abc
  dsec inspect sb-n1-abc | jq '.[0].launch_phases'";

/// `dsec logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
}

/// `dsec inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The sandboxes
    #[arg(required = true, add = ArgValueCandidates::new(completion::sandbox_ids))]
    ids: Vec<SandboxId>,
}

/// Shows what happened to a sandbox.
pub(crate) async fn logs(context: &Context, args: &LogsArgs) -> Outcome {
    let response = context.client.logs(&args.id).await?;
    let mut lines = JsonLines::new(Box::pin(context.client.body(response)));
    while let Some(line) = lines.next().await? {
        let text = String::from_utf8_lossy(&line);
        if context.global.json { render::line(&text)? } else { render::line(&for_people(&text))? }
    }
    Ok(0)
}

/// Shows whole records.
pub(crate) async fn inspect(context: &Context, args: &InspectArgs) -> Outcome {
    let (mut records, mut failed) = (Vec::new(), None);
    for id in &args.ids {
        match context.client.sandbox(id).await {
            Ok(sandbox) => records.push(sandbox),
            Err(error) => failed = Some(failed.unwrap_or_else(|| Failure::from(error))),
        }
    }
    // What there is, is shown, as `docker inspect` does.
    render::json(&records)?;
    failed.map_or(Ok(0), Err)
}

/// `14:03:07.125 event key=value ...`; what is no event stays as it is.
fn for_people(line: &str) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(line) else { return line.to_owned() };
    let time = fields.remove("time_ms").and_then(|time| time.as_u64()).map(render::clock).unwrap_or_default();
    let event = fields.remove("event").map(|event| word(&event)).unwrap_or_default();
    let rest = fields.iter().map(|(key, value)| format!(" {key}={}", word(value))).collect::<String>();
    format!("{time} {event}{rest}").trim().to_owned()
}

fn word(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !text.contains(char::is_whitespace) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_made_readable_and_what_is_none_is_kept() {
        let line = r#"{"time_ms":3723004,"event":"state","to":"running","why":"it was asked","n":3}"#;
        assert_eq!(for_people(line), "01:02:03.004 state n=3 to=running why=\"it was asked\"");
        assert_eq!(for_people("plain text"), "plain text");
    }
}
