//! The part of Dockerfiles that is understood: FROM, ARG, ENV, WORKDIR, USER, RUN, COPY. Whatever else there is is refused by its
//! name: an image without what a line asked for would be another image.

use std::collections::BTreeMap;

use crate::recipe::{
    Action, Base, Command, Recipe, RecipeError, Step, check_name, check_source, joined, mode,
};
use crate::substitute::substitute;

/// Values of `ARG`s that are given from outside.
pub type Arguments = BTreeMap<String, String>;

/// An instruction on one line, as all of its lines say it together.
struct Instruction<'a> {
    line: usize,
    /// In upper case.
    name: String,
    rest: &'a str,
}

struct Reading<'a> {
    base: &'a Base,
    recipe: Option<Recipe>,
    /// Of ARG: seen by what follows, and by commands, and not in the image.
    arguments: BTreeMap<String, String>,
    /// Of ARG before FROM: seen by FROM, and by an ARG of the same name without a value.
    outer: BTreeMap<String, String>,
}

/// Reads a Dockerfile. `given` are values for its `ARG`s, `base` is what the image that it begins with says of itself: where that is
/// not known yet, a reading without it says which image it is.
///
/// # Errors
/// It is not valid, or has an instruction or an option that is not understood; the line is named.
pub fn from_dockerfile(text: &str, given: &Arguments, base: &Base) -> Result<Recipe, RecipeError> {
    let lines = logical_lines(text);
    let mut reading = Reading { base, recipe: None, arguments: BTreeMap::new(), outer: BTreeMap::new() };
    let mut named = Vec::new();
    for (line, text) in &lines {
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let instruction = Instruction { line: *line, name: name.to_ascii_uppercase(), rest: rest.trim() };
        if instruction.name == "ARG" {
            named.extend(
                instruction
                    .rest
                    .split_whitespace()
                    .filter_map(|word| word.split('=').next())
                    .map(str::to_owned),
            );
        }
        reading.take(&instruction, given).map_err(|what| RecipeError::new(*line, what))?;
    }
    if let Some(name) = given.keys().find(|name| !named.contains(name)) {
        return Err(RecipeError::new(0, format!("no ARG takes the value that is given for {name}")));
    }
    reading.recipe.ok_or_else(|| RecipeError::new(0, "there is no FROM"))
}

/// Lines that end in a backslash with those after them; without comments. Each with the number of its first line.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut whole: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (number, line) in text.lines().enumerate() {
        // Comments and empty lines do not end what goes on.
        if line.trim_start().starts_with('#') || line.trim().is_empty() {
            continue;
        }
        let trimmed = line.trim_end();
        let (part, more) = match trimmed.strip_suffix('\\') {
            Some(part) => (part, true),
            None => (trimmed, false),
        };
        match whole.last_mut().filter(|_| goes_on) {
            Some((_, begun)) => begun.push_str(part),
            None => whole.push((number + 1, part.trim_start().to_owned())),
        }
        goes_on = more;
    }
    whole
}

impl Reading<'_> {
    fn take(&mut self, instruction: &Instruction<'_>, given: &Arguments) -> Result<(), String> {
        let Instruction { line: _, name, rest } = instruction;
        if rest.is_empty() {
            return Err(format!("{name} has nothing after it"));
        }
        match name.as_str() {
            "ARG" => return self.arg(rest, given),
            "FROM" => return self.from(rest),
            _ => {}
        }
        let (vars, base_dir) = (self.vars(), self.base.working_dir.clone());
        let recipe = self.recipe.as_mut().ok_or_else(|| format!("{name} comes before FROM"))?;
        match name.as_str() {
            "ENV" => {
                for (name, value) in pairs(rest)? {
                    recipe.env.insert(name, substitute(&value, &vars)?);
                }
            }
            "WORKDIR" => {
                let dir = recipe.working_dir.as_deref().or(base_dir.as_deref());
                recipe.working_dir = Some(joined(dir, &substitute(rest, &vars)?));
            }
            "USER" => recipe.user = Some(substitute(rest, &vars)?),
            "RUN" => {
                let step = self.step(instruction, Action::Run(command(rest)?))?;
                self.push(step);
            }
            "COPY" => {
                let dir = recipe.working_dir.as_deref().or(base_dir.as_deref());
                let action = copy(rest, dir, &vars)?;
                let step = self.step(instruction, action)?;
                self.push(step);
            }
            other => {
                return Err(format!(
                    "{other} is not understood; FROM, ARG, ENV, WORKDIR, USER, RUN and COPY are: leave it out, or build the \
                     image elsewhere and import it"
                ));
            }
        }
        Ok(())
    }

    /// What is substituted: an ENV hides an ARG of its name, as docker has it.
    fn vars(&self) -> BTreeMap<String, String> {
        let mut vars = self.arguments.clone();
        vars.extend(self.base.env.clone());
        vars.extend(self.recipe.iter().flat_map(|recipe| recipe.env.clone()));
        vars
    }

    /// What a command has over the environment of the base.
    fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.arguments.clone();
        env.retain(|name, _| !self.base.env.contains_key(name));
        env.extend(self.recipe.iter().flat_map(|recipe| recipe.env.clone()));
        env
    }

    fn arg(&mut self, rest: &str, given: &Arguments) -> Result<(), String> {
        for word in rest.split_whitespace() {
            let (name, default) = match word.split_once('=') {
                Some((name, default)) => (name, Some(unquoted(default))),
                None => (word, None),
            };
            check_name(name)?;
            let vars = if self.recipe.is_none() { self.outer.clone() } else { self.vars() };
            let default = default.map(|text| substitute(&text, &vars)).transpose()?;
            let known = if self.recipe.is_none() { None } else { self.outer.get(name).cloned() };
            let value = given.get(name).cloned().or(default).or(known);
            let into = if self.recipe.is_none() { &mut self.outer } else { &mut self.arguments };
            if let Some(value) = value {
                into.insert(name.to_owned(), value);
            }
        }
        Ok(())
    }

    fn from(&mut self, rest: &str) -> Result<(), String> {
        if self.recipe.is_some() {
            return Err(
                "a second FROM: only one stage is understood; build the others by recipes of their own"
                    .to_owned(),
            );
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        let base = match words[..] {
            [option, ..] if option.starts_with("--") => {
                return Err(format!("FROM {option} is not understood; leave it out"));
            }
            [base] => base,
            [base, word, _] if word.eq_ignore_ascii_case("as") => base,
            _ => return Err("FROM has one image after it".to_owned()),
        };
        let base = substitute(base, &self.outer)?;
        if base.is_empty() || base == "scratch" {
            return Err("FROM names no image of the platform".to_owned());
        }
        let (steps, env) = (Vec::new(), BTreeMap::new());
        self.recipe = Some(Recipe { base, steps, env, working_dir: None, user: None });
        Ok(())
    }

    fn step(&self, written: &Instruction<'_>, action: Action) -> Result<Step, String> {
        let recipe = self.recipe.as_ref().ok_or("there is no FROM")?;
        let is_run = matches!(action, Action::Run(_));
        Ok(Step {
            line: written.line,
            text: format!("{} {}", written.name, written.rest),
            env: if is_run { self.env() } else { BTreeMap::new() },
            working_dir: recipe.working_dir.clone().filter(|_| is_run),
            user: recipe.user.clone().filter(|_| is_run),
            action,
        })
    }

    fn push(&mut self, step: Step) {
        if let Some(recipe) = &mut self.recipe {
            recipe.steps.push(step);
        }
    }
}

/// A command, which the shell or the program sees as it is written: variables in it are those of its environment.
fn command(rest: &str) -> Result<Command, String> {
    if let Some(option) = rest.split_whitespace().next().filter(|word| word.starts_with("--")) {
        return Err(format!("RUN {option} is not understood; leave it out"));
    }
    if rest.starts_with("<<") {
        return Err("RUN with a here-document is not understood; write a line, or copy a script and run it"
            .to_owned());
    }
    if !rest.starts_with('[') {
        return Ok(Command::Shell(rest.to_owned()));
    }
    match serde_json::from_str::<Vec<String>>(rest) {
        Ok(argv) if !argv.is_empty() => Ok(Command::Argv(argv)),
        // As docker does: what is no list is a line.
        _ => Ok(Command::Shell(rest.to_owned())),
    }
}

fn copy(rest: &str, working_dir: Option<&str>, vars: &BTreeMap<String, String>) -> Result<Action, String> {
    let (mut owner, mut permissions) = (None, None);
    let mut rest = rest;
    while rest.starts_with("--") {
        let (option, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        match option.split_once('=') {
            Some(("--chown", value)) => owner = Some(owner_of(&substitute(value, vars)?)),
            Some(("--chmod", value)) => permissions = Some(mode(&substitute(value, vars)?)?),
            _ => return Err(format!("COPY {option} is not understood; --chown and --chmod are")),
        }
        rest = after.trim_start();
    }
    if rest.starts_with("<<") {
        return Err("COPY of a here-document is not understood; copy a file".to_owned());
    }
    let words: Vec<String> = match serde_json::from_str::<Vec<String>>(rest) {
        Ok(words) => words,
        Err(_) => rest.split_whitespace().map(str::to_owned).collect(),
    };
    let words = words.iter().map(|word| substitute(word, vars)).collect::<Result<Vec<_>, _>>()?;
    let Some((to, from)) = words.split_last().filter(|(_, from)| !from.is_empty()) else {
        return Err("COPY has one path or more, and then where to".to_owned());
    };
    if from.len() > 1 && !to.ends_with('/') {
        return Err(format!("COPY of several paths goes into a directory: write {to}/"));
    }
    let from: Vec<String> = from
        .iter()
        .map(|path| path.strip_prefix("./").filter(|rest| !rest.is_empty()).unwrap_or(path).to_owned())
        .collect();
    for path in &from {
        check_source(path)?;
        if path.contains(['*', '?', '[']) {
            return Err(format!(
                "{path:?} has wildcards, which are not understood; name files or a directory"
            ));
        }
    }
    Ok(Action::Copy { from, to: joined(working_dir, to), owner, mode: permissions })
}

/// A number alone is the group's too, as docker has it.
fn owner_of(text: &str) -> String {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { format!("{text}:{text}") } else { text.to_owned() }
}

/// `NAME=value ...` with quotes, or `NAME value`.
fn pairs(rest: &str) -> Result<Vec<(String, String)>, String> {
    let first = rest.split_whitespace().next().unwrap_or_default();
    if !first.contains('=') {
        let (name, value) =
            rest.split_once(char::is_whitespace).ok_or_else(|| format!("ENV {rest} has no value"))?;
        check_name(name)?;
        return Ok(vec![(name.to_owned(), value.trim().to_owned())]);
    }
    let mut found = Vec::new();
    let mut words = Vec::new();
    let (mut word, mut quote, mut escaped) = (String::new(), None, false);
    for c in rest.chars() {
        match c {
            _ if escaped => {
                // What substitution needs to see stays.
                if c == '$' {
                    word.push('\\');
                }
                word.push(c);
                escaped = false;
            }
            '\\' if quote != Some('\'') => escaped = true,
            _ if quote == Some(c) => quote = None,
            '\'' | '"' if quote.is_none() => quote = Some(c),
            '$' if quote == Some('\'') => word.push_str("\\$"),
            _ if c.is_whitespace() && quote.is_none() => words.push(std::mem::take(&mut word)),
            _ => word.push(c),
        }
    }
    if quote.is_some() {
        return Err("ENV has a quote without its other".to_owned());
    }
    words.push(word);
    for word in words.iter().filter(|word| !word.is_empty()) {
        let (name, value) = word.split_once('=').ok_or_else(|| format!("ENV {word} has no value"))?;
        check_name(name)?;
        found.push((name.to_owned(), value.to_owned()));
    }
    Ok(found)
}

fn unquoted(text: &str) -> String {
    let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(text).to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Recipe, RecipeError> {
        from_dockerfile(text, &Arguments::new(), &Base::default())
    }

    fn given(name: &str, value: &str) -> Arguments {
        [(name.to_owned(), value.to_owned())].into()
    }

    const DOCKERFILE: &str = r#"# syntax=docker/dockerfile:1
ARG VERSION=12
FROM debian:${VERSION} AS only
ARG VERSION
ARG MIRROR
ENV LANG=C.UTF-8 NOTE="a b" RAW='$LANG' \
    # in between
    BOTH=$LANG:$VERSION
ENV OLD the old way
RUN apt-get update && \

    apt-get install -y git
WORKDIR /work
WORKDIR app
USER build
COPY --chown=build:build --chmod=644 ./src setup.py lib/
RUN ["make", "-j2", "$LANG"]
"#;

    #[test]
    fn a_dockerfile_is_its_steps_with_what_they_see() {
        let recipe = from_dockerfile(DOCKERFILE, &given("MIRROR", "m"), &Base::default()).unwrap();
        assert_eq!((recipe.base.as_str(), recipe.steps.len()), ("debian:12", 3));
        let env: Vec<_> = recipe.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(env, ["BOTH=:12", "LANG=C.UTF-8", "NOTE=a b", "OLD=the old way", "RAW=$LANG"]);
        assert_eq!(
            (recipe.working_dir.as_deref(), recipe.user.as_deref()),
            (Some("/work/app"), Some("build"))
        );
        let first = &recipe.steps[0];
        assert_eq!(
            first.action,
            Action::Run(Command::Shell("apt-get update &&     apt-get install -y git".to_owned()))
        );
        assert_eq!((first.line, first.working_dir.as_deref(), first.user.as_deref()), (10, None, None));
        assert_eq!(first.env.get("MIRROR").map(String::as_str), Some("m"));
        assert!(!recipe.env.contains_key("MIRROR"), "an argument is not the image's");
        let copied = Action::Copy {
            from: vec!["src".to_owned(), "setup.py".to_owned()],
            to: "/work/app/lib/".to_owned(),
            owner: Some("build:build".to_owned()),
            mode: Some(0o644),
        };
        assert_eq!(recipe.steps[1].action, copied);
        let argv = ["make", "-j2", "$LANG"].map(str::to_owned).to_vec();
        assert_eq!(recipe.steps[2].action, Action::Run(Command::Argv(argv)));
        assert_eq!(recipe.steps[2].user.as_deref(), Some("build"));
    }

    #[test]
    fn what_the_base_says_is_there_to_build_on() {
        let base = Base {
            env: [("PATH", "/bin"), ("V", "base")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            working_dir: Some("/srv".to_owned()),
        };
        let text = "FROM i\nARG V=argument\nENV PATH=/opt/bin:$PATH\nCOPY ./ x\nWORKDIR $V\nCOPY --chown=7 a b\nRUN one";
        let recipe = from_dockerfile(text, &Arguments::new(), &base).unwrap();
        assert_eq!(recipe.env["PATH"], "/opt/bin:/bin");
        assert_eq!(recipe.working_dir.as_deref(), Some("/srv/base"), "an ENV hides an ARG");
        let copied = |step: &Step| match &step.action {
            Action::Copy { from, to, owner, .. } => (from[0].clone(), to.clone(), owner.clone()),
            Action::Run(_) => panic!(),
        };
        assert_eq!(copied(&recipe.steps[0]), ("./".to_owned(), "/srv/x".to_owned(), None));
        assert_eq!(
            copied(&recipe.steps[1]),
            ("a".to_owned(), "/srv/base/b".to_owned(), Some("7:7".to_owned()))
        );
        let run = &recipe.steps[2];
        assert_eq!((run.line, run.text.as_str()), (7, "RUN one"));
        assert_eq!(run.env.keys().collect::<Vec<_>>(), ["PATH"], "the base's own is not said again");
    }

    #[test]
    fn arguments_are_given_defaulted_or_nothing() {
        let text = "ARG A=1\nARG B=x$A\nFROM i:$A\nARG A\nARG C=$A$B\nRUN true";
        let env = |recipe: Recipe| recipe.steps[0].env.clone().into_iter().collect::<Vec<_>>();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let recipe = read(text).unwrap();
        assert_eq!(recipe.base, "i:1");
        assert_eq!(env(recipe), [pair("A", "1"), pair("C", "1")]);
        let recipe = from_dockerfile(text, &given("A", "2"), &Base::default()).unwrap();
        assert_eq!(recipe.base, "i:2");
        assert_eq!(env(recipe), [pair("A", "2"), pair("C", "2")]);
        assert!(
            from_dockerfile(text, &given("D", "2"), &Base::default())
                .unwrap_err()
                .what
                .contains("no ARG takes")
        );
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (text, line, word) in [
            ("", 0, "no FROM"),
            ("RUN x", 1, "before FROM"),
            ("FROM a\nFROM b", 2, "one stage"),
            ("FROM --platform=x a", 1, "--platform=x"),
            ("FROM scratch", 1, "no image"),
            ("FROM a b", 1, "one image"),
            ("FROM a\n\nCMD [\"x\"]", 3, "CMD is not understood"),
            ("FROM a\nADD x /", 2, "ADD is not understood"),
            ("FROM a\nRUN --mount=type=cache x", 2, "--mount=type=cache"),
            ("FROM a\nRUN <<EOF\nx\nEOF", 2, "here-document"),
            ("FROM a\nCOPY --from=b x /", 2, "--from=b"),
            ("FROM a\nCOPY x", 2, "where to"),
            ("FROM a\nCOPY x y /z", 2, "/z/"),
            ("FROM a\nCOPY ../x /", 2, "below the recipe's directory"),
            ("FROM a\nCOPY *.py /", 2, "wildcards"),
            ("FROM a\nCOPY <<EOF /x\ny\nEOF", 2, "here-document"),
            ("FROM a\nENV A", 2, "no value"),
            ("FROM a\nENV A='x", 2, "quote"),
            ("FROM a\nENV A=${B:?x}", 2, "not understood"),
            ("FROM a\nUSER", 2, "nothing after"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.line == line && error.what.contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in "(FROM a\n)?((RUN|COPY|ENV|ARG|USER) [a-z$={}\\[\\]'\" \\\\\n-]{0,30}\n){0,4}") {
            let _ = read(&text);
        }
    }
}
