//! What a list of sandboxes is asked with. Control and nodes read it alike.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use dsec_model::iam::ProjectPath;
use dsec_model::{ErrorKind, IdError, SandboxId, State, TaskId};
use serde_json::json;

use super::{ApiError, PAGE_DEFAULT, PAGE_MAX, Sandbox};

/// Which sandboxes a list is of, and which page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxFilter {
    /// Any of these states; empty: every state.
    pub states: Vec<State>,
    /// Of this task.
    pub task: Option<TaskId>,
    /// Of this project and of all that are in it.
    pub project: Option<ProjectPath>,
    /// With all of these labels.
    pub labels: Vec<(String, String)>,
    /// At most so many; none: the default.
    pub limit: Option<usize>,
    /// Those after this one.
    pub cursor: Option<Position>,
    /// With what each uses now.
    pub usage: bool,
    /// With what of their layers' content is on the node.
    pub content: bool,
}

/// A place in the order of lists: the newest first, those of one millisecond by their ids. As text `MILLISECONDS.ID`, which is what a
/// `next_cursor` is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(pub Reverse<u64>, pub SandboxId);

impl Position {
    /// Of a sandbox.
    pub fn of(sandbox: &Sandbox) -> Self {
        Self(Reverse(sandbox.created_ms), sandbox.id.clone())
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(Reverse(created_ms), id) = self;
        write!(f, "{created_ms}.{id}")
    }
}

/// What of a sandbox a filter looks at.
#[derive(Debug, Clone, Copy)]
pub struct Filtered<'a> {
    /// Its state.
    pub state: State,
    /// Its task.
    pub task: Option<&'a TaskId>,
    /// Its project.
    pub project: &'a ProjectPath,
}

impl SandboxFilter {
    /// Takes the pairs of a query, decoded.
    ///
    /// # Errors
    /// A parameter is not one of a list's, or its value is none that it takes.
    pub fn of(pairs: impl IntoIterator<Item = (String, String)>) -> Result<Self, ApiError> {
        let mut filter = Self::default();
        for (key, value) in pairs {
            match key.as_str() {
                "state" => filter.states.push(parse_state("state", &value)?),
                "task_id" => {
                    filter.task =
                        Some(value.parse().map_err(|error: IdError| invalid("task_id", error.to_string()))?);
                }
                "project" => {
                    let project = value.parse().map_err(|error: dsec_model::iam::ProjectError| {
                        invalid("project", error.to_string())
                    })?;
                    filter.project = Some(project);
                }
                "label" => {
                    let pair = value.split_once('=').ok_or_else(|| {
                        invalid("label", format!("label is {value:?}; it must look like key=value"))
                    })?;
                    filter.labels.push((pair.0.to_owned(), pair.1.to_owned()));
                }
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=PAGE_MAX).contains(limit));
                    filter.limit = Some(limit.ok_or_else(|| {
                        invalid("limit", format!("limit is {value:?}; it must be 1 to {PAGE_MAX}"))
                            .detail(json!({ "field": "limit", "min": 1, "max": PAGE_MAX }))
                    })?);
                }
                "cursor" => {
                    let position = value.split_once('.').and_then(|(created_ms, id)| {
                        Some(Position(Reverse(created_ms.parse().ok()?), id.parse().ok()?))
                    });
                    filter.cursor = Some(position.ok_or_else(|| {
                        invalid("cursor", format!("cursor is {value:?}; give a next_cursor as it came"))
                    })?);
                }
                "usage" => filter.usage = parse_flag("usage", &value)?,
                "content" => filter.content = parse_flag("content", &value)?,
                other => {
                    let message = format!("the query has no parameter {other:?}");
                    return Err(invalid(other, message));
                }
            }
        }
        Ok(filter)
    }

    /// The same as pairs of a query, not encoded, for a page after `cursor` of at most `limit`.
    pub fn pairs(&self, cursor: Option<&Position>, limit: usize) -> Vec<(&'static str, String)> {
        let mut pairs: Vec<(&'static str, String)> =
            self.states.iter().map(|state| ("state", state.as_str().to_owned())).collect();
        pairs.extend(self.task.iter().map(|task| ("task_id", task.to_string())));
        pairs.extend(self.project.iter().map(|project| ("project", project.to_string())));
        pairs.extend(self.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
        pairs.extend(cursor.map(|cursor| ("cursor", cursor.to_string())));
        pairs.push(("limit", limit.to_string()));
        pairs.extend(self.usage.then(|| ("usage", "true".to_owned())));
        pairs.extend(self.content.then(|| ("content", "true".to_owned())));
        pairs
    }

    /// Most sandboxes of a page.
    pub fn limit(&self) -> usize {
        self.limit.unwrap_or(PAGE_DEFAULT)
    }

    /// Whether a sandbox is asked for, labels and page aside.
    pub fn takes(&self, it: Filtered<'_>) -> bool {
        (self.states.is_empty() || self.states.contains(&it.state))
            && self.task.as_ref().is_none_or(|task| it.task == Some(task))
            && self.project.as_ref().is_none_or(|project| it.project.is_within(project))
    }

    /// Whether its labels are asked for.
    pub fn takes_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// Whether a record is asked for, the page aside.
    pub fn takes_record(&self, sandbox: &Sandbox) -> bool {
        let Sandbox { state, ref project, ref task_id, ref labels, .. } = *sandbox;
        self.takes(Filtered { state, task: task_id.as_ref(), project }) && self.takes_labels(labels)
    }

    /// Whether a record is asked for and comes after the cursor.
    pub fn takes_after_cursor(&self, sandbox: &Sandbox) -> bool {
        let is_after = |cursor: &Position| (Reverse(sandbox.created_ms), &sandbox.id) > (cursor.0, &cursor.1);
        self.takes_record(sandbox) && self.cursor.as_ref().is_none_or(is_after)
    }
}

/// The word of a state, in the parameter `field`.
///
/// # Errors
/// It is none.
pub fn parse_state(field: &str, text: &str) -> Result<State, ApiError> {
    serde_json::from_value(serde_json::Value::String(text.to_owned())).map_err(|_| {
        let words = "creating, running, pausing, paused, resuming, stopping, stopped, failed or lost";
        invalid(field, format!("{field} is {text:?}; it must be {words}"))
    })
}

fn parse_flag(field: &str, text: &str) -> Result<bool, ApiError> {
    text.parse().map_err(|_| invalid(field, format!("{field} is {text:?}; it must be true or false")))
}

fn invalid(field: &str, message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": field }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(pairs: &[(&str, &str)]) -> Result<SandboxFilter, ApiError> {
        SandboxFilter::of(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn a_filter_is_read_as_it_was_written() {
        let pairs = [
            ("state", "running"),
            ("state", "lost"),
            ("task_id", "rl/job-1"),
            ("project", "root/rl"),
            ("label", "a=b=c"),
            ("limit", "7"),
            ("cursor", "12.sb-n1-abc"),
            ("usage", "true"),
        ];
        let first = filter(&pairs).unwrap();
        assert_eq!(first.labels, [("a".to_owned(), "b=c".to_owned())]);
        let written = first.pairs(first.cursor.as_ref(), first.limit());
        let again = SandboxFilter::of(written.into_iter().map(|(key, value)| (key.to_owned(), value)));
        assert_eq!(again.unwrap(), first);
    }

    #[test]
    fn what_a_list_does_not_take_is_refused_by_name() {
        for (key, value) in [
            ("state", "gone"),
            ("task_id", "a b"),
            ("project", "else"),
            ("label", "x"),
            ("limit", "0"),
            ("limit", "1001"),
            ("cursor", "e30"),
            ("usage", "1"),
            ("sort", "id"),
        ] {
            let error = filter(&[(key, value)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(error.0.detail["field"], key, "{value}");
        }
    }
}
