//! Projects, identities, keys, grants and the audit log.

use dsec_model::iam::{Amounts, Permissions, ProjectPath, Role};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// Header: servers that do not know of a change yet, because they could not be told in time. They will within seconds, or stop trusting what they know.
pub const UNTOLD_SERVERS: &str = "x-dsec-untold-servers";

/// Who a key belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// The identity's number; none: it is the cluster's own key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<u64>,
    /// What it is called.
    pub name: String,
    /// The key's id.
    pub key_id: String,
    /// The project that calls act in, unless `x-dsec-project` says another.
    #[schema(value_type = String)]
    pub project: ProjectPath,
    /// What the key may do there.
    #[schema(value_type = Vec<String>)]
    pub permissions: Permissions,
}

/// A project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Its way from the root.
    #[schema(value_type = String, example = "root/rl/job-42")]
    pub project: ProjectPath,
    /// What anybody may hold in it at most; none: whatever the projects it is in allow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub ceiling: Option<Permissions>,
    /// What it and all in it may use: `sandboxes`, `cpu_millis`, `memory_mib`, `disk_mib`, `creates_per_s`, or one of these of a backend,
    /// such as `container.sandboxes`.
    #[schema(value_type = Object)]
    pub quota: Amounts,
    /// The least of its quota and those of the projects it is in, as far as the caller sees them.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub effective: Amounts,
    /// What sandboxes in it may use now, by what nodes last said.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub used: Amounts,
    /// When it was made, Unix ms; none of the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_ms: Option<u64>,
    /// Who made it; none: with the cluster's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<u64>,
}

/// Projects, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProjectList {
    /// Those that the caller sees, in the project that the call acts in and below.
    pub projects: Vec<Project>,
}

/// Makes a project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateProjectRequest {
    /// Its way from the root; the one it is in must be there.
    #[schema(value_type = String, example = "root/rl/job-42")]
    pub project: ProjectPath,
    /// What anybody may hold in it at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub ceiling: Option<Permissions>,
    /// What it may use; what is not in it is limited by the projects it is in.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub quota: Amounts,
}

/// Changes a project. What is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ChangeProjectRequest {
    /// What anybody may hold in it at most; null: no ceiling of its own.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "said")]
    #[schema(value_type = Option<Vec<String>>)]
    pub ceiling: Option<Option<Permissions>>,
    /// All of its quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub quota: Option<Amounts>,
}

fn nothing(permissions: &Permissions) -> bool {
    permissions.is_empty()
}

/// Tells a null from what was left out.
fn said<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Permissions>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// Somebody who may have keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Its number.
    pub identity: u64,
    /// Its name.
    pub name: String,
    /// `person`, `service` or `agent`.
    pub kind: String,
    /// The project it belongs to: who manages identities there manages it.
    #[schema(value_type = String)]
    pub project: ProjectPath,
    /// When it was made, Unix ms.
    pub created_ms: u64,
    /// Who made it; none: with the cluster's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<u64>,
    /// What it was given, of one that was asked for by its number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub grants: Vec<Grant>,
    /// Its keys, of one that was asked for by its number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<Key>,
}

/// Identities, in order of their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IdentityList {
    /// Those that the caller sees, in the project that the call acts in and below.
    pub identities: Vec<Identity>,
}

/// Makes an identity. It holds nothing until it is given something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateIdentityRequest {
    /// Its name, one of a kind in its project.
    pub name: String,
    /// `person`, `service` or `agent`.
    #[serde(default = "service")]
    pub kind: String,
    /// The project it belongs to. Default: the one that the call acts in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub project: Option<ProjectPath>,
}

fn service() -> String {
    "service".to_owned()
}

/// A key, without what it is but when it was just made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Its id, which may be told.
    pub id: String,
    /// Whose it is.
    pub identity: u64,
    /// What it is for.
    pub name: String,
    /// The project that it is narrowed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub project: Option<ProjectPath>,
    /// What it is narrowed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub permissions: Option<Permissions>,
    /// When it was made, Unix ms.
    pub created_ms: u64,
    /// When it ends, Unix ms; none: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
    /// The key itself: in the answer that made it, and nowhere else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Makes a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CreateKeyRequest {
    /// What it is for.
    pub name: String,
    /// Narrows it to a project and all in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub project: Option<ProjectPath>,
    /// Narrows it to what a role may do: `owner`, `builder`, `runtime` or `viewer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub role: Option<Role>,
    /// Narrows it to these.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub permissions: Option<Permissions>,
    /// Seconds until it ends; none: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// A grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Grant {
    /// Its number: later ones are greater.
    pub grant: u64,
    /// To whom.
    pub identity: u64,
    /// Where, and in all that is in it.
    #[schema(value_type = String)]
    pub project: ProjectPath,
    /// What.
    #[schema(value_type = Vec<String>)]
    pub permissions: Permissions,
    /// What it counts for now: no more than its giver holds there, and than the projects' ceilings allow.
    #[schema(value_type = Vec<String>)]
    pub counts_for: Permissions,
    /// By whom; none: with the cluster's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_by: Option<u64>,
    /// When, Unix ms.
    pub created_ms: u64,
}

/// Grants, the oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantList {
    /// Those in the project that the call acts in and below.
    pub grants: Vec<Grant>,
}

/// Gives somebody something, of what the caller holds there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateGrantRequest {
    /// To whom.
    pub identity: u64,
    /// Where. Default: the project that the call acts in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub project: Option<ProjectPath>,
    /// What a role may do: `owner`, `builder`, `runtime` or `viewer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub role: Option<Role>,
    /// These, beside what the role may do.
    #[serde(default, skip_serializing_if = "nothing")]
    #[schema(value_type = Vec<String>)]
    pub permissions: Permissions,
}

/// One line of the audit log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Its place: later ones are greater.
    pub id: String,
    /// When, Unix ms; of several denials, the last.
    pub at_ms: u64,
    /// Who; none: with the cluster's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<u64>,
    /// What they were called.
    pub name: String,
    /// With which key.
    pub key_id: String,
    /// The project it was about; of a denial, the caller's.
    pub project: String,
    /// What was done, such as `grant.create`, or was to be done, such as `PUT /v1/images/{name}`.
    pub action: String,
    /// To what.
    pub target: String,
    /// They were not let.
    pub denied: bool,
    /// How often.
    pub count: u64,
    /// More about it; of a denial, what was missing.
    pub detail: String,
    /// The request, as `x-request-id` and the logs have it.
    pub request_id: String,
}

/// A page of the audit log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditList {
    /// The latest first.
    pub entries: Vec<AuditEntry>,
    /// `before` of the next page, where there may be one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_is_not_what_was_left_out() {
        let parsed = |text: &str| serde_json::from_str::<ChangeProjectRequest>(text).unwrap();
        assert_eq!(parsed("{}").ceiling, None);
        assert_eq!(parsed(r#"{"ceiling": null}"#).ceiling, Some(None));
        assert_eq!(parsed(r#"{"ceiling": []}"#).ceiling, Some(Some(Permissions::NONE)));
        let same = ChangeProjectRequest { ceiling: Some(None), quota: None };
        assert_eq!(parsed(&serde_json::to_string(&same).unwrap()), same);
    }
}
