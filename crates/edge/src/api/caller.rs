//! On whose behalf a request comes: what control found out about its caller, in headers that are believed on the node's own socket only.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use dsec_model::iam::{ProjectPath, Scope};
use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{ApiError, CHARGE, Charge, MAY, PROJECT, SEES};
use serde_json::json;

use super::Failure;
use crate::error::{invalid, no_sandbox};
use crate::node::Node;
use crate::sandbox::Handle;

/// Who asks. A request without these headers comes from the node itself, which may do everything.
pub struct Caller {
    /// The project that the request acts in.
    pub project: ProjectPath,
    /// Where it sees sandboxes.
    pub sees: Scope,
    /// Where it may do what it asks for.
    pub may: Scope,
    /// What a create is charged with.
    pub charge: Option<Charge>,
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let sees = header(parts, SEES)?.unwrap_or_else(Scope::everything);
        Ok(Self {
            project: header(parts, PROJECT)?.unwrap_or_else(ProjectPath::root),
            may: header(parts, MAY)?.unwrap_or_else(|| sees.clone()),
            sees,
            charge: header(parts, CHARGE)?,
        })
    }
}

fn header<T: FromStr<Err: Display>>(parts: &Parts, name: &str) -> Result<Option<T>, ApiError> {
    let Some(value) = parts.headers.get(name) else { return Ok(None) };
    let text = value.to_str().map_err(|_| invalid(format!("the header {name} is not visible ASCII")))?;
    text.parse().map(Some).map_err(|error| invalid(format!("the header {name} is {text:?}: {error}")))
}

impl Caller {
    /// Whether the caller sees a sandbox of the node.
    pub fn sees(&self, node: &Node, id: &SandboxId) -> bool {
        node.registry.find(id).is_some_and(|handle| self.sees.has(&handle.record().project))
    }

    /// Leaves of sandboxes' ids those that the caller sees.
    pub fn leave_seen(&self, node: &Node, ids: &mut Vec<String>) {
        ids.retain(|id| id.parse().is_ok_and(|id| self.sees(node, &id)));
    }

    /// The sandbox with an id. One of a project that the caller does not see and one that never was are the same.
    ///
    /// # Errors
    /// There is none; the caller may not do this to it.
    pub fn find(&self, node: &Node, id: &str) -> Result<Arc<Handle>, ApiError> {
        let handle = node.registry.get(id)?;
        let record = handle.record();
        if !self.sees.has(&record.project) {
            return Err(no_sandbox(id));
        }
        if !self.may.has(&record.project) {
            let message = format!("the key may not do this to sandboxes of {}", record.project);
            return Err(ApiError::new(ErrorKind::PermissionDenied, message)
                .detail(json!({ "sandbox_id": id, "project": record.project }))
                .hint("`dsec whoami` shows what the key may do"));
        }
        Ok(handle)
    }
}
