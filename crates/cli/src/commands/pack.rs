//! `dsec pack`: what a sandbox wrote becomes a layer.

use std::time::Duration;

use clap::{Args, ValueEnum};
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use dsec_proto::rest::{LeftOut, PackRequest, Packed, Quiesce};

use super::image::LayerKind;
use super::{Context, completion};
use crate::failure::Outcome;
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec pack sb-n1-abc click-built                    its changes as a workspace
  dsec run debian --workspace click-built -- make    starts where the sandbox was
  dsec pack sb-n1-abc job-7/step-3 --kind snapshot   its state, toolkits and all, to branch from
  dsec run debian --workspace snapshot/job-7/step-3 -- make
  dsec pack sb-n1-abc clean --exclude '/data/**' --deny '*.pem' --answers /solution
  dsec pack sb-n1-abc raw --no-scrub                 caches, logs and keys too
  dsec pack sb-n1-abc db --quiesce refuse            not while a file is open for writing

Patterns: * and ? match no slash, ** any number of directories; with a slash at the beginning they are from
the root, else at any depth; with one at the end they match directories only.";

/// How long a pack may take unless `--timeout` says: a disk's worth of files.
pub(crate) const PACK_MAX: Duration = Duration::from_secs(1800);

/// What the sandbox does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum QuiesceWord {
    /// It stands still while what it wrote is read, half a second at most, or for a snapshot
    Freeze,
    /// It stands still; while a file is open for writing nothing is packed
    Refuse,
    /// It goes on
    None,
}

/// `dsec pack`.
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// The sandbox, which must run
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// Name to give the layer: NAME, NAME:TAG or NAME@VERSION
    name: String,
    /// What the layer is for
    #[arg(long, short = 'k', value_enum, default_value = "workspace")]
    kind: LayerKind,
    /// Pack as though the sandbox had not touched these paths. May be repeated
    #[arg(long, short = 'x', value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Leave only this residue out, such as caches,history,keys,logs,temp or caches/pip [default: all that is known]
    #[arg(long, value_name = "RULES", value_delimiter = ',', conflicts_with = "no_scrub")]
    scrub: Vec<String>,
    /// Leave no residue out
    #[arg(long)]
    no_scrub: bool,
    /// Leave these paths out: answers that whoever uses the layer must not find. May be repeated
    #[arg(long, value_name = "PATTERN")]
    answers: Vec<String>,
    /// Pack nothing if one of these paths would be in the layer. May be repeated
    #[arg(long, value_name = "PATTERN")]
    deny: Vec<String>,
    /// What the sandbox does meanwhile
    #[arg(long, value_enum, default_value = "freeze")]
    quiesce: QuiesceWord,
}

impl PackArgs {
    fn request(self) -> PackRequest {
        PackRequest {
            name: Some(self.name),
            kind: self.kind.word().to_owned(),
            exclude: self.exclude,
            scrub: match (self.no_scrub, self.scrub.is_empty()) {
                (true, _) => Some(Vec::new()),
                (false, true) => None,
                (false, false) => Some(self.scrub),
            },
            answers: self.answers,
            deny: self.deny,
            quiesce: match self.quiesce {
                QuiesceWord::Freeze => Quiesce::Freeze,
                QuiesceWord::Refuse => Quiesce::Refuse,
                QuiesceWord::None => Quiesce::None,
            },
            ..PackRequest::default()
        }
    }
}

/// Packs a sandbox.
pub(crate) async fn pack(context: &Context, args: PackArgs) -> Outcome {
    let id = args.id.clone();
    let limit = context.global.timeout.unwrap_or(PACK_MAX);
    let packed = context.client.pack(&id, &args.request(), limit).await?;
    if context.global.json {
        render::json(&packed)?;
        return Ok(0);
    }
    summary(&packed).iter().try_for_each(|line| render::line(line))?;
    Ok(0)
}

fn summary(packed: &Packed) -> Vec<String> {
    let layer = &packed.layer;
    let total: u64 = packed.phases.iter().map(|phase| phase.us).sum();
    let mut lines = vec![format!(
        "{} {}: {} files, {} of content, {} added to the store, {} ms",
        layer.kind,
        layer.name,
        layer.files,
        render::bytes(layer.content_bytes),
        render::bytes(packed.stored_bytes),
        total / 1000
    )];
    let told = |what: &str, left_out: &LeftOut| {
        let more = if left_out.paths.len() < left_out.files as usize { ", ..." } else { "" };
        format!(
            "{what} {}: {} files, {}: {}{more}",
            left_out.rule,
            left_out.files,
            render::bytes(left_out.bytes),
            left_out.paths.join(", ")
        )
    };
    lines.extend(packed.scrubbed.iter().map(|left_out| told("scrubbed", left_out)));
    lines.extend(packed.excluded.iter().map(|left_out| told("excluded", left_out)));
    lines.extend(packed.under_toolkits.iter().map(|left_out| told("below its", left_out)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: PackArgs,
    }

    fn request(words: &[&str]) -> PackRequest {
        Line::parse_from(["pack", "sb-n1-abc", "x"].iter().chain(words)).args.request()
    }

    #[test]
    fn nothing_said_of_residue_is_all_of_it() {
        assert_eq!(request(&[]).scrub, None);
        assert_eq!(request(&["--no-scrub"]).scrub, Some(vec![]));
        assert_eq!(request(&["--scrub", "caches,keys"]).scrub, Some(vec!["caches".into(), "keys".into()]));
        assert!(Line::try_parse_from(["pack", "sb-n1-abc", "x", "--scrub", "keys", "--no-scrub"]).is_err());
        let all = request(&["-k", "snapshot", "-x", "a", "-x", "b", "--deny", "c", "--quiesce", "refuse"]);
        assert_eq!((all.kind.as_str(), all.exclude.len(), all.deny.len()), ("snapshot", 2, 1));
        assert_eq!(all.quiesce, Quiesce::Refuse);
    }
}
