//! `GET /v1/counts`: how many sandboxes there are, by what they are and where.

use std::collections::BTreeMap;

use axum::extract::Query;
use dsec_model::iam::ProjectPath;
use dsec_model::{ErrorKind, NodeId, TaskId};
use dsec_proto::rest::{COUNTED_MAX, Counts, NodeCounts, NodeKnown, StateCounts};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Call;
use super::lists::partial;
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::records::Meant;

/// Query of the counts.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct CountsQuery {
    /// Only those of this project and of all that are in it.
    #[param(value_type = Option<String>)]
    project: Option<ProjectPath>,
    /// Only those of this job.
    #[param(value_type = Option<String>)]
    task_id: Option<TaskId>,
    /// Only those of this node.
    #[param(value_type = Option<String>)]
    node: Option<NodeId>,
}

/// How many sandboxes there are, by state, backend, node, project and task.
///
/// As this server knows them: while a node is well, no more than some seconds old. After a start of the server it is said which nodes
/// have not told yet.
#[utoipa::path(get, path = "/v1/counts", operation_id = "counts", tag = "sandboxes",
    params(CountsQuery),
    responses((status = 200, description = "The sandboxes that the caller sees.", body = Counts)))]
pub async fn get(call: Call) -> Reply {
    let query = Query::<CountsQuery>::try_from_uri(call.request.uri());
    let Query(CountsQuery { project, task_id, node }) = query.map_err(|rejection| {
        let why =
            std::error::Error::source(&rejection).map_or_else(|| rejection.to_string(), ToString::to_string);
        Failure::new(ErrorKind::InvalidArgument, format!("the query is not valid: {why}"))
    })?;
    let may = call.behalf.may.clone();
    let scope = match &project {
        Some(project) => may.in_project(project),
        None => may,
    };
    let counts = count(&call.app, node.as_ref(), &Meant { task: task_id, scope }).await;
    partial(&counts, &[])
}

async fn count(app: &App, only: Option<&NodeId>, meant: &Meant) -> Counts {
    let mut counts = Counts::default();
    for (at, node) in app.nodes.placed() {
        if only.is_some_and(|only| only != node.name()) {
            continue;
        }
        let (standing, name) = (app.nodes.watched.standing(at), node.name().to_string());
        let known = app.nodes.records.known(at);
        let mut of_node = StateCounts::default();
        for (owner, states) in app.nodes.records.counts(at, standing, meant).unwrap_or_default() {
            of_node += states;
            *counts.backends.entry(owner.backend.clone()).or_default() += states;
            *counts.projects.entry(owner.project.to_string()).or_default() += states;
            if let Some(task) = &owner.task_id {
                *counts.tasks.entry(task.to_string()).or_default() += states;
            }
        }
        counts.sandboxes += of_node;
        counts.gathering |= known == NodeKnown::Gathering && !standing.is_lost();
        if known != NodeKnown::Counted {
            counts.uncounted.push(name.clone());
        }
        let health = standing.health;
        counts
            .nodes
            .insert(name, NodeCounts { health, known, heard_ms: standing.heard_ms, sandboxes: of_node });
        // A node has thousands, and there may be hundreds of nodes.
        tokio::task::yield_now().await;
    }
    counts.uncounted.sort_unstable();
    counts.left_out = keep_most(&mut counts.projects) + keep_most(&mut counts.tasks);
    counts
}

/// Leaves of groups those that have most. Returns how many were taken out.
fn keep_most(groups: &mut BTreeMap<String, StateCounts>) -> u64 {
    let Some(surplus) = groups.len().checked_sub(COUNTED_MAX).filter(|surplus| *surplus > 0) else {
        return 0;
    };
    let mut all: Vec<(String, StateCounts)> = std::mem::take(groups).into_iter().collect();
    all.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.all()));
    groups.extend(all.into_iter().take(COUNTED_MAX));
    surplus as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_groups_those_stay_that_have_most() {
        let counts = |running| StateCounts { running, ..StateCounts::default() };
        let mut groups: BTreeMap<String, StateCounts> =
            (0..COUNTED_MAX + 7).map(|number| (format!("t{number}"), counts(number as u64))).collect();
        assert_eq!(keep_most(&mut groups), 7);
        assert_eq!(
            (groups.len(), groups.contains_key("t6"), groups.contains_key("t7")),
            (COUNTED_MAX, false, true)
        );
        assert_eq!(keep_most(&mut groups), 0);
    }
}
