//! `dsec doctor`: what this machine's kernel can do, as the edge tried it.

use std::path::PathBuf;
use std::process::Stdio;

use clap::Args;
use dsec_proto::rest::{Feature, FeatureState};

use super::process::describe;
use super::{DEFAULT_STATE_DIR, locate};
use crate::failure::{Failure, Outcome};
use crate::render::{self, Tone, paint};

pub(crate) const DOCTOR_EXAMPLES: &str = "\
Examples:
  sudo dsec doctor
  sudo dsec doctor --json | jq '.[] | select(.state != \"works\")'

Exit code 1 when something that is needed is missing.";

/// `dsec doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// State directory of the platform that runs here or is to
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
}

/// Tries what this machine can do.
pub(crate) async fn doctor(args: DoctorArgs, json: bool) -> Outcome {
    let exe = locate::program(locate::EDGE)?;
    let config = args.state_dir.join("edge.toml");
    let (option, value) =
        if config.exists() { ("--config", config) } else { ("--state-dir", args.state_dir) };
    let output = tokio::process::Command::new(&exe)
        .args(["doctor", "--json", option])
        .arg(value)
        .stdin(Stdio::null())
        .output()
        .await
        .map_err(|error| Failure::io(format!("cannot run {}", exe.display()), &error))?;
    let features: Vec<Feature> = serde_json::from_slice(&output.stdout).map_err(|_| {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let said = if said.is_empty() { String::new() } else { format!(": {said}") };
        Failure::new(format!(
            "`dsec-edge doctor` gave no list of features ({}){said}",
            describe(output.status)
        ))
        .hint("are `dsec` and `dsec-edge` of the same version?")
    })?;
    let missing = features.iter().filter(|feature| feature.state == FeatureState::Missing).count();
    if json {
        render::json(&features)?;
    } else {
        people(&features, missing)?;
    }
    Ok(u8::from(missing > 0))
}

fn people(features: &[Feature], missing: usize) -> Result<(), Failure> {
    let colour = render::colours(&std::io::stdout());
    let row = |feature: &Feature| {
        let state = match feature.state {
            FeatureState::Works => paint("works", Tone::Good, colour),
            FeatureState::Degraded => paint("degraded", Tone::Warn, colour),
            FeatureState::Missing => paint("missing", Tone::Bad, colour),
        };
        vec![
            feature.name.clone(),
            state,
            feature.purpose.clone(),
            feature.found.clone(),
            feature.remedy.clone(),
        ]
    };
    render::table(&["FEATURE", "STATE", "FOR", "FOUND", "REMEDY"], features.iter().map(row).collect())?;
    match missing {
        0 => render::line("\nthis machine has all that is needed"),
        n => render::line(&format!("\n{n} of what is needed {} missing", if n == 1 { "is" } else { "are" })),
    }
}
