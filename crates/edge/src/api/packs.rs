//! Packing a sandbox: what it wrote becomes a layer.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use dsec_backend::Quiesce;
use dsec_image::build::{ANSWERS, Effect, Rules};
use dsec_image::layer::LayerKind;
use dsec_model::ErrorKind;
use dsec_proto::rest::{self, ApiError, ImageSettings, PackRequest};
use serde_json::json;

use super::{Answer, Caller, Json, PathOf, Shared, json as answer};
use crate::error::{internal, invalid_field};
use crate::layers::{Pack, parse_kind, parse_name, parse_step};
use crate::sandbox::plan::{check_path, check_user};
use crate::sandbox::run::check_env;

/// Most patterns of one request: each is tried at every name.
const PATTERNS_MAX: usize = 256;

pub(super) async fn pack(
    State(node): Shared,
    caller: Caller,
    PathOf(id): PathOf<String>,
    Json(request): Json<PackRequest>,
) -> Answer {
    // One that is paused stands still already, and stays so.
    let sandbox = caller.find(&node, &id)?.look_into()?;
    let kind = parse_kind(&request.kind)?;
    let name = request.name.as_deref().map(parse_name).transpose()?;
    let step = request.step.as_deref().map(parse_step).transpose()?;
    if name.is_none() && step.is_none() {
        return Err(invalid_field(
            "name",
            "name is missing, and so is step: the layer could not be found again",
        )
        .into());
    }
    let config = config(&request, kind)?;
    let rules = rules(&request)?;
    let going_down = || ApiError::new(ErrorKind::Unavailable, "the node is going down and packs nothing");
    // One after the other, of one sandbox and of all: a caller that hangs up here has asked for nothing.
    let own_turn = Arc::clone(&sandbox.handle.packing).lock_owned().await;
    let turn = Arc::clone(&node.layers.packs).acquire_owned().await.map_err(|_| going_down())?;
    if node.is_draining() {
        return Err(going_down().into());
    }
    let asked = Pack {
        kind,
        name,
        step,
        config,
        rules,
        quiesce: match request.quiesce {
            rest::Quiesce::Freeze => Quiesce::StandStill,
            rest::Quiesce::Refuse => Quiesce::WriteNothing,
            rest::Quiesce::None => Quiesce::GoOn,
        },
        still_max: node.config.still_max,
        sandbox: sandbox.handle.record(),
        project: caller.project.to_string(),
        state_dir: node.config.state_dir.clone(),
    };
    // From here it goes to its end, with or without its caller; a node that goes down waits for it.
    let tasks = node.tasks.clone();
    let packing = tasks.spawn_blocking(move || {
        let _turns = (own_turn, turn);
        let packed = node.layers.pack(&asked, &sandbox.grip, &|| node.is_draining());
        if let Ok(packed) = &packed {
            let layer = &packed.layer;
            let detail = json!({ "kind": layer.kind, "name": layer.name, "layer": layer.digest, "stored_bytes": packed.stored_bytes });
            sandbox.handle.events.push("packed", detail);
            tracing::info!(sandbox_id = %sandbox.handle.id, layer = layer.digest, phases = ?packed.phases, "sandbox packed");
        }
        packed
    });
    let packed = packing.await.map_err(|e| internal("the pack met a defect in the edge", &e))??;
    Ok(answer(StatusCode::CREATED, &packed))
}

/// What the image is to say of itself.
fn config(request: &PackRequest, kind: LayerKind) -> Result<ImageSettings, ApiError> {
    let Some(config) = &request.config else { return Ok(ImageSettings::default()) };
    if kind != LayerKind::Base {
        return Err(invalid_field("config", format!("config is of an image, and the kind is {kind}")));
    }
    check_env(&config.env)?;
    if let Some(dir) = &config.working_dir {
        check_path("config.working_dir", dir)?;
        if !dir.starts_with('/') {
            let message = format!("config.working_dir is {dir:?}; it must be an absolute path");
            return Err(invalid_field("config.working_dir", message));
        }
    }
    if let Some(user) = &config.user {
        check_user("config.user", user)?;
    }
    Ok(config.clone())
}

/// The rules that a request asks for.
fn rules(request: &PackRequest) -> Result<Rules, ApiError> {
    let lists = [
        ("exclude", Effect::Exclude, None, &request.exclude),
        ("answers", Effect::Scrub, Some(ANSWERS), &request.answers),
        ("deny", Effect::Deny, None, &request.deny),
    ];
    let count: usize = lists.iter().map(|(.., patterns)| patterns.len()).sum();
    if count > PATTERNS_MAX {
        let message = format!("exclude, answers and deny have {count} patterns; {PATTERNS_MAX} is the most");
        return Err(invalid_field("exclude", message));
    }
    let mut rules = Rules::default();
    for (field, effect, name, patterns) in lists {
        for (at, pattern) in patterns.iter().enumerate() {
            let added = rules.add(effect, name.unwrap_or(pattern), pattern);
            added.map_err(|e| invalid_field(field, format!("{field}[{at}]: {e}")))?;
        }
    }
    match &request.scrub {
        None => Rules::residue_names().into_iter().for_each(|name| {
            let _there = rules.scrub(name);
        }),
        Some(names) => {
            let mut names = names.clone();
            names.sort();
            names.dedup();
            for name in names {
                if !rules.scrub(&name) {
                    let all = Rules::residue_names().join(", ");
                    let message = format!("scrub has no rule {name:?}; there are: {all}");
                    return Err(invalid_field("scrub", message));
                }
            }
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(change: serde_json::Value) -> PackRequest {
        let mut fields = json!({ "name": "x" });
        fields.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        serde_json::from_value(fields).unwrap()
    }

    #[test]
    fn all_rules_for_residue_are_applied_unless_some_are_named() {
        let all = rules(&request(json!({}))).unwrap().len();
        let caches = rules(&request(json!({ "scrub": ["caches", "caches"] }))).unwrap().len();
        assert!(0 < caches && caches < all);
        assert!(rules(&request(json!({ "scrub": [] }))).unwrap().is_empty());
        let answers = rules(&request(json!({ "scrub": [], "answers": ["/solution"] }))).unwrap();
        assert_eq!(answers.len(), 1);
    }

    #[test]
    fn what_an_image_says_of_itself_is_checked_and_is_of_an_image() {
        let checked = |kind, given: serde_json::Value| config(&request(json!({ "config": given })), kind);
        let all = json!({ "env": { "A": "1" }, "working_dir": "/w", "user": "u" });
        assert_eq!(checked(LayerKind::Base, all.clone()).unwrap().env["A"], "1");
        assert_eq!(config(&request(json!({})), LayerKind::Toolkit).unwrap(), ImageSettings::default());
        for (field, kind, given) in [
            ("config", LayerKind::Workspace, all),
            ("env", LayerKind::Base, json!({ "env": { "A=B": "" } })),
            ("config.working_dir", LayerKind::Base, json!({ "working_dir": "w" })),
            ("config.user", LayerKind::Base, json!({ "user": "a b" })),
        ] {
            assert_eq!(checked(kind, given).unwrap_err().0.detail["field"], field);
        }
    }

    #[test]
    fn what_is_wrong_with_rules_names_its_field() {
        let many: Vec<_> = (0..=PATTERNS_MAX).map(|n| n.to_string()).collect();
        for (field, change) in [
            ("exclude", json!({ "exclude": ["ok", "a/../b"] })),
            ("deny", json!({ "deny": ["["] })),
            ("answers", json!({ "answers": [""] })),
            ("scrub", json!({ "scrub": ["everything"] })),
            ("exclude", json!({ "deny": many })),
        ] {
            let error = rules(&request(change)).unwrap_err();
            assert_eq!(error.0.detail["field"], field, "{error:?}");
        }
        let error = rules(&request(json!({ "scrub": ["everything"] }))).unwrap_err();
        assert!(error.0.message.contains("caches/python"), "{error:?}");
        assert!(serde_json::from_value::<PackRequest>(json!({ "name": "x", "quiesce": "wait" })).is_err());
    }
}
