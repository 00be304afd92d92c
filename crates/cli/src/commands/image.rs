//! `dsec image` and `dsec layer`: what sandboxes are made of.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCandidates;
use dsec_proto::rest::{ApiError, Image, ImportEvent, LAYER_BASE};
use indicatif::ProgressBar;

use super::archive::{Owner, body, pieces_of, tar_of};
use super::build::{self, BuildArgs};
use super::layer::{self, ExportArgs, PrefetchArgs, TagArgs};
use super::pull::{self, RegistryArgs};
use super::{Context, completion, progress};
use crate::client::{ClientError, JsonLines};
use crate::failure::{Failure, Outcome};
use crate::{parse, render};

const IMPORT_EXAMPLES: &str = "\
Examples:
  docker save debian:12 | dsec image import debian -
  dsec image import debian ./debian-rootfs.tar.zst
  dsec image import debian ./oci-layout/        a directory: an OCI layout, or a root file system
  dsec image import app docker://registry.example/team/app:1
  dsec image import app docker://localhost:5000/app --platform linux/amd64";

/// `dsec image ...`.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    #[command(flatten)]
    on: NodeArgs,
    #[command(subcommand)]
    command: ImageCommand,
}

/// `dsec layer ...`.
#[derive(Debug, Args)]
pub(crate) struct LayerArgs {
    #[command(flatten)]
    on: NodeArgs,
    #[command(subcommand)]
    command: LayerCommand,
}

/// Which node does it.
#[derive(Debug, Args)]
struct NodeArgs {
    /// Have this node do it; prefetch takes several [default: any node; all of them prefetch]
    #[arg(long = "node", global = true, value_name = "NAME")]
    nodes: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum ImageCommand {
    /// Take an image in
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(ImportArgs),
    /// Build an image of a recipe: a recipe.toml or a Dockerfile
    #[command(after_help = build::EXAMPLES)]
    Build(Box<BuildArgs>),
    /// List the images
    #[command(after_help = "Examples:\n  dsec image ls\n  dsec image ls --json | jq -r '.[].name'")]
    Ls,
    /// Remove images
    #[command(after_help = "Examples:\n  dsec image rm debian\n  dsec image rm old-1 old-2")]
    Rm {
        /// Their names
        #[arg(required = true, add = ArgValueCandidates::new(completion::image_names))]
        names: Vec<String>,
    },
    /// Show all that is known of an image, and what was done for its content on each node, as JSON
    #[command(
        after_help = "Examples:\n  dsec image inspect debian\n  dsec image inspect debian | jq '.nodes[] | {node, mounted, here_bytes: .content.here_bytes}'"
    )]
    Inspect {
        /// Its name
        #[arg(add = ArgValueCandidates::new(completion::image_names))]
        name: String,
    },
    /// Show what first runs read of an image, which later ones find prefetched
    #[command(after_help = "Examples:\n  dsec image trace debian\n  dsec image trace debian --json")]
    Trace {
        /// Its name, with a tag or a version
        #[arg(add = ArgValueCandidates::new(completion::image_names))]
        name: String,
    },
    /// Bring an image's content to the nodes before anything runs
    #[command(
        after_help = "Examples:\n  dsec image prefetch debian\n  dsec image prefetch --trace debian\n  dsec image prefetch debian --node n1 --node n2"
    )]
    Prefetch(PrefetchArgs),
    /// Give an image one more tag, or move a tag
    #[command(
        after_help = "Examples:\n  dsec image tag debian stable\n  dsec image tag debian@2f1c9a0e4b7d8c36 latest"
    )]
    Tag(TagArgs),
    /// Write an image as an OCI layout, for other tools
    #[command(
        after_help = "Examples:\n  dsec image export debian layout/\n  dsec image export debian layout && skopeo copy oci:layout docker-archive:debian.tar"
    )]
    Export(ExportArgs),
}

/// What a layer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayerKind {
    /// A root file system: an image
    Base,
    /// A repository and what it needs, over an image
    Workspace,
    /// Tools, over both
    Toolkit,
    /// All that a sandbox had over its image
    Snapshot,
}

impl LayerKind {
    /// It in names and paths of the API.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Base => LAYER_BASE,
            Self::Workspace => "workspace",
            Self::Toolkit => "toolkit",
            Self::Snapshot => "snapshot",
        }
    }
}

#[derive(Debug, Subcommand)]
enum LayerCommand {
    /// Take a layer in
    #[command(
        after_help = "Examples:\n  dsec layer import workspace click click.tar\n  dsec layer import toolkit tools:2 tools/"
    )]
    Import {
        /// What it is for
        kind: LayerKind,
        #[command(flatten)]
        import: ImportArgs,
    },
    /// List the layers of a kind
    #[command(after_help = "Examples:\n  dsec layer ls workspace\n  dsec layer ls toolkit --json")]
    Ls {
        /// What they are for
        kind: LayerKind,
    },
    /// Remove layers
    #[command(after_help = "Examples:\n  dsec layer rm toolkit tools:1")]
    Rm {
        /// What they are for
        kind: LayerKind,
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Show all that is known of a layer, and what was done for its content on each node, as JSON
    #[command(
        after_help = "Examples:\n  dsec layer inspect workspace click\n  dsec layer inspect toolkit tools | jq .nodes"
    )]
    Inspect {
        /// What it is for
        kind: LayerKind,
        /// Its name, with a tag or a version
        name: String,
    },
    /// Show what first runs read of a layer, which later ones find prefetched
    #[command(after_help = "Examples:\n  dsec layer trace workspace click")]
    Trace {
        /// What it is for
        kind: LayerKind,
        /// Its name, with a tag or a version
        name: String,
    },
    /// Bring a layer's content to the nodes before anything runs
    #[command(
        after_help = "Examples:\n  dsec layer prefetch workspace click\n  dsec layer prefetch toolkit tools --trace"
    )]
    Prefetch {
        /// What it is for
        kind: LayerKind,
        #[command(flatten)]
        prefetch: PrefetchArgs,
    },
    /// Give a layer one more tag, or move a tag
    #[command(after_help = "Examples:\n  dsec layer tag toolkit tools:2 latest")]
    Tag {
        /// What it is for
        kind: LayerKind,
        #[command(flatten)]
        tag: TagArgs,
    },
    /// Write a layer with those below it as an OCI layout
    #[command(after_help = "Examples:\n  dsec layer export snapshot step-7 layout/")]
    Export {
        /// What it is for
        kind: LayerKind,
        #[command(flatten)]
        export: ExportArgs,
    },
    /// Read layers whole from the store and check every digest
    #[command(
        after_help = "Examples:\n  dsec layer verify                      all layers of the store\n  dsec layer verify workspace click\n\nEnds with 1 when anything is wrong."
    )]
    Verify {
        /// What it is for
        #[arg(requires = "name")]
        kind: Option<LayerKind>,
        /// Its name, with a tag or a version
        name: Option<String>,
    },
    /// Clear the store of what nothing refers to any more, as the nodes do once an hour
    #[command(
        after_help = "Examples:\n  dsec layer gc\n  dsec layer gc --grace 0s      also what was made a moment ago\n  dsec layer gc --grace 0s --step-age 0s     and all that builds keep for the next"
    )]
    Gc {
        /// What is younger stays [default: 24h]
        #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
        grace: Option<Duration>,
        /// Of what builds did, steps that were used since stay [default: 7d]
        #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
        step_age: Option<Duration>,
    },
}

/// `dsec image import` and `dsec layer import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Name to give it
    name: String,
    /// A tar or a directory of files, an OCI layout (tar or directory), a docker save archive, - for standard input, or
    /// docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST] for an image that a node gets from a registry
    source: PathBuf,
    /// No progress, no summary
    #[arg(long, short = 'q')]
    quiet: bool,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Runs one of the commands.
pub(crate) async fn image(context: Context, args: ImageArgs) -> Outcome {
    let context = &context.on(args.on.nodes);
    match args.command {
        ImageCommand::Import(args) => import(context, LAYER_BASE, &args).await,
        ImageCommand::Build(args) => build::build(context, *args).await,
        ImageCommand::Ls => list(context, LAYER_BASE).await,
        ImageCommand::Rm { names } => remove(context, LAYER_BASE, &names).await,
        ImageCommand::Inspect { name } => inspect(context, LAYER_BASE, &name).await,
        ImageCommand::Trace { name } => layer::trace(context, LAYER_BASE, &name).await,
        ImageCommand::Prefetch(args) => layer::prefetch(context, LAYER_BASE, &args).await,
        ImageCommand::Tag(args) => layer::tag(context, LAYER_BASE, &args).await,
        ImageCommand::Export(args) => layer::export(context, LAYER_BASE, &args).await,
    }
}

/// Runs one of `dsec layer`.
pub(crate) async fn layers(context: Context, args: LayerArgs) -> Outcome {
    let context = &context.on(args.on.nodes);
    match args.command {
        LayerCommand::Import { kind, import: args } => import(context, kind.word(), &args).await,
        LayerCommand::Ls { kind } => list(context, kind.word()).await,
        LayerCommand::Rm { kind, names } => remove(context, kind.word(), &names).await,
        LayerCommand::Inspect { kind, name } => inspect(context, kind.word(), &name).await,
        LayerCommand::Trace { kind, name } => layer::trace(context, kind.word(), &name).await,
        LayerCommand::Prefetch { kind, prefetch } => layer::prefetch(context, kind.word(), &prefetch).await,
        LayerCommand::Tag { kind, tag } => layer::tag(context, kind.word(), &tag).await,
        LayerCommand::Export { kind, export } => layer::export(context, kind.word(), &export).await,
        LayerCommand::Verify { kind, name } => {
            let layer = kind.zip(name);
            layer::verify(context, layer.as_ref().map(|(kind, name)| (kind.word(), name.as_str()))).await
        }
        LayerCommand::Gc { grace, step_age } => {
            let seconds = |age: Option<Duration>| age.map(|age| age.as_secs());
            layer::collect(context, seconds(grace), seconds(step_age)).await
        }
    }
}

async fn inspect(context: &Context, kind: &str, name: &str) -> Outcome {
    render::json(&context.client.layer(kind, name).await?)?;
    Ok(0)
}

async fn list(context: &Context, kind: &str) -> Outcome {
    let images = context.client.layers(kind).await?;
    if context.global.json {
        render::json(&images)?;
        return Ok(0);
    }
    let now = render::now_ms();
    let row = |image: &Image| {
        vec![
            image.name.clone(),
            short_digest(&image.digest),
            image.architecture.clone(),
            render::bytes(image.size_bytes),
            image.files.to_string(),
            format!("{} ago", render::age(image.created_ms, now)),
            image.used_by.len().to_string(),
        ]
    };
    let heading = ["NAME", "DIGEST", "ARCH", "SIZE", "FILES", "IMPORTED", "USED BY"];
    render::table(&heading, images.iter().map(row).collect())?;
    Ok(0)
}

fn short_digest(digest: &str) -> String {
    digest.rsplit(':').next().unwrap_or_default().chars().take(12).collect()
}

async fn remove(context: &Context, kind: &str, names: &[String]) -> Outcome {
    let mut code = 0;
    let mut removed = Vec::new();
    for name in names {
        match context.client.remove_layer(kind, name).await {
            Ok(()) => removed.push(name),
            Err(error) => {
                render::failure(&error.into(), context.global.json);
                code = 1;
            }
        }
    }
    if context.global.json {
        render::json(&serde_json::json!({ "removed": removed }))?;
    } else {
        removed.iter().try_for_each(|name| render::line(name))?;
    }
    Ok(code)
}

async fn import(context: &Context, kind: &str, args: &ImportArgs) -> Outcome {
    let quiet = args.quiet || context.global.json;
    let image = match args.source.to_str().filter(|source| source.starts_with(pull::SCHEME)) {
        Some(reference) => {
            let (request, found) = args.registry.request(reference)?;
            let response = context.client.pull(kind, &args.name, &request).await?;
            let pulled = intake(context, response, &ProgressBar::hidden(), quiet).await;
            pulled.map_err(|failure| found.explain(failure))?
        }
        None => {
            args.registry.refuse()?;
            upload(context, kind, args, quiet).await?
        }
    };
    if context.global.json {
        render::json(&image)?;
    } else if !args.quiet {
        render::line(&summary(&image))?;
    }
    Ok(0)
}

/// An image that has come, for a person.
pub(super) fn summary(image: &Image) -> String {
    let (size, content) = (render::bytes(image.size_bytes), render::bytes(image.content_bytes));
    let digest = short_digest(&image.digest);
    format!("{}: {} files, {content}; {size} on disk, {digest}", image.name, image.files)
}

async fn upload(context: &Context, kind: &str, args: &ImportArgs, quiet: bool) -> Result<Image, Failure> {
    let upload = open(&args.source, kind, quiet)?;
    let (bar, source) = (upload.bar.clone(), args.source.display().to_string());
    let source = if source == "-" { "standard input".to_owned() } else { source };
    let response = context.client.import(kind, &args.name, &source, upload.body, upload.length).await;
    let response = response.inspect_err(|_| bar.finish_and_clear())?;
    intake(context, response, &bar, quiet).await
}

/// Follows an import to its end.
pub(super) async fn intake(
    context: &Context,
    response: reqwest::Response,
    upload: &ProgressBar,
    quiet: bool,
) -> Result<Image, Failure> {
    let mut lines = JsonLines::new(Box::pin(context.client.body(response)));
    let mut intake: Option<ProgressBar> = None;
    while let Some(line) = lines.next().await? {
        let event = serde_json::from_slice::<ImportEvent>(&line);
        if !matches!(event, Ok(ImportEvent::Progress { .. })) {
            upload.finish_and_clear();
            if let Some(bar) = &intake {
                bar.finish_and_clear();
            }
        }
        match event {
            Ok(ImportEvent::Progress { files, bytes, fetched_bytes, fetch_bytes_total }) => {
                // While bytes still go up, the upload's bar says enough.
                if upload.length().is_none_or(|length| upload.position() >= length) {
                    upload.finish_and_clear();
                    let bar = intake.get_or_insert_with(|| progress::spinner("taking in", quiet));
                    let mut message = format!("taking in: {files} files, {}", render::bytes(bytes));
                    if let (Some(fetched), Some(total)) = (fetched_bytes, fetch_bytes_total) {
                        let (fetched, total) = (render::bytes(fetched), render::bytes(total));
                        message.push_str(&format!("; {fetched} of {total} fetched"));
                    }
                    bar.set_message(message);
                }
            }
            Ok(ImportEvent::Done { image }) => return Ok(*image),
            Ok(ImportEvent::Error { error }) => {
                return Err(ClientError::Api(ApiError(Box::new(error))).into());
            }
            // An event of a newer server.
            Err(_) => {}
        }
    }
    upload.finish_and_clear();
    Err(Failure::new("the platform broke the import off without a word")
        .hint("nothing was imported; see its log, and try again"))
}

struct Upload {
    body: reqwest::Body,
    length: Option<u64>,
    bar: ProgressBar,
}

fn open(source: &Path, kind: &str, quiet: bool) -> Result<Upload, Failure> {
    let name = source.display().to_string();
    let failed = |error| Failure::io(format!("cannot read {name}"), &error);
    if source == Path::new("-") {
        let bar = progress::bytes("uploading", None, quiet);
        return Ok(Upload { body: body(pieces_of(std::io::stdin()), bar.clone()), length: None, bar });
    }
    let meta = std::fs::metadata(source).map_err(failed)?;
    if meta.is_dir() {
        let owner = directory_owner(source, kind)?;
        let bar = progress::bytes("uploading", None, quiet);
        return Ok(Upload { body: body(tar_of(source.to_owned(), owner), bar.clone()), length: None, bar });
    }
    let length = meta.is_file().then_some(meta.len());
    let file = File::open(source).map_err(failed)?.take(length.unwrap_or(u64::MAX));
    let bar = progress::bytes("uploading", length, quiet);
    Ok(Upload { body: body(pieces_of(file), bar.clone()), length, bar })
}

/// Whose the files in a directory's tar are: in a root file system as they are, elsewhere root's. Refuses a directory that
/// is no image where it has to be one.
fn directory_owner(dir: &Path, kind: &str) -> Result<Owner, Failure> {
    if kind != LAYER_BASE || dir.join("oci-layout").exists() {
        return Ok(Owner::Root);
    }
    if ["bin", "usr", "etc"].iter().any(|name| dir.join(name).is_dir()) {
        return Ok(Owner::Kept);
    }
    Err(Failure::new(format!("{} is neither an OCI layout nor a root file system", dir.display()))
        .hint("an OCI layout has a file `oci-layout`; a root file system has `bin`, `usr` or `etc`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_taken_for_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        assert!(directory_owner(dir.path(), LAYER_BASE).unwrap_err().message.contains("neither"));
        assert_eq!(directory_owner(dir.path(), "toolkit"), Ok(Owner::Root));
        std::fs::create_dir(dir.path().join("usr")).unwrap();
        assert_eq!(directory_owner(dir.path(), LAYER_BASE), Ok(Owner::Kept));
        assert_eq!(directory_owner(dir.path(), "workspace"), Ok(Owner::Root));
        std::fs::write(dir.path().join("oci-layout"), "{}").unwrap();
        assert_eq!(directory_owner(dir.path(), LAYER_BASE), Ok(Owner::Root));
    }

    #[test]
    fn a_digest_is_shortened_after_its_algorithm() {
        assert_eq!(short_digest("sha256:0123456789abcdef"), "0123456789ab");
        assert_eq!(short_digest("xyz"), "xyz");
    }
}
