//! What of a recipe need not be done again: a key for each step, made of all that its outcome depends on.

use std::collections::BTreeMap;
use std::fmt;

use crate::recipe::{Action, Command, Recipe, Step};

/// Changes when the meaning of keys does, so that nothing made by other rules is taken for the same.
const RULES: &str = "dsec recipe 1";

/// What a step's layer is known by: of the base, the steps before it, and the step itself with what it copies.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A step and what its layer is known by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned<'a> {
    /// The step.
    pub step: &'a Step,
    /// Its key.
    pub key: Key,
}

/// What is to be made, and what each part of it is known by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan<'a> {
    /// The steps in order.
    pub steps: Vec<Planned<'a>>,
    /// Of the image: of all steps, and of what the image says of itself.
    pub image: Key,
}

/// The steps and the image with their keys. `base` is the id of the base's layer, not its name, which may move; `content` gives a digest of what
/// a path of the recipe's directory holds: names, kinds, permissions and bytes, and not the times.
///
/// # Errors
/// Those of `content`.
pub fn plan<'a, E>(
    recipe: &'a Recipe,
    base: &str,
    mut content: impl FnMut(&str) -> Result<[u8; 32], E>,
) -> Result<Plan<'a>, E> {
    let mut key = digest(&[RULES.as_bytes(), base.as_bytes()]);
    let mut planned = Vec::with_capacity(recipe.steps.len());
    for step in &recipe.steps {
        let mut parts = vec![key.to_vec()];
        describe(step, &mut parts);
        if let Action::Copy { from, .. } = &step.action {
            for path in from {
                parts.push(content(path)?.to_vec());
            }
        }
        key = digest(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        planned.push(Planned { step, key: Key(key) });
    }
    let mut parts = vec![key.to_vec(), b"image".to_vec()];
    describe_config(&recipe.env, recipe.working_dir.as_ref(), recipe.user.as_ref(), &mut parts);
    let image = Key(digest(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>()));
    Ok(Plan { steps: planned, image })
}

/// Environment, directory and user.
fn describe_config(
    env: &BTreeMap<String, String>,
    working_dir: Option<&String>,
    user: Option<&String>,
    parts: &mut Vec<Vec<u8>>,
) {
    let mut text = |text: &str| parts.push(text.as_bytes().to_vec());
    text(&env.len().to_string());
    for (name, value) in env {
        text(name);
        text(value);
    }
    text(&optional(working_dir));
    text(&optional(user));
}

/// So that nothing and an empty text differ.
fn optional(value: Option<&String>) -> String {
    value.map_or("-".to_owned(), |value| format!("+{value}"))
}

/// All of a step that its outcome depends on; not the line it is written on, nor how.
fn describe(step: &Step, parts: &mut Vec<Vec<u8>>) {
    let Step { line: _, text: _, env, working_dir, user, action } = step;
    describe_config(env, working_dir.as_ref(), user.as_ref(), parts);
    let mut text = |text: &str| parts.push(text.as_bytes().to_vec());
    match action {
        Action::Run(Command::Shell(line)) => {
            text("shell");
            text(line);
        }
        Action::Run(Command::Argv(argv)) => {
            text("argv");
            argv.iter().for_each(|word| text(word));
        }
        Action::Copy { from, to, owner, mode } => {
            text("copy");
            text(&from.len().to_string());
            from.iter().for_each(|path| text(path));
            text(to);
            text(&optional(owner.as_ref()));
            text(&mode.map_or("-".to_owned(), |mode| format!("{mode:o}")));
        }
    }
}

/// Of several texts, so that where one ends counts.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::dockerfile::{Arguments, from_dockerfile};
    use crate::recipe::Base;

    const TEXT: &str = "FROM a\nENV X=1\nRUN one\nCOPY src /src\nRUN two";

    fn keys(text: &str, base: &str, content: u8) -> Vec<Key> {
        let recipe = from_dockerfile(text, &Arguments::new(), &Base::default()).unwrap();
        let planned = plan(&recipe, base, |_| Ok::<_, Infallible>([content; 32])).unwrap();
        planned.steps.iter().map(|planned| planned.key).chain([planned.image]).collect()
    }

    /// How many steps of another recipe are the same as those of [`TEXT`], from the first on.
    fn same(text: &str, base: &str, content: u8) -> usize {
        keys(TEXT, "id", 1).iter().zip(keys(text, base, content)).take_while(|(a, b)| **a == *b).count()
    }

    #[test]
    fn a_change_counts_from_its_step_on() {
        for (text, wanted) in [
            (TEXT, 4),
            ("# a comment\n\nFROM b\nENV X=1\nRUN one\nCOPY ./src /src\nRUN  two", 4),
            ("FROM a\nENV X=1\nRUN one\nCOPY src /src\nRUN two\nUSER u", 3),
            ("FROM a\nENV X=1\nRUN one\nCOPY src /src\nRUN two\nENV Y=1", 3),
            ("FROM a\nENV X=1\nRUN one\nCOPY src /src\nRUN three", 2),
            ("FROM a\nENV X=1\nRUN one\nCOPY --chmod=755 src /src\nRUN two", 1),
            ("FROM a\nENV X=1\nRUN one\nCOPY src /src\nUSER u\nRUN two", 2),
            ("FROM a\nENV X=1\nRUN one\nCOPY src /src\nWORKDIR /w\nRUN two", 2),
            ("FROM a\nENV X=2\nRUN one\nCOPY src /src\nRUN two", 0),
            ("FROM a\nENV X=1\nRUN one\nRUN two", 1),
            ("FROM a\nENV X=1\nRUN [\"one\"]\nCOPY src /src\nRUN two", 0),
        ] {
            assert_eq!(same(text, "id", 1), wanted, "{text}");
        }
        assert_eq!(same(TEXT, "other", 1), 0, "the base is another layer");
        assert_eq!(same(TEXT, "id", 2), 1, "what is copied has changed");
    }

    #[test]
    fn an_argument_counts_where_commands_see_it() {
        let text = "FROM a\nRUN one\nARG V=1\nRUN two";
        let with = |value: &str| {
            let given: Arguments = [("V".to_owned(), value.to_owned())].into();
            let recipe = from_dockerfile(text, &given, &Base::default()).unwrap();
            let planned = plan(&recipe, "id", |_| Ok::<_, Infallible>([0; 32])).unwrap();
            planned.steps.iter().map(|planned| planned.key).collect::<Vec<_>>()
        };
        assert_eq!(with("1")[0], with("2")[0]);
        assert_ne!(with("1")[1], with("2")[1]);
    }

    #[test]
    fn texts_do_not_run_into_each_other() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_ne!(keys("FROM a\nRUN [\"a\", \"b\"]", "i", 0), keys("FROM a\nRUN [\"a b\"]", "i", 0));
    }
}
