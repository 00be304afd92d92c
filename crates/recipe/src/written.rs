//! Recipes as TOML.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::recipe::{Action, Command, Recipe, RecipeError, Step, check_name, check_source, joined, mode};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    base: String,
    #[serde(default)]
    env: BTreeMap<String, String>,
    working_dir: Option<String>,
    user: Option<String>,
    #[serde(default)]
    step: Vec<Written>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    run: Option<Run>,
    packages: Option<Vec<String>>,
    copy: Option<Copy>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    working_dir: Option<String>,
    user: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Run {
    Shell(String),
    Argv(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Copy {
    from: OneOrMore,
    to: String,
    owner: Option<String>,
    mode: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// Reads a recipe that is written as TOML.
///
/// # Errors
/// It is not valid; a key is unknown, or a value cannot be.
pub fn from_toml(text: &str) -> Result<Recipe, RecipeError> {
    let file: File = toml::from_str(text).map_err(|error| {
        let line =
            error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        RecipeError::new(line, error.message().trim())
    })?;
    let refuse = |what: String| RecipeError::new(0, what);
    if file.base.is_empty() {
        return Err(refuse("base is empty; name an image".to_owned()));
    }
    file.env.keys().try_for_each(|name| check_name(name)).map_err(refuse)?;
    if file.working_dir.as_ref().is_some_and(|dir| !dir.starts_with('/')) {
        return Err(refuse("working_dir is not absolute".to_owned()));
    }
    let mut recipe = Recipe {
        base: file.base,
        steps: Vec::new(),
        env: file.env,
        working_dir: file.working_dir,
        user: file.user,
    };
    for (number, written) in file.step.into_iter().enumerate() {
        let step = step(&recipe, written).map_err(|what| refuse(format!("step {}: {what}", number + 1)))?;
        recipe.steps.push(step);
    }
    Ok(recipe)
}

fn step(recipe: &Recipe, written: Written) -> Result<Step, String> {
    let Written { run, packages, copy, env, working_dir, user } = written;
    env.keys().try_for_each(|name| check_name(name))?;
    let working_dir = match working_dir {
        Some(dir) => Some(joined(recipe.working_dir.as_deref(), &dir)),
        None => recipe.working_dir.clone(),
    };
    let mut all = recipe.env.clone();
    all.extend(env);
    let mut user = user.or_else(|| recipe.user.clone());
    let action = match (run, packages, copy) {
        (Some(Run::Shell(line)), None, None) => Action::Run(Command::Shell(line)),
        (Some(Run::Argv(argv)), None, None) if !argv.is_empty() => Action::Run(Command::Argv(argv)),
        (None, Some(packages), None) => {
            user = Some("root".to_owned());
            Action::Run(Command::Shell(install(&packages)?))
        }
        (None, None, Some(copy)) => copied(copy, working_dir.as_deref())?,
        _ => return Err("a step has one of run (not empty), packages and copy".to_owned()),
    };
    Ok(Step { line: 0, env: all, working_dir, user, action })
}

fn copied(copy: Copy, working_dir: Option<&str>) -> Result<Action, String> {
    let from = match copy.from {
        OneOrMore::One(path) => vec![path],
        OneOrMore::More(paths) => paths,
    };
    if from.is_empty() || copy.to.is_empty() {
        return Err("copy has nothing in from, or an empty to".to_owned());
    }
    from.iter().try_for_each(|path| check_source(path))?;
    let mode = copy.mode.as_deref().map(mode).transpose()?;
    Ok(Action::Copy { from, to: joined(working_dir, &copy.to), owner: copy.owner, mode })
}

/// A line that installs packages with what the base has, and leaves no lists or archives of it behind.
fn install(packages: &[String]) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"+-._:=~@/".contains(&byte);
    for name in packages {
        if name.starts_with('-') || name.is_empty() || !name.bytes().all(fits) {
            return Err(format!("{name:?} is no name of a package"));
        }
    }
    if packages.is_empty() {
        return Err("packages is empty".to_owned());
    }
    let mut names = packages.to_vec();
    names.sort_unstable();
    names.dedup();
    let names = names.join(" ");
    Ok(format!(
        "set -e; \
         if command -v apt-get >/dev/null; then export DEBIAN_FRONTEND=noninteractive; apt-get update -qq; \
         apt-get install -y -qq --no-install-recommends {names}; apt-get clean; rm -rf /var/lib/apt/lists/*; \
         elif command -v apk >/dev/null; then apk add --no-cache {names}; \
         elif command -v dnf >/dev/null; then dnf install -y {names}; dnf clean all; \
         else echo 'the base has none of apt-get, apk and dnf' >&2; exit 1; fi"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: &str = r#"
base = "debian:12"
env = { LANG = "C.UTF-8" }
working_dir = "/work"
user = "build"

[[step]]
packages = ["git", "curl", "git"]

[[step]]
copy = { from = ["src/", "setup.py"], to = "app/", owner = "build", mode = "755" }

[[step]]
run = "pip install ."
working_dir = "app"
env = { PIP_NO_CACHE_DIR = "1" }

[[step]]
run = ["/usr/bin/true", "a b"]
"#;

    #[test]
    fn a_recipe_is_its_steps_in_order() {
        let recipe = from_toml(RECIPE).unwrap();
        assert_eq!((recipe.base.as_str(), recipe.steps.len()), ("debian:12", 4));
        let Action::Run(Command::Shell(line)) = &recipe.steps[0].action else { panic!() };
        assert!(line.contains("--no-install-recommends curl git;"), "{line}");
        assert_eq!(recipe.steps[0].user.as_deref(), Some("root"));
        let copied = Action::Copy {
            from: vec!["src/".to_owned(), "setup.py".to_owned()],
            to: "/work/app/".to_owned(),
            owner: Some("build".to_owned()),
            mode: Some(0o755),
        };
        assert_eq!(recipe.steps[1].action, copied);
        let step = &recipe.steps[2];
        assert_eq!((step.working_dir.as_deref(), step.user.as_deref()), (Some("/work/app"), Some("build")));
        assert_eq!(step.env.keys().collect::<Vec<_>>(), ["LANG", "PIP_NO_CACHE_DIR"]);
        assert_eq!(recipe.env.len(), 1, "a step's own variables are not the image's");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, word) in [
            ("", "base"),
            ("base = \"\"", "base is empty"),
            ("base = \"a\"\nbases = 1", "line 2"),
            ("base = \"a\"\nworking_dir = \"x\"", "absolute"),
            ("base = \"a\"\nenv = { \"A B\" = \"\" }", "A B"),
            ("base = \"a\"\n[[step]]", "step 1: a step has one of"),
            ("base = \"a\"\n[[step]]\nrun = []", "step 1"),
            ("base = \"a\"\n[[step]]\nrun = \"x\"\n[[step]]\nrun = \"x\"\npackages = [\"y\"]", "step 2"),
            ("base = \"a\"\n[[step]]\npackages = [\"a; rm -rf /\"]", "no name of a package"),
            ("base = \"a\"\n[[step]]\npackages = [\"-o\"]", "no name of a package"),
            (
                "base = \"a\"\n[[step]]\ncopy = { from = \"../x\", to = \"/\" }",
                "below the recipe's directory",
            ),
            ("base = \"a\"\n[[step]]\ncopy = { from = \"/x\", to = \"/\" }", "below the recipe's directory"),
            ("base = \"a\"\n[[step]]\ncopy = { from = \"x\", to = \"/\", mode = \"9\" }", "no mode"),
        ] {
            let error = from_toml(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
