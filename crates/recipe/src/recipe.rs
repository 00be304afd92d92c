//! What a recipe comes to, however it was written.

use std::collections::BTreeMap;

/// A base and what is done over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The image it begins with, by its name on the platform or as `docker://HOST/...`.
    pub base: String,
    /// In order.
    pub steps: Vec<Step>,
    /// Environment that the image has in the end, over its base's.
    pub env: BTreeMap<String, String>,
    /// Its working directory in the end, if the recipe sets one.
    pub working_dir: Option<String>,
    /// Its user in the end, if the recipe sets one.
    pub user: Option<String>,
}

/// What an image says of itself and a recipe over it builds on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Base {
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Its working directory, if it sets one.
    pub working_dir: Option<String>,
}

/// One thing that is done, and a layer is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The line of the text that it begins on, from 1.
    pub line: usize,
    /// It as it is written, for people: one line.
    pub text: String,
    /// Environment of a command, over the base's.
    pub env: BTreeMap<String, String>,
    /// Directory that a command is run in; none: the base's.
    pub working_dir: Option<String>,
    /// Whom a command is run as; none: the base's user.
    pub user: Option<String>,
    /// What is done.
    pub action: Action,
}

/// What a step does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Runs a command.
    Run(Command),
    /// Copies files of the recipe's directory.
    Copy {
        /// Paths relative to the recipe's directory, without `..`. One that ends in a slash, or is a directory, means what is in it.
        from: Vec<String>,
        /// Where to; a directory if it ends in a slash or there are several.
        to: String,
        /// `user[:group]`, by name or number; none: root.
        owner: Option<String>,
        /// Permissions of files; directories may be searched by whoever may read them. None: as they are.
        mode: Option<u32>,
    },
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A line for `/bin/sh -c`.
    Shell(String),
    /// A program and its arguments.
    Argv(Vec<String>),
}

/// Why a text is no recipe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{what}", at(*.line))]
pub struct RecipeError {
    /// The line, from 1; 0 where it is none in particular.
    pub line: usize,
    /// What is wrong, and what to do.
    pub what: String,
}

impl RecipeError {
    pub(crate) fn new(line: usize, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

fn at(line: usize) -> String {
    if line == 0 { String::new() } else { format!("line {line}: ") }
}

/// Checks a path of the recipe's directory: what is outside is nobody's to copy.
pub(crate) fn check_source(path: &str) -> Result<(), String> {
    let is_inside = !path.is_empty() && !path.starts_with('/') && !path.split('/').any(|part| part == "..");
    if is_inside {
        return Ok(());
    }
    Err(format!("{path:?} is not a path below the recipe's directory; copy what is needed into it"))
}

/// A directory as it is after `to`, which may be relative.
pub(crate) fn joined(dir: Option<&str>, to: &str) -> String {
    if to.starts_with('/') {
        return to.to_owned();
    }
    format!("{}/{to}", dir.unwrap_or("/").trim_end_matches('/'))
}

/// Octal digits as permissions.
pub(crate) fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 && text.bytes().all(|digit| digit.is_ascii_digit()) => Ok(mode),
        _ => Err(format!("{text:?} is no mode; it is octal digits such as 755")),
    }
}

/// A name that an environment can have.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    if first && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Ok(());
    }
    Err(format!("{name:?} is no name of a variable"))
}
