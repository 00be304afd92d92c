//! Identities, their keys, what they were given, and who did what.

use std::sync::Arc;

use axum::RequestExt;
use axum::extract::{Path, Query};
use bytes::Bytes;
use dsec_iam::{
    AUDIT_PAGE_MAX, AuditQuery, Book, Bounds, Changed, Did, GrantRecord, IamError, IdentityKind,
    IdentityRecord, KeyRecord, NewKey,
};
use dsec_model::ErrorKind;
use dsec_model::iam::{GrantId, Grantor, IdentityId, Permission, Permissions, Role};
use dsec_proto::rest::{
    AuditEntry, AuditList, CreateGrantRequest, CreateIdentityRequest, CreateKeyRequest, Grant, GrantList,
    Identity, IdentityList, Key, UNTOLD_SERVERS, WhoAmI,
};
use http::{HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::IntoParams;

use super::call::{Called, malformed_path, note_denied, parsed};
use super::{Call, system};
use crate::app::App;
use crate::behalf::Behalf;
use crate::failure::{Failure, Reply};
use crate::{forward, rules};

/// Entries of a page when nothing is said.
const PAGE_DEFAULT: u32 = 100;

/// Who makes a change, and as what it is told.
pub(super) struct Acting {
    pub(super) app: Arc<App>,
    pub(super) behalf: Behalf,
    called: Called,
}

impl Acting {
    /// A call, and its body.
    pub(super) async fn of(call: Call) -> Result<(Self, Bytes), Failure> {
        let called = Called::of(&call.request);
        let Call { app, behalf, request } = call;
        let body = forward::whole(request.into_body()).await?;
        Ok((Self { app, behalf, called }, body))
    }

    pub(super) fn did(&self) -> Did<'_> {
        Did { caller: &self.behalf.principal.caller, request_id: &self.called.request_id }
    }

    /// A change that was not made; the audit log says so if it was denied.
    pub(super) fn failure(&self, error: IamError) -> Failure {
        let failure = Failure::from(error);
        note_denied(&self.app, &self.behalf.principal, &self.called, &failure);
        failure
    }
}

pub(super) fn answer(status: StatusCode, value: &impl Serialize) -> Reply {
    let text = serde_json::to_vec(value).map_err(|error| {
        Failure::new(ErrorKind::Internal, format!("the answer cannot be written: {error}"))
    })?;
    let mut response = system::text("application/json", text);
    *response.status_mut() = status;
    Ok(response)
}

/// What a change came to, and how many servers do not know of it yet.
pub(super) fn changed<T>(status: StatusCode, done: &Changed<T>, shown: impl FnOnce(&T) -> Value) -> Reply {
    let mut response = match status {
        StatusCode::NO_CONTENT => {
            let mut empty = axum::response::Response::default();
            *empty.status_mut() = status;
            empty
        }
        _ => answer(status, &shown(&done.made))?,
    };
    if done.told < done.servers {
        let untold = done.servers - done.told;
        response.headers_mut().insert(UNTOLD_SERVERS, HeaderValue::from(untold));
    }
    Ok(response)
}

async fn in_path(call: &mut Call) -> Result<String, Failure> {
    let Path(text) = call.request.extract_parts::<Path<String>>().await.map_err(malformed_path)?;
    Ok(text)
}

fn number(what: &'static str, text: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| {
        let message = format!("{what} is {text:?}; it must be a number");
        Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": what }))
    })
}

/// Who the key belongs to, and what it may do.
#[utoipa::path(get, path = "/v1/whoami", operation_id = "whoami", tag = "identities",
    responses((status = 200, description = "In the project that the call acts in.", body = WhoAmI)))]
pub async fn whoami(call: Call) -> Reply {
    let caller = &call.behalf.principal.caller;
    let permissions = call.app.iam.book().held(caller, &call.behalf.project);
    answer(
        StatusCode::OK,
        &WhoAmI {
            identity: caller.identity.map(|id| id.0),
            name: caller.name.clone(),
            key_id: caller.key_id.clone(),
            project: call.behalf.project.clone(),
            permissions,
        },
    )
}

/// The identities that the caller sees.
#[utoipa::path(get, path = "/v1/identities", operation_id = "list_identities", tag = "identities",
    responses((status = 200, description = "Those of the project that the call acts in, and of all in it.", body = IdentityList)))]
pub async fn list(call: Call) -> Reply {
    let book = call.app.iam.book();
    let lens = book.scope(&call.behalf.principal.caller, rules::READS).in_project(&call.behalf.project);
    let identities = book.identities().filter(|it| lens.has(&it.project)).map(shown).collect();
    drop(book);
    answer(StatusCode::OK, &IdentityList { identities })
}

/// Makes an identity, which holds nothing yet. The caller must manage identities there (`identity.manage`).
#[utoipa::path(post, path = "/v1/identities", operation_id = "create_identity", tag = "identities",
    request_body = CreateIdentityRequest,
    responses((status = 201, description = "The identity.", body = Identity)))]
pub async fn create(call: Call) -> Reply {
    let (acting, body) = Acting::of(call).await?;
    let CreateIdentityRequest { name, kind, project } = parsed(&body)?;
    let Some(kind) = IdentityKind::ALL.into_iter().find(|known| known.as_str() == kind) else {
        let message = format!("kind is {kind:?}; it must be person, service or agent");
        return Err(Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": "kind" })));
    };
    let project = project.unwrap_or_else(|| acting.behalf.project.clone());
    let made = acting.app.iam.create_identity(acting.did(), project, name, kind).await;
    changed(StatusCode::CREATED, &made.map_err(|error| acting.failure(error))?, |it| json!(shown(it)))
}

/// One identity, with what it was given and its keys.
#[utoipa::path(get, path = "/v1/identities/{identity}", operation_id = "get_identity", tag = "identities",
    params(("identity" = u64, Path, description = "Its number.")),
    responses((status = 200, description = "The identity.", body = Identity)))]
pub async fn get(mut call: Call) -> Reply {
    let text = in_path(&mut call).await?;
    let id = IdentityId(number("identity", &text)?);
    let book = call.app.iam.book();
    let caller = &call.behalf.principal.caller;
    let found = book
        .identity(id)
        .filter(|it| caller.identity == Some(id) || book.held(caller, &it.project).has(rules::READS));
    let Some(found) = found else {
        return Err(IamError::NotFound { what: "identity", name: text }.into());
    };
    let mut whole = shown(found);
    // What was given elsewhere is theirs to see who may see there.
    let sees = book.scope(caller, rules::READS);
    let is_own = caller.identity == Some(id);
    whole.grants = book
        .grants()
        .filter(|it| it.grant.to == id && (is_own || sees.has(&it.grant.project)))
        .map(|it| grant(&book, it))
        .collect();
    if is_own || book.held(caller, &found.project).has(Permission::IdentityManage) {
        whole.keys = book.keys_of(id).map(key).collect();
    }
    drop(book);
    answer(StatusCode::OK, &whole)
}

/// Removes an identity with its keys and grants. What it gave counts for nothing from then on.
#[utoipa::path(delete, path = "/v1/identities/{identity}", operation_id = "remove_identity", tag = "identities",
    params(("identity" = u64, Path, description = "Its number.")),
    responses((status = 204, description = "Removed: its keys work on no server any more.")))]
pub async fn remove(mut call: Call) -> Reply {
    let id = IdentityId(number("identity", &in_path(&mut call).await?)?);
    let (acting, _) = Acting::of(call).await?;
    let gone = acting.app.iam.remove_identity(acting.did(), id).await;
    changed(StatusCode::NO_CONTENT, &gone.map_err(|error| acting.failure(error))?, |_| json!(null))
}

/// Makes a key: for oneself, or for an identity of a project whose identities one manages, which holds no more than the caller.
#[utoipa::path(post, path = "/v1/identities/{identity}/keys", operation_id = "create_key", tag = "identities",
    params(("identity" = u64, Path, description = "Whose it is to be.")),
    request_body = CreateKeyRequest,
    responses((status = 201, description = "The key, this once.", body = Key)))]
pub async fn create_key(mut call: Call) -> Reply {
    let id = IdentityId(number("identity", &in_path(&mut call).await?)?);
    let (acting, body) = Acting::of(call).await?;
    let CreateKeyRequest { name, project, role, permissions, expires_in_s } = parsed(&body)?;
    let permissions = match (role.map(Role::permissions), permissions) {
        (Some(role), Some(some)) => Some(role & some),
        (role, some) => role.or(some),
    };
    let bounds = Bounds { project, permissions };
    let life_ms = expires_in_s.map(|s| s.saturating_mul(1000));
    let made = acting.app.iam.create_key(acting.did(), id, name, bounds, life_ms).await;
    changed(StatusCode::CREATED, &made.map_err(|error| acting.failure(error))?, |made: &NewKey| {
        json!(Key { key: Some(made.key.clone()), ..key(&made.record) })
    })
}

/// Revokes a key.
#[utoipa::path(delete, path = "/v1/keys/{key}", operation_id = "revoke_key", tag = "identities",
    params(("key" = String, Path, description = "Its id.")),
    responses((status = 204, description = "It works on no server any more.")))]
pub async fn revoke_key(mut call: Call) -> Reply {
    let id = in_path(&mut call).await?;
    let (acting, _) = Acting::of(call).await?;
    let gone = acting.app.iam.revoke_key(acting.did(), &id).await;
    changed(StatusCode::NO_CONTENT, &gone.map_err(|error| acting.failure(error))?, |_| json!(null))
}

/// What was given in the project that the call acts in, and below.
#[utoipa::path(get, path = "/v1/grants", operation_id = "list_grants", tag = "identities",
    responses((status = 200, description = "The grants.", body = GrantList)))]
pub async fn list_grants(call: Call) -> Reply {
    let book = call.app.iam.book();
    let lens = book.scope(&call.behalf.principal.caller, rules::READS).in_project(&call.behalf.project);
    let grants = book.grants().filter(|it| lens.has(&it.grant.project)).map(|it| grant(&book, it)).collect();
    drop(book);
    answer(StatusCode::OK, &GrantList { grants })
}

/// Gives an identity something in a project, of what the caller holds there (`identity.manage` among it).
#[utoipa::path(post, path = "/v1/grants", operation_id = "create_grant", tag = "identities",
    request_body = CreateGrantRequest,
    responses((status = 201, description = "The grant.", body = Grant)))]
pub async fn create_grant(call: Call) -> Reply {
    let (acting, body) = Acting::of(call).await?;
    let CreateGrantRequest { identity, project, role, permissions } = parsed(&body)?;
    let project = project.unwrap_or_else(|| acting.behalf.project.clone());
    let permissions = role.map_or(Permissions::NONE, Role::permissions) | permissions;
    let made = acting.app.iam.grant(acting.did(), IdentityId(identity), project, permissions).await;
    let made = made.map_err(|error| acting.failure(error))?;
    changed(StatusCode::CREATED, &made, |it| json!(grant(&acting.app.iam.book(), it)))
}

/// Takes a grant back, and with it all that rests on it.
#[utoipa::path(delete, path = "/v1/grants/{grant}", operation_id = "revoke_grant", tag = "identities",
    params(("grant" = u64, Path, description = "Its number.")),
    responses((status = 204, description = "It counts for nothing on any server.")))]
pub async fn revoke_grant(mut call: Call) -> Reply {
    let id = GrantId(number("grant", &in_path(&mut call).await?)?);
    let (acting, _) = Acting::of(call).await?;
    let gone = acting.app.iam.revoke_grant(acting.did(), id).await;
    changed(StatusCode::NO_CONTENT, &gone.map_err(|error| acting.failure(error))?, |_| json!(null))
}

/// Query of the audit log.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditParams {
    /// Only entries before this one: `next` of the page before.
    before: Option<String>,
    /// At most so many.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
    /// Only denials, or only what was done.
    denied: Option<bool>,
}

/// Who did what, and who was not let, in the project that the call acts in and below: the latest first. Kept for 90 days.
#[utoipa::path(get, path = "/v1/audit", operation_id = "audit", tag = "identities", params(AuditParams),
    responses((status = 200, description = "A page.", body = AuditList)))]
pub async fn audit(call: Call) -> Reply {
    let Query(AuditParams { before, limit, denied }) =
        Query::try_from_uri(call.request.uri()).map_err(|error| {
            Failure::new(ErrorKind::InvalidArgument, format!("the query is not valid: {error}"))
        })?;
    let limit = limit.unwrap_or(PAGE_DEFAULT);
    if !(1..=AUDIT_PAGE_MAX).contains(&limit) {
        let message = format!("limit is {limit}; it must be between 1 and {AUDIT_PAGE_MAX}");
        return Err(Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": "limit" })));
    }
    call.app.iam.write_denials().await?;
    let found = call.app.iam.audit(&call.behalf.may, &AuditQuery { before, limit, denied }).await?;
    let next = found.last().filter(|_| found.len() == limit as usize).map(|last| last.id.clone());
    let entries = found
        .into_iter()
        .map(|it| AuditEntry {
            id: it.id,
            at_ms: it.at_ms,
            identity: it.identity.map(|id| id.0),
            name: it.who,
            key_id: it.key_id,
            project: it.project,
            action: it.action,
            target: it.target,
            denied: it.denied,
            count: it.count,
            detail: it.detail,
            request_id: it.request_id,
        })
        .collect();
    answer(StatusCode::OK, &AuditList { entries, next })
}

fn shown(it: &IdentityRecord) -> Identity {
    Identity {
        identity: it.id.0,
        name: it.name.clone(),
        kind: it.kind.as_str().to_owned(),
        project: it.project.clone(),
        created_ms: it.created_ms,
        created_by: it.created_by.map(|id| id.0),
        grants: Vec::new(),
        keys: Vec::new(),
    }
}

fn key(it: &KeyRecord) -> Key {
    Key {
        id: it.id.clone(),
        identity: it.identity.0,
        name: it.name.clone(),
        project: it.bounds.project.clone(),
        permissions: it.bounds.permissions,
        created_ms: it.created_ms,
        expires_ms: it.expires_ms,
        key: None,
    }
}

fn grant(book: &Book, it: &GrantRecord) -> Grant {
    Grant {
        grant: it.id.0,
        identity: it.grant.to.0,
        project: it.grant.project.clone(),
        permissions: it.grant.permissions,
        counts_for: book.counts_for(it),
        given_by: match it.grant.by {
            Grantor::Cluster => None,
            Grantor::Identity(id) => Some(id.0),
        },
        created_ms: it.created_ms,
    }
}
