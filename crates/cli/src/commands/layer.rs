//! What `dsec image` and `dsec layer` do beyond names: traces, prefetching, tags, exports, and the care of the store.

use std::path::{Path, PathBuf};

use clap::Args;
use dsec_proto::rest::{
    BlobTrace, CollectEvent, Collected, Finding, LayerOnNode, PrefetchEvent, PrefetchRequest, PrefetchWhat,
    VerifyEvent,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::archive::unpack;
use super::{Context, progress};
use crate::client::JsonLines;
use crate::failure::{Failure, Outcome};
use crate::render;

/// Ranges of a trace that are shown before the rest is left to `--json`.
const RANGES_SHOWN: usize = 12;

/// `dsec image prefetch` and `dsec layer prefetch`.
#[derive(Debug, Args)]
pub(crate) struct PrefetchArgs {
    /// Its name, with a tag or a version
    name: String,
    /// Only what traces say that runs begin with
    #[arg(long)]
    trace: bool,
    /// No progress, no summary
    #[arg(long, short = 'q')]
    quiet: bool,
}

/// Which tag goes where.
#[derive(Debug, Args)]
pub(crate) struct TagArgs {
    /// Its name, with a tag or a version
    name: String,
    /// The tag to put on it
    tag: String,
}

/// What is written where.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Its name, with a tag or a version
    name: String,
    /// Directory to make
    dir: PathBuf,
    /// No progress, no summary
    #[arg(long, short = 'q')]
    quiet: bool,
}

pub(super) async fn trace(context: &Context, kind: &str, name: &str) -> Outcome {
    let trace = context.client.layer_trace(kind, name).await?;
    if context.global.json {
        render::json(&trace)?;
        return Ok(0);
    }
    let now = render::now_ms();
    let row = |blob: &BlobTrace| {
        vec![
            blob.id.chars().take(12).collect(),
            blob.runs.to_string(),
            blob.recorded_ms.map_or_else(|| "-".to_owned(), |at| format!("{} ago", render::age(at, now))),
            blob.groups.len().to_string(),
            format!("{} / {}", render::bytes(blob.traced_bytes), render::bytes(blob.size_bytes)),
            ranges(&blob.groups),
        ]
    };
    let heading = ["BLOB", "RUNS", "RECORDED", "GROUPS", "BYTES", "ORDER"];
    render::table(&heading, trace.blobs.iter().map(row).collect())?;
    Ok(0)
}

/// Groups in their order, neighbours as a range.
fn ranges(groups: &[u32]) -> String {
    let runs: Vec<&[u32]> = groups.chunk_by(|a, b| a + 1 == *b).collect();
    let shown = runs.iter().take(RANGES_SHOWN).map(|run| match run {
        [one] => one.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let mut text = shown.collect::<Vec<_>>().join(" ");
    if runs.len() > RANGES_SHOWN {
        text.push_str(" ...");
    }
    text
}

pub(super) async fn prefetch(context: &Context, kind: &str, args: &PrefetchArgs) -> Outcome {
    let quiet = args.quiet || context.global.json;
    let what = if args.trace { PrefetchWhat::Trace } else { PrefetchWhat::All };
    let bar = progress::bytes("bringing in", Some(0), quiet);
    let done = bring(context, kind, &args.name, what, |wanted_bytes, left_bytes| {
        bar.set_length(wanted_bytes);
        bar.set_position(wanted_bytes - left_bytes);
    })
    .await;
    bar.finish_and_clear();
    let nodes = done?;
    if context.global.json {
        render::json(&nodes)?;
    } else if !args.quiet {
        for LayerOnNode { node, content, .. } in nodes {
            let content = content.unwrap_or_default();
            let (here, size) = (render::bytes(content.here_bytes), render::bytes(content.size_bytes));
            render::line(&format!("{}: {here} of {size} are on {node}", args.name))?;
        }
    }
    Ok(0)
}

/// Brings content of a layer to nodes; `tell` hears how many bytes are wanted and how many of them left.
pub(crate) async fn bring(
    context: &Context,
    kind: &str,
    name: &str,
    what: PrefetchWhat,
    mut tell: impl FnMut(u64, u64),
) -> Result<Vec<LayerOnNode>, Failure> {
    let response = context.client.prefetch(kind, name, &PrefetchRequest { what }).await?;
    last(context, response, "prefetch", |event| match event {
        PrefetchEvent::Progress { wanted_bytes, left_bytes } => {
            tell(wanted_bytes, left_bytes);
            None
        }
        PrefetchEvent::Done { nodes } => Some(Ok(nodes)),
        PrefetchEvent::Error { error } => Some(Err(Failure::new(error.message).hint(error.hint))),
    })
    .await
}

pub(super) async fn tag(context: &Context, kind: &str, args: &TagArgs) -> Outcome {
    let image = context.client.tag_layer(kind, &args.name, &args.tag).await?;
    if context.global.json {
        render::json(&image)?;
    } else {
        render::line(&image.name)?;
    }
    Ok(0)
}

pub(super) async fn export(context: &Context, kind: &str, args: &ExportArgs) -> Outcome {
    let dir = args.dir.as_path();
    if dir.symlink_metadata().is_ok() {
        return Err(Failure::new(format!("{} is there already", dir.display()))
            .hint("name a directory that is yet to be made"));
    }
    let response = context.client.export_layer(kind, &args.name).await?;
    let bar = progress::bytes("exporting", None, args.quiet || context.global.json);
    let unpacked = unpack(context.client.body(response), dir.to_owned(), bar.clone()).await;
    bar.finish_and_clear();
    let unpacked = unpacked?;
    if !is_whole(dir) {
        return Err(Failure::new(format!("the export broke off; {} is no whole layout", dir.display()))
            .hint("the platform's log says why; remove the directory and try again"));
    }
    if context.global.json {
        render::json(&unpacked)?;
    } else if !args.quiet {
        render::line(&format!("{}: {}", dir.display(), render::bytes(unpacked.bytes)))?;
    }
    Ok(0)
}

/// A layout's index is written last.
fn is_whole(dir: &Path) -> bool {
    dir.join("index.json").is_file() && dir.join("oci-layout").is_file()
}

/// Reads the store, or one layer of it, whole. 1 when anything is wrong.
pub(super) async fn verify(context: &Context, layer: Option<(&str, &str)>) -> Outcome {
    let response = context.client.verify(layer).await?;
    let bar = progress::spinner("verifying", context.global.json);
    type Seen = (u64, u64, u64, Vec<Finding>);
    let done: Result<Seen, Failure> = last(context, response, "verification", |event| match event {
        VerifyEvent::Progress { layers, packs, pack_bytes } => {
            bar.set_message(format!(
                "verifying: {layers} layers, {packs} packs, {}",
                render::bytes(pack_bytes)
            ));
            None
        }
        VerifyEvent::Done { layers, packs, pack_bytes, findings } => {
            Some(Ok((layers, packs, pack_bytes, findings)))
        }
        VerifyEvent::Error { error } => Some(Err(Failure::new(error.message).hint(error.hint))),
    })
    .await;
    bar.finish_and_clear();
    let (layers, packs, pack_bytes, findings) = done?;
    if context.global.json {
        render::json(
            &json!({ "layers": layers, "packs": packs, "pack_bytes": pack_bytes, "findings": findings }),
        )?;
    } else {
        for Finding { object, problem } in &findings {
            render::line(&format!("{object}: {problem}"))?;
        }
        let read = render::bytes(pack_bytes);
        let well =
            if findings.is_empty() { "all is well".to_owned() } else { format!("{} wrong", findings.len()) };
        render::line(&format!("{layers} layers, {packs} packs, {read}: {well}"))?;
    }
    Ok(u8::from(!findings.is_empty()))
}

/// Clears the store of what nothing refers to.
pub(super) async fn collect(context: &Context, grace_s: Option<u64>, step_age_s: Option<u64>) -> Outcome {
    let response = context.client.collect(grace_s, step_age_s).await?;
    let bar = progress::spinner("collecting", context.global.json);
    let done: Result<Collected, Failure> = last(context, response, "collection", |event| match event {
        CollectEvent::Progress { elapsed_ms } => {
            bar.set_message(format!("collecting for {}", render::span(elapsed_ms / 1000)));
            None
        }
        CollectEvent::Done { collected } => Some(Ok(collected)),
        CollectEvent::Error { error } => Some(Err(Failure::new(error.message).hint(error.hint))),
    })
    .await;
    bar.finish_and_clear();
    let done = done?;
    if context.global.json {
        render::json(&done)?;
    } else {
        let freed = render::bytes(done.pack_bytes);
        render::line(&format!("removed {} layers and {} packs of {freed}", done.layers, done.packs))?;
    }
    Ok(0)
}

/// Reads events until one of them is the last.
pub(super) async fn last<E: DeserializeOwned, T>(
    context: &Context,
    response: reqwest::Response,
    what: &str,
    mut on: impl FnMut(E) -> Option<Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut lines = JsonLines::new(Box::pin(context.client.body(response)));
    while let Some(line) = lines.next().await? {
        // An event of a newer server is passed over.
        if let Some(ended) = serde_json::from_slice(&line).ok().and_then(&mut on) {
            return ended;
        }
    }
    Err(Failure::new(format!("the platform broke the {what} off without a word"))
        .hint("see its log, and try again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_shown_as_ranges_and_not_without_end() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[9, 10, 11, 3, 7, 8]), "9-11 3 7-8");
        let scattered: Vec<u32> = (0..40).map(|n| n * 2).collect();
        assert!(ranges(&scattered).ends_with("22 ..."), "{}", ranges(&scattered));
    }
}
