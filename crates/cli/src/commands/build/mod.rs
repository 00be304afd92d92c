//! `dsec image build`: an image of a recipe, as any caller of the API could make it.
//!
//! ```text
//! recipe ─► layer of its base ─► a key for each step, one for the image ─► the image is there: name it
//!                                                                   │ no
//!      the last step that is there ─► for each after it: sandbox of base + it, copy or run, pack under its key ─► image
//! ```
//!
//! Each step has a sandbox of its own, so that it has what layers have and nothing else: no process, no `/tmp` of the step before.

mod directory;
mod workbench;
mod written;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use dsec_model::ErrorKind;
use dsec_proto::rest::{BACKEND_CONTAINER, CreateSandboxRequest, Image, ImageSettings, LAYER_BASE};
use dsec_recipe::{Action, Base, Key, Plan, Planned, Recipe, Step, plan};
use serde::Serialize;
use serde_json::json;

use self::directory::{Digest, Directory};
use self::workbench::{Copied, Ran, Workbench};
use self::written::Written;
use super::Context;
use super::image::summary;
use super::pull::RegistryArgs;
use super::signals::{Asked, Signals};
use crate::failure::{EXIT_PIPE, Failure, Outcome};
use crate::{parse, render};

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec image build app                           ./recipe.toml or ./Dockerfile, which copies from .
  dsec image build app:2 src/ -f src/Dockerfile.slim --build-arg VERSION=2
  dsec image build app --no-cache                every step, whatever was built before
  dsec image build app --keep-failed             the sandbox of a step that fails stays, to look into
  dsec image build app --json | jq -r .image.digest

Of a Dockerfile, FROM, ARG, ENV, WORKDIR, USER, RUN and COPY are understood; anything else is refused by its line.
FROM names an image of the platform, or docker://HOST/... Ends with the exit code of the step that failed.";

/// Times that a build begins again when what it stands on has moved or gone meanwhile.
const TRIES: u32 = 3;
/// Times that a name is given when others move its tag at the same moment, and the pause between.
const NAMINGS: u32 = 20;
const NAMING_PAUSE: Duration = Duration::from_millis(50);
/// Idle seconds that end a sandbox whose builder was killed.
const ORPHAN_TTL: u64 = 300;
/// Characters of a step that its heading has.
const HEADING: usize = 100;

/// `dsec image build`.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Name to give the image: NAME, NAME:TAG or NAME@VERSION
    name: String,
    /// Directory of the recipe, which it copies from
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// The recipe: TOML if its name ends in .toml, else a Dockerfile [default: DIR/recipe.toml or DIR/Dockerfile]
    #[arg(long, short = 'f', value_name = "FILE")]
    file: Option<PathBuf>,
    /// A value for an ARG of a Dockerfile; KEY alone takes it from here. May be repeated
    #[arg(long, value_name = "KEY[=VALUE]", value_parser = parse::env_value)]
    build_arg: Vec<(String, String)>,
    /// Do every step, whatever was built before
    #[arg(long)]
    no_cache: bool,
    /// Get a docker:// base from its registry also when it is here
    #[arg(long)]
    pull: bool,
    /// Leave the sandbox of a step that fails, to look into
    #[arg(long)]
    keep_failed: bool,
    /// Memory of a step, as in 512m or 2g
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = parse::size_mib)]
    memory: Option<u64>,
    /// Cores of a step; fractions are allowed
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// What a step may write, as in 10g
    #[arg(long, value_name = "SIZE", value_parser = parse::size_mib)]
    disk: Option<u64>,
    /// No steps, no output, no summary
    #[arg(long, short = 'q')]
    quiet: bool,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Why a build ends without an image.
enum Stop {
    /// It cannot go on.
    Failed(Failure),
    /// A step failed, with this exit code.
    Step(Failure, u8),
    /// We were told to end.
    Told(Asked),
    /// Nobody reads our output.
    ReaderGone,
    /// What it stands on has moved or is gone: what is left is done over what is there now.
    Moved(Failure),
}

impl<E: Into<Failure>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What a build did with a step.
#[derive(Debug, Serialize)]
struct Done<'a> {
    step: usize,
    line: usize,
    text: &'a str,
    key: String,
    cached: bool,
}

/// Builds an image.
pub(crate) async fn build(context: &Context, args: BuildArgs) -> Outcome {
    let mut signals = Signals::new()?;
    let written = Written::read(&args)?;
    let directory = Directory::open(&args.dir)?;
    let mut builder =
        Builder { context, args: &args, written: &written, directory: &directory, signals: &mut signals };
    let mut tries_left = TRIES;
    loop {
        tries_left -= 1;
        match builder.build().await {
            Ok(()) => return Ok(0),
            Err(Stop::Moved(why)) if tries_left == 0 => return Err(why),
            Err(Stop::Moved(why)) => builder.say(&format!("{}; beginning again", why.message)),
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Step(failure, code)) => {
                render::failure(&failure, context.global.json);
                return Ok(code);
            }
            Err(Stop::Told(asked)) => return Ok(asked.exit_code()),
            Err(Stop::ReaderGone) => return Ok(EXIT_PIPE),
        }
    }
}

struct Builder<'a> {
    context: &'a Context,
    args: &'a BuildArgs,
    written: &'a Written,
    directory: &'a Directory,
    signals: &'a mut Signals,
}

/// What is built over.
struct Ground {
    /// Its name as the recipe has it, or as it is kept here.
    name: String,
    image: Image,
}

impl<'a> Builder<'a> {
    async fn build(&mut self) -> Result<(), Stop> {
        let (ground, recipe) = self.recipe().await?;
        let digests = self.digests(&recipe).await?;
        let plan = plan(&recipe, &ground.image.digest, |path| {
            digests.get(path).copied().ok_or_else(|| Failure::new(format!("{path:?} was not looked at")))
        })?;
        let count = plan.steps.len();
        let (image_is_there, cached) = self.cached(&plan).await?;
        for (number, planned) in plan.steps[..cached].iter().enumerate() {
            self.say(&format!("{} cached", heading(number + 1, count, planned.step)));
        }
        if !image_is_there {
            for (number, planned) in plan.steps.iter().enumerate().skip(cached) {
                self.say(&heading(number + 1, count, planned.step));
                let below = number.checked_sub(1).map(|below| &plan.steps[below].key);
                self.step(&ground, number + 1, count, planned, below, &digests).await?;
            }
            self.image(&ground, &recipe, &plan).await?;
        }
        let image = self.name(&plan.image).await?;
        self.tell(&image, &plan, cached)?;
        Ok(())
    }

    /// The base as it is now, and the recipe over it.
    async fn recipe(&mut self) -> Result<(Ground, Recipe), Stop> {
        let (context, args, written) = (self.context, self.args, self.written);
        // A name that is none fails before anything is done for it.
        match self.unless_told(context.client.layer(LAYER_BASE, &args.name)).await? {
            Err(error) if error.kind() != Some(ErrorKind::NotFound) => return Err(error.into()),
            _ => {}
        }
        let name = written.recipe(&Base::default())?.base;
        let image = self.unless_told(written::base(context, args, &name)).await??;
        let recipe = written.recipe(&written::facts(&image))?;
        self.say(&format!("from {}", image.name));
        Ok((Ground { name: image.name.clone(), image }, recipe))
    }

    /// What the paths hold that are copied.
    async fn digests(&mut self, recipe: &Recipe) -> Result<BTreeMap<String, Digest>, Stop> {
        let paths: Vec<String> = recipe
            .steps
            .iter()
            .flat_map(|step| match &step.action {
                Action::Copy { from, .. } => &from[..],
                Action::Run(_) => &[],
            })
            .cloned()
            .collect();
        let directory = self.directory.clone();
        let digests = tokio::task::spawn_blocking(move || {
            paths
                .into_iter()
                .map(|path| {
                    let digest = directory.content(&path)?.digest();
                    Ok((path, digest.map_err(|error| Failure::io("cannot copy", &error))?))
                })
                .collect::<Result<BTreeMap<_, _>, Failure>>()
        });
        let digests = self.unless_told(digests).await?;
        Ok(digests.map_err(|error| Failure::new(format!("the thread that reads files ended: {error}")))??)
    }

    /// Whether the image is there already, and how many steps need not be done.
    async fn cached(&mut self, plan: &Plan<'_>) -> Result<(bool, usize), Stop> {
        if self.args.no_cache {
            return Ok((false, 0));
        }
        if self.is_there(&plan.image).await? {
            return Ok((true, plan.steps.len()));
        }
        for (number, planned) in plan.steps.iter().enumerate().rev() {
            if self.is_there(&planned.key).await? {
                return Ok((false, number + 1));
            }
        }
        Ok((false, 0))
    }

    async fn is_there(&mut self, key: &Key) -> Result<bool, Stop> {
        let context = self.context;
        match self.unless_told(context.client.step(&key.to_string())).await? {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Does one step over the one below it.
    async fn step(
        &mut self,
        ground: &Ground,
        number: usize,
        count: usize,
        planned: &Planned<'_>,
        below: Option<&Key>,
        digests: &BTreeMap<String, Digest>,
    ) -> Result<(), Stop> {
        let bench = self.bench(ground, below, number.to_string()).await?;
        let done = match self.act(&bench, ground, planned.step, digests).await {
            Ok(Ran::Well) => match self.unless_told(bench.pack(&planned.key, None)).await {
                Ok(packed) => packed.map(drop).map_err(Stop::from),
                Err(stop) => Err(stop),
            },
            Ok(Ran::Badly { code, why, output }) => Err(Stop::Step(
                self.failure((code, why, output), &bench, (number, count), planned.step),
                code,
            )),
            Ok(Ran::Told(asked)) => Err(Stop::Told(asked)),
            Ok(Ran::ReaderGone) => Err(Stop::ReaderGone),
            Err(Stop::Failed(failure)) => {
                let line = self.written.line(planned.step.line);
                let message = format!("step {number} of {count} ({line}): {}", failure.message);
                Err(Stop::Failed(Failure { message, ..failure }))
            }
            Err(stop) => Err(stop),
        };
        if matches!(done, Err(Stop::Step(..))) && self.args.keep_failed {
            return done;
        }
        self.end(bench, done).await
    }

    /// What a step says, in its sandbox.
    async fn act(
        &mut self,
        bench: &Workbench<'_>,
        ground: &Ground,
        step: &Step,
        digests: &BTreeMap<String, Digest>,
    ) -> Result<Ran, Stop> {
        match &step.action {
            Action::Run(command) => {
                let of_base = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
                let dir = step.working_dir.clone().or_else(|| of_base(&ground.image.working_dir));
                let user = step.user.clone().or_else(|| of_base(&ground.image.user));
                let place = (dir.as_deref().unwrap_or("/"), user.as_deref().unwrap_or("root"));
                Ok(bench.run(step, command, place, self.is_quiet(), self.signals).await?)
            }
            Action::Copy { from, to, owner, mode } => {
                let content = from
                    .iter()
                    .map(|path| {
                        let digest = digests.get(path).copied().unwrap_or_default();
                        Ok((self.directory.content(path)?, digest))
                    })
                    .collect::<Result<Vec<_>, Failure>>()?;
                let copied = Copied { content, to: to.clone(), owner: owner.clone(), mode: *mode };
                self.unless_told(bench.copy(copied)).await??;
                Ok(Ran::Well)
            }
        }
    }

    /// How a step failed, for a person and for a program.
    fn failure(
        &self,
        (code, why, output): (u8, Option<Failure>, String),
        bench: &Workbench<'_>,
        (number, count): (usize, usize),
        step: &Step,
    ) -> Failure {
        let line = self.written.line(step.line);
        let how =
            why.map_or_else(|| format!("ended with {code}"), |why| format!("did not start: {}", why.message));
        let message = format!("step {number} of {count} ({line}) {how}: {}", shortened(&step.text));
        let mut failure = Failure::usage(message);
        failure.detail = json!({
            "step": number, "line": step.line, "text": step.text, "exit_code": code, "output": output,
        });
        let id = &bench.id;
        if !self.args.keep_failed {
            return failure.hint("--keep-failed leaves its sandbox, to look into");
        }
        failure.detail["sandbox_id"] = json!(id);
        failure.hint(format!("its sandbox is kept: `dsec shell {id}` goes into it, `dsec stop {id}` ends it"))
    }

    /// Makes the image of base and steps.
    async fn image(&mut self, ground: &Ground, recipe: &Recipe, plan: &Plan<'_>) -> Result<(), Stop> {
        let bench = self.bench(ground, plan.steps.last().map(|last| &last.key), "image".to_owned()).await?;
        let config = ImageSettings {
            env: recipe.env.clone(),
            working_dir: recipe.working_dir.clone(),
            user: recipe.user.clone(),
        };
        let making = async {
            if let Some(dir) = &recipe.working_dir {
                bench.make_directory(dir, recipe.user.as_deref()).await?;
            }
            bench.pack(&plan.image, Some(config)).await
        };
        let done = match self.unless_told(making).await {
            Ok(packed) => packed.map(drop).map_err(Stop::from),
            Err(stop) => Err(stop),
        };
        self.end(bench, done).await
    }

    /// A sandbox of the base and what was made over it so far.
    async fn bench(&self, ground: &Ground, below: Option<&Key>, step: String) -> Result<Workbench<'a>, Stop> {
        let name: String = self.args.name.chars().take(128).collect();
        let request = CreateSandboxRequest {
            backend: BACKEND_CONTAINER.to_owned(),
            container_image: ground.name.clone(),
            workspace: below.map(|key| format!("step/{key}")),
            memory_limit_mb: self.args.memory,
            cpu_cores_limit: self.args.cpus,
            disk_limit_mb: self.args.disk,
            ttl_running_stop: (!self.args.keep_failed).then_some(ORPHAN_TTL),
            labels: [("build".to_owned(), name), ("step".to_owned(), step)].into(),
            ..CreateSandboxRequest::default()
        };
        let (bench, of) = match Workbench::make(self.context, &request).await {
            Ok(made) => made,
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => return Err(Stop::Moved(error.into())),
            Err(error) => return Err(error.into()),
        };
        if of == ground.image.digest {
            return Ok(bench);
        }
        let moved = Failure::new(format!("{} is another image since the build began", ground.name));
        self.end(bench, Err(Stop::Moved(moved.hint("build again")))).await
    }

    /// Ends a sandbox, whatever was done in it.
    async fn end<T>(&self, bench: Workbench<'_>, done: Result<T, Stop>) -> Result<T, Stop> {
        match (bench.end().await, done) {
            (Ok(()), done) => done,
            (Err(failure), Ok(_)) => Err(failure.into()),
            (Err(failure), Err(stop)) => {
                render::failure(&failure, self.context.global.json);
                Err(stop)
            }
        }
    }

    /// Gives the image its name. Of several that do so at once, the last has the tag.
    async fn name(&mut self, key: &Key) -> Result<Image, Stop> {
        let (client, key, name) = (&self.context.client, key.to_string(), &self.args.name);
        let mut tries_left = NAMINGS;
        loop {
            tries_left -= 1;
            match self.unless_told(client.name_step(&key, name)).await? {
                Err(error) if error.kind() == Some(ErrorKind::Conflict) && tries_left > 0 => {
                    self.unless_told(tokio::time::sleep(NAMING_PAUSE)).await?;
                }
                Err(error) if error.kind() == Some(ErrorKind::NotFound) => {
                    return Err(Stop::Moved(error.into()));
                }
                named => return Ok(named?),
            }
        }
    }

    fn tell(&self, image: &Image, plan: &Plan<'_>, cached: usize) -> Result<(), Failure> {
        if !self.context.global.json {
            return if self.args.quiet { Ok(()) } else { render::line(&summary(image)) };
        }
        let steps: Vec<_> = plan
            .steps
            .iter()
            .enumerate()
            .map(|(number, Planned { step, key })| Done {
                step: number + 1,
                line: step.line,
                text: &step.text,
                key: key.to_string(),
                cached: number < cached,
            })
            .collect();
        render::json(&json!({ "image": image, "steps": steps }))
    }

    /// What is waited for, unless we are told to end before.
    async fn unless_told<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Stop> {
        tokio::select! {
            asked = self.signals.next() => Err(Stop::Told(asked)),
            done = work => Ok(done),
        }
    }

    fn is_quiet(&self) -> bool {
        self.args.quiet || self.context.global.json
    }

    fn say(&self, text: &str) {
        if !self.is_quiet() {
            render::note(text);
        }
    }
}

/// What a step is announced with.
fn heading(number: usize, count: usize, step: &Step) -> String {
    format!("[{number}/{count}] {}", shortened(&step.text))
}

/// A step's text on one line of no great length.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(HEADING) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_is_one_line() {
        let long = format!("RUN a &&\n\n   b {}", "x".repeat(HEADING));
        let shown = shortened(&long);
        assert!(shown.starts_with("RUN a && b x") && shown.ends_with("..."), "{shown}");
        assert_eq!(shown.chars().count(), HEADING + 3);
        assert_eq!(shortened("COPY a b"), "COPY a b");
    }
}
