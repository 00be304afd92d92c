//! The text of a recipe, and the image that it begins with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dsec_model::ErrorKind;
use dsec_proto::rest::{Image, LAYER_BASE};
use dsec_recipe::{Arguments, Base, Recipe, from_dockerfile, from_toml};
use indicatif::ProgressBar;

use super::BuildArgs;
use crate::commands::image::intake;
use crate::commands::{Context, pull};
use crate::failure::Failure;

/// Names of recipes, in the order in which they are looked for.
const USUAL: [&str; 2] = ["recipe.toml", "Dockerfile"];
/// Where images from registries are kept that recipes begin with.
const PULLED: &str = "registry/";
/// The tag or digest of a reference that has neither.
const TAG: &str = "latest";

/// A recipe as it is written.
pub(super) struct Written {
    file: PathBuf,
    text: String,
    arguments: Arguments,
}

impl Written {
    /// Reads the recipe that is named, or the one that a directory has.
    pub(super) fn read(args: &BuildArgs) -> Result<Self, Failure> {
        let file = match &args.file {
            Some(file) => file.clone(),
            None => find(&args.dir)?,
        };
        let text = std::fs::read_to_string(&file)
            .map_err(|error| Failure::io(format!("cannot read {}", file.display()), &error))?;
        let written = Self { file, text, arguments: args.build_arg.iter().cloned().collect() };
        if written.is_toml() && !written.arguments.is_empty() {
            return Err(Failure::usage("--build-arg is for a Dockerfile; a TOML recipe has no ARG"));
        }
        Ok(written)
    }

    fn is_toml(&self) -> bool {
        self.file.extension().is_some_and(|extension| extension == "toml")
    }

    /// What it says, over what its base says of itself.
    pub(super) fn recipe(&self, base: &Base) -> Result<Recipe, Failure> {
        let read = match self.is_toml() {
            true => from_toml(&self.text, base),
            false => from_dockerfile(&self.text, &self.arguments, base),
        };
        read.map_err(|error| Failure::usage(format!("{}: {error}", self.file.display())))
    }

    /// How its lines are called.
    pub(super) fn line(&self, number: usize) -> String {
        format!("{}:{number}", self.file.display())
    }
}

fn find(dir: &Path) -> Result<PathBuf, Failure> {
    let there: Vec<PathBuf> =
        USUAL.iter().map(|name| dir.join(name)).filter(|path| path.symlink_metadata().is_ok()).collect();
    match &there[..] {
        [file] => Ok(file.clone()),
        [] => Err(Failure {
            kind: ErrorKind::NotFound,
            ..Failure::new(format!("{} has no {} and no {}", dir.display(), USUAL[0], USUAL[1]))
        }
        .hint("name the recipe with -f")),
        _ => Err(Failure::usage(format!("{} has both {} and {}", dir.display(), USUAL[0], USUAL[1]))
            .hint("name one of them with -f")),
    }
}

/// The image that a recipe begins with: of the platform, or from a registry by way of it.
pub(super) async fn base(context: &Context, args: &BuildArgs, name: &str) -> Result<Image, Failure> {
    if !name.starts_with(pull::SCHEME) {
        args.registry.refuse()?;
        return context.client.layer(LAYER_BASE, name).await.map_err(|error| {
            let is_missing = error.kind() == Some(ErrorKind::NotFound);
            let failure = Failure::from(error);
            match is_missing {
                true => failure.hint(format!(
                    "`dsec image ls` lists the images; `dsec image import {name} docker://HOST/...` brings it in"
                )),
                false => failure,
            }
        });
    }
    let kept = kept_as(name);
    if !args.pull {
        match context.client.layer(LAYER_BASE, &kept).await {
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => {}
            found => return Ok(found?),
        }
    }
    let (request, looked) = args.registry.request(name)?;
    let response = context.client.pull(LAYER_BASE, &kept, &request).await?;
    let pulled = intake(context, response, &ProgressBar::hidden(), args.quiet || context.global.json).await;
    pulled.map_err(|failure| looked.explain(failure))
}

/// What an image of a registry is called here: `registry/HOST/REPOSITORY:TAG`, and by its digest as a version.
fn kept_as(reference: &str) -> String {
    let rest = reference.trim_start_matches(pull::SCHEME);
    let (path, select) = match rest.split_once('@') {
        Some((path, digest)) => (path, format!("@{}", digest.replace(':', "-"))),
        None => match rest.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
            Some((path, tag)) => (path, format!(":{tag}")),
            None => (rest, format!(":{TAG}")),
        },
    };
    // A digest says more than a tag beside it.
    let path = match (path.rsplit_once(':'), select.starts_with('@')) {
        (Some((path, tag)), true) if !tag.contains('/') => path,
        _ => path,
    };
    // A port's colon, and what else a host may have and no name has.
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._-/".contains(c) { c } else { '-' };
    let path: String = path.to_ascii_lowercase().chars().map(fits).collect();
    format!("{PULLED}{}{select}", path.trim_start_matches('-'))
}

/// What an image says of itself, as recipes count it in.
pub(super) fn facts(image: &Image) -> Base {
    let env: BTreeMap<String, String> = image
        .env
        .iter()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    Base { env, working_dir: image.working_dir.clone().filter(|dir| !dir.is_empty()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_of_a_registry_has_a_name_of_the_platform() {
        for (reference, wanted) in [
            ("docker://registry.example/team/app:1.2", "registry/registry.example/team/app:1.2"),
            ("docker://localhost:5000/app", "registry/localhost-5000/app:latest"),
            ("docker://[::1]:5000/app:x", "registry/1--5000/app:x"),
            ("docker://h/app@sha256:0a", "registry/h/app@sha256-0a"),
            ("docker://h:1/app:2@sha256:0a", "registry/h-1/app@sha256-0a"),
        ] {
            assert_eq!(kept_as(reference), wanted);
        }
    }

    #[test]
    fn a_directory_has_one_recipe() {
        let dir = tempfile::tempdir().unwrap();
        assert!(find(dir.path()).unwrap_err().message.contains("no recipe.toml and no Dockerfile"));
        std::fs::write(dir.path().join("Dockerfile"), "").unwrap();
        assert_eq!(find(dir.path()).unwrap(), dir.path().join("Dockerfile"));
        std::fs::write(dir.path().join("recipe.toml"), "").unwrap();
        assert!(find(dir.path()).unwrap_err().hint.contains("-f"));
    }
}
