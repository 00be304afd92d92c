//! What is kept, a row each.

use dsec_model::iam::{Amounts, Grant, GrantId, Grantor, IdentityId, Permissions, ProjectPath};
use serde::de::DeserializeOwned;
use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use crate::error::IamError;
use crate::secret;

/// `created_by` and `given_by` of what the cluster's own key did.
const CLUSTER: i64 = 0;

/// What somebody is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityKind {
    /// A person.
    Person,
    /// A program that works on behalf of a team.
    Service,
    /// A model's.
    Agent,
}

impl IdentityKind {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Person, Self::Service, Self::Agent];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Person => "person",
            Self::Service => "service",
            Self::Agent => "agent",
        }
    }
}

/// What a key is narrowed to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// This project and all in it; none: wherever its identity may.
    pub project: Option<ProjectPath>,
    /// These at most; none: whatever its identity may.
    pub permissions: Option<Permissions>,
}

/// A project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectRecord {
    /// Its way from the root.
    pub path: ProjectPath,
    /// What anybody may hold in it at most.
    pub ceiling: Option<Permissions>,
    /// What it and all in it may use.
    pub quota: Amounts,
    /// When it was made, Unix ms.
    pub created_ms: u64,
    /// By whom; none: with the cluster's key.
    pub created_by: Option<IdentityId>,
    /// The change that it was last written by.
    pub(crate) version: i64,
    pub(crate) removed: bool,
}

/// Somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityRecord {
    /// Their number.
    pub id: IdentityId,
    /// The project they belong to: who manages identities there manages them.
    pub project: ProjectPath,
    /// Their name, one of a kind in the project.
    pub name: String,
    /// What they are.
    pub kind: IdentityKind,
    /// When they were made, Unix ms.
    pub created_ms: u64,
    /// By whom; none: with the cluster's key.
    pub created_by: Option<IdentityId>,
    pub(crate) removed: bool,
}

/// A key, without what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    /// Its id, which may be told.
    pub id: String,
    /// Whose it is.
    pub identity: IdentityId,
    pub(crate) sha256: [u8; 32],
    /// What it is for, in its maker's words.
    pub name: String,
    /// What it is narrowed to.
    pub bounds: Bounds,
    /// When it was made, Unix ms.
    pub created_ms: u64,
    /// By whom; none: with the cluster's key.
    pub created_by: Option<IdentityId>,
    /// When it ends, Unix ms.
    pub expires_ms: Option<u64>,
    pub(crate) removed: bool,
}

/// A grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantRecord {
    /// Its number.
    pub id: GrantId,
    /// What it gives.
    pub grant: Grant,
    /// When it was given, Unix ms.
    pub created_ms: u64,
    pub(crate) removed: bool,
}

/// One row to write.
#[derive(Debug, Clone)]
pub(crate) enum Record {
    Project(ProjectRecord),
    Identity(IdentityRecord),
    Key(KeyRecord),
    Grant(GrantRecord),
}

/// Reads a row of one table.
type ReadRow = fn(&AnyRow) -> Result<Record, IamError>;

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn identity_number(identity: Option<IdentityId>) -> i64 {
    identity.map_or(CLUSTER, |id| number(id.0))
}

fn identity_of(number: i64) -> Option<IdentityId> {
    Some(number).filter(|number| *number != CLUSTER).map(|number| IdentityId(number.cast_unsigned()))
}

fn json<T: serde::Serialize>(value: &T) -> Result<String, IamError> {
    serde_json::to_string(value).map_err(|error| IamError::Row(error.to_string()))
}

fn of_json<T: DeserializeOwned>(text: &str) -> Result<T, IamError> {
    serde_json::from_str(text).map_err(|error| IamError::Row(format!("{text:?}: {error}")))
}

fn unsigned(row: &AnyRow, column: &str) -> Result<u64, IamError> {
    Ok(row.try_get::<i64, _>(column)?.cast_unsigned())
}

fn path(row: &AnyRow, column: &str) -> Result<ProjectPath, IamError> {
    let text: String = row.try_get(column)?;
    text.parse().map_err(|error: dsec_model::iam::ProjectError| IamError::Row(error.to_string()))
}

fn removed(row: &AnyRow) -> Result<bool, IamError> {
    Ok(row.try_get::<i64, _>("removed")? != 0)
}

impl Record {
    /// Writes it, as of a version.
    pub(crate) async fn write(&self, tx: &mut AnyConnection, version: i64) -> Result<(), IamError> {
        let query = match self {
            Self::Project(it) => sqlx::query(
                "INSERT INTO projects (path, ceiling, quota, created_ms, created_by, removed, version) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (path) DO UPDATE SET \
                 ceiling = excluded.ceiling, quota = excluded.quota, created_ms = excluded.created_ms, \
                 created_by = excluded.created_by, removed = excluded.removed, version = excluded.version",
            )
            .bind(it.path.as_str().to_owned())
            .bind(it.ceiling.as_ref().map(json).transpose()?)
            .bind(json(&it.quota)?)
            .bind(number(it.created_ms))
            .bind(identity_number(it.created_by))
            .bind(i64::from(it.removed)),
            Self::Identity(it) => sqlx::query(
                "INSERT INTO identities (id, project, name, kind, created_ms, created_by, removed, version) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO UPDATE SET \
                 removed = excluded.removed, version = excluded.version",
            )
            .bind(number(it.id.0))
            .bind(it.project.as_str().to_owned())
            .bind(it.name.clone())
            .bind(it.kind.as_str())
            .bind(number(it.created_ms))
            .bind(identity_number(it.created_by))
            .bind(i64::from(it.removed)),
            Self::Key(it) => sqlx::query(
                "INSERT INTO api_keys (id, identity, sha256, name, project, permissions, created_ms, \
                 created_by, expires_ms, removed, version) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (id) DO UPDATE SET \
                 removed = excluded.removed, version = excluded.version",
            )
            .bind(it.id.clone())
            .bind(number(it.identity.0))
            .bind(secret::hex(&it.sha256))
            .bind(it.name.clone())
            .bind(it.bounds.project.as_ref().map(|project| project.as_str().to_owned()))
            .bind(it.bounds.permissions.as_ref().map(json).transpose()?)
            .bind(number(it.created_ms))
            .bind(identity_number(it.created_by))
            .bind(it.expires_ms.map(number))
            .bind(i64::from(it.removed)),
            Self::Grant(it) => sqlx::query(
                "INSERT INTO grants (id, identity, project, permissions, given_by, created_ms, removed, version) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO UPDATE SET \
                 removed = excluded.removed, version = excluded.version",
            )
            .bind(number(it.id.0))
            .bind(number(it.grant.to.0))
            .bind(it.grant.project.as_str().to_owned())
            .bind(json(&it.grant.permissions)?)
            .bind(match it.grant.by {
                Grantor::Cluster => CLUSTER,
                Grantor::Identity(id) => number(id.0),
            })
            .bind(number(it.created_ms))
            .bind(i64::from(it.removed)),
        };
        query.bind(version).execute(tx).await?;
        Ok(())
    }

    /// All rows that were written after a version.
    pub(crate) async fn newer(tx: &mut AnyConnection, version: i64) -> Result<Vec<Self>, IamError> {
        let mut records = Vec::new();
        let tables: [(&str, ReadRow); 4] = [
            ("SELECT * FROM projects WHERE version > $1", Self::project),
            ("SELECT * FROM identities WHERE version > $1", Self::identity),
            ("SELECT * FROM api_keys WHERE version > $1", Self::key),
            ("SELECT * FROM grants WHERE version > $1 ORDER BY id", Self::grant),
        ];
        for (query, read) in tables {
            for row in sqlx::query(query).bind(version).fetch_all(&mut *tx).await? {
                records.push(read(&row)?);
            }
        }
        Ok(records)
    }

    fn project(row: &AnyRow) -> Result<Self, IamError> {
        let ceiling: Option<String> = row.try_get("ceiling")?;
        Ok(Self::Project(ProjectRecord {
            path: path(row, "path")?,
            ceiling: ceiling.as_deref().map(of_json).transpose()?,
            quota: of_json(&row.try_get::<String, _>("quota")?)?,
            created_ms: unsigned(row, "created_ms")?,
            created_by: identity_of(row.try_get("created_by")?),
            version: row.try_get("version")?,
            removed: removed(row)?,
        }))
    }

    fn identity(row: &AnyRow) -> Result<Self, IamError> {
        let kind: String = row.try_get("kind")?;
        let known = IdentityKind::ALL.into_iter().find(|known| known.as_str() == kind);
        Ok(Self::Identity(IdentityRecord {
            id: IdentityId(unsigned(row, "id")?),
            project: path(row, "project")?,
            name: row.try_get("name")?,
            kind: known.ok_or_else(|| IamError::Row(format!("the kind {kind:?}")))?,
            created_ms: unsigned(row, "created_ms")?,
            created_by: identity_of(row.try_get("created_by")?),
            removed: removed(row)?,
        }))
    }

    fn key(row: &AnyRow) -> Result<Self, IamError> {
        let sha256: String = row.try_get("sha256")?;
        let permissions: Option<String> = row.try_get("permissions")?;
        let project: Option<String> = row.try_get("project")?;
        Ok(Self::Key(KeyRecord {
            id: row.try_get("id")?,
            identity: IdentityId(unsigned(row, "identity")?),
            sha256: secret::unhex(&sha256).ok_or_else(|| IamError::Row("a key's digest".to_owned()))?,
            name: row.try_get("name")?,
            bounds: Bounds {
                project: project.map(|_| path(row, "project")).transpose()?,
                permissions: permissions.as_deref().map(of_json).transpose()?,
            },
            created_ms: unsigned(row, "created_ms")?,
            created_by: identity_of(row.try_get("created_by")?),
            expires_ms: row.try_get::<Option<i64>, _>("expires_ms")?.map(i64::cast_unsigned),
            removed: removed(row)?,
        }))
    }

    fn grant(row: &AnyRow) -> Result<Self, IamError> {
        Ok(Self::Grant(GrantRecord {
            id: GrantId(unsigned(row, "id")?),
            grant: Grant {
                to: IdentityId(unsigned(row, "identity")?),
                project: path(row, "project")?,
                permissions: of_json(&row.try_get::<String, _>("permissions")?)?,
                by: identity_of(row.try_get("given_by")?).map_or(Grantor::Cluster, Grantor::Identity),
            },
            created_ms: unsigned(row, "created_ms")?,
            removed: removed(row)?,
        }))
    }
}
