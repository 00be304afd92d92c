//! Who did what, and who was not let.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use dsec_model::iam::{IdentityId, Scope};
use sqlx::{AnyConnection, AnyPool, Row};

use crate::book::Caller;
use crate::error::IamError;

/// Most entries of one answer.
pub const AUDIT_PAGE_MAX: u32 = 1000;
/// Rows that are looked at for one answer, at most: those of projects that the caller does not see are skipped.
const LOOKED_AT_MAX: usize = 20_000;
/// Kinds of denials that wait to be written: more are counted as one.
const DENIALS_MAX: usize = 1000;

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// Its place: later ones are greater.
    pub id: String,
    /// When, Unix ms; of several denials, the last.
    pub at_ms: u64,
    /// Who; none: with the cluster's key.
    pub identity: Option<IdentityId>,
    /// What they were called.
    pub who: String,
    /// With which key.
    pub key_id: String,
    /// The project it was about; of a denial, the one that the caller acted in.
    pub project: String,
    /// What was done, or was to be.
    pub action: String,
    /// To what.
    pub target: String,
    /// They were not let.
    pub denied: bool,
    /// How often.
    pub count: u64,
    /// More about it.
    pub detail: String,
    /// The request, as the logs have it.
    pub request_id: String,
}

/// Which entries to show.
#[derive(Debug, Clone, Default)]
pub struct AuditQuery {
    /// Those before this one.
    pub before: Option<String>,
    /// At most so many.
    pub limit: u32,
    /// Denials only, or no denials.
    pub denied: Option<bool>,
}

static LAST: AtomicU64 = AtomicU64::new(0);

impl AuditEntry {
    /// An entry of now.
    pub(crate) fn new(caller: &Caller, at_ms: u64, replica: &str) -> Self {
        let number = LAST.fetch_add(1, Ordering::Relaxed) % 1_000_000;
        Self {
            id: format!("{at_ms:013}-{number:06}-{replica}"),
            at_ms,
            identity: caller.identity,
            who: caller.name.clone(),
            key_id: caller.key_id.clone(),
            project: caller.home.to_string(),
            action: String::new(),
            target: String::new(),
            denied: false,
            count: 1,
            detail: String::new(),
            request_id: String::new(),
        }
    }

    pub(crate) async fn write(&self, tx: &mut AnyConnection) -> Result<(), IamError> {
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        sqlx::query(
            "INSERT INTO audit (id, at_ms, identity, who, key_id, project, action, target, denied, count, detail, request_id) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        )
        .bind(self.id.clone())
        .bind(number(self.at_ms))
        .bind(self.identity.map_or(0, |id| number(id.0)))
        .bind(self.who.clone())
        .bind(self.key_id.clone())
        .bind(self.project.clone())
        .bind(self.action.clone())
        .bind(self.target.clone())
        .bind(i64::from(self.denied))
        .bind(number(self.count))
        .bind(self.detail.clone())
        .bind(self.request_id.clone())
        .execute(tx)
        .await?;
        Ok(())
    }

    /// The latest entries of the projects of a scope.
    pub(crate) async fn read(
        pool: &AnyPool,
        scope: &Scope,
        query: &AuditQuery,
    ) -> Result<Vec<Self>, IamError> {
        let limit = query.limit.clamp(1, AUDIT_PAGE_MAX) as usize;
        let mut before = query.before.clone().unwrap_or_else(|| "~".to_owned());
        let (mut found, mut looked_at) = (Vec::new(), 0);
        while found.len() < limit && looked_at < LOOKED_AT_MAX {
            let rows = sqlx::query("SELECT * FROM audit WHERE id < $1 ORDER BY id DESC LIMIT 1000")
                .bind(before.clone())
                .fetch_all(pool)
                .await?;
            looked_at += rows.len();
            let Some(last) = rows.last() else { break };
            before = last.try_get("id")?;
            for row in &rows {
                let project: String = row.try_get("project")?;
                let denied = row.try_get::<i64, _>("denied")? != 0;
                let is_seen = project.parse().is_ok_and(|project| scope.has(&project));
                if !is_seen || query.denied.is_some_and(|wanted| wanted != denied) || found.len() == limit {
                    continue;
                }
                let identity: i64 = row.try_get("identity")?;
                found.push(Self {
                    id: row.try_get("id")?,
                    at_ms: row.try_get::<i64, _>("at_ms")?.cast_unsigned(),
                    identity: Some(IdentityId(identity.cast_unsigned())).filter(|id| id.0 != 0),
                    who: row.try_get("who")?,
                    key_id: row.try_get("key_id")?,
                    project,
                    action: row.try_get("action")?,
                    target: row.try_get("target")?,
                    denied,
                    count: row.try_get::<i64, _>("count")?.cast_unsigned(),
                    detail: row.try_get("detail")?,
                    request_id: row.try_get("request_id")?,
                });
            }
        }
        Ok(found)
    }

    /// Removes what is older than a time.
    pub(crate) async fn forget(pool: &AnyPool, before_ms: u64) -> Result<(), IamError> {
        let before = i64::try_from(before_ms).unwrap_or(i64::MAX);
        sqlx::query("DELETE FROM audit WHERE at_ms < $1").bind(before).execute(pool).await?;
        Ok(())
    }
}

/// A call that was not let.
#[derive(Debug, Clone)]
pub struct Denied<'a> {
    /// What it was to do, such as `POST /v1/sandboxes`.
    pub action: &'a str,
    /// To what.
    pub target: &'a str,
    /// What was missing.
    pub detail: &'a str,
    /// The request, as the logs have it.
    pub request_id: &'a str,
}

/// Denials that are not written yet: those of one key and route are one entry with a count.
#[derive(Debug, Default)]
pub struct Denials {
    waiting: Mutex<HashMap<(String, String), AuditEntry>>,
}

impl Denials {
    pub(crate) fn add(&self, caller: &Caller, denied: &Denied<'_>, at_ms: u64, replica: &str) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut place = (caller.key_id.clone(), denied.action.to_owned());
        if waiting.len() >= DENIALS_MAX && !waiting.contains_key(&place) {
            place = (String::new(), String::new());
        }
        let entry = waiting.entry(place).or_insert_with(|| AuditEntry {
            action: denied.action.to_owned(),
            denied: true,
            count: 0,
            ..AuditEntry::new(caller, at_ms, replica)
        });
        entry.count += 1;
        entry.at_ms = at_ms;
        entry.target = denied.target.chars().take(256).collect();
        denied.detail.clone_into(&mut entry.detail);
        denied.request_id.clone_into(&mut entry.request_id);
    }

    pub(crate) fn take(&self) -> Vec<AuditEntry> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *waiting).into_values().collect()
    }
}
