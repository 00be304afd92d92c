//! Recipes as TOML.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use crate::recipe::{
    Action, Base, Command, Recipe, RecipeError, Step, check_name, check_source, joined, mode,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    base: String,
    #[serde(default)]
    env: BTreeMap<String, String>,
    working_dir: Option<String>,
    user: Option<String>,
    #[serde(default)]
    step: Vec<Spanned<Written>>,
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

/// Reads a recipe that is written as TOML. `base` is what the image that it begins with says of itself: where that is not known yet, a
/// reading without it says which image it is.
///
/// # Errors
/// It is not valid; a key is unknown, or a value cannot be.
pub fn from_toml(text: &str, base: &Base) -> Result<Recipe, RecipeError> {
    let line_of = |at: usize| text.get(..at).unwrap_or(text).matches('\n').count() + 1;
    let file: File = toml::from_str(text).map_err(|error| {
        RecipeError::new(error.span().map_or(0, |span| line_of(span.start)), error.message().trim())
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
        let line = line_of(written.span().start);
        let wrong = |what| RecipeError::new(line, format!("step {}: {what}", number + 1));
        let step = step(&recipe, base, line, written.into_inner()).map_err(wrong)?;
        recipe.steps.push(step);
    }
    Ok(recipe)
}

fn step(recipe: &Recipe, base: &Base, line: usize, written: Written) -> Result<Step, String> {
    let Written { run, packages, copy, env, working_dir, user } = written;
    env.keys().try_for_each(|name| check_name(name))?;
    let above = recipe.working_dir.as_deref().or(base.working_dir.as_deref());
    let working_dir = match working_dir {
        Some(dir) => Some(joined(above, &dir)),
        None => recipe.working_dir.clone(),
    };
    let mut user = user.or_else(|| recipe.user.clone());
    let (text, action) = match (run, packages, copy) {
        (Some(Run::Shell(line)), None, None) => (format!("run {line}"), Action::Run(Command::Shell(line))),
        (Some(Run::Argv(argv)), None, None) if !argv.is_empty() => {
            (format!("run {}", argv.join(" ")), Action::Run(Command::Argv(argv)))
        }
        (None, Some(packages), None) => {
            user = Some("root".to_owned());
            (format!("packages {}", packages.join(" ")), Action::Run(Command::Shell(install(&packages)?)))
        }
        (None, None, Some(copy)) => {
            if !env.is_empty() || user != recipe.user {
                return Err("a step with copy has neither env nor user; copy has an owner".to_owned());
            }
            let (text, action) = copied(copy, working_dir.as_deref().or(above))?;
            return Ok(Step { line, text, env: BTreeMap::new(), working_dir: None, user: None, action });
        }
        _ => return Err("a step has one of run (not empty), packages and copy".to_owned()),
    };
    let mut all = recipe.env.clone();
    all.extend(env);
    Ok(Step { line, text, env: all, working_dir, user, action })
}

fn copied(copy: Copy, working_dir: Option<&str>) -> Result<(String, Action), String> {
    let from = match copy.from {
        OneOrMore::One(path) => vec![path],
        OneOrMore::More(paths) => paths,
    };
    if from.is_empty() || copy.to.is_empty() {
        return Err("copy has nothing in from, or an empty to".to_owned());
    }
    from.iter().try_for_each(|path| check_source(path))?;
    let mode = copy.mode.as_deref().map(mode).transpose()?;
    let text = format!("copy {} to {}", from.join(" "), copy.to);
    Ok((text, Action::Copy { from, to: joined(working_dir, &copy.to), owner: copy.owner, mode }))
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
        "set -e; trap '[ $? = 0 ] || echo \"packages: sandboxes have no network, so packages and their lists must be \
         in the base or copied into it\" >&2' EXIT; \
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
        let recipe = from_toml(RECIPE, &Base::default()).unwrap();
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
        let lines: Vec<_> = recipe.steps.iter().map(|step| (step.line, step.text.as_str())).collect();
        let wanted = [
            (7, "packages git curl git"),
            (10, "copy src/ setup.py to app/"),
            (13, "run pip install ."),
            (18, "run /usr/bin/true a b"),
        ];
        assert_eq!(lines, wanted);
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
            ("base = \"a\"\n\n[[step]]", "line 3: step 1: a step has one of"),
            ("base = \"a\"\n[[step]]\nrun = []", "step 1"),
            ("base = \"a\"\n[[step]]\nrun = \"x\"\n[[step]]\nrun = \"x\"\npackages = [\"y\"]", "step 2"),
            ("base = \"a\"\n[[step]]\npackages = [\"a; rm -rf /\"]", "no name of a package"),
            ("base = \"a\"\n[[step]]\npackages = [\"-o\"]", "no name of a package"),
            (
                "base = \"a\"\n[[step]]\ncopy = { from = \"x\", to = \"/\" }\nuser = \"u\"",
                "copy has an owner",
            ),
            (
                "base = \"a\"\n[[step]]\ncopy = { from = \"../x\", to = \"/\" }",
                "below the recipe's directory",
            ),
            ("base = \"a\"\n[[step]]\ncopy = { from = \"/x\", to = \"/\" }", "below the recipe's directory"),
            ("base = \"a\"\n[[step]]\ncopy = { from = \"x\", to = \"/\", mode = \"9\" }", "no mode"),
        ] {
            let error = from_toml(text, &Base::default()).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
